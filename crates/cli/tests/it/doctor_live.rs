//! `homing doctor URL` before routers that something is wrong with: processes, sockets, and faults that are made to happen.
//!
//! Nobody tells the doctor what was done. It reads the router's pages as it would anybody's, and is asked until it names the fault.

use crate::common::{PATIENCE, Up, chat, homing, post, signal};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Asks the doctor until the first of its findings is this mode; its finding.
async fn until_named(url: &str, mode: &str) -> Value {
    let since = Instant::now();
    loop {
        let findings = diagnose(url).await;
        if findings[0]["mode"] == mode {
            return findings[0].clone();
        }
        assert!(since.elapsed() < PATIENCE, "`{mode}` is not named first: {findings:#}");
    }
}

/// What the doctor finds within two seconds.
async fn diagnose(url: &str) -> Value {
    let url = url.to_owned();
    let asked = tokio::task::spawn_blocking(move || homing(&["doctor", &url, "--watch", "2", "--json"]));
    let output = asked.await.expect("it does not panic");
    let document: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    document["findings"].clone()
}

/// Whether a finding has evidence from this page that has these words.
fn shows(finding: &Value, page: &str, words: &[&str]) -> bool {
    let proofs = finding["evidence"].as_array().expect("a list");
    proofs.iter().any(|proof| {
        let value = proof["value"].as_str().unwrap_or_default();
        proof["file"] == page && proof["line"].as_u64() > Some(0) && words.iter().all(|word| value.contains(word))
    })
}

/// A session's conversation of so many turns, of whose system prompt a part near the beginning may change with each turn.
fn conversation(session: &str, turns: usize, stamped: bool) -> Vec<Value> {
    let mut messages = vec![json!({})];
    let said = (0..turns).map(|turn| {
        let stamp = if stamped { turn } else { 0 };
        let head = format!(
            "You are {session}. {}",
            "You are careful with files and with time. ".repeat(4)
        );
        let rules = "Never guess what a tool would have told you. ".repeat(20);
        messages[0] = json!({"role": "system", "content": format!("{head} Tokens left: {stamp:06}. {rules}")});
        messages.push(json!({"role": "user", "content": format!("question number {turn}")}));
        json!(messages)
    });
    said.collect()
}

#[tokio::test]
async fn a_client_that_breaks_its_prefix_is_named() {
    let up = Up::start(&["--model", "tiny", "--workers", "1x"]).await;
    let converse = async |session: &str, stamped| {
        for messages in conversation(session, 8, stamped) {
            let answer = up
                .post("/v1/chat/completions", Some(session), &chat(&messages, 4))
                .await;
            assert_eq!(answer.status, 200, "{:?}", answer.body);
        }
    };
    converse("whole", false).await;
    assert_eq!(
        diagnose(&up.url).await,
        json!([]),
        "a client that leaves its head alone"
    );
    // Of the later turns two in three are broken then.
    converse("stamped", true).await;
    converse("stamped-too", true).await;
    let named = until_named(&up.url, "prefix-breaker").await;
    assert!(
        shows(&named, "/admin/requests", &["tokens cached, the last prompt had"]),
        "{named:#}"
    );
    assert_eq!(
        named["known"]["setting"].as_str().map(str::is_empty),
        Some(false),
        "{named:#}"
    );
    assert!(up.stop().success());
}

