//! What users of other systems report, one defect at a time: with it on it shows in the logs, with it off it does not.

use crate::common::{config, one_session, run};
use homing_report::logs::{DecisionLine, LogKind, RequestLine, RouterSampleLine, TransferLine, TransferPhase};
use homing_sim::{Fault, SimOutcome};
use homing_units::{Duration, Instant, WorkerId};
use homing_workload::{Start, Trace};
use serde::de::DeserializeOwned;

fn lines<L: DeserializeOwned>(outcome: &SimOutcome, kind: LogKind) -> Vec<L> {
    let lines = outcome.logs.text(kind).lines();
    lines.map(|line| serde_json::from_str(line).expect(line)).collect()
}

fn at(millis: u64) -> Instant {
    Instant::ZERO + Duration::from_millis(millis)
}

fn logged(trace: &Trace, cluster: &str, policy: &str, faults: &[(Instant, Fault)]) -> SimOutcome {
    let mut config = config(trace, cluster, policy);
    config.logs = true;
    config.replay.start = Start::Concurrency(u32::try_from(trace.sessions.len()).expect("few"));
    config.faults = faults.to_vec();
    run(trace, &config)
}

#[test]
fn a_silent_recompute_is_one_plan_whose_prompt_was_computed_twice() {
    let trace = one_session(&[(20_000, 4)]);
    let check = |load_failure: &str, plans: usize| {
        let cluster = format!("h100x2-1p1d:nic=0.5GBps:load_failure={load_failure}");
        // The pull of 2 GB has begun by then and takes seconds.
        let outcome = logged(
            &trace,
            &cluster,
            "kv-aware",
            &[(at(3_000), Fault::WorkerCrash(WorkerId(0)))],
        );
        let failed: Vec<TransferLine> = lines(&outcome, LogKind::KvTransfers);
        assert!(failed.iter().any(|line| line.error.is_some()), "{failed:?}");
        let requests: Vec<RequestLine> = lines(&outcome, LogKind::Requests);
        let decisions: Vec<DecisionLine> = lines(&outcome, LogKind::Decisions);
        let completed = requests.iter().filter(|request| request.error.is_none()).count();
        assert_eq!(
            (decisions.len(), completed),
            (plans, plans),
            "{load_failure}: {requests:?}"
        );
    };
    check("recompute", 1);
    let cluster = "h100x2-1p1d:nic=0.5GBps";
    let outcome = logged(
        &trace,
        cluster,
        "kv-aware",
        &[(at(3_000), Fault::WorkerCrash(WorkerId(0)))],
    );
    let requests: Vec<RequestLine> = lines(&outcome, LogKind::Requests);
    assert!(
        requests[0].error.is_some(),
        "a policy of one attempt says that it failed: {requests:?}"
    );
}

#[test]
fn a_restart_that_is_hidden_leaves_what_the_index_says() {
    let trace = one_session(&[(20_000, 4), (20_100, 4), (20_200, 4), (20_300, 4), (20_400, 4)]);
    let faults = [
        (at(3_000), Fault::WorkerCrash(WorkerId(0))),
        (at(3_200), Fault::WorkerRestart(WorkerId(0))),
    ];
    let missed = |epochs: &str| {
        let outcome = logged(&trace, &format!("h100x1-dp:epochs={epochs}"), "dp-cache-aware", &faults);
        let requests: Vec<RequestLine> = lines(&outcome, LogKind::Requests);
        let decisions: Vec<DecisionLine> = lines(&outcome, LogKind::Decisions);
        let expected = |request: u64| {
            let last = decisions.iter().rfind(|line| line.request == request);
            last.map_or(0, |line| line.expected_cached_tokens)
        };
        let missed = requests
            .iter()
            .map(|line| expected(line.request).saturating_sub(line.cached_tokens));
        missed.max().expect("requests")
    };
    assert!(missed("off") > 15_000, "{}", missed("off"));
    assert!(missed("on") < 64, "{}", missed("on"));
}

#[test]
fn evictions_that_are_hidden_make_the_index_claim_more_than_the_pool_holds() {
    let turns: Vec<(u32, u32)> = (0..8).map(|turn| (1_000 + turn * 100, 4)).collect();
    let mut trace = one_session(&turns);
    let one = trace.sessions[0].clone();
    trace.sessions = (0..20_u64)
        .map(|index| {
            let mut session = one.clone();
            session.id = format!("s{index}");
            for turn in &mut session.turns {
                turn.content = turn.content.iter().map(|id| id + ((index + 1) << 20)).collect();
            }
            session
        })
        .collect();
    let claimed = |removals: &str| {
        let cluster = format!("h100x1-dp:kv=8K:removals={removals}");
        let outcome = logged(&trace, &cluster, "dp-cache-aware", &[]);
        let samples: Vec<RouterSampleLine> = lines(&outcome, LogKind::RouterSamples);
        let claims = samples.iter().flat_map(|sample| &sample.workers);
        claims.map(|worker| worker.indexed_tokens).max().expect("samples")
    };
    assert!(claimed("off") > 16_000, "{}", claimed("off"));
    assert!(claimed("on") <= 8_000, "{}", claimed("on"));
}

/// A session that fills the decode worker for long, and one that waits for room meanwhile.
#[test]
fn a_clock_that_starts_too_early_counts_the_wait_for_room() {
    let mut trace = one_session(&[(18_400, 1_200)]);
    let mut second = trace.sessions[0].clone();
    second.id = "waits".to_owned();
    second.start = Some(Duration::from_millis(500));
    let turn = &mut second.turns[0];
    (turn.prompt_tokens, turn.output_tokens) = (8_000, 4);
    turn.content = (0..8_000 / 16).map(|id| id + (1 << 20)).collect();
    trace.sessions.push(second);
    let failed = |clock: &str| {
        let cluster =
            format!("h100x2-1p1d:kv=20K:engine=session-slot:order=decode-first:transfer_timeout=4s:clock={clock}");
        let mut config = config(&trace, &cluster, "kv-aware");
        (config.logs, config.replay.start) = (true, Start::Recorded);
        let lines: Vec<TransferLine> = lines(&run(&trace, &config), LogKind::KvTransfers);
        let failed = lines.into_iter().filter_map(|line| line.failed);
        failed.map(|failed| (failed.phase, failed.clock_s)).collect::<Vec<_>>()
    };
    assert_eq!(failed("sent"), [(TransferPhase::Queued, Some(4.0))]);
    assert_eq!(failed("room"), []);
}
