//! How many sessions found their KV in place, and how often: the histogram of append rates.

use super::svg::{FRAME, Frame, HEIGHT, Scale, WIDTH, bar};
use super::{Shown, legend};
use crate::metric::figure;
use crate::stats::mean;
use std::fmt::Write as _;

const BUCKETS: [&str; 5] = ["0–20%", "20–40%", "40–60%", "60–80%", "80–100%"];

/// The chart: mean over runs of the sessions in each fifth.
pub(super) fn chart(out: &mut String, shown: &[Shown<'_>]) {
    out.push_str("<figure><figcaption>Append rate of sessions <small>later turns that found their KV in place; the first bar is the starved</small></figcaption>");
    out.push_str(&legend(shown));
    let histograms: Vec<[f64; BUCKETS.len()]> = shown.iter().map(histogram).collect();
    let most = histograms.iter().flatten().copied().fold(1.0, f64::max);
    Frame::begin(
        out,
        WIDTH,
        HEIGHT,
        "Sessions by share of later turns that took append, bars a report",
    );
    let y = Scale::linear([0.0, most], [FRAME.bottom, FRAME.top]);
    FRAME.y_axis(out, &y, "sessions (mean over runs)", super::svg::tick);
    let slot = (FRAME.right - FRAME.left) / BUCKETS.len() as f64;
    let width = slot * 0.78 / shown.len() as f64;
    for (bucket, name) in BUCKETS.iter().enumerate() {
        let left = FRAME.left + slot * (bucket as f64 + 0.11);
        for (index, (report, histogram)) in shown.iter().zip(&histograms).enumerate() {
            let top = y.at(histogram[bucket]);
            let title = format!(
                "{} {}: {} sessions with an append rate of {name}",
                report.label,
                report.policy,
                figure(histogram[bucket])
            );
            bar(
                out,
                [left + index as f64 * width, top, width * 0.92, FRAME.bottom - top],
                report.colour,
                &title,
            );
        }
        let _ = write!(
            out,
            "<text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{name}</text>",
            FRAME.left + slot * (bucket as f64 + 0.5),
            FRAME.bottom + 16.0
        );
    }
    let _ = write!(
        out,
        "<path class=\"axis\" d=\"M{} {}H{}\"/><text class=\"name\" x=\"296\" y=\"320\" text-anchor=\"middle\">share of later turns that took append</text></svg></figure>",
        FRAME.left, FRAME.bottom, FRAME.right
    );
}

fn histogram(report: &Shown<'_>) -> [f64; BUCKETS.len()] {
    std::array::from_fn(|bucket| {
        let runs = report.source.report.runs.iter();
        let counts: Vec<f64> = runs
            .map(|run| run.sessions.append_rate_histogram[bucket] as f64)
            .collect();
        mean(&counts).unwrap_or(0.0)
    })
}
