//! Modes of pressure: what is sent at once, what is sent where it does not fit, and what asking costs.

use crate::case::{Case, add_cost, describe_request, median, proof};
use crate::evidence::Line;
use crate::finding::{Cost, Suspicion};
use crate::mode::ModeId;
use homing_report::Path;
use homing_report::logs::{Admission, AdmissionLine, DecisionLine};
use std::collections::{BTreeMap, BTreeSet};

/// Seeds that may be pending at one decode worker before they are a storm: twice what the router's budget allows by default.
const PENDING_SEEDS: usize = 16;
/// Plans that were sent where they do not fit, as a share of all, from which on there is no backpressure.
const UNFIT_SHARE: f64 = 0.05;
/// Such plans, at least.
const UNFIT_MIN: usize = 5;
/// Questions that took time, at least, and the median from which on they wait for something, in seconds.
const ASKED_MIN: usize = 10;
const ANSWER_S: f64 = 0.001;

/// A seed from its plan to its first token or its end.
struct Seed<'e> {
    begins: f64,
    ends: f64,
    line: &'e Line<DecisionLine>,
}

/// C': many seeds are pending at one decode worker.
pub(super) fn reseed_storm(case: &Case<'_>) -> Option<Suspicion> {
    let mut by_worker: BTreeMap<&str, Vec<Seed<'_>>> = BTreeMap::new();
    for line in &case.logs.decisions.lines {
        let decision = &line.value;
        let Some(request) = case.request(decision.request).filter(|_| is_seed(decision.path)) else {
            continue;
        };
        let answered = request.value.t + request.value.ttft_s.unwrap_or(request.value.latency_s);
        let plans = case.decisions(decision.request).iter();
        let planned_again = plans.map(|plan| plan.value.t).find(|t| *t > decision.t);
        let seed = Seed {
            begins: decision.t,
            ends: planned_again
                .map_or(answered, |again| again.min(answered))
                .max(decision.t),
            line,
        };
        by_worker.entry(&decision.worker).or_default().push(seed);
    }
    let (mut requests, mut tokens_most, mut most, mut proofs) = (BTreeSet::new(), 0, 0, Vec::new());
    for seeds in by_worker.values() {
        for seed in seeds {
            let pending: Vec<_> = seeds
                .iter()
                .filter(|other| other.begins <= seed.begins && seed.begins < other.ends)
                .collect();
            if pending.len() <= PENDING_SEEDS {
                continue;
            }
            requests.extend(pending.iter().map(|other| other.line.value.request));
            if pending.len() > most {
                most = pending.len();
                tokens_most = pending
                    .iter()
                    .map(|other| u64::from(other.line.value.prompt_tokens))
                    .sum();
                let value = format!(
                    "t={} the seed of request {} is the {most}th pending at {}, {tokens_most} tokens in all",
                    seed.begins, seed.line.value.request, seed.line.value.worker
                );
                proofs.push(proof(&case.logs.decisions, seed.line, value));
            }
        }
    }
    if requests.is_empty() {
        return None;
    }
    proofs.reverse();
    proofs.truncate(3);
    let usual = case.median_ttft(|request| !requests.contains(&request.request) && request.path.is_some_and(is_seed));
    let mut cost = Cost::default();
    for line in requests.iter().filter_map(|request| case.request(*request)) {
        add_cost(&mut cost, &line.value, usual);
        if proofs.len() < 6 {
            proofs.push(proof(&case.logs.requests, line, describe_request(&line.value)));
        }
    }
    let seen = format!(
        "up to {most} seeds of {tokens_most} tokens were pending at one decode worker; {} of the {} requests concerned failed",
        cost.failed_requests,
        requests.len()
    );
    Some(Suspicion::new(ModeId::ReseedStorm, cost, seen, proofs))
}

const fn is_seed(path: Path) -> bool {
    matches!(path, Path::Seed | Path::Reseed)
}

