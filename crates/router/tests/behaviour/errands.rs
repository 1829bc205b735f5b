//! Errands: KV that is carried while no client waits for it, and that nobody waits for either.

use super::*;
use homing_router::action::{ErrandKind, ErrandOutcome, KvUse};

const SESSION: SessionHint = SessionHint::Explicit(1);

/// Four sessions of 40,000 tokens at the only worker there is, whose pool holds 100,000, and that came back every four seconds so far.
/// The next turn of the first one runs, and another worker joins meanwhile. Policies are asked not to pace: a session would wait for another's end.
fn crowded(policy: &str) -> (Driver, RequestId) {
    let mut driver = Driver::with_workers(policy, &workers(&[Role::Both]));
    for blocks in (10..30).chain([2_500]) {
        for session in 1..=4 {
            driver.wait(Duration::from_secs(1));
            let hint = SessionHint::Explicit(session.into());
            served(&mut driver, hint, prompt(session, 0, blocks));
        }
    }
    let request = driver.turn(SESSION, prompt(1, 0, 2_501), 50);
    driver.tell(Event::WorkerJoined(worker(1, Role::Both)));
    (driver, request)
}

/// The same, once that turn has ended: its session's KV is to be carried to the new worker.
fn parting() -> (Driver, RequestId) {
    let (mut driver, request) = crowded("homing:errands=on:pace_s=0");
    assert!(driver.errands.is_empty(), "its turn is in flight");
    driver.serve(request);
    let errand = driver
        .errands
        .values()
        .next()
        .expect("it had better live elsewhere")
        .clone();
    assert_eq!((errand.kind, errand.of), (ErrandKind::Gap, request));
    assert_eq!((errand.from, errand.to), (Some(WorkerId(0)), WorkerId(1)));
    assert_eq!(errand.tokens, 2_501 * BLOCK, "all whole blocks");
    assert!(errand.moves());
    (driver, errand.errand)
}

/// Answers an errand's legs until it is over.
fn run_errand(driver: &mut Driver, errand: RequestId) {
    while driver.errands.contains_key(&errand) {
        driver.leg_done(driver.leg(errand));
    }
}

fn outcomes(driver: &Driver) -> Vec<ErrandOutcome> {
    driver.errands_ended.iter().map(|(_, outcome)| *outcome).collect()
}

#[test]
fn a_turn_finds_its_kv_where_it_was_carried_in_the_gap() {
    let (mut driver, errand) = parting();
    let lend = driver.legs[&driver.leg(errand)];
    assert_eq!((lend.worker, lend.kv), (WorkerId(0), KvUse::Export));
    driver.leg_done(lend.leg);
    let fetch = driver.legs[&driver.leg(errand)];
    assert_eq!((fetch.leg.leg, fetch.worker), (Leg::Fetch, WorkerId(1)));
    driver.leg_done(fetch.leg);
    assert_eq!(outcomes(&driver), [ErrandOutcome::Landed]);
    assert!(driver.router.idle());
    let request = driver.turn(SESSION, prompt(1, 0, 2_510), 50);
    let decision = driver.decision(request);
    assert_eq!(
        (decision.path, decision.decode, decision.prefill),
        (Path::Append, WorkerId(1), None)
    );
    assert_eq!(decision.expected_cached_tokens, 2_501 * BLOCK);
    driver.serve(request);
    let total = driver.router.view_errands()[0];
    assert_eq!((total.count, total.tokens), (1, 2_501 * u64::from(BLOCK)));
}

#[test]
fn a_turn_that_comes_meanwhile_is_planned_as_if_nothing_was_carried() {
    let (mut without, request) = crowded("homing:errands=off:pace_s=0");
    without.serve(request);
    assert!(without.errands.is_empty());
    let request = without.turn(SESSION, prompt(1, 0, 2_510), 50);
    let expected = without.decision(request).clone();
    for legs_done in [0, 1] {
        let (mut driver, errand) = parting();
        (0..legs_done).for_each(|_| driver.leg_done(driver.leg(errand)));
        let request = driver.turn(SESSION, prompt(1, 0, 2_510), 50);
        assert_eq!(outcomes(&driver), [ErrandOutcome::Dropped]);
        let decision = driver.decision(request);
        assert_eq!(
            (decision.path, decision.prefill, decision.decode, decision.expected_ttft),
            (expected.path, expected.prefill, expected.decode, expected.expected_ttft),
            "after {legs_done} legs"
        );
        assert_eq!(decision.candidates, expected.candidates);
        // Its late answers change nothing.
        for leg in driver.late.clone() {
            driver.tell(Event::PrefillDone {
                leg,
                cached_tokens: None,
            });
        }
        driver.serve(request);
        assert!(driver.router.idle());
    }
}

/// What goes wrong with an errand.
type Mishap = fn(&mut Driver, RequestId);

