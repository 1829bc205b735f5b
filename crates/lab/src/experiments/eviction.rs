//! What an eviction frees: whole sessions with session slots, leaf blocks with the block engine, on the same traces.
//!
//! The taxonomy counts calls that free KV: with slots one session's whole own part, 67,726 tokens on average; with block
//! eviction it expects at most 500, "leaf by leaf". One choice of the block engine is one leaf block, but one call is one
//! allocation, which takes as many leaves as it needs: a step's chunk, or all that an import brings. Both are reported.

use super::{Experiment, mean, mechanisms, sample, stack, workers};
use crate::observe::Observed;
use crate::paper::Paper;
use crate::results::Results;
use crate::section::{Row, Section, Table, estimate};
use crate::setup::{Arrivals, Setup};
use crate::verdict::{Expect, Verdict};
use homing_report::logs::{EvictionCause, EvictionLine};
use homing_report::stats::{quantile, sorted};
use std::collections::BTreeSet;

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "eviction",
    setups,
    section,
};

const INTRO: &str = "\
The paper counted evictions in its E3, the run with a load floor on one prefill and three decode H200; KVC v5 is beside it. An eviction is what one
trim of a slot frees, or with the block engine what one allocation does: a step allocates for the chunk that it computes, an import for all that
comes. A choice is one decision of what goes: a slot, or a leaf block. Decode workers only.";

/// E3 is also in the section on the cold decode worker.
pub(super) fn e3() -> Setup {
    on_h200(&stack::on(stack::FOUR_H200))
}

fn e3_blocks() -> Setup {
    on_h200(&stack::with_blocks_on(stack::FOUR_H200))
}

fn on_h200(cluster: &str) -> Setup {
    Setup::new("gen:e2", cluster, &stack::router(LOAD_FLOOR))
        .time_scale(1)
        .arrivals(Arrivals::Recorded)
        .seeds(5)
}

/// K is not in the papers.
pub(super) const LOAD_FLOOR: &str = "load_floor=1000";

