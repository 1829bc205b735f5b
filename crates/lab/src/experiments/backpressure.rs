//! The sweep that the validation report prepared and could not run: pauses that a full decode worker asks for.

use super::{Experiment, Get, dp, kvc, sample, stack};
use crate::observe::Observed;
use crate::paper::Paper;
use crate::results::Results;
use crate::sample::Sample;
use crate::section::{Row, Section, Shared, Table, each, estimate};
use crate::setup::Setup;
use crate::verdict::{Expect, Verdict};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "backpressure",
    setups,
    section,
};

const INTRO: &str = "\
E1 to E4 as the paper's smoke sweep has them: KVC v5; the same with backpressure, a pause of up to 2 s that a decode worker's last answer asks for
by the paper's formula; that at time scale 1; the baseline at time scale 1. It ran none of them, so what E2 to E4 should give is its expectation. Its
sweep used a part of the trace, ours has all of it.";

const SEEDS: u64 = 5;

fn e1() -> Setup {
    stack::v5().seeds(SEEDS)
}

fn e2() -> Setup {
    stack::v5_routed(&stack::router("backpressure=on"), SEEDS)
}

fn e3() -> Setup {
    e2().time_scale(1).seeds(3)
}

fn e4() -> Setup {
    dp::baseline(stack::POOL).time_scale(1).seeds(3)
}

