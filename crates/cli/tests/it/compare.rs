//! `homing compare`: one document or a table on stdout, a whole page or none, and one line for what is wrong.

use crate::common::homing;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

/// Simulates a small trace into `folder/name`.
fn simulate(folder: &Path, name: &str, policy: &str, runs: &str) -> PathBuf {
    let out = folder.join(name);
    let output = homing(&[
        "sim",
        "--trace",
        "gen:agent:sessions=6",
        "--cluster",
        "h200x4-1p3d",
        "--policy",
        policy,
        "--runs",
        runs,
        "--out",
        out.to_str().expect("the path is text"),
        "--json",
    ]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    out
}

fn compare(arguments: &[&Path], options: &[&str]) -> Output {
    let runs: Vec<&str> = arguments
        .iter()
        .map(|path| path.to_str().expect("the path is text"))
        .collect();
    homing(&[&["compare"], runs.as_slice(), options].concat())
}

/// It fails with exit code 2 and one line that has all of this in it.
fn check_wrong(output: &Output, expected: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert_eq!((said.lines().count(), output.stdout.len()), (1, 0), "{said}");
    for expected in expected {
        assert!(said.contains(expected), "`{said}` lacks `{expected}`");
    }
}

#[test]
fn runs_are_set_side_by_side_as_table_document_and_page() {
    let folder = tempfile::tempdir().unwrap();
    let three = simulate(folder.path(), "three", "homing", "3");
    let one = simulate(folder.path(), "one", "round-robin", "1");
    let page = folder.path().join("page.html");

    let output = compare(
        &[&three, &one.join("summary.json")],
        &["--json", "--html", page.to_str().unwrap()],
    );
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let document: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    assert_eq!(document["schema"], "homing.compare/1");
    assert_eq!(document["reports"][1]["policy"], "round-robin");
    let metrics = document["metrics"].as_array().unwrap();
    let ttft = metrics.iter().find(|metric| metric["name"] == "ttft_s.mean").unwrap();
    assert_eq!(
        (&ttft["better"], &ttft["verdict"]),
        (&"lower".into(), &"one_run".into())
    );
    assert_eq!(document["unlike"][0]["what"], "seeds");

    let html = fs::read_to_string(&page).unwrap();
    assert!(html.starts_with("<!DOCTYPE html>") && html.ends_with("</html>\n"));
    // Logs of one run (`requests.jsonl`) and of several (`seed-1.requests.jsonl`) are found alike.
    assert_eq!(
        (
            html.matches("<polyline").count(),
            html.matches("class=\"turn").count() > 6
        ),
        (4, true)
    );
    compare(&[&three, &one], &["--html", page.to_str().unwrap()]);
    let names: Vec<String> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(
        names.iter().filter(|name| name.contains("page")).count(),
        1,
        "no part is left: {names:?}"
    );

    let text = String::from_utf8(compare(&[&three, &one], &[]).stdout).unwrap();
    for expected in [
        "COMPARING UNLIKE THINGS",
        "ttft_s.p90",
        "one run proves nothing",
        "B is one run",
    ] {
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn a_run_equals_itself_and_the_page_is_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let run = simulate(folder.path(), "run", "homing", "3");
    let text = String::from_utf8(compare(&[&run, &run], &[]).stdout).unwrap();
    assert!(
        !text.contains("better than") && text.contains("not distinguishable"),
        "{text}"
    );
    let page = |name: &str| {
        let file = folder.path().join(name);
        assert!(
            compare(&[&run], &["--html", file.to_str().unwrap()]).status.success(),
            "one run is enough for a page"
        );
        fs::read(file).unwrap()
    };
    assert_eq!(page("a.html"), page("b.html"));
}

#[test]
fn what_is_wrong_is_said_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let run = simulate(folder.path(), "run-a", "homing", "1");
    check_wrong(&compare(&[], &[]), &["DIR|FILE"]);
    check_wrong(&compare(&[&run], &[]), &["expected two or more"]);
    check_wrong(&compare(&[run.as_path(); 9], &[]), &["9 runs, expected at most 8"]);
    check_wrong(
        &compare(&[&run, &at("run-b")], &[]),
        &["does not exist", "did you mean", "run-a"],
    );
    check_wrong(
        &compare(&[&run, folder.path()], &[]),
        &["has no `summary.json`", "run-a` has one"],
    );
    check_wrong(&compare(&[&run, &run.join("requests.jsonl")], &[]), &["not JSON"]);
    check_wrong(
        &compare(&[&run, Path::new("/dev/zero")], &[]),
        &["neither a folder nor a file"],
    );

    let write = |name: &str, text: &str| {
        fs::write(at(name), text).unwrap();
        at(name)
    };
    check_wrong(
        &compare(&[&run, &write("other.json", r#"{"schema":"other/1"}"#)], &[]),
        &["schema `other/1`, expected `homing.run/1`"],
    );
    check_wrong(&compare(&[&run, &write("none.json", "[]")], &[]), &["no schema"]);
    check_wrong(
        &compare(&[&run, &write("short.json", r#"{"schema":"homing.run/1"}"#)], &[]),
        &["missing field"],
    );
    let mut report: Value = serde_json::from_slice(&fs::read(run.join("summary.json")).unwrap()).unwrap();
    report["runs"][0]["requests"] = (-5).into();
    check_wrong(
        &compare(&[&run, &write("negative.json", &report.to_string())], &[]),
        &["`-5`", "line 1 column"],
    );
    report["runs"] = Value::Array(Vec::new());
    check_wrong(
        &compare(&[&run, &write("empty.json", &report.to_string())], &[]),
        &["no runs"],
    );

    check_wrong(
        &compare(&[&run], &["--html", folder.path().to_str().unwrap()]),
        &["is a folder"],
    );
    check_wrong(
        &compare(&[&run], &["--html", at("no/page.html").to_str().unwrap()]),
        &["folder does not exist"],
    );
    fs::write(run.join("requests.jsonl"), "{}\n").unwrap();
    check_wrong(
        &compare(&[&run], &["--html", at("page.html").to_str().unwrap()]),
        &["requests.jsonl` line 1: missing field", "at column 2"],
    );
    assert!(!at("page.html").exists(), "never a partial page");
}

#[test]
fn a_document_that_no_run_leaves_is_refused_and_its_names_steer_no_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let run = simulate(folder.path(), "run", "homing", "3");
    let report: Value = serde_json::from_slice(&fs::read(run.join("summary.json")).unwrap()).unwrap();
    let edited = folder.path().join("b.json");
    let check = |field: &str, value: Value, expected: &str| {
        let mut report = report.clone();
        *report.pointer_mut(field).expect("the field is there") = value;
        fs::write(&edited, report.to_string()).unwrap();
        check_wrong(&compare(&[&run, &edited], &[]), &["b.json`: ", expected]);
    };
    check(
        "/time_scale",
        (-1).into(),
        "`time_scale` is `-1`, expected a number above 0",
    );
    check(
        "/block_size",
        0.into(),
        "`block_size` is `0`, expected a whole number above 0",
    );
    check(
        "/runs/0/hit_ratio",
        7.into(),
        "`runs[0].hit_ratio` is `7`, expected a number from 0 to 1",
    );
    check(
        "/runs/1/duration_s",
        (-3).into(),
        "`runs[1].duration_s` is `-3`, expected a number of at least 0",
    );
    check(
        "/runs/2/seed",
        report["runs"][0]["seed"].clone(),
        "`runs[2].seed` is `1`, expected another one than that of `runs[0]`",
    );

    let mut hostile = report.clone();
    hostile["trace"] = "t\u{1b}[2J\n\u{9b}x\u{202e}".into();
    hostile["policy"] = "homing\u{7}\r".into();
    fs::write(&edited, hostile.to_string()).unwrap();
    let text = String::from_utf8(compare(&[&run, &edited], &[]).stdout).unwrap();
    let steers = |letter: char| letter.is_control() && letter != '\n' || letter == '\u{202e}';
    assert!(!text.contains(steers), "{text:?}");
    for expected in [
        r"homing\u{7}\r on",
        r"trace: A gen:agent",
        r"| B t\u{1b}[2J\n\u{9b}x\u{202e}",
    ] {
        assert!(text.contains(expected), "`{text}` lacks `{expected}`");
    }
}
