//! What a decision costs: 256 workers, a prompt of 12,288 blocks (196,608 tokens), each worker holding some of it.
//! The budget is about 300 ns a block, 3.7 ms a turn.

use criterion::{Criterion, criterion_group, criterion_main};
use homing_kv::{BlockHash, Prompt, Tier};
use homing_router::event::Leg;
use homing_router::event::{
    Abilities, ClientKind, Event, KvBatch, KvUpdate, LegId, LegUsage, Role, SessionHint, Turn, WorkerInfo,
};
use homing_router::{Router, RouterConfig};
use homing_units::{BootEpoch, Duration, Instant, RequestId, WorkerId};
use std::hint::black_box;
use std::sync::Arc;

const WORKERS: u32 = 256;
const BLOCKS: u32 = 12_288;

fn hashes(conversation: u128, blocks: u32) -> Arc<[BlockHash]> {
    // Odd multipliers spread the low bits, as real hashes do.
    (0..u128::from(blocks))
        .map(|index| {
            BlockHash(((conversation << 64) | (index + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835))
        })
        .collect()
}

fn fleet(policy: &str) -> Router {
    let mut router = Router::new(RouterConfig {
        policy: policy.parse().expect("a policy"),
        ..RouterConfig::default()
    });
    let prompt = hashes(1, BLOCKS);
    for id in 0..WORKERS {
        router.handle(
            Instant::ZERO,
            Event::WorkerJoined(WorkerInfo {
                id: WorkerId(id),
                name: format!("w{id}"),
                role: if id % 4 == 0 { Role::Prefill } else { Role::Decode },
                epoch: BootEpoch(1),
                kv_tokens: 700_000,
                max_context_tokens: 262_144,
                transfers: true,
                kv_events: true,
                abilities: Abilities::default(),
            }),
        );
        let held = prompt[..(BLOCKS / WORKERS * (id + 1)) as usize].to_vec();
        let stored = KvUpdate::Stored {
            parent: None,
            hashes: held,
            tier: Tier::Gpu,
        };
        let batch = KvBatch {
            worker: WorkerId(id),
            epoch: BootEpoch(1),
            sequence: 0,
            updates: vec![stored],
        };
        router.handle(Instant::ZERO, Event::Kv(batch));
    }
    while router.poll_action().is_some() {}
    router
}

/// One turn from its start to its end, appended at its home.
fn turn(router: &mut Router, now: &mut Instant, request: u64, prompt: &Prompt) {
    *now += Duration::from_millis(100);
    let id = RequestId(request);
    let turn = Turn {
        request: id,
        session: SessionHint::Explicit(7),
        prompt: prompt.clone(),
        max_output_tokens: 100,
        priority: 0,
        kind: ClientKind::default(),
        compared: None,
    };
    router.handle(*now, Event::Turn(turn));
    while let Some(action) = router.poll_action() {
        black_box(action);
    }
    let leg = |leg| LegId {
        request: id,
        attempt: 0,
        leg,
    };
    router.handle(
        *now,
        Event::PrefillDone {
            leg: leg(Leg::Prefill),
            cached_tokens: None,
        },
    );
    router.handle(
        *now,
        Event::Finished {
            leg: leg(Leg::Decode),
            usage: LegUsage::default(),
        },
    );
    while router.poll_action().is_some() {}
    assert!(router.idle());
}

fn decide(criterion: &mut Criterion) {
    let prompt = Prompt::new(hashes(1, BLOCKS), BLOCKS * 16, 16);
    for policy in ["homing", "dp-cache-aware", "round-robin"] {
        let mut router = fleet(policy);
        let (mut now, mut request) = (Instant::ZERO, 0);
        criterion.bench_function(&format!("turn of 12K blocks, 256 workers, {policy}"), |bencher| {
            bencher.iter(|| {
                turn(&mut router, &mut now, request, &prompt);
                request += 1;
            });
        });
    }
}

criterion_group! { name = benches; config = Criterion::default().sample_size(20); targets = decide }
criterion_main!(benches);
