//! The papers' stack, one part at a time: with a part on its symptom shows, with it off the symptom is gone.

use crate::common::{config, one_session, run};
use homing_report::logs::{EvictionCause, EvictionLine, LogKind, TransferLine, WorkerSampleLine};
use homing_report::{RequestRecord, WorkerRecord};
use homing_sim::{Fault, SimConfig, SimOutcome};
use homing_units::{Duration, Instant, WorkerId};
use homing_workload::{Session, Start, Trace, Turn};

const BLOCK: u32 = 16;
/// The papers' setting.
const PAPER: &str = "h100x3-1p2d:kv=20K:engine=session-slot:trim=exhausted";

/// Sessions whose prompts grow by as much each turn, each with its own content.
fn growing(sessions: u32, turns: u32, first: u32, growth: u32, output: u32) -> Trace {
    let session = |index: u32| {
        let turns = (0..turns).map(|turn| {
            let prompt_tokens = first + turn * growth;
            let own = (u64::from(index) + 1) << 32;
            Turn {
                agent: 0,
                prompt_tokens,
                output_tokens: output,
                content: (own..own + u64::from(prompt_tokens / BLOCK))
                    .collect::<Vec<u64>>()
                    .into(),
                after: turn.checked_sub(1).into_iter().collect(),
                gap: Duration::from_millis(500),
            }
        });
        Session {
            id: format!("s{index}"),
            start: Some(Duration::ZERO),
            turns: turns.collect(),
        }
    };
    Trace {
        name: format!("growing:{sessions}x{turns}"),
        block_size: BLOCK,
        sessions: (0..sessions).map(session).collect(),
    }
}

fn logged(trace: &Trace, cluster: &str, policy: &str) -> SimOutcome {
    let mut config = config(trace, cluster, policy);
    config.logs = true;
    config.replay.start = Start::Concurrency(u32::try_from(trace.sessions.len()).expect("few"));
    run(trace, &config)
}

fn errors(outcome: &SimOutcome, kind: &str) -> usize {
    let requests = outcome.run.requests.iter();
    requests
        .filter(|request| request.error.as_deref() == Some(kind))
        .count()
}

/// Failed transfers as the log has them: those that took too long, and those to a peer that was taken for dead.
fn failed_transfers(outcome: &SimOutcome) -> (usize, usize) {
    let said = |what: &str| {
        let lines = outcome.logs.text(LogKind::KvTransfers).lines();
        let lines = lines.map(|line| serde_json::from_str::<TransferLine>(line).expect("its own form"));
        lines.filter(|line| line.error.as_deref() == Some(what)).count()
    };
    (said("Failed to send kv chunk"), said("Decode instance could be dead"))
}

fn total(outcome: &SimOutcome, of: impl Fn(&WorkerRecord) -> Option<u64>) -> u64 {
    outcome.run.workers.iter().filter_map(of).sum()
}

/// Eight sessions of 8,000 to 12,000 tokens on two workers of 20,000: seeds wait for slots that are not given up.
fn crowded() -> Trace {
    growing(8, 6, 8_000, 800, 200)
}

#[test]
fn kv_that_is_not_fetched_in_time_fails_only_with_a_timeout() {
    let trace = crowded();
    let on = logged(&trace, &format!("{PAPER}:transfer_timeout=4s"), "kv-aware");
    let (late, dead) = failed_transfers(&on);
    assert!(late > 0 && dead == 0, "{late} late, {dead} to dead peers");
    assert_eq!(errors(&on, "transfer_failed"), late, "no retry: each is an error");
    assert_eq!(
        total(&on, |worker| worker.transfer_errors),
        2 * late as u64,
        "each counts at both its workers"
    );
    // The same seeds wait, but nobody gives them up before their lease does.
    let off = logged(&trace, &format!("{PAPER}:transfer_timeout=1800s"), "kv-aware");
    assert_eq!(failed_transfers(&off), (0, 0));
}

