//! Lives of workers, and what their KV events say.

use super::*;

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

/// The numbers of a worker's events begin anew: nothing of them is believed until another life is met, or none was.
#[test]
fn events_that_begin_anew_are_of_another_life_or_asked_for_again() {
    let restarted = Event::KvRestarted {
        worker: WorkerId(1),
        epoch: BootEpoch(1),
    };
    let begun_anew = || {
        let mut driver = Driver::with_workers("homing", &with_events(&[Role::Both; 2]));
        driver.tell(stored(1, 0, &prompt(1, 0, 100)));
        driver.tell(restarted.clone());
        driver.tell(restarted.clone());
        assert_eq!(driver.identified, [WorkerId(1)], "it is asked once who it is");
        assert_eq!(driver.states[&WorkerId(1)], WorkerState::Degraded);
        driver.tell(stored(1, 1, &prompt(2, 0, 50)));
        let indexed = driver.router.view_workers()[1].indexed_gpu_blocks;
        assert_eq!(indexed, 100, "what comes now may be of another life");
        driver
    };
    let mut driver = begun_anew();
    driver.tell(health(1, 2, true));
    assert_eq!(driver.states[&WorkerId(1)], WorkerState::Exact);
    assert_eq!(driver.router.view_workers()[1].indexed_gpu_blocks, 0);
    assert_eq!(driver.router.poll_timeout(), None, "nothing is waited for any more");

    let mut driver = begun_anew();
    assert!(driver.time_out());
    assert_eq!(driver.resyncs, [(WorkerId(1), 0)], "nobody has met another life");
    driver.tell(stored(1, 0, &prompt(2, 0, 50)));
    driver.tell(Event::ResyncDone {
        worker: WorkerId(1),
        complete: true,
    });
    assert_eq!(driver.states[&WorkerId(1)], WorkerState::Exact);
    assert_eq!(driver.router.view_workers()[1].indexed_gpu_blocks, 50);
}

/// A worker that is back tells of its room before a probe has met its life. The driver follows the events of the old one until then: to be asked
/// for those of the new one too soon, it would say that they are lost, for good.
#[test]
fn room_told_of_a_life_that_no_probe_has_met_brings_nobody_back() {
    let mut driver = Driver::with_workers("homing", &with_events(&[Role::Both; 2]));
    driver.tell(stored(1, 0, &prompt(1, 0, 100)));
    die(&mut driver, 1);
    driver.tell(Event::Room(RoomReport {
        worker: WorkerId(1),
        epoch: BootEpoch(2),
        spare_tokens: 1_000,
        pause: Duration::ZERO,
    }));
    assert_eq!(driver.states[&WorkerId(1)], WorkerState::Dead);
    driver.tell(health(1, 2, true));
    assert_eq!(driver.resyncs, [], "a new life has nothing in its cache");
    assert_eq!(driver.states[&WorkerId(1)], WorkerState::Exact);
    assert_eq!(driver.router.view_workers()[1].indexed_gpu_blocks, 0);
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
