//! `homing trace`: figures, translations that come back as they were, and bad input that leaves nothing behind.

use crate::common::homing;
use serde_json::Value;
use std::path::Path;
use std::process::Output;

fn done(arguments: &[&str]) -> Output {
    let output = homing(arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {error}");
    output
}

/// Runs it with wrong input; its one line names each of `words`, and the folder stays as it is.
fn check_refused(folder: &Path, arguments: &[&str], words: &[&str]) {
    let files = || std::fs::read_dir(folder).expect("it is there").count();
    let before = files();
    let output = homing(arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
    assert_eq!(error.lines().count(), 1, "{arguments:?}: {error}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
    for word in words {
        assert!(error.contains(word), "{arguments:?}: `{word}` is not in: {error}");
    }
    assert_eq!(files(), before, "{arguments:?} left a file");
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_slice(&done(arguments).stdout).expect("one document")
}

#[test]
fn what_is_generated_and_converted_has_the_same_figures() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (first, packed, again) = (path("a.jsonl"), path("b.jsonl.zst"), path("c.jsonl"));
    done(&[
        "trace",
        "generate",
        "gen:agent:sessions=4:turns=9:subagents=0.2",
        &first,
    ]);
    done(&["trace", "convert", &first, &packed]);
    done(&["trace", "convert", &packed, &again]);
    let bytes = |path: &str| std::fs::read(path).expect("it was written");
    assert!(bytes(&first) == bytes(&again), "read and written again, it is the same");
    let mut figures = json(&["trace", "stats", "gen:agent:sessions=4:turns=9:subagents=0.2", "--json"]);
    let mut read = json(&["trace", "stats", &packed, "--json"]);
    figures["trace"] = Value::Null;
    read["trace"] = Value::Null;
    assert_eq!(figures, read);
    let text = done(&["trace", "stats", &packed]);
    assert!(String::from_utf8_lossy(&text.stdout).contains("4 sessions"));
    assert_eq!(
        std::fs::read_dir(folder.path()).expect("it is there").count(),
        3,
        "nothing partial"
    );
}

#[test]
fn what_a_format_cannot_carry_is_refused_unless_it_may_be_lost() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("rows.jsonl.gz").display().to_string();
    let lost = [
        "turns that wait for others",
        "2 names of sessions",
        "2 sessions without a recorded start",
    ];
    let remedy = ["--lossy", "--to agentic-mooncake"];
    for command in ["convert", "generate"] {
        let arguments = ["trace", command, "gen:swe52:sessions=2", &out, "--to", "mooncake"];
        check_refused(
            folder.path(),
            &arguments,
            &[&lost[..], &remedy[..], &["in mooncake"]].concat(),
        );
    }
    let output = done(&[
        "trace",
        "convert",
        "gen:swe52:sessions=2",
        &out,
        "--to",
        "mooncake",
        "--lossy",
    ]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let note = said
        .lines()
        .find(|line| line.starts_with("note: lost: "))
        .expect("a note");
    for lost in lost {
        assert!(note.contains(lost), "{said}");
    }
    let read = json(&["trace", "stats", &out, "--json"]);
    assert_eq!(read["block_size"], 24);
    assert_eq!(read["sessions"], read["requests"]);

    let again = folder.path().join("again.jsonl").display().to_string();
    let output = done(&["trace", "convert", &out, &again, "--to", "mooncake", "--lossy"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(
        said.lines().count(),
        1,
        "nothing is lost, and nothing is said of it: {said}"
    );
}

#[test]
fn bad_input_is_one_line_and_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (bad, out) = (path("bad.csv"), path("out.jsonl"));
    std::fs::write(
        &bad,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,many,2\n",
    )
    .expect("it is free");
    let check = |arguments: &[&str], words: &[&str]| check_refused(folder.path(), arguments, words);
    check(&["trace", "stats", &bad], &["line 2", "ContextTokens", "many"]);
    check(&["trace", "convert", &bad, &out], &["line 2", "ContextTokens"]);
    check(
        &["trace", "convert", "gen:e2", &out, "--to", "moonc"],
        &["agentic-mooncake"],
    );
    check(&["trace", "generate", "gen:e3", &out], &["gen:e3", "gen:e2"]);
    check(&["trace", "generate", &bad, &out], &["gen:agent"]);
    check(
        &["trace", "generate", "gen:e2:sessions=1", &path("no/such/out")],
        &["no/such/out"],
    );
    check(&["trace", "convert", "gen:e2:sessions=1", &path("")], &["folder"]);
    check(&["trace", "stats", &path("none.jsonl")], &["none.jsonl"]);
}

#[test]
fn packed_files_are_known_by_their_bytes_and_cut_ones_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    for packed in ["a.jsonl.zst", "a.jsonl.gz"] {
        let (packed, renamed, cut) = (path(packed), path("renamed"), path("cut"));
        done(&["trace", "generate", "gen:e2:sessions=1", &packed]);
        let bytes = std::fs::read(&packed).expect("it was written");
        std::fs::write(&renamed, &bytes).expect("it is free");
        std::fs::write(&cut, &bytes[..bytes.len() / 2]).expect("it is free");
        assert_eq!(json(&["trace", "stats", &renamed, "--json"])["sessions"], 1);
        check_refused(folder.path(), &["trace", "stats", &cut], &["line ", "cannot be read"]);
    }
}
