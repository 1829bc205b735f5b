//! The figures of single workers, and how evenly those that decode were used.
//!
//! Requests and tokens are counted from the requests' side, so that a live endpoint which tells only the name of the
//! worker has them too. Balance compares like with like: workers of one role, and only those that decode, because a
//! prefill worker beside them does another job.

use crate::record::{RequestRecord, WorkerRecord};
use crate::run::{RunRecord, ratio};
use crate::stats::rounded;
use homing_units::Duration;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The figures of one worker; null where the endpoint does not tell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Worker {
    /// Its name.
    pub name: String,
    /// What it may do; `unknown` where only its name was seen.
    pub role: String,
    /// Requests that it prefilled or decoded (or was to).
    pub requests: u64,
    /// Sessions of these.
    pub sessions: u64,
    /// Requests that it decoded (or was to).
    #[serde(default)]
    pub decoded_requests: u64,
    /// Prompt and output tokens of the requests that it decoded to their end: the load that was given to it, whatever
    /// its cache spared.
    #[serde(default)]
    pub decoded_tokens: u64,
    /// Of these, tokens that had to be computed somewhere: without the cached ones.
    #[serde(default)]
    pub computed_tokens: u64,
    /// The largest share of its KV pool that was held at once.
    pub kv_usage_max: Option<f64>,
    /// Times that it evicted.
    pub evictions: Option<u64>,
    /// Tokens that it evicted.
    pub evicted_tokens: Option<u64>,
    /// Tokens for each eviction.
    pub evicted_tokens_per_event_mean: Option<f64>,
    /// KV transfers that it received well.
    pub transfers_in: Option<u64>,
    /// KV transfers that it gave well.
    pub transfers_out: Option<u64>,
    /// KV transfers to or from it that failed.
    pub transfer_errors: Option<u64>,
    /// Share of the run's duration in which it ran steps.
    pub busy_ratio: Option<f64>,
}

/// The largest by the smallest figure among the workers of one role that decode; of several such roles the most uneven.
/// Null where a role has one worker only, or where its least used worker has none of it (see `idle_workers`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Balance {
    /// Of requests decoded.
    pub requests_max_min: Option<f64>,
    /// Of prompt and output tokens of requests decoded.
    pub tokens_max_min: Option<f64>,
    /// Of time spent in steps.
    pub busy_max_min: Option<f64>,
    /// Workers that may decode and decoded nothing.
    #[serde(default)]
    pub idle_workers: u64,
}

/// What the requests say about one worker.
#[derive(Default)]
struct Served {
    requests: u64,
    sessions: BTreeSet<u32>,
    decoded_requests: u64,
    decoded_tokens: u64,
    computed_tokens: u64,
}

/// The run's workers: those on record in their order, then those of whom only the name was seen, by name.
pub(crate) fn workers(run: &RunRecord, duration: Duration) -> Vec<Worker> {
    let mut served: BTreeMap<&str, Served> = BTreeMap::new();
    for request in &run.requests {
        // A worker that prefilled and decoded the same request served it once.
        let names: BTreeSet<&str> = [&request.worker, &request.prefill_worker]
            .into_iter()
            .flatten()
            .map(String::as_str)
            .collect();
        for name in names {
            served.entry(name).or_default().add(name, request);
        }
    }
    let mut workers: Vec<Worker> = Vec::with_capacity(run.workers.len());
    for record in &run.workers {
        let served = served.remove(record.name.as_str()).unwrap_or_default();
        workers.push(Worker::new(record, &served, duration));
    }
    for (name, served) in served {
        let record = WorkerRecord {
            name: name.to_owned(),
            role: "unknown".to_owned(),
            ..WorkerRecord::default()
        };
        workers.push(Worker::new(&record, &served, duration));
    }
    workers
}

impl Served {
    fn add(&mut self, name: &str, request: &RequestRecord) {
        self.requests += 1;
        self.sessions.insert(request.session);
        if request.worker.as_deref() != Some(name) {
            return;
        }
        self.decoded_requests += 1;
        if request.error.is_none() {
            let tokens = u64::from(request.prompt_tokens) + u64::from(request.output_tokens);
            self.decoded_tokens += tokens;
            self.computed_tokens += tokens.saturating_sub(u64::from(request.cached_tokens));
        }
    }
}

