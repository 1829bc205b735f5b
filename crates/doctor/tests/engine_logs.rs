//! Logs of other engines, as their users pasted them into issues (ids shortened): each is told for what it is.

use homing_doctor::{Level, ModeId, engine_logs};
use std::collections::BTreeMap;

fn diagnose(name: &str, text: &str) -> Vec<homing_doctor::Finding> {
    engine_logs::diagnose(&BTreeMap::from([(name.to_owned(), text.to_owned())]))
}

#[track_caller]
fn check(name: &str, text: &str, expected: &[ModeId]) {
    let found = diagnose(name, text);
    let modes: Vec<_> = found.iter().map(|finding| finding.mode).collect();
    assert_eq!(modes, expected, "{found:#?}");
    assert_eq!(engine_logs::knows(text), !expected.is_empty());
}

#[test]
fn sglang_is_understood() {
    check(
        "prefill-0.log",
        include_str!("fixtures/sglang-prefill.log"),
        &[ModeId::Cascade, ModeId::EarlyClock],
    );
    check(
        "decode-1.log",
        include_str!("fixtures/sglang-decode.log"),
        &[
            ModeId::AbortStorm,
            ModeId::Cascade,
            ModeId::CorrectionCrash,
            ModeId::EvictStorm,
            ModeId::NoBackpressure,
        ],
    );
}

#[test]
fn vllm_is_understood() {
    check(
        "prefill.log",
        include_str!("fixtures/vllm-prefill.log"),
        &[ModeId::StrandedKv],
    );
    check(
        "decode.log",
        include_str!("fixtures/vllm-decode.log"),
        &[ModeId::Cascade, ModeId::SilentRecompute, ModeId::NoBackpressure],
    );
}

#[test]
fn a_healthy_log_says_nothing() {
    check("decode.log", include_str!("fixtures/healthy.log"), &[]);
}

#[test]
fn lines_are_named_and_costs_are_counted() {
    let found = diagnose("prefill-0.log", include_str!("fixtures/sglang-prefill.log"));
    assert_eq!((found[0].level, found[0].cost.failed_requests), (Level::Error, 4));
    let proof = &found[0].evidence[0];
    assert_eq!((proof.file.as_str(), proof.line), ("prefill-0.log", 3));
    assert!(proof.value.contains("Decode instance could be dead"), "{}", proof.value);
    assert!((found[1].cost.latency_s - 300.0).abs() < 1e-9);
    let found = diagnose("decode-1.log", include_str!("fixtures/sglang-decode.log"));
    let storm = found
        .iter()
        .find(|finding| finding.mode == ModeId::EvictStorm)
        .expect("two releases");
    assert!(
        storm.seen.contains("(66863 on average, 67726 at most)"),
        "{}",
        storm.seen
    );
}
