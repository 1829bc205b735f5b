//! What the router does, behaviour by behaviour.

mod support;

use homing_kv::Prompt;
use homing_router::RouterConfig;
use homing_router::action::{Path, WorkerState};
use homing_router::event::{
    Compared, Event, FailureCause, HealthReport, KvBatch, KvUpdate, Leg, LegUsage, PromptId, Resume, Role, SessionHint,
    WorkerInfo,
};
use homing_units::{BootEpoch, Duration, RequestId, SessionId, WorkerId};
use std::collections::{BTreeMap, BTreeSet};
use support::{Driver, prompt, worker, workers};

const RECOGNISE: SessionHint = SessionHint::Recognise;
const PD: [Role; 4] = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
const DP: [Role; 3] = [Role::Both; 3];

fn health(worker: u32, epoch: u64, alive: bool) -> Event {
    Event::Health(HealthReport {
        worker: WorkerId(worker),
        epoch: Some(BootEpoch(epoch)),
        alive,
    })
}

fn die(driver: &mut Driver, worker: u32) {
    for _ in 0..3 {
        driver.tell(health(worker, 1, false));
    }
    assert_eq!(driver.states[&WorkerId(worker)], WorkerState::Dead);
}

/// One turn from its start to its end; how it went and where.
fn served(driver: &mut Driver, hint: SessionHint, prompt: Prompt) -> (Path, u32) {
    let request = driver.turn(hint, prompt, 50);
    driver.serve(request);
    let decision = driver.decision(request);
    (decision.path, decision.decode.0)
}

// Sessions.

#[test]
fn turns_of_a_session_come_home_however_it_is_known() {
    for (policy, roles, first) in [
        ("homing", &PD[..], Path::Seed),
        ("homing", &DP[..], Path::Local),
        ("dp-cache-aware", &DP[..], Path::Local),
    ] {
        for hint in [RECOGNISE, SessionHint::Explicit(77)] {
            let mut driver = Driver::with_workers(policy, &workers(roles));
            let (path, home) = served(&mut driver, hint, prompt(1, 100, 100));
            assert_eq!(path, first);
            for turn in 1..5 {
                assert_eq!(
                    served(&mut driver, hint, prompt(1, 100, 100 + turn * 20)),
                    (Path::Append, home),
                    "{policy} {hint:?}"
                );
            }
            assert_eq!(driver.router.view_sessions(9).len(), 1);
        }
    }
}

#[test]
fn boilerplate_does_not_make_a_session_nor_a_herd() {
    for roles in [&PD[..], &[Role::Both; 4]] {
        let mut driver = Driver::with_workers("homing", &workers(roles));
        let mut placed: BTreeMap<u32, u32> = BTreeMap::new();
        for session in 0..100 {
            let (_, decode) = served(&mut driver, RECOGNISE, prompt(session, 60, 4));
            *placed.entry(decode).or_default() += 1;
            driver.wait(Duration::from_millis(700));
        }
        assert_eq!(driver.router.view_sessions(1_000).len(), 100);
        let (most, least) = (placed.values().max().unwrap(), placed.values().min().unwrap());
        assert!(f64::from(*most) / f64::from(*least) <= 1.3, "{placed:?}");
    }
}

#[test]
fn branches_forks_retries_and_rewritten_history_are_one_family() {
    let mut driver = Driver::with_workers("homing", &workers(&DP));
    served(&mut driver, RECOGNISE, prompt(1, 50, 50));
    served(&mut driver, RECOGNISE, prompt(1, 50, 90));
    let sessions = |driver: &Driver| driver.router.view_sessions(99);
    // A retry, and a turn with a rewritten end, go on with the same session.
    served(&mut driver, RECOGNISE, prompt(1, 50, 90));
    let rewritten = |turn: u64, kept: usize| {
        let tail = prompt(turn, 0, 30);
        let blocks: Vec<_> = prompt(1, 50, 90).blocks[..50 + kept]
            .iter()
            .chain(tail.blocks.iter())
            .copied()
            .collect();
        let tokens = u32::try_from(blocks.len()).unwrap() * 16 + 1;
        Prompt::new(blocks, tokens, 16)
    };
    served(&mut driver, RECOGNISE, rewritten(70, 80));
    assert_eq!(sessions(&driver).len(), 1);
    // While a turn is in flight, another that shares history is a branch of the family, and finds its home.
    let running = driver.turn(RECOGNISE, rewritten(71, 78), 50);
    let branch = driver.turn(RECOGNISE, rewritten(72, 76), 50);
    assert_eq!(driver.decision(branch).decode, driver.decision(running).decode);
    let known = sessions(&driver);
    assert_eq!((known.len(), known[0].family == known[1].family), (2, true));
    driver.serve(running);
    driver.serve(branch);
    // A named session whose history is rewritten altogether stays the session.
    let named = SessionHint::Explicit(5);
    served(&mut driver, named, prompt(5, 50, 90));
    served(&mut driver, named, prompt(6, 10, 20));
    assert_eq!(sessions(&driver).len(), 3);
    // Its old blocks are nobody's now: who repeats them is new.
    served(&mut driver, RECOGNISE, prompt(5, 50, 95));
    assert_eq!(sessions(&driver).len(), 4);
}

