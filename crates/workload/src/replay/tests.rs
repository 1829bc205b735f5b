//! The replay against a naive model that knows the whole schedule, driven by a virtual clock.

use super::*;
use crate::generate::generate;
use crate::trace::{Session, Turn};
use proptest::prelude::*;

/// One turn that was replayed: when it was given and when it ended.
type Served = BTreeMap<TurnRef, (Instant, Instant)>;

/// Serves every turn in `service(turn)` and returns when it was given and ended.
fn drive(replay: &mut Replay, service: impl Fn(TurnRef) -> Duration) -> Served {
    let mut now = Instant::ZERO;
    let mut running = BTreeSet::new();
    let mut served = Served::new();
    let bound = 4 * replay.turn_count() + 4;
    for _ in 0..bound {
        while let Some(turn) = replay.poll_due(now) {
            let end = now + service(turn);
            running.insert((end, turn));
            assert_eq!(served.insert(turn, (now, end)), None, "{turn:?} was given twice");
        }
        assert_eq!(replay.in_flight() as usize, running.len());
        let next_end = running.first().map(|&(end, _)| end);
        // At equal times the end comes first; the order of two ends at one time is that of the turns.
        match (next_end, replay.next_due()) {
            (Some(end), due) if due.is_none_or(|due| end <= due) => {
                now = now.max(end);
                let (_, turn) = running.pop_first().expect("it has a first");
                replay.ended(now, turn);
            }
            (_, Some(due)) => now = now.max(due),
            (_, None) => break,
        }
    }
    assert!(
        replay.done(),
        "{} of {} turns after {bound} wake-ups",
        replay.turns_ended(),
        replay.turn_count()
    );
    served
}

/// Gaps and service times in the hundreds, so that ties are common.
fn turns() -> impl Strategy<Value = Vec<Turn>> {
    let turn = (
        0_u32..3,
        1_u32..100,
        proptest::collection::vec(any::<prop::sample::Index>(), 0..3),
        0_u64..4,
    );
    proptest::collection::vec(turn, 1..8).prop_map(|turns| {
        let mut made: Vec<Turn> = Vec::new();
        for (index, (agent, prompt_tokens, after, gap)) in turns.into_iter().enumerate() {
            let after = if index == 0 {
                Vec::new()
            } else {
                after.iter().map(|at| at.index(index) as u32).collect()
            };
            let gap = Duration::from_secs(gap * 100);
            made.push(Turn {
                agent,
                prompt_tokens,
                output_tokens: 1,
                content: Vec::new().into(),
                after,
                gap,
            });
        }
        made
    })
}

fn traces() -> impl Strategy<Value = Trace> {
    proptest::collection::vec((turns(), 0_u64..9), 1..8).prop_map(|sessions| {
        let session = |(turns, start)| Session {
            id: String::new(),
            start: Some(Duration::from_secs(start * 100)),
            turns,
        };
        Trace {
            name: "test".to_owned(),
            block_size: 100,
            sessions: sessions.into_iter().map(session).collect(),
        }
    })
}

fn service(turn: TurnRef) -> Duration {
    Duration::from_secs(100 * u64::from((turn.session * 7 + turn.turn * 3) % 5))
}

/// When the first `turns` turns of a session are given and end if it starts at `start`: the definition, by recursion.
fn naive_session(trace: &Trace, selected: Selected, start: Instant, time_scale: f64) -> Served {
    let mut served = Served::new();
    for index in 0..selected.turns as u32 {
        let turn = TurnRef {
            session: selected.session,
            turn: index,
        };
        let end_of = |&before: &u32| served[&TurnRef { turn: before, ..turn }].1;
        let ready = trace.turn(turn).after.iter().map(end_of).max().unwrap_or(start);
        let due = ready + scaled(trace.turn(turn).gap, time_scale);
        served.insert(turn, (due, due + service(turn)));
    }
    served
}

fn end_of(served: &Served) -> Instant {
    served
        .values()
        .map(|&(_, end)| end)
        .max()
        .expect("a session has a turn")
}

