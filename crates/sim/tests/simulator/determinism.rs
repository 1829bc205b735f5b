//! The meta-test: one seed twice gives the same bytes, in the report, in every log and in the recording.

use crate::common::{agents, config, json, run};
use homing_report::logs::LogKind;
use homing_sim::{SimOutcome, replay_events};
use homing_workload::Trace;

fn simulated(trace: &Trace, cluster: &str, policy: &str, seed: u64) -> (String, SimOutcome) {
    let mut config = config(trace, cluster, policy);
    (config.seed, config.logs, config.record) = (seed, true, true);
    let outcome = run(trace, &config);
    (json(trace, &config, &outcome), outcome)
}

#[test]
fn one_seed_twice_gives_the_same_bytes() {
    let trace = agents(11, 12, 8);
    for (cluster, policy) in [
        ("h100x3-1p2d:kv=4000", "homing"),
        ("h100x3-dp:kv=4000", "dp-cache-aware"),
        ("h200x4-2p2d", "round-robin"),
    ] {
        let (first, second) = (
            simulated(&trace, cluster, policy, 5),
            simulated(&trace, cluster, policy, 5),
        );
        assert_eq!(first.0, second.0, "report of {policy} on {cluster}");
        for kind in LogKind::ALL {
            let texts = (first.1.logs.text(kind), second.1.logs.text(kind));
            assert_eq!(texts.0, texts.1, "{} of {policy} on {cluster}", kind.as_str());
        }
        assert_eq!(
            first.1.recording, second.1.recording,
            "recording of {policy} on {cluster}"
        );
        assert_ne!(
            first.0,
            simulated(&trace, cluster, policy, 6).0,
            "{policy} on {cluster}: a seed that changes nothing"
        );
    }
}

#[test]
fn a_recording_gives_the_same_actions() {
    let trace = agents(12, 12, 8);
    for (cluster, policy) in [
        ("h100x3-1p2d:kv=4000", "homing"),
        ("h100x2-dp:kv=2000", "dp-cache-aware"),
    ] {
        let recording = simulated(&trace, cluster, policy, 3)
            .1
            .recording
            .expect("it was asked for");
        let replayed = replay_events(&recording).unwrap_or_else(|error| panic!("{policy} on {cluster}: {error}"));
        assert!(
            replayed.complete && replayed.actions > 100,
            "{policy} on {cluster}: {replayed:?}"
        );
        let again = replay_events(&recording).expect("it was replayed before");
        assert_eq!(again, replayed, "{policy} on {cluster}");
        let cut = replay_events(&recording[..recording.len() / 2]).expect("a recording that was cut off");
        assert!(!cut.complete && cut.events < replayed.events);
        assert!(replay_events(b"no recording").is_err());
    }
}

#[test]
fn logs_and_recording_cost_nothing_unless_asked_for() {
    let trace = agents(13, 3, 3);
    let plain = config(&trace, "h200x2-dp", "homing");
    let outcome = run(&trace, &plain);
    assert_eq!((outcome.recording.is_none(), outcome.logs.texts().count()), (true, 0));
    let mut asked = plain.clone();
    (asked.logs, asked.record) = (true, true);
    assert_eq!(run(&trace, &asked).run, outcome.run, "and change nothing");
}
