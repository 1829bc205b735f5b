//! One configuration of an experiment: what to simulate, and over which seeds.
//!
//! A setup is a value with an order, so that two experiments that need the same runs share them, and so that the document
//! can print the command that repeats them. It does not run anything.

use crate::recorded;
use homing_report::ClassBounds;
use homing_router::PolicySpec;
use homing_sim::{Cluster, SimConfig};
use homing_workload::{Start, Trace, generate, is_generator};
use std::sync::Arc;
use thiserror::Error;

/// A configuration and its seeds.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Setup {
    /// A generator with its parameters, or a recorded trace in the working folder. A generator without `seed=` has other content for
    /// each seed.
    pub trace: String,
    /// A cluster preset with its parameters.
    pub cluster: String,
    /// A policy with its parameters.
    pub policy: String,
    /// What recorded gaps are divided by.
    pub time_scale: u32,
    /// How sessions start.
    pub arrivals: Arrivals,
    /// A session ends before its first prompt above so many tokens; recorded agents outgrow any worker.
    pub max_context: Option<u32>,
    /// So many sessions, the first of the trace; all without.
    pub sessions: Option<u32>,
    /// Whether sessions start in the trace's order whatever the seed, as they do where one trace is run again.
    pub keep_order: bool,
    /// The runs: seeds from 1 to this.
    pub seeds: u64,
}

/// How sessions start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Arrivals {
    /// As the trace says.
    Recorded,
    /// At most so many live sessions.
    LiveSessions(u32),
}

/// Why a setup cannot be run. The message names the part that is wrong.
#[derive(Debug, Error)]
pub enum SetupError {
    /// The trace.
    #[error(transparent)]
    Trace(#[from] homing_workload::GeneratorError),
    /// The file of a recorded trace.
    #[error(transparent)]
    Recorded(#[from] recorded::RecordedError),
    /// The cluster.
    #[error(transparent)]
    Cluster(#[from] homing_sim::ClusterError),
    /// The policy.
    #[error(transparent)]
    Policy(#[from] homing_router::PolicyError),
    /// The run.
    #[error(transparent)]
    Run(#[from] homing_sim::SimError),
}

impl Setup {
    /// The papers' own replay: 32 live sessions, gaps divided by 10; three seeds.
    #[must_use]
    pub fn new(trace: &str, cluster: &str, policy: &str) -> Self {
        Self {
            trace: trace.to_owned(),
            cluster: cluster.to_owned(),
            policy: policy.to_owned(),
            time_scale: 10,
            arrivals: Arrivals::LiveSessions(32),
            max_context: None,
            sessions: None,
            keep_order: false,
            seeds: 3,
        }
    }

    /// With gaps divided by `time_scale`.
    #[must_use]
    pub fn time_scale(mut self, time_scale: u32) -> Self {
        self.time_scale = time_scale;
        self
    }

    /// With sessions that start so.
    #[must_use]
    pub fn arrivals(mut self, arrivals: Arrivals) -> Self {
        self.arrivals = arrivals;
        self
    }

    /// With sessions that end before their first prompt above so many tokens, if there is such a bound.
    #[must_use]
    pub fn max_context(mut self, tokens: Option<u32>) -> Self {
        self.max_context = tokens;
        self
    }

    /// With the trace's first sessions only, if there is such a bound.
    #[must_use]
    pub fn sessions(mut self, sessions: Option<u32>) -> Self {
        self.sessions = sessions;
        self
    }

    /// With sessions in the trace's order for every seed.
    #[must_use]
    pub fn keep_order(mut self) -> Self {
        self.keep_order = true;
        self
    }

    /// Over so many seeds.
    #[must_use]
    pub fn seeds(mut self, seeds: u64) -> Self {
        self.seeds = seeds;
        self
    }

    /// The command that repeats its runs.
    #[must_use]
    pub fn command(&self) -> String {
        let arrivals = match self.arrivals {
            Arrivals::Recorded => String::new(),
            Arrivals::LiveSessions(live) => format!(" --concurrency {live}"),
        };
        let order = if self.keep_order { " --keep-order" } else { "" };
        let bound = |name, bound: Option<u32>| bound.map_or(String::new(), |bound| format!(" --{name} {bound}"));
        let most = bound("max-context", self.max_context) + &bound("sessions", self.sessions);
        format!(
            "homing sim --trace {} --cluster {} --policy {} --time-scale {}{arrivals}{most}{order} --runs {}",
            self.trace, self.cluster, self.policy, self.time_scale, self.seeds
        )
    }

    /// The trace of one run.
    ///
    /// # Errors
    /// If the generator or a parameter of it is unknown, or there is no such file.
    pub fn trace(&self, seed: u64) -> Result<Arc<Trace>, SetupError> {
        if is_generator(&self.trace) {
            return Ok(Arc::new(generate(&self.trace, seed)?));
        }
        Ok(recorded::open(&self.trace)?)
    }

    /// What one run simulates, with structural logs.
    ///
    /// # Errors
    /// If the cluster or the policy, or a parameter of theirs, is unknown.
    pub fn config(&self, trace: &Trace, seed: u64) -> Result<SimConfig, SetupError> {
        let policy: PolicySpec = self.policy.parse()?;
        let mut config = SimConfig::new(trace, Cluster::preset(&self.cluster)?, policy);
        config.seed = seed;
        config.logs = true;
        config.replay.time_scale = f64::from(self.time_scale);
        config.replay.keep_order = self.keep_order;
        config.replay.max_context = self.max_context;
        config.replay.sessions = self.sessions;
        config.replay.start = match self.arrivals {
            Arrivals::Recorded => Start::Recorded,
            Arrivals::LiveSessions(live) => Start::Concurrency(live),
        };
        Ok(config)
    }

    /// The classes of prompt length that its reports use.
    #[must_use]
    pub fn classes(&self) -> ClassBounds {
        ClassBounds::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_repeats_the_runs() {
        let setup = Setup::new("gen:swe52", "h100x8-dp:kv=136000", "dp-cache-aware").seeds(10);
        assert_eq!(
            setup.command(),
            "homing sim --trace gen:swe52 --cluster h100x8-dp:kv=136000 --policy dp-cache-aware --time-scale 10 --concurrency 32 --runs 10"
        );
        let again = setup.clone().keep_order().command();
        assert!(again.ends_with("--concurrency 32 --keep-order --runs 10"), "{again}");
        let bounded = setup.clone().max_context(Some(600_000)).command();
        assert!(
            bounded.ends_with("--concurrency 32 --max-context 600000 --runs 10"),
            "{bounded}"
        );
        let recorded = setup.arrivals(Arrivals::Recorded).time_scale(1);
        assert!(recorded.command().ends_with("--time-scale 1 --runs 10"));
    }

    #[test]
    fn what_is_wrong_is_said() {
        let check = |setup: Setup, expected: &str| {
            let error = setup
                .trace(1)
                .and_then(|trace| setup.config(&trace, 1).map(|_| ()))
                .expect_err(expected)
                .to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(
            Setup::new("nowhere.jsonl", "h100x8-dp", "round-robin"),
            "`nowhere.jsonl`",
        );
        check(Setup::new("gen:x", "h100x8-dp", "round-robin"), "unknown generator");
        check(Setup::new("gen:swe52", "h1", "round-robin"), "no cluster");
        check(Setup::new("gen:swe52", "h100x8-dp", "rr"), "rr");
    }
}