#[test]
fn a_peer_taken_for_dead_gets_nothing_more() {
    let trace = crowded();
    let with = |dead: &str| {
        let cluster =
            format!("h100x4-2p2d:kv=20K:engine=session-slot:trim=exhausted:transfer_timeout=4s:dead_peers={dead}");
        logged(&trace, &cluster, "kv-aware")
    };
    let off = failed_transfers(&with("off"));
    assert!(off.0 > 0 && off.1 == 0, "{off:?}");
    let (late, dead) = failed_transfers(&with("on"));
    assert!(
        late > 0 && late <= 4,
        "each of the four links is late once at most: {late}"
    );
    assert!(
        dead > late,
        "and fails at once from then on: {dead} after {late}, without the list {off:?}"
    );
    let (_, forgiven) = failed_transfers(&with("1s"));
    assert!(forgiven < dead, "a list that forgets: {forgiven} against {dead}");
}

/// A session that fills the only decode worker for some seconds, one that waits for room meanwhile, and small ones
/// long after both.
fn one_bad_moment() -> Trace {
    let mut trace = growing(22, 1, 800, 0, 4);
    let at = |index: usize| match index {
        0 => (18_400, 1_200, 0),
        1 => (8_000, 4, 300),
        _ => (800, 4, 40_000 + 500 * index as u64),
    };
    for (index, session) in trace.sessions.iter_mut().enumerate() {
        let (prompt_tokens, output_tokens, start) = at(index);
        let own = (index as u64 + 1) << 32;
        session.start = Some(Duration::from_millis(start));
        let turn = &mut session.turns[0];
        (turn.prompt_tokens, turn.output_tokens, turn.gap) = (prompt_tokens, output_tokens, Duration::ZERO);
        turn.content = (own..own + u64::from(prompt_tokens / BLOCK))
            .collect::<Vec<u64>>()
            .into();
    }
    trace
}

#[test]
fn one_bad_moment_condemns_one_prefill_worker_only_with_the_list() {
    let trace = one_bad_moment();
    let with = |dead: &str| {
        let cluster =
            format!("h100x3-2p1d:kv=20K:engine=session-slot:trim=exhausted:transfer_timeout=2s:dead_peers={dead}");
        let mut config = config(&trace, &cluster, "kv-aware");
        config.replay.start = Start::Recorded;
        let workers = run(&trace, &config).run.workers;
        let mut by_prefill: Vec<u64> = workers[..2]
            .iter()
            .filter_map(|worker| worker.transfer_errors)
            .collect();
        by_prefill.sort_unstable();
        (by_prefill[0], by_prefill[1])
    };
    assert_eq!(with("off"), (0, 1));
    let (healthy, condemned) = with("on");
    assert!(healthy == 0 && condemned >= 10, "{healthy} and {condemned}");
}

#[test]
fn questions_in_the_loop_make_steps_longer() {
    let trace = growing(6, 8, 2_000, 300, 60);
    let mean = |parameters: &str| {
        let mut config = config(&trace, &format!("h200x2-1p1d{parameters}"), "kv-aware");
        config.noise = false;
        config.replay.start = Start::Concurrency(6);
        let requests = run(&trace, &config).run.requests;
        let sum: Duration = requests.iter().map(RequestRecord::latency).sum();
        sum.as_secs_f64() / requests.len() as f64
    };
    let snapshot = mean("");
    let loop_free = mean(":admission=loop:probe=0ms");
    let costly = mean(":admission=loop:probe=20ms");
    let polled = mean(":admission=loop:probe=20ms:poll=10Hz");
    assert!(
        snapshot < loop_free,
        "an answer waits for the step's end: {snapshot} {loop_free}"
    );
    assert!(loop_free < costly && costly < polled, "{loop_free} {costly} {polled}");
}

