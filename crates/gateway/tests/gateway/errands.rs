//! Errands before fake engines: KV is carried between them while no client waits, and no client hears of it.

use crate::support::engine::{Act, Seen};
use crate::support::{Cluster, chat, conversation, tokens_of};
use homing_gateway::GatewayConfig;
use homing_router::event::Role;
use serde_json::{Value, json};
use std::time::Duration;

const DP: [Role; 3] = [Role::Both; 3];

/// Whether a fake engine was asked for one token of a prompt's first tokens, of which no client hears.
fn is_errand(seen: &Seen) -> bool {
    seen.path == "/v1/completions" && seen.body["prompt"].is_array() && seen.body["max_tokens"] == 1
}

fn errands(cluster: &Cluster, engine: usize) -> Vec<Seen> {
    cluster.engines[engine].seen().into_iter().filter(is_errand).collect()
}

async fn metric(cluster: &Cluster, line: &str) -> bool {
    cluster
        .client
        .get("/metrics")
        .await
        .text
        .lines()
        .any(|found| found == line)
}

/// Asks for the metrics until they have this line.
async fn until_metric(cluster: &Cluster, line: &str) {
    let wait = async {
        while !metric(cluster, line).await {
            tokio::task::yield_now().await;
        }
    };
    let waited = tokio::time::timeout(crate::support::engine::PATIENCE, wait).await;
    assert!(
        waited.is_ok(),
        "no {line}: {}",
        cluster.client.get("/metrics").await.text
    );
}

/// What two sessions begin with is base content; with told speeds, so that what is learnt of fake engines does not matter.
fn base(config: &mut GatewayConfig) {
    config.router.policy = "homing:errands=on:gaps=off:speed=h200".parse().unwrap();
    config.router.limits.base_owners = 2;
    config.router.limits.base_tokens = 64;
    config.router.clocks.errand_pace = Duration::from_millis(20);
}

/// A conversation that begins as all do.
fn alike(word: &str) -> Value {
    let mut list = conversation("shared", 250).as_array().unwrap().clone();
    list.push(json!({"role": "assistant", "content": "ok"}));
    list.push(json!({"role": "user", "content": format!("{word} ").repeat(20)}));
    Value::Array(list)
}

