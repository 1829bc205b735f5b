//! How much KV each eviction took: events by size, in bins that double.

use super::svg::{FRAME, Frame, HEIGHT, Scale, WIDTH, bar, tick};
use super::{Shown, legend};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Bins, at most: evictions above the last are in it.
const BINS_MAX: u32 = 24;
const TICKS_MAX: u32 = 8;

/// The chart: the share of a report's events in each bin, over all its runs.
pub(super) fn chart(out: &mut String, shown: &[Shown<'_>]) {
    out.push_str(
        "<figure><figcaption>Tokens taken by each eviction <small>all runs, bins that double</small></figcaption>",
    );
    let all_bins: Vec<BTreeMap<u32, u64>> = shown.iter().map(bins).collect();
    let known = || all_bins.iter().flat_map(BTreeMap::keys).copied();
    let (Some(first), Some(last)) = (known().min(), known().max()) else {
        out.push_str("<p class=\"empty\">No evictions in the logs beside the summaries.</p></figure>");
        return;
    };
    out.push_str(&legend(shown));
    let shares = all_bins
        .iter()
        .flat_map(|bins| (first..=last).map(|bin| share(bins, bin)));
    let most = shares.fold(0.0, f64::max);
    Frame::begin(out, WIDTH, HEIGHT, "Share of evictions by tokens taken, bars a report");
    let y = Scale::linear([0.0, most], [FRAME.bottom, FRAME.top]);
    FRAME.y_axis(out, &y, "share of evictions", |share| format!("{:.0}%", share * 100.0));
    let slot = (FRAME.right - FRAME.left) / f64::from(last - first + 1);
    let every = (last - first) / TICKS_MAX + 1;
    for bin in first..=last {
        let middle = FRAME.left + slot * (f64::from(bin - first) + 0.5);
        bars(out, shown, &all_bins, bin, [middle, slot], &y);
        if (bin - first).is_multiple_of(every) {
            let low = tick((1_u64 << bin) as f64);
            let below = FRAME.bottom + 16.0;
            let _ = write!(
                out,
                "<text class=\"tick\" x=\"{middle:.1}\" y=\"{below:.1}\" text-anchor=\"middle\">{low}</text>"
            );
        }
    }
    let _ = write!(
        out,
        "<path class=\"axis\" d=\"M{} {}H{}\"/><text class=\"name\" x=\"296\" y=\"320\" text-anchor=\"middle\">tokens in one eviction, from (logarithmic)</text></svg>",
        FRAME.left, FRAME.bottom, FRAME.right
    );
    totals(out, shown);
    out.push_str("</figure>");
}

/// The share of a report's events that lie in a bin.
fn share(bins: &BTreeMap<u32, u64>, bin: u32) -> f64 {
    let events: u64 = bins.values().sum();
    bins.get(&bin).copied().unwrap_or(0) as f64 / events.max(1) as f64
}

/// The bars of one bin, side by side around its middle.
fn bars(out: &mut String, shown: &[Shown<'_>], bins: &[BTreeMap<u32, u64>], bin: u32, place: [f64; 2], y: &Scale) {
    let [middle, slot] = place;
    let width = (slot * 0.84 / shown.len() as f64).min(48.0);
    let left = middle - width * shown.len() as f64 / 2.0;
    let (low, high) = (1_u64 << bin, 2_u64 << bin);
    for (index, (report, bins)) in shown.iter().zip(bins).enumerate() {
        let Some(events) = bins.get(&bin) else { continue };
        let share = share(bins, bin);
        let top = y.at(share);
        let title = format!(
            "{} {}: {events} evictions of {low} to {} tokens, {:.1}%",
            report.label,
            report.policy,
            high - 1,
            share * 100.0
        );
        // A bar of a single event in thousands still shows.
        let height = (FRAME.bottom - top).max(0.8);
        bar(
            out,
            [left + index as f64 * width, top, width * 0.92, height],
            report.colour,
            &title,
        );
    }
}

fn bins(report: &Shown<'_>) -> BTreeMap<u32, u64> {
    let mut bins = BTreeMap::new();
    for eviction in report.logs.iter().flat_map(|run| &run.evictions) {
        *bins.entry(eviction.tokens.max(1).ilog2().min(BINS_MAX)).or_default() += 1;
    }
    bins
}

fn totals(out: &mut String, shown: &[Shown<'_>]) {
    out.push_str("<p class=\"note\">");
    for report in shown {
        let sizes = || {
            report
                .logs
                .iter()
                .flat_map(|run| &run.evictions)
                .map(|eviction| eviction.tokens)
        };
        let (events, tokens) = (sizes().count() as u64, sizes().fold(0, u64::saturating_add));
        let each = tokens.checked_div(events).unwrap_or(0);
        let _ = write!(
            out,
            "{}: {events} evictions, {each} tokens each on average. ",
            report.label
        );
    }
    out.push_str("</p>");
}