/// A turn whose driver knows the tokens, from its start to its end; in which session it was, how it went and where.
fn compared(
    driver: &mut Driver,
    hint: SessionHint,
    prompt: Prompt,
    (id, continues): (u64, Option<u64>),
) -> (SessionId, Path, u32) {
    let facts = Compared {
        prompt: PromptId(id),
        continues: continues.map(PromptId),
    };
    let request = driver.compared_turn(hint, prompt, Some(facts), 50);
    driver.serve(request);
    let explanation = driver.router.explain(request).expect("it was asked just now");
    let session = explanation.session;
    let decision = driver.decision(request);
    (session, decision.path, decision.decode.0)
}

#[test]
fn questions_that_differ_in_their_last_tokens_are_sessions_of_their_own() {
    // Each question fits into the block after the same long instructions: all have the same blocks, and the same length.
    for roles in [&[Role::Prefill, Role::Decode, Role::Decode, Role::Decode][..], &DP] {
        for named in [false, true] {
            let hint = |client: u64| {
                if named {
                    SessionHint::Explicit(u128::from(client))
                } else {
                    RECOGNISE
                }
            };
            let mut driver = Driver::with_workers("homing", &workers(roles));
            let homes: Vec<_> = (0..6)
                .map(|client| compared(&mut driver, hint(client), prompt(0, 100, 0), (client, None)))
                .collect();
            let sessions: BTreeSet<_> = homes.iter().map(|(session, ..)| *session).collect();
            let workers: BTreeSet<_> = homes.iter().map(|(_, _, home)| *home).collect();
            assert_eq!((sessions.len(), workers.len()), (6, 3), "named: {named}, {homes:?}");
            for turn in 1..4 {
                for client in 0..6_u64 {
                    let (session, _, home) = homes[usize::try_from(client).unwrap()];
                    let own = u32::try_from(turn).unwrap() * 10;
                    let last = (turn - 1) * 10 + client;
                    let facts = (turn * 10 + client, Some(last));
                    assert_eq!(
                        compared(&mut driver, hint(client), prompt(client + 1, 100, own), facts),
                        (session, Path::Append, home),
                        "client {client}, turn {turn}, named: {named}"
                    );
                }
            }
        }
    }
}

