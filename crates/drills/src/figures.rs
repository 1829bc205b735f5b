//! The figures that statements speak of, computed from what a setting's runs left behind: the report and the logs, as the
//! doctor has them, and nothing that the simulator alone knows.
//!
//! Where a setting has several runs a figure is that of its first, but for those that say otherwise.

use crate::run::Observed;
use homing_doctor::evidence::{CLIENT_GONE, RunLogs};
use homing_report::logs::{
    EvictionLine, RouterSampleLine, TransferPhase, WorkerChange, WorkerEventLine, WorkerSampleLine,
};
use homing_report::stats::{quantile, sorted};
use homing_report::{Path, Report, Run};
use std::collections::{BTreeMap, BTreeSet};

/// The figure of this name; `None` where there is none, or the run does not have it.
pub(crate) fn figure(observed: &Observed, name: &str) -> Option<f64> {
    let report = observed.evidence.report.as_ref()?;
    let (run, logs) = (report.runs.first()?, observed.evidence.runs.first()?);
    of_report(report, run, name)
        .or_else(|| of_balance(run, logs, name))
        .or_else(|| of_logs(run, logs, name))
}

fn of_report(report: &Report, run: &Run, name: &str) -> Option<f64> {
    let share = |part: u64, whole: u64| (whole > 0).then(|| part as f64 / whole as f64);
    match name {
        "runs" => Some(report.runs.len() as f64),
        "requests" => Some(run.requests as f64),
        "failed" => Some(failed(run) as f64),
        "failed_share" => share(failed(run), run.requests),
        // Over all runs: the most failures by the fewest, at least one.
        "failed_spread" => {
            let failed = report.runs.iter().map(failed);
            Some(failed.clone().max()? as f64 / failed.min()?.max(1) as f64)
        }
        "latency_mean_s" => run.latency_s.mean,
        "latency_p50_s" => run.latency_s.p50,
        "latency_p90_s" => run.latency_s.p90,
        "latency_p99_s" => run.latency_s.p99,
        "latency_max_s" => run.latency_s.max,
        "ttft_mean_s" => run.ttft_s.mean,
        "ttft_p50_s" => run.ttft_s.p50,
        "ttft_p90_s" => run.ttft_s.p90,
        "ttft_p99_s" => run.ttft_s.p99,
        "itl_max_p99_s" => run.itl_max_s.p99,
        "hit_ratio" => run.hit_ratio,
        "appends" => Some(run.paths.append as f64),
        "seeds" => Some(run.paths.seed as f64),
        "reseeds" => Some(run.paths.reseed as f64),
        "locals" => Some(run.paths.local as f64),
        "sessions" => Some(run.sessions.count as f64),
        "starved_share" => share(run.sessions.starved, run.sessions.count),
        "failed_late_share" => run.first_error_at_share,
        _ => None,
    }
}

/// Requests that failed; a client that hangs up is no failure.
pub(crate) fn failed(run: &Run) -> u64 {
    run.errors.total - run.errors.by_kind.get(CLIENT_GONE).copied().unwrap_or(0)
}

fn of_balance(run: &Run, logs: &RunLogs, name: &str) -> Option<f64> {
    let decoding: BTreeSet<&str> = run
        .workers
        .iter()
        .filter(|worker| worker.role != "prefill")
        .map(|worker| worker.name.as_str())
        .collect();
    let uneven = |counts: BTreeMap<&str, usize>| {
        let (most, least) = (*counts.values().max()?, *counts.values().min()?);
        // Of nobody and somebody: as uneven as it gets.
        Some(if least == 0 {
            f64::MAX
        } else {
            most as f64 / least as f64
        })
    };
    let tally = |names: &mut dyn Iterator<Item = &str>| {
        let mut counts: BTreeMap<&str, usize> = decoding.iter().map(|worker| (*worker, 0)).collect();
        for name in names {
            if let Some(count) = counts.get_mut(name) {
                *count += 1;
            }
        }
        counts
    };
    let decoded = || tally(&mut logs.requests.values().filter_map(|line| line.worker.as_deref()));
    match name {
        "requests_max_min" => uneven(decoded()),
        "coldest_share" => {
            let counts = decoded();
            let all: usize = counts.values().sum();
            (all > 0).then(|| counts.values().min().copied().unwrap_or(0) as f64 / all as f64)
        }
        "prefill_failures_max" => failures_by_prefill(run, logs)
            .into_values()
            .max()
            .map(|count| count as f64),
        "prefill_failures_min" => failures_by_prefill(run, logs)
            .into_values()
            .min()
            .map(|count| count as f64),
        _ => None,
    }
}

/// Failed transfers of each prefill worker.
fn failures_by_prefill<'r>(run: &'r Run, logs: &RunLogs) -> BTreeMap<&'r str, usize> {
    let workers = run.workers.iter().filter(|worker| worker.role != "decode");
    let failed = |name: &str| {
        let failed = logs
            .transfers
            .values()
            .filter(|line| line.error.is_some() && line.from == name);
        failed.count()
    };
    workers
        .map(|worker| (worker.name.as_str(), failed(&worker.name)))
        .collect()
}

