//! One run as detectors look at it: the logs, and what several detectors ask of them, computed once.
//!
//! Only what stands in the folder is used: the report where there is one, else the logs. A worker counts as one that decodes
//! by its role in the report, or because requests were decoded there.

use crate::evidence::{CLIENT_GONE, Line, RunLogs, Sheet};
use crate::finding::{Cost, Proof, Whole};
use homing_report::logs::{DecisionLine, RequestLine, TransferLine, WorkerChange, WorkerSampleLine};
use homing_report::stats::{quantile, sorted};
use homing_report::{Path, Report, Run};
use std::collections::{BTreeMap, BTreeSet};

/// What happened so close to a crash, in seconds, may have happened because of it.
const JUST_S: f64 = 2.0;

/// A run under examination.
#[derive(Debug)]
pub(crate) struct Case<'e> {
    pub(crate) logs: &'e RunLogs,
    pub(crate) report: Option<&'e Report>,
    /// The run's figures in the report.
    pub(crate) run: Option<&'e Run>,
    /// Requests by number.
    requests: BTreeMap<u64, &'e Line<RequestLine>>,
    /// Plans by request, in order.
    decisions: BTreeMap<u64, Vec<&'e Line<DecisionLine>>>,
    /// Failed transfers by request.
    failed_transfers: BTreeMap<u64, Vec<&'e Line<TransferLine>>>,
}

impl<'e> Case<'e> {
    pub(crate) fn new(logs: &'e RunLogs, report: Option<&'e Report>) -> Self {
        let requests = logs.requests.lines.iter().map(|line| (line.value.request, line));
        let mut decisions: BTreeMap<u64, Vec<_>> = BTreeMap::new();
        for line in &logs.decisions.lines {
            decisions.entry(line.value.request).or_default().push(line);
        }
        let mut failed_transfers: BTreeMap<u64, Vec<_>> = BTreeMap::new();
        for line in logs.transfers.lines.iter().filter(|line| line.value.error.is_some()) {
            failed_transfers.entry(line.value.request).or_default().push(line);
        }
        let run = report.and_then(|report| {
            let of_seed = |run: &&Run| logs.seed.is_none_or(|seed| seed == run.seed);
            report.runs.iter().find(of_seed)
        });
        Self {
            requests: requests.collect(),
            decisions,
            failed_transfers,
            logs,
            report,
            run,
        }
    }

    /// What all requests cost.
    pub(crate) fn whole(&self) -> Whole {
        Whole {
            requests: self.logs.requests.lines.len() as u64,
            latency_s: self.logs.requests.values().map(|request| request.latency_s).sum(),
        }
    }

