//! What requests are refused, and with which words: every member that is wrong, and a thousand of them in a row.

use crate::client::{CHAT, COMPLETIONS, Client, greedy, prompt, start, tiny, token_ids, with_member};
use crate::http::hang_up;
use homing_worker::{Limits, WorkerConfig};
use serde_json::{Value, json};

/// Path, body, and what the error must be: status, `param`, `code`.
type Wrong = (&'static str, String, u16, Option<&'static str>, Option<&'static str>);

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
