//! What a worker's own sketches say is resident, where its KV events do not.

use super::*;

/// The session of [`after_a_turn`].
const OWN: u64 = 1;

fn sketch(session: Option<SessionId>, prompt: &Prompt, blocks: usize) -> SessionSketch {
    SessionSketch {
        session,
        tip_blocks: u32::try_from(blocks).expect("prompts are short"),
        tip: blocks.checked_sub(1).map_or(0, |last| prompt.blocks[last].wire()),
        sketch: Sketch::of(&prompt.blocks[..blocks]).expect("prompts are short"),
    }
}

fn report(epoch: u64, sequence: u64, age_ms: u64, sketch: SessionSketch) -> Event {
    Event::Sketches(SketchReport {
        worker: WorkerId(0),
        epoch: BootEpoch(epoch),
        sequence,
        age: Duration::from_millis(age_ms),
        sketches: vec![sketch],
    })
}

/// One worker that has served a turn of 100 blocks, the last of it a second ago; and the turn's session.
fn after_a_turn(kv_events: bool) -> (Driver, SessionId) {
    let info = WorkerInfo {
        kv_events,
        ..worker(0, Role::Both)
    };
    let mut driver = Driver::with_workers("homing", &[info]);
    driver.wait(Duration::from_secs(10));
    let request = driver.turn(RECOGNISE, prompt(OWN, 0, 100), 50);
    driver.serve(request);
    let session = driver.decision(request).session;
    driver.wait(Duration::from_secs(1));
    (driver, session)
}

/// Blocks of the session's next turn that are expected at the worker.
fn expected(driver: &mut Driver) -> u32 {
    let request = driver.turn(RECOGNISE, prompt(OWN, 0, 110), 50);
    driver.decision(request).expected_cached_tokens / BLOCK
}

fn status(driver: &Driver) -> homing_router::WorkerStatus {
    driver.router.view_workers().swap_remove(0)
}

#[test]
fn a_sketch_goes_before_what_was_predicted_earlier() {
    let own = prompt(OWN, 0, 100);
    let check = |told: &dyn Fn(SessionId) -> Vec<Event>, wait_s, blocks: u32, why: &str| {
        let (mut driver, session) = after_a_turn(false);
        told(session).into_iter().for_each(|event| driver.tell(event));
        driver.wait(Duration::from_secs(wait_s));
        assert_eq!(expected(&mut driver), blocks, "{why}");
    };
    let says = |session, blocks| sketch(Some(session), &own, blocks);
    check(&|_| vec![], 0, 100, "nothing was said");
    check(
        &|session| vec![report(1, 7, 0, says(session, 40))],
        0,
        40,
        "the rest was evicted",
    );
    check(
        &|session| vec![report(1, 7, 0, says(session, 0))],
        0,
        0,
        "all was evicted",
    );
    check(
        &|session| vec![report(2, 7, 0, says(session, 40))],
        0,
        100,
        "another life says nothing of this one",
    );
    check(
        &|session| vec![report(1, 7, 5_000, says(session, 40))],
        0,
        100,
        "the turn came after what is said",
    );
    check(
        &|session| vec![report(1, 7, 0, says(session, 40)), report(1, 6, 0, says(session, 0))],
        0,
        40,
        "an earlier report that was late changes nothing",
    );
    check(
        &|session| vec![report(1, 7, 0, says(session, 40))],
        10,
        100,
        "what was said is old",
    );
}

#[test]
fn a_sketch_says_where_a_session_is_that_no_prediction_knows_of() {
    let check = |sketch: SessionSketch, blocks: u32| {
        let info = worker(0, Role::Both);
        let mut driver = Driver::with_workers("homing", &[info]);
        driver.tell(report(1, 0, 0, sketch));
        assert_eq!(status(&driver).sketched_sessions, 1);
        assert_eq!(expected(&mut driver), blocks);
    };
    // A router that was restarted: the session has a name that nobody knows any more.
    check(sketch(None, &prompt(OWN, 0, 100), 60), 60);
    check(sketch(None, &prompt(OWN, 0, 100), 0), 0);
    // Somebody else's, with the same boilerplate.
    check(sketch(None, &prompt(9, 10, 90), 60), 0);
}

fn stored(sequence: u64, prompt: &Prompt) -> Event {
    batch(
        sequence,
        KvUpdate::Stored {
            parent: None,
            hashes: prompt.blocks.to_vec(),
            tier: homing_kv::Tier::Gpu,
        },
    )
}

