//! What the planner chooses, and what its terms come to.

use super::cost::Cost;
use super::estimate::{Estimate, Place};
use super::*;
use crate::action::Path;
use crate::admission::Denied;
use crate::event::Role;
use crate::policies::testing::{board, turn};
use crate::policies::{LinkView, Plan, PolicySpec};
use crate::speed::{Speed, pairs};
use homing_units::{Duration, WorkerId};

const PD: [Role; 4] = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
const DP: [Role; 3] = [Role::Both; 3];

/// A later turn of a session whose history of so many tokens worker `at` holds.
fn later(board: &mut Board, at: usize, held: u32) -> TurnView {
    board.workers[at].resident_tokens = held;
    board.workers[at].exclusive_tokens = held / 2;
    TurnView {
        new_family: false,
        was_resident: true,
        home: Some(board.workers[at].id),
        ..turn()
    }
}

/// Worker `at` has so many requests of 20,000 tokens that decode.
fn busy(board: &mut Board, at: usize, requests: u32) {
    let worker = &mut board.workers[at];
    worker.kv_tokens = 10_000_000;
    worker.account.requests = requests;
    worker.account.decodes = requests;
    worker.account.decode_tokens = u64::from(requests) * 20_000;
    worker.account.reserved_tokens = u64::from(requests) * 20_000;
}

/// Worker `at` has so many tokens of a long prompt to prefill.
fn behind(board: &mut Board, at: usize, tokens: u32) {
    let worker = &mut board.workers[at];
    worker.account.requests += 1;
    worker.account.pending_pairs = (pairs(tokens, tokens) / 1e6) as u64;
    if worker.role == Role::Prefill {
        worker.account.prefill_tokens = u64::from(tokens);
    } else {
        worker.account.append_tokens = u64::from(tokens);
    }
}

#[track_caller]
fn check<const N: usize>(
    roles: [Role; N],
    set: impl FnOnce(&mut Board) -> TurnView,
    expected: Option<(Path, Option<u32>, u32)>,
) -> String {
    let mut board = board(roles);
    let turn = set(&mut board);
    let choice = Homing::new(HomingConfig::default()).choose(&board, &turn);
    let plan = choice
        .plan
        .map(|plan: Plan| (plan.path, plan.prefill.map(|id| id.0), plan.decode.0));
    assert_eq!(plan, expected, "{} {:?}", choice.reason, choice.considered);
    if let Some(plan) = choice.plan {
        assert_eq!(choice.considered[0].plan, plan, "the chosen one comes first");
    }
    choice.reason
}

#[test]
fn of_places_that_cost_the_same_the_one_where_the_fewest_live_takes_a_new_session() {
    let lives = |board: &mut Board, live: [u32; 3], homed: [u32; 3]| {
        for (worker, (live, homed)) in board.workers.iter_mut().zip(live.into_iter().zip(homed)) {
            (worker.live_sessions, worker.homed_sessions) = (live, homed);
        }
        turn()
    };
    let on = |worker| Some((Path::Local, None, worker));
    check(DP, |board| lives(board, [1, 1, 0], [1, 1, 1]), on(2));
    check(DP, |board| lives(board, [0; 3], [5, 3, 4]), on(1));
    check(DP, |board| lives(board, [0; 3], [3; 3]), on(0));
    // What is clearly dearer does not become cheaper by having fewer.
    let behind_and_empty = |board: &mut Board| {
        behind(board, 2, 100_000);
        lives(board, [1, 1, 0], [1, 1, 0])
    };
    check(DP, behind_and_empty, on(0));
}

#[test]
fn what_a_worker_holds_is_appended_there() {
    let reason = check(PD, |board| later(board, 3, 19_000), Some((Path::Append, None, 3)));
    assert!(reason.starts_with("at home: first 0.0"), "{reason}");
    check(DP, |board| later(board, 2, 19_000), Some((Path::Append, None, 2)));
    // Others that are idle draw nobody away.
    let company = |board: &mut Board| {
        busy(board, 2, 1);
        later(board, 2, 19_000)
    };
    check(DP, company, Some((Path::Append, None, 2)));
}

