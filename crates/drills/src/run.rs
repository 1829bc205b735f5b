//! One setting of a scenario, simulated: the files that a run leaves, and what the doctor makes of them.

use crate::drill::DrillError;
use crate::scenario::{Load, Setting};
use crate::trouble;
use homing_doctor::{Evidence, Finding, diagnose};
use homing_report::{ClassBounds, Experiment, LeftOut, Report, RunRecord};
use homing_router::PolicySpec;
use homing_sim::{Cluster, SimConfig, SimOutcome, fault, simulate};
use homing_workload::{Start, Trace, generate};
use std::collections::BTreeMap;

/// A setting's runs.
#[derive(Clone, Debug)]
pub(crate) struct Observed {
    /// The files of its folder, by name.
    pub(crate) files: BTreeMap<String, String>,
    /// The same, read.
    pub(crate) evidence: Evidence,
    /// What the doctor says.
    pub(crate) findings: Vec<Finding>,
}

/// What the doctor says of a setting that is no drill's.
///
/// # Errors
/// If a part of it is wrong, or a check of the simulator did not hold.
pub fn findings(setting: &Setting, seed: u64) -> Result<Vec<Finding>, DrillError> {
    Ok(observe(setting, &setting.load, seed)?.findings)
}

/// Simulates a setting under this load with this seed, and the ones after it where it has several runs.
pub(crate) fn observe(setting: &Setting, load: &Load, seed: u64) -> Result<Observed, DrillError> {
    let runs = load.runs.unwrap_or(1);
    let mut files = BTreeMap::new();
    let (mut records, mut experiment) = (Vec::<RunRecord>::new(), None);
    for seed in seed..seed + u64::from(runs) {
        let (trace, outcome) = simulate_once(setting, load, seed)?;
        experiment.get_or_insert_with(|| experiment_of(setting, load, &trace, outcome.left_out));
        for (kind, text) in outcome.logs.texts() {
            let name = kind.file_name();
            let name = if runs == 1 { name } else { format!("seed-{seed}.{name}") };
            files.insert(name, text.to_owned());
        }
        records.push(outcome.run);
    }
    let experiment = experiment.ok_or(DrillError::NoRun)?;
    let report = Report::new(&experiment, &records);
    files.insert("summary.json".to_owned(), format!("{}\n", report.to_json_pretty()));
    let evidence = Evidence::read(&files)?;
    let findings = diagnose(&evidence);
    Ok(Observed {
        files,
        evidence,
        findings,
    })
}

fn simulate_once(setting: &Setting, load: &Load, seed: u64) -> Result<(Trace, SimOutcome), DrillError> {
    let mut trace = generate(load.trace.as_deref().unwrap_or_default(), seed)?;
    if let Some(block) = load.changes_block {
        trouble::change_block(&mut trace, block);
    }
    if let Some(every) = load.shortens_every {
        trouble::shorten(&mut trace, every);
    }
    let policy: PolicySpec = setting.policy.parse()?;
    let mut config = SimConfig::new(&trace, Cluster::preset(&setting.cluster)?, policy);
    config.seed = seed;
    config.logs = true;
    config.replay.time_scale = load.time_scale.unwrap_or(1.0);
    config.replay.max_turns = load.max_turns;
    config.replay.start = load.concurrency.map_or(Start::Recorded, Start::Concurrency);
    config.faults = fault::schedule::parse(load.faults.as_deref().unwrap_or_default())?;
    let outcome = simulate(&trace, &config)?;
    Ok((trace, outcome))
}

fn experiment_of(setting: &Setting, load: &Load, trace: &Trace, left_out: LeftOut) -> Experiment {
    Experiment {
        trace: trace.name.clone(),
        cluster: setting.cluster.clone(),
        policy: setting.policy.clone(),
        time_scale: load.time_scale.unwrap_or(1.0),
        block_size: Some(trace.block_size),
        classes: ClassBounds::default(),
        left_out,
    }
}
