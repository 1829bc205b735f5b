//! Step-time models: values computed by hand from the closed forms, the kernels that the forms were fitted to, and a
//! published measurement of a whole server.
//!
//! The kernel times were computed with aiconfigurator-core 0.12.0, Apache-2.0, NVIDIA CORPORATION & AFFILIATES.

use homing_engine::api::{EngineConfig, Input, Output, Sampled, Step, StepItem, Submit, Transfer};
use homing_engine::{Chunk, Engine, StepModel, StepShape};
use homing_kv::Prompt;
use homing_units::{Duration, Instant, RequestId};
use std::collections::BTreeMap;

fn shape(chunks: &[(u32, u32)], decode_batch: u32, context_each: u64) -> StepShape {
    StepShape {
        prefills: chunks
            .iter()
            .map(|&(tokens, prefix)| Chunk { tokens, prefix })
            .collect(),
        decode_batch,
        decode_context_tokens: u64::from(decode_batch) * context_each,
    }
}

fn profile(name: &str) -> StepModel {
    StepModel::profile(name).expect("a built-in profile")
}

#[test]
fn steps_take_what_the_closed_form_says() {
    let check = |name: &str, shape: StepShape, expected_ns: u128| {
        let time = profile(name).step_time(&shape).as_nanos();
        assert_eq!(time, expected_ns, "{name} {shape:?}");
    };
    // 4.230 + 18.809 * (1 - 0.9375^(0.709 * 1)) + 0.011 * 1 + 3.161e-5 * 1,024 + 0.7
    check("h100-qwen3-30b", shape(&[], 1, 1024), 5_814_633);
    // 4.230 + 18.809 * (1 - 0.9375^(0.709 * 10)) + 0.011 * 10 + 3.161e-5 * 25,600 + 0.7
    check("h100-qwen3-30b", shape(&[], 10, 2560), 12_755_610);
    // 4.230 + 18.809 + 0.011 * 8,192 + 1.2017e-6 * 8,192 * 4,096 + 0.7
    check("h100-qwen3-30b", shape(&[(8192, 0)], 0, 0), 154_173_361);
    // ... + 1.2017e-6 * 2,048 * (30,000 + 1,024) + 3.161e-5 * 16 * 32,768 with m = 2,064
    check("h100-qwen3-30b", shape(&[(2048, 30_000)], 16, 32_768), 139_368_339);
    check("h20-qwen3-30b", shape(&[(8192, 0)], 0, 0), 584_653_017);
    // (6.684^3 + (0.021137 * 8,192)^3)^(1/3) + 7.917e-7 * 8,192 * 4,096 + 0.7
    check("h100-llama3-8b", shape(&[(8192, 0)], 0, 0), 200_422_668);
    // (6.684^3 + (0.021137 * 16)^3)^(1/3) + 0.00663 * 16 + 4.229e-5 * 16 * 16,384 + 0.7
    check("h100-llama3-8b", shape(&[], 16, 16_384), 18_576_438);
    check("h100-qwen3-32b-tp2", shape(&[(2048, 32_768)], 0, 0), 218_876_591);
}

#[test]
fn a_shape_is_the_sum_of_a_steps_items() {
    let item = |start, count, decode| StepItem {
        id: RequestId(1),
        start,
        count,
        sample: decode,
        decode,
    };
    let step = Step {
        number: 0,
        items: vec![
            item(99, 1, true),
            item(512, 100, false),
            item(0, 1, false),
            item(199, 1, true),
        ],
    };
    let expected = StepShape {
        decode_context_tokens: 300,
        ..shape(&[(100, 512), (1, 0)], 2, 0)
    };
    assert_eq!(StepShape::from(&step), expected);
}