#[test]
fn whoever_goes_on_to_the_token_is_of_the_family() {
    let mut driver = Driver::with_workers("homing", &workers(&DP));
    let (session, ..) = compared(&mut driver, RECOGNISE, prompt(1, 50, 50), (0, None));
    // A retry is the same prompt again, even where the driver has forgotten it under that id.
    assert_eq!(
        compared(&mut driver, RECOGNISE, prompt(1, 50, 50), (0, None)).0,
        session
    );
    // A turn that goes on.
    assert_eq!(
        compared(&mut driver, RECOGNISE, prompt(1, 50, 90), (1, Some(0))).0,
        session
    );
    // History rewritten beyond the first prompt, although no known prompt is repeated.
    let rewritten: Vec<_> = prompt(1, 50, 70)
        .blocks
        .iter()
        .chain(prompt(9, 0, 30).blocks.iter())
        .copied()
        .collect();
    let rewritten = Prompt::new(rewritten, 150 * 16, 16);
    assert_eq!(
        compared(&mut driver, RECOGNISE, rewritten.clone(), (2, None)).0,
        session
    );
    // While a turn is in flight, another one that goes on from the same prompt is a branch, and its retry the branch's.
    let facts = |id, continues| {
        Some(Compared {
            prompt: PromptId(id),
            continues: Some(PromptId(continues)),
        })
    };
    let longer = |of: u64| {
        let blocks: Vec<_> = rewritten
            .blocks
            .iter()
            .chain(prompt(of, 0, 5).blocks.iter())
            .copied()
            .collect();
        Prompt::new(blocks, 155 * 16, 16)
    };
    let running = driver.compared_turn(RECOGNISE, longer(20), facts(3, 2), 50);
    let retry = driver.compared_turn(RECOGNISE, longer(20), facts(3, 2), 50);
    let branch = driver.compared_turn(RECOGNISE, longer(21), facts(4, 3), 50);
    let session_of = |driver: &Driver, request| driver.router.explain(request).unwrap().session;
    assert_eq!(
        (session_of(&driver, running), session_of(&driver, retry)),
        (session, session)
    );
    assert_ne!(session_of(&driver, branch), session);
    assert_eq!(driver.decision(branch).decode, driver.decision(running).decode);
    let views = driver.router.view_sessions(9);
    assert!(views.len() == 2 && views[0].family == views[1].family, "{views:?}");
    // A stranger who shares all whole blocks of the last prompt, but not its last tokens.
    let mut driver = Driver::with_workers("homing", &workers(&DP));
    let (first, ..) = compared(&mut driver, RECOGNISE, prompt(1, 50, 50), (0, None));
    let (second, path, _) = compared(&mut driver, RECOGNISE, prompt(1, 50, 60), (1, None));
    assert!(first != second && path == Path::Local);
    let views = driver.router.view_sessions(9);
    assert_ne!(views[0].family, views[1].family);
}

#[test]
fn sessions_are_bounded_and_expire() {
    let mut config = RouterConfig::default();
    config.limits.sessions = 10;
    config.limits.session_blocks = 500;
    let mut driver = Driver::with_config("homing", config, &workers(&DP));
    for session in 0..30 {
        served(&mut driver, RECOGNISE, prompt(session, 10, 20));
        driver.wait(Duration::from_secs(1));
    }
    assert_eq!(driver.router.session_count(), 10);
    served(&mut driver, RECOGNISE, prompt(99, 10, 240));
    assert_eq!(driver.router.session_count(), 9, "blocks are bounded, too");
    driver.wait(Duration::from_secs(3_601));
    driver.tell(Event::Timeout);
    assert_eq!(driver.router.session_count(), 0);
}

// Admission.

fn small_pool(roles: &[Role], kv_tokens: u64) -> Vec<WorkerInfo> {
    workers(roles)
        .into_iter()
        .map(|info| WorkerInfo { kv_tokens, ..info })
        .collect()
}

#[test]
fn what_does_not_fit_waits_and_goes_when_something_is_freed() {
    let mut driver = Driver::with_workers("homing", &small_pool(&[Role::Both], 2_000));
    let first = driver.turn(RECOGNISE, prompt(1, 0, 80), 50);
    let second = driver.turn(RECOGNISE, prompt(2, 0, 80), 50);
    assert_eq!(driver.router.queue_length(), 1);
    let explained = driver.router.explain(second).unwrap();
    assert_eq!(
        (explained.state, explained.waited_for.as_deref()),
        ("waiting", Some("waits: no worker has room"))
    );
    driver.serve(first);
    driver.serve(second);
    assert!(driver.router.idle());
}

#[test]
fn what_is_shared_with_a_running_request_is_reserved_once() {
    let mut driver = Driver::with_workers("homing", &small_pool(&[Role::Both], 2_000));
    driver.turn(RECOGNISE, prompt(1, 70, 10), 50);
    driver.turn(RECOGNISE, prompt(2, 70, 10), 50);
    assert_eq!(driver.router.queue_length(), 0);
}

#[test]
fn an_idle_worker_takes_what_fits_its_pool_and_nothing_else() {
    let mut driver = Driver::with_workers("homing", &small_pool(&[Role::Both], 2_000));
    let fits = driver.turn(RECOGNISE, prompt(1, 0, 121), 50);
    driver.serve(fits);
    let never = driver.turn(RECOGNISE, prompt(2, 0, 126), 50);
    assert_eq!(driver.ended[&never], "context_too_long");
    assert_eq!(driver.decisions.len(), 1);
}

