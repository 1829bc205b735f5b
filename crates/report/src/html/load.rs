//! Each worker's load over one run: requests that run and that wait, and how full its KV pool is.
//!
//! One run a report, the first with samples: a mean over runs would smooth away the bursts that the chart is for.

use super::svg::{Frame, Scale};
use super::{RunLogs, Shown, escape};
use crate::logs::WorkerSampleLine;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// Workers drawn, at most, and steps in time.
const WORKERS_MAX: usize = 16;
const STEPS_MAX: usize = 240;

const ROW: f64 = 40.0;
const GAP: f64 = 8.0;

/// What a worker did during one step in time: the largest of each.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Step {
    running: f64,
    waiting: f64,
    kv_share: f64,
}

/// The section: one drawing a report.
pub(super) fn section(out: &mut String, shown: &[Shown<'_>]) {
    out.push_str(
        "<section aria-labelledby=\"load\"><h2 id=\"load\">Load of each worker over time</h2>\
         <p class=\"legend\"><span><i class=\"swatch run\"></i>requests running</span><span><i class=\"swatch wait\"></i>requests waiting or importing KV</span>\
         <span><i class=\"swatch kv\"></i>KV pool held, of its size</span></p>",
    );
    let sampled = |report: &Shown<'_>| report.logs.iter().position(|run| !run.samples.is_empty());
    let requests = shown
        .iter()
        .filter_map(|report| Some(most_requests(&report.logs[sampled(report)?].samples)));
    let most = requests.fold(1.0, f64::max);
    for report in shown {
        let _ = write!(
            out,
            "<figure><figcaption><i class=\"swatch b{}\"></i>{} {}",
            report.colour,
            report.label,
            escape(report.policy)
        );
        match sampled(report) {
            Some(run) => drawing(out, report, &report.logs[run], most),
            None => out.push_str("</figcaption><p class=\"empty\">No worker samples beside the summary.</p>"),
        }
        out.push_str("</figure>");
    }
    out.push_str("</section>\n");
}

fn most_requests(samples: &[WorkerSampleLine]) -> f64 {
    let all = samples
        .iter()
        .map(|sample| sample.running + sample.waiting + sample.importing);
    all.max().unwrap_or(0).into()
}

fn drawing(out: &mut String, report: &Shown<'_>, run: &RunLogs, most: f64) {
    let end = run.samples.iter().map(|sample| sample.t).fold(0.0, f64::max).max(1e-6);
    let workers = steps(&run.samples, end);
    let rows = workers.len().min(WORKERS_MAX);
    let seed = run.seed.map_or_else(String::new, |seed| format!(", seed {seed}"));
    let _ = write!(
        out,
        " <small>one run{seed}; each row is up to {most:.0} requests high</small></figcaption>"
    );
    let says = format!("Load of each worker over time, report {}", report.label);
    let (frame, x) = Frame::begin_rows(out, [8.0, rows as f64 * (ROW + GAP)], end, &says);
    for (index, (name, steps)) in workers.iter().take(WORKERS_MAX).enumerate() {
        row(
            out,
            name,
            steps,
            [frame.top + index as f64 * (ROW + GAP), most],
            &x,
            end,
        );
    }
    out.push_str("</svg>");
    if workers.len() > rows {
        let _ = write!(
            out,
            "<p class=\"note\">{rows} of {} workers are drawn.</p>",
            workers.len()
        );
    }
}

/// The steps of each worker. A sample that would say what the worker's last one said is left out of the log, so a step
/// without samples is as the last sample left it.
fn steps(samples: &[WorkerSampleLine], end: f64) -> BTreeMap<&str, Vec<Step>> {
    // Seconds that are not negative are in the order of their bits.
    let instants: BTreeSet<u64> = samples.iter().map(|sample| sample.t.to_bits()).collect();
    let count = instants.len().clamp(1, STEPS_MAX);
    let mut by_worker: BTreeMap<&str, Vec<&WorkerSampleLine>> = BTreeMap::new();
    for sample in samples {
        by_worker.entry(&sample.worker).or_default().push(sample);
    }
    let steps = by_worker.into_iter().map(|(worker, mut samples)| {
        samples.sort_by(|a, b| a.t.total_cmp(&b.t));
        (worker, steps_of(&samples, count, end))
    });
    steps.collect()
}

/// The steps of one worker, whose samples are in order.
fn steps_of(samples: &[&WorkerSampleLine], count: usize, end: f64) -> Vec<Step> {
    let mut samples = samples.iter().peekable();
    let mut last = Step::default();
    let steps = (0..count).map(|index| {
        let within = |t: f64| ((t / end * count as f64) as usize).min(count - 1) <= index;
        let mut largest: Option<Step> = None;
        while let Some(sample) = samples.next_if(|sample| within(sample.t)) {
            last = Step::of(sample);
            largest = Some(largest.map_or(last, |step| step.largest(last)));
        }
        largest.unwrap_or(last)
    });
    steps.collect()
}

impl Step {
    fn of(sample: &WorkerSampleLine) -> Self {
        let held = (sample.kv_tokens_used + sample.kv_tokens_cached) as f64 / sample.kv_tokens.max(1) as f64;
        Self {
            running: sample.running.into(),
            waiting: (sample.waiting + sample.importing).into(),
            kv_share: held.min(1.0),
        }
    }

    /// The larger of each.
    fn largest(self, other: Self) -> Self {
        Self {
            running: self.running.max(other.running),
            waiting: self.waiting.max(other.waiting),
            kv_share: self.kv_share.max(other.kv_share),
        }
    }
}

/// One worker: the areas are stacked, the line is the pool.
fn row(out: &mut String, name: &str, steps: &[Step], place: [f64; 2], x: &Scale, end: f64) {
    let [top, most] = place;
    let bottom = top + ROW;
    let y = Scale::linear([0.0, most], [bottom, top]);
    let held = Scale::linear([0.0, 1.0], [bottom, top]);
    let at = |index: usize| x.at(end * index as f64 / steps.len() as f64);
    let area = |figure: &dyn Fn(&Step) -> f64| {
        let mut path = format!("M{:.1} {bottom:.1}", at(0));
        for (index, step) in steps.iter().enumerate() {
            let _ = write!(path, "V{:.1}H{:.1}", y.at(figure(step)), at(index + 1));
        }
        let _ = write!(path, "V{bottom:.1}Z");
        path
    };
    let mut kv = String::new();
    for (index, step) in steps.iter().enumerate() {
        let _ = write!(
            kv,
            "{}{:.1} {:.1}",
            if index == 0 { "M" } else { "L" },
            at(index),
            held.at(step.kv_share)
        );
    }
    let peak = |figure: fn(&Step) -> f64| steps.iter().map(figure).fold(0.0, f64::max);
    let says = format!(
        "{name}: at most {:.0} running, {:.0} waiting, KV pool {:.0}% full",
        peak(|step| step.running),
        peak(|step| step.waiting),
        peak(|step| step.kv_share) * 100.0
    );
    let _ = write!(
        out,
        "<g><title>{}</title><rect class=\"row\" x=\"{:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{ROW}\"/>\
         <path class=\"wait\" d=\"{}\"/><path class=\"run\" d=\"{}\"/><path class=\"kvline\" d=\"{kv}\"/>\
         <text class=\"tick\" x=\"56\" y=\"{:.1}\" text-anchor=\"end\">{}</text></g>",
        escape(&says),
        at(0),
        at(steps.len()) - at(0),
        area(&|step| step.running + step.waiting),
        area(&|step| step.running),
        top + ROW / 2.0 + 4.0,
        escape(&short(name))
    );
}

/// A name that fits beside a row.
pub(super) fn short(name: &str) -> String {
    const LETTERS: usize = 9;
    if name.chars().count() <= LETTERS {
        return name.to_owned();
    }
    let start: String = name.chars().take(LETTERS - 1).collect();
    format!("{start}…")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_without_samples_is_as_the_last_sample_left_it() {
        let sample = |t: f64, worker: &str, running: u32, held: u64| WorkerSampleLine {
            t,
            worker: worker.to_owned(),
            running,
            waiting: 0,
            importing: 0,
            exporting: 0,
            kv_tokens: 100,
            kv_tokens_used: 0,
            kv_tokens_cached: held,
            prefill_tokens_pending: 0,
        };
        let samples = [
            sample(0.0, "a", 0, 0),
            sample(1.0, "a", 4, 50),
            sample(1.0, "b", 1, 10),
            sample(2.0, "a", 0, 90),
            sample(3.0, "b", 2, 10),
            sample(4.0, "b", 0, 20),
        ];
        let steps = steps(&samples, 4.0);
        let check = |worker: &str, expected: &[(f64, f64)]| {
            let found: Vec<(f64, f64)> = steps[worker].iter().map(|step| (step.running, step.kv_share)).collect();
            assert_eq!(found, expected, "{worker}");
        };
        // Five instants, five steps; the pool stays full although nothing more is logged.
        check("a", &[(0.0, 0.0), (4.0, 0.5), (0.0, 0.9), (0.0, 0.9), (0.0, 0.9)]);
        check("b", &[(0.0, 0.0), (1.0, 0.1), (1.0, 0.1), (2.0, 0.1), (0.0, 0.2)]);
    }
}
