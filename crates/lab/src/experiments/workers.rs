//! KVC v5 worker by worker: trims, failed transfers and peak use of each decode worker, errors of each prefill worker.

use super::{Experiment, kvc, largest_by_mean, sample, stack};
use crate::observe::{Observed, tally};
use crate::paper::Paper;
use crate::results::Results;
use crate::sample::Sample;
use crate::section::{Row, Section, Table, each, estimate, list, number, plain, range};
use crate::setup::Setup;
use crate::verdict::{Expect, Verdict};
use homing_report::logs::{EvictionCause, TransferLine};
use std::collections::BTreeSet;

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "workers",
    setups,
    section,
};

const INTRO: &str = "\
KVC v5 again. The paper read the logs of one of its runs; the tables have our run of seed 1 beside it and the range over ten seeds. A trim takes
a session's slot away. A transfer fails because its KV was not fetched within 32 s, or because its P takes its D for dead since another's was
not. The peak use of a pool is what requests and slots held of it at once.";

fn setups() -> Vec<Setup> {
    vec![stack::v5()]
}

/// A figure of each worker of a kind, in the order of the cluster.
type GetEach = fn(&Observed) -> Vec<f64>;

fn trims(run: &Observed) -> Vec<f64> {
    let trims = run
        .evictions
        .iter()
        .filter(|line| line.cause == Some(EvictionCause::Trim));
    tally(run.decode_workers(), trims.map(|line| line.worker.as_str()))
}

fn transfer_errors(run: &Observed) -> Vec<f64> {
    tally(run.decode_workers(), run.failed_transfers().map(to))
}

fn usage(run: &Observed) -> Vec<f64> {
    let decode = run.run.workers.iter().filter(|worker| worker.role != "prefill");
    decode.filter_map(|worker| worker.kv_usage_max).collect()
}

fn sent_errors(run: &Observed) -> Vec<f64> {
    tally(run.prefill_workers(), run.failed_transfers().map(from))
}

fn sent_dead(run: &Observed) -> Vec<f64> {
    tally(run.prefill_workers(), run.dead_transfers().map(from))
}

fn to(line: &TransferLine) -> &str {
    &line.to
}

fn from(line: &TransferLine) -> &str {
    &line.from
}

