//! Whatever the load and whatever dies: every request ends once, tokens are conserved, and nothing is left anywhere.
//!
//! The simulator's own checkers look at every run; these tests make the runs.

use crate::common::{BLOCK, agents, config, one_session, run};
use homing_report::{Path, WorkerRecord};
use homing_sim::chaos::Scenario;
use homing_sim::fault::schedule;
use homing_sim::{Fault, SimError, simulate};
use homing_units::{Duration, Instant, WorkerId};
use homing_workload::Start;
use proptest::prelude::*;
use std::collections::BTreeSet;

fn at(millis: u64) -> Instant {
    Instant::ZERO + Duration::from_millis(millis)
}

#[test]
fn every_policy_serves_every_shape() {
    let trace = agents(21, 10, 6);
    for policy in ["homing", "dp-cache-aware", "round-robin"] {
        for cluster in [
            "h100x4-dp",
            "h100x4-1p3d",
            "h100x2-1p1d:kv=2000",
            "h100x3-2p1d:kv=1500:nic=10GBps",
        ] {
            for named in [true, false] {
                let mut config = config(&trace, cluster, policy);
                config.named_sessions = named;
                let outcome = run(&trace, &config);
                let errors: Vec<_> = outcome
                    .run
                    .requests
                    .iter()
                    .filter_map(|request| request.error.clone())
                    .collect();
                assert_eq!(
                    errors,
                    Vec::<String>::new(),
                    "{policy} on {cluster}, sessions named: {named}"
                );
                assert_eq!(outcome.run.requests.len(), trace.turn_count());
                let sum =
                    |count: fn(&WorkerRecord) -> Option<u64>| outcome.run.workers.iter().filter_map(count).sum::<u64>();
                assert_eq!(
                    sum(|worker| worker.transfer_errors),
                    0,
                    "{policy} on {cluster}: an export nobody acknowledged"
                );
                assert_eq!(
                    sum(|worker| worker.transfers_in),
                    sum(|worker| worker.transfers_out),
                    "{policy} on {cluster}"
                );
            }
        }
    }
}

#[test]
fn a_stream_goes_on_elsewhere_when_its_worker_dies() {
    let trace = one_session(&[(2_000, 400), (2_500, 20), (2_600, 20)]);
    let mut config = config(&trace, "h200x2-dp", "homing");
    let first = run(&trace, &config).run.requests[0].clone();
    let dies: u32 = first
        .worker
        .as_deref()
        .and_then(|name| name[1..].parse().ok())
        .expect("w0 or w1");
    let middle = first.first_token.expect("it streams") + first.tpot().expect("many tokens") * 200;
    config.faults = vec![(middle, Fault::WorkerCrash(WorkerId(dies)))];
    let requests = run(&trace, &config).run.requests;
    assert!(requests.iter().all(|request| request.error.is_none()), "{requests:?}");
    assert_eq!(requests[0].output_tokens, 400, "no token twice, none lost");
    assert_ne!(requests[0].worker, first.worker);
    assert!(
        requests[0].itl_max > first.itl_max,
        "the client waits for the prefill elsewhere"
    );
}

#[test]
fn a_worker_that_comes_back_is_used_again_with_nothing_in_its_cache() {
    let trace = one_session(&[(2_000, 20), (2_100, 20), (2_200, 20), (2_300, 20)]);
    let mut config = config(&trace, "h200x1-dp", "homing");
    // Gaps of 20 s: time for the probes to find the worker dead and back.
    config.replay.time_scale = 0.05;
    let undisturbed = run(&trace, &config).run.requests;
    assert_eq!(undisturbed[2].path, Some(Path::Append));
    // Between the second turn and the third, which finds the new life.
    let gap = undisturbed[1].end + Duration::from_millis(10);
    let worker = WorkerId(0);
    config.faults = vec![
        (gap, Fault::WorkerCrash(worker)),
        (gap + Duration::from_millis(300), Fault::WorkerRestart(worker)),
    ];
    let requests = run(&trace, &config).run.requests;
    assert!(requests.iter().all(|request| request.error.is_none()), "{requests:?}");
    let cached: Vec<u32> = requests.iter().map(|request| request.cached_tokens).collect();
    assert!(
        cached.contains(&(2_200 / BLOCK * BLOCK)),
        "the new cache is used: {cached:?}"
    );
    assert_eq!(
        requests[2].path,
        Some(Path::Local),
        "the router assumes nothing of the old cache"
    );
    let colds = cached.iter().filter(|tokens| **tokens == 0).count();
    assert_eq!(colds, 2, "the first turn, and one after the crash: {cached:?}");
}