/// Plans are sent to workers that cannot hold them, and nobody is told to wait.
pub(super) fn no_backpressure(case: &Case<'_>) -> Option<Suspicion> {
    let admissions = &case.logs.admissions;
    let held_back = admissions.values().any(|line| line.admission == Admission::Queued);
    if held_back || !case.logs.backpressure.lines.is_empty() {
        return None;
    }
    let sent = admissions
        .values()
        .filter(|line| line.admission == Admission::Admitted)
        .count();
    let unfit: Vec<&Line<AdmissionLine>> = admissions
        .lines
        .iter()
        .filter(|line| does_not_fit(case, &line.value))
        .collect();
    if unfit.len() < UNFIT_MIN || (unfit.len() as f64) < UNFIT_SHARE * sent as f64 {
        return None;
    }
    let requests: BTreeSet<u64> = unfit.iter().map(|line| line.value.request).collect();
    let usual = case.median_ttft(|request| !requests.contains(&request.request));
    let waited = requests
        .iter()
        .filter_map(|request| case.request(*request)?.value.ttft_s);
    let cost = Cost {
        failed_requests: case.count_failed(&requests),
        latency_s: waited.map(|ttft| (ttft - usual).max(0.0)).sum(),
    };
    let seen = format!(
        "{} of {sent} plans were sent to a worker that had no room for them, and nobody was told to wait; {} of them failed",
        unfit.len(),
        cost.failed_requests
    );
    let proofs = unfit.iter().take(6).map(|line| {
        let value = format!(
            "t={} request {} sent to {}: wants {} tokens, {} are free",
            line.value.t,
            line.value.request,
            line.value.worker.as_deref().unwrap_or("?"),
            line.value.wanted_tokens,
            line.value.free_tokens.unwrap_or_default()
        );
        proof(admissions, line, value)
    });
    Some(Suspicion::new(ModeId::NoBackpressure, cost, seen, proofs.collect()))
}

/// Whether a plan that brings its KV along was sent where there is no room for it.
fn does_not_fit(case: &Case<'_>, line: &AdmissionLine) -> bool {
    let plan = case.decisions(line.request).iter().rfind(|plan| plan.value.t <= line.t);
    let brings = plan.is_some_and(|plan| is_seed(plan.value.path) && plan.value.expected_cached_tokens == 0);
    brings
        && line.admission == Admission::Admitted
        && line
            .free_tokens
            .is_some_and(|free| free < u64::from(line.wanted_tokens))
}

/// Workers take their time to answer whether a turn may come.
pub(super) fn admission_in_loop(case: &Case<'_>) -> Option<Suspicion> {
    let admissions = &case.logs.admissions;
    let mut asked: Vec<&Line<AdmissionLine>> = admissions
        .lines
        .iter()
        .filter(|line| line.value.answered_s.is_some())
        .collect();
    let typical = median(asked.iter().filter_map(|line| line.value.answered_s));
    if asked.len() < ASKED_MIN || typical < ANSWER_S {
        return None;
    }
    let total: f64 = asked.iter().filter_map(|line| line.value.answered_s).sum();
    asked.sort_by(|left, right| {
        right
            .value
            .answered_s
            .partial_cmp(&left.value.answered_s)
            .expect("times are numbers")
    });
    let longest = asked.first().and_then(|line| line.value.answered_s).unwrap_or_default();
    let seen = format!(
        "{} questions whether a turn may come took {:.1} ms in the median and {:.0} ms at most, {total:.1} s in all",
        asked.len(),
        typical * 1e3,
        longest * 1e3
    );
    let proofs = asked.iter().take(5).map(|line| {
        let value = format!(
            "t={} {} took {:.0} ms to answer for request {}",
            line.value.t,
            line.value.worker.as_deref().unwrap_or("?"),
            line.value.answered_s.unwrap_or_default() * 1e3,
            line.value.request
        );
        proof(admissions, line, value)
    });
    let cost = Cost {
        failed_requests: 0,
        latency_s: total,
    };
    Some(Suspicion::new(ModeId::AdmissionInLoop, cost, seen, proofs.collect()))
}