fn of_logs(run: &Run, logs: &RunLogs, name: &str) -> Option<f64> {
    let count = |count: usize| Some(count as f64);
    match name {
        "failed_transfers" => count(logs.transfers.values().filter(|line| line.error.is_some()).count()),
        "early_failures" => count(
            logs.transfers
                .values()
                .filter(|line| line.failed.is_some_and(|failed| failed.phase != TransferPhase::Ready))
                .count(),
        ),
        "crashes" => count(
            logs.worker_events
                .values()
                .filter(|line| line.change == WorkerChange::Crashed)
                .count(),
        ),
        "evictions" => count(decode_evictions(run, logs).count()),
        "evicted_tokens_a_choice" => {
            let choices: u64 = decode_evictions(run, logs).map(|line| u64::from(line.decisions)).sum();
            let tokens: u64 = decode_evictions(run, logs).map(|line| line.tokens).sum();
            Some(if choices == 0 {
                0.0
            } else {
                tokens as f64 / choices as f64
            })
        }
        "evicted_tokens_an_event" => {
            let tokens: Vec<f64> = decode_evictions(run, logs).map(|line| line.tokens as f64).collect();
            Some(tokens.iter().sum::<f64>() / tokens.len().max(1) as f64)
        }
        "seed_ttft_p90_s" => {
            let seeds = logs
                .requests
                .values()
                .filter(|line| matches!(line.path, Some(Path::Seed | Path::Reseed)));
            quantile(&sorted(seeds.filter_map(|line| line.ttft_s).collect()), 900)
        }
        "second_turn_reseeds" => count(
            logs.requests
                .values()
                .filter(|line| line.turn == 1 && line.path == Some(Path::Reseed))
                .count(),
        ),
        "answer_p50_s" => quantile(
            &sorted(logs.admissions.values().filter_map(|line| line.answered_s).collect()),
            500,
        )
        .or(Some(0.0)),
        "pauses" => count(logs.decisions.values().filter(|line| line.queued_s > 0.0).count()),
        "index_claim" => index_claim(logs),
        "booked_request_s" => Some(booked_request_s(logs)),
        "silent_recomputes" => count(silent_recomputes(logs)),
        "missed_tokens" => Some(missed_tokens(logs)),
        "exports_held_s" => Some(worker_seconds(logs, |line| line.exporting)),
        "imports_held_s" => Some(worker_seconds(logs, |line| line.importing + line.waiting)),
        _ => None,
    }
}

fn decode_evictions<'l>(run: &Run, logs: &'l RunLogs) -> impl Iterator<Item = &'l EvictionLine> {
    let prefill: BTreeSet<String> = run
        .workers
        .iter()
        .filter(|worker| worker.role == "prefill")
        .map(|worker| worker.name.clone())
        .collect();
    logs.evictions
        .values()
        .filter(move |line| !prefill.contains(&line.worker))
}

/// The most that the index ever claimed that a worker holds, by the size of its pool.
fn index_claim(logs: &RunLogs) -> Option<f64> {
    let pools: BTreeMap<&str, u64> = logs
        .samples
        .values()
        .map(|line| (line.worker.as_str(), line.kv_tokens))
        .collect();
    let claims = logs.router_samples.values().flat_map(|line| &line.workers);
    let claims =
        claims.filter_map(|booked| Some(booked.indexed_tokens as f64 / *pools.get(booked.worker.as_str())? as f64));
    claims.max_by(f64::total_cmp)
}

/// The time integral of requests that the router has booked at workers; a sample holds until the next one.
fn booked_request_s(logs: &RunLogs) -> f64 {
    let booked = |line: &RouterSampleLine| {
        line.workers
            .iter()
            .map(|worker| f64::from(worker.requests))
            .sum::<f64>()
    };
    let lines: Vec<&RouterSampleLine> = logs.router_samples.values().collect();
    lines
        .windows(2)
        .map(|pair| (pair[1].t - pair[0].t) * booked(pair[0]))
        .sum()
}

/// Requests that completed although each of their plans lost its KV on the way.
fn silent_recomputes(logs: &RunLogs) -> usize {
    let mut plans: BTreeMap<u64, i64> = BTreeMap::new();
    for line in logs.decisions.values() {
        *plans.entry(line.request).or_default() += 1;
    }
    for line in logs.transfers.values().filter(|line| line.error.is_some()) {
        *plans.entry(line.request).or_default() -= 1;
    }
    let completed = logs.requests.values().filter(|line| line.error.is_none());
    completed
        .filter(|line| plans.get(&line.request).is_some_and(|left| *left <= 0))
        .count()
}

/// Cached tokens that the router expected and that were not there, of requests that completed.
fn missed_tokens(logs: &RunLogs) -> f64 {
    let expected: BTreeMap<u64, u32> = logs
        .decisions
        .values()
        .map(|line| (line.request, line.expected_cached_tokens))
        .collect();
    let completed = logs.requests.values().filter(|line| line.error.is_none());
    let missed = completed.map(|line| {
        let expected = expected.get(&line.request).copied().unwrap_or(0);
        f64::from(expected.saturating_sub(line.cached_tokens))
    });
    missed.sum()
}

/// The time integral of a worker's figure over all workers; a sample holds until the next one, the last until the worker dies or
/// the router is sampled for the last time.
fn worker_seconds(logs: &RunLogs, figure: fn(&WorkerSampleLine) -> u32) -> f64 {
    let mut last: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
    let end = logs.router_samples.values().map(|line| line.t).fold(0.0, f64::max);
    let mut sum = 0.0;
    for line in logs.samples.values() {
        let (since, value) = last
            .insert(&line.worker, (line.t, f64::from(figure(line))))
            .unwrap_or((line.t, 0.0));
        sum += (line.t - since) * value;
    }
    let dies = |worker: &str, since: f64| {
        let crashed =
            |line: &&WorkerEventLine| line.worker == worker && line.change == WorkerChange::Crashed && line.t >= since;
        logs.worker_events.values().find(crashed).map_or(end, |line| line.t)
    };
    let tails = last
        .iter()
        .map(|(worker, (since, value))| (dies(worker, *since) - since).max(0.0) * value);
    sum + tails.sum::<f64>()
}
