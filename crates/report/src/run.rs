//! The document `homing.run/1`: figures of one or more runs of one experiment, and a summary over them.
//!
//! Distributions are over the requests that completed; errors are counted beside them, never mixed in. Every figure is
//! rounded to six decimals and maps are in a fixed order, so that equal runs are equal bytes. A figure that does not
//! exist (the TTFT of a class without requests) is null, not zero.

mod check;

use crate::record::{LeftOut, Path, RequestRecord, WorkerRecord};
use crate::sessions::Sessions;
use crate::stats::{mean, quantile, rounded, sorted};
use crate::summary::{MetricSummary, summarise};
use crate::workers::workers;
pub use crate::workers::{Balance, Worker};
pub use check::WrongField;
use homing_units::{Duration, Instant};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The name of the schema.
pub const SCHEMA: &str = "homing.run/1";

/// What was run: the same for all runs of a report.
#[derive(Clone, Debug, PartialEq)]
pub struct Experiment {
    /// The trace or generator.
    pub trace: String,
    /// The cluster: a preset, a file or a URL.
    pub cluster: String,
    /// The policy, with its parameters.
    pub policy: String,
    /// What recorded gaps were divided by.
    pub time_scale: f64,
    /// Tokens in a block, where known.
    pub block_size: Option<u32>,
    /// Where the classes of prompt length end.
    pub classes: ClassBounds,
    /// What of the trace was not sent.
    pub left_out: LeftOut,
}

#[cfg(test)]
impl Experiment {
    /// One for tests.
    pub(crate) fn example() -> Self {
        Self {
            trace: "t".to_owned(),
            cluster: "c".to_owned(),
            policy: "homing".to_owned(),
            time_scale: 1.0,
            block_size: Some(16),
            classes: ClassBounds::default(),
            left_out: LeftOut::default(),
        }
    }
}

/// Where the classes of prompt length end, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassBounds {
    /// Prompts below are warm.
    pub warm_below: u32,
    /// Prompts below, and not warm, are medium; all others are heavy.
    pub medium_below: u32,
}

impl Default for ClassBounds {
    fn default() -> Self {
        Self {
            warm_below: 8192,
            medium_below: 32_768,
        }
    }
}

/// What one run left behind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunRecord {
    /// Its seed.
    pub seed: u64,
    /// Its requests.
    pub requests: Vec<RequestRecord>,
    /// Its workers, in the order in which they are reported.
    pub workers: Vec<WorkerRecord>,
}

/// The document.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Always [`SCHEMA`].
    pub schema: String,
    /// The trace or generator.
    pub trace: String,
    /// The cluster: a preset, a file or a URL.
    pub cluster: String,
    /// The policy, with its parameters.
    pub policy: String,
    /// What recorded gaps were divided by.
    pub time_scale: f64,
    /// Tokens in a block, where known.
    pub block_size: Option<u32>,
    /// Where the classes of prompt length end, in tokens.
    pub classes: ClassBounds,
    /// What of the trace was not sent.
    pub left_out: LeftOut,
    /// What a reader has to know before believing the figures.
    pub warnings: Vec<String>,
    /// One entry a run.
    pub runs: Vec<Run>,
    /// Each scalar figure over all runs, by its path in a run.
    pub summary: BTreeMap<String, MetricSummary>,
}

/// The figures of one run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Its seed.
    pub seed: u64,
    /// Requests that were sent.
    pub requests: u64,
    /// Requests that were answered to the end.
    pub completed: u64,
    /// Requests that were not.
    pub errors: Errors,
    /// From the first arrival to the last end, in seconds.
    pub duration_s: f64,
    /// Arrival to last token.
    pub latency_s: Distribution,
    /// Arrival to first token.
    pub ttft_s: Distribution,
    /// Mean time for each token after the first, of requests with two tokens or more.
    pub tpot_s: Distribution,
    /// Longest time between two tokens, of requests with two tokens or more.
    pub itl_max_s: Distribution,
    /// The same by prompt length.
    pub by_class: ByClass,
    /// Cached tokens by prompt tokens of the requests that completed.
    pub hit_ratio: Option<f64>,
    /// Prompt tokens of the requests that completed.
    pub prompt_tokens: u64,
    /// Of these, tokens that were not computed for the request.
    pub cached_tokens: u64,
    /// Tokens of the answers that completed.
    pub output_tokens: u64,
    /// Requests by path, failed ones too where they had one.
    pub paths: Paths,
    /// How far into the run its first failed request ended, as a share of the run's duration (0 to 1); null without one.
    #[serde(default)]
    pub first_error_at_share: Option<f64>,
    /// One entry a worker.
    pub workers: Vec<Worker>,
    /// How evenly the workers that decode were used.
    #[serde(default)]
    pub balance: Balance,
    /// How sessions fared.
    pub sessions: Sessions,
}

