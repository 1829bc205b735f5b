//! Modes of bookkeeping: what the router has booked against what workers say they do.
//!
//! Router and workers are sampled at the same instants; a sample that would repeat the last one is left out, so the last one
//! before an instant holds. A difference counts when it lasts, because legs on their way are booked before they arrive.

use crate::case::{Case, add_cost, describe_request, median, proof};
use crate::evidence::Line;
use crate::finding::{Cost, Level, PROOFS_MAX, Proof, Suspicion};
use crate::mode::ModeId;
use homing_report::logs::{BookedLine, RequestLine, WorkerSampleLine};
use std::collections::{BTreeMap, BTreeSet};

/// A difference of so many requests...
const DIFFERENCE_MIN: i64 = 2;
/// ...for so long, in seconds, is no coincidence.
const LASTS_S: f64 = 25.0;

/// A worker at one instant, by its own account and by the router's.
struct Compared<'e> {
    t: f64,
    sample: &'e Line<WorkerSampleLine>,
    booked: &'e BookedLine,
}

/// A stretch of time in which a worker's figures and the router's differ.
struct Stretch<'e> {
    begins: f64,
    ends: f64,
    /// The most telling instant, and the difference there.
    worst: (i64, Compared<'e>),
}

/// Each worker at each instant at which the router was sampled or the worker was.
fn compared<'e>(case: &Case<'e>) -> BTreeMap<&'e str, Vec<Compared<'e>>> {
    let samples = case.samples();
    let mut instants: BTreeSet<u64> = BTreeSet::new();
    let micros = |t: f64| (t * 1e6).round() as u64;
    instants.extend(case.logs.router_samples.values().map(|line| micros(line.t)));
    instants.extend(case.logs.samples.values().map(|line| micros(line.t)));
    let mut all: BTreeMap<&str, Vec<Compared<'_>>> = BTreeMap::new();
    let routers = &case.logs.router_samples.lines;
    for (worker, samples) in samples {
        let (mut sample, mut router) = (0, 0);
        for instant in &instants {
            while samples.get(sample).is_some_and(|line| micros(line.value.t) <= *instant) {
                sample += 1;
            }
            while routers.get(router).is_some_and(|line| micros(line.value.t) <= *instant) {
                router += 1;
            }
            let (Some(sample), Some(router)) = (sample.checked_sub(1), router.checked_sub(1)) else {
                continue;
            };
            let booked = routers[router]
                .value
                .workers
                .iter()
                .find(|booked| booked.worker == worker);
            let t = *instant as f64 / 1e6;
            // What a worker said last before it died holds no more.
            if let Some(booked) = booked.filter(|_| case.is_up(worker, t)) {
                all.entry(worker).or_default().push(Compared {
                    t,
                    sample: samples[sample],
                    booked,
                });
            }
        }
    }
    all
}

/// The stretches in which the difference is large for long.
fn stretches<'e>(instants: impl Iterator<Item = (i64, Compared<'e>)>) -> Vec<Stretch<'e>> {
    let mut stretches: Vec<Stretch<'_>> = Vec::new();
    let mut open = false;
    for (found, instant) in instants {
        if found < DIFFERENCE_MIN {
            if open {
                stretches.last_mut().expect("one is open").ends = instant.t;
            }
            open = false;
        } else if open {
            let last = stretches.last_mut().expect("one is open");
            last.ends = instant.t;
            if found > last.worst.0 {
                last.worst = (found, instant);
            }
        } else {
            open = true;
            stretches.push(Stretch {
                begins: instant.t,
                ends: instant.t,
                worst: (found, instant),
            });
        }
    }
    stretches.retain(|stretch| stretch.ends - stretch.begins >= LASTS_S);
    stretches
}

/// What requests in these stretches waited longer than others, and which of them failed.
fn cost_of(case: &Case<'_>, times: &[(f64, f64)], proofs: &mut Vec<Proof>) -> Cost {
    let during = |request: &RequestLine| {
        times
            .iter()
            .any(|(begins, ends)| request.t >= *begins - LASTS_S && request.t < *ends)
    };
    let usual = median(
        case.logs
            .requests
            .values()
            .filter(|request| !during(request))
            .filter_map(|request| request.ttft_s),
    );
    let mut cost = Cost::default();
    let mut slowest: Option<&Line<RequestLine>> = None;
    for line in case.logs.requests.lines.iter().filter(|line| during(&line.value)) {
        add_cost(&mut cost, &line.value, usual);
        if line.value.error.is_none() && slowest.is_none_or(|slowest| slowest.value.ttft_s < line.value.ttft_s) {
            slowest = Some(line);
        }
    }
    proofs.extend(slowest.map(|line| proof(&case.logs.requests, line, describe_request(&line.value))));
    cost
}

