//! Prefill and decode, in tokens a second: `cargo bench -p homing-model`. SmolLM2 is measured where it is in the cache.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use homing_kv::BlockId;
use homing_model::{Chunk, KvStore, Model, ModelSpec, cached, default_cache_dir};
use std::hint::black_box;

const BLOCK_SIZE: u32 = 16;

/// A model, a pool, and a sequence whose first `context` tokens are in it.
struct Session {
    model: Model,
    kv: KvStore,
    tokens: Vec<u32>,
    blocks: Vec<BlockId>,
}

impl Session {
    fn new(model: Model, context: u32) -> Self {
        let vocab = u32::try_from(model.config().vocab).unwrap_or(u32::MAX);
        let blocks = context.div_ceil(BLOCK_SIZE);
        let kv = KvStore::new(model.config(), BLOCK_SIZE, blocks);
        let tokens = (0..context).map(|index| index * 7919 % vocab).collect();
        let mut session = Self {
            model,
            kv,
            tokens,
            blocks: (0..blocks).map(BlockId).collect(),
        };
        session.compute(0, context as usize, 1);
        session
    }

    /// Computes tokens `from..to` again, `copies` times in one batch.
    fn compute(&mut self, from: usize, to: usize, copies: usize) {
        let start = u32::try_from(from).unwrap_or(u32::MAX);
        let chunk = Chunk {
            tokens: &self.tokens[from..to],
            start,
            blocks: &self.blocks,
            logits: true,
        };
        black_box(self.model.forward(&mut self.kv, &vec![chunk; copies]).ok());
    }
}

fn measure(criterion: &mut Criterion, name: &str, load: impl Fn() -> Model) {
    let mut group = criterion.benchmark_group(name);
    group.sample_size(10);
    for context in [512, 2048] {
        let mut session = Session::new(load(), context);
        let end = context as usize;
        group.throughput(Throughput::Elements(256));
        group.bench_function(format!("prefill of 256 tokens up to {context}"), |bencher| {
            bencher.iter(|| session.compute(end - 256, end, 1));
        });
        for batch in [1, 4] {
            group.throughput(Throughput::Elements(batch as u64));
            group.bench_function(format!("decode of {batch} at {context} tokens"), |bencher| {
                bencher.iter(|| session.compute(end - 1, end, batch));
            });
        }
    }
}

fn forward(criterion: &mut Criterion) {
    measure(criterion, "tiny", || Model::tiny(1));
    match cached(&ModelSpec::SmolLm2, &default_cache_dir()) {
        Some(path) => measure(criterion, "smollm2", || {
            Model::load_gguf(&path).expect("the cached file is checked")
        }),
        None => println!("SKIPPED: SmolLM2 is not in the cache; `homing up --model smollm2` fetches it"),
    }
}

criterion_group!(benches, forward);
criterion_main!(benches);
