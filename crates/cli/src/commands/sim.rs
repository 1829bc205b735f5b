//! `homing sim`: a trace on a cluster on paper, or a recording through the core once more.

use crate::args;
use crate::failure::Usage;
use crate::output;
use crate::results::{self, Progress, replay_config};
use crate::trace_file;
use anyhow::{Context, Result};
use homing_report::{ClassBounds, Experiment, Report};
use homing_router::PolicySpec;
use homing_sim::{Cluster, SimConfig, SimError, SimOutcome, simulate_with};
use homing_workload::{Start, Trace};
use std::path::Path;

/// Runs the simulation once for each seed, or replays a recording.
pub fn run(args: &args::Sim) -> Result<()> {
    match &args.events {
        Some(events) => super::events::run(events, args.workload.json),
        None if args.chaos && args.workload.trace.is_none() => super::chaos::run(args),
        None => simulate_all(args),
    }
}

fn simulate_all(args: &args::Sim) -> Result<()> {
    output::clean_up_when_interrupted()?;
    let cluster = cluster(&args.cluster)?;
    let policy: PolicySpec = args.policy.parse().map_err(Usage::error)?;
    let out = results::out_folder(args.workload.out.as_deref())?;
    results::say_scale(args.workload.time_scale);
    let (mut runs, mut logs, mut experiment) = (Vec::new(), Vec::new(), None);
    for seed in args.workload.seeds() {
        let trace = trace_file::open(args.workload.trace()?, seed)?;
        let outcome = simulate_one(args, &trace, &cluster, &policy, seed)?;
        experiment.get_or_insert_with(|| Experiment {
            trace: trace.name.clone(),
            cluster: args.cluster.clone(),
            policy: args.policy.clone(),
            time_scale: args.workload.time_scale,
            block_size: Some(trace.block_size),
            classes: ClassBounds::default(),
            left_out: outcome.left_out,
        });
        logs.extend(files(&outcome, seed, args.workload.runs));
        runs.push(outcome.run);
    }
    let report = Report::new(&experiment.context("at least one run")?, &runs);
    results::publish(&report, &logs, out, args.workload.json)
}

fn simulate_one(
    args: &args::Sim,
    trace: &Trace,
    cluster: &Cluster,
    policy: &PolicySpec,
    seed: u64,
) -> Result<SimOutcome> {
    let workers = u32::try_from(cluster.workers.len()).unwrap_or(u32::MAX);
    let start = results::start(&args.workload).unwrap_or_else(|| Start::default_for(trace, workers));
    let mut config = SimConfig {
        seed,
        replay: replay_config(&args.workload, start, seed),
        logs: args.workload.out.is_some(),
        record: args.record,
        ..SimConfig::new(trace, cluster.clone(), policy.clone())
    };
    super::chaos::disturb(args, trace, &mut config)?;
    let mut progress = None;
    let outcome = simulate_with(trace, &config, |ended, all| {
        progress.get_or_insert_with(|| Progress::new(all)).set(ended)
    });
    if let Some(progress) = progress {
        progress.finish();
    }
    outcome.map_err(|error| {
        if error.is_wrong_input() {
            Usage::error(error)
        } else {
            broken(error, args, seed)
        }
    })
}

/// A check that did not hold is a fault of ours: say what replays it.
fn broken(error: SimError, args: &args::Sim, seed: u64) -> anyhow::Error {
    let (trace, cluster, policy) = (
        args.workload.trace.as_deref().unwrap_or_default(),
        &args.cluster,
        &args.policy,
    );
    let faults = args.faults.as_ref().map(|faults| format!(" --faults '{faults}'"));
    let chaos = if args.chaos { " --chaos" } else { "" };
    let again = format!(
        "replay with `homing sim --trace {trace} --cluster {cluster} --policy {policy} --seed {seed}{chaos}{}`",
        faults.unwrap_or_default()
    );
    anyhow::Error::new(error).context(again)
}

/// The logs and the recording of a run, by file name. Several runs get a folder's worth of names, told apart by seed.
fn files(outcome: &SimOutcome, seed: u64, runs: u32) -> Vec<(String, Vec<u8>)> {
    let named = |name: String| if runs == 1 { name } else { format!("seed-{seed}.{name}") };
    let logs = outcome
        .logs
        .texts()
        .map(|(kind, text)| (named(kind.file_name()), text.as_bytes().to_vec()));
    let recording = outcome
        .recording
        .iter()
        .map(|bytes| (named("events.bin".to_owned()), bytes.clone()));
    logs.chain(recording).collect()
}

/// The preset of this name, or the cluster in this file.
fn cluster(name: &str) -> Result<Cluster> {
    if Path::new(name).extension().is_none_or(|extension| extension != "toml") {
        return Cluster::preset(name).map_err(Usage::error);
    }
    let text =
        std::fs::read_to_string(name).map_err(|error| Usage::error(format_args!("cluster `{name}`: {error}")))?;
    Cluster::from_toml(name, &text).map_err(|error| Usage::error(format_args!("cluster `{name}`: {error}")))
}
