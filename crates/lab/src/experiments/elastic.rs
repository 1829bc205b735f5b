//! The migration paper's versions of its cost model, on eight H20.
//!
//! The trace is calibrated to the row of `linear`, so that row is shown and nothing is expected of it. Traces of ten seeds
//! differ more than versions do; an order is therefore one of figures by those of `linear` on the same trace.

mod analysis;
mod causes;

use super::{Experiment, Get, sample};
use crate::observe::Observed;
use crate::paper::Paper;
use crate::results::Results;
use crate::sample::Sample;
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
published. The trace and the pool (250,000 tokens) are calibrated to the paper's baseline, whose row is therefore shown and proves nothing; other \
versions were looked at while the trace was made, the pool was chosen by the baseline alone. What is \
assumed of the policies, and which readings were others before, is in the headers of `gen:elastic850` and of the policies; the last rows of the table \
run the other readings. The order is that of each version by `linear` on the same trace, since traces differ more than versions.";

/// The baseline.
const LINEAR: &str = "linear";

/// The versions in the paper's order from worst to best by TTFT p90, with the beginning of the keys of their figures.
const VERSIONS: [(&str, &str); 4] = [
    ("unified-v2", "elastic.v2"),
    (LINEAR, "elastic.baseline"),
    ("unified-v3", "elastic.v3"),
    ("contention", "elastic.a"),
];

/// Approaches A and B together.
const LAZY: (&str, &str) = ("lazy-migration", "elastic.ab");

/// The variants that the paper proposes, and what was not its own.
const OTHERS: [&str; 5] = [
    "lazy-migration:factor=1.2",
    "lazy-migration:trigger=average_plus",
    "lazy-migration:trigger=recent_ttft",
    "dp-cache-aware",
    "homing",
];

/// Readings of the text that are not the defaults.
const READINGS: [&str; 6] = [
    "linear:ties=idlest",
    "unified-v2:ties=idlest",
    "unified-v3:decode=context",
    "contention:gate=1000",
    "lazy-migration:gate=1000",
    TIGHT_GATE,
];

/// Approaches A and B with a gate as tight as the trigger. The paper does not say where its gate stands.
const TIGHT_GATE: &str = "lazy-migration:gate=1.5:gate_plus=0";

/// Approach A with the speed that the step model has at prompts of 50,000 tokens.
const TRUE_SPEED: &str = "contention:throughput=5000";

/// Eight H20 with the pool at which the baseline's TTFT and latency fit, between what memory fractions of 0.85 and 0.90 leave.
const CLUSTER: &str = "h20x8-dp:kv=250K";

/// Pools of a memory fraction of 0.90, of twice that, and one in which nothing is ever evicted.
const LARGER_POOLS: [&str; 3] = ["h20x8-dp:kv=293K", "h20x8-dp:kv=500K", LARGE_POOL];
const LARGE_POOL: &str = "h20x8-dp:kv=4000K";

/// A figure of a run, by the end of its key.
const FIGURES: [(&str, &str, Get); 6] = [
    ("ttft.mean", "TTFT mean", |run| run.run.ttft_s.mean),
    ("ttft.p90", "TTFT p90", p90),
    ("medium_ttft.p90", "TTFT p90 of medium requests", |run| {
        run.run.by_class.medium.ttft_s.p90
    }),
    ("heavy_ttft.p90", "TTFT p90 of heavy requests", heavy_p90),
    ("tpot.p90", "TPOT p90", |run| run.run.tpot_s.p90),
    ("latency.p50", "latency p50", |run| run.run.latency_s.p50),
];

fn p90(run: &Observed) -> Option<f64> {
    run.run.ttft_s.p90
}

fn heavy_p90(run: &Observed) -> Option<f64> {
    run.run.by_class.heavy.ttft_s.p90
}

fn balance(run: &Observed) -> Option<f64> {
    run.run.balance.tokens_max_min
}

fn run_on(cluster: &str, policy: &str) -> Setup {
    recorded("gen:elastic850", cluster, policy)
}

