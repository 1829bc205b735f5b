//! The Messages API: translated before scripted engines and before real workers.

use crate::support::engine::{ANTHROPIC, Act, MODEL};
use crate::support::{Cluster, Whole, chat, messages, whole};
use crate::workers::{PDD, start};
use homing_router::event::Role;
use homing_wire::sse::SseDecoder;
use http::Method;
use serde_json::{Value, json};

const PATH: &str = "/v1/messages";

fn request(members: Value) -> Value {
    let mut body = json!({"model": MODEL, "max_tokens": 6, "messages": messages(30)});
    body.as_object_mut()
        .unwrap()
        .extend(members.as_object().unwrap().clone());
    body
}

/// The events of a stream: what their data says.
fn events(answer: &Whole) -> Vec<Value> {
    let mut decoder = SseDecoder::default();
    decoder.push(answer.text.as_bytes());
    let mut events = Vec::new();
    while let Some(event) = decoder.poll().unwrap() {
        let data: Value = serde_json::from_slice(&event.data).unwrap();
        assert_eq!(event.event.as_deref(), data["type"].as_str(), "{data}");
        events.push(data);
    }
    assert!(decoder.is_empty());
    events
}

fn text_of(events: &[Value]) -> String {
    events
        .iter()
        .filter_map(|event| event["delta"]["text"].as_str())
        .collect()
}

fn named<'a>(events: &'a [Value], name: &str) -> &'a Value {
    events
        .iter()
        .find(|event| event["type"] == name)
        .unwrap_or_else(|| panic!("no `{name}` in {events:?}"))
}

/// How a chat completion is asked for the same.
async fn chat_text(cluster: &Cluster, tokens: usize) -> String {
    let answer = cluster
        .client
        .post("/v1/chat/completions", &chat(&messages(30), tokens, false))
        .await;
    answer.json()["choices"][0]["message"]["content"]
        .as_str()
        .unwrap()
        .to_owned()
}

#[tokio::test]
async fn a_message_is_a_chat_completion_in_other_words() {
    let mut cluster = Cluster::start(&[Role::Prefill, Role::Decode]).await;
    let answer = cluster.client.post(PATH, &request(json!({}))).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let message = answer.json();
    let text = chat_text(&cluster, 6).await;
    assert_eq!(message["content"], json!([{"type": "text", "text": text}]));
    assert_eq!(
        (&message["type"], &message["role"], &message["model"]),
        (&json!("message"), &json!("assistant"), &json!(MODEL))
    );
    assert_eq!(message["stop_reason"], "max_tokens");
    let prompt = crate::support::tokens_of(&messages(30)).len();
    assert_eq!(
        message["usage"],
        json!({"input_tokens": prompt - 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 3, "output_tokens": 6})
    );
    assert_eq!(answer.header("request-id"), answer.header("x-request-id"));
    assert_eq!(answer.header("x-homing-path"), Some("seed"));
    assert_eq!(cluster.turn().await.api, "messages");

    let streamed = cluster.client.post(PATH, &request(json!({"stream": true}))).await;
    assert!(
        streamed
            .header("content-type")
            .unwrap()
            .starts_with("text/event-stream")
    );
    let events = events(&streamed);
    assert_eq!(text_of(&events), text);
    let names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(&names[..3], ["message_start", "content_block_start", "ping"]);
    assert_eq!(
        &names[names.len() - 3..],
        ["content_block_stop", "message_delta", "message_stop"]
    );
    assert_eq!(named(&events, "message_delta")["usage"], message["usage"]);
    assert!(!streamed.text.contains("token_ids") && !streamed.text.contains("[DONE]"));
}

