//! The data-parallel baseline that beat the prototype: eight replicas, prefix affinity.

use super::{Experiment, sample};
use crate::observe::Observed;
use crate::paper::Paper;
use crate::results::Results;
use crate::section::{Row, Section, Table, estimate};
use crate::setup::Setup;
use crate::verdict::Expect;

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "dp",
    setups,
    section,
};

const INTRO: &str = "\
Eight H100, each doing both phases, `dp-cache-aware`, gaps divided by 10, 32 live sessions. The paper does not state the KV pool; 92,000 tokens a
GPU is what a memory fraction of 0.85 leaves, 118,000 that of 0.88 (SGLang's default for one GPU a worker), 136,000 that of 0.90, 153,000 that of
0.92. The rows are at 92,000. How far sessions grow in `gen:swe52` was chosen so that the latencies here hold, so these are no prediction.";

/// Tokens of KV that a GPU holds at memory fractions of 0.85, 0.88, 0.90 and 0.92.
const POOLS: [&str; 4] = ["92K", "118K", "136K", "153K"];

/// The baseline with a pool of this size.
pub(super) fn baseline(pool: &str) -> Setup {
    Setup::new("gen:swe52", &format!("h100x8-dp:kv={pool}"), "dp-cache-aware").seeds(10)
}

fn setups() -> Vec<Setup> {
    POOLS.map(baseline).into()
}

/// A figure of one run.
type Get = fn(&Observed) -> Option<f64>;

const FIGURES: [(&str, &str, Get); 6] = [
    ("dp.latency.mean", "latency, mean", |run| run.run.latency_s.mean),
    ("dp.latency.p50", "latency, p50", |run| run.run.latency_s.p50),
    ("dp.latency.p90", "latency, p90", |run| run.run.latency_s.p90),
    ("dp.ttft.mean", "TTFT, mean", |run| run.run.ttft_s.mean),
    ("dp.ttft.p50", "TTFT, p50", |run| run.run.ttft_s.p50),
    ("dp.ttft.p90", "TTFT, p90", |run| run.run.ttft_s.p90),
];

fn section(paper: &Paper, results: &Results) -> Section {
    let mut section = Section::new("The data-parallel baseline", INTRO, setups());
    let at = |pool: &str, get: Get| sample(results, &baseline(pool), get);
    let errors = sample(results, &baseline(POOLS[0]), |run| Some(run.errors()));
    section.row(Row::figure(paper, "dp.errors", "errors", Expect::AtMost(0.0), &errors));
    for (key, what, get) in FIGURES {
        let (small, large) = (at(POOLS[0], get), at(POOLS[3], get));
        let theirs = paper.figure(key).mean();
        let nearer = match (small.mean(), large.mean()) {
            (Some(small), Some(large)) => (large - theirs).abs() < (small - theirs).abs(),
            _ => false,
        };
        let row = Row::figure(paper, key, what, Expect::Within(0.25), &small);
        section.row(row.because(
            nearer,
            format!(
                "It depends on the pool, which the paper does not state: {} with 153,000 tokens.",
                estimate(&large, "s")
            ),
        ));
    }
    section.tables.push(pools(results));
    section
}

/// The same figures with each pool, and how much of the prompts was found in the cache.
fn pools(results: &Results) -> Table {
    let mut heads = vec!["KV tokens a GPU", "hit ratio"];
    heads.extend(FIGURES.map(|(_, what, _)| what));
    let mut table = Table::new("The pool decides the time to first token", &heads);
    for pool in POOLS {
        let setup = baseline(pool);
        let mut row = vec![
            pool.to_owned(),
            estimate(&sample(results, &setup, |run| run.run.hit_ratio), ""),
        ];
        row.extend(FIGURES.map(|(_, _, get)| estimate(&sample(results, &setup, get), "s")));
        table.row(row);
    }
    table
}