#[test]
fn a_full_queue_is_overloaded_and_a_long_wait_ends() {
    let mut config = RouterConfig::default();
    config.limits.queue = 2;
    config.clocks.stream_base = Duration::from_secs(1_000);
    let mut driver = Driver::with_config("homing", config, &small_pool(&[Role::Both], 2_000));
    let requests: Vec<_> = (0..4)
        .map(|session| driver.turn(RECOGNISE, prompt(session, 0, 80), 50))
        .collect();
    assert_eq!(driver.ended.get(&requests[3]), Some(&"overloaded"));
    driver.first_token(driver.leg(requests[0]));
    while driver.router.queue_length() > 0 {
        assert!(driver.time_out());
    }
    assert!(
        driver.now >= homing_units::Instant::ZERO + Duration::from_secs(300),
        "{}",
        driver.now
    );
    assert_eq!(
        (driver.ended[&requests[1]], driver.ended[&requests[2]]),
        ("queue_timeout", "queue_timeout")
    );
}

#[test]
fn nobody_overtakes_one_that_has_waited_long_for_room() {
    let mut driver = Driver::with_workers("homing", &small_pool(&[Role::Both], 2_000));
    let running = driver.turn(RECOGNISE, prompt(1, 0, 60), 50);
    let large = driver.turn(RECOGNISE, prompt(2, 0, 110), 50);
    let small = driver.turn(RECOGNISE, prompt(3, 0, 20), 50);
    driver.serve(small);
    driver.wait(Duration::from_secs(11));
    let late = driver.turn(RECOGNISE, prompt(4, 0, 20), 50);
    assert_eq!(
        driver.router.queue_length(),
        2,
        "there is room for the small one, but it is not its turn"
    );
    driver.serve(running);
    driver.serve(large);
    driver.serve(late);
}

#[test]
fn a_busy_worker_is_left_in_peace_for_a_while() {
    let mut driver = Driver::with_workers("homing", &workers(&[Role::Both]));
    let request = driver.turn(RECOGNISE, prompt(1, 0, 20), 50);
    for _ in 0..6 {
        let leg = driver.leg(request);
        driver.failed(leg, FailureCause::Busy, Resume::Start);
        assert!(driver.legs.is_empty(), "it is not asked again at once");
        assert_eq!(
            driver.states[&WorkerId(0)],
            WorkerState::Degraded,
            "busy says nothing about life"
        );
        while driver.legs.is_empty() {
            assert!(driver.time_out());
        }
    }
    driver.serve(request);
}

#[test]
fn a_release_elsewhere_does_not_wake_who_waits_for_its_home() {
    let mut driver = Driver::with_workers("homing", &small_pool(&[Role::Both; 2], 2_000));
    let hint = SessionHint::Explicit(1);
    let (_, home) = served(&mut driver, hint, prompt(1, 0, 40));
    let at = |driver: &Driver, request| driver.decision(request).decode.0;
    let fill: Vec<_> = (2..4)
        .map(|session| driver.turn(RECOGNISE, prompt(session, 0, 80), 5_000))
        .collect();
    let waiting = driver.turn(hint, prompt(1, 0, 42), 50);
    let waits = |driver: &Driver| driver.router.explain(waiting).unwrap().waits;
    assert_eq!((driver.router.queue_length(), waits(&driver)), (1, 1));
    let (there, here): (Vec<_>, Vec<_>) = fill.into_iter().partition(|request| at(&driver, *request) != home);
    driver.serve(there[0]);
    assert_eq!(waits(&driver), 1, "the other worker is none of its business yet");
    driver.serve(here[0]);
    assert_eq!(
        (at(&driver, waiting), driver.decision(waiting).path),
        (home, Path::Append)
    );
    driver.serve(waiting);
}

#[test]
fn a_home_without_room_is_left_once_waiting_has_cost_as_much_as_moving() {
    let mut driver = Driver::with_workers("homing", &small_pool(&[Role::Both; 2], 40_000));
    let hint = SessionHint::Explicit(1);
    let (_, home) = served(&mut driver, hint, prompt(1, 0, 1_000));
    let fill: Vec<_> = (2..4)
        .map(|session| driver.turn(RECOGNISE, prompt(session, 0, 1_480), 5_000))
        .collect();
    let other = fill
        .into_iter()
        .find(|request| driver.decision(*request).decode.0 != home)
        .unwrap();
    let waiting = driver.turn(hint, prompt(1, 0, 1_002), 50);
    driver.serve(other);
    assert_eq!(driver.router.queue_length(), 1);
    // 16,035 tokens at 15,000 a second.
    while driver.router.queue_length() > 0 {
        assert!(driver.time_out());
    }
    let queued = driver.decision(waiting).queued;
    assert!(
        queued >= Duration::from_millis(1_069) && queued < Duration::from_millis(4_000),
        "{queued:?}"
    );
    assert_ne!(driver.decision(waiting).decode.0, home);
}