#[test]
fn a_heavy_tail_goes_where_it_harms_least() {
    // Half of 20,000 tokens are lacking: more than a decode worker's budget.
    check(PD, |board| later(board, 3, 10_000), Some((Path::Reseed, Some(0), 3)));
    // Beside 20 others it would stall them for a third of a second each.
    let crowd = |board: &mut Board| {
        busy(board, 3, 20);
        busy(board, 2, 20);
        later(board, 3, 10_000)
    };
    check(PD, crowd, Some((Path::Reseed, Some(0), 3)));
    // A tail that is longer than all of the history does not make the session homeless: a place whose company is a little
    // less draws it away from where nothing is known of it, but not from its home.
    let longer = |history_tokens: u32| {
        move |board: &mut Board| {
            busy(board, 3, 2);
            busy(board, 2, 1);
            TurnView {
                history_tokens,
                ..later(board, 3, 8_000)
            }
        }
    };
    check(PD, longer(8_000), Some((Path::Reseed, Some(0), 3)));
    check(PD, longer(0), Some((Path::Reseed, Some(0), 2)));
    // Far behind, the prefill workers do not help.
    let far_behind = |board: &mut Board| {
        behind(board, 0, 90_000);
        behind(board, 1, 90_000);
        busy(board, 3, 4);
        busy(board, 2, 4);
        later(board, 3, 10_000)
    };
    check(PD, far_behind, Some((Path::Append, None, 3)));
}

#[test]
fn without_a_home_the_least_cost_wins() {
    let crowd = |board: &mut Board| {
        busy(board, 2, 8);
        busy(board, 3, 8);
        turn()
    };
    check(PD, crowd, Some((Path::Seed, Some(0), 2)));
    let queued = |board: &mut Board| {
        behind(board, 0, 20_000);
        crowd(board)
    };
    check(PD, queued, Some((Path::Seed, Some(1), 2)));
    let failing = |board: &mut Board| {
        link(board, (0, 2), 0, 1);
        crowd(board)
    };
    check(PD, failing, Some((Path::Seed, Some(1), 2)));
    let no_transfer = |board: &mut Board| TurnView {
        may_transfer: false,
        ..crowd(board)
    };
    check(PD, no_transfer, Some((Path::Local, None, 2)));
    check(DP, |_| turn(), Some((Path::Local, None, 0)));
    let lived_in = |board: &mut Board| {
        board.workers[0].live_sessions = 1;
        board.workers[1].live_sessions = 2;
        turn()
    };
    check(DP, lived_in, Some((Path::Local, None, 2)));
}

/// What is known of a link whose last transfer failed.
fn link(board: &mut Board, (from, to): (u32, u32), transfers: u32, failures: u32) {
    let view = LinkView {
        transfers,
        failures,
        on_trial: true,
    };
    board.links.insert((WorkerId(from), WorkerId(to)), view);
}

#[test]
fn a_doubtful_link_is_left_alone_while_another_will_do() {
    // However far behind the other prefill worker is.
    let far_behind = |board: &mut Board| {
        behind(board, 1, 400_000);
        busy(board, 3, 200);
        turn()
    };
    check(PD, far_behind, Some((Path::Seed, Some(0), 2)));
    let with = |transfers, failures| {
        move |board: &mut Board| {
            link(board, (0, 2), transfers, failures);
            far_behind(board)
        }
    };
    let alone = Some((Path::Local, None, 2));
    check(PD, with(0, 1), alone);
    // It is tried again once its failure is old, by one transfer at a time.
    check(PD, with(1, 0), alone);
    check(PD, with(0, 0), Some((Path::Seed, Some(0), 2)));
    // Where there is no other way, it is a way.
    let both = |board: &mut Board| {
        board.workers[2].denies_alone = Some(Denied::AppendTokens);
        board.workers[3].denies_alone = Some(Denied::AppendTokens);
        for between in [(0, 2), (1, 2), (0, 3), (1, 3)] {
            link(board, between, 0, 1);
        }
        turn()
    };
    check(PD, both, Some((Path::Seed, Some(0), 2)));
}

#[test]
fn boilerplate_never_decides_where_a_session_lives() {
    let boilerplate = |board: &mut Board| {
        board.workers[2].resident_tokens = 15_000;
        board.workers[2].live_sessions = 1;
        turn()
    };
    check(DP, boilerplate, Some((Path::Local, None, 0)));
}

