//! Modes of the links between workers: transfers that fail, because of whom, and because of whose clock.

use crate::case::{Case, add_cost, describe_request, describe_transfer, proof};
use crate::evidence::Line;
use crate::finding::{Cost, Suspicion};
use crate::mode::ModeId;
use homing_report::logs::{TransferLine, TransferPhase, WorkerChange};
use std::collections::{BTreeMap, BTreeSet};

type Link<'e> = (&'e str, &'e str);

/// Failures after a first one on a link, with no success between, that make a cascade.
const FOLLOWING_MIN: usize = 3;
/// A link that fails for so long without a success counts as blacklisted, in seconds...
const BLACKLISTED_S: f64 = 20.0;
/// ...with so many failures.
const BLACKLISTED_FAILURES_MIN: usize = 5;
/// A link's failure is fresh for so long, in seconds.
const FRESH_S: f64 = 30.0;
/// Blind choices from which on somebody is blind.
const BLIND_MIN: usize = 5;
/// Clocks that ran out too early.
const EARLY_MIN: usize = 3;

/// Transfers of each link in order of time.
fn by_link<'e>(case: &Case<'e>) -> BTreeMap<Link<'e>, Vec<&'e Line<TransferLine>>> {
    let mut links: BTreeMap<Link<'_>, Vec<&Line<TransferLine>>> = BTreeMap::new();
    for line in &case.logs.transfers.lines {
        links.entry((&line.value.from, &line.value.to)).or_default().push(line);
    }
    for lines in links.values_mut() {
        lines.sort_by(|left, right| left.value.t.total_cmp(&right.value.t));
    }
    links
}

/// The streaks of failures of a link: runs of them without a success between.
fn streaks<'e>(lines: &[&'e Line<TransferLine>]) -> Vec<Vec<&'e Line<TransferLine>>> {
    let mut streaks: Vec<Vec<_>> = vec![Vec::new()];
    for line in lines {
        if line.value.error.is_some() {
            streaks.last_mut().expect("there is always one").push(*line);
        } else {
            streaks.push(Vec::new());
        }
    }
    streaks.retain(|streak| !streak.is_empty());
    streaks
}

/// What failed transfers of these requests cost: those requests that failed, and what the others waited.
fn cost_of(case: &Case<'_>, requests: &BTreeSet<u64>) -> Cost {
    let (usual, mut cost) = (case.append_ttft(), Cost::default());
    for line in requests.iter().filter_map(|request| case.request(*request)) {
        add_cost(&mut cost, &line.value, usual);
    }
    cost
}

/// A: a failed transfer is followed by others on its link, one after the other, and requests fail with them.
pub(super) fn cascade(case: &Case<'_>) -> Option<Suspicion> {
    let links = by_link(case);
    let mut following = 0;
    let (mut requests, mut proofs) = (BTreeSet::new(), Vec::new());
    // What fails with a worker that really died is no cascade.
    let both_live = |line: &&Line<TransferLine>| {
        let at = line.value.t + line.value.duration_s;
        case.is_up(&line.value.from, at) && case.is_up(&line.value.to, at)
    };
    let alive = links.values().map(|lines| {
        let told = |line: &&&Line<TransferLine>| line.value.error.is_none() || both_live(line);
        lines.iter().filter(told).copied().collect::<Vec<_>>()
    });
    let mut worst: Vec<_> = alive.flat_map(|lines| streaks(&lines)).collect();
    worst.sort_by_key(|streak| std::cmp::Reverse(streak.len()));
    for streak in &worst {
        following += streak.len() - 1;
        requests.extend(streak.iter().map(|line| line.value.request));
        let ends = [streak.first(), streak.last()].into_iter().flatten();
        proofs.extend(ends.map(|line| proof(&case.logs.transfers, line, describe_transfer(&line.value))));
    }
    let cost = cost_of(case, &requests);
    if following < FOLLOWING_MIN || (cost.failed_requests as usize) < FOLLOWING_MIN {
        return None;
    }
    proofs.truncate(6);
    let failed = case.failed().filter(|line| requests.contains(&line.value.request));
    proofs.extend(
        failed
            .take(2)
            .map(|line| proof(&case.logs.requests, line, describe_request(&line.value))),
    );
    let seen = format!(
        "{} of {} requests failed with their transfer; {following} transfers failed right after another one on the same link, the \
         longest row has {} without a success between",
        cost.failed_requests,
        case.whole().requests,
        worst.first().map_or(0, Vec::len)
    );
    Some(Suspicion::new(ModeId::Cascade, cost, seen, proofs))
}

