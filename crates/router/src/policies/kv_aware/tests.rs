//! The score, the pin, admission, the fallback, the pause hint and the knobs, worked out by hand. A block is 16 tokens, a pool
//! 100,000, and 512 tokens of output are expected, unless a case says otherwise.

use super::super::LinkView;
use super::super::testing::{board, turn, with_parameters};
use super::*;
use crate::action::Path;
use crate::event::Role;
use homing_units::{RequestId, SessionId};

/// Workers 0 and 1 prefill, 2 to 4 decode.
const PD: [Role; 5] = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode, Role::Decode];

fn policy(text: &str) -> KvAware {
    with_parameters(text, |parameters| KvAwareConfig::parse(parameters).map(KvAware::new))
}

fn turn_of(session: u64, turn_index: u32, prompt_tokens: u32) -> TurnView {
    TurnView {
        request: RequestId(session * 100 + u64::from(turn_index)),
        session: SessionId(session),
        turn_index,
        prompt_tokens,
        new_family: turn_index == 0,
        was_resident: turn_index > 0,
        ..turn()
    }
}

/// Path, prefill and decode worker, and whether KV is kept.
type Sent = (Path, Option<u32>, u32, bool);

fn sent(choice: &Choice) -> Option<Sent> {
    let plan = choice.plan?;
    Some((plan.path, plan.prefill.map(|id| id.0), plan.decode.0, choice.keeps_kv))
}

fn send(policy: &mut KvAware, board: &Board, turn: &TurnView) -> Option<Sent> {
    sent(&policy.choose(board, turn))
}

/// Worker `at` holds so many tokens of the prompt, `own` of them the family's.
fn hold(board: &mut Board, at: usize, held: u32, own: u32) {
    board.workers[at].resident_tokens = held;
    board.workers[at].exclusive_tokens = own;
}

#[track_caller]
fn check_score(text: &str, set: impl FnOnce(&mut Board, &mut TurnView), expected: [f64; 3]) {
    let (mut board, mut turn) = (board(PD), turn_of(0, 0, 20_000));
    set(&mut board, &mut turn);
    let policy = policy(text);
    let decoders: Vec<_> = board.decoders().collect();
    let sum: u64 = decoders.iter().map(|worker| worker.assigned_requests).sum();
    let mean = sum as f64 / decoders.len() as f64;
    let scores: Vec<_> = decoders
        .iter()
        .map(|worker| policy.score(worker, &turn, mean))
        .collect();
    assert_eq!(scores, expected);
}

#[test]
fn scores_are_overlap_and_bonuses_in_blocks() {
    let assign = |board: &mut Board, assigned: [u64; 3]| {
        for (worker, assigned) in board.workers[2..].iter_mut().zip(assigned) {
            worker.assigned_requests = assigned;
        }
    };
    // 12,000 / 16 = 750 blocks of boilerplate, of which 160 / 16 = 10 are the family's own.
    let boilerplate = |board: &mut Board, _: &mut TurnView| hold(board, 2, 12_000, 160);
    check_score("", boilerplate, [750.0, 0.0, 0.0]);
    check_score("overlap=exclusive", boilerplate, [10.0, 0.0, 0.0]);
    // Host memory counts as holding: 8,000 + 4,000 tokens.
    let tiers = |board: &mut Board, _: &mut TurnView| {
        hold(board, 2, 8_000, 0);
        board.workers[2].host_tokens = 4_000;
    };
    check_score("", tiers, [750.0, 0.0, 0.0]);
    let home = |_: &mut Board, turn: &mut TurnView| turn.home = Some(WorkerId(3));
    check_score("", home, [0.0, 1.0, 0.0]);
    check_score("sticky_bonus=40", home, [0.0, 40.0, 0.0]);
    // E2's bindings: the mean is 1285 / 3, the cold worker lacks all of it, so it gets K whole; the others are above it or
    // lack nothing.
    let cold = |board: &mut Board, _: &mut TurnView| assign(board, [600, 685, 0]);
    check_score("", cold, [0.0, 0.0, 0.0]);
    check_score("load_floor=800", cold, [0.0, 0.0, 800.0]);
    // Mean 8: the second lacks 2 of 8, a quarter of K; the third lacks 6 of 8.
    let uneven = |board: &mut Board, _: &mut TurnView| assign(board, [16, 6, 2]);
    check_score("load_floor=100", uneven, [0.0, 25.0, 75.0]);
    // A mean below 1 does not blow the bonus up: mean 1/3, so a worker without any gets K / 3.
    let first = |board: &mut Board, _: &mut TurnView| assign(board, [1, 0, 0]);
    check_score("load_floor=3", first, [0.0, 1.0, 1.0]);
}