#[tokio::test]
async fn tools_are_called_through_the_router() {
    let cluster = Cluster::start(&[Role::Both]).await;
    let call = |arguments: &str| json!({"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}});
    let script = vec![
        json!({"index": 0, "delta": {"content": "I look."}}),
        json!({"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "call_9", "type": "function", "function": {"name": "get", "arguments": ""}}]}}),
        call("{\"city\":"),
        call("\"Paris\"}"),
        json!({"index": 0, "delta": {}, "finish_reason": "tool_calls"}),
    ];
    let tools = json!({"tools": [{"name": "get", "description": "d", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}});
    cluster.engines[0].on_decode(Act::Say(script.clone()));
    let answer = cluster.client.post(PATH, &request(tools.clone())).await.json();
    assert_eq!(
        answer["content"],
        json!([{"type": "text", "text": "I look."}, {"type": "tool_use", "id": "call_9", "name": "get", "input": {"city": "Paris"}}])
    );
    assert_eq!(answer["stop_reason"], "tool_use");
    let seen = &cluster.engines[0].seen()[0];
    assert_eq!(seen.path, "/v1/chat/completions");
    assert_eq!(seen.body["tools"][0]["function"]["name"], "get");
    assert_eq!(seen.body["tool_choice"], "required");

    cluster.engines[0].on_decode(Act::Say(script));
    let mut streaming = request(tools);
    streaming["stream"] = json!(true);
    let events = events(&cluster.client.post(PATH, &streaming).await);
    let input: String = events
        .iter()
        .filter_map(|event| event["delta"]["partial_json"].as_str())
        .collect();
    assert_eq!(input, r#"{"city":"Paris"}"#);
    assert_eq!(named(&events, "message_delta")["delta"]["stop_reason"], "tool_use");
}

#[tokio::test]
async fn a_message_goes_on_where_its_worker_is_lost() {
    let cluster = Cluster::start(&[Role::Both, Role::Both]).await;
    let text = chat_text(&cluster, 9).await;
    for engine in &cluster.engines {
        engine.on_decode(Act::CutAfter(4));
    }
    let body = request(json!({"stream": true, "max_tokens": 9}));
    let continued = events(&cluster.client.post(PATH, &body).await);
    assert_eq!(text_of(&continued), text);
    assert_eq!(named(&continued, "message_delta")["usage"]["output_tokens"], 9);
    assert_eq!(
        continued
            .iter()
            .filter(|event| event["type"] == "message_start")
            .count(),
        1
    );
    // What cannot go on ends with an error in Anthropic's form.
    for engine in &cluster.engines {
        engine.forget_acts();
        engine.on_decode(Act::CutAfter(4));
    }
    let body = request(json!({"stream": true, "max_tokens": 9, "stop_sequences": ["zzz"]}));
    let broken = events(&cluster.client.post(PATH, &body).await);
    let last = broken.last().unwrap();
    assert_eq!(
        (&last["type"], &last["error"]["type"]),
        (&json!("error"), &json!("api_error"))
    );
    cluster.until_idle().await;
}

#[tokio::test]
async fn whatever_goes_wrong_has_anthropics_form() {
    let cluster = Cluster::start_with(&[Role::Both], |config| config.limits.body_bytes = 100_000).await;
    let check = async |method: Method, path: &str, body: String, status: u16, kind: &str, says: &str| {
        let answer = whole(cluster.client.send(method, path, &[], body).await).await;
        let error = answer.json();
        assert_eq!(answer.status.as_u16(), status, "{error}");
        assert_eq!(
            (&error["type"], &error["error"]["type"]),
            (&json!("error"), &json!(kind)),
            "{error}"
        );
        assert!(error["error"]["message"].as_str().unwrap().contains(says), "{error}");
        assert_eq!(error["request_id"].as_str(), answer.header("request-id"), "{error}");
    };
    let post =
        async |body: String, status, kind: &str, says: &str| check(Method::POST, PATH, body, status, kind, says).await;
    post("{".to_owned(), 400, "invalid_request_error", "JSON").await;
    post(
        request(json!({"model": "gpt-9"})).to_string(),
        404,
        "not_found_error",
        "gpt-9",
    )
    .await;
    let image = json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]);
    post(
        request(json!({"messages": image})).to_string(),
        400,
        "invalid_request_error",
        "`messages[0].content[0].type`",
    )
    .await;
    post(
        request(json!({"max_tokens": null})).to_string(),
        400,
        "invalid_request_error",
        "`max_tokens`",
    )
    .await;
    post(
        request(json!({"messages": messages(3_000)})).to_string(),
        400,
        "invalid_request_error",
        "prompt is too long",
    )
    .await;
    post("x".repeat(100_001), 413, "request_too_large", "100000").await;
    check(Method::GET, PATH, String::new(), 405, "invalid_request_error", "GET").await;
    check(
        Method::POST,
        "/v1/messages/count_tokens",
        "[]".to_owned(),
        400,
        "invalid_request_error",
        "JSON",
    )
    .await;
    assert_eq!(cluster.engines[0].seen().len(), 0, "no engine was bothered");
    cluster.engines[0].on_decode(Act::Refuse(422));
    post(request(json!({})).to_string(), 422, "invalid_request_error", "scripted").await;
    cluster.until_idle().await;
}

#[tokio::test]
async fn an_engine_that_speaks_the_dialect_may_be_asked_in_it() {
    let mut cluster = Cluster::start_with(&[Role::Both, Role::Both], |config| {
        for worker in &mut config.workers {
            worker.native_apis = true;
        }
    })
    .await;
    let body = format!(
        r#"{{"model":"{MODEL}","max_tokens":6,"temperature":1.50,"stream":true,"messages":[{{"role":"user","content":"h\u00e9"}}]}}"#
    );
    let seen = |cluster: &Cluster| -> Vec<_> { cluster.engines.iter().flat_map(|engine| engine.seen()).collect() };
    let answer = whole(cluster.client.send(Method::POST, PATH, &[], body.clone()).await).await;
    let said: Vec<&str> = answer
        .text
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .collect();
    assert_eq!(said, ANTHROPIC, "word for word");
    let asked = seen(&cluster);
    assert_eq!(
        (asked[0].path.as_str(), asked[0].text.as_str()),
        (PATH, body.as_str()),
        "word for word"
    );
    let log = cluster.turn().await;
    assert_eq!((log.cached_tokens, log.output_tokens, log.error), (5, 2, None));
    // Before there is output another worker may answer; after it the client is told.
    let first = |cluster: &Cluster| {
        cluster
            .engines
            .iter()
            .position(|engine| !engine.seen().is_empty())
            .unwrap()
    };
    let home = first(&cluster);
    cluster.engines[home].on_decode(Act::CutAfter(1));
    let retried = whole(cluster.client.send(Method::POST, PATH, &[], body.clone()).await).await;
    assert_eq!(retried.text, answer.text);
    for engine in &cluster.engines {
        engine.on_decode(Act::CutAfter(3));
    }
    let broken = events(&whole(cluster.client.send(Method::POST, PATH, &[], body).await).await);
    assert_eq!(broken.last().unwrap()["type"], "error", "{broken:?}");
    // What is not streamed is translated, and so is all of it where one worker does not serve alone.
    for engine in &cluster.engines {
        engine.forget_acts();
    }
    cluster.client.post(PATH, &request(json!({}))).await;
    assert_eq!(
        seen(&cluster)
            .iter()
            .filter(|seen| seen.path.ends_with("completions"))
            .count(),
        1
    );
    cluster.until_idle().await;
}

#[tokio::test]
async fn a_key_in_anthropics_header_is_a_bearers_for_engines() {
    let cluster = Cluster::start(&[Role::Both]).await;
    let headers = [("x-api-key", "secret")];
    whole(
        cluster
            .client
            .send(Method::POST, PATH, &headers, request(json!({})).to_string())
            .await,
    )
    .await;
    assert_eq!(cluster.engines[0].seen()[0].headers["authorization"], "Bearer secret");
}

#[tokio::test]
async fn tokens_are_counted_as_they_are_rendered() {
    for tokenizer in [Some("tiny".to_owned()), None] {
        let cluster = Cluster::start_with(&[Role::Both], |config| config.tokenizer = tokenizer).await;
        let body = json!({"model": MODEL, "system": "be brief", "messages": messages(30)});
        let counted = cluster.client.post("/v1/messages/count_tokens", &body).await;
        let rendered = json!([{"role": "system", "content": "be brief"}, messages(30)[0]]);
        assert_eq!(
            counted.json(),
            json!({"input_tokens": crate::support::tokens_of(&rendered).len()}),
            "{}",
            counted.text
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_of_messages_finds_its_cache_on_real_workers() {
    let real = start(&PDD).await;
    let mut history = json!([{"role": "user", "content": "Once upon a time there was a router. ".repeat(12)}]);
    for turn in 0..3 {
        let body = json!({"max_tokens": 12, "temperature": 0, "ignore_eos": true, "system": "You tell stories.", "messages": history});
        let answer = real.client.post(PATH, &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        let message = answer.json();
        let text = message["content"][0]["text"].as_str().unwrap().to_owned();
        let mut chat_messages = vec![json!({"role": "system", "content": "You tell stories."})];
        chat_messages.extend(history.as_array().unwrap().iter().cloned());
        let chat = json!({"max_tokens": 12, "temperature": 0, "ignore_eos": true, "messages": chat_messages});
        let chat = real.client.post("/v1/chat/completions", &chat).await.json();
        assert_eq!(chat["choices"][0]["message"]["content"], text, "turn {turn}");
        let usage = &message["usage"];
        let (fresh, cached) = (
            usage["input_tokens"].as_u64().unwrap(),
            usage["cache_read_input_tokens"].as_u64().unwrap(),
        );
        assert_eq!(fresh + cached, chat["usage"]["prompt_tokens"].as_u64().unwrap());
        assert!(turn == 0 || cached > 300, "turn {turn}: {usage}");
        let mut streaming = body.clone();
        streaming["stream"] = json!(true);
        assert_eq!(
            text_of(&events(&real.client.post(PATH, &streaming).await)),
            text,
            "turn {turn}"
        );
        let counted = json!({"system": "You tell stories.", "messages": history});
        let counted = real.client.post("/v1/messages/count_tokens", &counted).await.json();
        assert_eq!(counted["input_tokens"], chat["usage"]["prompt_tokens"]);
        let list = history.as_array_mut().unwrap();
        list.push(json!({"role": "assistant", "content": [{"type": "text", "text": text}]}));
        list.push(json!({"role": "user", "content": format!("And then, {turn}?")}));
    }
    real.gateway.shutdown().await;
}