fn systems() -> [(&'static str, Setup); 4] {
    [
        ("E3, session slots", e3()),
        ("E3, block engine", e3_blocks()),
        ("KVC v5, session slots", stack::v5()),
        ("KVC v5, block engine", mechanisms::block_engine()),
    ]
}

fn setups() -> Vec<Setup> {
    systems().map(|(_, setup)| setup).into()
}

/// Evictions of the decode workers that have this cause; of any without one.
fn evictions(run: &Observed, cause: Option<EvictionCause>) -> Vec<&EvictionLine> {
    let lines = run.decode_evictions();
    lines.filter(|line| cause.is_none() || line.cause == cause).collect()
}

fn tokens(run: &Observed, cause: Option<EvictionCause>) -> Vec<f64> {
    evictions(run, cause).iter().map(|line| line.tokens as f64).collect()
}

fn count(run: &Observed) -> f64 {
    run.decode_evictions().count() as f64
}

/// Tokens by choices of what goes.
fn tokens_a_choice(run: &Observed) -> Option<f64> {
    let choices: u32 = run.decode_evictions().map(|line| line.decisions).sum();
    let tokens: u64 = run.decode_evictions().map(|line| line.tokens).sum();
    (choices > 0).then(|| tokens as f64 / f64::from(choices))
}

/// Sessions that lost a slot, in percent of all.
fn sessions_hit(run: &Observed) -> Option<f64> {
    let hit: BTreeSet<u64> = run.decode_evictions().filter_map(|line| line.session).collect();
    let all = run.run.sessions.count;
    (all > 0).then(|| hit.len() as f64 / all as f64 * 100.0)
}

/// Evictions of at most 500 tokens, in percent of all.
fn small(run: &Observed) -> Option<f64> {
    let sizes = tokens(run, None);
    let small = sizes.iter().filter(|tokens| **tokens <= SMALL).count();
    (!sizes.is_empty()).then(|| small as f64 / sizes.len() as f64 * 100.0)
}

/// What the paper expects of one eviction with blocks, at most.
const SMALL: f64 = 500.0;

fn section(paper: &Paper, results: &Results) -> Section {
    let mut section = Section::new("Eviction", INTRO, setups());
    storm(paper, results, &mut section);
    leaves(paper, results, &mut section);
    section.tables.push(sizes(results));
    section.tables.push(causes(results));
    section
}

/// Whole sessions go.
fn storm(paper: &Paper, results: &Results, section: &mut Section) {
    let of_e3 = |get: fn(&Observed) -> Option<f64>| sample(results, &e3(), get);
    let row = Row::figure(
        paper,
        "evict.count",
        "evictions in E3",
        Expect::Factor(3.0),
        &of_e3(|run| Some(count(run))),
    );
    section.row(workers::why_few_trims(results, &e3(), row));
    section.row(Row::figure(
        paper,
        "evict.tokens",
        "tokens that one of them frees, mean",
        Expect::Factor(2.0),
        &of_e3(|run| mean(&tokens(run, None))),
    ));
    let theirs = &paper.figure("evict.sessions").values;
    let share = theirs[0] / theirs[1] * 100.0;
    let hit = of_e3(sessions_hit);
    let row = Row::claim(
        paper,
        &["evict.sessions"],
        "sessions of E3 that lost a slot, half of all, within a factor of 1.5",
        estimate(&hit, "% of all"),
        Verdict::of(Expect::Factor(1.5), Some(share), &hit),
    );
    let few = of_e3(|run| Some(count(run)));
    let theirs = paper.figure("evict.count").mean();
    section.row(row.because(
        few.mean().is_some_and(|few| few < theirs / 3.0),
        "There are few evictions: see their number.",
    ));
    let v5 = sample(results, &stack::v5(), |run| mean(&tokens(run, None)));
    section.row(Row::claim(
        paper,
        &["evict.tokens"],
        "tokens that one eviction of KVC v5 frees: tens of thousands",
        estimate(&v5, "tokens"),
        Verdict::of(Expect::AtLeast(10_000.0), None, &v5),
    ));
}

/// Leaf blocks go.
fn leaves(paper: &Paper, results: &Results, section: &mut Section) {
    for (name, setup) in [("E3", e3_blocks()), ("KVC v5", mechanisms::block_engine())] {
        let of = |get: fn(&Observed) -> Option<f64>| sample(results, &setup, get);
        section.row(Row::figure(
            paper,
            "evict.block_tokens",
            &format!("tokens that one choice of the block engine frees, {name}"),
            Expect::AtMost(SMALL),
            &of(tokens_a_choice),
        ));
        section.row(Row::figure(
            paper,
            "evict.block_tokens",
            &format!("tokens that one step of it evicts, {name}, mean"),
            Expect::AtMost(SMALL),
            &of(|run| mean(&tokens(run, Some(EvictionCause::Step)))),
        ));
        let all = of(|run| mean(&tokens(run, None)));
        let imports = of(|run| mean(&tokens(run, Some(EvictionCause::Import))));
        let share = of(small);
        let row = Row::figure(
            paper,
            "evict.block_tokens",
            &format!("tokens that one allocation of it evicts, imports too, {name}, mean"),
            Expect::AtMost(SMALL),
            &all,
        );
        section.row(row.because(
            imports.mean() > all.mean(),
            format!(
                "An import takes the blocks for all that comes at once, so that two imports cannot hold half each of what both need, and makes room for them \
                 block by block: {} each. Of all allocations that evict {} evict at most 500.",
                estimate(&imports, "tokens"),
                estimate(&share, "%")
            ),
        ));
    }
}

/// How large evictions are.
fn sizes(results: &Results) -> Table {
    let mut table = Table::new(
        "Evictions of decode workers, a run",
        &[
            "what",
            "evictions",
            "tokens each, mean",
            "p50",
            "p90",
            "largest",
            "tokens a choice",
            "at most 500 tokens, %",
            "sessions that lost a slot, %",
        ],
    );
    for (what, setup) in systems() {
        let at = |get: fn(&Observed) -> Option<f64>| estimate(&sample(results, &setup, get), "");
        table.row(vec![
            what.to_owned(),
            at(|run| Some(count(run))),
            at(|run| mean(&tokens(run, None))),
            at(|run| quantile(&sorted(tokens(run, None)), 500)),
            at(|run| quantile(&sorted(tokens(run, None)), 900)),
            at(|run| quantile(&sorted(tokens(run, None)), 1000)),
            at(tokens_a_choice),
            at(small),
            at(sessions_hit),
        ]);
    }
    table
}

/// What the block engine evicts for.
fn causes(results: &Results) -> Table {
    let mut table = Table::new(
        "What the block engine evicts for, a run",
        &["what", "cause", "evictions", "tokens each, mean", "largest"],
    );
    for (what, setup) in [("E3", e3_blocks()), ("KVC v5", mechanisms::block_engine())] {
        for (name, cause) in [("a step", EvictionCause::Step), ("an import", EvictionCause::Import)] {
            let at = |get: fn(&[f64]) -> Option<f64>| {
                let ours = sample(results, &setup, |run| get(&tokens(run, Some(cause))));
                estimate(&ours, "")
            };
            table.row(vec![
                what.to_owned(),
                name.to_owned(),
                at(|tokens| Some(tokens.len() as f64)),
                at(mean),
                at(|tokens| tokens.iter().copied().reduce(f64::max)),
            ]);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::super::tests::{evicted, four_kinds};
    use super::*;

    #[test]
    fn slots_are_one_choice_and_blocks_are_one_each() {
        let mut run = four_kinds();
        assert_eq!(
            (tokens_a_choice(&run), small(&run), sessions_hit(&run)),
            (None, None, Some(0.0))
        );
        run.evictions = vec![
            evicted("d0", EvictionCause::Trim, 48_000, Some(7)),
            evicted("d1", EvictionCause::Trim, 24_000, Some(7)),
            // Prefill workers are not asked.
            evicted("p0", EvictionCause::Step, 240, None),
        ];
        assert_eq!(tokens_a_choice(&run), Some(36_000.0));
        assert_eq!((count(&run), small(&run)), (2.0, Some(0.0)));
        assert_eq!(sessions_hit(&run), Some(50.0), "one of two sessions, twice");
        run.evictions = vec![
            evicted("d0", EvictionCause::Step, 48, None),
            evicted("d0", EvictionCause::Step, 480, None),
            evicted("d0", EvictionCause::Import, 24_000, None),
            evicted("d1", EvictionCause::Import, 504, None),
        ];
        assert_eq!(tokens_a_choice(&run), Some(24.0));
        assert_eq!(small(&run), Some(50.0));
        assert_eq!(mean(&tokens(&run, Some(EvictionCause::Step))), Some(264.0));
        assert_eq!(sessions_hit(&run), Some(0.0));
    }
}
