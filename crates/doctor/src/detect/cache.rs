//! Modes of what is cached: an index that does not know, one that knows too much, and prompts that nothing can be known of.

use crate::case::{Case, describe_request, proof};
use crate::evidence::Line;
use crate::finding::{Cost, Level, Suspicion};
use crate::mode::ModeId;
use homing_report::Path;
use homing_report::logs::{RequestLine, RouterSampleLine};
use std::collections::BTreeMap;

/// A turn misses what was promised from so many tokens on.
const MISSED_TOKENS: u32 = 4_096;
/// Such turns, at least.
const MISSED_MIN: usize = 3;
/// An eviction so shortly before a turn's first token, in seconds, may explain what it misses.
const RACE_S: f64 = 1.0;
/// An index that claims so much more than a pool holds is wrong.
const CLAIM: f64 = 1.2;
/// A later turn that finds less than this share of its last prompt is broken.
const FOUND_SHARE: f64 = 0.5;
/// Later turns that are broken at one place, as a share of all, and at least.
const BROKEN_SHARE: f64 = 0.5;
const BROKEN_MIN: usize = 5;
/// Places within so many tokens are one place.
const PLACE_TOKENS: u32 = 64;

/// Turns find much less than the router expected, and nothing was evicted between.
pub(super) fn stale_index(case: &Case<'_>) -> Option<Suspicion> {
    let mut missed = Vec::new();
    for line in case.answered() {
        let Some(plan) = case.decisions(line.value.request).last() else {
            continue;
        };
        // A first turn may find boilerplate that is still being computed for another session; what comes from elsewhere was
        // computed there.
        let finds = plan.value.turn > 0 && matches!(plan.value.path, Path::Append | Path::Local);
        let lacks = plan
            .value
            .expected_cached_tokens
            .saturating_sub(line.value.cached_tokens);
        if finds && lacks >= MISSED_TOKENS && !evicted_meanwhile(case, plan.value.t, &line.value) {
            missed.push((lacks, plan, line));
        }
    }
    if missed.len() < MISSED_MIN {
        return None;
    }
    let mut by_worker: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, plan, _) in &missed {
        *by_worker.entry(&plan.value.worker).or_default() += 1;
    }
    let usual = case.append_ttft();
    let waited = missed.iter().filter_map(|(_, _, line)| line.value.ttft_s);
    let cost = Cost {
        failed_requests: 0,
        latency_s: waited.map(|ttft| (ttft - usual).max(0.0)).sum(),
    };
    let tokens: u64 = missed.iter().map(|(lacks, ..)| u64::from(*lacks)).sum();
    let workers: Vec<String> = by_worker
        .iter()
        .map(|(worker, count)| format!("{worker}: {count}"))
        .collect();
    let seen = format!(
        "{} turns found {tokens} tokens less than the router expected, with no eviction between ({})",
        missed.len(),
        workers.join(", ")
    );
    missed.sort_by_key(|(lacks, ..)| std::cmp::Reverse(*lacks));
    let proofs = missed.iter().take(3).flat_map(|(_, plan, line)| {
        let expected = format!(
            "t={} {} is expected to hold {} tokens",
            plan.value.t, plan.value.worker, plan.value.expected_cached_tokens
        );
        let found = format!(
            "{}: {} cached tokens",
            describe_request(&line.value),
            line.value.cached_tokens
        );
        [
            proof(&case.logs.decisions, plan, expected),
            proof(&case.logs.requests, line, found),
        ]
    });
    Some(Suspicion::new(ModeId::StaleIndex, cost, seen, proofs.collect()).at_least(Level::Warning))
}

/// Whether the turn's worker evicted anything between its plan and its first token.
fn evicted_meanwhile(case: &Case<'_>, planned: f64, request: &RequestLine) -> bool {
    let until = request.t + request.ttft_s.unwrap_or(request.latency_s);
    case.logs.evictions.values().any(|line| {
        Some(line.worker.as_str()) == request.worker.as_deref() && line.t >= planned - RACE_S && line.t <= until
    })
}

