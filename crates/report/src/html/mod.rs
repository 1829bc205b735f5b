//! A comparison as one page: a single HTML file that needs no network, no script and no font of its own.
//!
//! Charts are inline SVG made here, one chart a file; colours are variables, so that light and dark are one drawing. With
//! scripts off everything is there (values are in titles and tables); the script adds a reading line to the
//! distributions. Equal input is equal bytes. Every text that comes from data goes through `escape`, and the page
//! forbids itself all outside sources. Sizes are bounded: points, rows and workers have caps, which the page states.

mod append;
mod cdf;
mod evictions;
mod load;
mod sessions;
mod svg;
mod tables;

use crate::compare::{Comparison, Source};
use crate::logs::{EvictionLine, RequestLine, WorkerSampleLine};
use std::fmt::Write as _;

/// The structural logs of one run, as far as the page shows them; empty where a run has none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunLogs {
    /// The run's seed; `None` where its logs do not say.
    pub seed: Option<u64>,
    /// Its requests.
    pub requests: Vec<RequestLine>,
    /// Its workers' load.
    pub samples: Vec<WorkerSampleLine>,
    /// Its evictions.
    pub evictions: Vec<EvictionLine>,
}

/// One report of the page, with the logs of its runs.
pub(crate) struct Shown<'a> {
    /// `A`, `B`, ...
    pub label: &'a str,
    /// Its policy, with parameters.
    pub policy: &'a str,
    /// Index of its colour.
    pub colour: usize,
    /// The report.
    pub source: &'a Source,
    /// Its logs.
    pub logs: &'a [RunLogs],
}

/// The page of a comparison of `sources`, with the logs of each source's runs.
///
/// # Panics
/// If there are not as many logs as sources, or the comparison is one of other sources.
#[must_use]
pub fn page(comparison: &Comparison, sources: &[Source], logs: &[Vec<RunLogs>]) -> String {
    assert_eq!(
        (sources.len(), sources.len()),
        (comparison.reports.len(), logs.len()),
        "one of each a report"
    );
    let shown: Vec<Shown<'_>> = sources
        .iter()
        .zip(logs)
        .zip(&comparison.reports)
        .enumerate()
        .map(|(colour, ((source, logs), report))| Shown {
            label: &report.label,
            policy: &report.policy,
            colour,
            source,
            logs,
        })
        .collect();
    let mut page = head(&title(comparison));
    tables::reports(&mut page, comparison, &shown);
    tables::verdicts(&mut page, comparison);
    page.push_str("<section aria-labelledby=\"cdfs\"><h2 id=\"cdfs\">How long requests took</h2><div class=\"pair\">");
    cdf::chart(&mut page, "Time to first token", &shown, |request| request.ttft_s);
    cdf::chart(&mut page, "Latency, to the last token", &shown, |request| {
        Some(request.latency_s)
    });
    page.push_str("</div></section>\n");
    load::section(&mut page, &shown);
    sessions::section(&mut page, &shown);
    page.push_str(
        "<section aria-labelledby=\"cache\"><h2 id=\"cache\">How the cache was used</h2><div class=\"pair\">",
    );
    append::chart(&mut page, &shown);
    evictions::chart(&mut page, &shown);
    page.push_str("</div></section>\n");
    tables::workers(&mut page, &shown);
    tables::everything(&mut page, comparison);
    page.push_str("</main>\n<script>\n");
    page.push_str(include_str!("script.js"));
    page.push_str("</script>\n</body>\n</html>\n");
    page
}

fn title(comparison: &Comparison) -> String {
    let policies: Vec<&str> = comparison.reports.iter().map(|report| report.policy.as_str()).collect();
    policies.join(" against ")
}

/// Everything above the first section.
fn head(title: &str) -> String {
    let title = escape(title);
    // The variables of the dark theme are needed twice: where the system asks for it, and where the reader does.
    let style = include_str!("style.css").replace("/* DARK */", include_str!("dark.css").trim_end());
    let mut page = String::with_capacity(1 << 20);
    let _ = write!(
        page,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n\
         <title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<header><div><p class=\"over\">homing compare</p><h1>{title}</h1></div>\n\
         <fieldset class=\"theme\"><legend>Theme</legend>\
         <input type=\"radio\" name=\"theme\" id=\"theme-auto\" checked><label for=\"theme-auto\">Auto</label>\
         <input type=\"radio\" name=\"theme\" id=\"theme-light\"><label for=\"theme-light\">Light</label>\
         <input type=\"radio\" name=\"theme\" id=\"theme-dark\"><label for=\"theme-dark\">Dark</label></fieldset></header>\n<main>\n"
    );
    page
}

/// Text that is safe between tags and in quoted attributes.
pub(crate) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            _ => safe.push(letter),
        }
    }
    safe
}

/// The names and colours of the reports, for the charts that show all of them.
pub(crate) fn legend(shown: &[Shown<'_>]) -> String {
    let mut legend = String::from("<p class=\"legend\">");
    for report in shown {
        let _ = write!(
            legend,
            "<span><i class=\"swatch b{}\"></i>{} {}</span>",
            report.colour,
            report.label,
            escape(report.policy)
        );
    }
    legend.push_str("</p>");
    legend
}

#[cfg(test)]
mod tests;