#[test]
fn questions_cost_only_those_whose_router_asks() {
    let trace = growing(4, 4, 2_000, 300, 20);
    let records = |cluster: &str| logged(&trace, cluster, "homing").run;
    assert_eq!(records("h200x2-1p1d"), records("h200x2-1p1d:admission=loop:probe=50ms"));
}

/// A turn of 6,000 tokens, then one that goes back to 5,000: history was rewritten.
fn rewritten() -> Trace {
    one_session(&[(3_000, 40), (6_000, 40), (5_000, 40), (5_100, 40)])
}

#[test]
fn the_correction_kills_the_process_only_with_slots_and_the_crash() {
    let trace = rewritten();
    let check = |parameters: &str, lost: usize| {
        let outcome = logged(&trace, &format!("h200x2-1p1d{parameters}"), "kv-aware");
        assert_eq!(
            errors(&outcome, "worker_lost"),
            lost,
            "{parameters}: {:?}",
            outcome.run.requests
        );
    };
    check(":engine=session-slot:correction_crash=on", 1);
    check(":engine=session-slot", 0);
    check("", 0);
}

/// The evictions of a worker.
fn evictions(outcome: &SimOutcome, worker: &str) -> Vec<EvictionLine> {
    let lines = outcome.logs.text(LogKind::Evictions).lines();
    let lines = lines.map(|line| serde_json::from_str::<EvictionLine>(line).expect("its own form"));
    lines.filter(|line| line.worker == worker).collect()
}

/// Whoever evicts for an import is that request, and gives up no more than its prompt; a step computes for several.
fn check_causes(outcome: &SimOutcome, lines: &[EvictionLine]) {
    let imports = lines.iter().filter(|line| line.cause == Some(EvictionCause::Import));
    for line in imports.clone() {
        let request = line.request.expect("an import is one request's") as usize;
        let record = &outcome.run.requests[request];
        assert_eq!(record.worker.as_deref(), Some("d0"), "{record:?}");
        assert!(record.prefill_worker.is_some(), "{record:?}");
        assert!(
            line.tokens <= u64::from(record.prompt_tokens) + u64::from(BLOCK),
            "{line:?} {record:?}"
        );
    }
    let steps = lines.iter().filter(|line| line.cause == Some(EvictionCause::Step));
    assert!(imports.count() > 0 && steps.clone().count() > 0);
    assert!(steps.clone().all(|line| line.request.is_none()));
    assert!(
        lines
            .iter()
            .all(|line| line.decisions == line.blocks && line.session.is_none())
    );
}

#[test]
fn slots_evict_sessions_and_blocks_evict_blocks() {
    // Sessions of 10,000 to 31,000 tokens that come all at once: idle slots, and seeds that just fit beside them.
    let mut trace = growing(24, 20, 10_000, 700, 300);
    trace.sessions.extend(growing(24, 20, 16_000, 700, 300).sessions);
    for (index, session) in trace.sessions.iter_mut().enumerate() {
        for turn in &mut session.turns {
            let own = (index as u64 + 1) << 32;
            turn.prompt_tokens += 37 * index as u32;
            turn.content = (own..own + u64::from(turn.prompt_tokens / BLOCK))
                .collect::<Vec<u64>>()
                .into();
        }
    }
    let with = |engine: &str| {
        let cluster = format!("h100x2-1p1d:kv=92K:{engine}:transfer_timeout=32s");
        let mut config: SimConfig = config(&trace, &cluster, "kv-aware");
        config.logs = true;
        config.replay.start = Start::Concurrency(10);
        let outcome = run(&trace, &config);
        let sizes = evictions(&outcome, "d0");
        let decode = outcome
            .run
            .workers
            .iter()
            .find(|worker| worker.role == "decode")
            .expect("d0")
            .clone();
        (outcome, sizes, decode)
    };
    let tokens = |lines: &[EvictionLine]| lines.iter().map(|line| line.tokens).collect::<Vec<u64>>();
    let (_, lines, decode) = with("engine=session-slot:trim=no-room");
    let whole = |line: &EvictionLine| (line.cause, line.decisions, line.session.is_some());
    assert!(
        lines
            .iter()
            .all(|line| whole(line) == (Some(EvictionCause::Trim), 1, true))
    );
    let slots = tokens(&lines);
    assert!(
        !slots.is_empty() && slots.iter().all(|tokens| *tokens >= 10_000),
        "{slots:?}"
    );
    assert_eq!(decode.evictions, Some(slots.len() as u64));
    assert_eq!(decode.evicted_tokens, Some(slots.iter().sum()));
    let (outcome, lines, decode) = with("engine=block");
    check_causes(&outcome, &lines);
    let blocks = tokens(&lines);
    // One event is one allocation: most are a block, and one of a whole prompt takes what that prompt needs and no more.
    let mut sorted = blocks.clone();
    sorted.sort_unstable();
    assert!(sorted[sorted.len() * 9 / 10] <= 500, "{sorted:?}");
    assert_eq!(decode.evicted_tokens, Some(blocks.iter().sum()));
    let longest = trace
        .sessions
        .iter()
        .flat_map(|session| &session.turns)
        .map(|turn| turn.prompt_tokens + 300)
        .max();
    assert!(sorted.last().copied() <= longest.map(u64::from), "{sorted:?}");
}

