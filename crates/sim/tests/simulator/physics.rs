//! Times that can be computed by hand, and what must follow from where the KV is.

use crate::common::{BLOCK, config, one_session, run};
use homing_engine::{Chunk, StepModel, StepShape};
use homing_report::logs::{LogKind, TransferLine};
use homing_report::{Path, RequestRecord};
use homing_sim::SimConfig;
use homing_units::{Duration, Instant};
use homing_workload::Trace;

fn quiet(trace: &Trace, cluster: &str, policy: &str) -> SimConfig {
    let mut config = config(trace, cluster, policy);
    config.noise = false;
    config
}

fn prefill(model: &StepModel, tokens: u32, prefix: u32) -> Duration {
    model.step_time(&StepShape {
        prefills: [Chunk { tokens, prefix }].into_iter().collect(),
        ..StepShape::default()
    })
}

fn decode(model: &StepModel, context: u32) -> Duration {
    model.step_time(&StepShape {
        decode_batch: 1,
        decode_context_tokens: context.into(),
        ..StepShape::default()
    })
}

fn served(trace: &Trace, config: &SimConfig) -> Vec<RequestRecord> {
    let requests = run(trace, config).run.requests;
    assert!(requests.iter().all(|request| request.error.is_none()), "{requests:?}");
    requests
}

#[test]
fn a_lone_request_takes_its_front_end_and_its_steps() {
    let trace = one_session(&[(10_000, 4)]);
    let config = quiet(&trace, "h200x1-dp", "homing");
    let model = &config.cluster.step_model;
    let request = &served(&trace, &config)[0];
    let first = model.front_end() + prefill(model, 8192, 0) + prefill(model, 10_000 - 8192, 8192);
    assert_eq!(request.ttft(), Some(first));
    let rest: Duration = (10_001..10_004).map(|context| decode(model, context)).sum();
    assert_eq!(request.latency(), first + rest);
    assert_eq!(request.itl_max, Some(decode(model, 10_003)));
    assert_eq!(
        (request.path, request.output_tokens, request.cached_tokens),
        (Some(Path::Local), 4, 0)
    );
}

#[test]
fn a_seed_pays_for_both_workers_and_the_transfer() {
    let trace = one_session(&[(5_000, 2)]);
    let config = quiet(&trace, "h200x2-1p1d", "homing");
    let model = &config.cluster.step_model;
    let request = &served(&trace, &config)[0];
    let blocks = u64::from(5_000_u32.div_ceil(BLOCK));
    let transfer = model.transfer_time(model.kv_bytes(blocks * u64::from(BLOCK)));
    let first = model.front_end() * 2 + prefill(model, 5_000, 0) + transfer + prefill(model, 1, 4_999);
    assert_eq!((request.path, request.ttft()), (Some(Path::Seed), Some(first)));
    assert_eq!(request.prefill_worker.as_deref(), Some("p0"));
}

/// A prompt of 50,000 tokens takes five seconds over a link of 1 GB/s. What is held for two seconds only has gone by then, however
/// often it is prefilled.
#[test]
fn a_handoff_that_takes_longer_than_a_lease_finds_its_kv_if_the_lease_is_renewed() {
    let trace = one_session(&[(50_000, 2)]);
    let check = |given: &str, error: Option<&str>| {
        let cluster = format!("h200x2-1p1d:nic=1GBps:lease=2s{given}");
        let outcome = run(&trace, &quiet(&trace, &cluster, "pd-static"));
        assert_eq!(outcome.run.requests[0].error.as_deref(), error, "{given}");
        let failed = outcome.run.workers.iter().filter_map(|worker| worker.transfer_errors);
        assert_eq!(failed.sum::<u64>() > 0, error.is_some(), "{given}");
    };
    check("", None);
    check(":renew=off", Some("transfer_failed"));
    // vLLM has nothing to renew it by.
    check(":engine=vllm", Some("transfer_failed"));
    check(":engine=vllm:renew=on", None);
}

