//! Sessions that stay on one decode worker for ever: which of them starve there, and what the slow path costs.

use super::{Experiment, Get, company, mean, sample, sample_of_threes, stack};
use crate::observe::{Observed, is_direct, is_fallback};
use crate::paper::Paper;
use crate::rerun::{Common, STARVED_BELOW};
use crate::results::Results;
use crate::sample::Sample;
use crate::section::{Row, Section, Shared, Table, each, estimate, list, number};
use crate::setup::Setup;
use crate::verdict::{Expect, Verdict};
use homing_report::{Path, RequestRecord};
use std::collections::BTreeSet;

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "pinning",
    setups,
    section,
};

const INTRO: &str = "\
KVC v5 again. A session's append rate is the share of its turns after the first that its decode worker appended; below a fifth it starves, from
four fifths on it does well. Which sessions starve in all runs is asked of reruns, three runs of the same sessions, as in the paper. A fallback is a
later turn that completed with its prompt prefilled elsewhere.";

fn setups() -> Vec<Setup> {
    vec![stack::v5(), stack::reruns()]
}

fn section(paper: &Paper, results: &Results) -> Section {
    let mut section = Section::new("Pinned and starved sessions", INTRO, setups());
    pins(paper, results, &mut section);
    rates(paper, results, &mut section);
    same_sessions(paper, results, &mut section);
    fallback(paper, results, &mut section);
    section.tables.push(reruns(results));
    section.tables.push(by_path(results));
    section
}

fn pins(paper: &Paper, results: &Results, section: &mut Section) {
    let workers = sample(results, &stack::v5(), |run| run.run.sessions.workers_per_session_mean);
    let pinned = Verdict::shape(workers.values.iter().all(|mean| (mean - 1.0).abs() < 1e-9));
    section.row(Row::claim(
        paper,
        &["pin.workers_per_session"],
        "decode workers of a session, in every run",
        each(&workers),
        pinned,
    ));
}

/// The two ends of the histogram, and how long the sessions there get.
fn rates(paper: &Paper, results: &Results, section: &mut Section) {
    let at = |get: Get| sample(results, &stack::v5(), get);
    let mut why = why_any_size(results);
    let (mut ends, mut all, mut shown) = (0, 0, Vec::new());
    for run in results.of(&stack::v5()) {
        let histogram = run.run.sessions.append_rate_histogram;
        ends += histogram[0] + histogram[4];
        all += histogram.iter().sum::<u64>();
        shown.push(format!("{histogram:?}"));
    }
    let starved = at(|run| Some(run.run.sessions.starved as f64));
    let row = Row::claim(
        paper,
        &["pin.histogram.run1", "pin.histogram.run2", "pin.histogram.run3"],
        "sessions by append rate in fifths: over half at the two ends, and some starve in each run",
        shown[..3.min(shown.len())].join(" / "),
        Verdict::shape(ends * 2 > all && starved.values.iter().all(|starved| *starved > 0.0)),
    );
    let spared = starved.values.iter().filter(|starved| **starved == 0.0).count();
    section.row(row.because(
        spared > 0,
        format!(
            "In {spared} of {} runs none starves; sessions starved: {}.",
            starved.values.len(),
            each(&starved)
        ),
    ));
    let ratio = at(|run| {
        let sessions = &run.run.sessions;
        Some(sessions.starved_peak_tokens_mean? / sessions.lucky_peak_tokens_mean?)
    });
    let row = Row::claim(
        paper,
        &["pin.peak_ratio"],
        "longest prompt of starved by that of lucky sessions, run by run, at least 1.5",
        format!("{}: {}", estimate(&ratio, "x"), each(&ratio)),
        Verdict::of(Expect::AtLeast(1.5), None, &ratio),
    );
    section.row(why.explain(true, row));
}

/// What the runs show of sessions that starve whatever their size.
fn why_any_size(results: &Results) -> Shared {
    let failed = sample(results, &stack::v5(), |run| {
        let (failed, later) = later_turns_of_starved(run);
        (later > 0).then(|| failed as f64 / later as f64 * 100.0)
    });
    let most = failed.mean().is_some_and(|failed| failed > 50.0);
    let mut reasons = Vec::from_iter(most.then(|| {
        format!(
            "Theirs starved on the slow path, which served them; of the later turns of ours {} failed. Whoever lost its slot on a decode worker that both P take for \
             dead gets no KV there any more, whatever its size.",
            estimate(&failed, "%")
        )
    }));
    let company = sample(results, &stack::v5(), |run| {
        let (starved, lucky) = company::of_starved_and_lucky(run);
        Some(starved? / lucky?)
    });
    if company.interval().is_some_and(|[low, _]| low > 1.0) {
        reasons.push(format!(
            "It is the company more than the size: on the decode worker of a session that starves the others' prompts add up to {} what they do \
             for one that does well, and a pinned session cannot leave.",
            estimate(&company, "x")
        ));
    }
    Shared::new(reasons)
}

