//! `homing sim`: one JSON document, the same bytes for the same seed, and recordings that replay.

use crate::common::homing;
use serde_json::Value;

const SIM: [&str; 9] = [
    "sim",
    "--trace",
    "gen:agent:sessions=6",
    "--cluster",
    "h200x4-1p3d",
    "--policy",
    "homing",
    "--seed",
    "3",
];

fn run(arguments: &[&str]) -> Vec<u8> {
    let output = homing(arguments);
    assert!(
        output.status.success(),
        "{arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    output.stdout
}

#[test]
fn a_seed_gives_the_same_bytes_and_another_seed_others() {
    let with = |seed: &str| run(&[&SIM[..8], &[seed, "--json"]].concat());
    let first = with("3");
    assert_eq!(first, with("3"));
    assert_ne!(first, with("4"));
    let report: Value = serde_json::from_slice(&first).expect("one JSON document");
    assert_eq!(report["schema"], "homing.run/1");
    assert_eq!(report["runs"][0]["errors"]["total"], 0);
    assert!(
        report["runs"][0]["paths"]["append"].as_u64() > Some(0),
        "later turns find home"
    );
}

#[test]
fn a_folder_holds_the_report_the_logs_and_a_recording_that_replays() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let text = out.display().to_string();
    run(&[&SIM[..], &["--out", &text, "--record", "--json"]].concat());
    for name in [
        "summary.json",
        "requests.jsonl",
        "decisions.jsonl",
        "worker-samples.jsonl",
        "events.bin",
    ] {
        assert!(
            out.join(name).metadata().is_ok_and(|file| file.len() > 0),
            "{name} is missing or empty"
        );
    }
    let events = out.join("events.bin");
    let name = events.display().to_string();
    let replayed: Value = serde_json::from_slice(&run(&["sim", "--events", &name, "--json"])).unwrap();
    assert_eq!(
        (&replayed["same_actions"], &replayed["complete"]),
        (&true.into(), &true.into())
    );

    let mut bytes = std::fs::read(&events).unwrap();
    let two = folder.path().join("two.bin").display().to_string();
    std::fs::write(&two, bytes.repeat(2)).unwrap();
    let refused = homing(&["sim", "--events", &two]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("two.bin`: the recording ends at byte"), "{said}");

    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    std::fs::write(&events, bytes).unwrap();
    let broken = homing(&["sim", "--events", &name]);
    assert_eq!(
        broken.status.code(),
        Some(2),
        "a flipped bit is seen: {}",
        String::from_utf8_lossy(&broken.stderr)
    );
}

#[test]
fn a_cluster_that_cannot_be_is_refused_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let check = |cluster: &str, expected: &str| {
        let text = out.display().to_string();
        let output = homing(&[
            "sim",
            "--trace",
            "gen:agent:sessions=2",
            "--cluster",
            cluster,
            "--out",
            &text,
        ]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{cluster}: {error}");
        assert_eq!(error.lines().count(), 1, "{cluster}: {error}");
        assert!(error.contains(expected), "{cluster}: {error}");
        assert!(!out.exists(), "{cluster}: something was written");
    };
    check("h100x2-2p0d", "no worker that decodes");
    check("h100x8-dp:kv=64", "expected at least");
    check("h100x8-2p6d:engine=session-slots", "did you mean `session-slot`");
    check("h100x8-2p6d:transfer-timeout=32s", "did you mean `transfer_timeout`");
    check("h100x8-2p6d:dead_peers=on", "`transfer_timeout=32s`");
    check("h200x8-2p6", "did you mean `h200x8-2p6d`");
}
