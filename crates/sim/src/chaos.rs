//! Chaos: a whole experiment drawn from a seed - cluster, policy, trace, bounds, clocks and a schedule of faults - with all
//! checks on, and what fails cut down to the faults that it takes.
//!
//! The schedule is plain data before the run begins, and nothing is drawn during the run: so an entry can be taken out of
//! it without changing when the others happen, and what is left replays anywhere. Experiments are small (a few workers, a
//! few dozen turns, pools of a few prompts), because bugs of this kind take few things at a bad moment and many seeds.

mod draw;
mod shrink;

pub use draw::draw_faults;
pub use shrink::shrink;

use crate::config::{SimConfig, SimError, SimOutcome};
use crate::fault::schedule::{self, Schedule};
use crate::replay_events::replay_events;
use crate::simulation::simulate;
use homing_report::RequestRecord;
use homing_workload::Trace;
use std::fmt::{self, Display, Formatter};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// An experiment that was drawn from a seed.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The seed.
    pub seed: u64,
    /// The turns to send.
    pub trace: Trace,
    /// Everything else; its faults are the schedule.
    pub config: SimConfig,
}

/// What did not hold in a run. Runs of one scenario that break alike break for one reason, as far as one can tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// What must hold, or where an assertion failed, without the figures of this run.
    pub kind: String,
    /// What was found.
    pub found: String,
}

/// A scenario that broke, with what it takes to break it.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The scenario's seed.
    pub seed: u64,
    /// Its cluster and its policy.
    pub setting: String,
    /// What did not hold.
    pub violation: Violation,
    /// Faults that were drawn.
    pub drawn: usize,
    /// Those that are needed.
    pub schedule: Schedule,
}

/// Errors that a turn may end with when all goes wrong: each is one that a client can act on.
const TYPED: [&str; 9] = [
    "client_gone",
    "context_too_long",
    "engine_failed",
    "no_worker",
    "overloaded",
    "queue_timeout",
    "refused",
    "transfer_failed",
    "worker_lost",
];

impl Scenario {
    /// Draws an experiment.
    #[must_use]
    pub fn draw(seed: u64) -> Self {
        draw::scenario(seed)
    }

    /// The same experiment with these faults.
    #[must_use]
    pub fn with_schedule(mut self, schedule: Schedule) -> Self {
        self.config.faults = schedule;
        self
    }

    /// Runs it with all checks on.
    ///
    /// # Errors
    /// What did not hold, an assertion inside a core included.
    pub fn run(&self) -> Result<SimOutcome, Violation> {
        let run = || simulate(&self.trace, &self.config);
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(outcome)) => self.judge(outcome),
            Ok(Err(error)) => Err(Violation::from(&error)),
            Err(panic) => Err(Violation::assertion(panic.as_ref())),
        }
    }

    /// Runs it, and cuts its schedule down if it breaks.
    ///
    /// # Errors
    /// What did not hold, and what it takes.
    pub fn examine(&self) -> Result<SimOutcome, Box<Failure>> {
        self.run().map_err(|violation| {
            let schedule = shrink(self, &violation);
            Box::new(Failure {
                seed: self.seed,
                setting: format!("{} with {}", self.config.cluster.name, self.config.policy),
                drawn: self.config.faults.len(),
                schedule,
                violation,
            })
        })
    }

    /// What only the whole outcome shows.
    fn judge(&self, outcome: SimOutcome) -> Result<SimOutcome, Violation> {
        let untyped = |request: &&RequestRecord| {
            let error = request.error.as_deref();
            error.is_some_and(|error| !TYPED.contains(&error))
        };
        if let Some(request) = outcome.run.requests.iter().find(untyped) {
            return Err(Violation::new("that every error is typed", format!("{request:?}")));
        }
        if let Some(Err(error)) = outcome.recording.as_deref().map(replay_events) {
            return Err(Violation::new(
                "that a recording replays to the same actions",
                error.to_string(),
            ));
        }
        Ok(outcome)
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let schedule = schedule::print(&self.schedule);
        writeln!(f, "seed `{}` ({}): {}", self.seed, self.setting, self.violation.kind)?;
        writeln!(f, "  found: {}", self.violation.found)?;
        writeln!(
            f,
            "  needs `{}` of `{}` faults: {schedule}",
            self.schedule.len(),
            self.drawn
        )?;
        write!(
            f,
            "  replay with `homing sim --chaos --seed {} --faults '{schedule}'`",
            self.seed
        )
    }
}

impl Violation {
    fn new(kind: &str, found: String) -> Self {
        Self {
            kind: kind.to_owned(),
            found,
        }
    }

    /// A panic: its message without figures is its kind.
    fn assertion(panic: &(dyn std::any::Any + Send)) -> Self {
        let message = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("a panic without a message");
        let first = message.lines().next().unwrap_or_default();
        let kind: String = first.chars().filter(|letter| !letter.is_ascii_digit()).collect();
        Self::new(&format!("an assertion: {kind}"), message.to_owned())
    }
}

impl From<&SimError> for Violation {
    fn from(error: &SimError) -> Self {
        let kind = match error {
            SimError::Check { check, .. } => check,
            SimError::Stuck { .. } => "that every request ends in time",
            SimError::Replay(_)
            | SimError::PoolTooSmall { .. }
            | SimError::NothingFits { .. }
            | SimError::NoSuchWorker { .. } => "that what is drawn makes sense",
        };
        Self::new(kind, error.to_string())
    }
}