#[test]
fn boilerplate_herds_new_sessions_and_a_floor_above_it_spreads_them() {
    let check = |text: &str, expected: u32| {
        let mut board = board(PD);
        // Two warm workers, as in E2: 750 blocks of boilerplate on each.
        for (at, assigned) in [(2, 600), (3, 685)] {
            hold(&mut board, at, 12_000, 0);
            board.workers[at].assigned_requests = assigned;
        }
        let choice = policy(text).choose(&board, &turn_of(0, 0, 20_000));
        assert_eq!(
            choice.plan.map(|plan| plan.decode.0),
            Some(expected),
            "{text}: {choice:?}"
        );
    };
    // Of equal scores the one that was assigned less; never the cold one.
    check("", 2);
    check("load_floor=749", 2);
    check("load_floor=751", 4);
    check("overlap=exclusive", 4);
}

#[test]
fn a_session_stays_with_its_first_worker_for_ever_and_prefill_workers_take_turns() {
    let (mut policy, mut board) = (policy(""), board(PD));
    let mut one = |board: &Board, session, index| send(&mut policy, board, &turn_of(session, index, 20_000));
    assert_eq!(one(&board, 0, 0), Some((Path::Seed, Some(0), 2, true)));
    // Full, busy and with nothing of it: it stays, while another worker holds all of it.
    board.workers[2].kv_tokens_used = 100_000;
    board.workers[2].account.requests = 200;
    hold(&mut board, 3, 19_000, 19_000);
    assert_eq!(one(&board, 0, 1), Some((Path::Reseed, Some(1), 2, true)));
    assert_eq!(one(&board, 0, 2), Some((Path::Reseed, Some(0), 2, true)));
    // Another session goes where the overlap is.
    assert_eq!(one(&board, 1, 0), Some((Path::Seed, Some(1), 3, true)));
    // Its worker died: placed anew.
    board.workers[2].denies_alone = Some(Denied::Dead);
    assert_eq!(one(&board, 0, 3), Some((Path::Reseed, Some(0), 3, true)));
    // A prefill worker that cannot be reached is passed over.
    board.workers[1].denies_prefill = Some(Denied::Suspect);
    assert_eq!(one(&board, 2, 0), Some((Path::Seed, Some(0), 3, true)));
    // A decode worker that cannot be reached right now is waited for.
    board.workers[3].denies_alone = Some(Denied::Suspect);
    board.workers[3].denies_seed = Some(Denied::Suspect);
    assert_eq!(one(&board, 1, 1), None);
}

/// The second turn of a session whose first had 20,000 tokens, at worker 2.
#[track_caller]
fn check_second(text: &str, prompt_tokens: u32, set: impl FnOnce(&mut WorkerView), expected: Path) {
    let (mut policy, mut board) = (policy(text), board(PD));
    assert!(send(&mut policy, &board, &turn_of(0, 0, 20_000)).is_some());
    hold(&mut board, 2, 20_000, 8_000);
    set(&mut board.workers[2]);
    let choice = policy.choose(&board, &turn_of(0, 1, prompt_tokens));
    assert_eq!(choice.plan.map(|plan| plan.path), Some(expected), "{choice:?}");
    assert_eq!(choice.plan.map(|plan| plan.decode.0), Some(2));
}