/// The index claims that a worker holds more than its pool has room for.
pub(super) fn index_growth(case: &Case<'_>) -> Option<Suspicion> {
    let pools: BTreeMap<&str, u64> = case
        .samples()
        .into_iter()
        .filter_map(|(worker, lines)| Some((worker, lines.last()?.value.kv_tokens)))
        .collect();
    let mut worst: BTreeMap<&str, (f64, &Line<RouterSampleLine>, u64)> = BTreeMap::new();
    for line in &case.logs.router_samples.lines {
        for booked in &line.value.workers {
            let Some(pool) = pools.get(booked.worker.as_str()).filter(|pool| **pool > 0) else {
                continue;
            };
            let claim = booked.indexed_tokens as f64 / *pool as f64;
            let before = worst.get(booked.worker.as_str()).map_or(CLAIM, |(before, ..)| *before);
            if claim > before {
                worst.insert(&booked.worker, (claim, line, booked.indexed_tokens));
            }
        }
    }
    let (name, (claim, ..)) = worst.iter().max_by(|left, right| left.1.0.total_cmp(&right.1.0))?;
    let seen =
        format!("the router's index claims that {name} holds {claim:.1} times what its pool has room for, and grows");
    let proofs = worst.iter().map(|(worker, (_, line, tokens))| {
        let value = format!(
            "t={} {worker}: {tokens} tokens indexed, {} in its pool",
            line.value.t, pools[worker]
        );
        proof(&case.logs.router_samples, line, value)
    });
    let stale = stale_index(case).map_or(0.0, |stale| stale.cost.latency_s);
    let cost = Cost {
        failed_requests: 0,
        latency_s: stale,
    };
    Some(Suspicion::new(ModeId::IndexGrowth, cost, seen, proofs.collect()).at_least(Level::Warning))
}

/// Prompts of a session share a head of one length with the last one, again and again, whatever was cached.
pub(super) fn prefix_breaker(case: &Case<'_>) -> Option<Suspicion> {
    let (mut later, mut broken) = (0, Vec::new());
    for turns in case.agents().into_values() {
        let ended: Vec<_> = turns.into_iter().filter(|line| line.value.error.is_none()).collect();
        let mut found = Vec::new();
        for pair in ended.windows(2) {
            let (before, line) = (&pair[0].value, pair[1]);
            let same = before.worker.is_some() && before.worker == line.value.worker;
            if !same || line.value.prompt_tokens < before.prompt_tokens {
                continue;
            }
            later += 1;
            let share = f64::from(line.value.cached_tokens) / f64::from(before.prompt_tokens.max(1));
            // A reseed knows that its KV is gone, and why is another question.
            let unknowing = matches!(line.value.path, Some(Path::Append | Path::Local));
            if share < FOUND_SHARE && unknowing && !was_evicted(case, before, &line.value) {
                found.push((before, line));
            }
        }
        broken.extend(at_one_place(found));
    }
    if broken.len() < BROKEN_MIN || (broken.len() as f64) < BROKEN_SHARE * f64::from(later) {
        return None;
    }
    // Of what was computed, the share that the last prompt had computed already.
    let spared = |(before, line): &(&RequestLine, &Line<RequestLine>)| {
        let computed = line.value.prompt_tokens.saturating_sub(line.value.cached_tokens).max(1);
        let again = before.prompt_tokens.saturating_sub(line.value.cached_tokens);
        line.value.ttft_s.unwrap_or_default() * f64::from(again) / f64::from(computed)
    };
    let cost = Cost {
        failed_requests: 0,
        latency_s: broken.iter().map(spared).sum(),
    };
    let seen = format!(
        "{} of {later} later turns found no more than the same head of their last prompt, although it was on that worker and nothing was evicted",
        broken.len()
    );
    let proofs = broken.iter().take(6).map(|(before, line)| {
        let value = format!(
            "{}: {} tokens cached, the last prompt had {}",
            describe_request(&line.value),
            line.value.cached_tokens,
            before.prompt_tokens
        );
        proof(&case.logs.requests, line, value)
    });
    Some(Suspicion::new(ModeId::PrefixBreaker, cost, seen, proofs.collect()).at_least(Level::Warning))
}

/// Whether the worker evicted so much between two turns that the second may have lost what the first left.
fn was_evicted(case: &Case<'_>, before: &RequestLine, after: &RequestLine) -> bool {
    let ended = before.t + before.latency_s;
    let until = after.t + after.ttft_s.unwrap_or(after.latency_s);
    let evicted = case
        .logs
        .evictions
        .values()
        .filter(|line| Some(line.worker.as_str()) == after.worker.as_deref() && line.t >= ended && line.t <= until);
    let crashed =
        case.logs.worker_events.values().any(|event| {
            Some(event.worker.as_str()) == after.worker.as_deref() && event.t >= ended && event.t <= until
        });
    crashed || evicted.map(|line| line.tokens).sum::<u64>() > 0
}

/// Those turns of one session that find the same head.
fn at_one_place<'e>(
    found: Vec<(&'e RequestLine, &'e Line<RequestLine>)>,
) -> Vec<(&'e RequestLine, &'e Line<RequestLine>)> {
    let mut places: BTreeMap<u32, usize> = BTreeMap::new();
    for (_, line) in &found {
        *places.entry(line.value.cached_tokens / PLACE_TOKENS).or_default() += 1;
    }
    let Some((place, _)) = places.into_iter().max_by_key(|(_, count)| *count) else {
        return Vec::new();
    };
    found
        .into_iter()
        .filter(|(_, line)| line.value.cached_tokens / PLACE_TOKENS == place)
        .collect()
}
