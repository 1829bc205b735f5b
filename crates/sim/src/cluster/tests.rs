//! Clusters by preset, parameter and file, and what is refused.

use super::*;
use crate::stack::LoopAdmission;
use homing_engine::api::EngineKind;

#[test]
fn presets_have_their_workers() {
    let check = |spec: &str, names: &str, kv_tokens: u32, nic: f64| {
        let cluster = Cluster::preset(spec).expect(spec);
        let found: Vec<&str> = cluster.workers.iter().map(|worker| worker.name.as_str()).collect();
        assert_eq!(found.join(" "), names, "{spec}");
        assert!(
            cluster.workers.iter().all(|worker| worker.kv_tokens == kv_tokens),
            "{spec}"
        );
        assert!((cluster.step_model.nic_bytes_per_second - nic).abs() < 1.0, "{spec}");
        assert_eq!(cluster.name, spec);
    };
    check("h100x8-dp", "w0 w1 w2 w3 w4 w5 w6 w7", 92_000, 40e9);
    check("h100x8-2p6d", "p0 p1 d0 d1 d2 d3 d4 d5", 92_000, 40e9);
    check("h200x8-2p6d", "p0 p1 d0 d1 d2 d3 d4 d5", 700_000, 40e9);
    check("h200x4-1p3d", "p0 d0 d1 d2", 700_000, 40e9);
    check(
        "h20x8-dp:kv=293K:nic=10GBps:engine=block:host=0",
        "w0 w1 w2 w3 w4 w5 w6 w7",
        293_000,
        10e9,
    );
    check("h100x2-1p1d:kv=136000:nic=400Gbps", "p0 d0", 136_000, 50e9);
}

#[test]
fn what_is_wrong_is_told_what_was_expected() {
    let check = |spec: &str, expected: &str| {
        let error = Cluster::preset(spec).expect_err(spec).to_string();
        assert!(error.contains(expected), "{spec}: {error}");
    };
    check("h300x8-dp", "did you mean `h100x8-dp`?");
    check("h200x8-2p6", "did you mean `h200x8-2p6d`?");
    check("h100", "did you mean `h100x8-dp`?");
    check("h100x8-2p5d", "a shape that uses every GPU");
    check("h100x2-0p2d", "no worker that prefills");
    check("h100x2-2p0d", "no worker that decodes");
    check("h100x9999-dp", "1,024 in all at most");
    check("h100x0-dp", "no worker that prefills");
    check("h100x8-dp:kv=lots", "`kv` is `lots`, expected a count of tokens");
    check("h100x8-dp:kv=0", "at least 1");
    check("h100x8-dp:kv=101M", "expected at most 100M tokens a worker");
    check("h100x8-dp:host=17TiB", "at most `16TiB`");
    check("h100x8-dp:transfer_timeout=0s", "expected a time above zero, or `off`");
    check(
        "h100x8-dp:order=decode-first",
        "expected it together with `engine=session-slot`",
    );
    check("h100x8-dp:kv=1K:kv=2K", "expected `name=value`, each name once");
    check("h100x8-dp:kv", "expected `name=value`, each name once");
    check("h100x8-dp:nic=40", "expected a bandwidth such as `40GBps`");
    check("h100x8-dp:pcie=0GBps", "`pcie` is `0GBps`, expected a bandwidth");
    check("h100x8-dp:rho=0.9", "expected it together with `engine=session-slot`");
    check("h100x8-dp:rho=2:engine=session-slot", "expected a share from 0 to 1");
    check("h100x8-dp:transfer_timeout=32", "expected a time such as `32s`");
    check(
        "h100x8-dp:dead_peers=on",
        "expected it together with `transfer_timeout=32s`",
    );
    check("h100x8-dp:probe=2ms", "expected it together with `admission=loop`");
    check("h100x8-dp:admission=loop:poll=1", "expected a frequency from `0.001Hz`");
    check("h100x8-dp:admission=lop", "expected `snapshot` or `loop`");
    check(
        "h100x8-dp:engine=sesion-slot",
        "no engine `sesion-slot`, did you mean `session-slot`?",
    );
    check("h100x8-dp:host=64", "`host` is `64`, expected bytes such as `64GiB`");
    check("h100x8-dp:staging=yes", "expected `on` or `off`");
    check(
        "h100x8-dp:transfertimeout=32s",
        "did you mean `transfer_timeout`? (known: `kv=136K`",
    );
}