use super::selection::Selected;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn recorded_sessions_follow_the_definition(trace in traces(), scale in prop::sample::select(vec![0.5, 1.0, 10.0])) {
        let config = ReplayConfig { time_scale: scale, ..ReplayConfig::default() };
        let mut replay = Replay::new(&trace, &config).expect("a good configuration");
        let mut expected = Served::new();
        for (index, session) in trace.sessions.iter().enumerate() {
            let selected = Selected { session: index as u32, turns: session.turns.len() };
            let start = Instant::ZERO + scaled(session.start.expect("it has one"), scale);
            expected.extend(naive_session(&trace, selected, start, scale));
        }
        prop_assert_eq!(drive(&mut replay, service), expected);
    }

    #[test]
    fn a_closed_loop_starts_a_session_when_one_has_ended(trace in traces(), live in 1_u32..4, seed in 0_u64..9) {
        let config = ReplayConfig {
            start: Start::Concurrency(live),
            start_spread: Duration::ZERO,
            seed,
            ..ReplayConfig::default()
        };
        let mut replay = Replay::new(&trace, &config).expect("a good configuration");
        let order: Vec<Selected> =
            replay.sessions.iter().map(|live| Selected { session: live.session, turns: live.turns.len() }).collect();
        // A queue with so many servers: each takes the next session when it is free.
        let mut free = vec![Instant::ZERO; live as usize];
        let mut expected = Served::new();
        for selected in order {
            let first = (0..free.len()).min_by_key(|&server| free[server]).expect("at least one");
            let served = naive_session(&trace, selected, free[first], 1.0);
            free[first] = end_of(&served);
            expected.extend(served);
        }
        prop_assert_eq!(drive(&mut replay, service), expected);
    }

    #[test]
    fn limits_keep_the_causal_order(
        trace in traces(),
        start in prop::sample::select(vec![Start::Recorded, Start::Rate(0.01), Start::Concurrency(2)]),
        max_inflight in 1_u32..4,
        max_turns in proptest::option::of(1_u32..4),
        max_context in proptest::option::of(1_u32..100),
        sessions in proptest::option::of(1_u32..4),
    ) {
        let config = ReplayConfig {
            start, max_turns, max_context, sessions, max_inflight: Some(max_inflight), ..ReplayConfig::default()
        };
        let least = trace.sessions.iter().map(|session| session.turns[0].prompt_tokens).min().unwrap_or(0);
        let mut replay = match (Replay::new(&trace, &config), max_context) {
            (Ok(replay), limit) => {
                prop_assert!(limit.is_none_or(|limit| limit >= least));
                replay
            }
            (Err(error), limit) => {
                prop_assert_eq!(error, ReplayError::Nothing { limit: limit.unwrap_or(u32::MAX), least });
                prop_assert!(limit < Some(least));
                return Ok(());
            }
        };
        let left_out = replay.left_out();
        let served = drive(&mut replay, service);
        // Everything is served once or counted as left out.
        let taken = trace.sessions.len() - left_out.sessions_over_limit as usize;
        let turns: usize = trace.sessions[..taken].iter().map(|session| session.turns.len()).sum();
        prop_assert!(left_out.sessions_over_limit == 0 || Some(replay.session_count() as u32) == sessions);
        prop_assert_eq!(served.len() as u64 + left_out.turns + left_out.turns_over_limit, turns as u64);
        for (&turn, &(given, _)) in &served {
            let spec = trace.turn(turn);
            prop_assert!(spec.prompt_tokens <= max_context.unwrap_or(u32::MAX));
            for &before in &spec.after {
                let (_, ended) = served[&TurnRef { turn: before, ..turn }];
                prop_assert!(given >= ended + spec.gap, "{:?} was given before its time", turn);
            }
            let others = served.values().filter(|&&(from, to)| from <= given && given < to).count();
            prop_assert!(others <= max_inflight as usize, "{} requests in flight at {}", others, given);
            let roots = served.keys().filter(|other| other.session == turn.session && trace.turn(**other).agent == 0);
            prop_assert!(roots.count() <= max_turns.unwrap_or(u32::MAX) as usize);
        }
    }
}

fn turn(agent: u32, prompt_tokens: u32, after: &[u32]) -> Turn {
    let (content, gap) = (Vec::new(), Duration::ZERO);
    Turn {
        agent,
        prompt_tokens,
        output_tokens: 1,
        content: content.into(),
        after: after.to_vec(),
        gap,
    }
}

fn trace(sessions: Vec<Vec<Turn>>) -> Trace {
    let session = |turns| Session {
        id: String::new(),
        start: None,
        turns,
    };
    Trace {
        name: "test".to_owned(),
        block_size: 1000,
        sessions: sessions.into_iter().map(session).collect(),
    }
}

fn closed() -> ReplayConfig {
    ReplayConfig {
        start: Start::Concurrency(1),
        ..ReplayConfig::default()
    }
}

