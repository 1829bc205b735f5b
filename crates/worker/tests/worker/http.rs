//! What a client sees: answers, streams, errors, and that nothing is left behind whatever it does.

use crate::client::{Client, PATIENCE, greedy, prompt, start, steps, tiny, token_ids};
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

/// Path, body, and what the error must be: status, `param`, `code`.
type Wrong = (&'static str, String, u16, Option<&'static str>, Option<&'static str>);

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn wrong_requests() -> Vec<Wrong> {
    [wrong_bodies(), wrong_members(), wrong_params()].concat()
}

#[rustfmt::skip]
fn wrong_bodies() -> Vec<Wrong> {
    let text = |value: Value| value.to_string();
    let image = json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]});
    let long = json!({"prompt": prompt(1, 1100)});
    vec![
        (COMPLETIONS, "{".to_owned(), 400, None, Some("invalid_json")),
        (COMPLETIONS, "[]".to_owned(), 400, None, Some("invalid_json")),
        (COMPLETIONS, String::new(), 400, None, Some("invalid_json")),
        (COMPLETIONS, text(json!({"max_tokens": 2})), 400, Some("prompt"), None),
        (COMPLETIONS, text(json!({"prompt": ""})), 400, Some("prompt"), None),
        (COMPLETIONS, text(json!({"prompt": [1, 2, 300]})), 400, Some("prompt"), None),
        (COMPLETIONS, text(json!({"prompt": [-1]})), 400, Some("prompt"), None),
        (COMPLETIONS, text(long), 400, None, Some("context_length_exceeded")),
        (CHAT, text(json!({"messages": []})), 400, Some("messages"), None),
        (CHAT, text(json!({"model": "tiny"})), 400, Some("messages"), None),
        (CHAT, text(json!({"messages": [{"content": "a"}]})), 400, Some("messages[0]"), None),
        (CHAT, text(image), 400, Some("messages"), None),
        (CHAT, text(json!({"messages": "a"})), 400, Some("messages"), None),
        ("/tokenize", text(json!({})), 400, Some("prompt"), None),
        ("/tokenize", text(json!({"prompt": "a", "model": "other"})), 404, Some("model"), Some("model_not_found")),
        ("/detokenize", text(json!({"tokens": [999]})), 400, Some("tokens"), None),
        ("/detokenize", text(json!({})), 400, Some("tokens"), None),
        ("/v1/nothing", text(json!({})), 404, None, Some("unknown_path")),
        ("/health", text(json!({})), 405, None, Some("method_not_allowed")),
    ]
}

/// Values that one of the two endpoints, or both, must refuse.
#[rustfmt::skip]
fn wrong_values() -> Vec<(&'static str, Value)> {
    vec![
        ("max_tokens", json!(-1)), ("max_tokens", json!(0)), ("max_tokens", json!("many")),
        ("temperature", json!(-1)), ("top_p", json!(0)), ("n", json!(2)),
        ("top_k", json!(5)), ("top_k", json!(-5)), ("top_k", json!("all")),
        ("min_p", json!(0.1)), ("min_p", json!(-1)), ("min_p", json!(2)),
        ("presence_penalty", json!(0.5)), ("frequency_penalty", json!(-0.5)), ("repetition_penalty", json!(1.1)),
        ("length_penalty", json!(0)), ("use_beam_search", json!(true)), ("best_of", json!(2)),
        ("stop", json!([""])), ("stop", json!(["s".repeat(5000)])),
        ("stop_token_ids", json!(vec![7; 65])), ("stop_token_ids", json!(["a"])),
        ("echo", json!(true)), ("suffix", json!("end")), ("prompt_embeds", json!("AAAA")),
        ("logit_bias", json!({"5": 1})), ("allowed_token_ids", json!([1, 2])), ("bad_words", json!(["no"])),
        ("truncate_prompt_tokens", json!(3)), ("truncate_prompt_tokens", json!(-1)), ("prompt_logprobs", json!(0)),
        ("continue_final_message", json!(true)), ("chat_template", json!("{{ 1 }}")),
        ("chat_template_kwargs", json!({"enable_thinking": false})), ("documents", json!([{"text": "a"}])),
        ("response_format", json!({"type": "json_object"})), ("structured_outputs", json!({"regex": "a"})),
        ("guided_json", json!({})), ("guided_regex", json!("a+")), ("guided_choice", json!(["a"])),
        ("guided_grammar", json!("root ::= a")), ("tool_choice", json!("required")),
        ("stream_options", json!({"include_usage": true})), ("stream_options", json!(3)),
    ]
}

/// A small body of an endpoint with one member more.
fn with_member(path: &str, name: &str, value: &Value) -> String {
    let mut body = match path {
        CHAT => json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        _ => json!({"prompt": "a", "max_tokens": 2}),
    };
    body[name] = value.clone();
    body.to_string()
}

