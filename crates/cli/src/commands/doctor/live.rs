//! A live router, looked at for a while: its workers are sampled, then its last requests are read, and both become the evidence
//! that a folder would give. All times are of the router's clock.
//!
//! A router tells less than a folder: no evictions, no admissions, no bindings, and of transfers those that failed. What it does not tell
//! stays empty, so that detectors which need it stay silent. Of a request that has not ended it tells what it has waited.

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

/// The page with what workers say, and with what is booked at them.
const WORKERS: &str = "/admin/workers";
/// The page with the last requests, each with its plans.
const REQUESTS: &str = "/admin/requests";

/// What was learnt while the router was watched.
#[derive(Default)]
struct Known {
    /// Names of workers by their ids.
    names: BTreeMap<u64, String>,
    /// The last state that each worker was seen in, and since when, in seconds of the router's clock.
    states: BTreeMap<String, (String, f64)>,
    /// The time of the last sample, in seconds of the router's clock.
    now: f64,
}

impl Known {
    fn name(&self, worker: &Value) -> Option<String> {
        worker.as_u64().and_then(|id| self.names.get(&id).cloned())
    }
}

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
    let (mut logs, mut known) = (empty(), Known::default());
    for sample in 0..=seconds / every {
        if sample > 0 {
            tokio::time::sleep(SAMPLE_EVERY).await;
        }
        let workers = get(endpoint, url, WORKERS).await?;
        add_sample(&mut logs, &mut known, &workers);
    }
    let requests = get(endpoint, url, REQUESTS).await?;
    for explanation in requests["data"].as_array().into_iter().flatten() {
        add_request(&mut logs, &known, explanation);
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
        requests: sheet(REQUESTS),
        decisions: sheet(REQUESTS),
        admissions: sheet(&named(LogKind::AdmissionEvents)),
        backpressure: sheet(&named(LogKind::BackpressureEvents)),
        bindings: sheet(&named(LogKind::SessionDBinding)),
        transfers: sheet(REQUESTS),
        evictions: sheet(&named(LogKind::Evictions)),
        samples: sheet(WORKERS),
        worker_events: sheet(WORKERS),
        router_samples: sheet(WORKERS),
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

/// A point of time on the router's clock, in seconds.
fn seconds(nanos: &Value) -> Option<f64> {
    nanos.as_u64().map(|nanos| nanos as f64 / 1e9)
}

/// Seconds from one to the other, to the microsecond as in logs.
fn between(since: f64, until: f64) -> f64 {
    ((until - since) * 1e6).round() / 1e6
}

/// A stretch of time in seconds; none where there is no such thing.
fn duration_s(duration: &Value) -> f64 {
    whole(&duration["secs"]) as f64 + whole(&duration["nanos"]) as f64 / 1e9
}

/// What the workers say at one time, and what the router has booked at them.
fn add_sample(logs: &mut RunLogs, known: &mut Known, answer: &Value) {
    let block_size = whole(&answer["block_size"]);
    let t = seconds(&answer["now"]).unwrap_or(known.now);
    known.now = t;
    let mut booked = Vec::new();
    for worker in answer["data"].as_array().into_iter().flatten() {
        let Some(name) = worker["name"].as_str() else { continue };
        known.names.insert(whole(&worker["id"]), name.to_owned());
        add_state(logs, known, name, worker);
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
        // What a worker said last before it stopped answering holds no more.
        if worker["running"].is_null() || !matches!(worker["state"].as_str(), Some("exact" | "degraded")) {
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

/// The worker's state, where it is another than the last time: since when it is in it the router says.
fn add_state(logs: &mut RunLogs, known: &mut Known, name: &str, worker: &Value) {
    let state = worker["state"].as_str().unwrap_or_default();
    let change = match state {
        "exact" => WorkerChange::Exact,
        "degraded" => WorkerChange::Degraded,
        "suspect" => WorkerChange::Suspect,
        "dead" => WorkerChange::Dead,
        // It has not joined.
        _ => return,
    };
    let since = seconds(&worker["state_since"]).unwrap_or(known.now);
    let now = (state.to_owned(), since);
    if known.states.get(name) == Some(&now) {
        return;
    }
    known.states.insert(name.to_owned(), now);
    let line = WorkerEventLine {
        t: since,
        worker: name.to_owned(),
        change,
        reason: None,
    };
    push(&mut logs.worker_events, line);
}

/// A request that the router remembers, with its plans. One that has not ended has taken as long as it has waited, at least.
fn add_request(logs: &mut RunLogs, known: &Known, explanation: &Value) {
    let attempts = explanation["attempts"].as_array().map_or(&[][..], Vec::as_slice);
    for attempt in attempts {
        add_attempt(logs, known, attempt);
    }
    let Some(arrived) = seconds(&explanation["arrived"]) else {
        return;
    };
    let ended = seconds(&explanation["ended"]);
    let until = ended.unwrap_or(known.now).max(arrived);
    let answered = seconds(&explanation["first_token"]).or_else(|| ended.is_none().then_some(until));
    let last = attempts.last().map_or(&Value::Null, |attempt| &attempt["decision"]);
    let found = &explanation["cached_tokens"];
    let state = explanation["state"].as_str().unwrap_or_default();
    let line = RequestLine {
        t: arrived,
        request: whole(&explanation["request"]),
        session: whole(&explanation["session"]).to_string(),
        agent: 0,
        turn: small(&explanation["turn_index"]),
        path: last["path"].as_str().and_then(Path::from_name),
        worker: known.name(&last["decode"]),
        prefill_worker: known.name(&last["prefill"]),
        prompt_tokens: small(&last["prompt_tokens"]),
        // Where no engine says it: as expected.
        cached_tokens: small(if found.is_null() {
            &last["expected_cached_tokens"]
        } else {
            found
        }),
        output_tokens: small(&explanation["output_tokens"]),
        ttft_s: answered.map(|answered| between(arrived, answered)),
        tpot_s: None,
        itl_max_s: None,
        latency_s: between(arrived, until),
        error: (ended.is_some() && state != "finished").then(|| state.replace(' ', "_")),
    };
    push(&mut logs.requests, line);
}

fn add_attempt(logs: &mut RunLogs, known: &Known, attempt: &Value) {
    let decision = &attempt["decision"];
    let name = |worker: &Value| known.name(worker);
    let path = |value: &Value| value.as_str().and_then(Path::from_name);
    let (Some(t), Some(chosen), Some(worker)) = (
        seconds(&attempt["at"]),
        path(&decision["path"]),
        name(&decision["decode"]),
    ) else {
        return;
    };
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
            t: t + duration_s(&attempt["failed_after"]),
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
        queued_s: duration_s(&decision["queued"]),
        expected_ttft_s: (!decision["expected_ttft"].is_null()).then(|| duration_s(&decision["expected_ttft"])),
        reason: decision["reason"].as_str().unwrap_or_default().to_owned(),
        candidates: candidates.collect(),
    };
    push(&mut logs.decisions, line);
}
