//! What the comparison keeps of a run: a few figures. It has thousands of runs, so neither their records nor their structural
//! logs could all be kept, and without logs a run is sooner done.

use crate::results::Results;
use crate::setup::{Setup, SetupError};
use homing_report::Run;
use homing_sim::simulate;

/// The figures of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Arrival to last token, in seconds.
    pub latency_mean_s: Option<f64>,
    /// Arrival to first token, in seconds.
    pub ttft_mean_s: Option<f64>,
    /// Nine in ten first tokens came within so many seconds.
    pub ttft_p90_s: Option<f64>,
    /// Nine in ten answers took at most so many seconds for each further token.
    pub tpot_p90_s: Option<f64>,
    /// The most by the least time that a worker of a role spent in steps.
    pub busy_max_min: Option<f64>,
    /// The most by the least requests that a worker of a role decoded.
    pub requests_max_min: Option<f64>,
    /// Requests that failed.
    pub errors: f64,
    /// Tokens of a prompt, on average.
    pub prompt_tokens_mean: Option<f64>,
}

/// How many there are.
const FIGURES: usize = 8;

/// Those of all setups.
pub type Outcomes = Results<Outcome>;

impl Outcome {
    /// Simulates one run of `setup`.
    ///
    /// # Errors
    /// If the setup is wrong or a check of the simulator did not hold.
    pub fn simulate(setup: &Setup, seed: u64) -> Result<Self, SetupError> {
        let trace = setup.trace(seed)?;
        let mut config = setup.config(&trace, seed)?;
        config.logs = false;
        let run = Run::new(&simulate(&trace, &config)?.run, setup.classes());
        Ok(Self::of(&run))
    }

    /// All of them, in the order of the fields.
    pub(super) const fn figures(&self) -> [Option<f64>; FIGURES] {
        [
            self.latency_mean_s,
            self.ttft_mean_s,
            self.ttft_p90_s,
            self.tpot_p90_s,
            self.busy_max_min,
            self.requests_max_min,
            Some(self.errors),
            self.prompt_tokens_mean,
        ]
    }

    /// The outcome of which these are all.
    pub(super) fn from_figures(figures: [Option<f64>; FIGURES]) -> Self {
        let [
            latency_mean_s,
            ttft_mean_s,
            ttft_p90_s,
            tpot_p90_s,
            busy_max_min,
            requests_max_min,
            errors,
            prompt_tokens_mean,
        ] = figures;
        Self {
            latency_mean_s,
            ttft_mean_s,
            ttft_p90_s,
            tpot_p90_s,
            busy_max_min,
            requests_max_min,
            errors: errors.unwrap_or(0.0),
            prompt_tokens_mean,
        }
    }

    fn of(run: &Run) -> Self {
        let completed = run.completed as f64;
        Self {
            latency_mean_s: run.latency_s.mean,
            ttft_mean_s: run.ttft_s.mean,
            ttft_p90_s: run.ttft_s.p90,
            tpot_p90_s: run.tpot_s.p90,
            busy_max_min: run.balance.busy_max_min,
            requests_max_min: run.balance.requests_max_min,
            errors: run.errors.total as f64,
            prompt_tokens_mean: (completed > 0.0).then(|| run.prompt_tokens as f64 / completed),
        }
    }
}