#[tokio::test]
async fn a_home_that_stands_still_is_named_where_sessions_wait_for_it() {
    let policy = "kv-aware:overlap=exclusive:affinity=hard";
    let up = Up::start(&["--model", "tiny", "--workers", "1p2d", "--policy", policy]).await;
    let question = |session: &str| {
        let text = format!("{session} asks a question of some length, again and again. ").repeat(8);
        chat(&json!([{"role": "user", "content": text}]), 4)
    };
    let mut homes = Vec::new();
    for session in ["first", "second"] {
        let answer = up.post("/v1/chat/completions", Some(session), &question(session)).await;
        assert_eq!(answer.status, 200, "{:?}", answer.body);
        homes.push(answer.header("x-homing-worker").to_owned());
    }
    assert_ne!(homes[0], homes[1], "each decode worker has one of them");

    let stopped = up.worker_pid(&homes[0]);
    signal(stopped, "STOP");
    up.until("it is taken for dead", async |up: &Up| {
        state(up, &homes[0]).await == "dead"
    })
    .await;
    let (url, again) = (format!("{}/v1/chat/completions", up.url), question("first"));
    let waiting = tokio::spawn(async move { post(&url, Some("first"), &again).await.status });
    let named = until_named(&up.url, "vanished-home").await;
    assert_ne!(named["level"], "info", "{named:#}");
    assert!(shows(&named, "/admin/workers", &[&homes[0], "Dead"]), "{named:#}");
    assert!(shows(&named, "/admin/requests", &["no plan"]), "{named:#}");
    assert!(!waiting.is_finished(), "the turn still waits for its worker");

    signal(stopped, "CONT");
    assert_eq!(
        waiting.await.expect("it does not panic"),
        200,
        "it is served when its home is back"
    );
    assert!(up.stop().success());
}

/// What the router thinks of a worker.
async fn state(up: &Up, name: &str) -> String {
    let workers = up.json("/admin/workers").await;
    let mut all = workers["data"].as_array().into_iter().flatten();
    let state = all
        .find(|worker| worker["name"] == name)
        .map(|worker| worker["state"].clone());
    state
        .and_then(|state| state.as_str().map(str::to_owned))
        .unwrap_or_default()
}

#[tokio::test]
async fn an_engine_that_announces_nothing_is_named_when_its_cache_is_gone() {
    let worker = Process::start(
        &["worker", "--step-model", "h200-qwen3-30b", "--listen", "127.0.0.1:0"],
        "http://",
    );
    // As a vLLM without KV events: what lies there is only predicted.
    let spec = format!("{},kind=vllm,role=both", worker.url);
    let router = Process::start(&["serve", "--worker", &spec, "--listen", "127.0.0.1:0"], "http://");
    let since = Instant::now();
    while crate::common::get(&format!("{}/ready", router.url)).await.0 != 200 {
        assert!(since.elapsed() < PATIENCE, "the router is not ready");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let history = "what was said before, as far as anybody remembers it ".repeat(1_000);
    let ask = async |session: &str, turn: usize| {
        let messages =
            json!([{"role": "user", "content": format!("{session}: {history} {}", "and more ".repeat(turn))}]);
        let body = json!({"messages": messages, "max_tokens": 2});
        let answer = post(&format!("{}/v1/chat/completions", router.url), Some(session), &body).await;
        assert_eq!(answer.status, 200, "{:?}", answer.body);
    };
    let sessions = ["one", "two", "three", "four"];
    for session in sessions {
        ask(session, 0).await;
    }
    let cleared = post(&format!("{}/reset_prefix_cache", worker.url), None, &json!({})).await;
    assert_eq!(
        cleared.status, 200,
        "the engine drops what it has cached, and tells nobody"
    );
    for session in sessions {
        ask(session, 1).await;
    }
    let named = until_named(&router.url, "stale-index").await;
    assert!(shows(&named, "/admin/requests", &["is expected to hold"]), "{named:#}");
    assert!(
        shows(&named, "/admin/requests", &["turn 1", "0 cached tokens"]),
        "{named:#}"
    );
}

/// A process of the binary that says on standard error where it serves. Dropped, it is gone.
struct Process {
    child: Child,
    url: String,
}

impl Process {
    fn start(arguments: &[&str], scheme: &str) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_homing"))
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut line = String::new();
        let url = loop {
            line.clear();
            assert!(
                stderr.read_line(&mut line).expect("it is text") > 0,
                "{arguments:?} ended before it served"
            );
            if let Some(at) = line.find(scheme) {
                break line[at..].trim_end().to_owned();
            }
        };
        // Its later lines are read and dropped, so that it never waits for a reader.
        std::thread::spawn(move || {
            let mut rest = Vec::new();
            let _ = stderr.read_to_end(&mut rest);
        });
        Self { child, url }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It is gone already where these fail.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
