//! Heavy tails: the prefill worker pulls the history from the worker that holds it before it computes the rest.

use super::*;
use homing_router::action::{Fetch, KvUse};

/// A session of 8,000 tokens at its home, most of it appended there; a turn with as much again is on its way.
fn heavy() -> (Driver, RequestId, u32) {
    let mut driver = Driver::with_workers("homing:append_tokens=4096:local_tokens=1024", &workers(&PD));
    let session = SessionHint::Explicit(5);
    let (_, home) = served(&mut driver, session, prompt(1, 0, 100));
    for blocks in [300, 500] {
        let appended = served(&mut driver, session, prompt(1, 0, blocks));
        assert_eq!(appended, (Path::Append, home));
    }
    let request = driver.turn(session, prompt(1, 0, 1_000), 50);
    let decision = driver.decision(request);
    let fetch = Fetch {
        from: WorkerId(home),
        tokens: 500 * support::BLOCK,
    };
    assert_eq!(
        (decision.fetch, decision.decode, decision.path),
        (Some(fetch), fetch.from, Path::Reseed)
    );
    (driver, request, home)
}

fn account(driver: &Driver, worker: u32) -> homing_router::Account {
    driver.router.view_workers()[worker as usize].in_flight
}

#[test]
fn its_home_lends_a_heavy_turns_history_and_pulls_back_what_is_new() {
    let (mut driver, request, home) = heavy();
    let prefill = driver.decision(request).prefill.unwrap();
    let mut sent = Vec::new();
    let mut exports = Vec::new();
    loop {
        let leg = driver.leg(request);
        let dispatch = driver.legs[&leg];
        sent.push((leg.leg, dispatch.worker.0, dispatch.kv, dispatch.prefix_tokens));
        exports.push((account(&driver, home).exports, account(&driver, prefill.0).exports));
        if leg.leg == Leg::Decode {
            break;
        }
        driver.leg_done(leg);
    }
    let import = |from: u32| KvUse::Import { from: WorkerId(from) };
    assert_eq!(
        sent,
        [
            (Leg::Lend, home, KvUse::Export, Some(8_000)),
            (Leg::Fetch, prefill.0, import(home), Some(8_000)),
            (Leg::Prefill, prefill.0, KvUse::Export, None),
            (Leg::Decode, home, import(prefill.0), None),
        ]
    );
    assert_eq!(
        exports,
        [(1, 0), (1, 0), (0, 0), (0, 1)],
        "each holds KV until it was pulled"
    );
    driver.serve(request);
    assert!(driver.router.idle());
}

/// However the history fails to come, the request is planned again without it, and the failed link is left alone a while.
#[test]
fn a_history_that_does_not_come_is_computed() {
    use FailureCause::{Engine, Invalid, Transfer};
    for (fails, cause) in [
        (Leg::Lend, Engine),
        (Leg::Lend, Invalid),
        (Leg::Fetch, Transfer),
        (Leg::Fetch, Engine),
    ] {
        let (mut driver, request, home) = heavy();
        while driver.leg(request).leg != fails {
            driver.leg_done(driver.leg(request));
        }
        driver.failed(driver.leg(request), cause, Resume::Start);
        if fails == Leg::Fetch {
            assert_eq!(
                driver.late.last().map(|leg| leg.leg),
                Some(Leg::Lend),
                "its lender is told"
            );
        }
        let decision = driver.decision(request).clone();
        assert_eq!((decision.attempt, decision.fetch), (1, None), "{fails:?} {cause:?}");
        assert_eq!(decision.decode.0, home, "its home is not to blame");
        driver.serve(request);
        assert!(driver.router.idle());
    }
}

#[test]
fn a_slow_or_lost_lender_ends_the_attempt_and_not_the_request() {
    let (mut driver, request, _) = heavy();
    let lend = driver.leg(request);
    driver.time_out();
    assert_eq!(driver.late, [lend]);
    assert_eq!(driver.decision(request).fetch, None);
    driver.serve(request);

    let (mut driver, request, home) = heavy();
    let lend = driver.leg(request);
    driver.leg_done(lend);
    let fetch = driver.leg(request);
    die(&mut driver, home);
    assert_eq!(driver.late, [lend, fetch]);
    assert_ne!(driver.decision(request).decode.0, home);
    driver.serve(request);
    assert!(driver.router.idle());

    let (mut driver, request, _) = heavy();
    driver.client_gone(request);
    assert!(driver.router.idle());
}

#[test]
fn where_it_is_switched_off_the_history_is_computed() {
    let config = RouterConfig {
        fetch: false,
        ..RouterConfig::default()
    };
    let mut driver = Driver::with_config("homing:append_tokens=4096:local_tokens=1024", config, &workers(&PD));
    let session = SessionHint::Explicit(5);
    for blocks in [100, 300, 500, 1_000] {
        served(&mut driver, session, prompt(1, 0, blocks));
    }
    assert!(driver.decisions.iter().all(|decision| decision.fetch.is_none()));
    assert_eq!(
        driver.decisions.last().map(|decision| decision.path),
        Some(Path::Reseed)
    );
}
