//! KV that moves: whose it is, what it is for, and what becomes of a turn when it does not come.

use crate::support::engine::{Act, Seen, answer_to};
use crate::support::{Cluster, chat, messages, tokens_of};
use homing_gateway::GatewayConfig;
use homing_router::event::Role;
use serde_json::{Value, json};

const PD: [Role; 2] = [Role::Prefill, Role::Decode];

fn params(seen: &Seen) -> &Value {
    &seen.body["kv_transfer_params"]
}

/// P has answered and cannot be reached when D wants the KV: D answers 500, and the client never hears of it.
#[tokio::test]
async fn a_prefill_worker_that_is_gone_at_the_pull_is_no_error_of_the_clients() {
    // A link that failed is used again at once: there is no other here.
    let again =
        |config: &mut GatewayConfig| config.router.policy = "homing:local_tokens=8:failure_s=0".parse().unwrap();
    for misses in 1..=2 {
        let cluster = Cluster::start_with(&PD, again).await;
        for _ in 0..misses {
            cluster.engines[0].on_prefill(Act::Unreachable);
        }
        let messages = messages(200);
        let answer = cluster
            .client
            .post("/v1/chat/completions", &chat(&messages, 4, false))
            .await;
        assert_eq!(answer.status, 200, "{misses} misses: {}", answer.text);
        let expected = answer_to(&tokens_of(&messages), 4);
        assert_eq!(
            answer.json()["choices"][0]["message"]["content"],
            expected,
            "{misses} misses"
        );
        let decodes = cluster.engines[1].decodes();
        let pulls: Vec<&Value> = decodes.iter().map(params).filter(|params| !params.is_null()).collect();
        // Two transfers may fail; then the turn is served without one.
        assert_eq!(pulls.len(), 2, "{misses} misses");
        assert_ne!(
            pulls[0]["remote_request_id"], pulls[1]["remote_request_id"],
            "used once"
        );
        assert_eq!(
            params(decodes.last().unwrap()).is_null(),
            misses == 2,
            "{misses} misses"
        );
        cluster.until_idle().await;
    }
}

/// Long tails are heavy, and any history is worth fetching. With told speeds: what is learnt of a fake engine's first turns is noise.
fn fetching(config: &mut GatewayConfig) {
    let policy = "homing:local_tokens=8:append_tokens=1000:fetch_s=0:speed=h200";
    config.router.policy = policy.parse().unwrap();
}

/// Three turns of one session: seeded, appended by more than a transfer costs to compute, and with a heavy tail.
async fn turns(cluster: &Cluster) -> (Value, Vec<Value>) {
    let mut messages = messages(60);
    let mut answers = Vec::new();
    for (turn, next) in ["b ".repeat(450), "tail ".repeat(600), String::new()]
        .iter()
        .enumerate()
    {
        let body = chat(&messages, 4, false);
        let (mut body, session) = (body, json!("one"));
        body["prompt_cache_key"] = session;
        let answer = cluster.client.post("/v1/chat/completions", &body).await;
        assert_eq!(answer.status, 200, "turn {turn}: {}", answer.text);
        let said = answer.json()["choices"][0]["message"]["content"].clone();
        assert_eq!(said, answer_to(&tokens_of(&messages), 4), "turn {turn}");
        answers.push(said);
        if !next.is_empty() {
            let list = messages.as_array_mut().unwrap();
            list.push(json!({"role": "assistant", "content": "ok"}));
            list.push(json!({"role": "user", "content": next}));
        }
    }
    (messages, answers)
}

#[tokio::test]
async fn a_heavy_tails_history_is_lent_fetched_and_only_what_is_new_pulled_back() {
    let cluster = Cluster::start_with(&PD, fetching).await;
    let (messages, _) = turns(&cluster).await;
    let [p, d] = [0, 1].map(|engine| cluster.engines[engine].seen());
    let lend = d
        .iter()
        .find(|seen| seen.is_prefill())
        .expect("its home lends the history");
    let fetch = p
        .iter()
        .find(|seen| !seen.is_prefill())
        .expect("the prefill worker fetches it");
    // The very same prompt, the first whole blocks of the turn's own, and the parameters word for word.
    let tokens = tokens_of(&messages);
    let history = lend.body["prompt"].as_array().unwrap().len();
    assert!(
        history.is_multiple_of(16) && history > 300 && history < tokens.len() - 500,
        "{history}"
    );
    assert_eq!(lend.body["prompt"], json!(tokens[..history]));
    assert_eq!(lend.body["prompt"], fetch.body["prompt"]);
    assert_eq!(
        (&fetch.body["max_tokens"], &fetch.body["stream"]),
        (&json!(1), &json!(false))
    );
    assert!(fetch.text.contains(r#""odd":1.5"#) && params(fetch)["do_remote_prefill"] == true);
    assert_eq!(params(fetch)["remote_port"], cluster.engines[1].address.port());
    // Then the tail as in any seed.
    let (prefill, decode) = (p.last().unwrap(), d.last().unwrap());
    assert!(prefill.is_prefill() && prefill.body["messages"] == messages);
    assert_eq!(params(decode)["remote_port"], cluster.engines[0].address.port());
    let names: std::collections::BTreeSet<_> = p
        .iter()
        .chain(&d)
        .map(|seen| seen.headers["x-request-id"].clone())
        .map(|name| name.to_str().unwrap().to_owned())
        .collect();
    assert_eq!(names.len(), p.len() + d.len(), "each leg has a name of its own");
    cluster.until_idle().await;
}

#[tokio::test]
async fn a_history_that_does_not_come_is_computed() {
    for (engine, act) in [
        (1, Act::Refuse(500)),
        (1, Act::Refuse(400)),
        (1, Act::NoParams),
        (1, Act::Unreachable),
    ] {
        let cluster = Cluster::start_with(&PD, fetching).await;
        cluster.engines[engine].on_prefill(act.clone());
        turns(&cluster).await;
        let asked = cluster.engines[1].seen().iter().any(|seen| seen.is_prefill());
        assert!(asked, "{act:?}: its home was asked for the history");
        let p = cluster.engines[0].seen();
        let prefill = p.last().unwrap();
        assert!(
            prefill.is_prefill(),
            "{act:?}: the prompt is prefilled without its history"
        );
        cluster.until_idle().await;
    }
}