/// Two sessions, each at an engine of its own; the third engine has had nobody.
async fn two_sessions(cluster: &Cluster) -> usize {
    for word in ["one", "two"] {
        let mut body = chat(&alike(word), 4, false);
        body["prompt_cache_key"] = json!(word);
        let answer = cluster.client.post("/v1/chat/completions", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
    }
    let chats = |engine: &usize| {
        cluster.engines[*engine]
            .seen()
            .iter()
            .any(|seen| seen.path.contains("chat"))
    };
    let idle: Vec<usize> = (0..DP.len()).filter(|engine| !chats(engine)).collect();
    assert_eq!(idle.len(), 1, "each session has an engine of its own");
    idle[0]
}

#[tokio::test]
async fn base_content_is_lent_and_fetched_for_who_lacks_it() {
    let mut cluster = Cluster::start_with(&DP, base).await;
    let third = two_sessions(&cluster).await;
    until_metric(&cluster, r#"homing_errands_total{kind="base",outcome="landed"} 1"#).await;
    let fetched = errands(&cluster, third);
    let lent: Vec<Seen> = (0..DP.len())
        .filter(|engine| *engine != third)
        .flat_map(|engine| errands(&cluster, engine))
        .collect();
    let ([lend], [fetch]) = (&lent[..], &fetched[..]) else {
        panic!("one leg each: {lent:?} {fetched:?}")
    };
    assert!(lend.is_prefill(), "{lend:?}");
    // The very same prompt, the whole blocks that both sessions begin with, and the parameters word for word.
    let tokens: Vec<Vec<u32>> = ["one", "two"].map(|word| tokens_of(&alike(word))).into();
    let shared = tokens[0]
        .iter()
        .zip(&tokens[1])
        .take_while(|(left, right)| left == right)
        .count();
    assert_eq!(lend.body["prompt"], json!(tokens[0][..shared / 16 * 16]));
    assert_eq!(lend.body["prompt"], fetch.body["prompt"]);
    assert!(fetch.text.contains(r#""odd":1.5"#), "{fetch:?}");
    assert_eq!(fetch.body["kv_transfer_params"]["do_remote_prefill"], true);
    assert_eq!(
        (&fetch.body["stream"], fetch.body.get("messages")),
        (&json!(false), None)
    );
    // No client hears of it: two turns ended, with their own tokens and no more.
    for _ in 0..2 {
        assert_eq!(cluster.turn().await.output_tokens, 4);
    }
    assert!(cluster.turns.try_recv().is_err());
    assert!(metric(&cluster, "homing_output_tokens_total 8").await);
    cluster.until_idle().await;
}

#[tokio::test]
async fn an_errand_that_an_engine_refuses_is_over_and_nothing_stays_booked() {
    let cluster = Cluster::start_with(&DP, base).await;
    for engine in &cluster.engines {
        engine.on_prefill(Act::Refuse(500));
    }
    two_sessions(&cluster).await;
    until_metric(&cluster, r#"homing_errands_total{kind="base",outcome="failed"} 1"#).await;
    cluster.until_idle().await;
    let asked: usize = (0..DP.len()).map(|engine| errands(&cluster, engine).len()).sum();
    assert_eq!(asked, 1, "it is not tried again at once");
}

/// Whatever is cheaper by anything is worth a move.
fn gaps(config: &mut GatewayConfig) {
    config.router.policy = "homing:errands=on:base=off:speed=h200:margin=0:margin_s=0"
        .parse()
        .unwrap();
}

fn state_of(page: &Value, engine: usize) -> &Value {
    &page["data"][engine]["state"]
}

/// Sessions live at the only engine that answers its probes. While a turn of one runs the other engine comes back, and that
/// session's KV is carried there once the turn has ended.
#[tokio::test]
async fn a_sessions_kv_is_carried_in_the_gap_and_its_next_turn_is_served_there() {
    let mut cluster = Cluster::start_with(&[Role::Both; 2], gaps).await;
    cluster.engines[1].set_sick(true);
    let gone = |page: &Value| state_of(page, 1) == "dead";
    cluster.client.until("/admin/workers", "the second is dead", gone).await;
    let turn = |word: &str, words: usize| {
        let mut body = chat(&conversation(word, words), 4, false);
        body["prompt_cache_key"] = json!(word);
        body
    };
    for word in ["a", "b", "c"] {
        let answer = cluster.client.post("/v1/chat/completions", &turn(word, 300)).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        cluster.turn().await;
    }
    cluster.engines[0].hold();
    let (client, body) = (cluster.client.clone(), turn("a", 310));
    let asked = tokio::spawn(async move { client.post("/v1/chat/completions", &body).await });
    cluster.engines[0]
        .until("the fourth turn", |engine| engine.seen().len() == 4)
        .await;
    cluster.engines[1].set_sick(false);
    let back = |page: &Value| state_of(page, 1) == "degraded";
    cluster.client.until("/admin/workers", "the second is back", back).await;
    cluster.engines[0].release(1_000);
    assert_eq!(asked.await.unwrap().status, 200);
    assert_eq!(cluster.turn().await.worker.as_deref(), Some("w0"));
    until_metric(&cluster, r#"homing_errands_total{kind="gap",outcome="landed"} 1"#).await;
    let (lent, fetched) = (errands(&cluster, 0), errands(&cluster, 1));
    assert_eq!((lent.len(), fetched.len()), (1, 1));
    let tokens = tokens_of(&conversation("a", 310));
    assert_eq!(lent[0].body["prompt"], json!(tokens[..tokens.len() / 16 * 16]));
    assert_eq!(lent[0].body["prompt"], fetched[0].body["prompt"]);
    let answer = cluster.client.post("/v1/chat/completions", &turn("a", 320)).await;
    assert_eq!(
        (answer.header("x-homing-path"), answer.header("x-homing-worker")),
        (Some("append"), Some("w1"))
    );
    cluster.until_idle().await;
}
