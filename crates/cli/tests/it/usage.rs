//! Wrong input: one line that says what was expected, exit code 2, and nothing on stdout.

use crate::common::homing;
use std::io::Write;
use std::net::TcpListener;

/// Runs the binary with wrong input; its error names each of `words`.
fn check(arguments: &[&str], words: &[&str]) {
    let output = homing(arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
    assert_eq!(error.lines().count(), 1, "{arguments:?}: {error}");
    assert!(output.stdout.is_empty(), "{arguments:?} printed on stdout");
    for word in words {
        assert!(error.contains(word), "{arguments:?}: `{word}` is not in: {error}");
    }
}

#[test]
fn names_that_mean_nothing() {
    check(&[], &["up", "serve", "sim", "replay"]);
    check(&["sim"], &["--trace"]);
    check(&["sim", "--trace", "gen:agnet"], &["gen:agent"]);
    check(&["sim", "--trace", "gen:agent:sesions=3"], &["sessions"]);
    check(&["sim", "--trace", "no-such-file.jsonl"], &["no-such-file.jsonl"]);
    check(
        &["sim", "--trace", "gen:agent", "--cluster", "h900x8"],
        &["h900x8", "h200x8-2p6d"],
    );
    check(
        &["sim", "--trace", "gen:agent", "--policy", "homming"],
        &["homming", "homing"],
    );
    check(&["sim", "--trace", "gen:agent", "--time-scale", "0"], &["0.000001"]);
    check(
        &["sim", "--trace", "gen:agent", "--rate", "1e-300"],
        &["--rate", "0.000001"],
    );
    check(&["sim", "--trace", "gen:agent", "--runs", "0"], &["--runs"]);
    check(&["sim", "--trace", "gen:agent", "--record"], &["--out"]);
    check(
        &["sim", "--trace", "gen:agent", "--concurrency", "-1"],
        &["'-1'", "1.."],
    );
    check(
        &["sim", "--trace", "gen:agent", "--time-scale", "NaN"],
        &["NaN", "0.000001"],
    );
    check(
        &["sim", "--trace", "gen:agent:sessions=2", "--max-context", "9"],
        &["`9`", "nothing to replay", "shortest first prompt"],
    );
    check(
        &["sim", "--trace", "gen:agent", "--policy", "homing:x=1:x=2"],
        &["x=2", "once"],
    );
    check(
        &["sim", "--trace", "gen:agent", "--cluster", "h200x8-dp:kv=1K:kv=2K"],
        &["kv=2K", "once"],
    );
    check(&["sim", "--trace", "gen:agent:seed=1:seed=2"], &["seed", "twice"]);
    check(&["up", "--model", "tiny", "--kv-tokens", "8"], &["--kv-tokens", "16"]);
    check(&["up", "--workers", "2d1p"], &["1p2d", "3x"]);
    check(&["up", "--step-model", "h900"], &["h900", "h200-qwen3-30b"]);
    check(&["worker", "--model", "no-such.gguf"], &["no-such.gguf"]);
    check(&["serve"], &["--worker"]);
    check(
        &["serve", "--worker", "http://127.0.0.1:1,role=decoder"],
        &["decoder", "role=prefill"],
    );
    check(
        &["replay", "--trace", "gen:agent", "--url", "localhost"],
        &["http://127.0.0.1:8080"],
    );
    check(
        &["replay", "--trace", "gen:agent", "--url", "http://127.0.0.1:1"],
        &["http://127.0.0.1:1"],
    );
    check(&["sim", "--events", "no-such.bin"], &["no-such.bin"]);
    check(&["sim", "--events", "x.bin", "--out", "run"], &["--events", "--out"]);
    check(
        &["sim", "--events", "x.bin", "--policy", "homing"],
        &["--events", "--policy"],
    );
    check(&["sim", "--events", "/dev/zero"], &["/dev/zero", "--record"]);
}

#[test]
fn a_broken_line_is_named_by_its_number() {
    let mut file = tempfile::NamedTempFile::with_suffix(".jsonl").unwrap();
    writeln!(
        file,
        r#"{{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}}"#
    )
    .unwrap();
    writeln!(
        file,
        r#"{{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0]}}"#
    )
    .unwrap();
    let path = file.path().display().to_string();
    check(&["sim", "--trace", &path], &["line 2", "hash_ids"]);
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run").display().to_string();
    check(&["sim", "--trace", &path, "--out", &out], &["line 2"]);
    assert!(
        !folder.path().join("run").exists(),
        "wrong input leaves no folder behind"
    );
}

#[test]
fn a_port_in_use() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    check(&["up", "--model", "tiny", "--port", &port], &[&port]);
    let address = format!("127.0.0.1:{port}");
    check(&["worker", "--model", "tiny", "--listen", &address], &[&address]);
    check(
        &["serve", "--worker", "http://127.0.0.1:1", "--listen", &address],
        &[&address],
    );
}

#[test]
fn a_model_of_another_architecture() {
    let mut file = tempfile::NamedTempFile::with_suffix(".gguf").unwrap();
    file.write_all(&gguf_of("mamba")).unwrap();
    let path = file.path().display().to_string();
    check(
        &["worker", "--model", &path, "--listen", "127.0.0.1:0"],
        &["mamba", "llama"],
    );
    check(&["up", "--model", &path, "--port", "0"], &["mamba", "llama"]);
}

/// A GGUF file with no tensor and one entry: its architecture.
fn gguf_of(architecture: &str) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let string_kind = 8_u32.to_le_bytes();
    let header: [&[u8]; 4] = [
        b"GGUF",
        &3_u32.to_le_bytes(),
        &0_u64.to_le_bytes(),
        &1_u64.to_le_bytes(),
    ];
    [
        header.concat(),
        text("general.architecture"),
        string_kind.to_vec(),
        text(architecture),
    ]
    .concat()
}