    pub(crate) fn request(&self, request: u64) -> Option<&'e Line<RequestLine>> {
        self.requests.get(&request).copied()
    }

    /// The plans of a request, in order.
    pub(crate) fn decisions(&self, request: u64) -> &[&'e Line<DecisionLine>] {
        self.decisions.get(&request).map_or(&[], Vec::as_slice)
    }

    /// Failed transfers of a request, in order.
    pub(crate) fn failed_transfers(&self, request: u64) -> &[&'e Line<TransferLine>] {
        self.failed_transfers.get(&request).map_or(&[], Vec::as_slice)
    }

    /// Whether a request completed although each of its plans lost its KV on the way: an attempt has one transfer to where it
    /// decodes, and where each failed, the last one was answered all the same, by somebody who did not say that it had failed.
    pub(crate) fn is_silent(&self, request: &RequestLine) -> bool {
        let into = |line: &&&Line<TransferLine>| Some(line.value.to.as_str()) == request.worker.as_deref();
        let failed = self.failed_transfers(request.request).iter().filter(into).count();
        request.error.is_none() && failed > 0 && self.decisions(request.request).len() <= failed
    }

    /// Requests that ended with an error, but for those whose clients hung up.
    pub(crate) fn failed(&self) -> impl Iterator<Item = &'e Line<RequestLine>> {
        let failed = |line: &&Line<RequestLine>| line.value.error.as_deref().is_some_and(|error| error != CLIENT_GONE);
        self.logs.requests.lines.iter().filter(failed)
    }

    /// Requests that were answered.
    pub(crate) fn answered(&self) -> impl Iterator<Item = &'e Line<RequestLine>> {
        let answered = |line: &&Line<RequestLine>| line.value.error.is_none();
        self.logs.requests.lines.iter().filter(answered)
    }

    /// Requests that failed, as far as `wanted` are asked for.
    pub(crate) fn count_failed(&self, wanted: &BTreeSet<u64>) -> u64 {
        self.failed()
            .filter(|line| wanted.contains(&line.value.request))
            .count() as u64
    }

    /// The workers that decode, by name.
    pub(crate) fn decode_workers(&self) -> BTreeSet<&'e str> {
        let by_role = self.run.iter().flat_map(|run| &run.workers);
        let by_role = by_role.filter(|worker| worker.role == "decode" || worker.role == "both");
        let used = self
            .logs
            .requests
            .values()
            .filter_map(|request| request.worker.as_deref());
        by_role.map(|worker| worker.name.as_str()).chain(used).collect()
    }

    /// Whether a worker's process ran at a time, and had not just died nor died at once.
    pub(crate) fn is_up(&self, worker: &str, at: f64) -> bool {
        let died = |change| matches!(change, WorkerChange::Crashed | WorkerChange::Dead);
        let of_worker = || self.logs.worker_events.values().filter(|event| event.worker == worker);
        let last = of_worker().rfind(|event| event.t <= at + JUST_S);
        let close = of_worker().any(|event| died(event.change) && (event.t - at).abs() <= JUST_S);
        !close && last.is_none_or(|event| !died(event.change))
    }

    /// Samples of each worker, in order.
    pub(crate) fn samples(&self) -> BTreeMap<&'e str, Vec<&'e Line<WorkerSampleLine>>> {
        let mut samples: BTreeMap<&str, Vec<_>> = BTreeMap::new();
        for line in &self.logs.samples.lines {
            samples.entry(&line.value.worker).or_default().push(line);
        }
        samples
    }

    /// Requests of each agent of each session that have ended, in the order in which they were sent.
    pub(crate) fn agents(&self) -> BTreeMap<(&'e str, u32), Vec<&'e Line<RequestLine>>> {
        let mut agents: BTreeMap<(&str, u32), Vec<&Line<RequestLine>>> = BTreeMap::new();
        for line in &self.logs.requests.lines {
            agents
                .entry((&line.value.session, line.value.agent))
                .or_default()
                .push(line);
        }
        for turns in agents.values_mut() {
            turns.sort_by_key(|line| line.value.request);
        }
        agents
    }

    /// The median time to first token of completed requests of which this is true, in seconds; 0 where there is none.
    pub(crate) fn median_ttft(&self, wanted: impl Fn(&RequestLine) -> bool) -> f64 {
        let completed = self.logs.requests.values().filter(|request| request.error.is_none());
        median(
            completed
                .filter(|request| wanted(request))
                .filter_map(|request| request.ttft_s),
        )
    }

    /// The median time to first token of turns that found their KV in place.
    pub(crate) fn append_ttft(&self) -> f64 {
        self.median_ttft(|request| matches!(request.path, Some(Path::Append)))
    }
}

/// Adds what a request cost: a failure, or the seconds by which its first token came later than usual. A client that hung
/// up costs nothing.
pub(crate) fn add_cost(cost: &mut Cost, request: &RequestLine, usual_ttft_s: f64) {
    match request.error.as_deref() {
        Some(CLIENT_GONE) => {}
        Some(_) => cost.failed_requests += 1,
        None => cost.latency_s += (request.ttft_s.unwrap_or_default() - usual_ttft_s).max(0.0),
    }
}

/// The median; 0 of nothing.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    quantile(&sorted(values.collect()), 500).unwrap_or(0.0)
}

/// A line as evidence.
pub(crate) fn proof<T>(sheet: &Sheet<T>, line: &Line<T>, value: impl Into<String>) -> Proof {
    Proof {
        file: sheet.file.clone(),
        line: line.number,
        value: value.into(),
    }
}

/// A figure of the report as evidence.
pub(crate) fn report_proof(value: impl Into<String>) -> Proof {
    Proof {
        file: crate::evidence::SUMMARY.to_owned(),
        line: 0,
        value: value.into(),
    }
}

/// What a failed transfer's line says.
pub(crate) fn describe_transfer(line: &TransferLine) -> String {
    let error = line.error.as_deref().unwrap_or("ok");
    let phase = line.failed.map_or(String::new(), |failed| {
        let clock = failed
            .clock_s
            .map_or(String::new(), |clock| format!(", clock of {clock} s"));
        format!(" ({:?}{clock})", failed.phase).to_lowercase()
    });
    format!(
        "t={} request {} {} -> {}: {error}{phase}",
        line.t, line.request, line.from, line.to
    )
}

/// What a request's line says of its end.
pub(crate) fn describe_request(line: &RequestLine) -> String {
    let end = match &line.error {
        Some(error) => format!("error `{error}`"),
        None => format!("ttft {} s", line.ttft_s.unwrap_or_default()),
    };
    let path = line.path.map_or("no plan", Path::as_str);
    format!(
        "request {} of {} turn {}: {path}, {end}",
        line.request, line.session, line.turn
    )
}