fn wrong_members() -> Vec<Wrong> {
    let mut wrong = Vec::new();
    for path in [COMPLETIONS, CHAT] {
        let too_many = with_member(path, "max_tokens", &json!(100_000));
        let other = with_member(path, "model", &json!("other"));
        wrong.push((path, too_many, 400, None, Some("context_length_exceeded")));
        wrong.push((path, other, 404, Some("model"), Some("model_not_found")));
        for (name, value) in wrong_values() {
            wrong.push((path, with_member(path, name, &value), 400, Some(name), None));
        }
    }
    for (path, name, value) in [
        (COMPLETIONS, "logprobs", json!(1)),
        (COMPLETIONS, "add_special_tokens", json!("no")),
        (CHAT, "logprobs", json!(true)),
        (CHAT, "add_special_tokens", json!(true)),
        (CHAT, "add_generation_prompt", json!("no")),
        (CHAT, "tools", json!([3])),
        (CHAT, "tools", json!({})),
    ] {
        wrong.push((path, with_member(path, name, &value), 400, Some(name), None));
    }
    wrong
}

#[tokio::test]
async fn a_member_that_asks_for_what_is_done_anyway_is_taken() {
    let worker = start(tiny("w0", 64)).await;
    let client = Client::of(&worker);
    let neutral = json!({
        "top_k": -1, "min_p": 0.0, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "length_penalty": 1, "use_beam_search": false, "best_of": 1, "echo": false, "suffix": "", "prompt_embeds": null,
        "logit_bias": {}, "allowed_token_ids": null, "bad_words": [], "truncate_prompt_tokens": null,
        "prompt_logprobs": null, "continue_final_message": false, "chat_template": null, "chat_template_kwargs": {},
        "documents": [], "response_format": {"type": "text"}, "structured_outputs": null, "guided_json": null,
        "guided_regex": "", "guided_choice": [], "tool_choice": "auto", "stream_options": null, "add_special_tokens": false,
        "add_generation_prompt": true, "tools": [], "logprobs": null, "n": 1,
    });
    for path in [COMPLETIONS, CHAT] {
        let mut body: Value = serde_json::from_str(&with_member(path, "temperature", &json!(0))).unwrap();
        let plain = client.post(path, &body).await.json();
        body.as_object_mut()
            .unwrap()
            .extend(neutral.as_object().unwrap().clone());
        let answer = client.post(path, &body).await;
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        assert_eq!(answer.json()["choices"], plain["choices"], "{path}");
        body["top_k"] = json!(0);
        assert_eq!(client.post(path, &body).await.status, 200, "{path}");
    }
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

fn wrong_params() -> Vec<Wrong> {
    let params = [
        json!({"do_remote_prefill": true}),
        json!({"do_remote_prefill": true, "do_remote_decode": true}),
        json!({"do_remote_prefill": true, "remote_num_tokens": 20}),
    ];
    let with = |params: Value| greedy(&prompt(1, 20), 2, params).to_string();
    let name = Some("kv_transfer_params");
    let mut wrong = vec![(COMPLETIONS, with(json!("x")), 400, name, None)];
    let code = Some("kv_transfer_params_invalid");
    wrong.extend(params.map(|params| (COMPLETIONS, with(params), 400, name, code)));
    wrong
}

#[tokio::test]
async fn a_wrong_request_is_told_what_is_wrong() {
    let worker = start(tiny("w0", 64)).await;
    let client = Client::of(&worker);
    for (path, body, status, param, code) in wrong_requests() {
        let answer = client.send("POST", path, &[], body.clone().into()).await;
        let error = answer.error();
        let found = (answer.status.as_u16(), error["param"].as_str(), error["code"].as_str());
        assert_eq!(found, (status, param, code), "{path} {body}: {error}");
    }
    let long = "x".repeat(129);
    let answer = client
        .send(
            "POST",
            "/v1/completions",
            &[("x-request-id", &long)],
            r#"{"prompt":"a"}"#.into(),
        )
        .await;
    assert_eq!(
        (answer.status.as_u16(), answer.error()["param"].as_str()),
        (400, Some("x-request-id"))
    );
    client.until_idle().await;
    worker.shutdown().await;
}

#[tokio::test]
async fn a_thousand_bad_requests_leave_nothing_behind() {
    let config = tiny("w0", 64);
    let limits = Limits {
        max_body_bytes: 8192,
        ..config.limits.clone()
    };
    let worker = start(WorkerConfig { limits, ..config }).await;
    let client = Client::of(&worker);
    let mut wrong = wrong_requests();
    wrong.retain(|request| request.1.len() <= 8192);
    wrong.push((
        "/v1/completions",
        json!({"prompt": "a".repeat(9000)}).to_string(),
        413,
        None,
        Some("body_too_large"),
    ));
    for (index, (path, body, status, _, code)) in wrong.iter().cycle().take(1000).enumerate() {
        if index % 25 == 0 {
            hang_up(&client, &prompt(3, 50), 500).await;
        }
        let answer = client.send("POST", path, &[], body.clone().into()).await;
        assert_eq!(answer.status.as_u16(), *status, "{path} {body}");
        assert_eq!(answer.error()["code"].as_str(), *code, "{path} {body}");
    }
    let load = client.until_idle().await;
    assert_eq!(load.blocks_total, 64, "{load:?}");
    assert_eq!(worker.status().counters.aborted, 40);
    let answer = client.greedy(&prompt(4, 900), 50, Value::Null).await;
    assert_eq!(token_ids(&answer).len(), 50, "the whole pool is there");
    worker.shutdown().await;
}

/// Begins to read a stream of `tokens` tokens and goes away.
async fn hang_up(client: &Client, prompt: &[u32], tokens: u32) {
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
