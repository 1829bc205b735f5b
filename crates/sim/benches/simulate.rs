//! What a whole simulation costs on one core: the budget is 2 s for the papers' 4,449 requests on 8 workers.

use criterion::{Criterion, criterion_group, criterion_main};
use homing_sim::{Cluster, SimConfig, simulate};
use homing_workload::{Start, generate};
use std::hint::black_box;

fn papers_baseline(criterion: &mut Criterion) {
    let trace = generate("gen:swe52", 1).expect("built in");
    let cluster = Cluster::preset("h100x8-dp").expect("built in");
    let mut config = SimConfig::new(&trace, cluster, "dp-cache-aware".parse().expect("built in"));
    config.replay.start = Start::Concurrency(32);
    config.replay.time_scale = 10.0;
    let mut group = criterion.benchmark_group("simulate");
    group.sample_size(10);
    group.bench_function("swe52 on 8 workers", |bencher| {
        bencher.iter(|| simulate(black_box(&trace), &config).expect("it runs"));
    });
    group.finish();
}

criterion_group!(benches, papers_baseline);
criterion_main!(benches);