#[test]
fn parameters_set_what_they_say_in_any_order() {
    let check = |spec: &str, same: &str| {
        let (mut left, right) = (Cluster::preset(spec).expect(spec), Cluster::preset(same).expect(same));
        left.name.clone_from(&right.name);
        assert_eq!(left, right, "{spec} and {same}");
    };
    check(
        "h100x8-2p6d:rho=0.9:engine=session-slot",
        "h100x8-2p6d:engine=session-slot:rho=0.9",
    );
    check(
        "h100x8-dp:engine=block:host=0:staging=off:admission=snapshot:room=untold:sketch=untold:events=on:transfer_timeout=off:dead_peers=off",
        "h100x8-dp",
    );
    check(
        "h100x8-dp:admission=loop",
        "h100x8-dp:poll=off:probe=2ms:admission=loop",
    );
    let spec = "h100x8-2p6d:chunk=1400:host=64GiB:pcie=45GBps:front_end=30ms:front_end_token=1us:engine=session-slot:soft_cap=8\
                :room=told:sketch=told:events=off:replay=16:renew=on:correction_crash=on:transfer_timeout=32s:dead_peers=60s:admission=loop:probe=5ms:poll=0.5Hz";
    let cluster = Cluster::preset(spec).expect(spec);
    let EngineKind::SessionSlot(slots) = cluster.stack.engine else {
        panic!("{:?}", cluster.stack.engine)
    };
    assert_eq!((slots.soft_cap, slots.correction_crash), (Some(8), true));
    assert_eq!((cluster.max_batch_tokens, cluster.host_bytes), (1400, 64 << 30));
    assert_eq!(cluster.front_end_per_token, Duration::from_micros(1));
    assert!(
        (cluster.step_model.front_end_ms - 30.0).abs() < 1e-9 && (cluster.pcie_bytes_per_second - 45e9).abs() < 1.0
    );
    assert_eq!(cluster.stack.transfer_timeout, Some(Duration::from_secs(32)));
    assert_eq!(cluster.stack.dead_peers, Some(Duration::from_secs(60)));
    let admission = LoopAdmission {
        probe: Duration::from_millis(5),
        poll_every: Some(Duration::from_secs(2)),
    };
    assert_eq!(cluster.stack.admission, Some(admission));
    assert!(cluster.stack.tells_room && cluster.stack.renews_leases());
    assert!(cluster.stack.tells_sketches && cluster.stack.defects.hides_events);
    assert_eq!(cluster.stack.kept_batches, Some(16));
    for (spec, expected) in [
        ("h100x8-2p6d", true),
        ("h100x8-2p6d:renew=off", false),
        ("h100x8-2p6d:engine=vllm", false),
        ("h100x8-2p6d:engine=session-slot", false),
    ] {
        let cluster = Cluster::preset(spec).expect(spec);
        assert_eq!(cluster.stack.renews_leases(), expected, "{spec}");
    }
}

#[test]
fn a_file_says_everything_itself() {
    let cluster = Cluster::from_toml(
        "mine",
        r#"
            step_model = "h200-qwen3-30b"
            nic = "10GBps"
            max_batch_tokens = 1400
            [[workers]]
            role = "prefill"
            count = 1
            kv_tokens = 300000
            [[workers]]
            role = "both"
            count = 2
        "#,
    )
    .expect("a good file");
    let names: Vec<_> = cluster
        .workers
        .iter()
        .map(|worker| (worker.name.as_str(), worker.kv_tokens))
        .collect();
    assert_eq!(names, [("p0", 300_000), ("w0", 738_000), ("w1", 738_000)]);
    assert_eq!(
        (cluster.max_batch_tokens, cluster.largest_decode_tokens()),
        (1400, 738_000)
    );

    let check = |text: &str, expected: &str| {
        let error = Cluster::from_toml("mine", text).expect_err(text).to_string();
        assert!(error.contains(expected), "{text}: {error}");
    };
    check("", "missing field `step_model`");
    check("step_model = \"x\"\nworkers = []", "no step-time profile `x`");
    check(
        "step_model = \"h200-qwen3-30b\"\nworkers = []",
        "no worker that prefills",
    );
    check(
        "step_model = \"h200-qwen3-30b\"\nworkers = []\nnic = \"fast\"",
        "expected a bandwidth",
    );
    check(
        "[step_model]\nmodel = \"x\"\n[[workers]]\nrole = \"both\"\ncount = 1",
        "broken step-time model",
    );
    check(
        "step_model = \"h200-qwen3-30b\"\n[[workers]]\nrole = \"any\"\ncount = 1",
        "unknown variant `any`",
    );
}
