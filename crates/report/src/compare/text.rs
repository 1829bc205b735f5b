//! A comparison as a table for a terminal: headline figures with intervals, and what can be said of each.
//!
//! Names come from files that anybody may have written, so that none of their characters reaches the terminal as a command.

use super::{Comparison, MetricComparison, Pair, Verdict};
use crate::metric::{Better, HEADLINE, figure};
use crate::summary::MetricSummary;
use std::fmt::Write as _;

/// The table, ending with a line end.
pub(super) fn text(comparison: &Comparison) -> String {
    let mut text = String::new();
    for report in &comparison.reports {
        let runs = report.seeds.len();
        let s = if runs == 1 { "" } else { "s" };
        let _ = writeln!(
            text,
            "{}  {}: {} on {}, {}, {runs} run{s}",
            report.label,
            escaped(&report.name),
            escaped(&report.policy),
            escaped(&report.cluster),
            escaped(&report.trace)
        );
    }
    if !comparison.unlike.is_empty() {
        let _ = writeln!(
            text,
            "\nCOMPARING UNLIKE THINGS: a difference below may come from these"
        );
        for unlike in &comparison.unlike {
            let values = comparison.reports.iter().zip(&unlike.values);
            let values: Vec<String> = values
                .map(|(report, value)| format!("{} {}", report.label, escaped(value)))
                .collect();
            let _ = writeln!(text, "  {}: {}", unlike.what, values.join(" | "));
        }
    }
    text.push('\n');
    rows(comparison, &mut text);
    if !comparison.notes.is_empty() {
        text.push('\n');
    }
    for note in &comparison.notes {
        let _ = writeln!(text, "note: {note}");
    }
    let others = comparison.metrics.iter().filter(|metric| !shown(metric)).count();
    let _ = writeln!(text, "{others} more figures: --json, or --html FILE");
    text
}

/// A text that stays on its line and steers no terminal: control characters and those that turn the direction of writing
/// are spelt out, such as `\u{1b}`.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        if letter.is_control() || turns_writing(letter) {
            escaped.extend(letter.escape_default());
        } else {
            escaped.push(letter);
        }
    }
    escaped
}

/// Marks, embeddings, overrides and isolates of the bidirectional algorithm, and separators of lines.
const fn turns_writing(letter: char) -> bool {
    matches!(
        letter,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    )
}

fn shown(metric: &MetricComparison) -> bool {
    HEADLINE.contains(&metric.name.as_str())
}

fn rows(comparison: &Comparison, text: &mut String) {
    let mut table = vec![header(comparison)];
    for metric in comparison.metrics.iter().filter(|metric| shown(metric)) {
        let mut row = vec![metric.name.clone()];
        row.extend(
            metric
                .reports
                .iter()
                .map(|summary| summary.as_ref().map_or_else(|| "-".to_owned(), cell)),
        );
        row.push(said(metric));
        table.push(row);
    }
    let columns = table[0].len();
    let widths: Vec<usize> = (0..columns)
        .map(|column| table.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    for row in &table {
        let padded: Vec<String> = row
            .iter()
            .zip(&widths)
            .map(|(cell, &width)| format!("{cell:<width$}"))
            .collect();
        let _ = writeln!(text, "{}", padded.join("  ").trim_end());
    }
}

fn header(comparison: &Comparison) -> Vec<String> {
    let labels = comparison
        .reports
        .iter()
        .map(|report| format!("{} mean [95%]", report.label));
    let first = std::iter::once("figure".to_owned());
    first.chain(labels).chain(["verdict".to_owned()]).collect()
}

/// A mean with its interval.
fn cell(summary: &MetricSummary) -> String {
    match summary.ci95 {
        Some([low, high]) => format!("{} [{} {}]", figure(summary.mean), figure(low), figure(high)),
        None => figure(summary.mean),
    }
}

/// What can be said of a figure, in a few words.
pub(crate) fn said(metric: &MetricComparison) -> String {
    match (metric.verdict, metric.pairs.as_slice()) {
        (Verdict::Better | Verdict::Differs, [pair]) => said_of(pair, metric.better),
        (Verdict::Better, _) => format!("{} beats all others", metric.winner.as_deref().unwrap_or_default()),
        (Verdict::Differs, pairs) => {
            let standing = pairs
                .iter()
                .filter(|pair| matches!(pair.verdict, Verdict::Better | Verdict::Differs));
            let standing: Vec<String> = standing.map(|pair| said_of(pair, metric.better)).collect();
            format!("no winner; {}", standing.join("; "))
        }
        (Verdict::NotDistinguishable, _) => "not distinguishable".to_owned(),
        (Verdict::Equal, _) => "equal".to_owned(),
        (Verdict::TooFewRuns, _) => "3 or more runs needed".to_owned(),
        (Verdict::OneRun, _) => "one run proves nothing".to_owned(),
        (Verdict::Missing, _) => "nothing to compare".to_owned(),
    }
}

/// Of two reports that lie apart.
fn said_of(pair: &Pair, better: Better) -> String {
    let more = pair.difference.is_some_and(|difference| difference > 0.0);
    // The winner first, else the larger.
    let b_first = pair.winner.as_ref().map_or(more, |winner| *winner == pair.b);
    let (first, second) = if b_first {
        (&pair.b, &pair.a)
    } else {
        (&pair.a, &pair.b)
    };
    let higher = more == b_first;
    let way = if higher { "higher" } else { "lower" };
    let by = pair
        .relative
        .filter(|_| b_first)
        .map(|share| format!(" ({:+.0}%)", share * 100.0))
        .unwrap_or_default();
    let by = if by.is_empty() { inverse(pair) } else { by };
    match better {
        Better::Neither => format!("{first} is {way} than {second}{by}"),
        Better::Lower | Better::Higher => format!("{first} better than {second}{by}"),
    }
}

/// By how much `a` differs from `b`, as a share of `b`.
fn inverse(pair: &Pair) -> String {
    let share = pair.relative.filter(|share| (1.0 + share).abs() > 1e-9);
    share.map_or_else(String::new, |share| {
        format!(" ({:+.0}%)", (1.0 / (1.0 + share) - 1.0) * 100.0)
    })
}
