//! `homing up` as a newcomer uses it: a real cluster of processes, spoken to over HTTP.

use crate::common::{Up, chat, get, homing, signal};
use serde_json::{Value, json};

/// Long enough that a worker is seen at it, and killed, on a fast machine too.
const STORY_TOKENS: u32 = 6_000;

/// The text of one worker's metric.
async fn metric(worker: &str, name: &str) -> f64 {
    let (_, text) = get(&format!("{worker}/metrics")).await;
    let text = String::from_utf8_lossy(&text).into_owned();
    let line = text
        .lines()
        .find(|line| line.starts_with(name))
        .unwrap_or_else(|| panic!("no metric {name}"));
    line.rsplit(' ')
        .next()
        .and_then(|value| value.parse().ok())
        .expect("a number")
}

#[tokio::test]
async fn a_conversation_finds_home() {
    let up = Up::start(&["--model", "tiny"]).await;
    let mut messages = vec![json!({"role": "system", "content": "Answer as well as a random model can. ".repeat(20)})];
    let mut paths = Vec::new();
    for turn in 0..3 {
        messages.push(json!({"role": "user", "content": format!("question number {turn}")}));
        let answer = up.post("/v1/chat/completions", None, &chat(&json!(messages), 24)).await;
        assert_eq!(answer.status, 200, "{:?}", answer.body);
        paths.push(answer.header("x-homing-path").to_owned());
        let cached: u32 = answer.header("x-homing-cached-tokens").parse().expect("a number");
        assert_eq!(cached > 0, turn > 0, "turn {turn} expected {cached} cached tokens");
        let events = answer.events();
        let usage = events
            .iter()
            .find(|event| !event["usage"].is_null())
            .expect("usage was asked for");
        let reported = usage["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .expect("a count");
        assert!(
            turn == 0 || reported >= u64::from(cached),
            "turn {turn}: {reported} cached, expected {cached}"
        );
        assert_eq!(usage["usage"]["completion_tokens"], 24);
        messages.push(json!({"role": "assistant", "content": answer.text()}));
    }
    assert_eq!(paths, ["seed", "append", "append"]);
    let sessions = up.json("/admin/sessions").await;
    assert_eq!(sessions["data"][0]["turns"], 3, "{sessions}");
    up.until("a live line shows a later turn", async |up: &Up| {
        up.said(&["append", "cached", "ttft"])
    })
    .await;
    assert!(up.stop().success(), "Ctrl-C is an orderly end");
}

#[tokio::test]
async fn a_worker_that_is_killed_mid_stream_costs_no_answer_and_comes_back() {
    let up = Up::start(&["--model", "tiny", "--workers", "1p2d"]).await;
    let messages = json!([{"role": "user", "content": "tell me a story that is long enough ".repeat(20)}]);
    let whole = up
        .post("/v1/chat/completions", Some("whole"), &chat(&messages, STORY_TOKENS))
        .await;
    assert_eq!(whole.status, 200);

    let cut = chat(&messages, STORY_TOKENS);
    let (answer, ()) = tokio::join!(up.post("/v1/chat/completions", Some("cut"), &cut), async {
        up.until("a decode worker streams", async |up: &Up| {
            busy_decode(up).await.is_some()
        })
        .await;
        if let Some(name) = busy_decode(&up).await {
            signal(up.worker_pid(&name), "KILL");
        }
    });
    assert_eq!(answer.status, 200);
    assert_eq!(
        answer.text(),
        whole.text(),
        "the stream went on elsewhere, with the same tokens"
    );
    let workers = up.workers.clone();
    for (name, address) in &workers {
        up.until("every worker is back", async |_: &Up| {
            get(&format!("{address}/health")).await.0 == 200
        })
        .await;
        up.until("the router uses it again", async |up: &Up| {
            state(up, name).await == "exact"
        })
        .await;
    }
    let again = up
        .post("/v1/chat/completions", Some("again"), &chat(&messages, 16))
        .await;
    assert_eq!(again.status, 200);
}

/// The decode worker that runs a request, if one does.
async fn busy_decode(up: &Up) -> Option<String> {
    for (name, address) in up.workers.iter().filter(|(name, _)| name.starts_with('d')) {
        if metric(address, "vllm:generation_tokens_total").await > 0.0
            && metric(address, "vllm:num_requests_running").await > 0.0
        {
            return Some(name.clone());
        }
    }
    None
}

/// What the router thinks of a worker.
async fn state(up: &Up, name: &str) -> String {
    let workers = up.json("/admin/workers").await;
    let of = workers["data"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|worker| worker["name"] == name);
    of.and_then(|worker| worker["state"].as_str())
        .unwrap_or_default()
        .to_owned()
}

#[tokio::test]
async fn a_trace_is_replayed_and_the_live_recording_replays_too() {
    let folder = tempfile::tempdir().unwrap();
    let recording = folder.path().join("events.bin").display().to_string();
    let up = Up::start(&[
        "--workers",
        "1p2d",
        "--step-model",
        "h200-qwen3-30b",
        "--record",
        &recording,
    ])
    .await;
    let url = up.url.clone();
    let output = tokio::task::spawn_blocking(move || {
        let limits = [
            "--sessions",
            "4",
            "--max-turns",
            "5",
            "--max-context",
            "60000",
            "--time-scale",
            "200",
            "--json",
        ];
        homing(
            &[
                &["replay", "--trace", "gen:agent:sessions=8", "--url", &url],
                &limits[..],
            ]
            .concat(),
        )
    });
    let output = output.await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    let run = &report["runs"][0];
    assert_eq!(run["errors"]["total"], 0, "{}", run["errors"]);
    assert!(run["paths"]["append"].as_u64() > Some(0), "{}", run["paths"]);
    let url = up.url.clone();
    let refused = tokio::task::spawn_blocking(move || {
        let limits = ["--sessions", "1", "--max-turns", "1", "--model", "another"];
        homing(
            &[
                &["replay", "--trace", "gen:agent:sessions=2", "--url", &url],
                &limits[..],
            ]
            .concat(),
        )
    });
    assert_eq!(
        refused.await.unwrap().status.code(),
        Some(1),
        "a replay in which nothing was served has failed"
    );
    assert!(up.stop().success());
    let replayed = homing(&["sim", "--events", &recording, "--json"]);
    assert!(
        replayed.status.success(),
        "{}",
        String::from_utf8_lossy(&replayed.stderr)
    );
}
