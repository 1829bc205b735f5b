//! What is kept of a run: its records, the figures of the report, and those structural logs that experiments ask.
//!
//! Everything is parsed on the thread that ran the simulation and the texts are dropped there, because a hundred runs with
//! all their log texts would not fit into memory.

use crate::setup::{Setup, SetupError};
use homing_report::logs::{AdmissionLine, BindingLine, DecisionLine, EvictionLine, LogLine, TransferLine};
use homing_report::{Path, RequestRecord, Run, RunRecord};
use homing_sim::{Logs, simulate};
use homing_units::Instant;
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
    /// How long turns waited in the router before they were sent, in seconds, of those that did. A router without a queue
    /// lets turns wait only where backpressure makes it.
    pub pauses: Vec<f64>,
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
        let decisions = lines::<DecisionLine>(&outcome.logs);
        Ok(Self {
            run: Run::new(&outcome.run, setup.classes()),
            record: outcome.run,
            transfers: lines(&outcome.logs),
            evictions: lines(&outcome.logs),
            bindings: lines(&outcome.logs),
            pauses: decisions
                .iter()
                .map(|line| line.queued_s)
                .filter(|waited| *waited > 0.0)
                .collect(),
            admissions,
            reasons: decisions.into_iter().map(|line| (line.request, line.reason)).collect(),
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

    /// Transfers that failed because the giver took the receiver for dead.
    pub fn dead_transfers(&self) -> impl Iterator<Item = &TransferLine> {
        self.failed_transfers().filter(|line| is_dead(line))
    }

    /// Evictions on workers that decode.
    pub fn decode_evictions(&self) -> impl Iterator<Item = &EvictionLine> {
        let decode: BTreeSet<&str> = self.decode_workers().collect();
        let there = self.evictions.iter();
        there.filter(move |line| decode.contains(line.worker.as_str()))
    }

    /// Requests that each decoding worker was given, in the order of the cluster.
    #[must_use]
    pub fn decode_requests(&self) -> Vec<f64> {
        let given = self
            .record
            .requests
            .iter()
            .filter_map(|request| request.worker.as_deref());
        tally(self.decode_workers(), given)
    }

    /// From the end of each request to the next one of its agent, in seconds.
    #[must_use]
    pub fn gaps(&self) -> Vec<f64> {
        let mut ends: BTreeMap<(u32, u32), Instant> = BTreeMap::new();
        let mut gaps = Vec::new();
        for request in &self.record.requests {
            if let Some(end) = ends.insert((request.session, request.agent), request.end) {
                gaps.push((request.arrival - end).as_secs_f64());
            }
        }
        gaps
    }

    /// Requests that each prefill worker was given.
    #[must_use]
    pub fn prefill_requests(&self) -> Vec<f64> {
        let requests = self.record.requests.iter();
        tally(
            self.prefill_workers(),
            requests.filter_map(|request| request.prefill_worker.as_deref()),
        )
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
}

/// How often each of `names` comes, in their order.
pub fn tally<'a>(names: impl Iterator<Item = &'a str>, all: impl Iterator<Item = &'a str>) -> Vec<f64> {
    let mut counts: BTreeMap<&str, f64> = BTreeMap::new();
    for name in all {
        *counts.entry(name).or_default() += 1.0;
    }
    names.map(|name| counts.get(name).copied().unwrap_or(0.0)).collect()
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

/// Whether a transfer failed because its giver took its receiver for dead (the papers' words for it).
#[must_use]
pub fn is_dead(line: &TransferLine) -> bool {
    line.error
        .as_deref()
        .is_some_and(|error| error.contains("could be dead"))
}

/// The lines of a log.
fn lines<T: LogLine + DeserializeOwned>(logs: &Logs) -> Vec<T> {
    logs.text(T::KIND)
        .lines()
        .map(|line| serde_json::from_str(line).expect("the simulator wrote it in this form"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tally_has_a_place_for_everybody() {
        let check = |names: &[&'static str], all: &[&'static str], expected: &[f64]| {
            assert_eq!(
                tally(names.iter().copied(), all.iter().copied()),
                expected,
                "{names:?} {all:?}"
            );
        };
        check(&["d0", "d1", "d2"], &["d2", "d0", "d2", "p0"], &[1.0, 0.0, 2.0]);
        check(&["d0"], &[], &[0.0]);
        check(&[], &["d0"], &[]);
    }
}