fn largest(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

fn smallest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

/// All workers of all runs.
fn pooled(results: &Results, get: GetEach) -> Sample {
    Sample::of(results.of(&stack::v5()).iter().flat_map(get).map(Some))
}

fn section(paper: &Paper, results: &Results) -> Section {
    let mut section = Section::new("Worker by worker", INTRO, setups());
    decoders(paper, results, &mut section);
    prefillers(paper, results, &mut section);
    section.tables.push(decode_table(paper, results));
    section.tables.push(prefill_table(paper, results));
    section
}

/// Seed 1, and the range over all.
fn shown(results: &Results, get: GetEach) -> String {
    let first = &results.of(&stack::v5())[0];
    format!(
        "{} (seed 1), {} over all",
        list(&get(first)),
        range(&pooled(results, get))
    )
}

fn decoders(paper: &Paper, results: &Results, section: &mut Section) {
    let of = |get: fn(&Observed) -> Option<f64>| sample(results, &stack::v5(), get);
    let mean_trims = of(|run| super::mean(&trims(run)));
    let row = Row::claim(
        paper,
        &["workers.trims"],
        "trims of each D; their mean within a factor of 3",
        format!("{}; mean {}", shown(results, trims), estimate(&mean_trims, "")),
        Verdict::of(
            Expect::Factor(3.0),
            Some(paper.figure("workers.trims").mean()),
            &mean_trims,
        ),
    );
    section.row(why_few_trims(results, &stack::v5(), row));
    let failed = of(|run| Some(run.failed_transfers().count() as f64));
    let row = Row::figure(
        paper,
        "workers.transfer_errors.sum",
        "failed transfers of all D",
        Expect::Factor(2.0),
        &failed,
    );
    let more = failed.mean() > Some(paper.figure("workers.transfer_errors.sum").mean());
    section.row(kvc::why_more_errors(results, &stack::v5()).explain(more, row));
    let theirs = largest_by_mean(&paper.figure("workers.transfer_errors").values);
    let uneven = of(|run| largest_by_mean(&transfer_errors(run)));
    section.row(Row::claim(
        paper,
        &["workers.transfer_errors"],
        &format!(
            "failed transfers of each D, the worst by the mean ({} there) at least 1.5",
            theirs.map_or_else(|| "none".to_owned(), number)
        ),
        format!("{}; {}", shown(results, transfer_errors), estimate(&uneven, "x")),
        Verdict::of(Expect::AtLeast(1.5), None, &uneven),
    ));
    let errors_by_trims = of(|run| {
        let trims: f64 = trims(run).iter().sum();
        (trims > 0.0).then(|| transfer_errors(run).iter().sum::<f64>() / trims)
    });
    section.row(Row::claim(
        paper,
        &["workers.transfer_errors", "workers.trims"],
        "failed transfers by trims of all D: more than one",
        estimate(&errors_by_trims, "x"),
        Verdict::shape(errors_by_trims.mean().is_some_and(|ratio| ratio > 1.0)),
    ));
    let fullest = of(|run| Some(smallest(&usage(run))));
    section.row(Row::claim(
        paper,
        &["workers.usage"],
        "peak use of each pool, the least of a run at least 0.97",
        format!("{}; least {}", shown(results, usage), estimate(&fullest, "")),
        Verdict::of(Expect::AtLeast(0.97), None, &fullest),
    ));
}

/// What the runs show of slots that are not trimmed.
pub(super) fn why_few_trims(results: &Results, setup: &Setup, row: Row) -> Row {
    let trims = sample(results, setup, |run| Some(trims(run).iter().sum()));
    let failed = sample(results, setup, |run| Some(run.failed_transfers().count() as f64));
    row.because(
        failed.mean() > trims.mean() && failed.differs_from(&trims),
        format!(
            "A seed that finds no room waits and fails more often than a slot is trimmed for it: {} failed transfers and {} trims in a run. A transfer that \
             fails at once wants no room.",
            estimate(&failed, ""),
            estimate(&trims, "")
        ),
    )
}

fn prefillers(paper: &Paper, results: &Results, section: &mut Section) {
    let of = |get: fn(&Observed) -> Option<f64>| sample(results, &stack::v5(), get);
    let requests = of(|run| {
        let requests = run.prefill_requests();
        Some(largest(&requests) / smallest(&requests).max(1.0))
    });
    section.row(Row::claim(
        paper,
        &["pside.requests"],
        "requests of each P (theirs count direct ones too), most by fewest at most 1.05",
        format!(
            "{}; {}",
            shown(results, Observed::prefill_requests),
            estimate(&requests, "x")
        ),
        Verdict::of(Expect::AtMost(1.05), None, &requests),
    ));
    let skew = of(|run| Some(largest(&sent_errors(run)) / smallest(&sent_errors(run)).max(1.0)));
    let row = Row::claim(
        paper,
        &["pside.transfer_errors"],
        "failed transfers of the worse P by those of the better, at least 10",
        format!("{}: {}", estimate(&skew, "x"), each(&skew)),
        Verdict::of(Expect::AtLeast(10.0), None, &skew),
    );
    section.row(why_even(results, row));
    let dead = of(|run| {
        let failed: f64 = sent_errors(run).iter().sum();
        (failed > 0.0).then(|| sent_dead(run).iter().sum::<f64>() / failed * 100.0)
    });
    section.row(Row::claim(
        paper,
        &["pside.dead", "pside.transfer_errors"],
        "of these because the peer counts as dead: most (98% there)",
        format!("{}; {}", shown(results, sent_dead), estimate(&dead, "%")),
        Verdict::shape(dead.mean().is_some_and(|dead| dead > 50.0)),
    ));
}

/// What the runs show of links that die: on which P, on which D.
fn why_even(results: &Results, row: Row) -> Row {
    let of = |get: fn(&Observed) -> Option<f64>| sample(results, &stack::v5(), get);
    let links = of(|run| Some(dead_links(run).len() as f64));
    let pairs = of(|run| {
        let links = dead_links(run);
        let receivers: BTreeSet<&str> = links.iter().map(|(_, to)| *to).collect();
        let both = |to: &&&str| links.iter().filter(|(_, other)| other == *to).count() > 1;
        (!receivers.is_empty()).then(|| receivers.iter().filter(both).count() as f64 / receivers.len() as f64 * 100.0)
    });
    let uneven = of(|run| largest_by_mean(&transfer_errors(run)));
    row.because(
        pairs.mean().is_some_and(|both| both > 50.0),
        format!(
            "{} links died in a run, and of the decode workers that one P took for dead {} were taken for dead by the other too: prompts go to both P in turn, \
             and what keeps KV from being fetched lies with D.",
            estimate(&links, ""),
            estimate(&pairs, "%")
        ),
    )
    .because(
        uneven.mean().is_some_and(|most| most > 1.5),
        format!("The errors gather at decode workers: the worst has {} times the mean.", estimate(&uneven, "")),
    )
}

/// The links over which a transfer failed because its receiver counted as dead: giver and receiver.
fn dead_links(run: &Observed) -> BTreeSet<(&str, &str)> {
    run.dead_transfers().map(|line| (from(line), to(line))).collect()
}

/// Theirs and ours, a column a worker.
fn beside(title: &str, names: &[&str], rows: &[(&str, Vec<String>)]) -> Table {
    let heads: Vec<&str> = std::iter::once("").chain(names.iter().copied()).collect();
    let mut table = Table::new(title, &heads);
    for (what, cells) in rows {
        table.row(
            std::iter::once((*what).to_owned())
                .chain(cells.iter().cloned())
                .collect(),
        );
    }
    table
}

fn theirs(paper: &Paper, key: &str) -> Vec<String> {
    paper.figure(key).values.iter().map(|value| plain(*value)).collect()
}

fn ours(results: &Results, get: GetEach) -> Vec<String> {
    get(&results.of(&stack::v5())[0]).into_iter().map(number).collect()
}

/// The range of each worker over all seeds.
fn ranges(results: &Results, get: GetEach) -> Vec<String> {
    let runs: Vec<Vec<f64>> = results.of(&stack::v5()).iter().map(get).collect();
    let workers = runs.first().map_or(0, Vec::len);
    (0..workers)
        .map(|worker| range(&Sample::of(runs.iter().map(|run| run.get(worker).copied()))))
        .collect()
}

fn decode_table(paper: &Paper, results: &Results) -> Table {
    beside(
        "Decode workers: theirs, ours with seed 1, and the range over ten seeds",
        &["d0", "d1", "d2", "d3", "d4", "d5"],
        &[
            ("trims, theirs", theirs(paper, "workers.trims")),
            ("trims, seed 1", ours(results, trims)),
            ("trims, ten seeds", ranges(results, trims)),
            ("failed transfers, theirs", theirs(paper, "workers.transfer_errors")),
            ("failed transfers, seed 1", ours(results, transfer_errors)),
            ("failed transfers, ten seeds", ranges(results, transfer_errors)),
            ("peak use of the pool, theirs", theirs(paper, "workers.usage")),
            ("peak use of the pool, seed 1", ours(results, usage)),
            ("peak use of the pool, ten seeds", ranges(results, usage)),
        ],
    )
}

fn prefill_table(paper: &Paper, results: &Results) -> Table {
    beside(
        "Prefill workers: theirs, ours with seed 1, and the range over ten seeds",
        &["p0", "p1"],
        &[
            ("requests, theirs", theirs(paper, "pside.requests")),
            ("requests, seed 1", ours(results, Observed::prefill_requests)),
            ("requests, ten seeds", ranges(results, Observed::prefill_requests)),
            ("failed transfers, theirs", theirs(paper, "pside.transfer_errors")),
            ("failed transfers, seed 1", ours(results, sent_errors)),
            ("failed transfers, ten seeds", ranges(results, sent_errors)),
            ("of these peer dead, theirs", theirs(paper, "pside.dead")),
            ("of these peer dead, seed 1", ours(results, sent_dead)),
            ("of these peer dead, ten seeds", ranges(results, sent_dead)),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::{evicted, failed, four_kinds};
    use super::*;

    #[test]
    fn each_worker_has_what_failed_there() {
        let mut run = four_kinds();
        run.transfers = vec![
            failed("p0", "d1", "Failed to send kv chunk"),
            failed("p0", "d1", "Decode instance could be dead"),
            failed("p1", "d0", "Decode instance could be dead"),
            failed("p0", "d1", "Decode instance could be dead"),
        ];
        assert_eq!(transfer_errors(&run), [1.0, 3.0]);
        assert_eq!((sent_errors(&run), sent_dead(&run)), (vec![3.0, 1.0], vec![2.0, 1.0]));
        assert_eq!(dead_links(&run), [("p0", "d1"), ("p1", "d0")].into());
    }

    #[test]
    fn trims_are_evictions_of_slots() {
        let mut run = four_kinds();
        run.evictions = vec![
            evicted("d1", EvictionCause::Trim, 48, Some(1)),
            evicted("d1", EvictionCause::Import, 48, None),
        ];
        assert_eq!(trims(&run), [0.0, 1.0]);
    }
}
