//! KVC v5 over ten seeds, beside the baseline, and what disappears when a mechanism of its stack is switched off.

use super::{Experiment, sample};
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
last for ever. Gaps divided by 10, 32 live sessions. The papers leave three things open, and they were settled here after other
readings had been run, so the errors are no prediction: pools of 136,000 tokens (a memory fraction of 0.90, at which the baseline's time
to first token fits; the baseline's own rows are at 92,000); no gate on appends at 95% of the pool, because the report saw every pool
used to 97 to 100%, which such a gate forbids; and an idle slot is trimmed when nothing allocatable is left, the literal reading of the
taxonomy. Admission is answered from a snapshot. The last table has the other readings; rows but the first two have three seeds.";

/// The papers' stack on eight H100.
const FULL: &str = "h100x8-2p6d:kv=136K:engine=session-slot:transfer_timeout=32s:dead_peers=on";

/// Their router, without a gate on appends.
const ROUTER: &str = "kv-aware:rho=1.0";

/// KVC v5.
pub(super) fn v5() -> Setup {
    Setup::new("gen:swe52", FULL, ROUTER).seeds(10)
}

/// The same with the block engine.
pub(super) fn block_engine() -> Setup {
    let cluster = "h100x8-2p6d:kv=136K:transfer_timeout=32s:dead_peers=on";
    Setup::new("gen:swe52", cluster, ROUTER).seeds(10)
}

/// KVC v5 with a part of it off, repaired, or read in another way: what is different, and the setup.
fn variants() -> Vec<(&'static str, Setup)> {
    let with = |what, cluster: &str, policy: &str| (what, Setup::new("gen:swe52", cluster, policy).seeds(3));
    vec![
        ("as it was", v5()),
        ("block engine instead of session slots", block_engine()),
        with(
            "no transfer timeout (the router's own clocks end what waits)",
            "h100x8-2p6d:kv=136K:engine=session-slot",
            ROUTER,
        ),
        with(
            "no dead peers",
            "h100x8-2p6d:kv=136K:engine=session-slot:transfer_timeout=32s",
            ROUTER,
        ),
        with("exclusive overlap", FULL, "kv-aware:rho=1.0:overlap=exclusive"),
        with(
            "a session moves after 3 denials",
            FULL,
            "kv-aware:rho=1.0:reject_threshold=3",
        ),
        with("healthy choice of P", FULL, "kv-aware:rho=1.0:prefill=healthy"),
        with("backpressure", FULL, "kv-aware:rho=1.0:backpressure=on"),
        with(
            "pools of 92,000 tokens",
            "h100x8-2p6d:kv=92K:engine=session-slot:transfer_timeout=32s:dead_peers=on",
            ROUTER,
        ),
        with("appends gated at 95% of the pool", FULL, "kv-aware"),
        with(
            "admission in the scheduler's loop, 2 ms a question",
            "h100x8-2p6d:kv=136K:engine=session-slot:transfer_timeout=32s:dead_peers=on:admission=loop:probe=2ms",
            ROUTER,
        ),
        with(
            "the same, and status polled once a second",
            "h100x8-2p6d:kv=136K:engine=session-slot:transfer_timeout=32s:dead_peers=on:admission=loop:probe=2ms:poll=1Hz",
            ROUTER,
        ),
        with(
            "idle slots trimmed as soon as a seed does not fit",
            "h100x8-2p6d:kv=136K:engine=session-slot:trim=no-room:transfer_timeout=32s:dead_peers=on",
            ROUTER,
        ),
    ]
}

fn setups() -> Vec<Setup> {
    variants().into_iter().map(|(_, setup)| setup).collect()
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
    pinning(paper, results, &mut section);
    section.tables.push(switched_off(results));
    section
}

/// What comes of pins, slots and lists of dead peers.
fn pinning(paper: &Paper, results: &Results, section: &mut Section) {
    let at = |get: Get| sample(results, &v5(), get);
    let workers = at(|run| run.run.sessions.workers_per_session_mean);
    let pinned = Verdict::shape(workers.values.iter().all(|mean| (mean - 1.0).abs() < 1e-9));
    section.row(Row::claim(
        paper,
        &["pin.workers_per_session"],
        "decode workers of a session, in every run",
        each(&workers),
        pinned,
    ));
    let histograms = results
        .of(&v5())
        .iter()
        .map(|run| run.run.sessions.append_rate_histogram);
    let (mut ends, mut all, mut shown) = (0, 0, Vec::new());
    for histogram in histograms {
        ends += histogram[0] + histogram[4];
        all += histogram.iter().sum::<u64>();
        shown.push(format!("{histogram:?}"));
    }
    section.row(Row::claim(
        paper,
        &["pin.histogram.run1", "pin.histogram.run2", "pin.histogram.run3"],
        "sessions by append rate in fifths: over half at the two ends, and some starve in each run",
        shown[..3.min(shown.len())].join(" / "),
        Verdict::shape(
            ends * 2 > all
                && at(|run| Some(run.run.sessions.starved as f64))
                    .values
                    .iter()
                    .all(|n| *n > 0.0),
        ),
    ));
    let ratio = at(|run| {
        let sessions = &run.run.sessions;
        Some(sessions.starved_peak_tokens_mean? / sessions.lucky_peak_tokens_mean?)
    });
    section.row(Row::claim(
        paper,
        &["pin.peak_ratio"],
        "longest prompt of starved by that of lucky sessions, at least 1.5",
        format!("{}: {}", estimate(&ratio, "x"), each(&ratio)),
        Verdict::of(Expect::AtLeast(1.5), None, &ratio),
    ));
    skew(paper, results, section);
    eviction(paper, results, section);
}

/// Where transfers fail.
fn skew(paper: &Paper, results: &Results, section: &mut Section) {
    let at = |get: Get| sample(results, &v5(), get);
    let skew = at(|run| {
        let errors: Vec<f64> = run
            .prefill_workers()
            .map(|worker| run.failed_transfers().filter(|line| line.from == worker).count() as f64)
            .collect();
        let most = errors.iter().copied().fold(0.0, f64::max);
        Some(most / errors.iter().copied().fold(f64::INFINITY, f64::min).max(1.0))
    });
    let row = Row::claim(
        paper,
        &["pside.transfer_errors"],
        "failed transfers of the worse P by those of the better, at least 10",
        format!("{}: {}", estimate(&skew, "x"), each(&skew)),
        Verdict::of(Expect::AtLeast(10.0), None, &skew),
    );
    let between_decoders = at(|run| {
        let errors: Vec<f64> = run
            .decode_workers()
            .map(|worker| run.failed_transfers().filter(|line| line.to == worker).count() as f64)
            .collect();
        Some(errors.iter().copied().fold(0.0, f64::max) / (errors.iter().sum::<f64>() / errors.len() as f64).max(1.0))
    });
    section.row(row.because(
        between_decoders.mean().is_some_and(|most| most > 1.5),
        format!(
            "The errors gather at decode workers instead: the worst has {} times the mean.",
            estimate(&between_decoders, "")
        ),
    ));
}

/// What one eviction frees, with slots and without.
fn eviction(paper: &Paper, results: &Results, section: &mut Section) {
    let mean = |values: Vec<f64>| (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64);
    let slots = sample(results, &v5(), |run| mean(run.evicted_tokens()));
    section.row(Row::figure(
        paper,
        "evict.tokens",
        "tokens that one eviction frees, session slots",
        Expect::Factor(5.0),
        &slots,
    ));
    let blocks = sample(results, &block_engine(), |run| mean(run.evicted_tokens()));
    let row = Row::figure(
        paper,
        "evict.block_tokens",
        "tokens that one allocation evicts, block engine",
        Expect::AtMost(500.0),
        &blocks,
    );
    section.row(row.because(
        blocks.mean().is_some_and(|mean| mean > 500.0),
        "A log line has all that one allocation evicted, and the allocation of a whole prompt or seed evicts as much as it needs at once.",
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
