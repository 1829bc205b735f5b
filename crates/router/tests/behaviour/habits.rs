//! What policies of other systems bring along: sending at once, giving up, asking first, pausing.

use super::*;
use homing_router::event::LoadReport;
use homing_units::Instant;

const ONE_EACH: [Role; 2] = [Role::Prefill, Role::Decode];

fn telling(roles: &[Role]) -> Vec<WorkerInfo> {
    let tells = |info| WorkerInfo {
        kv_events: true,
        ..info
    };
    workers(roles).into_iter().map(tells).collect()
}

fn stored(driver: &mut Driver, worker: u32, sequence: u64, prompt: &Prompt) {
    driver.tell(Event::Kv(KvBatch {
        worker: WorkerId(worker),
        epoch: BootEpoch(1),
        sequence,
        updates: vec![KvUpdate::Stored {
            parent: None,
            hashes: prompt.blocks.to_vec(),
            tier: homing_kv::Tier::Gpu,
        }],
    }));
}

/// A turn of one session: how it went.
fn next(driver: &mut Driver, prompt: Prompt) -> Path {
    served(driver, SessionHint::Explicit(1), prompt).0
}

#[test]
fn who_sends_at_once_does_not_queue() {
    for policy in [
        "least-loaded",
        "pd-static",
        "sticky",
        "kv-aware",
        "linear",
        "unified-v2",
        "unified-v3",
        "contention",
        "lazy-migration",
    ] {
        let mut driver = Driver::with_workers(policy, &small_pool(&[Role::Both], 2_000));
        let requests: Vec<_> = (0..20)
            .map(|session| driver.turn(RECOGNISE, prompt(session, 0, 80), 50))
            .collect();
        assert_eq!((driver.router.queue_length(), driver.legs.len()), (0, 20), "{policy}");
        for request in requests {
            driver.serve(request);
        }
        // What can never fit is refused all the same.
        let never = driver.turn(RECOGNISE, prompt(99, 0, 126), 50);
        assert_eq!(driver.ended[&never], "context_too_long", "{policy}");
    }
}

#[test]
fn a_failure_is_the_end_where_nothing_is_tried_again() {
    for (policy, expected) in [
        ("kv-aware", Some("transfer_failed")),
        ("pd-static", Some("transfer_failed")),
        ("sticky", None),
    ] {
        let mut driver = Driver::with_workers(policy, &workers(&ONE_EACH));
        let request = driver.turn(RECOGNISE, prompt(1, 0, 80), 50);
        driver.prefill_done(driver.leg(request));
        driver.failed(driver.leg(request), FailureCause::Transfer, Resume::Start);
        assert_eq!(driver.ended.get(&request).copied(), expected, "{policy}");
    }
}

#[test]
fn a_request_is_given_up_when_its_first_token_is_late() {
    let given_up_after = |policy: &str| {
        let mut driver = Driver::with_workers(policy, &workers(&ONE_EACH));
        let request = driver.turn(RECOGNISE, prompt(1, 0, 80), 50);
        driver.wait(Duration::from_secs(2));
        driver.prefill_done(driver.leg(request));
        while !driver.ended.contains_key(&request) {
            assert!(driver.time_out());
        }
        // A cancelled decode leg has a second to say how far it came.
        driver.now.saturating_since(Instant::ZERO)
    };
    assert_eq!(given_up_after("kv-aware:request_timeout=5"), Duration::from_secs(6));
    assert!(given_up_after("kv-aware") > Duration::from_secs(30));
}

#[test]
fn a_worker_that_is_asked_first_needs_no_guesses() {
    // The decode worker has served the session; whether it kept its KV only its events tell.
    let mut driver = Driver::with_workers("kv-aware", &telling(&ONE_EACH));
    assert_eq!(next(&mut driver, prompt(1, 0, 80)), Path::Seed);
    assert_eq!(next(&mut driver, prompt(1, 0, 82)), Path::Reseed);
    stored(&mut driver, 1, 0, &prompt(1, 0, 82));
    assert_eq!(next(&mut driver, prompt(1, 0, 84)), Path::Append);
    // One whose events are missing is guessed about.
    let mut guessing = Driver::with_workers("kv-aware", &workers(&ONE_EACH));
    assert_eq!(next(&mut guessing, prompt(1, 0, 80)), Path::Seed);
    assert_eq!(next(&mut guessing, prompt(1, 0, 82)), Path::Append);
    // So is one that is not asked first.
    let mut sticky = Driver::with_workers("sticky", &telling(&ONE_EACH));
    assert_eq!(next(&mut sticky, prompt(1, 0, 80)), Path::Seed);
    assert_eq!(next(&mut sticky, prompt(1, 0, 82)), Path::Append);
}

#[test]
fn a_decision_says_whether_kv_is_kept() {
    let mut driver = Driver::with_workers("kv-aware:seed_min_turn=2", &workers(&ONE_EACH));
    next(&mut driver, prompt(1, 0, 80));
    next(&mut driver, prompt(1, 0, 82));
    let kept: Vec<_> = driver.decisions.iter().map(|decision| decision.keeps_kv).collect();
    assert_eq!(kept, [false, true]);
}

#[test]
fn a_turn_pauses_for_as_long_as_its_worker_asks_whatever_is_freed() {
    let mut driver = Driver::with_workers("kv-aware:backpressure=on", &workers(&ONE_EACH));
    let running = driver.turn(SessionHint::Explicit(2), prompt(2, 0, 80), 50);
    driver.tell(Event::Load(LoadReport {
        worker: WorkerId(1),
        running: 1,
        waiting: 0,
        kv_tokens_used: 1_000,
        transfer_queue: 0,
        retracted: 1,
    }));
    let request = driver.turn(SessionHint::Explicit(1), prompt(1, 0, 80), 50);
    let waits = |driver: &Driver| driver.router.explain(request).unwrap().waited_for;
    assert_eq!(waits(&driver).as_deref(), Some("pauses 1500 ms as w1 asks"));
    driver.wait(Duration::from_millis(500));
    driver.serve(running);
    assert_eq!(driver.router.queue_length(), 1, "what is freed does not end a pause");
    assert!(driver.time_out());
    assert_eq!(driver.now, Instant::ZERO + Duration::from_millis(1_500));
    assert_eq!(driver.router.queue_length(), 0);
    driver.serve(request);
}