#[test]
fn wrong_faults_and_pools_are_refused() {
    let trace = one_session(&[(100, 1)]);
    let mut config = config(&trace, "h200x1-dp", "homing");
    config.faults = vec![(at(0), Fault::WorkerCrash(WorkerId(7)))];
    let error = simulate(&trace, &config).expect_err("there is one worker");
    assert_eq!(
        error.to_string(),
        "a fault names worker `7`, expected one of `1` workers"
    );
    assert!(error.is_wrong_input());
    config.faults.clear();
    config.cluster.workers[0].kv_tokens = 15;
    assert!(matches!(simulate(&trace, &config), Err(SimError::PoolTooSmall { .. })));
    config.cluster.workers[0].kv_tokens = 16_000;
    config.replay.time_scale = 0.0;
    assert!(simulate(&trace, &config).expect_err("no time at all").is_wrong_input());
}

/// The drawn experiments, of which `cargo xtask chaos` runs many: some hold here too, and a seed says all of one.
#[test]
fn experiments_that_are_drawn_hold_and_are_the_same_twice() {
    let mut kinds = BTreeSet::new();
    for seed in 1..=60 {
        let scenario = Scenario::draw(seed);
        let one = scenario.examine().unwrap_or_else(|failure| panic!("{failure}"));
        if seed % 10 == 0 {
            let two = Scenario::draw(seed)
                .examine()
                .unwrap_or_else(|failure| panic!("{failure}"));
            assert_eq!(one.run.requests, two.run.requests, "seed {seed}");
            assert_eq!(one.recording, two.recording, "seed {seed}");
        }
        let words = |(_, fault): &(Instant, Fault)| fault.to_string().split(' ').next().map(str::to_owned);
        kinds.extend(scenario.config.faults.iter().filter_map(words));
    }
    let all = [
        "answers", "break", "clear", "crash", "hang-up", "kv", "link", "loads", "pause", "probes", "restart", "resume",
        "router", "slow", "stall", "stranger",
    ];
    assert_eq!(
        kinds.iter().map(String::as_str).collect::<Vec<_>>(),
        all,
        "every kind is drawn"
    );
}

/// A run that breaks is cut down to the faults that it takes, and what is printed replays it.
#[test]
fn a_violation_is_cut_down_and_can_be_replayed() {
    let mut scenario = Scenario::draw(1);
    // Nobody can be patient enough for a pause.
    scenario.config.patience = Duration::ZERO;
    scenario.config.faults = schedule::parse("1s kv 0 1 lost; 2s loads 0 1").expect("faults");
    let failure = scenario.examine().expect_err("no time at all");
    assert_eq!(failure.violation.kind, "that every request ends in time");
    assert_eq!((failure.drawn, failure.schedule.len()), (2, 0), "it takes no fault");
    let said = failure.to_string();
    assert!(
        said.contains("replay with `homing sim --chaos --seed 1 --faults ''`"),
        "{said}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn nothing_is_lost_whatever_dies(
        seed in 0_u64..1_000_000,
        policy in prop::sample::select(vec!["homing", "dp-cache-aware", "round-robin"]),
        shape in prop::sample::select(vec!["h100x2-dp", "h100x3-1p2d", "h100x4-2p2d"]),
        kv in 700_u32..4_000,
        live in 1_u32..12,
        crashes in prop::collection::vec((0_u64..20_000, 0_u32..2, 1_u64..8_000), 0..4),
    ) {
        let trace = agents(seed, 8, 5);
        let mut config = config(&trace, &format!("{shape}:kv={kv}"), policy);
        config.seed = seed;
        config.replay.start = Start::Concurrency(live);
        config.replay.time_scale = 4.0;
        for (when, worker, down) in crashes {
            config.faults.push((at(when), Fault::WorkerCrash(WorkerId(worker))));
            config.faults.push((at(when + down), Fault::WorkerRestart(WorkerId(worker))));
        }
        let outcome = run(&trace, &config);
        prop_assert_eq!(outcome.run.requests.len(), trace.turn_count());
        if config.faults.is_empty() {
            let errors: Vec<_> = outcome.run.requests.iter().filter_map(|request| request.error.clone()).collect();
            let expected = |kind: &String| kind == "context_too_long";
            prop_assert!(errors.iter().all(expected), "{:?} with seed {}", errors, seed);
        }
    }
}

/// Among drawn experiments are errands of both kinds that land, fail and give way; the checkers look at each.
#[test]
fn drawn_experiments_run_errands_that_end_in_every_way() {
    let mut ended = BTreeSet::new();
    for seed in 0..400 {
        let Scenario { trace, config, .. } = Scenario::draw(seed);
        if config.policy.to_string().contains("errands=on") {
            let totals = run(&trace, &config).errands;
            ended.extend(totals.iter().map(|total| (total.kind.as_str(), total.outcome.as_str())));
        }
    }
    let all = ["base", "gap"].map(|kind| ["dropped", "failed", "landed"].map(|outcome| (kind, outcome)));
    assert_eq!(ended, all.into_iter().flatten().collect());
}
