//! The migration paper's versions of its cost model, on eight H20.

use super::{Experiment, sample};
use crate::observe::Observed;
use crate::paper::Paper;
use crate::results::Results;
use crate::section::{Row, Section, Table, estimate};
use crate::setup::{Arrivals, Setup};
use crate::verdict::{Expect, Verdict};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "elastic",
    setups,
    section,
};

const INTRO: &str = "\
Eight H20, each doing both phases, 850 requests as recorded (time scale 1). The paper's trace, its linear routing and its hard gate are not \
published; what is assumed for them is in the headers of `gen:elastic850` and of the policies, written before the first run.";

/// The versions in the paper's order from worst to best, with the keys of their TTFT p90.
const VERSIONS: [(&str, &str); 4] = [
    ("unified-v2", "elastic.v2.ttft.p90"),
    ("linear", "elastic.baseline.ttft.p90"),
    ("unified-v3", "elastic.v3.ttft.p90"),
    ("contention", "elastic.a.ttft.p90"),
];

fn run_of(policy: &str) -> Setup {
    Setup::new("gen:elastic850", "h20x8-dp", policy)
        .time_scale(1)
        .arrivals(Arrivals::Recorded)
        .seeds(10)
}

const OTHERS: [&str; 6] = [
    "lazy-migration",
    "lazy-migration:factor=1.2",
    "lazy-migration:trigger=average_plus",
    "lazy-migration:trigger=recent_ttft",
    "dp-cache-aware",
    "homing",
];

fn setups() -> Vec<Setup> {
    let versions = VERSIONS.map(|(policy, _)| policy);
    versions.into_iter().chain(OTHERS).map(run_of).collect()
}

fn p90(run: &Observed) -> Option<f64> {
    run.run.ttft_s.p90
}

fn section(paper: &Paper, results: &Results) -> Section {
    let mut section = Section::new("Elastic routing and migration", INTRO, setups());
    let samples = VERSIONS.map(|(policy, _)| sample(results, &run_of(policy), p90));
    for ((policy, key), ours) in VERSIONS.iter().zip(&samples) {
        let what = format!("TTFT p90, `{policy}`");
        section.row(Row::figure(paper, key, &what, Expect::Factor(2.0), ours));
    }
    let named: Vec<(&str, &crate::sample::Sample)> = VERSIONS.iter().map(|(policy, _)| *policy).zip(&samples).collect();
    let shown: Vec<String> = named
        .iter()
        .map(|(policy, ours)| format!("{policy} {}", estimate(ours, "s")))
        .collect();
    let row = Row::claim(
        paper,
        &VERSIONS.map(|(_, key)| key),
        "TTFT p90 falls from `unified-v2` over `linear` and `unified-v3` to `contention`",
        shown.join(", "),
        Verdict::falling(&named),
    );
    let hits = |policy: &str| sample(results, &run_of(policy), |run| run.run.hit_ratio);
    let v2_keeps =
        hits("unified-v2").mean() > hits("linear").mean() && hits("unified-v2").differs_from(&hits("linear"));
    section.row(row.because(
        v2_keeps,
        format!(
            "`unified-v2` finds more of its prompts in the cache than `linear`: {} against {}.",
            estimate(&hits("unified-v2"), ""),
            estimate(&hits("linear"), "")
        ),
    ));
    let errors = sample(results, &run_of("contention"), |run| Some(run.errors()));
    section.row(Row::figure(
        paper,
        "elastic.errors",
        "errors",
        Expect::AtMost(0.0),
        &errors,
    ));
    let row = Row::figure(
        paper,
        "lazy.migrations",
        "migrations that `lazy-migration` triggers at 1.5",
        Expect::AtMost(0.0),
        &moves(results, "lazy-migration"),
    );
    section.row(row);
    section.tables.push(versions(results));
    section
}

/// Turns that a trigger moved, in each run.
fn moves(results: &Results, policy: &str) -> crate::sample::Sample {
    sample(results, &run_of(policy), |run| Some(migrations(run)))
}

/// All versions, and what was not theirs.
fn versions(results: &Results) -> Table {
    let mut table = Table::new(
        "All versions",
        &[
            "policy",
            "TTFT mean",
            "TTFT p90",
            "heavy TTFT p90",
            "TPOT p90",
            "latency p50",
            "tokens max/min",
            "hit ratio",
            "moves forced",
        ],
    );
    for policy in VERSIONS.map(|(policy, _)| policy).into_iter().chain(OTHERS) {
        let at = |get: fn(&Observed) -> Option<f64>, unit: &str| estimate(&sample(results, &run_of(policy), get), unit);
        table.row(vec![
            format!("`{policy}`"),
            at(|run| run.run.ttft_s.mean, "s"),
            at(p90, "s"),
            at(|run| run.run.by_class.heavy.ttft_s.p90, "s"),
            at(|run| run.run.tpot_s.p90, "s"),
            at(|run| run.run.latency_s.p50, "s"),
            at(|run| run.run.balance.tokens_max_min, "x"),
            at(|run| run.run.hit_ratio, ""),
            estimate(&moves(results, policy), ""),
        ]);
    }
    table
}

/// Turns that a trigger moved.
fn migrations(run: &Observed) -> f64 {
    run.reasons
        .values()
        .filter(|reason| reason.contains("moves off"))
        .count() as f64
}