#[test]
fn limits_count_what_they_leave_out() {
    let long = vec![turn(0, 500, &[]), turn(0, 900, &[0])];
    let grows = vec![
        turn(0, 100, &[]),
        turn(1, 50, &[0]),
        turn(0, 200, &[1]),
        turn(0, 400, &[2]),
        turn(0, 80, &[3]),
    ];
    let small = vec![turn(0, 100, &[])];
    let trace = trace(vec![long, grows, small.clone(), small]);
    let check = |config: ReplayConfig, turns: u64, expected: LeftOut| {
        let replay = Replay::new(&trace, &config).expect("a good configuration");
        assert_eq!(
            (replay.turn_count(), replay.left_out()),
            (turns, expected),
            "for {config:?}"
        );
    };
    check(closed(), 9, LeftOut::default());
    check(
        ReplayConfig {
            max_context: Some(399),
            ..closed()
        },
        5,
        LeftOut {
            sessions: 1,
            sessions_shortened: 1,
            turns: 4,
            ..LeftOut::default()
        },
    );
    check(
        ReplayConfig {
            max_turns: Some(1),
            ..closed()
        },
        5,
        LeftOut {
            turns_over_limit: 4,
            ..LeftOut::default()
        },
    );
    check(
        ReplayConfig {
            max_turns: Some(1),
            max_context: Some(399),
            sessions: Some(1),
            ..closed()
        },
        2,
        LeftOut {
            sessions: 1,
            turns: 1,
            turns_over_limit: 4,
            sessions_over_limit: 2,
            ..LeftOut::default()
        },
    );
}

#[test]
fn the_seed_orders_sessions_and_draws_starts_and_nothing_else() {
    let sessions = (1..40).map(|tokens| vec![turn(0, tokens, &[])]).collect();
    let trace = trace(sessions);
    let served = |config: &ReplayConfig| {
        drive(&mut Replay::new(&trace, config).expect("a good configuration"), |_| {
            Duration::from_secs(1)
        })
    };
    for start in [Start::Concurrency(39), Start::Concurrency(4), Start::Rate(2.0)] {
        let config = |seed| ReplayConfig {
            start,
            seed,
            ..ReplayConfig::default()
        };
        assert_eq!(served(&config(1)), served(&config(1)), "{start:?}");
        assert_ne!(served(&config(1)), served(&config(2)), "{start:?}");
        let turns = |seed| served(&config(seed)).into_keys().collect::<Vec<_>>();
        assert_eq!(turns(1), turns(2), "{start:?}");
    }
    let last = served(&ReplayConfig {
        start: Start::Rate(2.0),
        ..ReplayConfig::default()
    })
    .into_values()
    .max();
    let last = last.expect("there are turns").0.as_secs_f64();
    assert!(
        (12.0..28.0).contains(&last),
        "39 sessions at 2/s take about 20 s, not {last} s"
    );
}

#[test]
fn nonsense_is_refused_with_what_was_expected() {
    let trace = trace(vec![vec![turn(0, 1, &[])]]);
    let check = |config: ReplayConfig, expected: &str| {
        let error = Replay::new(&trace, &config).expect_err("nonsense");
        assert_eq!(error.to_string(), expected, "for {config:?}");
    };
    check(
        ReplayConfig::default(),
        "trace `test` has no start times, expected a rate or a number of live sessions",
    );
    check(
        ReplayConfig {
            time_scale: 0.0,
            ..closed()
        },
        "time scale `0`, expected a number above 0",
    );
    check(
        ReplayConfig {
            time_scale: f64::NAN,
            ..closed()
        },
        "time scale `NaN`, expected a number above 0",
    );
    check(
        ReplayConfig {
            start: Start::Rate(-1.0),
            ..closed()
        },
        "rate `-1`, expected sessions per second above 0",
    );
    check(
        ReplayConfig {
            start: Start::Concurrency(0),
            ..closed()
        },
        "live sessions `0`, expected at least 1",
    );
    check(
        ReplayConfig {
            max_turns: Some(0),
            ..closed()
        },
        "turns a session `0`, expected at least 1",
    );
}

#[test]
fn the_default_start_is_recorded_where_there_are_times() {
    let mut trace = trace(vec![vec![turn(0, 1, &[])]]);
    assert_eq!(Start::default_for(&trace, 8), Start::Concurrency(32));
    trace.sessions[0].start = Some(Duration::ZERO);
    assert_eq!(Start::default_for(&trace, 8), Start::Recorded);
}

#[test]
fn a_kept_order_is_the_traces_whatever_the_seed() {
    let trace = generate("gen:agent:sessions=12:turns=2", 1).expect("a good name");
    let order = |keep_order: bool, seed: u64| -> Vec<u32> {
        let config = ReplayConfig {
            start: Start::Concurrency(1),
            start_spread: Duration::ZERO,
            keep_order,
            seed,
            ..ReplayConfig::default()
        };
        let mut replay = Replay::new(&trace, &config).expect("a good configuration");
        let mut sessions: Vec<u32> = Vec::new();
        while !replay.done() {
            let now = replay.next_due().expect("a turn is due while some are left");
            let turn = replay.poll_due(now).expect("it is due");
            if sessions.last() != Some(&turn.session) {
                sessions.push(turn.session);
            }
            replay.ended(now, turn);
        }
        sessions
    };
    assert_eq!(order(true, 1), (0..12).collect::<Vec<_>>());
    assert_eq!(order(true, 2), order(true, 1));
    assert_ne!(order(false, 2), order(false, 1));
}