#[test]
fn a_home_is_left_with_the_kv_when_that_pays() {
    let crowded = |requests: u32| {
        move |board: &mut Board| {
            busy(board, 0, 2);
            busy(board, 1, 2);
            busy(board, 2, requests);
            TurnView {
                prompt_tokens: 80_000,
                ..later(board, 2, 79_500)
            }
        }
    };
    check(DP, crowded(3), Some((Path::Append, None, 2)));
    let reason = check(DP, crowded(60), Some((Path::Migrate, Some(2), 0)));
    assert!(reason.starts_with("leaves home"), "{reason}");
    let alone = |board: &mut Board| TurnView {
        may_transfer: false,
        ..crowded(200)(board)
    };
    check(DP, alone, Some((Path::Local, None, 0)));
}

/// What is pulled still needs its last token computed, behind all that is prefilled there.
#[test]
fn a_session_is_not_moved_behind_a_long_prefill() {
    let mut board = board(DP);
    let turn = later(&mut board, 0, 19_900);
    behind(&mut board, 1, 60_000);
    let (config, to) = (HomingConfig::default(), WorkerId(1));
    let estimate = Estimate::new(&config, &board, &turn, 0.5);
    let queue_s = estimate.places[1].queue_s;
    let plans = plans::all(&estimate);
    let moved = plans
        .iter()
        .find(|plan| plan.considered.plan.path == Path::Migrate && plan.considered.plan.decode == to)
        .expect("its KV could be moved there");
    assert!(
        queue_s > 1.0 && moved.cost.first_s > queue_s,
        "{}, {queue_s} s behind",
        moved.cost
    );
}

#[test]
fn a_home_without_room_is_waited_for_as_long_as_leaving_costs_more() {
    let full = |waited_ms: u64| {
        move |board: &mut Board| {
            let turn = later(board, 2, 19_000);
            board.workers[2].denies_alone = Some(Denied::PoolFull);
            board.workers[2].denies_export = Some(Denied::PoolFull);
            TurnView {
                waited: Duration::from_millis(waited_ms),
                ..turn
            }
        }
    };
    // Computing 19,000 tokens anew takes about half a second more.
    check(DP, full(200), None);
    check(DP, full(1_000), Some((Path::Local, None, 0)));
    // A short tail waits for the long ones that are prefilled at its home, rather than go over a prefill worker that is behind.
    let behind_others = |waited_ms: u64| {
        move |board: &mut Board| {
            let turn = later(board, 2, 19_900);
            board.workers[2].denies_export = Some(Denied::AppendTokens);
            board.workers[2].denies_alone = Some(Denied::AppendTokens);
            board.workers[3].denies_alone = Some(Denied::AppendTokens);
            behind(board, 0, 60_000);
            behind(board, 1, 60_000);
            TurnView {
                waited: Duration::from_millis(waited_ms),
                ..turn
            }
        }
    };
    check(PD, behind_others(500), None);
    let reason = check(PD, behind_others(9_000), Some((Path::Reseed, Some(0), 2)));
    assert!(reason.starts_with("waits no longer for home"), "{reason}");
    let dead = |board: &mut Board| {
        let turn = later(board, 2, 19_000);
        board.workers[2].denies_alone = Some(Denied::Dead);
        board.workers[2].denies_export = Some(Denied::Dead);
        turn
    };
    check(DP, dead, Some((Path::Local, None, 0)));
}

#[test]
fn a_session_waits_while_each_pool_is_wanted_by_those_who_are_expected_back() {
    let wanted = |tokens: [u64; 3], waited_s: u64| {
        move |board: &mut Board| {
            for (worker, tokens) in board.workers.iter_mut().zip(tokens) {
                worker.live_own_tokens = tokens;
                worker.live_sessions = 3;
            }
            TurnView {
                waited: Duration::from_secs(waited_s),
                expected_gap_s: 0.5,
                ..turn()
            }
        }
    };
    check(DP, wanted([90_000; 3], 0), None);
    check(DP, wanted([90_000, 60_000, 90_000], 0), Some((Path::Local, None, 1)));
    check(DP, wanted([95_000, 90_000, 96_000], 150), Some((Path::Local, None, 1)));
    // Where sessions pause for long there is time to prefill all of their histories each time: nobody waits.
    let seldom = |board: &mut Board| TurnView {
        expected_gap_s: 10.0,
        ..wanted([90_000; 3], 0)(board)
    };
    check(DP, seldom, Some((Path::Local, None, 0)));
    // What lies in host memory comes back fast: nobody waits.
    let spilling = |board: &mut Board| {
        board.workers.iter_mut().for_each(|worker| worker.spills = true);
        wanted([90_000; 3], 0)(board)
    };
    check(DP, spilling, Some((Path::Local, None, 0)));
    // Whoever holds the history goes on.
    let holds = |board: &mut Board| {
        let turn = wanted([90_000; 3], 0)(board);
        TurnView {
            waited: turn.waited,
            ..later(board, 1, 15_000)
        }
    };
    check(DP, holds, Some((Path::Append, None, 1)));
}

