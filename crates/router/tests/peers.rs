//! The policies of other systems, run through the whole router: what they are picked for and what they are known for shows.

mod support;

use homing_router::action::Path;
use homing_router::event::{FailureCause, Leg, Resume, Role, SessionHint};
use homing_units::RequestId;
use std::collections::BTreeSet;
use support::{Driver, prompt, workers};

const PEERS: [&str; 4] = ["peer-dynamo", "peer-sglang", "peer-llmd", "peer-vllm-hash"];
const DP: [Role; 4] = [Role::Both; 4];
const PD: [Role; 4] = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];

fn named(session: u64) -> SessionHint {
    SessionHint::Explicit(u128::from(session))
}

/// Six sessions of five turns, all sessions' turns at one time; where each was decoded, and how.
fn conversations(policy: &str, roles: &[Role]) -> Vec<BTreeSet<(Path, Option<u32>, u32)>> {
    let mut driver = Driver::with_workers(policy, &workers(roles));
    let mut went = vec![BTreeSet::new(); 6];
    for turn in 0..5 {
        let sent: Vec<_> = (0..6)
            .map(|session| {
                let grown = prompt(session, 0, 100 + 10 * turn);
                driver.turn(named(session), grown, 50)
            })
            .collect();
        assert_eq!(driver.router.queue_length(), 0, "{policy}: sent at once");
        for (request, went) in sent.into_iter().zip(&mut went) {
            let decision = driver.decision(request);
            let path = if turn == 0 { Path::Append } else { decision.path };
            went.insert((path, decision.prefill.map(|id| id.0), decision.decode.0));
            driver.serve(request);
        }
    }
    assert!(driver.router.idle(), "{policy}");
    assert!(driver.ended.values().all(|how| *how == "finished"), "{policy}");
    went
}

#[test]
fn alone_each_keeps_a_session_where_it_was() {
    for policy in PEERS {
        for went in conversations(policy, &DP) {
            let places: Vec<_> = went.into_iter().collect();
            assert!(
                matches!(places[..], [(Path::Append, None, _)]),
                "{policy} on one worker: {places:?}"
            );
        }
    }
}

#[test]
fn apart_each_turn_is_prefilled_apart() {
    for policy in PEERS {
        for went in conversations(policy, &PD) {
            assert!(
                went.iter()
                    .all(|(_, prefill, decode)| prefill.is_some_and(|id| id < 2) && *decode >= 2)
            );
            let prefills: BTreeSet<_> = went.iter().map(|(_, prefill, _)| *prefill).collect();
            assert_eq!(
                prefills.len(),
                1,
                "{policy} prefills a session where its prefix is: {went:?}"
            );
        }
    }
}

#[test]
fn a_short_tail_is_prefilled_where_it_decodes_if_that_is_asked_for() {
    for policy in [
        "peer-dynamo:conditional=isl",
        "peer-llmd:decider=prefix-based:non_cached=1024:decode=affinity",
    ] {
        let mut driver = Driver::with_workers(policy, &workers(&PD));
        let mut turn = |blocks| {
            let request = driver.turn(named(1), prompt(1, 0, blocks), 50);
            driver.serve(request);
            let decision = driver.decision(request);
            (decision.path, decision.prefill.is_some())
        };
        // 1,603 tokens are new, then 160 and 160 more, then 1,600.
        let went = [turn(100), turn(110), turn(120)];
        let expected = [(Path::Seed, true), (Path::Append, false), (Path::Append, false)];
        assert_eq!(went, expected, "{policy}");
    }
}

#[test]
fn a_shared_beginning_herds_new_sessions_where_it_counts() {
    // Of 100 blocks the first 80 are the same in all sessions, which come one after the other.
    let places = |policy: &str| {
        let mut driver = Driver::with_workers(policy, &workers(&DP));
        let went = (0..16).map(|session| {
            let request = driver.turn(named(session), prompt(session, 80, 20), 50);
            driver.serve(request);
            driver.decision(request).decode
        });
        went.collect::<BTreeSet<_>>().len()
    };
    assert_eq!(places("peer-sglang"), 1);
    assert_eq!(places("peer-llmd"), 1);
    assert_eq!(places("peer-dynamo"), 1);
    assert_eq!(places("peer-vllm-hash"), 4);
    assert_eq!(places("peer-vllm-hash:key=prefix"), 1);
}

#[test]
fn dynamo_holds_turns_back_while_all_workers_are_busy_with_prefill() {
    let mut driver = Driver::with_workers("peer-dynamo", &workers(&[Role::Both]));
    let turn = |driver: &mut Driver, session| driver.turn(named(session), prompt(session, 0, 2_500), 50);
    // 40,003 tokens to prefill are more than 4 batches of 8,192.
    let first = turn(&mut driver, 1);
    let second = turn(&mut driver, 2);
    assert_eq!((driver.router.queue_length(), driver.legs.len()), (1, 1));
    let leg = driver.leg(first);
    driver.first_token(leg);
    assert_eq!(
        (driver.router.queue_length(), driver.legs.len()),
        (0, 2),
        "prefilled: the next may go"
    );
    driver.finished(leg, None);
    driver.serve(second);
    assert!(driver.router.idle());

    let mut driver = Driver::with_workers("peer-dynamo:queue=off", &workers(&[Role::Both]));
    turn(&mut driver, 1);
    turn(&mut driver, 2);
    assert_eq!((driver.router.queue_length(), driver.legs.len()), (0, 2));
}

/// How a request ends whose transfers all fail, and after how many tries.
fn tries(policy: &str) -> (u32, &'static str) {
    let mut driver = Driver::with_workers(policy, &workers(&PD));
    let request: RequestId = driver.turn(named(1), prompt(1, 0, 100), 50);
    let mut tries = 0;
    while !driver.ended.contains_key(&request) {
        if driver.legs.keys().all(|leg| leg.request != request) {
            assert!(driver.time_out(), "it waits for something");
            continue;
        }
        let leg = driver.leg(request);
        if leg.leg == Leg::Prefill {
            driver.prefill_done(leg);
        } else {
            tries += 1;
            driver.failed(leg, FailureCause::Transfer, Resume::Start);
        }
        assert!(tries <= 10, "{policy} tries for ever");
    }
    (tries, driver.ended[&request])
}

#[test]
fn they_retry_as_their_systems_do() {
    assert_eq!(tries("peer-dynamo"), (1, "transfer_failed"));
    assert_eq!(tries("peer-llmd"), (1, "transfer_failed"));
    assert_eq!(tries("peer-sglang"), (5, "transfer_failed"));
    assert_eq!(tries("peer-vllm-hash"), (5, "transfer_failed"));
}