/// A session that fills the only decode worker for some seconds, and one that waits for room meanwhile: whether
/// the second's prompt is held at the prefill worker meanwhile, and how it ends.
fn second_of_two(parameters: &str) -> (bool, Option<String>) {
    let mut trace = growing(2, 1, 12_000, 0, 4);
    trace.sessions[0].turns[0].output_tokens = 3_500;
    trace.sessions[1].start = Some(Duration::from_millis(300));
    let cluster = format!("h100x2-1p1d:kv=20K:engine=session-slot{parameters}");
    let mut config = config(&trace, &cluster, "kv-aware");
    config.replay.start = Start::Recorded;
    config.logs = true;
    let outcome = run(&trace, &config);
    let samples = outcome.logs.text(LogKind::WorkerSamples).lines();
    let samples = samples.map(|line| serde_json::from_str::<WorkerSampleLine>(line).expect("its own form"));
    let held = samples
        .into_iter()
        .any(|sample| sample.worker == "p0" && sample.exporting > 0);
    let second = outcome.run.requests.iter().find(|request| request.session_name == "s1");
    let error = second.expect("it ends").error.clone();
    (held, error)
}

#[test]
fn a_seed_that_waits_for_room_holds_nothing_at_its_prefill_worker_where_the_decode_worker_begins() {
    assert_eq!(second_of_two(""), (true, None));
    assert_eq!(second_of_two(":order=decode-first"), (false, None));
}

#[test]
fn a_handshake_runs_out_of_time_as_a_transfer_does() {
    let failed = Some("transfer_failed".to_owned());
    assert_eq!(second_of_two(":order=decode-first:transfer_timeout=2s").1, failed);
    assert_eq!(second_of_two(":order=decode-first:transfer_timeout=60s").1, None);
}

#[test]
fn nothing_is_left_of_handshakes_whose_worker_dies() {
    let trace = crowded();
    for dies in [0, 1] {
        let cluster = "h100x3-1p2d:kv=20K:engine=session-slot:order=decode-first:transfer_timeout=4s:dead_peers=on";
        let mut config = config(&trace, cluster, "kv-aware");
        config.replay.start = Start::Concurrency(8);
        let at = |seconds: u64| Instant::ZERO + Duration::from_secs(seconds);
        config.faults = vec![
            (at(3), Fault::WorkerCrash(WorkerId(dies))),
            (at(6), Fault::WorkerRestart(WorkerId(dies))),
        ];
        // The checkers hold: every request ends, and no leg, block or fence is left.
        let ended = run(&trace, &config).run.requests;
        assert_eq!(ended.len(), trace.turn_count(), "worker {dies} dies");
    }
}
