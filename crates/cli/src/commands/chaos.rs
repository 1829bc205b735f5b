//! `homing sim --chaos`: an experiment drawn from a seed with everything going wrong that the seed says, or the faults of a
//! seed in an experiment that was asked for.
//!
//! A violation is printed with the faults that it takes, cut down, and what replays it.

use crate::args;
use crate::failure::Usage;
use crate::output;
use anyhow::{Result, bail};
use homing_sim::chaos::{Scenario, draw_faults};
use homing_sim::fault::schedule::{self, Schedule};
use homing_sim::{SimConfig, simulate};
use homing_units::Instant;
use homing_workload::Trace;
use serde::Serialize;
use std::collections::BTreeMap;

/// What an experiment came to.
#[derive(Serialize)]
struct Outcome {
    seed: u64,
    cluster: String,
    policy: String,
    faults: Vec<String>,
    requests: usize,
    /// Turns that ended with an error, by kind.
    errors: BTreeMap<String, u64>,
}

/// All experiments.
#[derive(Serialize)]
struct Document {
    schema: &'static str,
    runs: Vec<Outcome>,
}

/// Draws an experiment for each seed and runs it.
pub fn run(args: &args::Sim) -> Result<()> {
    let given = given(args)?;
    let mut runs = Vec::new();
    for seed in args.workload.seeds() {
        let scenario = Scenario::draw(seed);
        let scenario = match &given {
            Some(schedule) => scenario.with_schedule(schedule.clone()),
            None => scenario,
        };
        runs.push(examine(&scenario)?);
    }
    if args.workload.json {
        let schema = "homing.chaos/1";
        return output::print(&format!("{}\n", serde_json::to_string(&Document { schema, runs })?));
    }
    runs.iter().try_for_each(|run| output::print(&run.describe()))
}

fn examine(scenario: &Scenario) -> Result<Outcome> {
    // What breaks is caught and described; the panic's own words would come in between.
    let loud = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let examined = scenario.examine();
    std::panic::set_hook(loud);
    let outcome = match examined {
        Ok(outcome) => outcome,
        Err(failure) => bail!("{failure}\n  version {}", env!("CARGO_PKG_VERSION")),
    };
    let mut errors = BTreeMap::new();
    for error in outcome.run.requests.iter().filter_map(|request| request.error.clone()) {
        *errors.entry(error).or_default() += 1;
    }
    Ok(Outcome {
        seed: scenario.seed,
        cluster: scenario.config.cluster.name.clone(),
        policy: scenario.config.policy.to_string(),
        faults: schedule::entries(&scenario.config.faults),
        requests: outcome.run.requests.len(),
        errors,
    })
}

/// Adds the faults of `--chaos` and `--faults` to an experiment that was asked for.
pub fn disturb(args: &args::Sim, trace: &Trace, config: &mut SimConfig) -> Result<()> {
    if let Some(schedule) = given(args)? {
        config.faults = schedule;
    } else if args.chaos {
        // How long there is something to break, only a run tells.
        let quiet = SimConfig {
            logs: false,
            record: false,
            ..config.clone()
        };
        let outcome = simulate(trace, &quiet).map_err(Usage::error)?;
        let last = outcome.run.requests.iter().map(|request| request.end).max();
        let lasts = last.unwrap_or_default().saturating_since(Instant::ZERO);
        config.faults = draw_faults(config.seed, &config.cluster, lasts);
    }
    config.thorough = args.chaos;
    Ok(())
}

fn given(args: &args::Sim) -> Result<Option<Schedule>> {
    let parsed = args.faults.as_deref().map(schedule::parse).transpose();
    parsed.map_err(Usage::error)
}

impl Outcome {
    fn describe(&self) -> String {
        let ended = match &self.errors {
            errors if errors.is_empty() => "all completed".to_owned(),
            errors => format!("ended with an error: {errors:?}"),
        };
        format!(
            "seed {}: {} with {}, {} requests, {ended}\n  faults: {}\n",
            self.seed,
            self.cluster,
            self.policy,
            self.requests,
            self.faults.join("; ")
        )
    }
}
