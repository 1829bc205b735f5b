//! What a step of the engine costs beside the model's work: planning it and taking its answer in. A simulated day is some
//! millions of steps, so it must not grow with the contexts.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use homing_engine::Engine;
use homing_engine::api::{EngineConfig, Input, Output, Sampled, Step, Submit, Transfer};
use homing_kv::Prompt;
use homing_units::{Instant, RequestId};

const BLOCK_SIZE: u32 = 16;

/// Takes outputs until the engine is quiet; the step among them, if there is one.
fn drain(engine: &mut Engine) -> Option<Step> {
    let mut step = None;
    while let Some(output) = engine.poll_output() {
        if let Output::Step(planned) = output {
            step = Some(planned);
        }
    }
    step
}

fn answer(step: &Step) -> Input {
    let sampling = step.items.iter().filter(|item| item.sample);
    let sampled = sampling.map(|item| Sampled {
        id: item.id,
        stop: false,
        filled: None,
    });
    Input::StepDone(sampled.collect())
}

/// An engine that decodes `batch` requests behind prompts of `context` tokens, and its outstanding step.
fn decoding(batch: u32, context: u32) -> (Engine, Step) {
    // Room for outputs that no measurement reaches the end of.
    let output = 4_000_000;
    let mut engine = Engine::new(EngineConfig {
        block_size: BLOCK_SIZE,
        kv_blocks: (context + output).div_ceil(BLOCK_SIZE) * batch,
        max_context_tokens: u32::MAX,
        ..EngineConfig::default()
    });
    for id in 0..batch {
        let tokens: Vec<u32> = (0..context).map(|position| id + position * batch).collect();
        engine.handle(
            Instant::ZERO,
            Input::Submit(Submit {
                id: RequestId(u64::from(id)),
                prompt: Prompt::of_tokens(&tokens, BLOCK_SIZE),
                max_output_tokens: output,
                transfer: Transfer::None,
                session: None,
                owner: None,
            }),
        );
    }
    loop {
        let step = drain(&mut engine).expect("there is work left");
        if step.items.len() == batch as usize && step.items.iter().all(|item| item.decode) {
            return (engine, step);
        }
        engine.handle(Instant::ZERO, answer(&step));
    }
}

fn decode_steps(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decode_step");
    for (batch, context) in [(1, 1_000), (8, 1_000), (8, 200_000), (64, 1_000), (64, 20_000)] {
        group.throughput(Throughput::Elements(u64::from(batch)));
        let name = BenchmarkId::from_parameter(format!("{batch}x{context}"));
        group.bench_function(name, |bencher| {
            let (mut engine, mut step) = decoding(batch, context);
            bencher.iter(|| {
                engine.handle(Instant::ZERO, answer(&step));
                step = drain(&mut engine).expect("outputs are long");
            });
        });
    }
    group.finish();
}

criterion_group!(benches, decode_steps);
criterion_main!(benches);
