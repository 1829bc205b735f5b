//! `homing drill` and `homing doctor` from outside: what a drill leaves behind is what the doctor reads.

use crate::common::{Up, chat, homing};
use serde_json::{Value, json};
use std::fs;

fn stdout(output: &std::process::Output) -> &str {
    std::str::from_utf8(&output.stdout).expect("text")
}

fn document(arguments: &[&str]) -> Value {
    let output = homing(arguments);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {output:?}"))
}

#[test]
fn the_doctor_reads_what_a_drill_leaves() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("kept");
    let out = out.to_str().expect("text");
    let drill = homing(&["drill", "prefix-breaker", "--out", out]);
    assert!(drill.status.success(), "{drill:?}");
    assert!(stdout(&drill).ends_with("the drill holds\n"), "{drill:?}");

    let off = format!("{out}/prefix-breaker/off");
    let diagnosis = document(&["doctor", &off, "--json"]);
    assert_eq!(diagnosis["schema"], "homing.diagnosis/1");
    let first = &diagnosis["findings"][0];
    assert_eq!(first["mode"], "prefix-breaker");
    assert!(first["cost"]["latency_s"].as_f64() > Some(0.0), "{first}");
    // The evidence is there to be looked up.
    let proof = &first["evidence"][0];
    let file = fs::read_to_string(format!("{off}/{}", proof["file"].as_str().expect("a file"))).expect("it was kept");
    let line = proof["line"].as_u64().expect("a line") as usize;
    assert!(file.lines().count() >= line && line > 0, "{proof}");
    for field in ["symptom", "root_cause", "trigger", "mitigation", "fix", "setting"] {
        assert!(
            first["known"][field].as_str().is_some_and(|text| !text.is_empty()),
            "{field}"
        );
    }

    let words = homing(&["doctor", &off]);
    assert!(stdout(&words).starts_with("1. warning: Prefix breaker"), "{words:?}");
    let on = homing(&["doctor", &format!("{out}/prefix-breaker/on")]);
    assert!(stdout(&on).starts_with("nothing is wrong\n"), "{on:?}");
}

#[test]
fn other_engines_logs_are_understood_wherever_they_lie() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::create_dir(folder.path().join("logs")).expect("a folder in it");
    let line = "[10:12:33] exception KVTransferError(bootstrap_room=4793): Decode instance could be dead, remote mooncake session x is not alive\n";
    fs::write(folder.path().join("logs").join("prefill-0.log"), line).expect("a log");
    let place = folder.path().to_str().expect("text");
    let diagnosis = document(&["doctor", place, "--json"]);
    let first = &diagnosis["findings"][0];
    assert_eq!((&first["mode"], &first["level"]), (&"cascade".into(), &"error".into()));
    assert_eq!(first["evidence"][0]["file"], "logs/prefill-0.log");
    assert_eq!(first["evidence"][0]["line"], 1);
}

#[tokio::test]
async fn a_live_router_is_asked_what_it_does() {
    let up = Up::start(&["--model", "tiny"]).await;
    for turn in 0..3 {
        let messages = json!([{"role": "user", "content": format!("{turn} short questions")}]);
        let answer = up.post("/v1/chat/completions", None, &chat(&messages, 4)).await;
        assert_eq!(answer.status, 200, "{:?}", answer.body);
    }
    let diagnosis = document(&["doctor", &up.url, "--watch", "4", "--json"]);
    assert_eq!(diagnosis["place"], up.url);
    assert_eq!(diagnosis["findings"], json!([]), "nothing is wrong with it");
    let words = homing(&["doctor", &up.url, "--watch", "0"]);
    assert!(
        words.status.success() && stdout(&words).starts_with("nothing is wrong\n"),
        "{words:?}"
    );
    // What is no router is told so.
    let worker = up
        .workers
        .first()
        .map(|(_, address)| address.clone())
        .expect("it has workers");
    let wrong = homing(&["doctor", &worker, "--watch", "0"]);
    assert_eq!(wrong.status.code(), Some(2), "{wrong:?}");
    assert!(up.stop().success());
}

#[test]
fn what_cannot_be_looked_at_is_said() {
    let check = |arguments: &[&str], expected: &str| {
        let output = homing(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(
            said.contains(expected) && said.lines().count() == 1,
            "{arguments:?}: {said}"
        );
    };
    let folder = tempfile::tempdir().expect("a folder");
    let empty = folder.path().to_str().expect("text");
    check(&["doctor", empty], "neither the folder of a run nor one of engine logs");
    check(
        &["doctor", "does-not-exist"],
        "expected a folder, or the URL of a router",
    );
    check(&["doctor", "ftp://example"], "expected a URL such as");
    check(
        &["drill", "cascad"],
        "no drill `cascad`, expected `list`, `all` or one of cascade",
    );
    fs::write(folder.path().join("requests.jsonl"), "{}\n").expect("a log");
    check(&["doctor", empty], "`requests.jsonl` line 1: missing field `t`");
}

#[test]
fn drills_are_listed() {
    let listed = document(&["drill", "list", "--json"]);
    let listed = listed.as_array().expect("a list");
    assert_eq!(listed[0]["mode"], "cascade");
    assert!(listed.len() >= 20);
    let words = homing(&["drill", "list"]);
    assert_eq!(stdout(&words).lines().count(), listed.len());
}
