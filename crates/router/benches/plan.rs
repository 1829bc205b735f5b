//! What the planner's choice alone costs, on boards of 8 and of 256 workers, data-parallel and disaggregated. The budget is 20
//! microseconds for 8 workers and 150 for 256.

use criterion::{Criterion, criterion_group, criterion_main};
use homing_router::event::Role;
use homing_router::policies::{Board, TurnView, WorkerView};
use homing_router::speed::Speed;
use homing_router::{Account, PolicySpec};
use homing_units::{Duration, RequestId, SessionId, WorkerId};
use std::hint::black_box;

/// A worker in the middle of its work; each is loaded a little otherwise.
fn worker(id: u32, role: Role) -> WorkerView {
    let busy = id % 7;
    WorkerView {
        id: WorkerId(id),
        role,
        transfers: true,
        kv_tokens: 700_000,
        account: Account {
            requests: 8 + busy,
            decodes: 6 + busy,
            decode_tokens: 240_000,
            reserved_tokens: 300_000 + u64::from(busy) * 20_000,
            append_tokens: u64::from(busy) * 900,
            pending_pairs: u64::from(busy) * 40,
            ..Account::default()
        },
        running: 8,
        waiting: 0,
        transfer_queue: 0,
        retracted: 0,
        kv_tokens_used: 300_000,
        assigned_requests: 1_000,
        recent_ttft_s: Some(0.2),
        homed_sessions: 20,
        live_tokens: 600_000,
        live_own_tokens: 500_000 + u64::from(busy) * 60_000,
        live_sessions: 18 + busy,
        cached_tokens: 690_000,
        spills: false,
        prefilling_s: 0.0,
        speed: Speed::default(),
        resident_tokens: if id.is_multiple_of(3) { 38_000 } else { 12_000 },
        host_tokens: 0,
        exclusive_tokens: if id.is_multiple_of(3) { 26_000 } else { 0 },
        denies_alone: None,
        denies_seed: None,
        denies_prefill: None,
        denies_lend: None,
        denies_export: None,
    }
}

fn turn() -> TurnView {
    TurnView {
        request: RequestId(1),
        session: SessionId(1),
        turn_index: 12,
        prompt_tokens: 40_000,
        max_output_tokens: 4_096,
        expected_output_tokens: 240,
        expected_turns: 8.0,
        expected_gap_s: 10.0,
        return_share: 0.9,
        block_size: 16,
        shared_tokens: 12_000,
        history_tokens: 39_000,
        prefix: None,
        new_family: false,
        was_resident: true,
        home: Some(WorkerId(3)),
        waited: Duration::ZERO,
        may_transfer: true,
        may_fetch: true,
    }
}

fn plan(criterion: &mut Criterion) {
    let spec: PolicySpec = "homing".parse().expect("the planner's name");
    for workers in [8, 256] {
        for (shape, prefillers) in [("data-parallel", 0), ("a quarter prefills", workers / 4)] {
            let role = |id| match (prefillers, id) {
                (0, _) => Role::Both,
                (prefillers, id) if id < prefillers => Role::Prefill,
                _ => Role::Decode,
            };
            let board = Board {
                workers: (0..workers).map(|id| worker(id, role(id))).collect(),
                ..Board::default()
            };
            let (mut policy, turn) = (spec.build(), turn());
            criterion.bench_function(&format!("choose among {workers} workers, {shape}"), |bencher| {
                bencher.iter(|| black_box(policy.choose(black_box(&board), black_box(&turn))));
            });
        }
    }
}

criterion_group! { name = benches; config = Criterion::default().sample_size(20); targets = plan }
criterion_main!(benches);
