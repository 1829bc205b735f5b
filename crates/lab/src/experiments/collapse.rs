//! E2 and E3: a cluster that fails as a whole, and the decode worker that stays cold.

use super::{Experiment, eviction, sample, stack};
use crate::observe::Observed;
use crate::paper::Paper;
use crate::results::Results;
use crate::section::{Row, Section, Table, estimate, number};
use crate::setup::{Arrivals, Setup};
use crate::verdict::{Expect, Verdict};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "collapse",
    setups,
    section,
};

const INTRO: &str = "\
One prefill and three decode H200, 1,285 requests as recorded (time scale 1), the papers' stack with the readings of KVC v5. The load floor's K \
is not in the papers; 1,000 blocks is assumed, more than the boilerplate has.";

fn run_of(cluster: &str, policy: &str) -> Setup {
    Setup::new("gen:e2", cluster, policy)
        .time_scale(1)
        .arrivals(Arrivals::Recorded)
        .seeds(5)
}

fn e2() -> Setup {
    run_of(&stack::on(stack::FOUR_H200), stack::ROUTER)
}

/// E2 with the block engine.
fn with_blocks() -> Setup {
    run_of(&stack::with_blocks_on(stack::FOUR_H200), stack::ROUTER)
}

fn variants() -> [(&'static str, Setup); 5] {
    let full = stack::on(stack::FOUR_H200);
    [
        ("E2", e2()),
        ("E3: load floor", eviction::e3()),
        ("exclusive overlap", run_of(&full, &stack::router("overlap=exclusive"))),
        ("block engine", with_blocks()),
        ("`homing`, block engine", run_of(stack::FOUR_H200, "homing")),
    ]
}

fn setups() -> Vec<Setup> {
    variants().map(|(_, setup)| setup).into()
}

/// Requests of the decode worker that had the fewest, as a share of all in percent.
fn coldest(run: &Observed) -> Option<f64> {
    let requests = run.decode_requests();
    let all: f64 = requests.iter().sum();
    Some(requests.into_iter().fold(f64::INFINITY, f64::min) / all * 100.0)
}

fn section(paper: &Paper, results: &Results) -> Section {
    let mut section = Section::new("Cascade and cold decode worker", INTRO, setups());
    let failed = sample(results, &e2(), |run| Some(run.errors()));
    section.row(Row::claim(
        paper,
        &["cascade.failed", "cascade.requests"],
        "failed requests of E2, most of them",
        estimate(&failed, ""),
        Verdict::shape(failed.mean().is_some_and(|mean| mean * 2.0 > 1285.0)),
    ));
    let cold = sample(results, &e2(), coldest);
    let shown: Vec<String> = results
        .of(&e2())
        .iter()
        .take(3)
        .map(|run| {
            run.decode_requests()
                .into_iter()
                .map(number)
                .collect::<Vec<_>>()
                .join(" / ")
        })
        .collect();
    let blocks = sample(results, &with_blocks(), coldest);
    let failed_share = sample(results, &e2(), |run| {
        Some(run.errors() / run.run.requests as f64 * 100.0)
    });
    let row = Row::claim(
        paper,
        &["cold.bindings"],
        "requests of each D: one has none",
        shown.join("; "),
        Verdict::of(Expect::AtMost(0.0), None, &cold),
    );
    section.row(row.because(blocks.mean() == Some(0.0), format!(
        "A worker draws new sessions by what it holds, and where {} of the requests fail it holds nothing. With the block engine, on which none fails, one D has none in every run: {} of the requests.",
        estimate(&failed_share, "%"),
        estimate(&blocks, "%")
    )));
    let floor = sample(results, &eviction::e3(), coldest);
    section.row(Row::figure(
        paper,
        "cold.load_floor_share",
        "share of the coldest D with a load floor",
        Expect::Factor(2.0),
        &floor,
    ));
    let mut table = Table::new(
        "With what would prevent it",
        &[
            "what is different",
            "failed",
            "share of the coldest D in %",
            "latency mean",
            "TTFT mean",
        ],
    );
    for (what, setup) in variants() {
        table.row(vec![
            what.to_owned(),
            estimate(&sample(results, &setup, |run| Some(run.errors())), ""),
            estimate(&sample(results, &setup, coldest), ""),
            estimate(&sample(results, &setup, |run| run.run.latency_s.mean), "s"),
            estimate(&sample(results, &setup, |run| run.run.ttft_s.mean), "s"),
        ]);
    }
    section.tables.push(table);
    section
}