fn sweep() -> [(&'static str, Setup); 4] {
    [
        ("E1: KVC v5", e1()),
        ("E2: with backpressure", e2()),
        ("E3: with backpressure, time scale 1", e3()),
        ("E4: data-parallel, time scale 1", e4()),
    ]
}

fn setups() -> Vec<Setup> {
    sweep().map(|(_, setup)| setup).into()
}

fn failed_transfers(run: &Observed) -> Option<f64> {
    Some(run.failed_transfers().count() as f64)
}

fn section(paper: &Paper, results: &Results) -> Section {
    let mut section = Section::new("Backpressure, E1 to E4", INTRO, setups());
    let [off, on] = [e1(), e2()].map(|setup| sample(results, &setup, failed_transfers));
    let row = Row::figure(
        paper,
        "backpressure.transfer_errors.off",
        "failed transfers of E1",
        Expect::Factor(2.0),
        &off,
    );
    let more = off.mean() > Some(paper.figure("backpressure.transfer_errors.off").mean());
    section.row(kvc::why_more_errors(results, &e1()).explain(more, row));
    let row = Row::figure(
        paper,
        "backpressure.transfer_errors.on",
        "failed transfers of E2",
        Expect::AtMost(50.0),
        &on,
    );
    let mut why = why_not(results);
    section.row(why.explain(true, row));
    section.row(why.explain(true, reduction(paper, results)));
    let row = Row::open(
        "the pauses make E2 distinguishable from E1 in failed transfers",
        format!("{} against {}", estimate(&on, ""), estimate(&off, "")),
        Verdict::shape(off.differs_from(&on)),
    );
    section.row(why.explain(true, row));
    first_error(paper, results, &mut section);
    real_gaps(results, &mut section);
    section.tables.push(table(results));
    section
}

/// By how much errors fall from E1 to E2, seed by seed.
fn reduction(paper: &Paper, results: &Results) -> Row {
    let pairs = results.of(&e1()).iter().zip(results.of(&e2()));
    let reduction = pairs.map(|(off, on)| (off.errors() > 0.0).then(|| (1.0 - on.errors() / off.errors()) * 100.0));
    Row::figure(
        paper,
        "backpressure.error_reduction",
        "errors of E2 below those of E1",
        Expect::AtLeast(70.0),
        &Sample::of(reduction),
    )
}

/// What the runs show of errors that pauses do not prevent.
fn why_not(results: &Results) -> Shared {
    let dead = sample(results, &e2(), |run| {
        let failed = run.failed_transfers().count();
        (failed > 0).then(|| run.dead_transfers().count() as f64 / failed as f64 * 100.0)
    });
    let most = dead.mean().is_some_and(|dead| dead > 50.0);
    Shared::new(Vec::from_iter(most.then(|| {
        format!(
            "{} of E2's failed transfers go over links that are on a list of dead peers, and no pause takes a link off it; before that a transfer has waited \
             its 32 s, and a pause lasts 2 s at most and is asked for once a turn.",
            estimate(&dead, "%")
        )
    })))
}

/// When in a run errors begin.
fn first_error(paper: &Paper, results: &Results, section: &mut Section) {
    let shares = |setup: &Setup| {
        sample(results, setup, |run| {
            run.run.first_error_at_share.map(|share| share * 100.0)
        })
    };
    let first = shares(&stack::v5());
    let requests = sample(results, &stack::v5(), before_first_error);
    section.row(Row::claim(
        paper,
        &["backpressure.first_error_share"],
        "first error of a run of KVC v5, in % of its time; within a factor of 1.5",
        format!(
            "{}: {}; after {} of its requests",
            estimate(&first, "%"),
            each(&first),
            estimate(&requests, "%")
        ),
        Verdict::of(
            Expect::Factor(1.5),
            Some(paper.figure("backpressure.first_error_share").mean()),
            &first,
        ),
    ));
}

/// Requests that were sent before the first one failed, in percent of all.
fn before_first_error(run: &Observed) -> Option<f64> {
    let requests = &run.record.requests;
    let first = requests
        .iter()
        .filter(|request| request.error.is_some())
        .map(|request| request.end)
        .min()?;
    let before = requests.iter().filter(|request| request.arrival < first).count();
    Some(before as f64 / requests.len() as f64 * 100.0)
}

/// E3 against E4, the comparison that the paper calls the key to its most important open question.
fn real_gaps(results: &Results, section: &mut Section) {
    let latency = |setup: Setup| sample(results, &setup, |run| run.run.latency_s.mean);
    let (kvc, dp) = (latency(e3()), latency(e4()));
    let errors = |setup: Setup| sample(results, &setup, |run| Some(run.errors()));
    section.row(Row::open(
        "KVC with backpressure loses to the baseline at time scale 1 too (E3 against E4), in latency mean or in errors",
        format!(
            "{} against {}; errors {} against {}",
            estimate(&kvc, "s"),
            estimate(&dp, "s"),
            estimate(&errors(e3()), ""),
            estimate(&errors(e4()), "")
        ),
        Verdict::shape(
            kvc.mean() > dp.mean() && kvc.differs_from(&dp)
                || errors(e3()).mean() > errors(e4()).mean() && errors(e3()).differs_from(&errors(e4())),
        ),
    ));
}

fn table(results: &Results) -> Table {
    let mut table = Table::new(
        "The sweep",
        &[
            "what",
            "errors",
            "failed transfers",
            "first error in % of the run",
            "turns that waited in the router",
            "latency mean",
            "latency p99",
            "TTFT p50",
            "TTFT mean",
        ],
    );
    for (what, setup) in sweep() {
        let at = |get: Get, unit: &str| estimate(&sample(results, &setup, get), unit);
        table.row(vec![
            what.to_owned(),
            at(|run| Some(run.errors()), ""),
            at(failed_transfers, ""),
            at(|run| run.run.first_error_at_share.map(|share| share * 100.0), ""),
            at(|run| Some(run.pauses.len() as f64), ""),
            at(|run| run.run.latency_s.mean, "s"),
            at(|run| run.run.latency_s.p99, "s"),
            at(|run| run.run.ttft_s.p50, "s"),
            at(|run| run.run.ttft_s.mean, "s"),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::super::tests::four_kinds;
    use super::*;

    #[test]
    fn requests_before_the_first_error_are_those_sent_before_it_ended() {
        let mut run = four_kinds();
        // It was the last of five to be sent, at 10 s, and failed at 11 s.
        assert_eq!(before_first_error(&run), Some(100.0));
        run.record.requests[1].error = Some("transfer".to_owned());
        // Sent at 0 s and 1 s, failed at 3 s.
        assert_eq!(before_first_error(&run), Some(40.0));
        run.record.requests.iter_mut().for_each(|request| request.error = None);
        assert_eq!(before_first_error(&run), None);
    }
}
