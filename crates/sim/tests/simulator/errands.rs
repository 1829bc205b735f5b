//! What is carried while no client waits for it: base content to each worker once, and a session's KV in the gap before its turn.

use crate::common::{BLOCK, config, run};
use homing_report::logs::{LogKind, TransferLine};
use homing_report::{Path, RequestRecord};
use homing_router::action::Errand;
use homing_sim::{Fault, SimConfig, SimOutcome};
use homing_units::{Duration, Instant, WorkerId};
use homing_workload::{Session, Trace, Turn};
use std::collections::BTreeSet;

/// Sessions that begin alike, with `shared` blocks, and then have `own` blocks of their own; each turn adds ten.
fn alike(sessions: u64, turns: u32, shared: u64, own: u64) -> Trace {
    let turn = |session: u64, index: u32| {
        let own = (0..own + u64::from(index) * 10).map(|block| (session + 1) << 32 | block);
        let content: Vec<u64> = (0..shared).chain(own).collect();
        Turn {
            agent: 0,
            prompt_tokens: u32::try_from(content.len()).expect("small") * BLOCK + 5,
            output_tokens: 20,
            content: content.into(),
            after: index.checked_sub(1).into_iter().collect(),
            gap: Duration::from_secs(5),
        }
    };
    let session = |session: u64| Session {
        id: format!("session-{session}"),
        start: Some(Duration::from_millis(session * 700)),
        turns: (0..turns).map(|index| turn(session, index)).collect(),
    };
    Trace {
        name: "alike".to_owned(),
        block_size: BLOCK,
        sessions: (0..sessions).map(session).collect(),
    }
}

/// The transfers of errands.
fn carried(outcome: &SimOutcome) -> Vec<TransferLine> {
    let lines = outcome.logs.text(LogKind::KvTransfers).lines();
    let all = lines.map(|line| serde_json::from_str::<TransferLine>(line).expect(line));
    all.filter(|line| line.request >= Errand::FIRST_ID.0).collect()
}

fn logged(trace: &Trace, cluster: &str, policy: &str) -> SimConfig {
    let mut config = config(trace, cluster, policy);
    config.logs = true;
    config.thorough = true;
    config
}

#[test]
fn base_content_reaches_each_decode_worker_exactly_once() {
    let trace = alike(4, 3, 500, 20);
    let config = logged(&trace, "h200x8-dp", "homing:errands=on");
    let outcome = run(&trace, &config);
    let carried = carried(&outcome);
    let served: BTreeSet<&str> = outcome
        .run
        .requests
        .iter()
        .filter_map(|request| request.worker.as_deref())
        .collect();
    let reached: BTreeSet<&str> = carried.iter().map(|line| line.to.as_str()).collect();
    assert_eq!(
        (served.len(), reached.len(), carried.len()),
        (4, 4, 4),
        "{served:?} {carried:?}"
    );
    assert!(
        served.is_disjoint(&reached),
        "whoever serves has it: {served:?} {reached:?}"
    );
    assert!(
        carried
            .iter()
            .all(|line| line.tokens == 500 * BLOCK && line.error.is_none())
    );
    let off = logged(&trace, "h200x8-dp", "homing:errands=on:base=off");
    assert_eq!(run(&trace, &off).logs.text(LogKind::KvTransfers), "");
}

/// All sessions live at the only worker that is there at first; then the other one comes.
fn cold_worker(policy: &str) -> SimOutcome {
    let trace = alike(6, 12, 0, 1_500);
    let mut config = logged(&trace, "h200x2-dp:kv=100000", policy);
    let second = WorkerId(1);
    let at = |seconds| Instant::ZERO + Duration::from_secs(seconds);
    config.faults = vec![
        (at(0), Fault::WorkerCrash(second)),
        (at(15), Fault::WorkerRestart(second)),
    ];
    run(&trace, &config)
}

/// A turn that was served elsewhere than the one before it by a worker that had its history: that one and the one before.
fn moved_in_gaps(requests: &[RequestRecord]) -> Vec<(&RequestRecord, &RequestRecord)> {
    let before = |turn: &RequestRecord| {
        requests
            .iter()
            .find(|other| other.session == turn.session && other.turn + 1 == turn.turn)
    };
    let pairs = requests.iter().filter_map(|turn| Some((before(turn)?, turn)));
    pairs
        .filter(|(last, turn)| last.worker != turn.worker && turn.path == Some(Path::Append))
        .collect()
}

#[test]
fn a_session_moves_in_the_gap_and_its_next_turn_appends_there() {
    let outcome = cold_worker("homing:errands=on");
    let carried = carried(&outcome);
    let moved = moved_in_gaps(&outcome.run.requests);
    assert!(!moved.is_empty(), "{carried:?}");
    for (last, turn) in moved {
        let seconds = |at: Instant| (at - Instant::ZERO).as_secs_f64();
        let (ended, came) = (seconds(last.end), seconds(turn.arrival));
        let in_gap = |line: &&TransferLine| {
            Some(&line.from) == last.worker.as_ref()
                && Some(&line.to) == turn.worker.as_ref()
                && ended <= line.t
                && line.t + line.duration_s <= came
        };
        let line = carried.iter().find(in_gap);
        let line = line.unwrap_or_else(|| panic!("{last:?} {turn:?} {carried:?}"));
        assert_eq!(line.tokens, last.prompt_tokens / BLOCK * BLOCK);
        assert!(turn.cached_tokens >= line.tokens, "{turn:?}");
    }
    let off = cold_worker("homing:errands=on:gaps=off");
    assert_eq!(
        moved_in_gaps(&off.run.requests).len(),
        0,
        "nothing is carried where that is off"
    );
}

#[test]
fn a_worker_that_dies_while_something_is_carried_to_it_leaves_nothing_behind() {
    let trace = alike(4, 3, 2_000, 20);
    let mut config = logged(&trace, "h200x8-dp", "homing:errands=on");
    let first = carried(&run(&trace, &config))
        .first()
        .expect("something is carried")
        .clone();
    let dies = |name: &str| WorkerId(name[1..].parse().expect("a worker's name"));
    for name in [&first.to, &first.from] {
        let middle = Instant::ZERO + Duration::from_secs_f64(first.t + first.duration_s / 2.0);
        config.faults = vec![(middle, Fault::WorkerCrash(dies(name)))];
        let outcome = run(&trace, &config);
        assert!(outcome.run.requests.iter().all(|request| request.error.is_none()));
        let failed = carried(&outcome).iter().filter(|line| line.error.is_some()).count();
        assert_eq!(failed, 1, "{name} died at {middle:?}");
    }
}
