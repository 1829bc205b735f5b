//! What a client sees: answers, streams, errors, and that nothing is left behind whatever it does.

use crate::client::{CHAT, COMPLETIONS, Client, PATIENCE, greedy, prompt, start, steps, tiny, token_ids, with_member};
use homing_wire::metrics_text::names;
use homing_worker::{Limits, Listen, StartError, Worker, WorkerConfig};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};

#[tokio::test]
async fn a_stream_and_a_whole_answer_say_the_same() {
    let worker = start(tiny("w0", 64)).await;
    let client = Client::of(&worker);
    let body = json!({"model": "tiny", "prompt": "Hello", "max_tokens": 20, "temperature": 0.8, "seed": 7, "return_token_ids": true});
    let whole = client.complete(&body).await.json();
    let mut streaming = body.clone();
    streaming["stream"] = json!(true);
    streaming["stream_options"] = json!({"include_usage": true});
    let answer = client
        .send(
            "POST",
            "/v1/completions",
            &[("x-request-id", "turn-1")],
            streaming.to_string().into(),
        )
        .await;
    assert_eq!(answer.headers["content-type"], "text/event-stream; charset=utf-8");
    assert_eq!(answer.headers["x-request-id"], "turn-1");
    let events = answer.events();
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    let chunks: Vec<Value> = events[..events.len() - 1]
        .iter()
        .map(|event| serde_json::from_str(event).unwrap())
        .collect();
    assert_eq!(chunks[0]["id"], "cmpl-turn-1");
    assert_eq!(
        chunks[0]["choices"][0]["prompt_token_ids"],
        json!([72, 101, 108, 108, 111])
    );
    let text: String = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["text"].as_str())
        .collect();
    let ids: Vec<u32> = chunks
        .iter()
        .filter(|chunk| chunk["choices"][0].is_object())
        .flat_map(token_ids)
        .collect();
    assert_eq!(text, whole["choices"][0]["text"]);
    assert_eq!(ids, token_ids(&whole));
    let usage = &chunks.last().unwrap()["usage"];
    assert_eq!(usage["prompt_tokens"], whole["usage"]["prompt_tokens"]);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(
        chunks[chunks.len() - 2]["choices"][0]["finish_reason"],
        whole["choices"][0]["finish_reason"]
    );
    worker.shutdown().await;
}

