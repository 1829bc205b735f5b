//! Modes of measurement: what bends conclusions and breaks nothing.

use crate::case::{Case, median, report_proof};
use crate::finding::{Cost, Level, Suspicion};
use crate::mode::ModeId;

/// Runs from which on a spread is known.
const RUNS_WANTED: usize = 3;

/// Gaps were divided, which matters where workers were under pressure.
pub(super) fn time_scale(case: &Case<'_>) -> Option<Suspicion> {
    let scale = case.report?.time_scale;
    if scale <= 1.0 {
        return None;
    }
    let mut gaps = Vec::new();
    for turns in case.agents().into_values() {
        for pair in turns.windows(2) {
            gaps.push(pair[1].value.t - pair[0].value.t - pair[0].value.latency_s);
        }
    }
    let gap = median(gaps.into_iter());
    let (failed, evicted) = (case.failed().count(), case.logs.evictions.lines.len());
    let seen = format!(
        "recorded gaps were divided by {scale}: the median gap between turns is {gap:.2} s instead of {:.2} s, while {failed} requests \
         failed and workers evicted {evicted} times",
        gap * scale
    );
    let proof = report_proof(format!("time_scale: {scale}"));
    let found = Suspicion::new(ModeId::TimeScale, Cost::default(), seen, vec![proof]);
    // Without pressure nothing depends on the idle time.
    Some(if failed > 0 {
        found.at_least(Level::Warning)
    } else {
        found
    })
}

/// There are too few runs to know a spread.
pub(super) fn single_run(case: &Case<'_>) -> Option<Suspicion> {
    let runs = case.report?.runs.len();
    if runs >= RUNS_WANTED {
        return None;
    }
    let seen = format!("{runs} run(s): below {RUNS_WANTED} nobody knows by how much equal runs differ");
    let proof = report_proof(format!("runs: {runs}"));
    Some(Suspicion::new(ModeId::SingleRun, Cost::default(), seen, vec![proof]).at_most(Level::Info))
}