/// Looks at each worker, and makes a suspicion of what lasts.
fn suspect_worker(
    case: &Case<'_>,
    mode: ModeId,
    difference: fn(&Compared<'_>) -> i64,
    say: fn(&str, i64, f64) -> String,
) -> Option<Suspicion> {
    let mut found = Vec::new();
    for instants in compared(case).into_values() {
        found.extend(stretches(instants.into_iter().map(|at| (difference(&at), at))));
    }
    suspect(case, mode, found, say)
}

/// The stretches in which the differences of all workers together are large for long; each is told by its worst worker.
fn of_fleet<'e>(case: &Case<'e>, difference: fn(&Compared<'_>) -> i64) -> Vec<Stretch<'e>> {
    let mut instants: BTreeMap<u64, Vec<Compared<'_>>> = BTreeMap::new();
    for at in compared(case).into_values().flatten() {
        instants.entry((at.t * 1e6).round() as u64).or_default().push(at);
    }
    stretches(instants.into_values().filter_map(|workers| {
        let all = workers.iter().map(difference).sum();
        Some((all, workers.into_iter().max_by_key(difference)?))
    }))
}

/// Makes a suspicion of what lasts.
fn suspect(
    case: &Case<'_>,
    mode: ModeId,
    found: Vec<Stretch<'_>>,
    say: fn(&str, i64, f64) -> String,
) -> Option<Suspicion> {
    let (mut times, mut proofs, mut said) = (Vec::new(), Vec::new(), Vec::new());
    for stretch in found {
        let (most, at) = &stretch.worst;
        let (worker, sample) = (&at.booked.worker, &at.sample.value);
        times.push((stretch.begins, stretch.ends));
        said.push((*most, say(worker, *most, stretch.ends - stretch.begins)));
        let value = format!(
            "t={} {worker}: running {}, waiting {}, importing {}, exporting {}; the router has booked {}",
            at.t, sample.running, sample.waiting, sample.importing, sample.exporting, at.booked.requests
        );
        proofs.push(proof(&case.logs.samples, at.sample, value));
    }
    proofs.truncate(PROOFS_MAX - 1);
    let (_, seen) = said.into_iter().max_by_key(|(most, _)| *most)?;
    let cost = cost_of(case, &times, &mut proofs);
    Some(Suspicion::new(mode, cost, seen, proofs).at_least(Level::Warning))
}

fn engine_requests(sample: &WorkerSampleLine) -> i64 {
    i64::from(sample.running) + i64::from(sample.waiting) + i64::from(sample.importing)
}

/// Engines go on with requests that nobody has booked.
pub(super) fn abort_storm(case: &Case<'_>) -> Option<Suspicion> {
    let difference = |at: &Compared<'_>| engine_requests(&at.sample.value) - i64::from(at.booked.requests);
    suspect_worker(case, ModeId::AbortStorm, difference, |worker, most, lasts| {
        format!("{worker} kept up to {most} requests for {lasts:.0} s that the router had given up")
    })
}

/// Prefill workers, all together, hold KV for nobody.
pub(super) fn stranded_kv(case: &Case<'_>) -> Option<Suspicion> {
    let held = |at: &Compared<'_>| i64::from(at.sample.value.exporting) - i64::from(at.booked.exports);
    suspect(case, ModeId::StrandedKv, of_fleet(case, held), |worker, most, lasts| {
        format!(
            "the KV of up to {most} prompts was held for {lasts:.0} s that nobody was to fetch any more, most of it at {worker}"
        )
    })
}

/// The router has booked what is nowhere. All workers together, because a request with two legs is booked at both of its
/// workers and known to one of them at least.
pub(super) fn phantom_load(case: &Case<'_>) -> Option<Suspicion> {
    suspect(
        case,
        ModeId::PhantomLoad,
        of_fleet(case, unknown),
        |worker, most, lasts| {
            format!(
                "the router had booked up to {most} requests for {lasts:.0} s that no worker knew, most of them at {worker}"
            )
        },
    )
}

/// Requests that are booked at a worker and not known to it; what has its KV elsewhere is counted there.
fn unknown(at: &Compared<'_>) -> i64 {
    let booked = i64::from(at.booked.requests) - i64::from(at.booked.seeds);
    booked - engine_requests(&at.sample.value) - i64::from(at.sample.value.exporting)
}