#[test]
fn a_later_turn_computes_its_tail_only() {
    let trace = one_session(&[(5_000, 2), (5_100, 2)]);
    for (cluster, worker) in [("h200x2-1p1d", "d0"), ("h200x1-dp", "w0")] {
        let config = quiet(&trace, cluster, "homing");
        let model = &config.cluster.step_model;
        let second = &served(&trace, &config)[1];
        let cached = 5_000 / BLOCK * BLOCK;
        assert_eq!(
            (second.path, second.worker.as_deref()),
            (Some(Path::Append), Some(worker)),
            "{cluster}"
        );
        assert_eq!(second.cached_tokens, cached, "{cluster}");
        let first_token = model.front_end() + prefill(model, 5_100 - cached, cached);
        assert_eq!(second.ttft(), Some(first_token), "{cluster}");
    }
}

/// A heavy tail: the prefill worker pulls what it lacks of the history from the session's home, computes the tail, and the home
/// pulls back nothing but that.
#[test]
fn a_heavy_tail_moves_its_history_once_and_its_tail_back() {
    let trace = one_session(&[(1_600, 2), (4_800, 2), (8_000, 2), (16_000, 2)]);
    let mut config = quiet(&trace, "h200x2-1p1d", "homing");
    config.logs = true;
    let outcome = run(&trace, &config);
    let lines = outcome.logs.text(LogKind::KvTransfers).lines();
    let transfers: Vec<(String, String, u32)> = lines
        .map(|line| serde_json::from_str::<TransferLine>(line).expect(line))
        .map(|line| (line.from, line.to, line.tokens))
        .collect();
    let moved = |from: &str, to: &str, tokens| (from.to_owned(), to.to_owned(), tokens);
    assert_eq!(
        transfers,
        [
            moved("p0", "d0", 1_600),
            moved("d0", "p0", 6_400),
            moved("p0", "d0", 8_000)
        ]
    );
    let heavy = &outcome.run.requests[3];
    assert_eq!((heavy.path, heavy.error.as_deref()), (Some(Path::Reseed), None));
    // Both lenders and pullers compute a block at most where everything is there; the tail is computed once.
    let model = &config.cluster.step_model;
    let tail = prefill(model, 8_000, 8_000);
    let without = quiet(&trace, "h200x2-1p1d", "homing:fetch_s=1000");
    let without = &served(&trace, &without)[3];
    let (with, without) = (
        heavy.ttft().expect("it was served"),
        without.ttft().expect("it was served"),
    );
    assert!(tail < with && with < without, "{tail:?} < {with:?} < {without:?}");
}

#[test]
fn a_prompt_that_no_worker_holds_is_an_error_of_its_kind() {
    let trace = one_session(&[(5_000, 2), (9_000, 2), (5_000, 2)]);
    let mut config = quiet(&trace, "h200x2-1p1d:kv=8000", "homing");
    let requests = run(&trace, &config).run.requests;
    let errors: Vec<_> = requests.iter().map(|request| request.error.as_deref()).collect();
    assert_eq!(
        errors,
        [None, Some("context_too_long"), None],
        "and the session goes on"
    );
    config.replay.max_context = Some(8_000);
    let outcome = run(&trace, &config);
    assert_eq!((outcome.run.requests.len(), outcome.left_out.turns), (1, 2));
    assert_eq!(outcome.left_out.sessions_shortened, 1);
}

#[test]
fn a_turn_follows_the_end_of_the_one_before_it_by_its_gap() {
    let trace = one_session(&[(1_000, 9), (1_100, 9), (1_200, 9)]);
    let mut config = quiet(&trace, "h200x1-dp", "homing");
    config.replay.time_scale = 4.0;
    let requests = served(&trace, &config);
    // The first turn's gap is after the session's start.
    let mut due = Instant::ZERO + Duration::from_millis(250);
    for request in &requests {
        assert_eq!(request.arrival, due, "turn {}", request.turn);
        due = request.end + Duration::from_millis(250);
    }
}
