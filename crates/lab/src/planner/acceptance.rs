//! The lines that the planner was to reach, each with the figure that it did, whether it holds or not.
//!
//! Some are about all cells; three name a workload of their own and are run for it.

use super::figures::{BUSY, LATENCY, TPOT_P90, TTFT_MEAN, TTFT_P90, above, against_best, median, sample};
use super::{Cell, Comparison, Extent, Options, Outcomes};
use crate::sample::Sample;
use crate::section::{Table, number};
use crate::setup::{Arrivals, Setup};

/// A figure may be above the best other's by this share before it counts as a loss.
pub(super) const SLACK: f64 = 0.02;

/// What the medians of latency mean, TTFT p90 and TPOT p90 were to gain at and beyond the knee.
const GAINS: [(usize, &str, f64); 3] = [
    (LATENCY, "latency mean", 0.12),
    (TTFT_P90, "TTFT p90", 0.15),
    (TPOT_P90, "TPOT p90", 0.15),
];

/// The most by the least busy worker.
const BUSY_MAX: f64 = 1.5;

/// The papers' own replay: eight H100, gaps by 10, 32 live sessions.
const PAPER: (&str, &str) = ("gen:swe52", "h100x8-dp");

/// The elastic workload on eight H20.
const ELASTIC: (&str, &str) = ("gen:elastic850", "h20x8-dp:kv=250K");

/// Sessions that want several times what all pools hold: 52 live ones, true gaps, small pools.
const CROWDED: (&str, &str) = ("gen:swe52", "h100x8-dp:kv=60K");
const CROWDED_LIVE: u32 = 52;
const CROWDED_POOLS: f64 = 8.0 * 60_000.0;
/// What such a pool can hold of one session beside its answer.
const CROWDED_CONTEXT: u32 = 55_000;

/// A line: what was wanted, what came of it, whether that holds.
struct Line {
    wanted: String,
    found: String,
    holds: Option<bool>,
}

fn paper(policy: &str, seeds: u64) -> Setup {
    Setup::new(PAPER.0, PAPER.1, policy).seeds(seeds)
}

fn elastic(policy: &str, seeds: u64) -> Setup {
    Setup::new(ELASTIC.0, ELASTIC.1, policy)
        .time_scale(1)
        .arrivals(Arrivals::Recorded)
        .seeds(seeds)
}

fn crowded(policy: &str, host: bool, seeds: u64) -> Setup {
    let cluster = if host {
        format!("{}:host=128GiB", CROWDED.1)
    } else {
        CROWDED.1.to_owned()
    };
    Setup::new(CROWDED.0, &cluster, policy)
        .time_scale(1)
        .arrivals(Arrivals::LiveSessions(CROWDED_LIVE))
        .max_context(Some(CROWDED_CONTEXT))
        .seeds(seeds)
}

/// What the lines with a workload of their own run.
pub(super) fn setups(options: &Options) -> Vec<Setup> {
    if options.extent == Extent::Quick {
        return Vec::new();
    }
    let seeds = options.seeds;
    let mut setups = vec![
        paper("homing", seeds),
        paper("dp-cache-aware", seeds),
        elastic("homing", seeds),
        elastic("linear", seeds),
    ];
    for host in [false, true] {
        setups.extend(["homing", "dp-cache-aware"].map(|policy| crowded(policy, host, seeds)));
    }
    setups
}

/// The table of all lines.
pub(super) fn table(comparison: &Comparison) -> Table {
    let mut table = Table::new("", &["wanted", "found", "holds"]);
    let mut lines = vec![never_worse(comparison)];
    lines.extend(gains(comparison));
    lines.push(balance(comparison));
    if !setups(&comparison.options).is_empty() {
        lines.extend(papers(&comparison.outcomes, comparison.options.seeds));
        lines.extend(tiers(&comparison.outcomes, comparison.options.seeds));
    }
    for line in lines {
        let holds = match line.holds {
            Some(true) => "yes",
            Some(false) => "**no**",
            None => "not run",
        };
        table.row(vec![line.wanted, line.found, holds.to_owned()]);
    }
    table
}

/// The planner's losses: cell, figure, by how much.
pub(super) fn losses(comparison: &Comparison) -> Vec<(&Cell, usize, f64)> {
    let lost = |cell| {
        [LATENCY, TTFT_P90].into_iter().filter_map(move |figure| {
            against_best(&comparison.outcomes, cell, figure)
                .filter(|worse| *worse > SLACK)
                .map(|worse| (cell, figure, worse))
        })
    };
    comparison.cells.iter().flat_map(lost).collect()
}