/// A kernel time from the tables: chunks, decoding requests, their contexts, milliseconds.
type Row = (&'static [(u32, u32)], u32, u64, f64);

#[test]
fn the_forms_are_near_the_kernels_that_they_were_fitted_to() {
    let check = |name: &str, (mean_error_below, error_below): (f64, f64), rows: &[Row]| {
        let model = profile(name);
        let error = |(chunks, batch, context, kernel_ms): &Row| {
            let step_ms = model.step_time(&shape(chunks, *batch, *context)).as_secs_f64() * 1e3;
            let error = ((step_ms - model.overhead_ms) / kernel_ms - 1.0).abs();
            assert!(
                error < error_below,
                "{name} {chunks:?} {batch} x {context}: {step_ms} ms, kernels {kernel_ms}"
            );
            error
        };
        let mean = rows.iter().map(error).sum::<f64>() / rows.len() as f64;
        assert!(mean < mean_error_below, "{name}: mean error {mean}");
    };
    let h100: &[Row] = &[
        (&[(512, 0)], 0, 0, 28.7165),
        (&[(8192, 0)], 0, 0, 153.2159),
        (&[(131_072, 0)], 0, 0, 12_039.791_3),
        (&[(1024, 16_384)], 0, 0, 53.3680),
        (&[(4096, 65_536)], 0, 0, 401.0815),
        (&[(8192, 114_688)], 0, 0, 1_293.760_3),
        (&[(1024, 0), (1024, 0), (1024, 0), (1024, 0)], 0, 0, 70.1372),
        (&[], 4, 1024, 7.9055),
        (&[], 16, 32_768, 28.8596),
        (&[], 64, 1024, 24.1782),
        (&[], 128, 32_768, 155.5380),
        (&[(2048, 0)], 16, 32_768, 63.5114),
    ];
    check("h100-qwen3-30b", (0.025, 0.07), h100);
    let h200: &[Row] = &[
        (&[(8192, 0)], 0, 0, 138.4324),
        (&[(2048, 32_768)], 0, 0, 122.0977),
        (&[], 8, 32_768, 14.1377),
        (&[], 64, 1024, 17.7497),
    ];
    check("h200-qwen3-30b", (0.05, 0.12), h200);
    let b200: &[Row] = &[
        (&[(8192, 0)], 0, 0, 74.7585),
        (&[(2048, 32_768)], 0, 0, 62.7714),
        (&[], 8, 32_768, 8.8119),
        (&[], 64, 1024, 10.8260),
    ];
    // The form is worst for large batches with short contexts, where the experts' weights are nearly all of the step.
    check("b200-qwen3-30b", (0.09, 0.22), b200);
    let llama: &[Row] = &[
        (&[(8192, 0)], 0, 0, 199.7193),
        (&[(2048, 32_768)], 0, 0, 96.2214),
        (&[], 16, 16_384, 18.0812),
    ];
    check("h100-llama3-8b", (0.03, 0.07), llama);
    let qwen: &[Row] = &[
        (&[(8192, 0)], 0, 0, 475.9746),
        (&[(2048, 32_768)], 0, 0, 214.0823),
        (&[], 16, 16_384, 25.8966),
        (&[(2048, 30_000)], 8, 16_384, 213.4370),
    ];
    check("h100-qwen3-32b-tp2", (0.04, 0.07), qwen);
}

/// The H20 has no kernel table: the published time to first token of a lone prompt is what there is.
#[test]
fn the_h20_profile_is_near_public_prefill_measurements() {
    let model = profile("h20-qwen3-30b");
    for (tokens, measured_ms) in [
        (2048, 143.0),
        (8192, 583.0),
        (32_768, 4520.0),
        (65_536, 15_600.0),
        (131_072, 57_000.0),
    ] {
        let time = model.front_end() + model.step_time(&shape(&[(tokens, 0)], 0, 0));
        let error = (time.as_secs_f64() * 1e3 / measured_ms - 1.0).abs();
        assert!(error < 0.06, "{tokens} tokens: {time:?}, measured {measured_ms} ms");
    }
}

/// Published for an H20: an 8K prefill in chunks raises the time per token of 8 decoding requests to 114 ms while it lasts.
/// The form needs chunks of about 1,400 tokens for that.
#[test]
fn a_prefill_beside_decodes_stalls_them_as_published() {
    let model = profile("h20-qwen3-30b");
    let starts = (0..8192).step_by(1400);
    let steps: Vec<f64> = starts
        .map(|prefix| shape(&[(1400.min(8192 - prefix), prefix)], 8, 1024))
        .map(|shape| model.step_time(&shape).as_secs_f64() * 1e3)
        .collect();
    let mean_ms = steps.iter().sum::<f64>() / steps.len() as f64;
    assert!((mean_ms / 114.0 - 1.0).abs() < 0.05, "{mean_ms} ms a step");
    let alone_ms = model.step_time(&shape(&[], 8, 1024)).as_secs_f64() * 1e3;
    assert!((9.9..11.5).contains(&alone_ms), "{alone_ms} ms without a prefill");
}

#[test]
fn transfers_take_a_start_and_their_bytes() {
    let model = profile("h200-qwen3-30b");
    assert_eq!(model.kv_bytes(1000), 98_304_000);
    assert_eq!(model.transfer_time(0), Duration::from_millis(3));
    assert_eq!(model.transfer_time(40_000_000), Duration::from_millis(4));
    assert_eq!(model.reload_time(0), Duration::ZERO);
    assert_eq!(model.reload_time(50_000_000), Duration::from_millis(1));
}

/// The reload's assumption: a block is copied back many times faster than it is computed, wherever it stands in a chunk.
#[test]
fn a_reload_is_always_faster_than_computing() {
    for name in StepModel::profile_names() {
        let model = profile(name);
        let compute = model.step_time(&shape(&[(8192, 0)], 0, 0));
        let reload = model.reload_time(model.kv_bytes(8192));
        assert!(compute > 4 * reload, "{name}: {compute:?} against {reload:?}");
    }
}

#[test]
fn every_profile_is_sound_and_a_round_trip_through_toml_changes_nothing() {
    for name in StepModel::profile_names() {
        let model = profile(name);
        let text = toml::to_string(&model).expect("a model is TOML");
        assert_eq!(StepModel::from_toml(&text).expect("its own text"), model, "{name}");
    }
}

#[test]
fn broken_models_say_what_was_expected() {
    let check = |text: &str, expected: &str| {
        let error = StepModel::from_toml(text).expect_err("broken").to_string();
        assert!(error.contains(expected), "{error}\nshould contain\n{expected}");
    };
    let head = "model = 'm'\nkv_bytes_per_token = 1\nkv_tokens = 1\nstep_error_percent = 0.0\n";
    let dense = "[dense]\nbase_ms = 1.0\ntoken_ms = 1.0\nattention_ms = 0.0\nrequest_ms = 0.0\ncontext_ms = 0.0\n";
    let moe = "[moe]\nexperts = 4\nexperts_per_token = 8\nbase_ms = 1.0\nexperts_ms = 1.0\nsaturation = 1.0\n\
               token_ms = 1.0\nattention_ms = 0.0\ncontext_ms = 0.0\n";
    assert!(StepModel::from_toml(&format!("{head}{dense}")).is_ok());
    check(head, "exactly one of the tables `[moe]` and `[dense]`, found neither");
    check(&format!("{head}{dense}{moe}"), "found both");
    check(
        &format!("{head}{moe}"),
        "`moe.experts_per_token` of a step-time model is `8`, expected at most",
    );
    check(
        &format!("{head}{}", dense.replace("base_ms = 1.0", "base_ms = -1.0")),
        "`dense.base_ms`",
    );
    check(
        &format!("{head}{}", dense.replace("base_ms = 1.0", "base_ms = nan")),
        "expected a finite number",
    );
    check(
        &format!("{head}{}", dense.replace("base_ms = 1.0\n", "")),
        "missing field `base_ms`",
    );
    check(&format!("{head}{dense}speed = 1.0\n"), "unknown field `speed`");
    check("= 3", "broken step-time model");
    let error = StepModel::profile("h100").expect_err("no such profile").to_string();
    assert!(
        error.starts_with("no step-time profile `h100`, expected one of `h100-qwen3-30b`, `h200-qwen3-30b`"),
        "{error}"
    );
}

/// A closed loop: so many requests in flight until all are served. Returns the whole run and each request's time per
/// output token after the first.
fn closed_loop(model: &StepModel, prompt: u32, output: u32, in_flight: u64, requests: u64) -> (Duration, Vec<f64>) {
    let config = EngineConfig {
        kv_blocks: model.kv_tokens / 16,
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(config);
    let mut now = Instant::ZERO;
    let submit = |id: u64| {
        let first = u32::try_from(id).expect("small") * prompt;
        let tokens: Vec<u32> = (first..first + prompt).collect();
        Input::Submit(Submit {
            id: RequestId(id),
            prompt: Prompt::of_tokens(&tokens, 16),
            max_output_tokens: output,
            transfer: Transfer::None,
            session: None,
            owner: None,
        })
    };
    let mut next = in_flight;
    (0..in_flight).for_each(|id| engine.handle(now, submit(id)));
    let mut first_token = BTreeMap::new();
    let mut per_token = Vec::new();
    while per_token.len() < usize::try_from(requests).expect("small") {
        let mut step = None;
        while let Some(output) = engine.poll_output() {
            match output {
                Output::Step(planned) => step = Some(planned),
                Output::Finished(finished) => {
                    let tokens = f64::from(finished.usage.output_tokens - 1);
                    per_token.push((now - first_token[&finished.id]).as_secs_f64() / tokens);
                    if next < requests {
                        engine.handle(now, submit(next));
                        next += 1;
                    }
                }
                Output::Kv(_) => {}
                other => panic!("unexpected {other:?}"),
            }
        }
        let Some(step) = step else { continue };
        now += model.step_time(&StepShape::from(&step));
        let sampling = step.items.iter().filter(|item| item.sample);
        let sampled: Vec<Sampled> = sampling
            .map(|item| Sampled {
                id: item.id,
                stop: false,
                filled: None,
            })
            .collect();
        for sample in &sampled {
            first_token.entry(sample.id).or_insert(now);
        }
        engine.handle(now, Input::StepDone(sampled));
    }
    (now - Instant::ZERO, per_token)
}

/// Qwen3-30B-A3B in bf16 on one H100, 2,048 tokens in and 1,024 out, 10 at a time, 100 in all. Published: 13.18 ms a token
/// and 137.3 s. The closed form, driven through the engine core, is known to give 12.9 ms and 133.5 s.
#[test]
fn a_published_run_is_reproduced() {
    let (whole, per_token) = closed_loop(&profile("h100-qwen3-30b"), 2048, 1024, 10, 100);
    let mean_ms = per_token.iter().sum::<f64>() / per_token.len() as f64 * 1e3;
    assert!((mean_ms / 12.9 - 1.0).abs() < 0.02, "{mean_ms} ms a token");
    let seconds = whole.as_secs_f64();
    assert!((seconds / 133.5 - 1.0).abs() < 0.02, "{seconds} s in all");
    assert!(
        (seconds / 137.3 - 1.0).abs() < 0.05,
        "{seconds} s in all, published 137.3"
    );
}