impl Worker {
    fn new(record: &WorkerRecord, served: &Served, duration: Duration) -> Self {
        let per_event = |evictions: u64, tokens: u64| ratio(tokens as f64, evictions as f64);
        Self {
            name: record.name.clone(),
            role: record.role.clone(),
            requests: served.requests,
            sessions: served.sessions.len() as u64,
            decoded_requests: served.decoded_requests,
            decoded_tokens: served.decoded_tokens,
            computed_tokens: served.computed_tokens,
            kv_usage_max: record.kv_usage_max.map(rounded),
            evictions: record.evictions,
            evicted_tokens: record.evicted_tokens,
            evicted_tokens_per_event_mean: record
                .evictions
                .zip(record.evicted_tokens)
                .and_then(|(e, t)| per_event(e, t)),
            transfers_in: record.transfers_in,
            transfers_out: record.transfers_out,
            transfer_errors: record.transfer_errors,
            busy_ratio: record
                .busy
                .and_then(|busy| ratio(busy.as_secs_f64(), duration.as_secs_f64())),
        }
    }

    /// Whether it may decode. A worker of which only the name is known may if it did.
    fn decodes(&self) -> bool {
        match self.role.as_str() {
            "decode" | "both" => true,
            "prefill" => false,
            _ => self.decoded_requests > 0,
        }
    }
}

impl Balance {
    /// The balance of these workers.
    pub(crate) fn of(workers: &[Worker]) -> Self {
        let decoding: Vec<&Worker> = workers.iter().filter(|worker| worker.decodes()).collect();
        let uneven = |figure: fn(&Worker) -> Option<f64>| most_uneven(&decoding, figure);
        Self {
            requests_max_min: uneven(|worker| Some(worker.decoded_requests as f64)),
            tokens_max_min: uneven(|worker| Some(worker.decoded_tokens as f64)),
            busy_max_min: uneven(|worker| worker.busy_ratio),
            idle_workers: decoding.iter().filter(|worker| worker.decoded_requests == 0).count() as u64,
        }
    }
}

/// The largest by the smallest figure within a role, of the role where this is most; `None` where some role's is unknown
/// or without bound, and where no role has two workers.
fn most_uneven(workers: &[&Worker], figure: fn(&Worker) -> Option<f64>) -> Option<f64> {
    let mut by_role: BTreeMap<&str, Vec<Option<f64>>> = BTreeMap::new();
    for worker in workers {
        by_role.entry(&worker.role).or_default().push(figure(worker));
    }
    let mut most: Option<f64> = None;
    for figures in by_role.into_values().filter(|figures| figures.len() > 1) {
        let figures: Vec<f64> = figures.into_iter().collect::<Option<_>>()?;
        let largest = figures.iter().copied().fold(0.0, f64::max);
        let smallest = figures.iter().copied().fold(f64::INFINITY, f64::min);
        let uneven = ratio(largest, smallest)?;
        most = Some(most.map_or(uneven, |most| most.max(uneven)));
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(role: &str, decoded: u64, busy: Option<f64>) -> Worker {
        let record = WorkerRecord {
            name: String::new(),
            role: role.to_owned(),
            ..WorkerRecord::default()
        };
        let served = Served {
            decoded_requests: decoded,
            decoded_tokens: decoded * 10,
            ..Served::default()
        };
        Worker {
            busy_ratio: busy,
            ..Worker::new(&record, &served, Duration::from_secs(1))
        }
    }

    #[test]
    fn balance_compares_workers_of_one_role_that_decode() {
        let check = |workers: &[Worker], requests: Option<f64>, busy: Option<f64>, idle: u64| {
            let expected = Balance {
                requests_max_min: requests,
                tokens_max_min: requests,
                busy_max_min: busy,
                idle_workers: idle,
            };
            assert_eq!(Balance::of(workers), expected, "{workers:?}");
        };
        check(&[], None, None, 0);
        check(&[worker("decode", 5, Some(0.5))], None, None, 0);
        check(
            &[worker("decode", 6, Some(0.5)), worker("decode", 4, Some(0.2))],
            Some(1.5),
            Some(2.5),
            0,
        );
        // A prefill worker does another job, and a busy figure that one worker lacks is no figure.
        check(
            &[
                worker("prefill", 0, Some(0.9)),
                worker("both", 6, None),
                worker("both", 3, Some(0.2)),
            ],
            Some(2.0),
            None,
            0,
        );
        check(
            &[worker("decode", 6, Some(0.1)), worker("decode", 0, Some(0.0))],
            None,
            None,
            1,
        );
        // Two roles that decode: the most uneven one counts.
        check(
            &[
                worker("decode", 2, None),
                worker("decode", 2, None),
                worker("both", 9, None),
                worker("both", 3, None),
            ],
            Some(3.0),
            None,
            0,
        );
        check(
            &[
                worker("unknown", 2, None),
                worker("unknown", 8, None),
                worker("unknown", 0, None),
            ],
            Some(4.0),
            None,
            0,
        );
    }
}
