//! Which worker served each session, over one run: a row a session, in order of arrival, coloured by worker.
//!
//! One run a report, the first with requests. A session that stays is one colour; one that wanders is many.

use super::svg::{Frame, Scale};
use super::{RunLogs, Shown, escape};
use crate::logs::RequestLine;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// Sessions drawn, at most, and colours for workers before they repeat.
const SESSIONS_MAX: usize = 200;
const COLOURS: usize = 8;

/// Turns of one worker that are closer than this are drawn as one stroke.
const MERGED_BELOW: f64 = 1.0;

/// The section: one drawing a report.
pub(super) fn section(out: &mut String, shown: &[Shown<'_>]) {
    out.push_str(
        "<section aria-labelledby=\"map\"><h2 id=\"map\">Where each session lived</h2>\
         <p class=\"lead\">A row is a session, in order of arrival; a stroke is a turn, coloured by the worker that decoded it. \
         A session at home keeps one colour.</p>",
    );
    for report in shown {
        let _ = write!(
            out,
            "<figure><figcaption><i class=\"swatch b{}\"></i>{} {}",
            report.colour,
            report.label,
            escape(report.policy)
        );
        match report.logs.iter().find(|run| !run.requests.is_empty()) {
            Some(run) => drawing(out, report, run),
            None => out.push_str("</figcaption><p class=\"empty\">No request log beside the summary.</p>"),
        }
        out.push_str("</figure>");
    }
    out.push_str("</section>\n");
}

fn drawing(out: &mut String, report: &Shown<'_>, run: &RunLogs) {
    let workers: BTreeSet<&str> = run
        .requests
        .iter()
        .filter_map(|request| request.worker.as_deref())
        .collect();
    let colours: BTreeMap<&str, usize> = workers
        .iter()
        .enumerate()
        .map(|(index, name)| (*name, index % COLOURS))
        .collect();
    let sessions = rows(&run.requests);
    let drawn = sessions.len().min(SESSIONS_MAX);
    let height = if drawn <= 60 { 8.0 } else { 4.0 };
    let seed = run.seed.map_or_else(String::new, |seed| format!(", seed {seed}"));
    let _ = write!(
        out,
        " <small>one run{seed}, {} sessions</small></figcaption><p class=\"legend\">",
        sessions.len()
    );
    for (name, colour) in colours.iter().take(3 * COLOURS) {
        let _ = write!(out, "<span><i class=\"swatch b{colour}\"></i>{}</span>", escape(name));
    }
    out.push_str("<span><i class=\"swatch fail\"></i>failed</span></p>");
    if workers.len() > COLOURS {
        let _ = write!(
            out,
            "<p class=\"note\">{} workers share {COLOURS} colours; titles name them.</p>",
            workers.len()
        );
    }
    let end = run
        .requests
        .iter()
        .map(|request| request.t + request.latency_s)
        .fold(0.0, f64::max);
    let says = format!("Worker of each session over time, report {}", report.label);
    let (frame, x) = Frame::begin_rows(out, [26.0, drawn as f64 * height], end, &says);
    out.push_str("<text class=\"name\" x=\"2\" y=\"16\">sessions, by arrival</text>");
    for (index, (name, requests)) in sessions.iter().take(SESSIONS_MAX).enumerate() {
        let middle = frame.top + (index as f64 + 0.5) * height;
        row(out, name, requests, &colours, [middle, height], &x);
        if index % 10 == 0 {
            let _ = write!(
                out,
                "<text class=\"tick\" x=\"56\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                middle + 4.0,
                index + 1
            );
        }
    }
    out.push_str("</svg>");
    if sessions.len() > drawn {
        let _ = write!(
            out,
            "<p class=\"note\">The first {drawn} of {} sessions are drawn.</p>",
            sessions.len()
        );
    }
}

/// The requests of each session, sessions and requests by arrival.
fn rows(requests: &[RequestLine]) -> Vec<(&str, Vec<&RequestLine>)> {
    let mut by_session: BTreeMap<&str, Vec<&RequestLine>> = BTreeMap::new();
    for request in requests {
        by_session.entry(&request.session).or_default().push(request);
    }
    let mut rows: Vec<(&str, Vec<&RequestLine>)> = by_session.into_iter().collect();
    for (_, requests) in &mut rows {
        requests.sort_by(|a, b| a.t.total_cmp(&b.t));
    }
    rows.sort_by(|(_, a), (_, b)| a[0].t.total_cmp(&b[0].t));
    rows
}

/// A session: a path for each of its workers, and one for what failed.
fn row(
    out: &mut String,
    name: &str,
    requests: &[&RequestLine],
    colours: &BTreeMap<&str, usize>,
    place: [f64; 2],
    x: &Scale,
) {
    let [middle, height] = place;
    let mut strokes: BTreeMap<&str, (Vec<[f64; 2]>, u32)> = BTreeMap::new();
    let mut failures = String::new();
    let mut last_worker = None;
    for request in requests {
        let (from, to) = (x.at(request.t), x.at(request.t + request.latency_s));
        if request.error.is_some() {
            let _ = write!(failures, "M{from:.1} {:.1}v{:.1}", middle - height * 0.45, height * 0.9);
        }
        let Some(worker) = request.worker.as_deref() else {
            continue;
        };
        let (strokes, turns) = strokes.entry(worker).or_default();
        *turns += 1;
        match strokes.last_mut() {
            // Never over a stay elsewhere.
            Some(last) if last_worker == Some(worker) && from - last[1] < MERGED_BELOW => last[1] = last[1].max(to),
            _ => strokes.push([from, to]),
        }
        last_worker = Some(worker);
    }
    for (worker, (strokes, turns)) in strokes {
        let colour = colours.get(worker).copied().unwrap_or_default();
        let _ = write!(
            out,
            "<path class=\"turn s{colour}\" stroke-width=\"{:.1}\" d=\"",
            height * 0.72
        );
        for [from, to] in strokes {
            let _ = write!(out, "M{from:.1} {middle:.1}h{:.1}", (to - from).max(0.6));
        }
        let _ = write!(
            out,
            "\"><title>{}: {turns} of {} turns on {}</title></path>",
            escape(name),
            requests.len(),
            escape(worker)
        );
    }
    if !failures.is_empty() {
        let failed = requests.iter().filter(|request| request.error.is_some()).count();
        let _ = write!(
            out,
            "<path class=\"failed\" d=\"{failures}\"><title>{}: {failed} failed</title></path>",
            escape(name)
        );
    }
}