/// Requests that were not answered to the end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Errors {
    /// How many.
    pub total: u64,
    /// How many of each kind.
    pub by_kind: BTreeMap<String, u64>,
    /// How many of each worker that decoded them or was to; those without a plan are of none.
    #[serde(default)]
    pub by_worker: BTreeMap<String, u64>,
}

/// Mean and nearest-rank quantiles of some figure; all null where there was none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    /// The mean.
    pub mean: Option<f64>,
    /// The median.
    pub p50: Option<f64>,
    /// At most a tenth is above.
    pub p90: Option<f64>,
    /// At most a hundredth is above.
    pub p99: Option<f64>,
    /// The largest.
    pub max: Option<f64>,
}

/// Figures by prompt length.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ByClass {
    /// Short prompts.
    pub warm: Class,
    /// Longer ones.
    pub medium: Class,
    /// The longest.
    pub heavy: Class,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PromptClass {
    Warm,
    Medium,
    Heavy,
}

/// The figures of one class of requests that completed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Class {
    /// Requests.
    pub count: u64,
    /// Arrival to first token.
    pub ttft_s: Distribution,
    /// Mean time for each token after the first.
    pub tpot_s: Distribution,
    /// Arrival to last token.
    pub latency_s: Distribution,
    /// Longest time between two tokens.
    #[serde(default)]
    pub itl_max_s: Distribution,
}

/// Requests by path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Paths {
    /// See [`Path::Append`].
    pub append: u64,
    /// See [`Path::Seed`].
    pub seed: u64,
    /// See [`Path::Reseed`].
    pub reseed: u64,
    /// See [`Path::Migrate`].
    pub migrate: u64,
    /// See [`Path::Local`].
    pub local: u64,
}

impl Report {
    /// The report of these runs.
    #[must_use]
    pub fn new(experiment: &Experiment, runs: &[RunRecord]) -> Self {
        let runs: Vec<Run> = runs.iter().map(|run| Run::new(run, experiment.classes)).collect();
        Self {
            schema: SCHEMA.to_owned(),
            trace: experiment.trace.clone(),
            cluster: experiment.cluster.clone(),
            policy: experiment.policy.clone(),
            time_scale: rounded(experiment.time_scale),
            block_size: experiment.block_size,
            classes: experiment.classes,
            left_out: experiment.left_out,
            warnings: warnings(experiment, runs.len()),
            summary: summarise(&runs),
            runs,
        }
    }

    /// The document as one line of JSON, without a line end.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("a report has string keys and finite numbers")
    }

    /// The document as JSON for people, without a line end at the end.
    #[must_use]
    pub fn to_json_pretty(&self) -> String {
        serde_json::to_string_pretty(self).expect("a report has string keys and finite numbers")
    }
}

/// What a reader has to know before believing the figures.
fn warnings(experiment: &Experiment, runs: usize) -> Vec<String> {
    const RUNS_WANTED: usize = 3;
    let mut warnings = Vec::new();
    #[expect(clippy::float_cmp, reason = "exactly 1 is the scale that changes nothing")]
    if experiment.time_scale != 1.0 {
        warnings.push(format!(
            "gaps between turns were divided by {}: idle time in which a worker drains is missing, and conclusions may differ from \
             those at time scale 1",
            experiment.time_scale
        ));
    }
    if runs < RUNS_WANTED {
        warnings.push(format!(
            "{runs} run(s): below {RUNS_WANTED} the spread between equal runs is not known"
        ));
    }
    warnings
}