#[test]
fn who_fits_no_living_worker_does_not_wait_for_a_dead_one() {
    let sizes = [(0, 4_000), (1, 90_000)];
    let infos = sizes.map(|(id, kv_tokens)| WorkerInfo {
        kv_tokens,
        ..worker(id, Role::Both)
    });
    let mut driver = Driver::with_workers("homing", &infos);
    driver.tell(health(1, 1, false));
    let hopes = driver.turn(RECOGNISE, prompt(1, 0, 1_000), 50);
    assert_eq!(driver.router.queue_length(), 1, "it may be back soon");
    driver.tell(health(1, 1, false));
    driver.tell(health(1, 1, false));
    assert_eq!(driver.ended[&hopes], "no_worker");
    let next = driver.turn(RECOGNISE, prompt(1, 0, 1_000), 50);
    assert_eq!(driver.ended[&next], "no_worker");
    let never = driver.turn(RECOGNISE, prompt(1, 0, 6_000), 50);
    assert_eq!(driver.ended[&never], "context_too_long");
}

#[test]
fn a_suspect_home_is_waited_for_and_found_as_it_was() {
    let mut driver = Driver::with_workers("homing", &workers(&DP));
    let hint = SessionHint::Explicit(1);
    let (_, home) = served(&mut driver, hint, prompt(1, 0, 1_000));
    driver.tell(health(home, 1, false));
    let request = driver.turn(hint, prompt(1, 0, 1_010), 50);
    assert_eq!(driver.router.queue_length(), 1);
    driver.tell(health(home, 1, true));
    assert_eq!(
        (driver.decision(request).path, driver.decision(request).decode.0),
        (Path::Append, home)
    );
}

// Handoff.

#[test]
fn when_one_side_fails_the_other_is_cancelled_at_once() {
    // The prefill worker dies while the KV is on its way.
    let mut driver = Driver::with_workers("homing", &workers(&PD));
    let request = driver.turn(RECOGNISE, prompt(1, 0, 500), 50);
    let prefill = driver.leg(request);
    let from = driver.legs[&prefill].worker;
    driver.prefill_done(prefill);
    let decode = driver.leg(request);
    die(&mut driver, from.0);
    assert_eq!(driver.late, [prefill, decode]);
    driver.failed(decode, FailureCause::Engine, Resume::Start);
    assert_ne!(driver.decision(request).prefill, Some(from));
    driver.serve(request);

    // The decode worker fails: the prefill worker is told to let go.
    let request = driver.turn(RECOGNISE, prompt(2, 0, 500), 50);
    let prefill = driver.leg(request);
    driver.prefill_done(prefill);
    let decode = driver.leg(request);
    driver.failed(decode, FailureCause::Engine, Resume::Start);
    assert!(driver.late.contains(&prefill));
    driver.client_gone(request);
    assert!(driver.router.idle());
}

#[test]
fn failed_transfers_are_retried_then_replanned_without_one() {
    let mut driver = Driver::with_workers("homing", &workers(&PD));
    let request = driver.turn(RECOGNISE, prompt(1, 0, 500), 50);
    let mut links = Vec::new();
    for _ in 0..2 {
        let prefill = driver.leg(request);
        assert_eq!(prefill.leg, Leg::Prefill);
        links.push((driver.decision(request).prefill, driver.decision(request).decode));
        driver.prefill_done(prefill);
        let decode = driver.leg(request);
        driver.failed(decode, FailureCause::Transfer, Resume::Start);
    }
    assert_ne!(links[0], links[1], "the link that failed is avoided for a while");
    assert_eq!(driver.decision(request).path, Path::Local);
    assert!(
        driver.states.values().all(|state| *state == WorkerState::Degraded),
        "a link says nothing about lives"
    );
    driver.serve(request);
}