#[test]
fn decode_workers_may_be_spared_whatever_it_costs() {
    let mut board = board(PD);
    let config = HomingConfig {
        local_tokens: 8,
        ..HomingConfig::default()
    };
    let short = TurnView {
        prompt_tokens: 100,
        ..turn()
    };
    let path = |board: &Board| Homing::new(config).choose(board, &short).plan.map(|plan| plan.path);
    assert_eq!(path(&board), Some(Path::Seed));
    board.workers.retain(|worker| worker.role == Role::Decode);
    assert_eq!(path(&board), Some(Path::Local));
}

/// What the turn costs at a place without anybody's help.
fn alone(estimate: &Estimate<'_>, place: &Place<'_>) -> Cost {
    terms::all(estimate, place, &terms::Here::new(estimate, place), None)
}

#[test]
fn the_terms_are_what_their_derivations_say() {
    let mut board = board(DP);
    busy(&mut board, 1, 10);
    let turn = later(&mut board, 1, 15_000);
    let config = HomingConfig::default();
    let estimate = Estimate::new(&config, &board, &turn, 0.5);
    let (speed, place) = (Speed::default(), &estimate.places[1]);
    let cost = alone(&estimate, place);
    let near = |got: f64, expected: f64| assert!((got - expected).abs() < 1e-9, "{got}, expected {expected}");
    let tail = pairs(5_000, 20_000);
    near(
        cost.first_s,
        speed.front_s + speed.prefill_s(5_000.0, tail, &speed.beside(10.0, 200_000.0)),
    );
    near(cost.own_s, 512.0 * speed.decode_s(11.0, 220_000.0));
    let slower = speed.decode_s(11.0, 220_000.0) - speed.decode_s(10.0, 200_000.0);
    near(
        cost.others_s,
        10.0 * (256.0 * slower + speed.stall_s(5_000.0, tail, &speed.beside(10.0, 200_000.0))),
    );
    near(cost.evict_s, 0.0);
    let holder = plans::all(&estimate)
        .into_iter()
        .find(|plan| plan.considered.plan.path == Path::Migrate);
    let source = holder.expect("the history can be moved").cost;
    let moved = speed.front_s + speed.setup_s + 20_000.0 * speed.moved_token_s;
    near(source.first_s, cost.first_s + moved);
    near(
        source.others_s,
        10.0 * speed.stall_s(5_000.0, tail, &speed.beside(10.0, 200_000.0)),
    );
}

#[test]
fn what_is_displaced_counts_as_far_as_it_is_wanted_again() {
    let evict = |live: u64, cached: u64, spills: bool| {
        let mut board = board(DP);
        board.workers[0].live_own_tokens = live;
        board.workers[0].cached_tokens = cached;
        board.workers[0].spills = spills;
        let (config, turn) = (HomingConfig::default(), turn());
        let estimate = Estimate::new(&config, &board, &turn, 0.0);
        alone(&estimate, &estimate.places[0]).evict_s
    };
    assert_eq!(evict(90_000, 0, false), 0.0, "there is room yet");
    assert_eq!(evict(70_000, 100_000, false), 0.0, "nobody wants it again");
    let (some, all) = (evict(85_000, 100_000, false), evict(300_000, 100_000, false));
    assert!(0.0 < some && some < all, "{some} {all}");
    assert!(evict(300_000, 100_000, true) < all / 4.0, "a reload is faster");
}

#[test]
fn told_speeds_count_for_all_workers_alike() {
    let slow = Speed {
        base_s: 0.2,
        ..Speed::default()
    };
    let choose = |config: &str| {
        let mut board = board(DP);
        board.workers[0].speed = slow;
        let spec: PolicySpec = config.parse().expect("a policy");
        let choice = spec.build().choose(&board, &turn());
        choice.plan.map(|plan| plan.decode.0)
    };
    assert_ne!(choose("homing"), Some(0), "one that is known to be slow is left alone");
    assert_eq!(choose("homing:speed=h100"), Some(0), "the first of equals");
}

