//! The Responses API: translated before scripted engines and before real workers.

use crate::support::engine::{Act, MODEL};
use crate::support::{Cluster, Whole, chat, messages};
use crate::workers::{PDD, start};
use homing_router::event::Role;
use homing_wire::sse::SseDecoder;
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";

fn request(members: Value) -> Value {
    let mut body = json!({"model": MODEL, "max_output_tokens": 6, "input": messages(30)});
    body.as_object_mut()
        .unwrap()
        .extend(members.as_object().unwrap().clone());
    body
}

fn events(answer: &Whole) -> Vec<Value> {
    let mut decoder = SseDecoder::default();
    decoder.push(answer.text.as_bytes());
    let mut events: Vec<Value> = Vec::new();
    while let Some(event) = decoder.poll().unwrap() {
        let data: Value = serde_json::from_slice(&event.data).unwrap();
        assert_eq!(data["sequence_number"], events.len(), "{data}");
        events.push(data);
    }
    assert!(decoder.is_empty());
    events
}

fn text_of(events: &[Value]) -> String {
    let deltas = events
        .iter()
        .filter(|event| event["type"] == "response.output_text.delta");
    deltas.map(|event| event["delta"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_response_is_a_chat_completion_in_other_words() {
    let mut cluster = Cluster::start(&[Role::Prefill, Role::Decode]).await;
    let answer = cluster.client.post(PATH, &request(json!({}))).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(cluster.turn().await.api, "responses");
    let response = answer.json();
    let completion = cluster
        .client
        .post("/v1/chat/completions", &chat(&messages(30), 6, false))
        .await
        .json();
    let text = completion["choices"][0]["message"]["content"].as_str().unwrap();
    assert_eq!(response["output"][0]["content"][0]["text"], text);
    assert_eq!(
        response["status"], "incomplete",
        "it was cut at the limit that was asked for"
    );
    let prompt = crate::support::tokens_of(&messages(30)).len();
    assert_eq!(
        (
            &response["usage"]["input_tokens"],
            &response["usage"]["input_tokens_details"]["cached_tokens"]
        ),
        (&json!(prompt), &json!(3))
    );
    let streamed = cluster.client.post(PATH, &request(json!({"stream": true}))).await;
    let events = events(&streamed);
    assert_eq!(text_of(&events), text);
    assert_eq!(events[0]["type"], "response.created");
    let last = events.last().unwrap();
    assert_eq!(
        (&last["type"], &last["response"]["output"][0]["content"]),
        (&json!("response.incomplete"), &response["output"][0]["content"])
    );
    assert!(!streamed.text.contains("[DONE]"));
}

#[tokio::test]
async fn functions_are_called_through_the_router() {
    let cluster = Cluster::start(&[Role::Both]).await;
    let piece = |call: Value| json!({"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": null});
    let script = vec![
        piece(json!({"index": 0, "id": "call_9", "type": "function", "function": {"name": "get", "arguments": ""}})),
        piece(json!({"index": 0, "function": {"arguments": "{\"a\":1}"}})),
        json!({"index": 0, "delta": {}, "finish_reason": "tool_calls"}),
    ];
    cluster.engines[0].on_decode(Act::Say(script));
    let body = request(json!({"tools": [{"type": "function", "name": "get", "parameters": {}}], "stream": true}));
    let events = events(&cluster.client.post(PATH, &body).await);
    let done = events
        .iter()
        .find(|event| event["type"] == "response.output_item.done")
        .unwrap();
    assert_eq!(
        (
            &done["item"]["type"],
            &done["item"]["call_id"],
            &done["item"]["arguments"]
        ),
        (&json!("function_call"), &json!("call_9"), &json!("{\"a\":1}"))
    );
    assert_eq!(events.last().unwrap()["type"], "response.completed");
    // The next turn has it in its history.
    let history =
        json!([messages(30)[0], done["item"], {"type": "function_call_output", "call_id": "call_9", "output": "15"}]);
    let answer = cluster.client.post(PATH, &request(json!({"input": history}))).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let seen = &cluster.engines[0].seen()[1].body["messages"];
    assert_eq!(seen[1]["tool_calls"][0]["function"]["arguments"], "{\"a\":1}");
    assert_eq!(
        seen[2],
        json!({"role": "tool", "tool_call_id": "call_9", "content": "15"})
    );
}

#[tokio::test]
async fn what_goes_wrong_is_said_as_openai_does() {
    let cluster = Cluster::start(&[Role::Both]).await;
    let refused = async |members: Value, param: &str| {
        let answer = cluster.client.post(PATH, &request(members)).await;
        let error = answer.json()["error"].clone();
        assert_eq!(
            (answer.status.as_u16(), error["param"].as_str()),
            (400, Some(param)),
            "{error}"
        );
    };
    refused(json!({"previous_response_id": "resp_1"}), "previous_response_id").await;
    refused(
        json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        "input[0].content[0].type",
    )
    .await;
    assert_eq!(cluster.engines[0].seen().len(), 0, "no engine was bothered");
    cluster.engines[0].on_decode(Act::ErrorAfter(2));
    let failed = events(
        &cluster
            .client
            .post(PATH, &request(json!({"stream": true, "seed": 1})))
            .await,
    );
    let last = failed.last().unwrap();
    assert_eq!(
        (&last["type"], &last["response"]["status"]),
        (&json!("response.failed"), &json!("failed"))
    );
    assert!(last["response"]["error"]["message"].is_string());
    cluster.until_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_of_responses_finds_its_cache_on_real_workers() {
    let real = start(&PDD).await;
    let mut input = json!([{"role": "user", "content": "Once upon a time there was a router. ".repeat(12)}]);
    for turn in 0..3 {
        let body = json!({"max_output_tokens": 12, "temperature": 0, "ignore_eos": true, "prompt_cache_key": "k", "input": input});
        let answer = real.client.post(PATH, &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        assert_eq!(answer.header("x-homing-session"), Some("k"));
        let response = answer.json();
        let cached = response["usage"]["input_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap();
        assert!(turn == 0 || cached > 300, "turn {turn}: {}", response["usage"]);
        assert!(
            turn == 0 || answer.header("x-homing-path") == Some("append"),
            "turn {turn}"
        );
        let list = input.as_array_mut().unwrap();
        list.extend(response["output"].as_array().unwrap().iter().cloned());
        list.push(json!({"role": "user", "content": format!("And then, {turn}?")}));
    }
    real.gateway.shutdown().await;
}