#[test]
fn a_budget_that_is_spent_is_reported_as_what_it_was() {
    for (cause, error) in [
        (FailureCause::Engine, "engine_failed"),
        (FailureCause::Unreachable, "worker_lost"),
        (FailureCause::Invalid, "refused"),
        (FailureCause::Transfer, "transfer_failed"),
    ] {
        let mut driver = Driver::with_workers("homing", &workers(&[Role::Both; 9]));
        let request = driver.turn(RECOGNISE, prompt(1, 0, 500), 50);
        let mut attempts = 0;
        while driver.live.contains_key(&request) {
            driver.failed(driver.leg(request), cause, Resume::Start);
            attempts += 1;
        }
        assert_eq!(
            (driver.ended[&request], attempts),
            (error, if cause == FailureCause::Invalid { 1 } else { 4 })
        );
        assert!(driver.router.idle());
    }
}

#[test]
fn a_stream_goes_on_elsewhere_where_that_is_exact() {
    let mut driver = Driver::with_workers("homing", &workers(&DP));
    let request = driver.turn(RECOGNISE, prompt(1, 0, 500), 50);
    let leg = driver.leg(request);
    let first = driver.legs[&leg].worker;
    driver.first_token(leg);
    let resume = driver.resume(request);
    driver.failed(leg, FailureCause::Unreachable, resume);
    let decision = driver.decision(request);
    assert_ne!(decision.decode, first);
    assert_eq!((decision.attempt, decision.prompt_tokens), (1, 500 * 16 + 3 + 16));
    assert_eq!(driver.states[&first], WorkerState::Suspect);
    let leg = driver.leg(request);
    driver.failed(leg, FailureCause::Unreachable, Resume::Impossible);
    assert_eq!(driver.ended[&request], "worker_lost");
}

#[test]
fn a_hung_worker_is_cancelled_and_asked_where_to_resume() {
    let streaming = || {
        let mut driver = Driver::with_workers("homing", &workers(&DP));
        let request = driver.turn(RECOGNISE, prompt(1, 0, 500), 50);
        let leg = driver.leg(request);
        driver.first_token(leg);
        let worker = driver.legs[&leg].worker.0;
        die(&mut driver, worker);
        assert_eq!(driver.cancelled, [leg]);
        assert_eq!(driver.router.explain(request).unwrap().state, "yielding");
        (driver, request, leg)
    };
    let (mut driver, request, leg) = streaming();
    let resume = driver.resume(request);
    driver.failed(leg, FailureCause::Engine, resume);
    driver.serve(request);
    // Nobody says, and the client has had some of it: going on might repeat or skip.
    let (mut driver, request, _) = streaming();
    driver.time_out();
    assert_eq!(driver.ended[&request], "worker_lost");
    // Nobody says, and no token was seen: from the start.
    let mut driver = Driver::with_workers("homing", &workers(&DP));
    let request = driver.turn(RECOGNISE, prompt(1, 0, 500), 50);
    let worker = driver.legs[&driver.leg(request)].worker.0;
    die(&mut driver, worker);
    driver.time_out();
    driver.serve(request);
    // It had ended after all.
    let (mut driver, request, leg) = streaming();
    driver.live.remove(&request);
    driver.tell(Event::Finished {
        leg,
        usage: LegUsage::default(),
    });
    assert!(driver.router.idle());
}

#[test]
fn each_phase_has_its_own_clock() {
    let mut driver = Driver::with_workers("homing", &workers(&PD));
    let request = driver.turn(RECOGNISE, prompt(1, 0, 500), 50);
    let slow = driver.leg(request);
    let first = driver.legs[&slow].worker;
    driver.time_out();
    assert_eq!(driver.late, [slow], "a prefill that takes too long is given up");
    assert_eq!(
        driver.states[&first],
        WorkerState::Degraded,
        "slow says nothing about life"
    );
    let prefill = driver.leg(request);
    assert_ne!(driver.legs[&prefill].worker, first);
    // Just in time: the decode leg's clock starts when the KV is ready.
    let due = driver.router.poll_timeout().unwrap();
    driver.now = due;
    driver.prefill_done(prefill);
    assert!(driver.router.poll_timeout().unwrap() >= due + Duration::from_secs(30));
    let decode = driver.leg(request);
    driver.time_out();
    assert_eq!(driver.cancelled, [decode]);
    driver.failed(decode, FailureCause::Engine, Resume::Start);
    driver.serve(request);
}