fn recorded(trace: &str, cluster: &str, policy: &str) -> Setup {
    Setup::new(trace, cluster, policy)
        .time_scale(1)
        .arrivals(Arrivals::Recorded)
        .seeds(10)
}

/// `unified-v2` where sessions start one by one, so that little prefill is pending when one does.
fn sparse_v2() -> Setup {
    recorded("gen:elastic850:span_s=2400", CLUSTER, "unified-v2")
}

fn run_of(policy: &str) -> Setup {
    run_on(CLUSTER, policy)
}

fn setups() -> Vec<Setup> {
    let mut setups: Vec<Setup> = shown().map(run_of).collect();
    for pool in LARGER_POOLS {
        setups.extend(in_larger_pools().map(|policy| run_on(pool, policy)));
    }
    setups.push(sparse_v2());
    setups
}

/// The paper's versions.
fn versions() -> impl Iterator<Item = &'static str> {
    VERSIONS.iter().chain([&LAZY]).map(|(policy, _)| *policy)
}

/// The policies that are also run with larger pools.
fn in_larger_pools() -> impl Iterator<Item = &'static str> {
    versions().chain(["homing"])
}

/// All policies of the table.
fn shown() -> impl Iterator<Item = &'static str> {
    versions().chain(OTHERS).chain(READINGS).chain([TRUE_SPEED])
}

/// A figure of a policy.
fn of(results: &Results, policy: &str, get: Get) -> Sample {
    sample(results, &run_of(policy), get)
}

/// A figure of a setup by that of another on the same traces.
fn ratio(results: &Results, above: &Setup, below: &Setup, get: Get) -> Sample {
    let pairs = results.of(above).iter().zip(results.of(below));
    Sample::of(pairs.map(|(above, below)| Some(get(above)? / get(below)?)))
}

fn section(paper: &Paper, results: &Results) -> Section {
    let mut section = Section::new("Elastic routing and migration", INTRO, setups());
    for (end, what, get) in FIGURES
        .into_iter()
        .chain([("balance", "tokens max/min", balance as Get)])
    {
        let what = format!("{what}, `{LINEAR}` (calibrated)");
        let ours = of(results, LINEAR, get);
        let key = format!("elastic.baseline.{end}");
        section.row(Row::figure(paper, &key, &what, Expect::Nothing, &ours));
    }
    section.row(order(paper, results));
    version_rows(&mut section, paper, results);
    approach_a(&mut section, paper, results);
    section.row(gain(paper, results));
    section.rows.extend(analysis::rows(paper, results));
    section.tables.push(all_versions(results));
    section.tables.push(larger_pools(results));
    section
}

/// The order of the versions.
fn order(paper: &Paper, results: &Results) -> Row {
    let linear = run_of(LINEAR);
    let samples = VERSIONS.map(|(policy, _)| ratio(results, &run_of(policy), &linear, p90));
    let named: Vec<(&str, &Sample)> = VERSIONS.iter().map(|(policy, _)| *policy).zip(&samples).collect();
    let shown: Vec<String> = named
        .iter()
        .map(|(policy, ours)| format!("{policy} {}", estimate(ours, "x")))
        .collect();
    let keys = VERSIONS.map(|(_, key)| format!("{key}.ttft.p90"));
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let row = Row::claim(
        paper,
        &keys,
        "TTFT p90 falls from `unified-v2` over `linear` and `unified-v3` to `contention`",
        format!("by `linear`: {}", shown.join(", ")),
        Verdict::falling(&named),
    );
    let row = causes::of_time(row, results, "unified-v3");
    causes::of_speed(causes::of_time(row, results, "contention"), results)
}