/// Prefill workers are chosen for links that have just failed while others have not.
pub(super) fn blind_prefill(case: &Case<'_>) -> Option<Suspicion> {
    let links = by_link(case);
    let prefills: BTreeSet<&str> = case
        .logs
        .decisions
        .values()
        .filter_map(|line| line.prefill_worker.as_deref())
        .collect();
    let fresh = |from: &str, to: &str, now: f64| {
        let lines = links.get(&(from, to));
        let failed = lines.into_iter().flatten().filter(|line| {
            let at = line.value.t + line.value.duration_s;
            // Of a worker that died nobody's choice is to blame.
            let alive = case.is_up(&line.value.from, at) && case.is_up(&line.value.to, at);
            let told = case
                .request(line.value.request)
                .is_none_or(|request| !case.is_silent(&request.value));
            line.value.error.is_some() && alive && told && at < now && now - at <= FRESH_S
        });
        failed.count()
    };
    let (mut blind, mut requests, mut proofs) = (0, BTreeSet::new(), Vec::new());
    let mut by_worker: BTreeMap<&str, usize> = BTreeMap::new();
    for line in &case.logs.decisions.lines {
        let decision = &line.value;
        let Some(prefill) = decision.prefill_worker.as_deref() else {
            continue;
        };
        let failures = fresh(prefill, &decision.worker, decision.t);
        let better = prefills
            .iter()
            .find(|other| **other != prefill && fresh(other, &decision.worker, decision.t) == 0);
        let Some(better) = better.filter(|_| failures > 0) else {
            continue;
        };
        if case
            .failed_transfers(decision.request)
            .iter()
            .any(|failed| failed.value.from == prefill)
        {
            blind += 1;
            *by_worker.entry(prefill).or_default() += 1;
            requests.insert(decision.request);
            let value = format!(
                "t={} request {}: {prefill} for {} after {failures} failure(s) on that link in {FRESH_S} s, {better} had none; it failed again",
                decision.t, decision.request, decision.worker
            );
            proofs.push(proof(&case.logs.decisions, line, value));
        }
    }
    if blind < BLIND_MIN {
        return None;
    }
    let (worst, count) = by_worker.into_iter().max_by_key(|(_, count)| *count)?;
    let seen = format!(
        "{blind} times a prefill worker was chosen whose link to the decode worker had just failed while another one's had not, and \
         failed again; {count} of them were {worst}"
    );
    Some(Suspicion::new(
        ModeId::BlindPrefill,
        cost_of(case, &requests),
        seen,
        proofs,
    ))
}

/// A link never succeeds again although both its ends work.
pub(super) fn permanent_blacklist(case: &Case<'_>) -> Option<Suspicion> {
    let links = by_link(case);
    let (mut requests, mut proofs, mut listed) = (BTreeSet::new(), Vec::new(), Vec::new());
    for ((from, to), lines) in &links {
        let Some(streak) = streaks(lines).into_iter().last() else {
            continue;
        };
        let refused: Vec<_> = streak.into_iter().filter(|line| is_refused(&line.value)).collect();
        let (Some(first), Some(last)) = (refused.first(), refused.last()) else {
            continue;
        };
        let (begins, ends) = (first.value.t, last.value.t);
        let never_again = lines.last().is_some_and(|line| line.value.error.is_some());
        let long = ends - begins >= BLACKLISTED_S && refused.len() >= BLACKLISTED_FAILURES_MIN;
        if never_again && long && works(case, to, begins, ends) {
            listed.push(format!("{from} -> {to} for {:.0} s", ends - begins));
            requests.extend(refused.iter().map(|line| line.value.request));
            for line in [first, last] {
                proofs.push(proof(&case.logs.transfers, line, describe_transfer(&line.value)));
            }
        }
    }
    if listed.is_empty() {
        return None;
    }
    let seen = format!(
        "{} transfers were refused at once over links that never succeeded again although the receiver went on working: {}",
        requests.len(),
        listed.join(", ")
    );
    Some(Suspicion::new(
        ModeId::PermanentBlacklist,
        cost_of(case, &requests),
        seen,
        proofs,
    ))
}

/// Whether a worker worked in this time: it answered a request to its end, or nothing but its peers took it for dead. Where
/// every turn of its sessions needs a transfer it has nothing to answer.
fn works(case: &Case<'_>, worker: &str, begins: f64, ends: f64) -> bool {
    let is_alive = || {
        let events = || case.logs.worker_events.values().filter(|event| event.worker == worker);
        let well = |change| matches!(change, WorkerChange::Exact | WorkerChange::Degraded);
        let before = events().rfind(|event| event.t <= begins);
        let mut during = events().filter(|event| event.t > begins && event.t <= ends);
        before.is_some_and(|event| well(event.change)) && during.all(|event| well(event.change))
    };
    let answers = case.logs.requests.values().any(|request| {
        let ended = request.t + request.latency_s;
        let there = request.worker.as_deref() == Some(worker) && request.error.is_none();
        there && ended > begins && ended <= ends
    });
    answers || is_alive()
}

/// Whether a transfer failed without having been tried.
fn is_refused(line: &TransferLine) -> bool {
    let said_dead = line.error.as_deref().is_some_and(|error| error.contains("dead"));
    said_dead && line.failed.is_none_or(|failed| failed.clock_s.is_none())
}

/// Clocks of transfers ran out before there was anything to transfer.
pub(super) fn early_clock(case: &Case<'_>) -> Option<Suspicion> {
    let early: Vec<_> = case
        .logs
        .transfers
        .lines
        .iter()
        .filter(|line| {
            let failed = line.value.failed;
            failed.is_some_and(|failed| failed.phase != TransferPhase::Ready && failed.clock_s.is_some())
        })
        .collect();
    if early.len() < EARLY_MIN {
        return None;
    }
    let requests: BTreeSet<u64> = early.iter().map(|line| line.value.request).collect();
    let queued = early.iter().filter(|line| {
        line.value
            .failed
            .is_some_and(|failed| failed.phase == TransferPhase::Queued)
    });
    let seen = format!(
        "{} transfers ran out of their time before there was KV to transfer, {} of them in the decode worker's queue for room",
        early.len(),
        queued.count()
    );
    let proofs = early
        .iter()
        .map(|line| proof(&case.logs.transfers, line, describe_transfer(&line.value)));
    Some(Suspicion::new(
        ModeId::EarlyClock,
        cost_of(case, &requests),
        seen,
        proofs.take(crate::finding::PROOFS_MAX).collect(),
    ))
}