#[test]
fn a_turn_is_appended_where_its_worker_admits_it() {
    check_second("", 21_000, |_| {}, Path::Append);
    // The tail: 28,192 - 20,000 = 8,192 tokens.
    check_second("", 28_192, |_| {}, Path::Append);
    check_second("", 28_193, |_| {}, Path::Reseed);
    check_second("direct_max=8193", 28_193, |_| {}, Path::Append);
    // Room: 93,488 + 1,000 + 512 = 95,000 of 100,000 is 0.95.
    check_second("", 21_000, |worker| worker.kv_tokens_used = 93_488, Path::Append);
    check_second("", 21_000, |worker| worker.kv_tokens_used = 93_489, Path::Reseed);
    check_second("rho=1", 21_000, |worker| worker.kv_tokens_used = 93_489, Path::Append);
    // Residency: of the first prompt's 1,250 blocks one is missing. Boilerplate alone is no history.
    check_second("", 21_000, |worker| worker.resident_tokens = 19_984, Path::Reseed);
    check_second("", 21_000, |worker| worker.resident_tokens = 19_985, Path::Append);
    check_second(
        "",
        21_000,
        |worker| (worker.resident_tokens, worker.exclusive_tokens) = (13_000, 0),
        Path::Reseed,
    );
}

#[test]
fn a_session_whose_worker_is_gone_is_placed_anew_unless_its_affinity_is_hard() {
    let check = |text: &str, expected: Option<u32>| {
        let (mut policy, mut board) = (policy(text), board(PD));
        assert!(send(&mut policy, &board, &turn_of(0, 0, 20_000)).is_some());
        (board.workers[2].denies_alone, board.workers[2].denies_seed) = (Some(Denied::Dead), Some(Denied::Dead));
        let choice = policy.choose(&board, &turn_of(0, 1, 21_000));
        assert_eq!(choice.plan.map(|plan| plan.decode.0), expected, "{text}: {choice:?}");
    };
    check("", Some(3));
    check("affinity=hard", None);
}

#[test]
fn a_session_moves_after_so_many_denials_for_room_in_a_row() {
    let check = |text: &str, denials: &[bool], expected: &[u32]| {
        let (mut policy, mut board) = (policy(text), board(PD));
        assert!(send(&mut policy, &board, &turn_of(0, 0, 20_000)).is_some());
        // What its first worker holds stays there; the others have assignments, so that the least assigned is known.
        hold(&mut board, 2, 20_000, 8_000);
        (board.workers[3].assigned_requests, board.workers[4].assigned_requests) = (5, 4);
        let homes = (1..).zip(denials).map(|(index, full)| {
            board.workers[2].kv_tokens_used = if *full { 99_000 } else { 0 };
            policy.choose(&board, &turn_of(0, index, 21_000)).plan.unwrap().decode.0
        });
        assert_eq!(homes.collect::<Vec<_>>(), expected, "{text}");
    };
    check("", &[true; 5], &[2; 5]);
    check("reject_threshold=2", &[true, true, true, true], &[2, 2, 4, 4]);
    check("reject_threshold=2", &[true, false, true, true, true], &[2, 2, 2, 2, 4]);
    check("reject_threshold=1", &[false, true, false], &[2, 2, 4]);
}

#[test]
fn a_turn_that_is_too_long_to_append_neither_counts_nor_starts_the_count_again() {
    let (mut policy, mut board) = (policy("reject_threshold=2"), board(PD));
    assert!(send(&mut policy, &board, &turn_of(0, 0, 20_000)).is_some());
    hold(&mut board, 2, 20_000, 8_000);
    let mut home = |index, prompt_tokens, used| {
        board.workers[2].kv_tokens_used = used;
        policy
            .choose(&board, &turn_of(0, index, prompt_tokens))
            .plan
            .unwrap()
            .decode
            .0
    };
    // Full, then a long tail with room for it, then full again: two denials for room, so the next turn is placed anew.
    assert_eq!(
        [home(1, 21_000, 99_000), home(2, 40_000, 0), home(3, 41_000, 99_000)],
        [2; 3]
    );
    assert_eq!(home(4, 41_000, 0), 3);
}

