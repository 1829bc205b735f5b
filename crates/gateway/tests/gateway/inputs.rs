//! Bad input, each with a clear error in OpenAI's form and nothing left behind; and the pages.

use crate::support::engine::{Act, PATIENCE};
use crate::support::{Cluster, Events, chat, conversation, messages, whole};
use homing_router::event::Role;
use http::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// A body with some members changed.
fn with(members: Value) -> String {
    let mut body = chat(&messages(3), 4, false);
    body.as_object_mut()
        .unwrap()
        .extend(members.as_object().unwrap().clone());
    body.to_string()
}

#[tokio::test]
async fn bad_input_is_named() {
    let cluster = Cluster::start_with(&[Role::Both], |config| config.limits.body_bytes = 200_000).await;
    let check = async |path: &str, body: String, status: u16, code: Option<&str>, param: Option<&str>| {
        let answer = whole(cluster.client.send(Method::POST, path, &[], body.clone()).await).await;
        let error = answer.json()["error"].clone();
        let shown = &body[..body.len().min(200)];
        assert_eq!(answer.status.as_u16(), status, "{shown}: {error}");
        assert!(
            answer.header("x-request-id").is_some(),
            "{shown}: every answer has an id"
        );
        assert!(
            error["message"].as_str().is_some_and(|message| !message.is_empty()),
            "{shown}: {error}"
        );
        assert!(error["type"].is_string(), "{shown}: {error}");
        assert_eq!(error["code"].as_str(), code, "{shown}: {error}");
        assert_eq!(error["param"].as_str(), param, "{shown}: {error}");
    };
    check(CHAT, "{\"model\":".to_owned(), 400, Some("invalid_json"), None).await;
    check(CHAT, "[1]".to_owned(), 400, Some("invalid_json"), None).await;
    check(CHAT, String::new(), 400, Some("invalid_json"), None).await;
    check(
        CHAT,
        with(json!({"model": "gpt-9"})),
        404,
        Some("model_not_found"),
        Some("model"),
    )
    .await;
    check(CHAT, with(json!({"messages": []})), 400, None, Some("messages")).await;
    check(CHAT, with(json!({"messages": "hi"})), 400, None, Some("messages")).await;
    check(
        CHAT,
        with(json!({"messages": [{"content": "hi"}]})),
        400,
        None,
        Some("messages[0]"),
    )
    .await;
    check(CHAT, with(json!({"max_tokens": -1})), 400, None, Some("max_tokens")).await;
    check(CHAT, with(json!({"max_tokens": "many"})), 400, None, Some("max_tokens")).await;
    check(CHAT, with(json!({"n": 2})), 400, None, Some("n")).await;
    check(CHAT, with(json!({"stream": "yes"})), 400, None, Some("stream")).await;
    check(TEXT, json!({"model": "fake"}).to_string(), 400, None, Some("prompt")).await;
    check(
        TEXT,
        json!({"model": "fake", "prompt": [[1], [2]]}).to_string(),
        400,
        None,
        Some("prompt"),
    )
    .await;
    check(
        TEXT,
        json!({"model": "fake", "prompt": []}).to_string(),
        400,
        None,
        Some("prompt"),
    )
    .await;
    let long = with(json!({"messages": messages(3_000)}));
    check(CHAT, long, 400, Some("context_length_exceeded"), None).await;
    check(CHAT, "x".repeat(200_001), 413, Some("body_too_large"), None).await;
    assert_eq!(cluster.engines[0].seen().len(), 0, "no engine was bothered");
    cluster.until_idle().await;
}

#[tokio::test]
async fn a_header_that_is_no_session_is_refused() {
    let cluster = Cluster::start(&[Role::Both]).await;
    for bad in ["two words", "", &"x".repeat(129)] {
        let (path, headers) = ("/v1/chat/completions", [("x-homing-session", bad)]);
        let body = chat(&messages(3), 2, false).to_string();
        let answer = whole(cluster.client.send(Method::POST, path, &headers, body).await).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.json()["error"]["code"]),
            (400, &json!("invalid_session")),
            "{bad}"
        );
    }
    assert_eq!(cluster.engines[0].seen().len(), 0, "no engine was bothered");
}