/// However an errand fails, nothing of it is left, and its session is left alone for a while.
#[test]
fn an_errand_that_fails_leaves_nothing_behind_and_is_not_tried_again() {
    use FailureCause::{Busy, Engine, Invalid, Transfer, Unreachable};
    let fails: [(usize, Mishap); 9] = [
        (0, |driver, errand| {
            driver.failed(driver.leg(errand), Invalid, Resume::Start)
        }),
        (0, |driver, errand| {
            driver.failed(driver.leg(errand), Busy, Resume::Start)
        }),
        (0, |driver, _| die(driver, 0)),
        (0, |driver, _| assert!(driver.time_out())),
        (1, |driver, errand| {
            driver.failed(driver.leg(errand), Transfer, Resume::Start)
        }),
        (1, |driver, errand| {
            driver.failed(driver.leg(errand), Engine, Resume::Start)
        }),
        (1, |driver, errand| {
            driver.failed(driver.leg(errand), Unreachable, Resume::Start)
        }),
        (1, |driver, _| die(driver, 1)),
        (1, |driver, _| die(driver, 0)),
    ];
    for (case, (legs_done, fail)) in fails.into_iter().enumerate() {
        let (mut driver, errand) = parting();
        (0..legs_done).for_each(|_| driver.leg_done(driver.leg(errand)));
        fail(&mut driver, errand);
        while driver.errands.contains_key(&errand) {
            assert!(driver.time_out(), "case {case}: it would last for ever");
        }
        assert_eq!(outcomes(&driver), [ErrandOutcome::Failed], "case {case}");
        assert!(driver.router.idle(), "case {case}");
        let request = driver.turn(SESSION, prompt(1, 0, 2_503), 50);
        driver.serve(request);
        let again = driver
            .errands
            .values()
            .filter(|errand| errand.session == driver.decision(request).session);
        assert_eq!(again.count(), 0, "case {case}: it is not tried again at once");
    }
}

/// Six sessions that begin alike at the only worker, and then there are so many more that lack what all of them show.
fn alike(transfers: bool, joining: u32) -> Driver {
    let info = |id| WorkerInfo {
        transfers,
        ..worker(id, Role::Both)
    };
    let mut driver = Driver::with_workers("homing:errands=on:gaps=off", &[info(0)]);
    for session in 0..6 {
        served(&mut driver, SessionHint::Recognise, prompt(session, 100, 40));
    }
    for id in 1..=joining {
        driver.tell(Event::WorkerJoined(info(id)));
    }
    driver
}

/// Times out until an errand begins.
fn next_errand(driver: &mut Driver) -> RequestId {
    while driver.errands.is_empty() {
        assert!(driver.time_out(), "nothing is carried");
    }
    *driver.errands.keys().next().expect("there is one")
}

#[test]
fn base_content_is_carried_to_each_decode_worker_once() {
    let mut driver = alike(true, 2);
    for _ in 0..2 {
        let errand = next_errand(&mut driver);
        run_errand(&mut driver, errand);
    }
    let carried = driver
        .errands_ended
        .iter()
        .map(|(errand, outcome)| (errand.kind, errand.from, errand.to.0, errand.tokens, *outcome));
    let base = |to| {
        (
            ErrandKind::Base,
            Some(WorkerId(0)),
            to,
            100 * BLOCK,
            ErrandOutcome::Landed,
        )
    };
    assert_eq!(carried.collect::<Vec<_>>(), [base(1), base(2)]);
    assert!(!driver.errands_ended[0].0.moves(), "its source keeps it");
    while driver.now < homing_units::Instant::ZERO + Duration::from_secs(59) && driver.time_out() {
        assert!(driver.errands.is_empty(), "once is enough");
    }
    // A new session finds it wherever it goes.
    let request = driver.turn(SessionHint::Recognise, prompt(9, 100, 40), 50);
    let decision = driver.decision(request);
    assert_eq!(
        (decision.decode, decision.expected_cached_tokens),
        (WorkerId(1), 100 * BLOCK)
    );
    driver.serve(request);
}

#[test]
fn where_nothing_can_be_carried_base_content_is_computed_and_yields_to_a_turn() {
    let mut driver = alike(false, 1);
    let errand = next_errand(&mut driver);
    let leg = driver.legs[&driver.leg(errand)];
    assert_eq!(
        (leg.leg.leg, leg.worker, leg.kv),
        (Leg::Fetch, WorkerId(1), KvUse::Local)
    );
    die(&mut driver, 0);
    let request = driver.turn(SessionHint::Recognise, prompt(9, 100, 40), 50);
    assert_eq!(driver.decision(request).decode, WorkerId(1));
    assert_eq!(outcomes(&driver), [ErrandOutcome::Dropped]);
    driver.serve(request);
    driver.tell(Event::WorkerJoined(WorkerInfo {
        transfers: false,
        ..worker(2, Role::Both)
    }));
    let errand = next_errand(&mut driver);
    assert_eq!(driver.errands[&errand].to, WorkerId(2), "the other one has it by now");
    run_errand(&mut driver, errand);
    assert_eq!(outcomes(&driver)[1], ErrandOutcome::Landed);
    assert!(driver.router.idle());
}

#[test]
fn a_turn_that_finds_no_room_because_of_an_errand_gets_it() {
    let (mut driver, _) = parting();
    // It takes 40,000 tokens of either pool's 100,000, and each of these turns as many.
    let requests = [4, 8, 9].map(|session| {
        let request = driver.turn(SessionHint::Explicit(session.into()), prompt(session, 0, 2_501), 50);
        assert_eq!(driver.router.queue_length(), 0, "session {session} does not wait");
        request
    });
    assert_eq!(outcomes(&driver), [ErrandOutcome::Dropped]);
    for request in requests {
        driver.serve(request);
    }
    while !driver.errands.is_empty() {
        let errand = next_errand(&mut driver);
        run_errand(&mut driver, errand);
    }
    assert!(driver.router.idle());
}

#[test]
fn nothing_is_carried_for_policies_that_do_not_ask_for_it() {
    for policy in [
        "homing:errands=off:pace_s=0",
        "homing:errands=on:gaps=off:base=off:pace_s=0",
        "dp-cache-aware",
        "contention",
    ] {
        let (mut driver, request) = crowded(policy);
        driver.serve(request);
        assert_eq!(driver.router.poll_timeout(), None, "{policy}: nothing is waited for");
        assert!(driver.errands.is_empty(), "{policy}");
    }
}
