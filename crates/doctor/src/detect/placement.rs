//! Modes of placement: workers that nobody is sent to, sessions that starve where they are, sessions whose worker is gone.

use crate::case::{Case, add_cost, describe_request, proof, report_proof};
use crate::evidence::Line;
use crate::finding::{Cost, Level, Suspicion};
use crate::mode::ModeId;
use homing_report::Path;
use homing_report::logs::{DecisionLine, RequestLine, WorkerChange};
use std::collections::{BTreeMap, BTreeSet};

/// A worker with less than this share of the mean is cold.
const COLD_SHARE: f64 = 0.25;
/// New sessions that were drawn away from a cold worker by what lies elsewhere.
const DRAWN_MIN: usize = 3;
/// Later turns from which on a session's share of appends says something.
const TURNS_MIN: usize = 4;
/// A session with a smaller share of appends starves, one with a larger one is lucky.
const STARVED: f64 = 0.2;
const LUCKY: f64 = 0.8;
/// Sessions that starve, at least, and their share of all.
const STARVED_MIN: usize = 3;
const STARVED_SHARE: f64 = 0.1;
/// A worker that is gone for so long, in seconds, has vanished.
const GONE_S: f64 = 20.0;
/// A turn that waits for so long without a plan, in seconds, waits for its worker.
const WAITS_S: f64 = 10.0;

/// B: a worker stays cold because new sessions go where their shared blocks lie.
pub(super) fn cold_decode(case: &Case<'_>) -> Option<Suspicion> {
    let workers = case.decode_workers();
    let mut served: BTreeMap<&str, usize> = workers.iter().map(|worker| (*worker, 0)).collect();
    for request in case.logs.requests.values() {
        if let Some(count) = request.worker.as_deref().and_then(|worker| served.get_mut(worker)) {
            *count += 1;
        }
    }
    let mean = served.values().sum::<usize>() as f64 / served.len().max(1) as f64;
    let cold: BTreeSet<&str> = served
        .iter()
        .filter(|(_, count)| (**count as f64) < COLD_SHARE * mean)
        .map(|(worker, _)| *worker)
        .collect();
    if cold.is_empty() || served.len() < 2 {
        return None;
    }
    let drawn: Vec<_> = case
        .logs
        .decisions
        .lines
        .iter()
        .filter(|line| is_drawn_away(&line.value, &cold))
        .collect();
    if drawn.len() < DRAWN_MIN {
        return None;
    }
    let ttft: f64 = case.logs.requests.values().filter_map(|request| request.ttft_s).sum();
    let cost = Cost {
        failed_requests: 0,
        latency_s: ttft * cold.len() as f64 / served.len() as f64,
    };
    let counts: Vec<String> = served
        .iter()
        .map(|(worker, count)| format!("{worker}: {count}"))
        .collect();
    let seen = format!(
        "requests by decode worker are {}; {} new sessions went elsewhere for blocks that other sessions share",
        counts.join(", "),
        drawn.len()
    );
    let mut proofs = vec![report_proof(format!(
        "decoded requests by worker: {}",
        counts.join(", ")
    ))];
    proofs.extend(drawn.iter().take(4).map(|line| {
        let resident = line.value.candidates.first().map_or(0, |chosen| chosen.resident_tokens);
        let value = format!(
            "t={} a new session goes to {} for {resident} tokens that lie there, {} has none",
            line.value.t,
            line.value.worker,
            cold.iter().copied().collect::<Vec<_>>().join(" and ")
        );
        proof(&case.logs.decisions, line, value)
    }));
    Some(Suspicion::new(ModeId::ColdDecode, cost, seen, proofs).at_least(Level::Warning))
}

/// Whether a session's first turn was sent away from a cold worker to one where more of its prompt lay already.
fn is_drawn_away(line: &DecisionLine, cold: &BTreeSet<&str>) -> bool {
    let first = line.turn == 0 && line.attempt == 0;
    let Some(chosen) = line.candidates.iter().find(|candidate| candidate.worker == line.worker) else {
        return false;
    };
    first
        && !cold.contains(line.worker.as_str())
        && line.candidates.iter().any(|candidate| {
            cold.contains(candidate.worker.as_str())
                && candidate.resident_tokens < chosen.resident_tokens
                && candidate.forbidden.is_none()
        })
}