#[test]
fn late_answers_of_old_attempts_change_nothing() {
    let mut driver = Driver::with_workers("homing", &workers(&DP));
    let request = driver.turn(RECOGNISE, prompt(1, 0, 500), 50);
    let old = driver.leg(request);
    driver.failed(old, FailureCause::Unreachable, Resume::Start);
    let new = driver.leg(request);
    let before = driver.digest.checkpoint(0);
    driver.tell(Event::FirstToken { leg: old });
    driver.tell(Event::Finished {
        leg: old,
        usage: LegUsage::default(),
    });
    driver.failed(old, FailureCause::Engine, Resume::Impossible);
    driver.tell(Event::ClientGone(RequestId(99)));
    assert_eq!(driver.digest.checkpoint(0), before);
    driver.first_token(new);
    driver.finished(new, None);
}

// Workers.

#[test]
fn a_worker_that_comes_back_is_used_again_with_nothing_in_its_cache() {
    let mut driver = Driver::with_workers("homing", &workers(&[Role::Both; 2]));
    let (_, home) = served(&mut driver, RECOGNISE, prompt(1, 0, 500));
    die(&mut driver, home);
    let (path, other) = served(&mut driver, RECOGNISE, prompt(1, 0, 510));
    assert!(path == Path::Local && other != home);
    driver.tell(health(home, 2, true));
    assert_eq!(driver.states[&WorkerId(home)], WorkerState::Degraded);
    assert_eq!(driver.router.view_workers()[home as usize].predicted_sessions, 0);
    // It is tried with few requests first.
    let requests: Vec<_> = (10..20)
        .map(|session| driver.turn(RECOGNISE, prompt(session, 0, 50), 50))
        .collect();
    let there = |driver: &Driver| {
        requests
            .iter()
            .filter(|request| driver.decision(**request).decode.0 == home)
            .count()
    };
    assert_eq!(there(&driver), 2);
    let answered = *requests
        .iter()
        .find(|request| driver.decision(**request).decode.0 == home)
        .unwrap();
    driver.serve(answered);
    let more: Vec<_> = (20..30)
        .map(|session| driver.turn(RECOGNISE, prompt(session, 0, 50), 50))
        .collect();
    assert!(
        more.iter()
            .filter(|request| driver.decision(**request).decode.0 == home)
            .count()
            > 2
    );
}

#[test]
fn a_new_life_ends_what_ran_in_the_old_one() {
    let mut driver = Driver::with_workers("homing", &workers(&[Role::Both; 2]));
    let request = driver.turn(RECOGNISE, prompt(1, 0, 500), 50);
    let leg = driver.leg(request);
    let at = driver.legs[&leg].worker;
    driver.tell(Event::WorkerJoined(WorkerInfo {
        epoch: BootEpoch(9),
        ..worker(at.0, Role::Both)
    }));
    assert_eq!(driver.cancelled, [leg]);
    driver.failed(leg, FailureCause::Engine, Resume::Start);
    driver.serve(request);
    // A worker that leaves takes its requests with it; when none is left, nobody waits in vain.
    let request = driver.turn(RECOGNISE, prompt(2, 0, 500), 50);
    driver.tell(Event::WorkerLeft(WorkerId(0)));
    driver.tell(Event::WorkerLeft(WorkerId(1)));
    if let Some(leg) = driver.cancelled.first().copied() {
        driver.failed(leg, FailureCause::Engine, Resume::Start);
    }
    while driver.live.contains_key(&request) {
        let leg = driver.cancelled.first().copied().expect("it waits for an answer");
        driver.failed(leg, FailureCause::Engine, Resume::Start);
    }
    assert_eq!(driver.ended[&request], "no_worker");
    assert!(driver.router.idle());
}

fn stored(worker: u32, sequence: u64, prompt: &Prompt) -> Event {
    let stored = KvUpdate::Stored {
        parent: None,
        hashes: prompt.blocks.to_vec(),
        tier: homing_kv::Tier::Gpu,
    };
    Event::Kv(KvBatch {
        worker: WorkerId(worker),
        epoch: BootEpoch(1),
        sequence,
        updates: vec![stored],
    })
}

fn with_events(roles: &[Role]) -> Vec<WorkerInfo> {
    workers(roles)
        .into_iter()
        .map(|info| WorkerInfo {
            kv_events: true,
            ..info
        })
        .collect()
}