fn batch(sequence: u64, update: KvUpdate) -> Event {
    Event::Kv(KvBatch {
        worker: WorkerId(0),
        epoch: BootEpoch(1),
        sequence,
        updates: vec![update],
    })
}

#[test]
fn a_sketch_counts_where_the_index_is_not_exact() {
    let own = prompt(OWN, 0, 100);
    let begun = || {
        let (mut driver, session) = after_a_turn(true);
        driver.tell(stored(0, &own));
        driver.wait(Duration::from_secs(20));
        (driver, session)
    };
    let (mut driver, session) = begun();
    driver.tell(report(1, 1, 0, sketch(Some(session), &own, 40)));
    assert_eq!(status(&driver).sketched_sessions, 0, "events say it all");
    assert_eq!(expected(&mut driver), 100);

    // A gap is being filled: what the worker says is later than all that the index was told.
    let (mut driver, session) = begun();
    driver.tell(stored(2, &prompt(2, 0, 9)));
    driver.tell(report(1, 3, 0, sketch(Some(session), &own, 40)));
    assert_eq!(expected(&mut driver), 40);

    // It is filled: events say it all again.
    let (mut driver, session) = begun();
    driver.tell(stored(2, &prompt(2, 0, 9)));
    driver.tell(report(1, 3, 0, sketch(Some(session), &own, 40)));
    driver.tell(stored(1, &prompt(3, 0, 9)));
    driver.tell(Event::ResyncDone {
        worker: WorkerId(0),
        complete: true,
    });
    assert_eq!(
        (status(&driver).state, status(&driver).sketched_sessions),
        (WorkerState::Exact, 0)
    );
    assert_eq!(expected(&mut driver), 100);
}

/// A gap that was given up: the index knows nothing of what came before it, the worker's sketch does; and what events say since counts.
#[test]
fn a_sketch_says_what_a_lost_event_did_not_and_later_events_go_before_it() {
    let own = prompt(OWN, 0, 100);
    let lost = || {
        let (mut driver, session) = after_a_turn(true);
        driver.tell(stored(2, &prompt(2, 0, 9)));
        while driver.time_out() {}
        assert_eq!(status(&driver).state, WorkerState::Degraded);
        (driver, session)
    };
    let removed = |driver: &mut Driver| {
        let hashes = own.blocks[50..].iter().rev().copied().collect();
        driver.tell(batch(
            3,
            KvUpdate::Removed {
                hashes,
                tier: homing_kv::Tier::Gpu,
            },
        ));
    };
    let (mut driver, _) = lost();
    assert_eq!(expected(&mut driver), 0);
    let (mut driver, session) = lost();
    driver.tell(report(1, 3, 0, sketch(Some(session), &own, 100)));
    assert_eq!(expected(&mut driver), 100);
    let (mut driver, session) = lost();
    driver.tell(report(1, 3, 0, sketch(Some(session), &own, 100)));
    removed(&mut driver);
    assert_eq!(expected(&mut driver), 50, "what was removed since is gone");
    // The report was under way while the event came: it is taken, and what was removed since is gone all the same.
    let (mut driver, session) = lost();
    driver.tell(report(1, 3, 0, sketch(None, &own, 0)));
    removed(&mut driver);
    driver.tell(report(1, 3, 0, sketch(Some(session), &own, 100)));
    assert_eq!(expected(&mut driver), 50);
    // A report of before the first event that was noted would bring back what was removed since.
    let (mut driver, session) = lost();
    removed(&mut driver);
    driver.tell(report(1, 3, 0, sketch(Some(session), &own, 100)));
    assert_eq!(expected(&mut driver), 0, "nobody knows what was removed since");
}

#[test]
fn what_sketches_are_worth_is_counted() {
    let (mut driver, session) = after_a_turn(false);
    let own = prompt(OWN, 0, 100);
    driver.tell(report(1, 7, 0, sketch(Some(session), &own, 40)));
    let request = driver.turn(RECOGNISE, prompt(OWN, 0, 110), 50);
    let leg = driver.leg(request);
    driver.first_token(leg);
    driver.finished(leg, Some(38 * BLOCK));
    let status = status(&driver);
    assert_eq!(
        (status.sketch_legs, status.sketch_raised, status.sketch_lowered),
        (1, 0, 1)
    );
    assert_eq!(status.sketch_error_tokens, u64::from(2 * BLOCK));
    assert_eq!(status.sketch_error_tokens_without, u64::from(62 * BLOCK));
}