impl Run {
    /// The figures of one run.
    #[must_use]
    pub fn new(run: &RunRecord, classes: ClassBounds) -> Self {
        let completed: Vec<&RequestRecord> = run.requests.iter().filter(|request| request.error.is_none()).collect();
        let sum = |tokens: fn(&RequestRecord) -> u32| completed.iter().map(|request| u64::from(tokens(request))).sum();
        let (prompt_tokens, cached_tokens) = (
            sum(|request| request.prompt_tokens),
            sum(|request| request.cached_tokens),
        );
        let duration = duration(&run.requests);
        let workers = workers(run, duration);
        Self {
            seed: run.seed,
            requests: run.requests.len() as u64,
            completed: completed.len() as u64,
            errors: Errors::of(&run.requests),
            duration_s: rounded(duration.as_secs_f64()),
            latency_s: Distribution::of(&completed, |request| Some(request.latency())),
            ttft_s: Distribution::of(&completed, RequestRecord::ttft),
            tpot_s: Distribution::of(&completed, RequestRecord::tpot),
            itl_max_s: Distribution::of(&completed, |request| request.itl_max),
            by_class: ByClass::of(&completed, classes),
            hit_ratio: ratio(cached_tokens as f64, prompt_tokens as f64),
            prompt_tokens,
            cached_tokens,
            output_tokens: sum(|request| request.output_tokens),
            paths: Paths::of(&run.requests),
            first_error_at_share: first_error_at_share(&run.requests, duration),
            balance: Balance::of(&workers),
            workers,
            sessions: Sessions::of(&run.requests),
        }
    }
}

/// From the first arrival to the last end.
fn duration(requests: &[RequestRecord]) -> Duration {
    let first = requests
        .iter()
        .map(|request| request.arrival)
        .min()
        .unwrap_or(Instant::ZERO);
    let last = requests
        .iter()
        .map(|request| request.end)
        .max()
        .unwrap_or(Instant::ZERO);
    last - first
}

/// How far into the run the first failed request ended.
fn first_error_at_share(requests: &[RequestRecord], duration: Duration) -> Option<f64> {
    let begin = requests.iter().map(|request| request.arrival).min()?;
    let failed = requests.iter().filter(|request| request.error.is_some());
    let first = failed.map(|request| request.end).min()?;
    ratio((first - begin).as_secs_f64(), duration.as_secs_f64())
}

/// A share, rounded; `None` of nothing.
pub(crate) fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| rounded(part / whole))
}

impl Errors {
    fn of(requests: &[RequestRecord]) -> Self {
        let mut errors = Self::default();
        for request in requests {
            let Some(kind) = &request.error else { continue };
            errors.total += 1;
            *errors.by_kind.entry(kind.clone()).or_default() += 1;
            if let Some(worker) = &request.worker {
                *errors.by_worker.entry(worker.clone()).or_default() += 1;
            }
        }
        errors
    }
}

impl Distribution {
    /// The distribution of a figure over those requests that have it, in seconds.
    fn of(requests: &[&RequestRecord], figure: impl Fn(&RequestRecord) -> Option<Duration>) -> Self {
        let figures = requests.iter().filter_map(|request| figure(request));
        let values = sorted(figures.map(|duration| duration.as_secs_f64()).collect());
        let at = |per_mille| quantile(&values, per_mille).map(rounded);
        Self {
            mean: mean(&values).map(rounded),
            p50: at(500),
            p90: at(900),
            p99: at(990),
            max: at(1000),
        }
    }
}

impl ByClass {
    fn of(requests: &[&RequestRecord], bounds: ClassBounds) -> Self {
        let class_of = |tokens: u32| match tokens {
            _ if tokens < bounds.warm_below => PromptClass::Warm,
            _ if tokens < bounds.medium_below => PromptClass::Medium,
            _ => PromptClass::Heavy,
        };
        let class = |class: PromptClass| {
            let of_class: Vec<&RequestRecord> = requests
                .iter()
                .copied()
                .filter(|request| class_of(request.prompt_tokens) == class)
                .collect();
            Class {
                count: of_class.len() as u64,
                ttft_s: Distribution::of(&of_class, RequestRecord::ttft),
                tpot_s: Distribution::of(&of_class, RequestRecord::tpot),
                latency_s: Distribution::of(&of_class, |request| Some(request.latency())),
                itl_max_s: Distribution::of(&of_class, |request| request.itl_max),
            }
        };
        Self {
            warm: class(PromptClass::Warm),
            medium: class(PromptClass::Medium),
            heavy: class(PromptClass::Heavy),
        }
    }
}

impl Paths {
    fn of(requests: &[RequestRecord]) -> Self {
        let count = |path| requests.iter().filter(|request| request.path == Some(path)).count() as u64;
        Self {
            append: count(Path::Append),
            seed: count(Path::Seed),
            reseed: count(Path::Reseed),
            migrate: count(Path::Migrate),
            local: count(Path::Local),
        }
    }
}

#[cfg(test)]
mod tests;
