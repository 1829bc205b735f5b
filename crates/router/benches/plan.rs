//! What the planner's choice alone costs, on boards of 8 and of 256 workers, data-parallel and disaggregated: Criterion's estimate of
//! the mean, and the quantiles of [`DECISIONS`] decisions that were timed one by one, each on another board and turn. The budget is 20
//! microseconds for 8 workers and 150 for 256 at the 99th percentile; what else runs on the machine counts in it.

use criterion::{Criterion, criterion_group};
use homing_router::event::Role;
use homing_router::policies::{Board, Policy, TurnView, WorkerView};
use homing_router::speed::Speed;
use homing_router::{Account, PolicySpec};
use homing_units::{Duration, RequestId, SessionId, WorkerId};
use std::hint::black_box;

/// Decisions that are timed one by one.
const DECISIONS: u32 = 10_000;

/// Boards among which these go round.
const BOARDS: u32 = 64;

/// A worker in the middle of its work; each is loaded a little otherwise, and otherwise on each board.
fn worker(id: u32, role: Role, board: u32) -> WorkerView {
    let busy = (id + board) % 7;
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

fn turn(index: u32) -> TurnView {
    TurnView {
        request: RequestId(1),
        session: SessionId(1),
        turn_index: 12,
        prompt_tokens: 40_000 + index % 13 * 1_000,
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
        carried: false,
        waited: Duration::ZERO,
        may_transfer: true,
        may_fetch: true,
    }
}

fn board(workers: u32, prefillers: u32, index: u32) -> Board {
    let role = |id| match (prefillers, id) {
        (0, _) => Role::Both,
        (prefillers, id) if id < prefillers => Role::Prefill,
        _ => Role::Decode,
    };
    Board {
        workers: (0..workers).map(|id| worker(id, role(id), index)).collect(),
        ..Board::default()
    }
}

/// Numbers of workers and of those that prefill only, and what that is called.
fn shapes() -> impl Iterator<Item = (u32, u32, String)> {
    [8, 256].into_iter().flat_map(|workers| {
        [(0, "data-parallel"), (workers / 4, "a quarter prefills")]
            .map(|(prefillers, shape)| (workers, prefillers, format!("choose among {workers} workers, {shape}")))
    })
}

fn planner() -> Box<dyn Policy> {
    let spec: PolicySpec = "homing".parse().expect("the planner's name");
    spec.build()
}

fn plan(criterion: &mut Criterion) {
    for (workers, prefillers, name) in shapes() {
        let (mut policy, board, turn) = (planner(), board(workers, prefillers, 0), turn(0));
        criterion.bench_function(&name, |bencher| {
            bencher.iter(|| black_box(policy.choose(black_box(&board), black_box(&turn))));
        });
    }
}

/// How long one decision in two takes at most, and 99 in 100.
#[expect(clippy::disallowed_types, reason = "a bench measures time")]
fn quantiles() {
    for (workers, prefillers, name) in shapes() {
        let mut policy = planner();
        let boards: Vec<Board> = (0..BOARDS).map(|index| board(workers, prefillers, index)).collect();
        let mut timed = |index: u32| {
            let (board, turn) = (&boards[(index % BOARDS) as usize], turn(index));
            let begun = std::time::Instant::now();
            black_box(policy.choose(black_box(board), black_box(&turn)));
            begun.elapsed()
        };
        let _warm: Duration = (0..DECISIONS / 10).map(&mut timed).sum();
        let mut taken: Vec<_> = (0..DECISIONS).map(timed).collect();
        taken.sort_unstable();
        let at = |percent: usize| taken[(taken.len() * percent).div_ceil(100) - 1].as_nanos() as f64 / 1e3;
        println!(
            "{name}: p50 {:.1} us, p99 {:.1} us, most {:.1} us",
            at(50),
            at(99),
            at(100)
        );
    }
}

criterion_group! { name = benches; config = Criterion::default().sample_size(20); targets = plan }

fn main() {
    benches();
    quantiles();
    Criterion::default().configure_from_args().final_summary();
}