#[test]
fn a_long_prefill_counts_for_those_who_come_meanwhile() {
    let behind = |sessions: u32, held: u32, queued: u32| {
        let mut board = board(DP);
        board.workers[0].live_sessions = sessions;
        let turn = later(&mut board, 0, held);
        if queued > 0 {
            behind(&mut board, 0, queued);
        }
        let (config, speed) = (HomingConfig::default(), Speed::default());
        let estimate = Estimate::new(&config, &board, &turn, 0.5);
        let prefill_s = estimate.places[0].prefill_s(20_000 - held, 20_000);
        let queue_s = speed.prefill_s(f64::from(queued), pairs(queued, queued), &speed.beside(0.0, 0.0));
        (alone(&estimate, &estimate.places[0]).behind_s, prefill_s, queue_s)
    };
    // Of 20 live sessions half are idle; four in five of these come back, after ten seconds on average.
    let (cost_s, prefill_s, _) = behind(20, 5_000, 0);
    let expected_s = 0.8 * prefill_s * prefill_s / 2.0;
    assert!((cost_s - expected_s).abs() < 1e-9, "{cost_s}, expected {expected_s}");
    assert_eq!(behind(0, 5_000, 0).0, 0.0, "nobody lives there");
    let (queued_s, prefill_s, queue_s) = behind(20, 5_000, 30_000);
    let more_s = 0.8 * prefill_s * queue_s;
    assert!(
        (queued_s - cost_s - more_s).abs() < more_s * 0.01,
        "{queued_s}, expected {more_s} more than {cost_s}"
    );
    assert!(
        behind(20, 19_900, 0).0 < cost_s / 100.0,
        "a short tail costs next to nothing"
    );
}

#[test]
fn what_is_done_of_the_prefill_ahead_is_no_longer_waited_for() {
    let queue_s = |worked_s: f64| {
        let mut board = board(DP);
        behind(&mut board, 0, 60_000);
        board.workers[0].prefilling_s = worked_s;
        let (config, turn) = (HomingConfig::default(), turn());
        Estimate::new(&config, &board, &turn, 0.0).places[0].queue_s
    };
    let whole_s = queue_s(0.0);
    assert!((queue_s(whole_s / 2.0) - whole_s / 2.0).abs() < 1e-9);
    // It takes longer than it was expected to: something is left all the same.
    assert!((queue_s(whole_s * 3.0) - whole_s / 10.0).abs() < 1e-9);
}

#[test]
fn a_tail_that_would_make_those_who_decode_wait_too_long_is_prefilled_elsewhere() {
    let plan = |roles: [Role; 4], itl_target_s: f64, busy_at: [u32; 4], held: u32| {
        let mut board = board(roles);
        for (at, requests) in busy_at.into_iter().enumerate() {
            busy(&mut board, at, requests);
        }
        let turn = later(&mut board, 3, held);
        let config = HomingConfig {
            itl_target_s,
            ..HomingConfig::default()
        };
        let choice = Homing::new(config).choose(&board, &turn);
        let considered = choice.considered.iter().map(|considered| considered.plan);
        let seeds = considered.filter(|plan| plan.path == Path::Reseed).count();
        (choice.plan.map(|plan| (plan.path, plan.decode.0)), seeds > 0)
    };
    // 3,000 tokens are within the fixed budget, and no step beside another request takes them in 40 ms.
    let (never, target_s) = (f64::INFINITY, 0.04);
    assert_eq!(plan(PD, never, [0, 0, 1, 1], 17_000).0, Some((Path::Append, 3)));
    assert_eq!(plan(PD, target_s, [0, 0, 1, 1], 17_000).0, Some((Path::Reseed, 3)));
    assert_eq!(
        plan(PD, target_s, [0; 4], 17_000).0,
        Some((Path::Append, 3)),
        "nobody waits"
    );
    // Where all may do anything, those that have fewer who wait may prefill for it, and nobody else.
    let both = [Role::Both; 4];
    let aided = |itl_target_s, busy_at| plan(both, itl_target_s, busy_at, 10_000).1;
    assert!(!aided(never, [0, 0, 0, 10]));
    assert!(aided(target_s, [0, 0, 0, 10]));
    assert!(!aided(target_s, [10; 4]));
}
