//! What a client and the engines see of a turn that goes well, and of a client that does not wait for it.

use crate::support::engine::{Act, answer_to};
use crate::support::{Cluster, chat, conversation, messages, text_of, tokens_of, whole};
use homing_router::event::Role;
use serde_json::json;

const PD: [Role; 2] = [Role::Prefill, Role::Decode];

#[tokio::test]
async fn the_first_chunk_arrives_before_the_last_is_made() {
    let cluster = Cluster::start(&[Role::Both]).await;
    let engine = &cluster.engines[0];
    engine.hold();
    engine.release(1);
    let messages = messages(20);
    let mut events = cluster
        .client
        .stream("/v1/chat/completions", &chat(&messages, 3, true))
        .await;
    assert_eq!(events.status, 200);
    let role = events.next().await.unwrap();
    assert!(role.contains("assistant"), "{role}");
    let first = events.next().await.unwrap();
    let expected = answer_to(&tokens_of(&messages), 3);
    assert!(
        first.contains(&expected[..1]) && !first.contains("token_ids"),
        "{first}"
    );
    engine.release(2);
    let (rest, done) = events.rest().await;
    assert!(done);
    assert_eq!(text_of(&rest), expected[1..]);
    assert!(
        rest.iter().all(|event| event.get("usage").is_none()),
        "nobody asked for the usage"
    );
    cluster.until_idle().await;
}