/// Sessions that find their KV in place at a fifth of their turns, and never leave.
pub(super) fn session_pin(case: &Case<'_>) -> Option<Suspicion> {
    if case.decode_workers().len() < 2 {
        return None;
    }
    let usual = case.append_ttft();
    let (mut starved, mut lucky, mut all) = (Vec::new(), Vec::new(), 0);
    for ((session, _), turns) in case.agents() {
        let later = &turns[turns.len().min(1)..];
        let workers: BTreeSet<&str> = turns.iter().filter_map(|line| line.value.worker.as_deref()).collect();
        if later.len() < TURNS_MIN || workers.len() != 1 {
            continue;
        }
        all += 1;
        let appends = later
            .iter()
            .filter(|line| line.value.path == Some(Path::Append))
            .count();
        let share = appends as f64 / later.len() as f64;
        if share < STARVED {
            starved.push((session, later.to_vec()));
        } else if share > LUCKY {
            lucky.push(later.to_vec());
        }
    }
    let enough = starved.len() >= STARVED_MIN && starved.len() as f64 >= STARVED_SHARE * f64::from(all);
    if !enough || lucky.is_empty() {
        return None;
    }
    let waited = |line: &&Line<RequestLine>| line.value.ttft_s.map_or(0.0, |ttft| (ttft - usual).max(0.0));
    let cost = Cost {
        failed_requests: 0,
        latency_s: starved.iter().flat_map(|(_, turns)| turns.iter().map(waited)).sum(),
    };
    let peak = |turns: &[&Line<RequestLine>]| turns.iter().map(|line| line.value.prompt_tokens).max().unwrap_or(0);
    let mean = |peaks: Vec<u32>| peaks.iter().map(|peak| f64::from(*peak)).sum::<f64>() / peaks.len().max(1) as f64;
    let large = mean(starved.iter().map(|(_, turns)| peak(turns)).collect());
    let small = mean(lucky.iter().map(|turns| peak(turns)).collect());
    let seen = format!(
        "{} of {all} sessions find their KV in place at under 20% of their turns and stay where they are; {} do at over 80%; \
         largest prompts are {large:.0} tokens of the former and {small:.0} of the latter",
        starved.len(),
        lucky.len()
    );
    let proofs = starved.iter().take(6).filter_map(|(session, turns)| {
        let line = turns.last()?;
        let value = format!(
            "{session} stays on {}: {}",
            line.value.worker.as_deref().unwrap_or("?"),
            describe_request(&line.value)
        );
        Some(proof(&case.logs.requests, line, value))
    });
    Some(Suspicion::new(ModeId::SessionPin, cost, seen, proofs.collect()))
}

/// A worker that died and did not come back, and when.
fn gone<'e>(case: &Case<'e>) -> Vec<(&'e str, f64, f64)> {
    let mut down: BTreeMap<&str, f64> = BTreeMap::new();
    let mut gone = Vec::new();
    for event in case.logs.worker_events.values() {
        match event.change {
            WorkerChange::Crashed | WorkerChange::Dead => {
                down.entry(&event.worker).or_insert(event.t);
            }
            WorkerChange::Restarted | WorkerChange::Exact | WorkerChange::Degraded => {
                if let Some(since) = down.remove(event.worker.as_str()) {
                    gone.push((event.worker.as_str(), since, event.t));
                }
            }
            WorkerChange::Suspect => {}
        }
    }
    gone.extend(down.into_iter().map(|(worker, since)| (worker, since, f64::INFINITY)));
    gone.retain(|(_, since, until)| until - since >= GONE_S);
    gone
}

/// Turns of sessions whose worker is gone wait for it.
pub(super) fn vanished_home(case: &Case<'_>) -> Option<Suspicion> {
    let others = case.decode_workers();
    let (mut cost, mut proofs, mut waiting) = (Cost::default(), Vec::new(), 0);
    let mut names = BTreeSet::new();
    for (worker, since, until) in gone(case) {
        if others.len() < 2 {
            continue;
        }
        for turns in case.agents().into_values() {
            let before = turns.iter().rfind(|line| line.value.t < since);
            if before.is_none_or(|line| line.value.worker.as_deref() != Some(worker)) {
                continue;
            }
            let later = turns
                .iter()
                .filter(|line| line.value.t >= since && line.value.t < until);
            for line in later.filter(|line| waits(case, &line.value, until)) {
                waiting += 1;
                names.insert(worker);
                add_cost(&mut cost, &line.value, 0.0);
                let value = format!(
                    "{}, {:.0} s after {worker} was gone",
                    describe_request(&line.value),
                    line.value.t - since
                );
                proofs.push(proof(&case.logs.requests, line, value));
            }
        }
    }
    if waiting == 0 {
        return None;
    }
    let event = case
        .logs
        .worker_events
        .lines
        .iter()
        .find(|line| names.contains(line.value.worker.as_str()))
        .map(|line| {
            proof(
                &case.logs.worker_events,
                line,
                format!("t={} {} {:?}", line.value.t, line.value.worker, line.value.change),
            )
        });
    let seen = format!(
        "{waiting} turns of sessions that lived on {} waited for it after it was gone, {} of them until they failed",
        names.into_iter().collect::<Vec<_>>().join(" and "),
        cost.failed_requests
    );
    Some(Suspicion::new(
        ModeId::VanishedHome,
        cost,
        seen,
        event.into_iter().chain(proofs).collect(),
    ))
}

/// Whether a turn got no plan for long, or none at all, or one only when its worker was back.
fn waits(case: &Case<'_>, request: &RequestLine, until: f64) -> bool {
    match case.decisions(request.request).first() {
        None => request.latency_s >= WAITS_S,
        Some(plan) => plan.value.queued_s >= WAITS_S && plan.value.t >= until.min(plan.value.t),
    }
}