fn never_worse(comparison: &Comparison) -> Line {
    let losses = losses(comparison);
    let worst = losses.iter().map(|(.., worse)| *worse).fold(0.0, f64::max);
    let found = match losses.len() {
        0 => format!("in none of {} cells", comparison.cells.len()),
        count => format!(
            "{count} of {} figures are, by {} at most",
            comparison.cells.len() * 2,
            percent(worst)
        ),
    };
    Line {
        wanted: "in no cell worse than the best other policy by more than 2%, in latency mean and TTFT p90".to_owned(),
        found,
        holds: Some(losses.is_empty()),
    }
}

fn gains(comparison: &Comparison) -> Vec<Line> {
    let heavy = || comparison.cells.iter().filter(|cell| cell.is_heavy());
    let line = |(figure, name, wanted): (usize, &str, f64)| {
        let all = heavy().filter_map(|cell| against_best(&comparison.outcomes, cell, figure));
        let median = median(all.collect());
        Line {
            wanted: format!(
                "{name} at and beyond the knee: median at least {:.0}% better",
                wanted * 100.0
            ),
            found: median.map_or("none".to_owned(), percent),
            holds: median.map(|median| median <= -wanted),
        }
    };
    GAINS.into_iter().map(line).collect()
}

/// How evenly workers are used at and beyond the knee.
fn balance(comparison: &Comparison) -> Line {
    let busy = |cell: &&Cell| sample(&comparison.outcomes, cell, "homing", BUSY).mean();
    let ratios: Vec<f64> = comparison
        .cells
        .iter()
        .filter(|cell| cell.is_heavy())
        .filter_map(|cell| busy(&cell))
        .collect();
    let above = ratios.iter().filter(|ratio| **ratio > BUSY_MAX).count();
    let most = ratios.iter().copied().fold(0.0, f64::max);
    Line {
        wanted: format!("the busiest worker at most {BUSY_MAX} times as busy as the least, at and beyond the knee"),
        found: format!("{above} of {} cells are above; {} at most", ratios.len(), number(most)),
        holds: (!ratios.is_empty()).then_some(above == 0),
    }
}

fn ratio(outcomes: &Outcomes, ours: &Setup, theirs: &Setup, figure: usize) -> Option<f64> {
    let of = |setup: &Setup| Sample::of(outcomes.of(setup).iter().map(super::figures::FIGURES[figure].2));
    above(&of(ours), &of(theirs)).map(|above| above + 1.0)
}

fn at_most(wanted: &str, found: Option<f64>, most: f64) -> Line {
    Line {
        wanted: format!("{wanted}: at most {most} x"),
        found: found.map_or("none".to_owned(), |found| format!("{} x", number(found))),
        holds: found.map(|found| found <= most),
    }
}

fn papers(outcomes: &Outcomes, seeds: u64) -> Vec<Line> {
    let errors: f64 = outcomes.of(&paper("homing", seeds)).iter().map(|run| run.errors).sum();
    let against = |figure| {
        ratio(
            outcomes,
            &paper("homing", seeds),
            &paper("dp-cache-aware", seeds),
            figure,
        )
    };
    let where_ = "`gen:swe52`, `h100x8-dp`, gaps by 10, 32 live sessions, against `dp-cache-aware`";
    vec![
        Line {
            wanted: format!("{where_}: no errors"),
            found: number(errors),
            holds: Some(errors == 0.0),
        },
        at_most(&format!("{where_}, TTFT mean"), against(TTFT_MEAN), 0.8),
        at_most(&format!("{where_}, latency mean"), against(LATENCY), 0.9),
        at_most(
            "`gen:elastic850`, against `linear`, TTFT p90",
            ratio(outcomes, &elastic("homing", seeds), &elastic("linear", seeds), TTFT_P90),
            0.45,
        ),
    ]
}

/// Host memory where sessions want several times what the pools hold.
fn tiers(outcomes: &Outcomes, seeds: u64) -> Vec<Line> {
    let prompts = outcomes.of(&crowded("homing", true, seeds)).iter();
    let prompt = Sample::of(prompts.map(|run| run.prompt_tokens_mean))
        .mean()
        .unwrap_or(0.0);
    let over = prompt * f64::from(CROWDED_LIVE) / CROWDED_POOLS;
    let where_ = format!(
        "live sessions want {} times what all pools hold (`{}`, {CROWDED_LIVE} live, true gaps)",
        number(over),
        CROWDED.1
    );
    let (with, without) = (crowded("homing", true, seeds), crowded("homing", false, seeds));
    let theirs = crowded("dp-cache-aware", true, seeds);
    vec![
        at_most(
            &format!("{where_}: TTFT p90 with host memory by that without"),
            ratio(outcomes, &with, &without, TTFT_P90),
            0.2,
        ),
        at_most(
            "the same with host memory, against `dp-cache-aware`, TTFT p90",
            ratio(outcomes, &with, &theirs, TTFT_P90),
            1.0,
        ),
    ]
}

/// A share, with its sign.
pub(super) fn percent(share: f64) -> String {
    format!("{:+.1}%", share * 100.0)
}