/// Later turns of starved sessions: those that failed, and all.
fn later_turns_of_starved(run: &Observed) -> (usize, usize) {
    let rates = run.run.sessions.append_rates.iter();
    let starved: BTreeSet<&str> = rates
        .filter(|session| session.append_rate < STARVED_BELOW)
        .map(|session| session.session.as_str())
        .collect();
    let requests = run.record.requests.iter();
    let later = requests.filter(|request| !request.first_of_agent && starved.contains(request.session_name.as_str()));
    let failed = later.clone().filter(|request| request.error.is_some()).count();
    (failed, later.count())
}

/// What three runs of the same sessions have in common.
fn same_sessions(paper: &Paper, results: &Results, section: &mut Section) {
    let common =
        |get: fn(&Common) -> Option<f64>| sample_of_threes(results, &stack::reruns(), |runs| get(&Common::of(runs)));
    let in_all = common(|common| Some(common.starved_in_all as f64));
    let chance = common(|common| Some(common.starved_by_chance));
    let in_each = sample(results, &stack::reruns(), |run| Some(run.run.sessions.starved as f64));
    let row = Row::claim(
        paper,
        &["pin.starved_in_all"],
        "sessions that starve in all of three reruns, of 52; more than by chance",
        format!("{}; by chance {}", each(&in_all), estimate(&chance, "")),
        Verdict::shape(in_all.mean() > chance.mean() && in_all.values.iter().all(|starved| *starved >= 1.0)),
    );
    let fewer = in_each.mean().is_some_and(|starved| starved < 13.0);
    let mut why = Shared::new(vec![format!(
        "In one rerun {} sessions starve, in theirs 15 to 18.",
        estimate(&in_each, "")
    )]);
    section.row(why.explain(fewer, row));
    let row = Row::figure(
        paper,
        "pin.starved_in_all",
        "their number",
        Expect::Factor(2.0),
        &in_all,
    );
    section.row(why.explain(fewer, row));
    section.row(Row::figure(
        paper,
        "pin.starved_peak",
        "longest prompt of those that starve in all three, mean",
        Expect::Within(0.25),
        &common(|common| common.starved_peak_tokens),
    ));
    section.row(Row::figure(
        paper,
        "pin.lucky_peak",
        "longest prompt of those that do well in all three, mean",
        Expect::Within(0.25),
        &common(|common| common.lucky_peak_tokens),
    ));
    let ratio = common(Common::peak_ratio);
    let row = Row::claim(
        paper,
        &["pin.peak_ratio"],
        "the one by the other, at least 1.5",
        format!("{}: {}", estimate(&ratio, "x"), each(&ratio)),
        Verdict::of(Expect::AtLeast(1.5), None, &ratio),
    );
    section.row(why_any_size(results).explain(true, row));
}

/// What a later turn takes that is prefilled elsewhere, and one that is not.
fn fallback(paper: &Paper, results: &Results, section: &mut Section) {
    let mean_of = |such: Such, seconds: Seconds| sample(results, &stack::v5(), |run| mean(&of(run, such, seconds)));
    let (slow, direct) = (mean_of(is_fallback, latency), mean_of(is_direct, latency));
    let fallbacks = sample(results, &stack::v5(), |run| {
        Some(of(run, is_fallback, latency).len() as f64)
    });
    let row = Row::figure(
        paper,
        "fallback.latency",
        "latency of a fallback, mean",
        Expect::Factor(2.0),
        &slow,
    );
    section.row(row.because(
        slow.mean() > Some(paper.figure("fallback.latency").mean()),
        format!(
            "It is that of those that completed, {} in a run; they wait for room on their decode worker.",
            estimate(&fallbacks, "")
        ),
    ));
    let row = Row::figure(
        paper,
        "direct.latency",
        "latency of a direct append, mean",
        Expect::Factor(2.0),
        &direct,
    );
    let answers = paper.figure("dp.latency.mean").mean() - paper.figure("dp.ttft.mean").mean();
    section.row(row.because(
        answers > 2.0 * paper.figure("direct.latency").mean(),
        format!(
            "By the paper's own baseline an answer takes {} s after its first token on average, more than a whole direct append there; our median is {}.",
            number(answers),
            estimate(&sample(results, &stack::v5(), |run| median(&of(run, is_direct, latency))), "s")
        ),
    ));
    let ratio = |seconds: Seconds| {
        sample(results, &stack::v5(), |run| {
            Some(mean(&of(run, is_fallback, seconds))? / mean(&of(run, is_direct, seconds))?)
        })
    };
    section.row(Row::figure(
        paper,
        "fallback.latency_ratio",
        "the one by the other",
        Expect::Factor(2.0),
        &ratio(latency),
    ));
    let row = Row::figure(
        paper,
        "fallback.ttft_ratio",
        "TTFT mean of fallbacks by that of direct appends",
        Expect::Factor(2.0),
        &ratio(ttft),
    );
    section.row(row.because(
        slow.mean().is_some(),
        format!(
            "A fallback takes {} to its first token, a direct append {}.",
            estimate(&mean_of(is_fallback, ttft), "s"),
            estimate(&mean_of(is_direct, ttft), "s")
        ),
    ));
}

