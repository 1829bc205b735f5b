//! One drill: every setting of a scenario is run, every statement is checked, and the doctor is asked about each folder.
//!
//! A drill holds if its statements do, the doctor names the mode (or the one that it is part of) first with the fix off, and it
//! says nothing above information with the fix on.

use crate::figures;
use crate::run::{Observed, observe};
use crate::scenario::{OFF, ON, Scenario};
use crate::statement::Reference;
use homing_doctor::{EvidenceError, Finding, Level, ModeId};
use serde::Serialize;
use std::collections::BTreeMap;
use thiserror::Error;

/// The seed of a drill, unless another is asked for.
pub const SEED: u64 = 1;

/// What came of a drill.
#[derive(Clone, Debug, Serialize)]
pub struct Drill {
    /// The mode that it shows.
    pub mode: ModeId,
    /// Its seed.
    pub seed: u64,
    /// Whether all of it holds.
    pub holds: bool,
    /// Its settings.
    pub settings: Vec<SettingResult>,
    /// Its statements.
    pub statements: Vec<StatementResult>,
    /// What of the doctor's findings is not as it should be.
    pub wrong_findings: Vec<String>,
    /// The files that each setting's runs left, by setting and name.
    #[serde(skip)]
    pub files: BTreeMap<String, BTreeMap<String, String>>,
}

/// One setting of a drill.
#[derive(Clone, Debug, Serialize)]
pub struct SettingResult {
    /// Its name.
    pub name: String,
    /// What it shows, where the name does not say.
    pub about: Option<String>,
    /// The cluster.
    pub cluster: String,
    /// The policy.
    pub policy: String,
    /// Requests, and those that failed, of its first run.
    pub requests: u64,
    /// See `requests`.
    pub failed: u64,
    /// The 99th percentile of its latency in seconds.
    pub latency_p99_s: Option<f64>,
    /// What the doctor says of it.
    pub findings: Vec<Finding>,
}

/// One statement of a drill.
#[derive(Clone, Debug, Serialize)]
pub struct StatementResult {
    /// What must hold.
    pub statement: String,
    /// Whether it does.
    pub holds: bool,
    /// The figure on the left.
    pub left: f64,
    /// The figure on the right.
    pub right: f64,
}

/// Why a drill could not be run.
#[derive(Debug, Error)]
pub enum DrillError {
    /// Its load.
    #[error(transparent)]
    Trace(#[from] homing_workload::GeneratorError),
    /// A cluster.
    #[error(transparent)]
    Cluster(#[from] homing_sim::ClusterError),
    /// A policy.
    #[error(transparent)]
    Policy(#[from] homing_router::PolicyError),
    /// A run, or one of the simulator's checks.
    #[error(transparent)]
    Run(#[from] homing_sim::SimError),
    /// What a run left cannot be read.
    #[error(transparent)]
    Evidence(#[from] EvidenceError),
    /// Its faults.
    #[error(transparent)]
    Faults(#[from] homing_sim::fault::schedule::ScheduleError),
    /// There is nothing to run.
    #[error("a setting has no runs, expected at least one")]
    NoRun,
    /// A statement speaks of a figure that there is not.
    #[error("`{setting}` has no figure `{figure}`")]
    Figure {
        /// The setting.
        setting: String,
        /// The figure.
        figure: String,
    },
}

/// Runs a drill with this seed.
///
/// # Errors
/// If the scenario is wrong, or a check of the simulator did not hold.
pub fn drill(scenario: &Scenario, seed: u64) -> Result<Drill, DrillError> {
    let mut observed: BTreeMap<&str, Observed> = BTreeMap::new();
    for setting in &scenario.setting {
        observed.insert(&setting.name, observe(setting, &setting.load.or(&scenario.load), seed)?);
    }
    let statements = check_statements(scenario, &observed)?;
    let wrong_findings = check_findings(scenario, &observed);
    let settings = scenario.setting.iter().map(|setting| {
        let observed = &observed[setting.name.as_str()];
        let run = observed.evidence.report.as_ref().and_then(|report| report.runs.first());
        SettingResult {
            name: setting.name.clone(),
            about: setting.about.clone(),
            cluster: setting.cluster.clone(),
            policy: setting.policy.clone(),
            requests: run.map_or(0, |run| run.requests),
            failed: run.map_or(0, figures::failed),
            latency_p99_s: run.and_then(|run| run.latency_s.p99),
            findings: observed.findings.clone(),
        }
    });
    Ok(Drill {
        mode: scenario.mode,
        seed,
        holds: wrong_findings.is_empty() && statements.iter().all(|statement| statement.holds),
        settings: settings.collect(),
        statements,
        wrong_findings,
        files: observed
            .into_iter()
            .map(|(name, observed)| (name.to_owned(), observed.files))
            .collect(),
    })
}

fn check_statements(
    scenario: &Scenario,
    observed: &BTreeMap<&str, Observed>,
) -> Result<Vec<StatementResult>, DrillError> {
    let get = |reference: &Reference| figures::figure(observed.get(reference.setting.as_str())?, &reference.figure);
    let check = |statement: &crate::statement::Statement| {
        let (holds, left, right) = statement.check(get).map_err(|missing| DrillError::Figure {
            setting: missing.setting,
            figure: missing.figure,
        })?;
        Ok(StatementResult {
            statement: statement.to_string(),
            holds,
            left,
            right,
        })
    };
    scenario.holds.iter().map(check).collect()
}

/// What the doctor ought to have said and did not, or the other way round.
fn check_findings(scenario: &Scenario, observed: &BTreeMap<&str, Observed>) -> Vec<String> {
    let mut wrong = Vec::new();
    let mode = scenario.mode;
    let expected = [Some(mode), mode.mode().parent];
    if let Some(off) = observed.get(OFF) {
        match off.findings.first() {
            Some(first) if expected.contains(&Some(first.mode)) => {}
            Some(first) => wrong.push(format!("`off`: `{}` is named first, expected `{mode}`", first.mode)),
            None => wrong.push(format!("`off`: nothing is found, expected `{mode}`")),
        }
        if !off.findings.iter().any(|finding| finding.mode == mode) {
            wrong.push(format!("`off`: `{mode}` is not found"));
        }
    }
    let loud = observed.get(ON).into_iter().flat_map(|on| &on.findings);
    for finding in loud.filter(|finding| finding.level > Level::Info) {
        wrong.push(format!(
            "`on`: {} `{}`: {}",
            finding.level.as_str(),
            finding.mode,
            finding.seen
        ));
    }
    let still = observed.get(ON).into_iter().flat_map(|on| &on.findings);
    wrong.extend(
        still
            .filter(|finding| finding.mode == mode)
            .map(|_| format!("`on`: `{mode}` is still found")),
    );
    wrong
}