#[tokio::test]
async fn both_legs_get_the_same_prompt_and_the_parameters_are_used_once() {
    let mut cluster = Cluster::start(&PD).await;
    for turn in 1..=3 {
        let messages = conversation(&format!("w{turn}"), 200);
        let answer = cluster
            .client
            .post("/v1/chat/completions", &chat(&messages, 5, false))
            .await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        let body = answer.json();
        assert_eq!(
            body["choices"][0]["message"]["content"],
            answer_to(&tokens_of(&messages), 5)
        );
        assert_eq!(body["usage"]["completion_tokens"], 5);
        assert_eq!(body["object"], "chat.completion");
        assert_eq!(
            answer.header("x-homing-path"),
            Some("seed"),
            "turn {turn}: {:?}",
            answer.headers
        );
        assert_eq!(answer.header("x-homing-worker"), Some("d0"));
        let log = cluster.turn().await;
        assert_eq!(
            (log.worker.as_deref(), log.prefill_worker.as_deref()),
            (Some("d0"), Some("p0"))
        );
        assert!(
            log.ttft.is_some() && log.error.is_none() && log.output_tokens == 5,
            "{log:?}"
        );
    }
    let (prefills, decodes) = (cluster.engines[0].prefills(), cluster.engines[1].decodes());
    assert_eq!((prefills.len(), decodes.len()), (3, 3));
    let mut used = Vec::new();
    for (prefill, decode) in prefills.iter().zip(&decodes) {
        assert_eq!(prefill.body["messages"], decode.body["messages"]);
        assert_ne!(prefill.headers["x-request-id"], decode.headers["x-request-id"]);
        let params = &decode.body["kv_transfer_params"];
        assert!(decode.text.contains(r#""odd":1.5"#), "word for word: {}", decode.text);
        assert!(!used.contains(params), "used once: {params}");
        used.push(params.clone());
    }
    cluster.until_idle().await;
}

#[tokio::test]
async fn a_client_sees_what_it_asked_for() {
    let cluster = Cluster::start(&[Role::Both]).await;
    let mut body = json!({"model": "fake", "prompt": [1, 2, 3], "max_tokens": 2, "stream": true, "return_token_ids": true,
        "stream_options": {"include_usage": true}});
    let mut events = cluster.client.stream("/v1/completions", &body).await;
    let (events, done) = events.rest().await;
    assert!(done && events.len() == 3, "{events:?}");
    assert!(events[0]["choices"][0]["token_ids"].is_array());
    assert_eq!(events[2]["usage"]["total_tokens"], 5);
    body["stream"] = json!(false);
    body.as_object_mut().unwrap().remove("return_token_ids");
    body.as_object_mut().unwrap().remove("stream_options");
    let answer = cluster.client.post("/v1/completions", &body).await.json();
    assert_eq!(answer["choices"][0]["text"], answer_to(&[1, 2, 3], 2));
    assert_eq!(answer["choices"][0].get("token_ids"), None);
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
}

#[tokio::test]
async fn a_client_that_hangs_up_frees_both_legs_at_once() {
    let mut cluster = Cluster::start(&PD).await;
    let long = messages(300);
    // In the prefill leg.
    cluster.engines[0].on_prefill(Act::Hang);
    let request = tokio::spawn({
        let (client, body) = (cluster.client.clone(), chat(&long, 5, true));
        async move { client.stream("/v1/chat/completions", &body).await }
    });
    cluster.engines[0]
        .until("the prefill leg is there", |engine| engine.open() == 1)
        .await;
    request.abort();
    cluster.engines[0]
        .until("the prefill leg is cancelled", |engine| engine.open() == 0)
        .await;
    assert_eq!(cluster.turn().await.error.as_deref(), Some("client_gone"));
    // In the stream.
    cluster.engines[1].hold();
    cluster.engines[1].release(1);
    let mut events = cluster
        .client
        .stream("/v1/chat/completions", &chat(&long, 5, true))
        .await;
    events.next().await.unwrap();
    assert_eq!(cluster.engines[1].open(), 1);
    drop(events);
    cluster.engines[1]
        .until("the decode leg is cancelled", |engine| engine.open() == 0)
        .await;
    assert_eq!(cluster.turn().await.error.as_deref(), Some("client_gone"));
    cluster.until_idle().await;
}

#[tokio::test]
async fn a_session_is_named_by_its_client_or_recognised() {
    let cluster = Cluster::start(&[Role::Both]).await;
    let body = chat(&messages(30), 2, false).to_string();
    let send = async |headers: &[(&str, &str)]| {
        whole(
            cluster
                .client
                .send(http::Method::POST, "/v1/chat/completions", headers, body.clone())
                .await,
        )
        .await
    };
    let named = send(&[("x-homing-session", "mine"), ("authorization", "Bearer k")]).await;
    assert_eq!(named.header("x-homing-session"), Some("mine"));
    assert_eq!(cluster.engines[0].seen()[0].headers["authorization"], "Bearer k");
    assert_eq!(cluster.engines[0].seen()[0].headers.get("x-homing-session"), None);
    let agent = send(&[("x-claude-code-session-id", "0b5-7")]).await;
    assert_eq!(agent.header("x-homing-session"), Some("0b5-7"));
    let recognised = send(&[]).await;
    assert!(recognised.header("x-homing-session").is_some());
    assert!(recognised.header("x-homing-cached-tokens").is_some());
    let sessions = cluster.client.get("/admin/sessions").await.json();
    assert!(sessions["data"].as_array().unwrap().len() >= 2, "{sessions}");
}

#[tokio::test]
async fn a_request_can_be_explained() {
    let cluster = Cluster::start(&PD).await;
    let answer = cluster
        .client
        .post("/v1/chat/completions", &chat(&messages(300), 2, false))
        .await;
    let name = answer.header("x-request-id").unwrap();
    let explanation = cluster.client.get(&format!("/admin/explain/{name}")).await;
    assert_eq!(explanation.status, 200);
    let decision = &explanation.json()["attempts"][0]["decision"];
    assert_eq!(decision["path"], "seed");
    assert!(!decision["candidates"].as_array().unwrap().is_empty());
    assert_eq!(cluster.client.get("/admin/explain/nonsense").await.status, 404);
    assert_eq!(cluster.client.get("/admin/explain/00000000-0").await.status, 404);
    assert_eq!(
        cluster.client.get("/admin/decisions").await.json()["data"][0]["path"],
        "seed"
    );
}

#[tokio::test]
async fn connections_to_engines_are_used_again() {
    let mut cluster = Cluster::start(&[Role::Both]).await;
    for _ in 0..30 {
        let answer = cluster
            .client
            .post("/v1/chat/completions", &chat(&messages(3), 2, true))
            .await;
        assert_eq!(answer.status, 200);
        cluster.turn().await;
        cluster.engines[0]
            .until("the body has ended", |engine| engine.open() == 0)
            .await;
    }
    let connections = cluster.engines[0].connections();
    assert!(
        connections < 15,
        "30 streams took {connections} connections, probes among them"
    );
}
