//! What the router pays a turn for a prompt of 12,000 blocks in a fleet of 256 workers, and what the engine pays in a
//! pool of 50,000 blocks. The budget is 300 ns a block of the prompt for all that the index does in a turn.

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use homing_kv::{BlockHash, BlockId, BlockPool, ResidencyIndex, Tier, hash_blocks};
use homing_units::WorkerId;
use std::hint::black_box;

/// Blocks of a long agent prompt: 192,000 tokens in blocks of 16.
const PROMPT_BLOCKS: usize = 12_000;
/// Blocks at its head that every session of the fleet shares.
const BASE_BLOCKS: usize = 1_200;
const WORKERS: u32 = 256;
const POOL_BLOCKS: u32 = 50_000;

/// The prompt of a session: the shared head, then blocks of its own.
fn prompt(session: u32, blocks: usize) -> Vec<BlockHash> {
    let token = |place: usize| if place < BASE_BLOCKS { 0 } else { session };
    hash_blocks(&(0..blocks).map(token).collect::<Vec<_>>(), 1)
}

/// A fleet where each worker holds a session of 3,000 blocks, so all hold the shared head, and three hold the prompt in
/// different lengths: about 470,000 blocks.
fn fleet() -> (ResidencyIndex, Vec<BlockHash>) {
    let mut index = ResidencyIndex::new(1_000_000);
    for worker in 0..WORKERS {
        let hashes = prompt(worker + 1, 3_000);
        index.store(WorkerId(worker), None, &hashes, Tier::Gpu);
        index.own(u64::from(worker + 1), &hashes);
    }
    let asked = prompt(10_000, PROMPT_BLOCKS);
    for (worker, blocks) in [(3, PROMPT_BLOCKS), (90, 8_000), (200, 5_000)] {
        index.store(WorkerId(worker), None, &asked[..blocks], Tier::Gpu);
    }
    index.own(10_000, &asked);
    (index, asked)
}

fn index(criterion: &mut Criterion) {
    let (mut index, asked) = fleet();
    let mut group = criterion.benchmark_group("index");
    group.throughput(Throughput::Elements(PROMPT_BLOCKS as u64));
    group.bench_function("overlap", |bencher| {
        bencher.iter(|| index.overlap(Some(10_000), black_box(&asked)))
    });
    group.bench_function("deepest_exclusive", |bencher| {
        bencher.iter(|| index.deepest_exclusive(black_box(&asked)))
    });
    group.bench_function("own_again", |bencher| {
        bencher.iter(|| index.own(10_000, black_box(&asked)))
    });
    group.bench_function("own_and_disown", |bencher| {
        bencher.iter(|| {
            index.own(20_000, black_box(&asked));
            index.disown(20_000);
        });
    });
    let fresh = prompt(30_000, PROMPT_BLOCKS);
    group.bench_function("store_and_remove_a_cold_prompt", |bencher| {
        bencher.iter(|| {
            index.store(WorkerId(7), None, black_box(&fresh), Tier::Gpu);
            index.remove(WorkerId(7), &fresh[BASE_BLOCKS..], Tier::Gpu);
        });
    });
    group.finish();
}

/// A worker that holds everything restarts.
fn clear_worker(criterion: &mut Criterion) {
    let (full, _) = fleet();
    criterion.bench_function("index/clear_worker", |bencher| {
        bencher.iter_batched(
            || full.clone(),
            |mut index| {
                index.clear_worker(WorkerId(3));
                index
            },
            BatchSize::PerIteration,
        );
    });
}

/// Fills the pool with prompts of 2,000 blocks that nobody uses any more.
fn full_pool() -> BlockPool {
    let mut pool = BlockPool::new(POOL_BLOCKS);
    for session in 1..=POOL_BLOCKS / 2_000 {
        serve(&mut pool, &prompt(session, 2_000));
    }
    pool
}

/// One request from admission to its end.
fn serve(pool: &mut BlockPool, hashes: &[BlockHash]) {
    let mut blocks: Vec<BlockId> = pool.acquire_prefix(hashes);
    let cached = blocks.len();
    let rest = u32::try_from(hashes.len() - cached).expect("a prompt is short");
    blocks.extend(pool.allocate(rest).expect("the pool holds one prompt").blocks);
    for (place, block) in blocks.iter().enumerate().skip(cached) {
        pool.commit(*block, place.checked_sub(1).map(|before| hashes[before]), hashes[place]);
    }
    pool.release(&blocks);
}

fn pool(criterion: &mut Criterion) {
    let mut pool = full_pool();
    let mut group = criterion.benchmark_group("pool");
    for blocks in [2_000, PROMPT_BLOCKS] {
        let mut session = 10_000;
        group.throughput(Throughput::Elements(blocks as u64));
        group.bench_with_input(
            BenchmarkId::new("serve_cold_and_evict", blocks),
            &blocks,
            |bencher, blocks| {
                bencher.iter_batched_ref(
                    || {
                        session += 1;
                        prompt(session, *blocks)
                    },
                    |hashes| serve(&mut pool, hashes),
                    BatchSize::SmallInput,
                );
            },
        );
    }
    let warm = prompt(9_999, PROMPT_BLOCKS);
    serve(&mut pool, &warm);
    group.bench_function("serve_warm", |bencher| {
        bencher.iter(|| serve(&mut pool, black_box(&warm)))
    });
    group.bench_function("match_prefix", |bencher| {
        bencher.iter(|| pool.match_prefix(black_box(&warm)))
    });
    group.bench_function("demote", |bencher| {
        bencher.iter(|| {
            serve(&mut pool, &warm);
            pool.demote(black_box(&warm))
        });
    });
    group.finish();
}

criterion_group!(benches, index, clear_worker, pool);
criterion_main!(benches);