#[test]
fn the_only_decode_worker_keeps_a_session_that_it_denies() {
    let (mut policy, mut board) = (policy("reject_threshold=1"), board([Role::Prefill, Role::Decode]));
    board.workers[1].kv_tokens_used = 99_000;
    let decoders: Vec<_> = (0..4)
        .map(|index| send(&mut policy, &board, &turn_of(0, index, 20_000)).unwrap().2)
        .collect();
    assert_eq!(decoders, [1; 4]);
}

#[test]
fn turns_below_the_first_kept_one_and_sessions_above_the_cap_get_no_place() {
    let board = board(PD);
    let mut early = policy("seed_min_turn=2");
    assert_eq!(
        send(&mut early, &board, &turn_of(0, 0, 20_000)),
        Some((Path::Seed, Some(0), 2, false))
    );
    assert_eq!(
        send(&mut early, &board, &turn_of(0, 1, 20_500)),
        Some((Path::Reseed, Some(1), 2, true))
    );
    let one_decoder = super::super::testing::board([Role::Prefill, Role::Decode]);
    let mut capped = policy("soft_cap=2");
    let kept: Vec<_> = [0, 1, 2, 0]
        .into_iter()
        .map(|session| send(&mut capped, &one_decoder, &turn_of(session, 0, 20_000)).unwrap().3)
        .collect();
    assert_eq!(kept, [true, true, false, true]);
}

#[test]
fn a_healthy_prefill_worker_has_the_fewest_transfers_and_no_recent_failure() {
    let check = |text: &str, links: [(u32, LinkView); 2], expected: u32| {
        let mut board = board(PD);
        board.links = links
            .into_iter()
            .map(|(prefill, link)| ((WorkerId(prefill), WorkerId(2)), link))
            .collect();
        assert_eq!(
            send(&mut policy(text), &board, &turn_of(0, 0, 20_000)),
            Some((Path::Seed, Some(expected), 2, true)),
            "{text} {links:?}"
        );
    };
    let link = |transfers, failures| LinkView {
        transfers,
        failures,
        on_trial: failures > 0,
    };
    let busy = [(0, link(3, 0)), (1, link(2, 0))];
    check("", busy, 0);
    check("prefill=healthy", busy, 1);
    check("prefill=healthy", [(0, link(3, 0)), (1, link(0, 1))], 0);
    check("prefill=healthy", [(0, link(1, 0)), (1, link(1, 0))], 0);
}

#[test]
fn the_pause_hint_follows_the_report() {
    let check = |retracted: u32, usage_after: f64, transfer_queue: u32, expected: u64| {
        let worker = WorkerView {
            retracted,
            transfer_queue,
            ..super::super::testing::worker(0, Role::Decode)
        };
        assert_eq!(
            pause::report(&worker, usage_after),
            Duration::from_millis(expected),
            "{retracted} retracted, {usage_after} used, {transfer_queue} in the queue"
        );
    };
    check(0, 0.899, 7, 0);
    check(1, 0.0, 0, 1_500);
    check(1, 0.99, 30, 1_500);
    // 0.925 is 25 thousandths above, so 125 ms, at least 200; 0.975 is 75, so 375.
    check(0, 0.925, 0, 200);
    check(0, 0.975, 0, 375);
    check(0, 0.975, 30, 375);
    check(0, 1.5, 0, 2_000);
    check(0, 0.5, 8, 800);
    check(0, 0.5, 21, 2_000);
}

#[test]
fn a_turn_pauses_once_and_on_both_paths() {
    let check = |text: &str, resident: bool, expected: Option<u64>| {
        let (mut policy, mut board) = (policy(text), board(PD));
        assert!(send(&mut policy, &board, &turn_of(0, 0, 20_000)).is_some());
        if resident {
            hold(&mut board, 2, 20_000, 8_000);
        }
        board.workers[2].retracted = 1;
        let turn = turn_of(0, 1, 20_500);
        let choice = policy.choose(&board, &turn);
        assert_eq!(choice.pause, expected.map(Duration::from_millis), "{text}");
        assert_eq!(choice.plan.is_none(), expected.is_some(), "{text}");
        let paused = TurnView {
            waited: choice.pause.unwrap_or_default(),
            ..turn
        };
        let path = if resident { Path::Append } else { Path::Reseed };
        let sent = policy.choose(&board, &paused).plan;
        assert_eq!(sent.map(|plan| plan.path), Some(path), "it pauses once");
    };
    for resident in [true, false] {
        check("", resident, None);
        check("backpressure=on", resident, Some(1_500));
        check("backpressure=on:max_pause=0.7", resident, Some(700));
        check("backpressure=on:max_pause=0", resident, None);
    }
}

