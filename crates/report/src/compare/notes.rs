//! What weakens a comparison: unlike things, too few runs, survivors.

use super::{Comparison, RUNS_WANTED, Source, Unlike, Verdict, label};
use crate::run::Report;

/// Of what may be unlike: what makes runs of one seed different work, so that pairing by seed means nothing.
pub(super) const CHANGES_WORKLOAD: [&str; 3] = ["trace", "time scale", "left out"];

/// In what the reports differ besides their policy.
pub(super) fn unlike(sources: &[Source]) -> Vec<Unlike> {
    type Feature = (&'static str, fn(&Report) -> String);
    let features: [Feature; 7] = [
        ("trace", |report| report.trace.clone()),
        ("cluster", |report| report.cluster.clone()),
        ("time scale", |report| report.time_scale.to_string()),
        ("block size", |report| {
            report
                .block_size
                .map_or_else(|| "unknown".to_owned(), |size| size.to_string())
        }),
        ("classes", |report| {
            let classes = report.classes;
            format!(
                "warm below {}, medium below {}",
                classes.warm_below, classes.medium_below
            )
        }),
        ("left out", |report| {
            let out = report.left_out;
            let sessions = u64::from(out.sessions) + u64::from(out.sessions_over_limit);
            let turns = out.turns + out.turns_over_limit;
            format!(
                "{sessions} sessions, {} shortened, {turns} turns",
                out.sessions_shortened
            )
        }),
        ("seeds", |report| {
            let seeds: Vec<String> = report.runs.iter().map(|run| run.seed.to_string()).collect();
            shortened(&seeds)
        }),
    ];
    let mut unlike = Vec::new();
    for (what, feature) in features {
        let values: Vec<String> = sources.iter().map(|source| feature(&source.report)).collect();
        if values.windows(2).any(|two| two[0] != two[1]) {
            unlike.push(Unlike {
                what: what.to_owned(),
                values,
            });
        }
    }
    unlike
}

/// A list of seeds that fits a line. Its ends and length tell lists of consecutive seeds apart.
fn shortened(seeds: &[String]) -> String {
    const SHOWN: usize = 10;
    match seeds {
        [first, .., last] if seeds.len() > SHOWN => format!("{first} .. {last} ({} seeds)", seeds.len()),
        _ => seeds.join(" "),
    }
}

/// What a reader has to know before believing a verdict.
pub(super) fn notes(sources: &[Source], comparison: &Comparison) -> Vec<String> {
    let mut notes = Vec::new();
    notes.extend(runs(sources));
    notes.extend(chance(sources, comparison));
    notes.extend(
        sources
            .iter()
            .enumerate()
            .filter_map(|(index, source)| survivors(index, &source.report)),
    );
    notes.extend(
        sources
            .iter()
            .enumerate()
            .filter_map(|(index, source)| scale(index, &source.report)),
    );
    notes
}

/// Who has too few runs for any verdict.
fn runs(sources: &[Source]) -> Vec<String> {
    let mut notes = Vec::new();
    for (index, source) in sources.iter().enumerate() {
        let label = label(index);
        match source.report.runs.len() as u64 {
            1 => notes.push(format!(
                "{label} is one run: one run proves nothing, and no difference to it is called ({RUNS_WANTED} or more are needed: `--runs {RUNS_WANTED}`)"
            )),
            runs if runs < RUNS_WANTED => notes.push(format!(
                "{label} has {runs} runs: {RUNS_WANTED} or more are needed before a difference is called (`--runs {RUNS_WANTED}`)"
            )),
            _ => {}
        }
    }
    notes
}

/// How many of the verdicts would be there by chance alone.
fn chance(sources: &[Source], comparison: &Comparison) -> Option<String> {
    const RUNS_PLENTY: u64 = 5;
    let fewest = sources.iter().map(|source| source.report.runs.len() as u64).min()?;
    let judged = comparison.metrics.iter().flat_map(|metric| &metric.pairs);
    let judged = judged.filter(|pair| {
        matches!(
            pair.verdict,
            Verdict::Better | Verdict::Differs | Verdict::NotDistinguishable
        )
    });
    (sources.len() > 1 && (RUNS_WANTED..RUNS_PLENTY).contains(&fewest) && judged.count() > 0).then(|| {
        format!(
            "with {fewest} runs a side two equal systems can stand apart by chance: 1 figure in 10 at 3 runs, 1 in 126 at 5; \
             believe a pattern of figures, not a single one"
        )
    })
}

/// Latencies of a report that lost requests are those of the requests that survived.
fn survivors(index: usize, report: &Report) -> Option<String> {
    const SHARE_WORTH_SAYING: f64 = 0.01;
    let sent: u64 = report.runs.iter().map(|run| run.requests).sum();
    let failed: u64 = report.runs.iter().map(|run| run.errors.total).sum();
    let share = failed as f64 / sent.max(1) as f64;
    (share >= SHARE_WORTH_SAYING).then(|| {
        format!(
            "{} lost {:.1}% of its requests ({failed} of {sent}): its latencies are those of the requests that survived",
            label(index),
            share * 100.0
        )
    })
}

fn scale(index: usize, report: &Report) -> Option<String> {
    #[expect(clippy::float_cmp, reason = "exactly 1 is the scale that changes nothing")]
    let scaled = report.time_scale != 1.0;
    scaled.then(|| {
        format!(
            "{} divided the gaps between turns by {}: idle time in which a worker drains is missing, and conclusions may \
             differ from those at time scale 1",
            label(index),
            report.time_scale
        )
    })
}