/// A kind of request.
type Such = fn(&RequestRecord) -> bool;

/// A time of a request.
type Seconds = fn(&RequestRecord) -> Option<f64>;

fn latency(request: &RequestRecord) -> Option<f64> {
    Some(request.latency().as_secs_f64())
}

fn ttft(request: &RequestRecord) -> Option<f64> {
    request.ttft().map(|ttft| ttft.as_secs_f64())
}

/// A figure of those requests of a run that are such.
fn of(run: &Observed, such: Such, seconds: Seconds) -> Vec<f64> {
    let requests = run.record.requests.iter().filter(|request| such(request));
    requests.filter_map(seconds).collect()
}

/// The reruns in threes.
fn reruns(results: &Results) -> Table {
    let mut table = Table::new(
        "The same sessions again and again",
        &[
            "runs",
            "starved in each",
            "starved in all",
            "by chance",
            "longest prompt of these",
            "of those that do well in all",
        ],
    );
    for (index, runs) in results.of(&stack::reruns()).chunks_exact(3).enumerate() {
        let common = Common::of(runs);
        let in_each: Vec<f64> = common.starved_in_each.iter().map(|starved| *starved as f64).collect();
        let tokens = |peak: Option<f64>| peak.map_or_else(|| "none".to_owned(), number);
        table.row(vec![
            format!("{} to {}", index * 3 + 1, index * 3 + 3),
            list(&in_each),
            common.starved_in_all.to_string(),
            number(common.starved_by_chance),
            tokens(common.starved_peak_tokens),
            tokens(common.lucky_peak_tokens),
        ]);
    }
    table
}

/// Later turns by how they went.
fn by_path(results: &Results) -> Table {
    let mut table = Table::new(
        "Turns after a session's first, over ten seeds",
        &[
            "how",
            "requests a run",
            "TTFT mean",
            "TTFT p50",
            "latency mean",
            "latency p50",
        ],
    );
    let kinds: [(&str, Such); 3] = [
        ("direct", is_direct),
        ("fallback, seed (no KV of it was there)", |request| {
            is_fallback(request) && request.path == Some(Path::Seed)
        }),
        ("fallback, reseed (its KV was gone)", |request| {
            is_fallback(request) && request.path == Some(Path::Reseed)
        }),
    ];
    for (how, such) in kinds {
        let figure = |get: fn(&[f64]) -> Option<f64>, seconds: Seconds| {
            let ours: Sample = sample(results, &stack::v5(), |run| get(&of(run, such, seconds)));
            estimate(&ours, "s")
        };
        let count = sample(results, &stack::v5(), |run| Some(of(run, such, latency).len() as f64));
        table.row(vec![
            how.to_owned(),
            estimate(&count, ""),
            figure(mean, ttft),
            figure(median, ttft),
            figure(mean, latency),
            figure(median, latency),
        ]);
    }
    table
}

fn median(values: &[f64]) -> Option<f64> {
    homing_report::stats::quantile(&homing_report::stats::sorted(values.to_vec()), 500)
}

#[cfg(test)]
mod tests {
    use super::super::tests::four_kinds;
    use super::*;

    #[test]
    fn later_turns_of_starved_sessions_are_counted_with_those_that_failed() {
        let mut run = four_kinds();
        // Session 1 starves: its one later turn fell back. Session 0 had one append of two.
        assert_eq!(later_turns_of_starved(&run), (0, 1));
        run.record.requests[3].error = Some("transfer".to_owned());
        assert_eq!(later_turns_of_starved(&run), (1, 1));
    }

    #[test]
    fn figures_are_those_of_such_requests_alone() {
        let run = four_kinds();
        assert_eq!(
            (of(&run, is_direct, latency), of(&run, is_fallback, latency)),
            (vec![1.0], vec![5.0])
        );
        assert!(of(&run, is_direct, ttft).is_empty(), "none had a first token");
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
    }
}
