//! Engines that do not fit: refused at the door with the reason, and taken once they fit.

use crate::support::engine::{Fake, MODEL};
use crate::support::{Caller, chat, config, messages, tokens_of};
use homing_gateway::{Gateway, GatewayConfig};
use homing_router::event::Role;
use serde_json::{Value, json};

/// A gateway before engines of which some do not fit; the first joins before the others are there.
async fn gateway(config: GatewayConfig) -> (Gateway, Caller) {
    let gateway = Gateway::start(config).await.unwrap();
    let client = Caller::new(gateway.local_addr());
    (gateway, client)
}

fn problem(page: &Value, name: &str) -> String {
    let workers = page["data"].as_array().unwrap();
    let worker = workers.iter().find(|worker| worker["name"] == name).unwrap();
    worker["problem"].as_str().unwrap_or_default().to_owned()
}

fn is_degraded(page: &Value, name: &str) -> bool {
    let workers = page["data"].as_array().unwrap();
    workers
        .iter()
        .any(|worker| worker["name"] == name && worker["state"] == "degraded")
}

async fn served_by(client: &Caller, session: &str) -> String {
    let body = json!({"prompt": format!("What is there for {session}? ").repeat(8), "max_tokens": 2});
    let answer = client.post("/v1/completions", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.header("x-homing-worker").unwrap().to_owned()
}

/// An engine with another chat template than the router's model: its own tokens count, from its first turn on.
#[tokio::test]
async fn an_engine_that_tokenises_otherwise_is_asked_for_the_tokens() {
    for is_odd in [false, true] {
        let engines = [if is_odd {
            Fake::start_odd().await
        } else {
            Fake::start().await
        }];
        let (gateway, client) = gateway(config(&engines, &[Role::Both])).await;
        let mut turns = gateway.turns();
        client
            .until("/admin/workers", "it joined", |page| is_degraded(page, "w0"))
            .await;
        let messages = messages(30);
        let answer = client.post("/v1/chat/completions", &chat(&messages, 2, false)).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        let counted = turns.recv().await.unwrap().prompt_tokens as usize;
        assert_eq!(counted, tokens_of(&messages).len() + usize::from(is_odd));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_of_another_model_than_its_peers_is_refused_until_it_serves_theirs() {
    let engines = [Fake::start().await, Fake::start().await];
    // Refused by the order of joining: it comes when its peer is in.
    engines[1].serve("another");
    engines[1].cache_nothing(true);
    let (gateway, client) = gateway(config(&engines, &[Role::Both, Role::Both])).await;
    client
        .until("/admin/workers", "the first joined", |page| is_degraded(page, "w0"))
        .await;
    engines[1].cache_nothing(false);
    let refused = format!("refused: expected one of the models that w0 serves, `{MODEL}`, found `another`");
    client
        .until("/admin/workers", "the second is refused", |page| {
            problem(page, "w1") == refused
        })
        .await;
    for session in 0..4 {
        assert_eq!(served_by(&client, &session.to_string()).await, "w0");
    }
    assert!(engines[1].seen().is_empty(), "nothing is sent to it");
    engines[1].serve(MODEL);
    client
        .until("/admin/workers", "the second joined", |page| is_degraded(page, "w1"))
        .await;
    gateway.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_without_prefix_caching_is_refused_until_it_caches() {
    let engines = [Fake::start().await, Fake::start().await];
    engines[1].cache_nothing(true);
    let (gateway, client) = gateway(config(&engines, &[Role::Both, Role::Both])).await;
    let refused = "refused: expected an engine that caches prefixes, found `enable_prefix_caching` false";
    client
        .until("/admin/workers", "the second is refused", |page| {
            problem(page, "w1") == refused
        })
        .await;
    client
        .until("/admin/workers", "the first joined", |page| is_degraded(page, "w0"))
        .await;
    assert_eq!(served_by(&client, "a").await, "w0");
    assert!(engines[1].seen().is_empty(), "nothing is sent to it");
    engines[1].cache_nothing(false);
    client
        .until("/admin/workers", "the second joined", |page| is_degraded(page, "w1"))
        .await;
    gateway.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_without_events_is_predicted_and_says_so() {
    let engines = [Fake::start().await];
    let (gateway, client) = gateway(config(&engines, &[Role::Both])).await;
    client
        .until("/admin/workers", "it joined", |page| is_degraded(page, "w0"))
        .await;
    let mut turns = gateway.turns();
    let first = "Tell me what a router without any events does. ".repeat(6);
    for (prompt, expects) in [
        (first.clone(), false),
        (format!("{first} And then, and after that?"), true),
    ] {
        let body = json!({"prompt": prompt, "max_tokens": 2});
        let answer = client.post("/v1/completions", &body).await;
        let expected: u32 = answer.header("x-homing-cached-tokens").unwrap().parse().unwrap();
        assert_eq!(expected > 0, expects, "{}", answer.text);
        let turn = turns.recv().await.unwrap();
        assert_eq!(turn.expected_cached_tokens, expected);
        let differs = turn.cached_tokens != expected;
        assert_eq!(turn.cached_difference, differs.then_some("predicted"), "{turn:?}");
    }
    gateway.shutdown().await;
}