#[test]
fn a_drained_pause_lasts_until_there_is_room_and_is_looked_at_again() {
    // Ten answers decode with 60,000 tokens; 512 tokens of output are expected of each.
    let booked = |reserved_tokens, seeds| crate::Account {
        requests: 10 + seeds,
        reserved_tokens,
        decodes: 10,
        decode_tokens: 60_000,
        seeds,
        ..crate::Account::default()
    };
    let check = |account: crate::Account, expected_s: f64| {
        let (mut policy, mut board) = (policy("backpressure=drain:max_pause=30"), board(PD));
        assert!(send(&mut policy, &board, &turn_of(0, 0, 20_000)).is_some());
        board.workers[2].account = account;
        let choice = policy.choose(&board, &turn_of(0, 1, 20_500));
        let pause_s = choice.pause.map_or(0.0, |pause| pause.as_secs_f64());
        assert!(
            (pause_s - expected_s).abs() <= 0.001,
            "{pause_s}, expected {expected_s}"
        );
        assert_eq!(choice.plan.is_none(), expected_s > 0.0);
        let again = |waited| TurnView {
            waited,
            ..turn_of(0, 1, 20_500)
        };
        if expected_s > 0.0 {
            let later = policy.choose(&board, &again(Duration::from_secs(59)));
            assert!(later.plan.is_none(), "there is no room yet");
            let last = policy.choose(&board, &again(pause::PATIENCE));
            assert!(last.plan.is_some(), "its patience is over");
        }
    };
    let speed = super::super::testing::worker(2, Role::Decode).speed;
    let life_s = 512.0 * speed.decode_s(10.0, 60_000.0);
    // 95,000 of 100,000 tokens may be in flight, and this turn takes 20,500 and 512.
    check(booked(60_000, 0), 0.0);
    check(booked(79_988, 0), (79_988.0 + 21_012.0 - 95_000.0) * life_s / 60_000.0);
    check(booked(60_000, 7), 0.0);
    check(
        booked(60_000, 9),
        2.0 * (speed.setup_s + 20_500.0 * speed.moved_token_s),
    );
    // What is not decoding does not drain.
    check(
        crate::Account {
            decodes: 0,
            decode_tokens: 0,
            ..booked(90_000, 2)
        },
        30.0,
    );
    // Nobody is there to wait for.
    check(crate::Account::default(), 0.0);
}

#[test]
fn on_workers_that_do_both_its_worker_prefills_what_it_does_not_admit() {
    let mut policy = policy("");
    let mut board = board([Role::Both; 3]);
    assert_eq!(
        send(&mut policy, &board, &turn_of(0, 0, 20_000)),
        Some((Path::Local, None, 0, true))
    );
    hold(&mut board, 0, 20_000, 8_000);
    assert_eq!(
        send(&mut policy, &board, &turn_of(0, 1, 20_500)),
        Some((Path::Append, None, 0, true))
    );
}

#[test]
fn it_sends_at_once_asks_first_and_never_tries_again() {
    let at_once = Habits {
        admission: Admission::AtOnce,
        attempts: Some(1),
        request_timeout: None,
        order: Order::Arrival,
        probes: true,
        ..Habits::default()
    };
    assert_eq!(policy("").habits(), at_once);
    let request_timeout = Some(Duration::from_secs(180));
    assert_eq!(
        policy("request_timeout=180").habits(),
        Habits {
            request_timeout,
            ..at_once
        }
    );
}
