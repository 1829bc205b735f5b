//! The distribution of a time over all completed requests of all runs: one line a report, on a logarithmic axis.

use super::svg::{FRAME, HEIGHT, Scale, WIDTH};
use super::{Shown, escape, legend};
use crate::logs::RequestLine;
use crate::metric::figure;
use crate::stats::{quantile, sorted};
use std::fmt::Write as _;

/// Points of a line, at most.
const POINTS_MAX: usize = 500;

/// The chart, with its quantiles as a table.
pub(super) fn chart(
    out: &mut String,
    name: &str,
    shown: &[Shown<'_>],
    figure_of: impl Fn(&RequestLine) -> Option<f64>,
) {
    let lines: Vec<(&Shown<'_>, Vec<f64>)> = shown
        .iter()
        .map(|report| {
            let requests = report.logs.iter().flat_map(|run| &run.requests);
            let completed = requests.filter(|request| request.error.is_none());
            (report, sorted(completed.filter_map(&figure_of).collect()))
        })
        .collect();
    let _ = write!(out, "<figure><figcaption>{}</figcaption>", escape(name));
    let Some([low, high]) = range(&lines) else {
        out.push_str(
            "<p class=\"empty\">No request log beside the summary, so there is no distribution to show.</p></figure>",
        );
        return;
    };
    out.push_str(&legend(shown));
    let x = Scale::log([low, high], [FRAME.left, FRAME.right]);
    let y = Scale::linear([0.0, 1.0], [FRAME.bottom, FRAME.top]);
    let [from, to] = x.ends();
    let _ = write!(
        out,
        "<svg class=\"cdf\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}: share of requests by time, a line a report\" \
         data-from=\"{from:.6}\" data-to=\"{to:.6}\" data-frame=\"{} {} {} {}\">",
        escape(name),
        FRAME.left,
        FRAME.top,
        FRAME.right,
        FRAME.bottom
    );
    FRAME.x_axis(out, &x, "seconds (logarithmic)");
    FRAME.y_axis(out, &y, "share of requests", |share| format!("{:.0}%", share * 100.0));
    for (report, values) in &lines {
        line(out, report, values, &x, &y);
    }
    for (report, values) in &lines {
        marks(out, report, values, &x, &y);
    }
    out.push_str("<path class=\"reader\" d=\"\"/></svg><p class=\"reading\" aria-live=\"off\"></p>");
    table(out, &lines);
    out.push_str("</figure>");
}

/// The smallest and the largest positive value. Times below a tenth of a millisecond are drawn at its edge.
fn range(lines: &[(&Shown<'_>, Vec<f64>)]) -> Option<[f64; 2]> {
    const SMALLEST_S: f64 = 1e-4;
    let low = lines
        .iter()
        .filter_map(|(_, values)| values.first())
        .copied()
        .min_by(f64::total_cmp)?;
    let high = lines
        .iter()
        .filter_map(|(_, values)| values.last())
        .copied()
        .max_by(f64::total_cmp)?;
    Some([low.max(SMALLEST_S), high.max(SMALLEST_S)])
}

/// A step line through evenly spaced ranks.
fn line(out: &mut String, report: &Shown<'_>, values: &[f64], x: &Scale, y: &Scale) {
    if values.is_empty() {
        return;
    }
    let points = values.len().min(POINTS_MAX);
    let _ = write!(
        out,
        "<polyline class=\"line s{} d{}\" data-label=\"{}\" points=\"",
        report.colour, report.colour, report.label
    );
    for point in 1..=points {
        // The last point is the largest value, whatever the thinning.
        let rank = (values.len() * point).div_ceil(points);
        let share = rank as f64 / values.len() as f64;
        let _ = write!(out, "{:.1},{:.1} ", x.at(values[rank - 1]), y.at(share));
    }
    out.push_str("\"/>");
}

/// Marks at the median, p90 and p99, which the keyboard reaches.
fn marks(out: &mut String, report: &Shown<'_>, values: &[f64], x: &Scale, y: &Scale) {
    for (name, per_mille) in QUANTILES {
        let Some(value) = quantile(values, per_mille) else {
            continue;
        };
        let says = format!("{} {}: {name} {} s", report.label, report.policy, figure(value));
        let _ = write!(
            out,
            "<circle class=\"mark f{}\" tabindex=\"0\" role=\"img\" aria-label=\"{}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\"><title>{}</title></circle>",
            report.colour,
            escape(&says),
            x.at(value),
            y.at(per_mille as f64 / 1000.0),
            escape(&says)
        );
    }
}

const QUANTILES: [(&str, usize); 3] = [("p50", 500), ("p90", 900), ("p99", 990)];

fn table(out: &mut String, lines: &[(&Shown<'_>, Vec<f64>)]) {
    out.push_str("<details><summary>Values</summary><table><thead><tr><th scope=\"col\">report</th><th scope=\"col\">requests</th>");
    for (name, _) in QUANTILES {
        let _ = write!(out, "<th scope=\"col\">{name}, s</th>");
    }
    out.push_str("<th scope=\"col\">max, s</th></tr></thead><tbody>");
    for (report, values) in lines {
        let _ = write!(
            out,
            "<tr><th scope=\"row\">{}</th><td>{}</td>",
            report.label,
            values.len()
        );
        for per_mille in QUANTILES.map(|(_, per_mille)| per_mille).into_iter().chain([1000]) {
            let value = quantile(values, per_mille).map_or_else(|| "-".to_owned(), figure);
            let _ = write!(out, "<td>{value}</td>");
        }
        out.push_str("</tr>");
    }
    out.push_str("</tbody></table></details>");
}
