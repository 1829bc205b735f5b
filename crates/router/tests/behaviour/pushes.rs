//! Engines whose decode workers neither prefill nor keep anything, and whose two legs are sent together (SGLang).

use super::*;
use homing_router::event::{Abilities, LegFailure, LegId};

/// Prefill workers 0 and 1, decode workers 2 and 3 that need them for each turn.
fn helpless() -> Vec<WorkerInfo> {
    let of = |info: WorkerInfo| WorkerInfo {
        abilities: Abilities {
            prefills_alone: info.role == Role::Prefill,
            hands_over: false,
            caches: info.role == Role::Prefill,
        },
        ..info
    };
    workers(&PD).into_iter().map(of).collect()
}

#[test]
fn whatever_the_policy_each_turn_has_a_prefill_leg() {
    for policy in homing_router::policies::names() {
        let mut driver = Driver::with_workers(policy, &helpless());
        for tail in 0..4 {
            let request = driver.turn(RECOGNISE, prompt(1, 2, 20 + tail), 50);
            let decision = driver.decision(request);
            assert!(
                decision.prefill.is_some_and(|prefill| prefill.0 < 2) && decision.decode.0 >= 2,
                "{policy}: {decision:?}"
            );
            assert_eq!(decision.expected_cached_tokens, 0, "{policy}: nothing is kept there");
            driver.serve(request);
            assert_eq!(driver.ended[&request], "finished", "{policy}");
        }
        assert!(driver.router.idle());
    }
}

#[test]
fn a_decode_leg_that_was_sent_along_fails_before_the_prefill_leg_has_answered() {
    let mut driver = Driver::with_workers("homing", &helpless());
    let request = driver.turn(RECOGNISE, prompt(1, 0, 500), 50);
    let prefill = driver.leg(request);
    let decision = driver.decision(request).clone();
    let decode = LegId {
        leg: Leg::Decode,
        ..prefill
    };
    driver.tell(Event::LegFailed(LegFailure {
        leg: decode,
        cause: FailureCause::Unreachable,
        resume: Resume::Start,
    }));
    assert!(driver.late.contains(&prefill), "the prefill worker is told at once");
    assert_eq!(driver.states[&decision.decode], WorkerState::Suspect);
    assert_ne!(driver.decision(request).decode, decision.decode);
    driver.serve(request);
    assert!(driver.router.idle());
}

#[test]
fn failed_transfers_are_reported_as_what_they_were_where_nobody_can_do_without() {
    let mut driver = Driver::with_workers("homing", &helpless());
    let request = driver.turn(RECOGNISE, prompt(1, 0, 500), 50);
    while driver.live.contains_key(&request) {
        let prefill = driver.leg(request);
        assert_eq!(prefill.leg, Leg::Prefill, "nothing else would work");
        driver.prefill_done(prefill);
        driver.failed(driver.leg(request), FailureCause::Transfer, Resume::Start);
    }
    assert_eq!(driver.ended[&request], "transfer_failed");
    assert!(driver.router.idle());
}

#[test]
fn without_a_prefill_worker_nobody_waits_in_vain() {
    let mut driver = Driver::with_workers("homing", &helpless());
    let waits = driver.turn(RECOGNISE, prompt(1, 0, 500), 50);
    die(&mut driver, 0);
    die(&mut driver, 1);
    assert_eq!(driver.ended[&waits], "no_worker");
    let next = driver.turn(RECOGNISE, prompt(1, 0, 500), 50);
    assert_eq!(driver.ended[&next], "no_worker");
    driver.tell(health(1, 1, true));
    let served = driver.turn(RECOGNISE, prompt(1, 0, 500), 50);
    driver.serve(served);
    assert_eq!(driver.ended[&served], "finished");
}

#[test]
fn one_that_cannot_hand_over_is_no_source() {
    let mut infos = helpless();
    for info in &mut infos[2..] {
        info.abilities.caches = true;
    }
    let config = RouterConfig {
        migrate: true,
        ..RouterConfig::default()
    };
    let mut driver = Driver::with_config("round-robin", config, &infos);
    for _ in 0..3 {
        let (path, _) = served(&mut driver, RECOGNISE, prompt(1, 0, 500));
        assert_ne!(path, Path::Migrate);
    }
}
