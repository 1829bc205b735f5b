//! What is kept of a run: its records, the figures of the report, and those structural logs that experiments ask.
//!
//! Everything is parsed on the thread that ran the simulation and the texts are dropped there, because a hundred runs with
//! all their log texts would not fit into memory.

use crate::setup::{Setup, SetupError};
use homing_report::logs::{
    AdmissionLine, BackpressureLine, BindingLine, DecisionLine, EvictionLine, LogLine, TransferLine,
};
use homing_report::{Path, RequestRecord, Run, RunRecord};
use homing_sim::{Logs, simulate};
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, BTreeSet};

/// One run of a setup.
#[derive(Clone, Debug)]
pub struct Observed {
    /// One record a request and a worker.
    pub record: RunRecord,
    /// The figures of the report.
    pub run: Run,
    /// Transfers of KV that ended, well or not.
    pub transfers: Vec<TransferLine>,
    /// Evictions.
    pub evictions: Vec<EvictionLine>,
    /// Changes of a session's decode worker.
    pub bindings: Vec<BindingLine>,
    /// Pauses.
    pub pauses: Vec<BackpressureLine>,
    /// What admission was asked and said: how often, by its reason.
    pub admissions: BTreeMap<String, u64>,
    /// The reason of each plan, by request; the last plan of a request.
    pub reasons: BTreeMap<u64, String>,
}

impl Observed {
    /// Simulates one run of `setup`.
    ///
    /// # Errors
    /// If the setup is wrong or a check of the simulator did not hold.
    pub fn simulate(setup: &Setup, seed: u64) -> Result<Self, SetupError> {
        let trace = setup.trace(seed)?;
        let outcome = simulate(&trace, &setup.config(&trace, seed)?)?;
        let mut admissions = BTreeMap::new();
        for line in lines::<AdmissionLine>(&outcome.logs) {
            *admissions.entry(line.reason).or_default() += 1;
        }
        Ok(Self {
            run: Run::new(&outcome.run, setup.classes()),
            record: outcome.run,
            transfers: lines(&outcome.logs),
            evictions: lines(&outcome.logs),
            bindings: lines(&outcome.logs),
            pauses: lines(&outcome.logs),
            admissions,
            reasons: lines::<DecisionLine>(&outcome.logs)
                .into_iter()
                .map(|line| (line.request, line.reason))
                .collect(),
        })
    }

    /// Errors of all kinds.
    #[must_use]
    pub fn errors(&self) -> f64 {
        self.run.errors.total as f64
    }

    /// Transfers that failed.
    pub fn failed_transfers(&self) -> impl Iterator<Item = &TransferLine> {
        self.transfers.iter().filter(|line| line.error.is_some())
    }

    /// Tokens of each eviction on a worker that decodes.
    #[must_use]
    pub fn evicted_tokens(&self) -> Vec<f64> {
        let decode: BTreeSet<&str> = self.decode_workers().collect();
        let there = self
            .evictions
            .iter()
            .filter(|line| decode.contains(line.worker.as_str()));
        there.map(|line| line.tokens as f64).collect()
    }

    /// Requests that each decoding worker was given, in the order of the cluster.
    #[must_use]
    pub fn decode_requests(&self) -> Vec<f64> {
        self.decode_workers()
            .map(|worker| {
                let given = |request: &&RequestRecord| request.worker.as_deref() == Some(worker);
                self.record.requests.iter().filter(given).count() as f64
            })
            .collect()
    }

    /// The names of the workers that decode.
    pub fn decode_workers(&self) -> impl Iterator<Item = &str> {
        self.workers_but("prefill")
    }

    /// The names of the workers that prefill.
    pub fn prefill_workers(&self) -> impl Iterator<Item = &str> {
        self.workers_but("decode")
    }

    fn workers_but(&self, role: &'static str) -> impl Iterator<Item = &str> {
        self.record
            .workers
            .iter()
            .filter(move |worker| worker.role != role)
            .map(|worker| worker.name.as_str())
    }

    /// The sessions of which under a fifth of the later turns were appended, by name.
    #[must_use]
    pub fn starved_sessions(&self) -> BTreeSet<&str> {
        let mut sessions: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        for request in self.record.requests.iter().filter(|request| !request.first_of_agent) {
            let (appended, later) = sessions.entry(&request.session_name).or_default();
            *appended += u64::from(is_direct(request));
            *later += 1;
        }
        let starved = |(_, (appended, later)): &(&str, (u64, u64))| appended * 5 < *later;
        sessions.into_iter().filter(starved).map(|(name, _)| name).collect()
    }
}

/// Whether it completed as an append.
#[must_use]
pub fn is_direct(request: &RequestRecord) -> bool {
    request.path == Some(Path::Append) && request.error.is_none()
}

/// Whether it completed and its prompt was prefilled elsewhere, after its session's first turn.
#[must_use]
pub fn is_fallback(request: &RequestRecord) -> bool {
    matches!(request.path, Some(Path::Seed | Path::Reseed)) && request.error.is_none() && !request.first_of_agent
}

/// The lines of a log.
fn lines<T: LogLine + DeserializeOwned>(logs: &Logs) -> Vec<T> {
    logs.text(T::KIND)
        .lines()
        .map(|line| serde_json::from_str(line).expect("the simulator wrote it in this form"))
        .collect()
}
