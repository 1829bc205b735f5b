//! What fits where, and what waits for what.

use super::*;

#[test]
fn what_does_not_fit_waits_and_goes_when_something_is_freed() {
    let mut driver = Driver::with_workers("homing:pace_s=0", &small_pool(&[Role::Both], 2_000));
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
    let mut driver = Driver::with_workers("homing:pace_s=0", &small_pool(&[Role::Both], 2_000));
    driver.turn(RECOGNISE, prompt(1, 70, 10), 50);
    driver.turn(RECOGNISE, prompt(2, 70, 10), 50);
    assert_eq!(driver.router.queue_length(), 0);
}

#[test]
fn an_idle_worker_takes_what_fits_its_pool_and_nothing_else() {
    let mut driver = Driver::with_workers("homing:pace_s=0", &small_pool(&[Role::Both], 2_000));
    let fits = driver.turn(RECOGNISE, prompt(1, 0, 121), 50);
    driver.serve(fits);
    let never = driver.turn(RECOGNISE, prompt(2, 0, 126), 50);
    assert_eq!(driver.ended[&never], "context_too_long");
    assert_eq!(driver.decisions.len(), 1);
}

#[test]
fn seeds_above_a_decode_workers_budget_wait_in_the_router() {
    let check = |limit: fn(&mut Limits), expected: usize| {
        let mut config = RouterConfig::default();
        limit(&mut config.limits);
        let mut driver = Driver::with_config("homing", config, &workers(&[Role::Decode, Role::Prefill]));
        let requests: Vec<_> = (0..6)
            .map(|session| driver.turn(RECOGNISE, prompt(session, 0, 80), 50))
            .collect();
        let waiting = 6 - expected;
        assert_eq!((driver.legs.len(), driver.router.queue_length()), (expected, waiting));
        let first = requests[0];
        driver.prefill_done(driver.leg(first));
        assert_eq!(driver.router.queue_length(), waiting, "KV on its way is pending, too");
        driver.first_token(driver.leg(first));
        let left = waiting.saturating_sub(1);
        assert_eq!(driver.router.queue_length(), left, "one seed is over, one goes");
        driver.finished(driver.leg(first), None);
        requests[1..].iter().for_each(|request| driver.serve(*request));
        assert!(driver.router.idle());
    };
    check(|limits| limits.seeds_per_decode = 2, 2);
    check(
        |limits| limits.seed_tokens_per_decode = 3 * 80 * u64::from(BLOCK) + 100,
        3,
    );
    check(|_| {}, 6);
}

/// Strangers fill the only worker's pool, of which the ledger knows nothing: it says so, and later that it has room.
#[test]
fn a_worker_that_says_it_is_full_is_left_in_peace_until_it_has_room() {
    let mut driver = Driver::with_workers("homing:pace_s=0", &small_pool(&[Role::Both], 2_000));
    let told = |driver: &mut Driver, spare_tokens, pause_ms| {
        driver.tell(Event::Room(RoomReport {
            worker: WorkerId(0),
            epoch: BootEpoch(1),
            spare_tokens,
            pause: Duration::from_millis(pause_ms),
        }));
    };
    told(&mut driver, 0, 500);
    let first = driver.turn(RECOGNISE, prompt(1, 0, 40), 50);
    assert_eq!(driver.router.queue_length(), 1, "it asked for a pause");
    told(&mut driver, 1_000, 0);
    assert_eq!(driver.router.queue_length(), 0, "it has room, and whoever waits goes");
    let second = driver.turn(RECOGNISE, prompt(2, 0, 40), 50);
    assert_eq!(
        driver.router.queue_length(),
        1,
        "what was sent since has taken the room that it told of"
    );
    driver.serve(first);
    driver.serve(second);
    // It falls silent: the ledger alone decides again, after the pause at the latest.
    told(&mut driver, 0, 60_000);
    let last = driver.turn(RECOGNISE, prompt(3, 0, 40), 50);
    assert_eq!(driver.router.queue_length(), 1);
    while driver.router.queue_length() > 0 {
        assert!(driver.time_out());
    }
    driver.serve(last);
    assert!(driver.router.idle());
}

#[test]
fn a_full_queue_is_overloaded_and_a_long_wait_ends() {
    let mut config = RouterConfig::default();
    config.limits.queue = 2;
    config.clocks.stream_base = Duration::from_secs(1_000);
    let mut driver = Driver::with_config("homing:pace_s=0", config, &small_pool(&[Role::Both], 2_000));
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
    let mut driver = Driver::with_workers("homing:pace_s=0", &small_pool(&[Role::Both], 2_000));
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
fn who_waits_long_for_room_at_its_home_keeps_nobody_from_other_workers() {
    let mut driver = Driver::with_workers("homing:pace_s=0:moves=off", &small_pool(&[Role::Both; 2], 40_000));
    let hint = SessionHint::Explicit(1);
    let (_, home) = served(&mut driver, hint, prompt(1, 0, 1_600));
    let fill: Vec<_> = (2..4)
        .map(|session| driver.turn(RECOGNISE, prompt(session, 0, 1_680), 5_000))
        .collect();
    let waiting = driver.turn(hint, prompt(1, 0, 1_602), 50);
    assert_eq!(driver.router.queue_length(), 1);
    driver.wait(Duration::from_secs(11));
    let at = |driver: &Driver, request| driver.decision(request).decode.0;
    let small: Vec<_> = (4..6)
        .map(|session| driver.turn(RECOGNISE, prompt(session, 0, 20), 50))
        .collect();
    for request in &small {
        assert_ne!(
            at(&driver, *request),
            home,
            "its home is kept for it, the other worker is not"
        );
    }
    fill.into_iter().for_each(|request| driver.serve(request));
    driver.serve(waiting);
    small.into_iter().for_each(|request| driver.serve(request));
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
    let mut driver = Driver::with_workers("homing:pace_s=0:moves=off", &small_pool(&[Role::Both; 2], 40_000));
    let hint = SessionHint::Explicit(1);
    let (_, home) = served(&mut driver, hint, prompt(1, 0, 800));
    let at = |driver: &Driver, request| driver.decision(request).decode.0;
    let fill: Vec<_> = (2..4)
        .map(|session| driver.turn(RECOGNISE, prompt(session, 0, 1_680), 5_000))
        .collect();
    let waiting = driver.turn(hint, prompt(1, 0, 802), 50);
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
    let mut driver = Driver::with_workers("homing:pace_s=0:moves=off", &small_pool(&[Role::Both; 2], 40_000));
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
    // Its home has a prefill of its own to do, so leaving is hardly dearer than staying.
    while driver.router.queue_length() > 0 {
        assert!(driver.time_out());
    }
    let queued = driver.decision(waiting).queued;
    assert!(
        queued >= Duration::from_millis(50) && queued < Duration::from_millis(1_000),
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
