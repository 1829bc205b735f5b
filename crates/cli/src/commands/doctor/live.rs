//! A live router, looked at for a while: its workers are sampled, then its last plans are read, and both become the evidence
//! that a folder would give.
//!
//! A router tells less than a folder: no evictions, and of cached tokens only each worker's sums. What it does not tell stays
//! empty, so that detectors which need it stay silent.

use crate::commands::replay::client::Endpoint;
use crate::failure::Usage;
use crate::output::say;
use anyhow::{Context, Result};
use homing_doctor::evidence::{Line, RunLogs, Sheet};
use homing_doctor::{Evidence, Finding};
use homing_report::Path;
use homing_report::logs::{
    BookedLine, CandidateLine, DecisionLine, FailedTransfer, LogKind, RequestLine, RouterSampleLine, TransferLine,
    TransferPhase, WorkerChange, WorkerEventLine, WorkerSampleLine,
};
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::Duration;

/// Between two samples of the workers.
const SAMPLE_EVERY: Duration = Duration::from_secs(2);

/// Watches a router for so many seconds and diagnoses what it tells.
pub fn diagnose(url: &str, seconds: u32) -> Result<Vec<Finding>> {
    let endpoint = Endpoint::new(url).map_err(Usage::error)?;
    let evidence = super::super::runtime()?.block_on(watch(&endpoint, url, seconds))?;
    Ok(homing_doctor::diagnose(&evidence))
}

async fn watch(endpoint: &Endpoint, url: &str, seconds: u32) -> Result<Evidence> {
    say(format_args!("watching {url} for {seconds} s"));
    let every = u32::try_from(SAMPLE_EVERY.as_secs()).unwrap_or(1);
    let mut logs = empty();
    let mut names = BTreeMap::new();
    for sample in 0..=seconds / every {
        if sample > 0 {
            tokio::time::sleep(SAMPLE_EVERY).await;
        }
        let workers = get(endpoint, url, "/admin/workers").await?;
        let t = f64::from(sample) * SAMPLE_EVERY.as_secs_f64();
        add_sample(&mut logs, &mut names, t, &workers);
    }
    let decisions = get(endpoint, url, "/admin/decisions").await?;
    for explanation in decisions["data"].as_array().into_iter().flatten() {
        add_request(&mut logs, &names, explanation);
    }
    Ok(Evidence {
        report: None,
        runs: vec![logs],
    })
}

async fn get(endpoint: &Endpoint, url: &str, path: &str) -> Result<Value> {
    let answer = endpoint
        .get(path)
        .await
        .with_context(|| format!("`{url}` does not answer"))?;
    answer.ok_or_else(|| Usage::error(format_args!("`{url}` has no `{path}`, expected a Homing router")))
}

fn empty() -> RunLogs {
    fn sheet<T>(source: &str) -> Sheet<T> {
        Sheet {
            file: source.to_owned(),
            lines: Vec::new(),
        }
    }
    let named = |kind: LogKind| kind.file_name();
    RunLogs {
        seed: None,
        requests: sheet("/admin/decisions"),
        decisions: sheet("/admin/decisions"),
        admissions: sheet(&named(LogKind::AdmissionEvents)),
        backpressure: sheet(&named(LogKind::BackpressureEvents)),
        bindings: sheet(&named(LogKind::SessionDBinding)),
        transfers: sheet("/admin/decisions"),
        evictions: sheet(&named(LogKind::Evictions)),
        samples: sheet("/admin/workers"),
        worker_events: sheet("/admin/workers"),
        router_samples: sheet("/admin/workers"),
    }
}

fn push<T>(sheet: &mut Sheet<T>, value: T) {
    let number = u32::try_from(sheet.lines.len() + 1).unwrap_or(u32::MAX);
    sheet.lines.push(Line { number, value });
}