#[tokio::test]
async fn unknown_paths_and_wrong_methods_are_errors_of_the_same_form() {
    let cluster = Cluster::start(&[Role::Both]).await;
    let check = async |method: Method, path: &str, status: u16, code: &str| {
        let answer = whole(cluster.client.send(method, path, &[], "").await).await;
        assert_eq!(
            (answer.status.as_u16(), answer.json()["error"]["code"].as_str()),
            (status, Some(code)),
            "{path}"
        );
    };
    check(Method::GET, "/v1/embeddings", 404, "unknown_path").await;
    check(Method::GET, "/v1/chat/completions", 405, "method_not_allowed").await;
    check(Method::POST, "/metrics", 405, "method_not_allowed").await;
    check(Method::GET, "/admin/explain/%ff", 400, "invalid_path").await;
    check(Method::GET, "/v1/models/%ff", 400, "invalid_path").await;
    check(Method::GET, "/v1/models/other/one", 404, "model_not_found").await;
}

#[tokio::test]
async fn a_body_that_says_it_is_too_long_is_not_waited_for() {
    let cluster = Cluster::start(&[Role::Both]).await;
    let mut socket = tokio::net::TcpStream::connect(cluster.gateway.local_addr())
        .await
        .unwrap();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 99999999999\r\n\r\n{";
    socket.write_all(head.as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    let read = tokio::time::timeout(PATIENCE, socket.read_exact(&mut answer)).await;
    read.expect("the answer does not wait for the body").unwrap();
    assert_eq!(&answer, b"HTTP/1.1 413");
}

#[tokio::test]
async fn the_pages_say_what_is() {
    let mut cluster = Cluster::start(&[Role::Prefill, Role::Decode]).await;
    cluster
        .client
        .post("/v1/chat/completions", &chat(&messages(200), 3, false))
        .await;
    cluster.turn().await;
    let models = cluster.client.get("/v1/models").await.json();
    assert_eq!(models["data"][0]["id"], "fake");
    assert_eq!(cluster.client.get("/v1/models/fake").await.json(), models["data"][0]);
    let workers = cluster.client.get("/admin/workers").await.json();
    assert_eq!(workers["data"][1]["url"], cluster.engines[1].url());
    let tokens = cluster
        .client
        .post("/tokenize", &json!({"model": "fake", "prompt": "abc"}))
        .await
        .json();
    assert_eq!(tokens["tokens"], json!([97, 98, 99]));
    let page = cluster.client.get("/metrics").await.text;
    let metrics = homing_wire::metrics_text::Metrics::parse(&page);
    let sum = |name: &str| metrics.sum(name).unwrap_or_else(|| panic!("no `{name}` in {page}"));
    assert!(
        page.contains(r#"homing_requests_total{path="seed",outcome="ok"} 1"#),
        "{page}"
    );
    assert!((sum("homing_ttft_seconds_count") - 1.0).abs() < 1e-9);
    assert!((sum("homing_output_tokens_total") - 3.0).abs() < 1e-9);
    // A vLLM that imports reports what the exporting one had cached: that is no figure of its own cache.
    assert!((sum("homing_cached_tokens_reported_total")).abs() < 1e-9);
    assert!((sum("homing_queued_requests")).abs() < 1e-9);
    assert!(
        (sum("homing_worker_state") - 2.0).abs() < 1e-9,
        "each worker is in one state"
    );
    assert_eq!(metrics.skipped, 0, "{page}");
}

#[tokio::test]
async fn a_full_router_says_when_to_come_back() {
    let cluster = Cluster::start_with(&[Role::Both], |config| config.router.limits.requests = 1).await;
    cluster.engines[0].hold();
    let body = chat(&messages(3), 2, true);
    let first = cluster.client.stream("/v1/chat/completions", &body).await;
    let second = cluster.client.post("/v1/chat/completions", &body).await;
    assert_eq!(
        (second.status.as_u16(), &second.json()["error"]["code"]),
        (429, &json!("overloaded"))
    );
    assert!(second.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
    drop(first);
    cluster.until_idle().await;
}

#[tokio::test]
async fn without_a_worker_a_turn_is_refused_and_the_gateway_is_alive() {
    let cluster = Cluster::start_with(&[], |config| config.tokenizer = Some("tiny".to_owned())).await;
    let answer = cluster
        .client
        .post("/v1/chat/completions", &chat(&messages(3), 2, true))
        .await;
    assert_eq!(
        (answer.status.as_u16(), &answer.json()["error"]["code"]),
        (503, &json!("no_worker"))
    );
    assert_eq!(cluster.client.get("/health").await.status, 200);
    assert_eq!(cluster.client.get("/ready").await.status, 503);
}

#[tokio::test]
async fn engines_tokenise_where_the_router_has_no_vocabulary() {
    let cluster = Cluster::start_with(&[Role::Both], |config| config.tokenizer = None).await;
    let answer = cluster
        .client
        .post("/v1/chat/completions", &chat(&messages(30), 2, false))
        .await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let explained = cluster
        .client
        .get(&format!("/admin/explain/{}", answer.header("x-request-id").unwrap()))
        .await;
    let tokens = crate::support::tokens_of(&messages(30)).len();
    assert_eq!(explained.json()["attempts"][0]["decision"]["prompt_tokens"], tokens);
}

/// What 1,000 requests that go wrong in every way leave behind: nothing.
#[tokio::test]
async fn nothing_is_left_of_a_thousand_bad_requests() {
    let cluster = Cluster::start(&[Role::Prefill, Role::Decode, Role::Decode]).await;
    for round in 0..100 {
        for engine in &cluster.engines {
            engine.forget_acts();
        }
        let message = conversation(&format!("w{round}"), 30);
        let good = chat(&message, 4, true);
        let post = async |body: String| {
            cluster
                .client
                .send(Method::POST, "/v1/chat/completions", &[], body)
                .await
        };
        // Malformed, unknown, too long.
        assert_eq!(post("{".to_owned()).await.status(), 400);
        assert_eq!(
            post(json!({"model": "x", "messages": message}).to_string())
                .await
                .status(),
            404
        );
        assert_eq!(post(chat(&messages(3_000), 4, true).to_string()).await.status(), 400);
        // Refused, failed in transfer, broken off.
        for act in [Act::Refuse(400), Act::Refuse(500), Act::CutAfter(2), Act::ErrorAfter(0)] {
            cluster.engines[1].on_decode(act.clone());
            cluster.engines[2].on_decode(act);
            Events::new(post(good.to_string()).await).rest().await;
        }
        // Hung up before the answer, in the prefill leg, and in the stream.
        drop(
            tokio::time::timeout(
                std::time::Duration::ZERO,
                cluster.client.stream("/v1/chat/completions", &good),
            )
            .await,
        );
        cluster.engines[0].on_prefill(Act::Hang);
        let request = tokio::spawn({
            let (client, body) = (
                cluster.client.clone(),
                chat(&conversation(&format!("v{round}"), 30), 4, true),
            );
            async move { client.stream("/v1/chat/completions", &body).await }
        });
        tokio::task::yield_now().await;
        request.abort();
        cluster.engines[0].forget_acts();
        let mut events = Events::new(post(good.to_string()).await);
        drop(events.next().await);
    }
    cluster.until_idle().await;
    for engine in &cluster.engines {
        engine.until("no request is open", |engine| engine.open() == 0).await;
    }
    for engine in &cluster.engines {
        engine.forget_acts();
    }
    let answer = cluster
        .client
        .post("/v1/chat/completions", &chat(&messages(30), 4, false))
        .await;
    assert_eq!(answer.status, 200, "{}", answer.text);
}