#[tokio::test]
async fn a_conversation_streams_and_finds_its_prefix_again() {
    let worker = start(tiny("w0", 64)).await;
    let client = Client::of(&worker);
    let mut messages = vec![json!({"role": "user", "content": "Tell me something about a router, at some length."})];
    for turn in 0..3 {
        let body = json!({"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": true});
        let answer = client.post("/v1/chat/completions", &body).await.json();
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap();
        assert_eq!(cached > 0, turn > 0, "turn {turn}: {answer}");
        assert_eq!(answer["choices"][0]["message"]["role"], "assistant");
        messages.push(answer["choices"][0]["message"].clone());
        messages.push(json!({"role": "user", "content": "Go on."}));
    }
    let streaming = json!({"messages": messages, "max_tokens": 3, "ignore_eos": true, "stream": true});
    let events = client.post("/v1/chat/completions", &streaming).await.events();
    let first: Value = serde_json::from_str(&events[0]).unwrap();
    assert_eq!(first["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(events.len(), 3 + 1 + 1, "three tokens, the end, done: {events:?}");
    worker.shutdown().await;
}

#[tokio::test]
async fn outputs_end_where_their_rules_say() {
    let worker = start(tiny("w0", 64)).await;
    let client = Client::of(&worker);
    let body = |more: Value| {
        let mut body = json!({"prompt": prompt(5, 40), "max_tokens": 24, "temperature": 0, "ignore_eos": true, "return_token_ids": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let free = client.complete(&body(json!({}))).await.json();
    let (ids, text) = (
        token_ids(&free),
        free["choices"][0]["text"].as_str().unwrap().to_owned(),
    );
    assert_eq!(
        (ids.len(), free["choices"][0]["finish_reason"].as_str()),
        (24, Some("length"))
    );
    // A run of the output's own text that spans several tokens, and a token that occurs first at its place.
    let characters: Vec<(usize, char)> = text.char_indices().collect();
    let stop: String = characters[10..13].iter().map(|(_, character)| character).collect();
    let before = &text[..text.find(&stop).unwrap()];
    let stopped = client.complete(&body(json!({"stop": stop}))).await.json();
    assert_eq!(stopped["choices"][0]["text"], before);
    assert_eq!(stopped["choices"][0]["stop_reason"], stop);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    let included = client
        .complete(&body(json!({"stop": [stop], "include_stop_str_in_output": true})))
        .await
        .json();
    assert_eq!(included["choices"][0]["text"], format!("{before}{stop}"));
    let place = (1..24).find(|place| !ids[..*place].contains(&ids[*place])).unwrap();
    let by_token = client
        .complete(&body(json!({"stop_token_ids": [ids[place]]})))
        .await
        .json();
    assert_eq!(token_ids(&by_token), ids[..=place]);
    assert_eq!(by_token["choices"][0]["stop_reason"], ids[place]);
    let longer = client
        .complete(&body(json!({"stop_token_ids": [ids[place]], "min_tokens": 24})))
        .await
        .json();
    assert_eq!(token_ids(&longer), ids);
    worker.shutdown().await;
}

#[tokio::test]
async fn a_conversation_may_be_left_without_an_opened_turn() {
    let worker = start(tiny("w0", 64)).await;
    let client = Client::of(&worker);
    for opened in [true, false] {
        let mut body = json!({"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": opened});
        let tokens = client.post("/tokenize", &body).await.json()["tokens"].clone();
        body["max_tokens"] = json!(1);
        body["return_token_ids"] = json!(true);
        let answer = client.post(CHAT, &body).await.json();
        assert_eq!(answer["prompt_token_ids"], tokens, "opened: {opened}");
    }
    worker.shutdown().await;
}

#[tokio::test]
async fn each_chunk_has_the_usage_where_it_is_asked_for() {
    let worker = start(tiny("w0", 64)).await;
    let client = Client::of(&worker);
    for path in [COMPLETIONS, CHAT] {
        for continuous in [true, false] {
            let options = json!({"include_usage": true, "continuous_usage_stats": continuous});
            let mut body: Value = serde_json::from_str(&with_member(path, "stream_options", &options)).unwrap();
            body["stream"] = json!(true);
            body["ignore_eos"] = json!(true);
            let mut events = client.post(path, &body).await.events();
            assert_eq!(events.pop().as_deref(), Some("[DONE]"));
            let chunks: Vec<Value> = events
                .iter()
                .map(|event| serde_json::from_str(event).unwrap())
                .collect();
            let output: Vec<Option<u64>> = chunks
                .iter()
                .map(|chunk| chunk["usage"]["completion_tokens"].as_u64())
                .collect();
            let expected = match continuous {
                true => [Some(1), Some(2), Some(2), Some(2)],
                false => [None, None, None, Some(2)],
            };
            assert_eq!(output, expected, "{path}: {chunks:?}");
            let prompt = chunks.last().unwrap()["usage"]["prompt_tokens"].clone();
            let alike = |chunk: &Value| chunk["usage"]["prompt_tokens"] == prompt;
            assert_eq!(chunks.iter().all(alike), continuous, "{path}: {chunks:?}");
        }
    }
    worker.shutdown().await;
}

#[tokio::test]
async fn a_body_that_says_it_is_too_long_is_not_waited_for() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let worker = start(tiny("w0", 64)).await;
    let mut socket = tokio::net::TcpStream::connect(worker.endpoints().http).await.unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: w\r\ncontent-length: 99999999999\r\n\r\n{";
    socket.write_all(head.as_bytes()).await.unwrap();
    let mut answer = vec![0; 12];
    let read = tokio::time::timeout(PATIENCE, socket.read_exact(&mut answer)).await;
    read.expect("the answer does not wait for the body").unwrap();
    assert_eq!(answer, b"HTTP/1.1 413");
    worker.shutdown().await;
}

#[tokio::test]
async fn a_name_must_be_fit_for_a_header() {
    for name in ["", "a b/é", "a@b"] {
        let error = Worker::start(tiny(name, 16)).await.err().expect("no such name");
        assert!(error.to_string().contains("1 to 64 letters"), "{error}");
    }
}

#[tokio::test]
async fn whose_a_request_is_must_be_said_in_full() {
    let worker = start(tiny("w0", 16)).await;
    let client = Client::of(&worker);
    let asked = greedy(&prompt(1, 20), 1, Value::Null).to_string();
    for (owner, status) in [("0000002a-7/1", 200), ("2a-7/1", 400), ("someone", 400)] {
        let headers = [("x-homing-owner", owner)];
        let answer = client
            .send("POST", "/v1/completions", &headers, asked.clone().into())
            .await;
        assert_eq!(answer.status, status, "`{owner}`: {answer:?}");
    }
    worker.shutdown().await;
}

/// Begins to read a stream of `tokens` tokens and goes away.
pub(crate) async fn hang_up(client: &Client, prompt: &[u32], tokens: u32) {
    let mut body = greedy(prompt, tokens, Value::Null);
    body["stream"] = json!(true);
    let response = client
        .open("POST", "/v1/completions", &[], body.to_string().into())
        .await;
    let mut stream = response.into_body();
    stream.frame().await.expect("the stream begins").expect("well");
}

#[tokio::test]
async fn a_client_that_hangs_up_frees_everything() {
    let worker = start(tiny("w0", 256)).await;
    let client = Client::of(&worker);
    // In the middle of a stream.
    hang_up(&client, &prompt(9, 100), 3000).await;
    client.until_idle().await;
    // Before anything was answered.
    for _ in 0..3 {
        let asking = tokio::spawn({
            let client = Client::of(&worker);
            let body = greedy(&prompt(9, 100), 3000, Value::Null);
            async move { client.complete(&body).await }
        });
        client.until("a running request", |probe| probe.load.running > 0).await;
        asking.abort();
        client.until_idle().await;
    }
    assert_eq!(worker.status().counters.aborted, 4);
    worker.shutdown().await;
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_up_nobody() {
    let worker = start(tiny("w0", 256)).await;
    let client = Client::of(&worker);
    let mut body = greedy(&prompt(1, 20), 3000, Value::Null);
    body["stream"] = json!(true);
    let unread = client
        .open("POST", "/v1/completions", &[], body.to_string().into())
        .await;
    client.greedy(&prompt(2, 20), 5, Value::Null).await;
    // It is generated to its end, whether it is read or not.
    client
        .until("all that was asked for", |probe| probe.load.output_tokens == 3005)
        .await;
    client.until_idle().await;
    let read = unread
        .into_body()
        .collect()
        .await
        .expect("the stream is whole")
        .to_bytes();
    assert!(read.ends_with(b"data: [DONE]\n\n"));
    worker.shutdown().await;
}

#[tokio::test]
async fn a_full_queue_says_so_at_once() {
    let config = tiny("w0", 256);
    let limits = Limits {
        max_running: 1,
        max_waiting: 1,
        ..config.limits.clone()
    };
    let worker = start(WorkerConfig { limits, ..config }).await;
    let client = Client::of(&worker);
    let body = |number| greedy(&prompt(number, 50), 3000, Value::Null);
    let ask = |number| {
        let client = Client::of(&worker);
        let body = body(number);
        tokio::spawn(async move { client.complete(&body).await })
    };
    let first = ask(1);
    client.until("a running request", |probe| probe.load.running == 1).await;
    let second = ask(2);
    let probe = client.until("a waiting request", |probe| probe.load.waiting == 1).await;
    assert!(!probe.admit && probe.recommended_pause_ms > 0, "{probe:?}");
    let answer = client.complete(&body(3)).await;
    assert_eq!(
        (answer.status.as_u16(), answer.error()["code"].as_str()),
        (429, Some("queue_full"))
    );
    assert_eq!(answer.headers["retry-after"], "1");
    first.abort();
    second.abort();
    client.until_idle().await;
    worker.shutdown().await;
}

#[tokio::test]
async fn small_endpoints() {
    let worker = start(tiny("d0", 64)).await;
    let client = Client::of(&worker);
    assert_eq!(client.get("/health").await.status, 200);
    let models = client.get("/v1/models").await.json();
    assert_eq!(models["data"][0]["id"], "tiny");
    assert_eq!(client.get("/v1/models/tiny").await.json(), models["data"][0]);
    for (path, status, code) in [("x/y", 404, "model_not_found"), ("%ff", 400, "invalid_path")] {
        let answer = client.get(&format!("/v1/models/{path}")).await;
        let code = (status, Some(code));
        assert_eq!(
            (answer.status.as_u16(), answer.error()["code"].as_str()),
            code,
            "{path}"
        );
    }
    let info = client.get("/homing/info").await.json();
    assert_eq!(info["endpoints"], serde_json::to_value(worker.endpoints()).unwrap());
    assert_eq!(
        (info["name"].as_str(), info["role"].as_str()),
        (Some("d0"), Some("both"))
    );
    assert_eq!(
        (info["block_size"].as_u64(), info["kv_tokens"].as_u64()),
        (Some(16), Some(1024))
    );
    let tokens = client.post("/tokenize", &json!({"prompt": "aé"})).await.json();
    assert_eq!(tokens["tokens"], json!([97, 195, 169]));
    assert_eq!(
        client
            .post("/detokenize", &json!({"tokens": [97, 195, 169]}))
            .await
            .json()["prompt"],
        "aé"
    );
    let chat = client
        .post("/tokenize", &json!({"messages": [{"role": "user", "content": "a"}]}))
        .await
        .json();
    assert!(chat["count"].as_u64().unwrap() > 10, "{chat}");
    client.greedy(&prompt(1, 40), 4, Value::Null).await;
    client.greedy(&prompt(1, 40), 4, Value::Null).await;
    let metrics = client.metrics().await;
    assert_eq!(metrics.sum(names::PREFIX_CACHE_QUERIES), Some(80.0));
    assert_eq!(metrics.sum(names::PREFIX_CACHE_HITS), Some(32.0));
    assert_eq!(metrics.sum(names::GENERATION_TOKENS), Some(8.0));
    assert_eq!(metrics.sum(names::REQUEST_SUCCESS), Some(2.0));
    assert_eq!(client.post("/reset_prefix_cache", &json!({})).await.status, 200);
    let load = client.until_idle().await;
    assert_eq!(load.blocks_free, load.blocks_total, "the cache is empty");
    worker.shutdown().await;
}

#[tokio::test]
async fn a_worker_that_stops_tells_its_clients() {
    let worker = start(steps("w0")).await;
    let client = Client::of(&worker);
    let mut body = greedy(&prompt(1, 100), 100_000, Value::Null);
    body["stream"] = json!(true);
    let response = client
        .open("POST", "/v1/completions", &[], body.to_string().into())
        .await;
    let mut stream = response.into_body();
    stream.frame().await.expect("the stream begins").expect("well");
    let (rest, ()) = tokio::join!(stream.collect(), worker.shutdown());
    let rest = String::from_utf8(rest.expect("the stream ends well").to_bytes().to_vec()).unwrap();
    assert!(
        rest.contains(r#""type":"service_unavailable_error""#),
        "{}",
        &rest[rest.len().saturating_sub(400)..]
    );
}

#[tokio::test]
async fn a_port_in_use_is_an_error() {
    let worker = start(tiny("w0", 16)).await;
    let taken = worker.endpoints();
    let free = Listen::default();
    let listens = [
        Listen {
            http: taken.http,
            ..free
        },
        Listen {
            kv_transfer: taken.kv_transfer,
            ..free
        },
        Listen {
            kv_events: taken.kv_events,
            ..free
        },
        Listen {
            kv_replay: taken.kv_replay,
            ..free
        },
    ];
    for listen in listens {
        let error = Worker::start(WorkerConfig {
            listen,
            ..tiny("w1", 16)
        })
        .await
        .err()
        .expect("the port is taken");
        assert!(matches!(error, StartError::Listen { .. }), "{error}");
        assert!(error.to_string().contains("cannot listen on"), "{error}");
    }
    for (blocks, block_size) in [(0, 16), (16, 0)] {
        let config = WorkerConfig {
            block_size,
            kv_tokens: Some(blocks * 16),
            ..tiny("w1", 16)
        };
        let error = Worker::start(config).await.err().expect("the setting makes no sense");
        assert!(matches!(error, StartError::Setting { .. }), "{error}");
    }
    worker.shutdown().await;
}
