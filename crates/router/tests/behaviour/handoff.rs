//! Two legs, their failures, and where a broken answer goes on.

use super::*;

#[test]
fn when_one_side_fails_the_other_is_cancelled_at_once() {
    // The prefill worker dies while the KV is on its way.
    let mut driver = Driver::with_workers("homing:local_tokens=8", &workers(&PD));
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
    let mut driver = Driver::with_workers("homing:local_tokens=8", &workers(&PD));
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
    let mut driver = Driver::with_workers("homing:local_tokens=8", &workers(&PD));
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