/// What the paper gives for each version.
fn version_rows(section: &mut Section, paper: &Paper, results: &Results) {
    for (policy, start) in VERSIONS
        .into_iter()
        .chain([LAZY])
        .filter(|(policy, _)| *policy != LINEAR)
    {
        let rows: [(&str, &str, Get); 3] = [
            ("ttft.p90", "TTFT p90", p90),
            ("heavy_ttft.p90", "TTFT p90 of heavy requests", heavy_p90),
            ("balance", "tokens max/min", balance),
        ];
        for (end, what, get) in rows {
            let (key, what) = (format!("{start}.{end}"), format!("{what}, `{policy}`"));
            let ours = of(results, policy, get);
            let row = Row::figure(paper, &key, &what, Expect::Factor(2.0), &ours);
            section.row(match end {
                "balance" => causes::of_balance(row, results, policy),
                _ => causes::of_time(row, results, policy),
            });
        }
    }
}

/// What the paper gives for approach A alone.
fn approach_a(section: &mut Section, paper: &Paper, results: &Results) {
    let others = ["ttft.mean", "medium_ttft.p90", "tpot.p90", "latency.p50"];
    for (end, what, get) in FIGURES.into_iter().filter(|(end, ..)| others.contains(end)) {
        let (key, what) = (format!("elastic.a.{end}"), format!("{what}, `contention`"));
        let ours = of(results, "contention", get);
        let row = Row::figure(paper, &key, &what, Expect::Factor(2.0), &ours);
        let row = causes::of_calibration(causes::of_time(row, results, "contention"), paper, results, end, get);
        section.row(causes::of_speed(row, results));
    }
    let errors = of(results, "contention", |run| Some(run.errors()));
    section.row(Row::figure(
        paper,
        "elastic.errors",
        "errors",
        Expect::AtMost(0.0),
        &errors,
    ));
}

/// By how much `unified-v3` is below the baseline.
fn gain(paper: &Paper, results: &Results) -> Row {
    let by_linear = ratio(results, &run_of("unified-v3"), &run_of(LINEAR), p90);
    let gain = Sample::of(by_linear.values.iter().map(|ratio| Some((1.0 - ratio) * 100.0)));
    let what = "TTFT p90 of `unified-v3` below that of `linear`, at least half of theirs";
    let row = Row::figure(paper, "elastic.v3_gain", what, Expect::AtLeast(18.5), &gain);
    causes::of_time(row, results, "unified-v3")
}

/// All versions, what was not theirs, and the other readings.
fn all_versions(results: &Results) -> Table {
    let mut heads = vec!["policy"];
    heads.extend(FIGURES.map(|(_, what, _)| what));
    heads.extend(["TTFT p90 by `linear`", "tokens max/min", "hit ratio", "moves forced"]);
    let mut table = Table::new(
        "All versions, and the readings of the text that are not the defaults",
        &heads,
    );
    for policy in shown() {
        let mut row = vec![format!("`{policy}`")];
        row.extend(FIGURES.map(|(_, _, get)| estimate(&of(results, policy, get), "s")));
        row.push(estimate(&ratio(results, &run_of(policy), &run_of(LINEAR), p90), "x"));
        row.push(estimate(&of(results, policy, balance), "x"));
        row.push(estimate(&of(results, policy, |run| run.run.hit_ratio), ""));
        row.push(estimate(&of(results, policy, analysis::forced_moves), ""));
        table.row(row);
    }
    table
}

/// The versions with larger pools.
fn larger_pools(results: &Results) -> Table {
    let heads = ["cluster", "policy", "TTFT p90", "by `linear`", "hit ratio"];
    let mut table = Table::new(
        "The same with larger pools; from the last ones nothing is evicted",
        &heads,
    );
    for pool in LARGER_POOLS {
        for policy in in_larger_pools() {
            let setup = run_on(pool, policy);
            table.row(vec![
                format!("`{pool}`"),
                format!("`{policy}`"),
                estimate(&sample(results, &setup, p90), "s"),
                estimate(&ratio(results, &setup, &run_on(pool, LINEAR), p90), "x"),
                estimate(&sample(results, &setup, |run| run.run.hit_ratio), ""),
            ]);
        }
    }
    table
}