fn whole(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

fn small(value: &Value) -> u32 {
    u32::try_from(whole(value)).unwrap_or(u32::MAX)
}

/// What the workers say at one time, and what the router has booked at them.
fn add_sample(logs: &mut RunLogs, names: &mut BTreeMap<u64, String>, t: f64, answer: &Value) {
    let block_size = whole(&answer["block_size"]);
    let mut booked = Vec::new();
    for worker in answer["data"].as_array().into_iter().flatten() {
        let Some(name) = worker["name"].as_str() else { continue };
        names.insert(whole(&worker["id"]), name.to_owned());
        if worker["state"] == "dead" {
            let line = WorkerEventLine {
                t,
                worker: name.to_owned(),
                change: WorkerChange::Dead,
                reason: None,
            };
            push(&mut logs.worker_events, line);
        }
        let in_flight = &worker["in_flight"];
        let exports = small(&in_flight["exports"]);
        booked.push(BookedLine {
            worker: name.to_owned(),
            requests: small(&in_flight["requests"]),
            seeds: small(&in_flight["seeds"]),
            exports,
            reserved_tokens: whole(&in_flight["reserved_tokens"]),
            indexed_tokens: whole(&worker["indexed_gpu_blocks"]) * block_size,
        });
        if worker["running"].is_null() {
            continue;
        }
        let line = WorkerSampleLine {
            t,
            worker: name.to_owned(),
            running: small(&worker["running"]),
            waiting: small(&worker["waiting"]),
            importing: 0,
            // An engine does not say how many it holds: as many as are booked.
            exporting: exports,
            kv_tokens: whole(&worker["kv_tokens"]),
            kv_tokens_used: whole(&worker["kv_tokens_used"]),
            kv_tokens_cached: 0,
            prefill_tokens_pending: whole(&in_flight["prefill_tokens"]),
        };
        push(&mut logs.samples, line);
    }
    let line = RouterSampleLine {
        t,
        queue_length: small(&answer["queued_requests"]),
        sessions: 0,
        workers: booked,
    };
    push(&mut logs.router_samples, line);
}

/// A request that the router remembers, with its plans.
fn add_request(logs: &mut RunLogs, names: &BTreeMap<u64, String>, explanation: &Value) {
    let seconds = |value: &Value| value.as_u64().map(|nanos| nanos as f64 / 1e9);
    let attempts = explanation["attempts"].as_array().map_or(&[][..], Vec::as_slice);
    for attempt in attempts {
        add_attempt(logs, names, attempt);
    }
    let (Some(arrived), Some(ended)) = (seconds(&explanation["arrived"]), seconds(&explanation["ended"])) else {
        return;
    };
    let last = attempts.last().map_or(&Value::Null, |attempt| &attempt["decision"]);
    let name = |worker: &Value| worker.as_u64().and_then(|id| names.get(&id).cloned());
    let state = explanation["state"].as_str().unwrap_or_default();
    let line = RequestLine {
        t: arrived,
        request: whole(&explanation["request"]),
        session: whole(&explanation["session"]).to_string(),
        agent: 0,
        turn: small(&explanation["turn_index"]),
        path: last["path"].as_str().and_then(Path::from_name),
        worker: name(&last["decode"]),
        prefill_worker: name(&last["prefill"]),
        prompt_tokens: small(&last["prompt_tokens"]),
        // Not told for each request: as expected.
        cached_tokens: small(&last["expected_cached_tokens"]),
        output_tokens: 0,
        ttft_s: None,
        tpot_s: None,
        itl_max_s: None,
        latency_s: ended - arrived,
        error: (state != "finished").then(|| state.replace(' ', "_")),
    };
    push(&mut logs.requests, line);
}

fn add_attempt(logs: &mut RunLogs, names: &BTreeMap<u64, String>, attempt: &Value) {
    let decision = &attempt["decision"];
    let name = |worker: &Value| worker.as_u64().and_then(|id| names.get(&id).cloned());
    let path = |value: &Value| value.as_str().and_then(Path::from_name);
    let (Some(at), Some(chosen), Some(worker)) = (
        attempt["at"].as_u64(),
        path(&decision["path"]),
        name(&decision["decode"]),
    ) else {
        return;
    };
    let t = at as f64 / 1e9;
    let candidates = decision["candidates"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|candidate| {
            Some(CandidateLine {
                path: path(&candidate["path"])?,
                prefill_worker: name(&candidate["prefill"]),
                fetches_from: name(&candidate["fetch"]["from"]),
                worker: name(&candidate["decode"])?,
                resident_tokens: small(&candidate["resident_tokens"]),
                score: candidate["score"].as_f64(),
                forbidden: candidate["forbidden"].as_str().map(str::to_owned),
            })
        });
    let prefill = name(&decision["prefill"]);
    let request = whole(&decision["request"]);
    let failed = attempt["failed"].as_str().unwrap_or_default();
    if let (Some(from), true) = (&prefill, failed.ends_with("transfer failed")) {
        let line = TransferLine {
            t: t + attempt["failed_after"].as_u64().unwrap_or(0) as f64 / 1e9,
            request,
            from: from.clone(),
            to: worker.clone(),
            tokens: small(&decision["prompt_tokens"]),
            bytes: None,
            duration_s: 0.0,
            error: Some(failed.to_owned()),
            failed: Some(FailedTransfer {
                phase: TransferPhase::Ready,
                clock_s: None,
            }),
        };
        push(&mut logs.transfers, line);
    }
    let line = DecisionLine {
        t,
        request,
        attempt: small(&decision["attempt"]),
        session: whole(&decision["session"]),
        turn: small(&decision["turn_index"]),
        path: chosen,
        prefill_worker: prefill,
        fetches_from: name(&decision["fetch"]["from"]),
        fetched_tokens: decision["fetch"]["tokens"]
            .as_u64()
            .and_then(|tokens| u32::try_from(tokens).ok()),
        worker,
        prompt_tokens: small(&decision["prompt_tokens"]),
        expected_cached_tokens: small(&decision["expected_cached_tokens"]),
        queued_s: decision["queued"].as_u64().unwrap_or(0) as f64 / 1e9,
        expected_ttft_s: decision["expected_ttft"].as_u64().map(|nanos| nanos as f64 / 1e9),
        reason: decision["reason"].as_str().unwrap_or_default().to_owned(),
        candidates: candidates.collect(),
    };
    push(&mut logs.decisions, line);
}
