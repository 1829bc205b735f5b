//! What `sim` and `replay` share: how a replay is set up, progress, and where results go.

use crate::args::WorkloadArgs;
use crate::output::{OutFolder, print, say};
use anyhow::Result;
use homing_report::logs::LogLine as _;
use homing_report::logs::RequestLine;
use homing_report::metric::{HEADLINE, figure};
use homing_report::{LeftOut, Report, RunRecord};
use homing_workload::{ReplayConfig, Start};
use indicatif::{ProgressBar, ProgressStyle};
use std::fmt::Write as _;
use std::io::IsTerminal;
use std::path::Path;

/// How sessions start, where the command line says so.
pub fn start(args: &WorkloadArgs) -> Option<Start> {
    args.concurrency.map(Start::Concurrency).or(args.rate.map(Start::Rate))
}

/// What to replay, and how.
pub fn replay_config(args: &WorkloadArgs, start: Start, seed: u64) -> ReplayConfig {
    ReplayConfig {
        start,
        time_scale: args.time_scale,
        max_inflight: args.max_inflight,
        max_turns: args.max_turns,
        sessions: args.sessions,
        max_context: args.max_context,
        keep_order: args.keep_order,
        seed,
        ..ReplayConfig::default()
    }
}

/// A time scale other than 1 changes conclusions: it is said loudly.
pub fn say_scale(time_scale: f64) {
    if (time_scale - 1.0).abs() > f64::EPSILON {
        say(format_args!(
            "note: recorded gaps are divided by {time_scale}; idle time in which workers drain is not what it was"
        ));
    }
}

/// The replay's count of what it left out, as the report has it.
pub fn left_out(counted: homing_workload::LeftOut) -> LeftOut {
    LeftOut {
        sessions: counted.sessions,
        sessions_shortened: counted.sessions_shortened,
        turns: counted.turns,
        turns_over_limit: counted.turns_over_limit,
        sessions_over_limit: counted.sessions_over_limit,
    }
}

/// The lines of `requests.jsonl`.
pub fn request_lines(runs: &[RunRecord]) -> Vec<u8> {
    let requests = runs.iter().flat_map(|run| &run.requests);
    requests
        .map(|request| RequestLine::from(request).to_line())
        .collect::<String>()
        .into_bytes()
}

/// Where results go, if anywhere: checked and made before any work, seen when all is there.
pub fn out_folder(out: Option<&Path>) -> Result<Option<OutFolder>> {
    out.map(|out| OutFolder::create("--out", out)).transpose()
}

/// Writes the report and the logs into `out`, and prints the report.
pub fn publish(report: &Report, logs: &[(String, Vec<u8>)], out: Option<OutFolder>, json: bool) -> Result<()> {
    if let Some(out) = out {
        for (name, lines) in logs {
            out.write(name, lines)?;
        }
        out.write("summary.json", format!("{}\n", report.to_json_pretty()).as_bytes())?;
        out.keep()?;
    }
    print(&if json {
        format!("{}\n", report.to_json())
    } else {
        table(report)
    })
}

/// The figures that matter most, for people.
fn table(report: &Report) -> String {
    let mut text = format!("{} on {} with {}\n", report.trace, report.cluster, report.policy);
    let seconds = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"));
    for run in &report.runs {
        let paths = &run.paths;
        let _ = writeln!(
            text,
            "seed {}: {} requests, {} completed, {} errors {:?}, {:.0} s\n  TTFT s    mean {} p50 {} p90 {} p99 {}\n  latency s mean {} p50 {} p90 {} p99 {}\n  \
             hit ratio {}  append {} seed {} reseed {} migrate {} local {}",
            run.seed,
            run.requests,
            run.completed,
            run.errors.total,
            run.errors.by_kind,
            run.duration_s,
            seconds(run.ttft_s.mean),
            seconds(run.ttft_s.p50),
            seconds(run.ttft_s.p90),
            seconds(run.ttft_s.p99),
            seconds(run.latency_s.mean),
            seconds(run.latency_s.p50),
            seconds(run.latency_s.p90),
            seconds(run.latency_s.p99),
            seconds(run.hit_ratio),
            paths.append,
            paths.seed,
            paths.reseed,
            paths.migrate,
            paths.local
        );
    }
    summary(report, &mut text);
    for warning in &report.warnings {
        let _ = writeln!(text, "note: {warning}");
    }
    text
}

/// Over several runs: mean, spread and interval of the figures that most readers want first.
fn summary(report: &Report, text: &mut String) {
    if report.runs.len() < 2 {
        return;
    }
    let _ = writeln!(
        text,
        "over {} runs: mean, standard deviation, 95% interval of the mean",
        report.runs.len()
    );
    for name in HEADLINE {
        let Some(summary) = report.summary.get(name) else {
            continue;
        };
        let spread = summary.stdev.map_or_else(|| "-".to_owned(), figure);
        let interval = summary.ci95.map_or_else(
            || "-".to_owned(),
            |[low, high]| format!("[{} {}]", figure(low), figure(high)),
        );
        let _ = writeln!(text, "  {name:<26} {:>9} {spread:>9}  {interval}", figure(summary.mean));
    }
}

/// A progress bar on a terminal, and nothing elsewhere.
pub struct Progress(Option<ProgressBar>);

impl Progress {
    /// A bar of so many turns.
    pub fn new(turns: u64) -> Self {
        let style = ProgressStyle::with_template("{bar:40} {pos}/{len} turns, {elapsed} gone, {eta} left");
        let shown = std::io::stderr().is_terminal();
        Self(
            style
                .ok()
                .filter(|_| shown)
                .map(|style| ProgressBar::new(turns).with_style(style)),
        )
    }

    /// So many turns have ended.
    pub fn set(&self, turns: u64) {
        if let Some(bar) = &self.0 {
            bar.set_position(turns);
        }
    }

    /// All have.
    pub fn finish(&self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_report::{ClassBounds, Experiment};

    #[test]
    fn several_runs_are_summed_up_with_their_spread() {
        let check = |runs: usize, expected: bool| {
            let experiment = Experiment {
                trace: "t".to_owned(),
                cluster: "c".to_owned(),
                policy: "p".to_owned(),
                time_scale: 1.0,
                block_size: None,
                classes: ClassBounds::default(),
                left_out: LeftOut::default(),
            };
            let text = table(&Report::new(&experiment, &vec![RunRecord::default(); runs]));
            assert_eq!(text.contains("95% interval"), expected, "{text}");
            assert_eq!(
                text.contains("errors.total                       0         0  [0 0]"),
                expected,
                "{text}"
            );
        };
        check(1, false);
        check(3, true);
    }
}
