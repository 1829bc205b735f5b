//! Modes of a single engine: one that dies of an invariant of its own, one that repairs and says nothing.

use crate::case::{Case, describe_request, describe_transfer, proof};
use crate::finding::{Cost, Level, Suspicion};
use crate::mode::ModeId;
use homing_report::logs::WorkerChange;
use std::collections::BTreeSet;

/// Words of a process that died of its own invariant.
const OWN_INVARIANT: [&str; 2] = ["AssertionError", "extend_input_len"];
/// A request that failed so long after a crash, in seconds, may have failed of it.
const AFTER_S: f64 = 5.0;
/// Requests that were computed again in silence, at least.
const SILENT_MIN: usize = 3;

/// D: a worker's process dies of a broken invariant.
pub(super) fn correction_crash(case: &Case<'_>) -> Option<Suspicion> {
    let events = &case.logs.worker_events;
    let crashes: Vec<_> = events
        .lines
        .iter()
        .filter(|line| {
            let reason = line.value.reason.as_deref().unwrap_or_default();
            line.value.change == WorkerChange::Crashed && OWN_INVARIANT.iter().any(|word| reason.contains(word))
        })
        .collect();
    if crashes.is_empty() {
        return None;
    }
    let mut failed = BTreeSet::new();
    for crash in &crashes {
        let up = events.values().find(|event| {
            event.worker == crash.value.worker && event.change == WorkerChange::Restarted && event.t >= crash.value.t
        });
        let until = up.map_or(f64::INFINITY, |event| event.t) + AFTER_S;
        failed.extend(case.failed().filter_map(|line| {
            let ended = line.value.t + line.value.latency_s;
            // While it is down, its share of the requests finds no place.
            let there = line
                .value
                .worker
                .as_ref()
                .is_none_or(|worker| *worker == crash.value.worker);
            (there && ended >= crash.value.t && ended <= until).then_some(line.value.request)
        }));
    }
    let cost = Cost {
        failed_requests: failed.len() as u64,
        latency_s: 0.0,
    };
    let seen = format!(
        "workers died {} time(s) of an invariant of their own; {} requests failed on them until they were back",
        crashes.len(),
        failed.len()
    );
    let mut proofs: Vec<_> = crashes
        .iter()
        .take(4)
        .map(|line| {
            let reason = line.value.reason.as_deref().unwrap_or_default();
            proof(
                events,
                line,
                format!("t={} {} crashed: {reason}", line.value.t, line.value.worker),
            )
        })
        .collect();
    let requests = failed.iter().filter_map(|request| case.request(*request));
    proofs.extend(
        requests
            .take(4)
            .map(|line| proof(&case.logs.requests, line, describe_request(&line.value))),
    );
    Some(Suspicion::new(ModeId::CorrectionCrash, cost, seen, proofs).at_least(Level::Warning))
}

/// A transfer failed, no new plan was made, and the request succeeded all the same.
pub(super) fn silent_recompute(case: &Case<'_>) -> Option<Suspicion> {
    let usual = case
        .median_ttft(|request| case.failed_transfers(request.request).is_empty() && request.prefill_worker.is_some());
    let (mut silent, mut proofs, mut cost) = (0, Vec::new(), Cost::default());
    for line in case.answered() {
        let request = &line.value;
        let Some(failed) = case.failed_transfers(request.request).last() else {
            continue;
        };
        if !case.is_silent(request) {
            continue;
        }
        silent += 1;
        cost.latency_s += (request.ttft_s.unwrap_or_default() - usual).max(0.0);
        proofs.push(proof(&case.logs.transfers, failed, describe_transfer(&failed.value)));
        let value = format!(
            "{}, no second plan: {} of {} prompt tokens were not computed for it",
            describe_request(request),
            request.cached_tokens,
            request.prompt_tokens
        );
        proofs.push(proof(&case.logs.requests, line, value));
    }
    if silent < SILENT_MIN {
        return None;
    }
    let seen = format!(
        "{silent} requests lost their KV on the way and succeeded without a second plan: somebody computed their prompts again"
    );
    Some(Suspicion::new(ModeId::SilentRecompute, cost, seen, proofs).at_least(Level::Warning))
}
