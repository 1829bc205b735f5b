//! KVC v5 with one part of its stack off, repaired, or read in another way: what each part causes.

use super::{Experiment, Get, sample, stack};
use crate::paper::Paper;
use crate::results::Results;
use crate::section::{Row, Section, Table, estimate, number};
use crate::setup::Setup;
use crate::verdict::Verdict;

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "mechanisms",
    setups,
    section,
};

const INTRO: &str = "\
Each part of the papers' stack switched off, repaired or read in another way, all else as in KVC v5, over the same ten seeds.";

const SEEDS: u64 = 10;

/// The loop that admission and status are answered in: a question costs 2 ms of it.
const LOOP: &str = "admission=loop:probe=2ms";

fn hardware() -> String {
    stack::eight_h100(stack::POOL)
}

/// KVC v5 with the block engine.
pub(super) fn block_engine() -> Setup {
    stack::v5_on(&stack::with_blocks_on(&hardware()), 10)
}

/// Admission in the scheduler's loop, without polling and with it.
fn in_loop() -> [Setup; 2] {
    let whole = stack::on(&hardware());
    ["", ":poll=1Hz"].map(|poll| stack::v5_on(&format!("{whole}:{LOOP}{poll}"), SEEDS))
}

/// What is different, and the setup.
fn variants() -> Vec<(&'static str, Setup)> {
    let (hardware, slots, timeout) = (hardware(), stack::SLOTS, stack::TIMEOUT);
    let on = |cluster: String| stack::v5_on(&cluster, SEEDS);
    let routed = |option: &str| stack::v5_routed(&stack::router(option), SEEDS);
    let [asked, polled] = in_loop();
    vec![
        ("as it was", stack::v5()),
        ("block engine instead of session slots", block_engine()),
        (
            "prefill first, then room at the decode worker",
            on(format!(
                "{hardware}:engine=session-slot:{timeout}:{}",
                stack::DEAD_PEERS
            )),
        ),
        (
            "no transfer timeout (the router's own clocks end what waits)",
            on(format!("{hardware}:{slots}")),
        ),
        ("no dead peers", on(format!("{hardware}:{slots}:{timeout}"))),
        ("exclusive overlap", routed("overlap=exclusive")),
        ("a session moves after 3 denials", routed("reject_threshold=3")),
        ("healthy choice of P", routed("prefill=healthy")),
        ("pools of 92,000 tokens", on(stack::on(&stack::eight_h100("92K")))),
        ("pools of 118,000 tokens", on(stack::on(&stack::eight_h100("118K")))),
        ("appends not gated at 95% of the pool", routed("rho=1.0")),
        ("admission in the scheduler's loop, 2 ms a question", asked),
        ("the same, and status polled once a second", polled),
        (
            "idle slots trimmed only when nothing allocatable is left",
            on(format!("{}:trim=exhausted", stack::on(&hardware))),
        ),
    ]
}

fn setups() -> Vec<Setup> {
    variants().into_iter().map(|(_, setup)| setup).collect()
}

fn section(paper: &Paper, results: &Results) -> Section {
    let mut section = Section::new("What each mechanism causes", INTRO, setups());
    polling(paper, results, &mut section);
    section.tables.push(switched_off(results));
    section
}

/// Whether it takes status polling to make the errors.
fn polling(paper: &Paper, results: &Results, section: &mut Section) {
    let [without, with] = in_loop().map(|setup| sample(results, &setup, |run| Some(run.errors())));
    let hundreds = without.mean().is_some_and(|mean| mean >= 100.0);
    section.row(Row::claim(
        paper,
        &["polling.errors", "kvc.errors"],
        "errors without and with 1 Hz polling of status: hundreds without it too, so it is not the cause",
        format!("{} and {}", estimate(&without, ""), estimate(&with, "")),
        Verdict::shape(hundreds),
    ));
    let times = match (with.mean(), without.mean()) {
        (Some(with), Some(without)) if without > 0.0 => format!("{} times", number(with / without)),
        _ => "none".to_owned(),
    };
    let more = with.mean() > without.mean() && with.differs_from(&without);
    let row = Row::claim(
        paper,
        &["polling.errors"],
        "polling makes it worse (46 times in one pair of their runs)",
        times,
        Verdict::shape(more),
    );
    let apart = with.differs_from(&without);
    section.row(row.because(
        !apart,
        format!(
            "Between equal runs errors differ by more: {} times without it.",
            without.spread().map_or_else(|| "several".to_owned(), number)
        ),
    ));
}

/// What disappears when a part is off.
fn switched_off(results: &Results) -> Table {
    let heads = [
        "what is different",
        "errors",
        "failed transfers",
        "latency mean",
        "TTFT mean",
        "sessions starved",
    ];
    let mut table = Table::new("With one mechanism off or repaired", &heads);
    for (what, setup) in variants() {
        let get = |get: Get, unit: &str| estimate(&sample(results, &setup, get), unit);
        table.row(vec![
            what.to_owned(),
            get(|run| Some(run.errors()), ""),
            get(|run| Some(run.failed_transfers().count() as f64), ""),
            get(|run| run.run.latency_s.mean, "s"),
            get(|run| run.run.ttft_s.mean, "s"),
            get(|run| Some(run.run.sessions.starved as f64), ""),
        ]);
    }
    table
}
