//! Modes of eviction: too much at once, and too little.

use crate::case::{Case, add_cost, describe_request, describe_transfer, proof};
use crate::evidence::Line;
use crate::finding::{Cost, Suspicion};
use crate::mode::ModeId;
use homing_report::Path;
use homing_report::logs::{EvictionCause, EvictionLine, TransferPhase};
use std::collections::{BTreeMap, BTreeSet};

/// Tokens that one choice of what goes frees, from which on it is a whole session and not a leaf.
const WHOLE_SESSION_TOKENS: f64 = 5_000.0;
/// Such evictions, at least.
const STORM_MIN: usize = 3;
/// A pool that is used by so much of it is full.
const FULL: f64 = 0.95;
/// Turns that fail for want of room, at least.
const STARVED_MIN: usize = 3;

/// What one choice of an eviction freed.
fn tokens_a_choice(line: &EvictionLine) -> f64 {
    line.tokens as f64 / f64::from(line.decisions.max(1))
}

/// C: single choices that free tens of thousands of tokens, and reseeds of the sessions that lost them.
pub(super) fn evict_storm(case: &Case<'_>) -> Option<Suspicion> {
    let large: Vec<&Line<EvictionLine>> = case
        .logs
        .evictions
        .lines
        .iter()
        .filter(|line| tokens_a_choice(&line.value) >= WHOLE_SESSION_TOKENS)
        .collect();
    if large.len() < STORM_MIN {
        return None;
    }
    // The router's number of a session is in its plans.
    let lost: BTreeSet<u64> = large.iter().filter_map(|line| line.value.session).collect();
    let usual = case.append_ttft();
    let (mut cost, mut reseeds) = (Cost::default(), Vec::new());
    let mut lost_at: BTreeMap<u64, f64> = BTreeMap::new();
    for line in &large {
        if let Some(session) = line.value.session {
            lost_at.entry(session).or_insert(line.value.t);
        }
    }
    for line in &case.logs.decisions.lines {
        let decision = &line.value;
        let after = lost_at.get(&decision.session).is_some_and(|at| decision.t >= *at);
        if !after || decision.path != Path::Reseed {
            continue;
        }
        lost_at.remove(&decision.session);
        let next = large
            .iter()
            .find(|evicted| evicted.value.session == Some(decision.session) && evicted.value.t > decision.t);
        lost_at.extend(next.map(|evicted| (decision.session, evicted.value.t)));
        if let Some(request) = case.request(decision.request) {
            add_cost(&mut cost, &request.value, usual);
            reseeds.push(request);
        }
    }
    let tokens: u64 = large.iter().map(|line| line.value.tokens).sum();
    let seen = format!(
        "{} evictions of whole sessions freed {:.0} tokens each, from {} sessions; {} reseeds of these sessions followed",
        large.len(),
        tokens as f64 / large.len() as f64,
        lost.len(),
        reseeds.len()
    );
    let mut largest = large.clone();
    largest.sort_by_key(|line| std::cmp::Reverse(line.value.tokens));
    let mut proofs: Vec<_> = largest
        .iter()
        .take(4)
        .map(|line| {
            let value = format!(
                "t={} {} freed {} tokens in {} choice(s)",
                line.value.t, line.value.worker, line.value.tokens, line.value.decisions
            );
            proof(&case.logs.evictions, line, value)
        })
        .collect();
    proofs.extend(
        reseeds
            .iter()
            .take(4)
            .map(|line| proof(&case.logs.requests, line, describe_request(&line.value))),
    );
    Some(Suspicion::new(ModeId::EvictStorm, cost, seen, proofs))
}

/// Seeds run out of their time for room at workers that are full of idle sessions and trim fewer than they fail.
pub(super) fn idle_only_lru(case: &Case<'_>) -> Option<Suspicion> {
    let mut trims: BTreeMap<&str, usize> = BTreeMap::new();
    let trimmed = case
        .logs
        .evictions
        .values()
        .filter(|line| line.cause == Some(EvictionCause::Trim));
    for line in trimmed {
        *trims.entry(&line.worker).or_default() += 1;
    }
    let mut starved: BTreeMap<&str, Vec<_>> = BTreeMap::new();
    for line in &case.logs.transfers.lines {
        if line
            .value
            .failed
            .is_some_and(|failed| failed.phase == TransferPhase::Queued)
        {
            starved.entry(&line.value.to).or_default().push(line);
        }
    }
    let (mut requests, mut proofs, mut workers) = (BTreeSet::new(), Vec::new(), Vec::new());
    for (worker, samples) in case.samples() {
        let Some(starved) = starved.get(worker) else { continue };
        let pinned = samples.iter().filter(|line| {
            let sample = &line.value;
            sample.kv_tokens_used as f64 >= FULL * sample.kv_tokens as f64
        });
        let Some(full) = pinned.min_by_key(|line| line.value.running) else {
            continue;
        };
        let trims = trims.get(worker).copied().unwrap_or(0);
        if starved.len() < STARVED_MIN || trims >= starved.len() {
            continue;
        }
        workers.push(format!("{worker}: {trims} trims, {} failures", starved.len()));
        requests.extend(starved.iter().map(|line| line.value.request));
        let value = format!(
            "t={} {worker} has {} of {} tokens in use with {} requests running",
            full.value.t, full.value.kv_tokens_used, full.value.kv_tokens, full.value.running
        );
        proofs.push(proof(&case.logs.samples, full, value));
        let last = starved.last().into_iter();
        proofs.extend(last.map(|line| proof(&case.logs.transfers, line, describe_transfer(&line.value))));
    }
    if workers.is_empty() {
        return None;
    }
    let cost = Cost {
        failed_requests: case.count_failed(&requests),
        latency_s: 0.0,
    };
    let seen = format!(
        "full pools evict fewer sessions than they fail requests that wait for room ({})",
        workers.join("; ")
    );
    Some(Suspicion::new(ModeId::IdleOnlyLru, cost, seen, proofs))
}
