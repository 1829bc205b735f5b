//! What is compared, what can be said of it, and every figure.

use super::{Shown, escape};
use crate::compare::{Comparison, MetricComparison, Verdict, said};
use crate::metric::{Better, HEADLINE, figure};
use crate::summary::MetricSummary;
use std::fmt::Write as _;

/// The reports as cards, and what makes them hard to compare.
pub(super) fn reports(out: &mut String, comparison: &Comparison, shown: &[Shown<'_>]) {
    out.push_str("<section class=\"cards\" aria-label=\"Reports\">");
    for (report, of) in comparison.reports.iter().zip(shown) {
        let seeds: Vec<String> = report.seeds.iter().take(10).map(u64::to_string).collect();
        let more = if report.seeds.len() > seeds.len() { " …" } else { "" };
        let sent: u64 = of.source.report.runs.iter().map(|run| run.requests).sum();
        let failed: u64 = of.source.report.runs.iter().map(|run| run.errors.total).sum();
        let _ = write!(
            out,
            "<article class=\"card t{}\"><h2><b>{}</b> {}</h2><dl><dt>cluster</dt><dd>{}</dd><dt>trace</dt><dd>{}</dd><dt>time scale</dt><dd>{}</dd>\
             <dt>runs</dt><dd>{} <small>seeds {}{more}</small></dd><dt>requests</dt><dd>{sent} <small>{failed} failed</small></dd><dt>from</dt><dd class=\"path\">{}</dd></dl></article>",
            of.colour,
            report.label,
            escape(&report.policy),
            escape(&report.cluster),
            escape(&report.trace),
            report.time_scale,
            report.seeds.len(),
            seeds.join(" "),
            escape(&report.name)
        );
    }
    out.push_str("</section>\n");
    unlike(out, comparison);
    if !comparison.notes.is_empty() {
        out.push_str("<aside class=\"notes\" aria-label=\"Notes\"><ul>");
        for note in &comparison.notes {
            let _ = write!(out, "<li>{}</li>", escape(note));
        }
        out.push_str("</ul></aside>\n");
    }
}

fn unlike(out: &mut String, comparison: &Comparison) {
    if comparison.unlike.is_empty() {
        return;
    }
    out.push_str("<aside class=\"unlike\" role=\"alert\"><h2>Comparing unlike things</h2><p>A difference below may come from these, not from the policy.</p><table><tbody>");
    for unlike in &comparison.unlike {
        let _ = write!(out, "<tr><th scope=\"row\">{}</th>", escape(&unlike.what));
        for (report, value) in comparison.reports.iter().zip(&unlike.values) {
            let _ = write!(out, "<td><b>{}</b> {}</td>", report.label, escape(value));
        }
        out.push_str("</tr>");
    }
    out.push_str("</tbody></table></aside>\n");
}

/// The headline figures with intervals and verdicts.
pub(super) fn verdicts(out: &mut String, comparison: &Comparison) {
    let headline: Vec<&MetricComparison> = comparison
        .metrics
        .iter()
        .filter(|metric| HEADLINE.contains(&metric.name.as_str()))
        .collect();
    out.push_str("<section aria-labelledby=\"verdicts\"><h2 id=\"verdicts\">What can be said</h2>");
    if comparison.reports.len() > 1 {
        let count = |verdict| headline.iter().filter(|metric| metric.verdict == verdict).count();
        let standing = count(Verdict::Better) + count(Verdict::Differs);
        let _ = write!(
            out,
            "<p class=\"lead\"><b>{standing} of {}</b> headline figures differ beyond the spread of the runs; {} are not distinguishable. \
             A winner is called only where 95% intervals lie apart and each side has three runs or more.</p>",
            headline.len(),
            count(Verdict::NotDistinguishable)
        );
    } else {
        out.push_str("<p class=\"lead\">One report: figures with their 95% intervals over runs, and nothing to compare them with.</p>");
    }
    table(out, comparison, &headline);
    out.push_str("</section>\n");
}

/// Every figure that any report has, and the differences by seed.
pub(super) fn everything(out: &mut String, comparison: &Comparison) {
    let rest: Vec<&MetricComparison> = comparison
        .metrics
        .iter()
        .filter(|metric| !HEADLINE.contains(&metric.name.as_str()))
        .collect();
    let _ = write!(
        out,
        "<section aria-labelledby=\"all\"><h2 id=\"all\">Every figure</h2><details><summary>{} more figures</summary>",
        rest.len()
    );
    table(out, comparison, &rest);
    out.push_str("</details>");
    paired(out, comparison);
    out.push_str("</section>\n");
}

fn table(out: &mut String, comparison: &Comparison, metrics: &[&MetricComparison]) {
    let many = comparison.reports.len() > 1;
    out.push_str("<div class=\"scroll\"><table class=\"figures\"><thead><tr><th scope=\"col\">figure</th><th scope=\"col\">better</th>");
    for (index, report) in comparison.reports.iter().enumerate() {
        let _ = write!(
            out,
            "<th scope=\"col\"><i class=\"swatch b{index}\"></i>{} <small>mean, 95%</small></th>",
            report.label
        );
    }
    out.push_str("<th scope=\"col\">intervals</th>");
    out.push_str(if many {
        "<th scope=\"col\">verdict</th></tr></thead><tbody>"
    } else {
        "</tr></thead><tbody>"
    });
    for metric in metrics {
        let better = match metric.better {
            Better::Lower => "lower",
            Better::Higher => "higher",
            Better::Neither => "",
        };
        let unit = if metric.unit.is_empty() {
            String::new()
        } else {
            format!(" <small>{}</small>", metric.unit)
        };
        let _ = write!(
            out,
            "<tr><th scope=\"row\">{}{unit}</th><td class=\"way\">{better}</td>",
            escape(&metric.name)
        );
        for (report, summary) in comparison.reports.iter().zip(&metric.reports) {
            let wins = if metric.winner.as_ref() == Some(&report.label) {
                " class=\"wins\""
            } else {
                ""
            };
            let _ = write!(out, "<td{wins}>{}</td>", cell(summary.as_ref()));
        }
        let _ = write!(out, "<td class=\"plot\">{}</td>", intervals(metric));
        if many {
            let class = match metric.verdict {
                Verdict::Better => "good",
                Verdict::Differs => "differs",
                _ => "even",
            };
            let _ = write!(
                out,
                "<td><span class=\"verdict {class}\">{}</span></td>",
                escape(&said(metric))
            );
        }
        out.push_str("</tr>");
    }
    out.push_str("</tbody></table></div>");
}

fn cell(summary: Option<&MetricSummary>) -> String {
    match summary {
        None => "–".to_owned(),
        Some(MetricSummary {
            mean,
            ci95: Some([low, high]),
            ..
        }) => format!("{} <small>{} … {}</small>", figure(*mean), figure(*low), figure(*high)),
        Some(MetricSummary { mean, .. }) => format!("{} <small>one run</small>", figure(*mean)),
    }
}

/// The intervals of a figure, one below the other, on a scale of their own.
fn intervals(metric: &MetricComparison) -> String {
    const WIDTH: f64 = 150.0;
    const ROW: f64 = 8.0;
    let bounds = |summary: &MetricSummary| summary.ci95.unwrap_or([summary.mean; 2]);
    let known = || metric.reports.iter().flatten();
    let low = known().map(|summary| bounds(summary)[0]).fold(f64::INFINITY, f64::min);
    let high = known()
        .map(|summary| bounds(summary)[1])
        .fold(f64::NEG_INFINITY, f64::max);
    if low > high {
        return String::new();
    }
    let at = |value: f64| {
        let share = if high > low { (value - low) / (high - low) } else { 0.5 };
        6.0 + share * (WIDTH - 12.0)
    };
    let height = ROW * metric.reports.len() as f64 + 4.0;
    let mut plot =
        format!("<svg viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" aria-hidden=\"true\">");
    for (index, summary) in metric.reports.iter().enumerate() {
        let Some(summary) = summary else { continue };
        let y = ROW * (index as f64 + 0.5) + 2.0;
        let [from, to] = bounds(summary).map(at);
        let _ = write!(
            plot,
            "<path class=\"whisker s{index}\" d=\"M{from:.1} {y:.1}H{to:.1}M{from:.1} {:.1}v5M{to:.1} {:.1}v5\"/><circle class=\"f{index}\" cx=\"{:.1}\" cy=\"{y:.1}\" r=\"3\"/>",
            y - 2.5,
            y - 2.5,
            at(summary.mean)
        );
    }
    plot.push_str("</svg>");
    plot
}

/// The differences between runs of one seed, where there are any.
fn paired(out: &mut String, comparison: &Comparison) {
    let mut rows = String::new();
    for metric in comparison
        .metrics
        .iter()
        .filter(|metric| HEADLINE.contains(&metric.name.as_str()))
    {
        for pair in &metric.pairs {
            let Some(paired) = pair.paired.filter(|paired| paired.ci95.is_some()) else {
                continue;
            };
            let [low, high] = paired.ci95.unwrap_or_default();
            let apart = if paired.apart_from_zero {
                "apart from 0"
            } else {
                "includes 0"
            };
            let _ = write!(
                rows,
                "<tr><th scope=\"row\">{}</th><td>{} − {}</td><td>{} <small>{} … {}</small></td><td>{apart}</td></tr>",
                escape(&metric.name),
                pair.b,
                pair.a,
                figure(paired.mean),
                figure(low),
                figure(high)
            );
        }
    }
    if rows.is_empty() {
        return;
    }
    let _ = write!(
        out,
        "<details><summary>Differences by seed</summary><p class=\"note\">The same seeds were run on the same workload, so runs can be paired. This is the sharper \
         instrument, stated for what it is worth; the verdicts above follow the stricter rule.</p><div class=\"scroll\"><table class=\"figures\"><thead><tr><th scope=\"col\">figure</th>\
         <th scope=\"col\">difference</th><th scope=\"col\">mean, 95%</th><th scope=\"col\">interval</th></tr></thead><tbody>{rows}</tbody></table></div></details>"
    );
}

/// The workers of each report's first run.
pub(super) fn workers(out: &mut String, shown: &[Shown<'_>]) {
    const WORKERS_MAX: usize = 64;
    out.push_str("<section aria-labelledby=\"workers\"><h2 id=\"workers\">Workers</h2>");
    for report in shown {
        let Some(run) = report.source.report.runs.first() else {
            continue;
        };
        let _ = write!(
            out,
            "<details><summary><i class=\"swatch b{}\"></i>{} {} <small>seed {}, {} workers</small></summary><div class=\"scroll\"><table class=\"figures\"><thead><tr>",
            report.colour,
            report.label,
            escape(report.policy),
            run.seed,
            run.workers.len()
        );
        for name in [
            "worker",
            "role",
            "requests",
            "sessions",
            "busy",
            "KV use, max",
            "evictions",
            "tokens each",
            "transfers in",
            "out",
            "failed",
        ] {
            let _ = write!(out, "<th scope=\"col\">{name}</th>");
        }
        out.push_str("</tr></thead><tbody>");
        let count = |count: Option<u64>| count.map_or_else(|| "–".to_owned(), |count| count.to_string());
        let share = |share: Option<f64>| share.map_or_else(|| "–".to_owned(), |share| format!("{:.0}%", share * 100.0));
        for worker in run.workers.iter().take(WORKERS_MAX) {
            let each = worker
                .evicted_tokens_per_event_mean
                .map_or_else(|| "–".to_owned(), figure);
            let _ = write!(
                out,
                "<tr><th scope=\"row\">{}</th><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{each}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
                escape(&worker.name),
                escape(&worker.role),
                worker.requests,
                worker.sessions,
                share(worker.busy_ratio),
                share(worker.kv_usage_max),
                count(worker.evictions),
                count(worker.transfers_in),
                count(worker.transfers_out),
                count(worker.transfer_errors)
            );
        }
        out.push_str("</tbody></table></div>");
        if run.workers.len() > WORKERS_MAX {
            let _ = write!(
                out,
                "<p class=\"note\">The first {WORKERS_MAX} of {} workers.</p>",
                run.workers.len()
            );
        }
        out.push_str("</details>");
    }
    out.push_str("</section>\n");
}
