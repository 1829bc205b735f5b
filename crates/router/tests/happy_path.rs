//! One session's life on a prefill/decode cluster, event by event: the order that drivers rely on.

use homing_kv::{BlockHash, Prompt};
use homing_router::action::{Action, Dispatch, KvUse, Path, RouteError};
use homing_router::event::{Abilities, ClientKind, Event, Leg, LegId, LegUsage, Role, SessionHint, Turn, WorkerInfo};
use homing_router::{Router, RouterConfig};
use homing_units::{BootEpoch, Duration, Instant, RequestId, WorkerId};

fn worker(id: u32, role: Role) -> Event {
    Event::WorkerJoined(WorkerInfo {
        id: WorkerId(id),
        name: format!("w{id}"),
        role,
        epoch: BootEpoch(1),
        kv_tokens: 100_000,
        max_context_tokens: 50_000,
        transfers: true,
        kv_events: true,
        abilities: Abilities::default(),
    })
}

fn turn(request: u64, blocks: u128) -> Event {
    let hashes: Vec<_> = (1..=blocks).map(BlockHash).collect();
    let tokens = u32::try_from(blocks * 16 + 5).expect("a short prompt");
    Event::Turn(Turn {
        request: RequestId(request),
        session: SessionHint::Recognise,
        prompt: Prompt::new(hashes, tokens, 16),
        max_output_tokens: 100,
        priority: 0,
        kind: ClientKind::default(),
        compared: None,
    })
}

fn leg(request: u64, leg: Leg) -> LegId {
    LegId {
        request: RequestId(request),
        attempt: 0,
        leg,
    }
}

fn actions(router: &mut Router, second: u64, event: Event) -> Vec<Action> {
    router.handle(Instant::ZERO + Duration::from_secs(second), event);
    router.check_invariants();
    std::iter::from_fn(|| router.poll_action()).collect()
}

fn dispatched(actions: &[Action]) -> Vec<Dispatch> {
    let dispatch = |action: &Action| {
        if let Action::Dispatch(dispatch) = action {
            Some(*dispatch)
        } else {
            None
        }
    };
    actions.iter().filter_map(dispatch).collect()
}

fn ended(request: u64) -> Event {
    let usage = LegUsage {
        cached_tokens: Some(0),
        output_tokens: 40,
    };
    Event::Finished {
        leg: leg(request, Leg::Decode),
        usage,
    }
}

#[test]
fn a_session_is_seeded_once_and_appends_from_then_on() {
    let mut router = Router::new(RouterConfig {
        policy: "homing:local_tokens=1024"
            .parse()
            .expect("the planner and a parameter of it"),
        ..RouterConfig::default()
    });
    actions(&mut router, 0, worker(0, Role::Prefill));
    actions(&mut router, 0, worker(1, Role::Decode));
    let first = actions(&mut router, 1, turn(0, 1_000));
    assert!(
        matches!(&first[0], Action::Decided(decision) if decision.path == Path::Seed),
        "{first:?}"
    );
    let sent = |leg, worker, kv| Dispatch {
        leg,
        worker: WorkerId(worker),
        kv,
        prefix_tokens: None,
    };
    assert_eq!(dispatched(&first), [sent(leg(0, Leg::Prefill), 0, KvUse::Export)]);
    let answer = Event::PrefillDone {
        leg: leg(0, Leg::Prefill),
        cached_tokens: Some(0),
    };
    let ready = actions(&mut router, 2, answer);
    let import = KvUse::Import { from: WorkerId(0) };
    assert_eq!(dispatched(&ready), [sent(leg(0, Leg::Decode), 1, import)]);
    assert!(
        actions(
            &mut router,
            3,
            Event::FirstToken {
                leg: leg(0, Leg::Decode)
            }
        )
        .is_empty()
    );
    assert!(actions(&mut router, 4, ended(0)).is_empty());
    assert!(router.idle());

    let second = actions(&mut router, 5, turn(1, 1_010));
    let Action::Decided(decision) = &second[0] else {
        panic!("{second:?}")
    };
    assert_eq!(
        (decision.path, decision.turn_index, decision.expected_cached_tokens),
        (Path::Append, 1, 16_000)
    );
    assert_eq!(dispatched(&second), [sent(leg(1, Leg::Decode), 1, KvUse::Local)]);
    let gone = actions(&mut router, 6, Event::ClientGone(RequestId(1)));
    let cancel = Action::Cancel {
        leg: leg(1, Leg::Decode),
        worker: WorkerId(1),
    };
    assert_eq!(gone, [cancel]);
    assert!(router.idle());
}

#[test]
fn nobody_can_serve_it() {
    let mut router = Router::new(RouterConfig::default());
    let reject = |error| {
        vec![Action::Reject {
            request: RequestId(0),
            error,
        }]
    };
    assert_eq!(actions(&mut router, 0, turn(0, 10)), reject(RouteError::NoWorker));
    actions(&mut router, 0, worker(0, Role::Both));
    assert_eq!(
        actions(&mut router, 0, turn(0, 4_000)),
        reject(RouteError::ContextTooLong { limit: 50_000 })
    );
}
