//! How a command ends when its output cannot be: a folder in the way, a full device, a reader that has gone, a signal.

use crate::common::{PATIENCE, homing, signal};
use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const SIM: [&str; 3] = ["sim", "--trace", "gen:agent:sessions=2"];

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("it is there").flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

/// It failed with this exit code and one line that has all of `words`.
fn check_failed(output: &Output, code: i32, words: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), said.lines().count()), (Some(code), 1), "{said}");
    for word in words {
        assert!(said.contains(word), "`{word}` is not in: {said}");
    }
}

#[test]
fn a_run_folder_that_cannot_be_is_said_before_any_work() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    fs::write(path("file"), "x").expect("it fits");
    fs::create_dir(path("full")).expect("a folder");
    fs::write(path("full/file"), "x").expect("it fits");
    std::os::unix::fs::symlink("nothing", path("link")).expect("a link");
    let before = names(folder.path());
    let check = |out: &Path, words: &[&str]| {
        let out = out.to_str().expect("the path is text");
        // A trace that takes long: it must not be begun.
        let arguments = ["sim", "--trace", "gen:agent:sessions=20000", "--out", out];
        check_failed(&homing(&arguments), 2, &[&["--out", out], words].concat());
        assert_eq!(names(folder.path()), before, "{out} left something");
    };
    check(&path("file"), &["file"]);
    check(&path("file/below"), &["file"]);
    check(&path("full"), &["not empty"]);
    check(&path("link"), &["leads nowhere"]);
    check(Path::new("/proc/run"), &[]);
    check(&path(&"x".repeat(300)), &["too long"]);
}

#[test]
fn a_run_folder_that_is_empty_is_filled() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().to_str().expect("the path is text");
    assert!(homing(&[&SIM[..], &["--out", out]].concat()).status.success());
    let names = names(folder.path());
    assert!(names.contains(&"summary.json".to_owned()), "{names:?}");
    assert!(!names.iter().any(|name| name.contains("partial")), "{names:?}");
}

fn with_stdout(arguments: &[&str], stdout: Stdio) -> Output {
    Command::new(env!("CARGO_BIN_EXE_homing"))
        .args(arguments)
        .stdout(stdout)
        .stderr(Stdio::piped())
        .output()
        .expect("the binary starts")
}

#[test]
fn a_full_device_is_one_line_and_no_panic() {
    let full = || {
        OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .expect("this test needs Linux")
    };
    for arguments in [
        &SIM[..],
        &[SIM[0], SIM[1], SIM[2], "--json"],
        &["trace", "stats", "gen:e2:sessions=1"],
    ] {
        check_failed(&with_stdout(arguments, full().into()), 1, &["stdout", "space"]);
    }
    let output = homing(&["trace", "generate", "gen:e2:sessions=1", "/dev/full"]);
    check_failed(&output, 1, &["/dev/full", "space"]);
    let wrong = Command::new(env!("CARGO_BIN_EXE_homing"))
        .args(["sim", "--polcy", "x"])
        .stderr(full())
        .status()
        .expect("the binary starts");
    assert_eq!(wrong.code(), Some(2), "an error that nobody can read is no panic");
}

#[test]
fn a_reader_that_has_gone_is_no_failure() {
    for arguments in [
        &SIM[..],
        &["trace", "stats", "gen:e2:sessions=1"],
        &["trace", "generate", "gen:e2", "/dev/stdout"],
    ] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = with_stdout(arguments, writer.into());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), said.as_ref()), (Some(0), ""), "{arguments:?}");
    }
}

#[test]
fn an_interrupted_command_leaves_nothing() {
    let check = |arguments: &[&str], name: &str, code: i32| {
        let folder = tempfile::tempdir().expect("a folder");
        let mut child = Command::new(env!("CARGO_BIN_EXE_homing"))
            .args(arguments)
            .current_dir(folder.path())
            .stdout(
                File::options()
                    .write(true)
                    .open("/dev/null")
                    .expect("this test needs Linux"),
            )
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let since = Instant::now();
        while names(folder.path()).is_empty() {
            assert!(since.elapsed() < PATIENCE, "{arguments:?} has not begun to write");
            std::thread::sleep(Duration::from_millis(1));
        }
        signal(child.id(), name);
        let status = child.wait().expect("it ends");
        let mut said = String::new();
        let stderr = child.stderr.as_mut().expect("a pipe");
        stderr.read_to_string(&mut said).expect("it is text");
        assert_eq!(
            (status.code(), status.signal()),
            (Some(code), None),
            "{arguments:?}: {said}"
        );
        assert_eq!(said, "error: interrupted, nothing was written\n", "{arguments:?}");
        assert_eq!(names(folder.path()), [""; 0], "{arguments:?}");
    };
    let long = "gen:agent:sessions=20000";
    check(&["sim", "--trace", long, "--out", "run"], "INT", 130);
    check(&["sim", "--trace", long, "--out", "some/run"], "TERM", 143);
    check(
        &["trace", "generate", "gen:agent:sessions=400", "out.jsonl"],
        "INT",
        130,
    );
}
