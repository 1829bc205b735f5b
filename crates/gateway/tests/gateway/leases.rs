//! Leases of KV that is held for a leg which is late for a reason: renewed while the handoff is wanted, and no longer.

use crate::support::engine::{Act, Fake};
use crate::support::front::Front;
use crate::support::{Caller, quick};
use crate::workers::{body, exact, until_worker, worker_config};
use homing_gateway::{EngineKind, Gateway, GatewayConfig, WorkerSpec};
use homing_router::event::Role;
use homing_units::Duration;
use homing_worker::{Limits, Status, Worker, WorkerConfig};
use serde_json::{Value, json};

/// Long enough for a busy machine to renew it in time, and short enough to wait for two of them.
const LEASE: Duration = Duration::from_millis(1_500);

async fn prefill_worker(export_renewals: u32) -> Worker {
    let limits = Limits {
        export_lease: LEASE,
        export_renewals,
        ..Limits::default()
    };
    let config = worker_config("p0", homing_worker::Role::Prefill);
    Worker::start(WorkerConfig { limits, ..config }).await.unwrap()
}

/// A gateway before a prefill and a decode worker, which waits for a first token for as long as it takes.
async fn before(prefill: String, decode: WorkerSpec) -> Gateway {
    let mut config = GatewayConfig {
        listen: std::net::SocketAddr::from(([127, 0, 0, 1], 0)),
        workers: vec![WorkerSpec::new(prefill, EngineKind::Homing), decode],
        tokenizer: Some("tiny".to_owned()),
        clocks: quick(),
        ..GatewayConfig::default()
    };
    config.router.policy = "homing:local_tokens=8".parse().unwrap();
    config.router.clocks.first_token_base = Duration::from_secs(3_600);
    Gateway::start(config).await.unwrap()
}

fn url(worker: &Worker) -> String {
    format!("http://{}", worker.endpoints().http)
}

fn ask(client: &Caller) -> tokio::task::JoinHandle<(u16, Value)> {
    let ask = body(&json!([{"role": "user", "content": "a story. ".repeat(12)}]), 4, false);
    let client = client.clone();
    tokio::spawn(async move {
        let answer = client.post("/v1/chat/completions", &ask).await;
        (answer.status.as_u16(), answer.json())
    })
}

/// A decode worker whose one place is taken by a stranger for longer than two leases.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leg_that_waits_for_longer_than_a_lease_pulls_what_was_promised() {
    let prefill = prefill_worker(64).await;
    let config = worker_config("d0", homing_worker::Role::Decode);
    let limits = Limits {
        max_running: 1,
        ..Limits::default()
    };
    let decode = Worker::start(WorkerConfig { limits, ..config }).await.unwrap();
    let gateway = before(url(&prefill), WorkerSpec::new(url(&decode), EngineKind::Homing)).await;
    let client = Caller::new(gateway.local_addr());
    client
        .until("/admin/workers", "both joined", |page| exact(page) == 2)
        .await;
    let stranger = tokio::spawn({
        let direct = Caller::new(decode.endpoints().http);
        let long = json!({"prompt": "x".repeat(50), "max_tokens": 8_000, "ignore_eos": true});
        async move { direct.post("/v1/completions", &long).await.status }
    });
    until_worker(&decode, "the stranger runs", |status| status.load.running == 1).await;
    let turn = ask(&client);
    let outlasted = |status: &Status| status.counters.exports_renewed >= 6;
    until_worker(&prefill, "two leases are over", outlasted).await;
    assert_eq!(decode.status().load.running, 1, "the stranger still runs");
    assert_eq!(prefill.status().load.exporting, 1);
    stranger.abort();
    let (status, answer) = turn.await.unwrap();
    assert_eq!(status, 200, "{answer}");
    let (of_prefill, of_decode) = (prefill.status().counters, decode.status().counters);
    assert_eq!(
        (of_prefill.exports_acked, of_prefill.exports_expired),
        (1, 0),
        "{of_prefill:?}"
    );
    assert_eq!(of_decode.transfer_failures, 0, "{of_decode:?}");
    assert!(of_decode.external_query_tokens > 80, "{of_decode:?}");
    for worker in [prefill, decode] {
        worker.shutdown().await;
    }
    gateway.shutdown().await;
}

/// What nobody waits for any more is renewed no more: here by a client's hanging up whose release is lost, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_ends_by_itself_once_the_handoff_is_given_up() {
    let prefill = prefill_worker(64).await;
    let lost = std::iter::repeat_n(crate::support::front::Fate::Stalls, 64);
    let front = Front::start(prefill.endpoints().http, "/homing/release", lost).await;
    let (fake, gateway, client) = with_a_fake(&prefill, front.url()).await;
    fake.on_decode(Act::Hang);
    let turn = ask(&client);
    until_worker(&prefill, "it is renewed", |status| status.counters.exports_renewed >= 1).await;
    turn.abort();
    let expired = |status: &Status| status.counters.exports_expired == 1 && status.load.exporting == 0;
    until_worker(&prefill, "its lease has ended", expired).await;
    gateway.shutdown().await;
    prefill.shutdown().await;
}

/// A worker that lets go all the same says so to the next renewal: the turn is planned anew, and no clock has to run out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kv_that_is_gone_is_noticed_before_the_pull() {
    let prefill = prefill_worker(0).await;
    let (fake, gateway, client) = with_a_fake(&prefill, url(&prefill)).await;
    fake.on_decode(Act::Hang);
    let (status, answer) = ask(&client).await.unwrap();
    assert_eq!(status, 200, "{answer}");
    assert_eq!(fake.decodes().len(), 2, "the leg that waited, and another");
    assert_eq!(prefill.status().counters.exports_expired, 1);
    gateway.shutdown().await;
    prefill.shutdown().await;
}

async fn with_a_fake(prefill: &Worker, reached_at: String) -> (Fake, Gateway, Caller) {
    let fake = Fake::start().await;
    fake.serve(&prefill.info().model);
    let decode = WorkerSpec {
        role: Some(Role::Decode),
        transfers: Some(true),
        ..WorkerSpec::new(fake.url(), EngineKind::Vllm)
    };
    let gateway = before(reached_at, decode).await;
    let client = Caller::new(gateway.local_addr());
    let joined = |page: &Value| page["data"][0]["state"] == "exact" && page["data"][1]["state"] == "degraded";
    client.until("/admin/workers", "both joined", joined).await;
    (fake, gateway, client)
}