#[test]
fn a_gap_degrades_a_worker_until_it_is_filled() {
    let mut driver = Driver::with_workers("homing", &with_events(&[Role::Both; 2]));
    assert_eq!(driver.states[&WorkerId(1)], WorkerState::Exact);
    let own = prompt(1, 0, 100);
    driver.tell(stored(1, 2, &own));
    assert_eq!(
        (driver.states[&WorkerId(1)], driver.resyncs.as_slice()),
        (WorkerState::Degraded, &[(WorkerId(1), 0)][..])
    );
    driver.tell(stored(1, 3, &own));
    assert_eq!(driver.resyncs.len(), 1, "a gap is asked for once");
    // No answer: asked for again, a bounded number of times, then given up.
    while driver.time_out() {}
    assert_eq!(driver.resyncs.len(), 3);
    assert_eq!(driver.states[&WorkerId(1)], WorkerState::Degraded);
    assert_eq!(
        driver.router.view_workers()[1].indexed_gpu_blocks,
        100,
        "what came after the gap is true"
    );
    // A new life begins from nothing.
    driver.tell(health(1, 5, true));
    assert_eq!(driver.router.view_workers()[1].indexed_gpu_blocks, 0);
    assert_eq!(driver.states[&WorkerId(1)], WorkerState::Exact);
    driver.tell(stored(1, 0, &own));
    assert_eq!(
        driver.router.view_workers()[1].indexed_gpu_blocks,
        0,
        "a late batch of the old life"
    );
}

#[test]
fn events_decide_who_is_home() {
    let mut driver = Driver::with_workers("homing", &with_events(&[Role::Both; 3]));
    let hint = SessionHint::Explicit(4);
    let (_, home) = served(&mut driver, hint, prompt(1, 0, 100));
    // Predictions of a worker with events last a moment; then only its events count.
    driver.wait(Duration::from_secs(11));
    let moved = (home + 1) % 3;
    driver.tell(stored(moved, 0, &prompt(1, 0, 100)));
    assert_eq!(served(&mut driver, hint, prompt(1, 0, 105)), (Path::Append, moved));
}

#[test]
fn reports_below_the_prediction_correct_it() {
    let mut driver = Driver::with_workers("homing", &workers(&[Role::Both]));
    let (trunk, branch) = (SessionHint::Explicit(1), SessionHint::Explicit(2));
    served(&mut driver, trunk, prompt(1, 0, 100));
    served(&mut driver, branch, prompt(2, 0, 100));
    let request = driver.turn(trunk, prompt(1, 0, 105), 50);
    assert_eq!(driver.decision(request).expected_cached_tokens, 1_600);
    let leg = driver.leg(request);
    driver.finished(leg, Some(160));
    let view = &driver.router.view_workers()[0];
    assert_eq!(
        (
            view.cache_predicted_tokens,
            view.cache_reported_tokens,
            view.cache_error_tokens
        ),
        (1_600, 160, 1_440)
    );
    let next = driver.turn(trunk, prompt(1, 0, 110), 50);
    assert_eq!(
        driver.decision(next).expected_cached_tokens,
        1_680,
        "the turn that reported has computed it again"
    );
}

#[test]
fn a_worker_that_comes_back_does_not_take_all_that_is_new() {
    // The sessions before want the other's pool twenty times over; or they were used too long ago to want anything.
    for since in [Duration::ZERO, Duration::from_secs(300)] {
        let mut driver = Driver::with_workers("homing", &small_pool(&[Role::Both; 2], 32_768));
        for session in 0..800 {
            served(&mut driver, RECOGNISE, prompt(session, 95, 5));
            driver.wait(Duration::from_millis(100));
        }
        driver.wait(since);
        die(&mut driver, 0);
        driver.tell(health(0, 2, true));
        let other = &driver.router.view_workers()[1];
        assert_eq!((other.homed_sessions, other.live_tokens == 0), (400, !since.is_zero()));
        assert_eq!(
            served(&mut driver, RECOGNISE, prompt(5_000, 95, 5)).1,
            0,
            "the emptier one"
        );
        let requests: Vec<_> = (10_000..10_040)
            .map(|session| driver.turn(RECOGNISE, prompt(session, 95, 5), 50))
            .collect();
        let there = requests
            .iter()
            .filter(|request| driver.decision(**request).decode.0 == 0);
        let there = there.count();
        assert!((15..=30).contains(&there), "{there} of 40 after {since:?}");
    }
}
