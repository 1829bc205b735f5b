//! What users of other systems report, one defect at a time: with it on it shows in the logs, with it off it does not. Those
//! that take a whole scenario to show have drills (`homing-drills`).

use crate::common::{config, one_session, run};
use homing_report::logs::{LogKind, RouterSampleLine, TransferLine, TransferPhase};
use homing_sim::SimOutcome;
use homing_units::Duration;
use homing_workload::{Start, Trace};
use serde::de::DeserializeOwned;

fn lines<L: DeserializeOwned>(outcome: &SimOutcome, kind: LogKind) -> Vec<L> {
    let lines = outcome.logs.text(kind).lines();
    lines.map(|line| serde_json::from_str(line).expect(line)).collect()
}

fn logged(trace: &Trace, cluster: &str, policy: &str) -> SimOutcome {
    let mut config = config(trace, cluster, policy);
    config.logs = true;
    config.replay.start = Start::Concurrency(u32::try_from(trace.sessions.len()).expect("few"));
    run(trace, &config)
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
        let outcome = logged(&trace, &cluster, "dp-cache-aware");
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
