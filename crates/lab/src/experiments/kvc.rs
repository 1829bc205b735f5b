//! KVC v5 over ten seeds, beside the baseline, and what disappears when a mechanism of its stack is switched off.

use super::{Experiment, dp, sample};
use crate::observe::Observed;
use crate::paper::Paper;
use crate::results::Results;
use crate::section::{Row, Section, Table, each, estimate, number};
use crate::setup::Setup;
use crate::verdict::{Expect, Verdict};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "kvc",
    setups,
    section,
};

const INTRO: &str = "\
Two prefill and six decode H100, `kv-aware` and the papers' stack: session slots, a transfer timeout of 32 s, lists of dead peers that
last for ever, admission inside the scheduler's loop. Gaps divided by 10, 32 live sessions, pools of 92,000 tokens.";

/// The papers' stack on eight H100, without what is named.
const FULL: &str = "h100x8-2p6d:engine=session-slot:transfer_timeout=32s:dead_peers=on:probe=2ms";

/// KVC v5.
pub(super) fn v5() -> Setup {
    Setup::new("gen:swe52", FULL, "kv-aware").seeds(10)
}

/// KVC v5 with a part of it off or repaired: what is different, and the setup.
fn variants() -> [(&'static str, Setup); 6] {
    let with = |cluster: &str, policy: &str| Setup::new("gen:swe52", cluster, policy).seeds(10);
    [
        ("as it was", v5()),
        (
            "block engine instead of session slots",
            with("h100x8-2p6d:transfer_timeout=32s:dead_peers=on:probe=2ms", "kv-aware"),
        ),
        (
            "no transfer timeout",
            with("h100x8-2p6d:engine=session-slot:probe=2ms", "kv-aware"),
        ),
        (
            "no dead peers",
            with(
                "h100x8-2p6d:engine=session-slot:transfer_timeout=32s:probe=2ms",
                "kv-aware",
            ),
        ),
        ("exclusive overlap", with(FULL, "kv-aware:overlap=exclusive")),
        ("healthy choice of P", with(FULL, "kv-aware:prefill=healthy")),
    ]
}

fn setups() -> Vec<Setup> {
    let variants = variants().map(|(_, setup)| setup);
    variants.into_iter().chain([dp::baseline("92K")]).collect()
}

/// A figure of one run.
type Get = fn(&Observed) -> Option<f64>;

const FIGURES: [(&str, &str, Get); 5] = [
    ("kvc.latency.mean", "latency, mean", |run| run.run.latency_s.mean),
    ("kvc.latency.p50", "latency, p50", |run| run.run.latency_s.p50),
    ("kvc.latency.p90", "latency, p90", |run| run.run.latency_s.p90),
    ("kvc.ttft.mean", "TTFT, mean", |run| run.run.ttft_s.mean),
    ("kvc.ttft.p50", "TTFT, p50", |run| run.run.ttft_s.p50),
];

fn section(paper: &Paper, results: &Results) -> Section {
    let mut section = Section::new("KVC v5", INTRO, setups());
    let errors = sample(results, &v5(), |run| Some(run.errors()));
    let hundreds = errors.mean().is_some_and(|mean| (100.0..1000.0).contains(&mean));
    let ours = format!("{}: {}", estimate(&errors, ""), each(&errors));
    section.row(Row::claim(
        paper,
        &["kvc.errors"],
        "errors, in the hundreds",
        ours,
        Verdict::shape(hundreds),
    ));
    let spread = errors.spread().map_or_else(|| "none".to_owned(), number);
    let apart = Verdict::shape(errors.spread().is_some_and(|spread| spread >= 1.5));
    section.row(Row::claim(
        paper,
        &["kvc.spread.errors"],
        "errors, most by fewest, at least 1.5",
        spread,
        apart,
    ));
    for (key, what, get) in FIGURES {
        section.row(Row::figure(
            paper,
            key,
            what,
            Expect::Factor(2.0),
            &sample(results, &v5(), get),
        ));
    }
    section.tables.push(switched_off(results));
    section
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
