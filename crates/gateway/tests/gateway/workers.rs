//! The gateway before real embedded workers: KV events, transfers, deaths and new lives.

use crate::support::engine::{Act, Fake, PATIENCE};
use crate::support::front::{Fate, Front};
use crate::support::{Caller, Events, text_of};
use homing_gateway::{EngineKind, Gateway, GatewayConfig, WorkerSpec};
use homing_model::ModelSpec;
use homing_router::event::Role;
use homing_worker::{Compute, Listen, StartError, Worker, WorkerConfig};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;

pub struct Real {
    pub gateway: Gateway,
    pub workers: Vec<Worker>,
    pub client: Caller,
}

pub fn worker_config(name: &str, role: homing_worker::Role) -> WorkerConfig {
    WorkerConfig {
        name: name.to_owned(),
        role,
        compute: Compute::Model(ModelSpec::Tiny),
        kv_tokens: Some(8_192),
        ..WorkerConfig::default()
    }
}

pub async fn start(roles: &[(&str, homing_worker::Role)]) -> Real {
    let mut workers = Vec::new();
    for (name, role) in roles {
        workers.push(Worker::start(worker_config(name, *role)).await.unwrap());
    }
    let spec = |(worker, (name, _)): (&Worker, &(&str, homing_worker::Role))| WorkerSpec {
        name: Some((*name).to_owned()),
        ..WorkerSpec::new(format!("http://{}", worker.endpoints().http), EngineKind::Homing)
    };
    let gateway = before(workers.iter().zip(roles).map(spec).collect()).await;
    let client = Caller::new(gateway.local_addr());
    let count = roles.len();
    client
        .until("/admin/workers", "all joined, all exact", |page| exact(page) == count)
        .await;
    Real {
        gateway,
        workers,
        client,
    }
}

/// A gateway before these workers, with all but the shortest prompts for the prefill worker.
async fn before(workers: Vec<WorkerSpec>) -> Gateway {
    let mut config = GatewayConfig {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        workers,
        tokenizer: Some("tiny".to_owned()),
        clocks: crate::support::quick(),
        ..GatewayConfig::default()
    };
    config.router.policy = "homing:local_tokens=8".parse().unwrap();
    Gateway::start(config).await.unwrap()
}

pub fn exact(page: &Value) -> usize {
    page["data"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|worker| worker["state"] == "exact")
        .count()
}

/// An embedded prefill worker before a decode worker that does what it is told to, and pulls nothing.
async fn before_a_fake(worker: &Worker, fake: &Fake) -> (Gateway, Caller) {
    let url = format!("http://{}", worker.endpoints().http);
    reached_at(url, worker, fake).await
}

/// The same, with the worker reached there.
async fn reached_at(prefill: String, worker: &Worker, fake: &Fake) -> (Gateway, Caller) {
    fake.serve(&worker.info().model);
    let spec = |url: String, kind, role| WorkerSpec {
        role: Some(role),
        transfers: Some(true),
        ..WorkerSpec::new(url, kind)
    };
    let gateway = before(vec![
        spec(prefill, EngineKind::Homing, Role::Prefill),
        spec(fake.url(), EngineKind::Vllm, Role::Decode),
    ])
    .await;
    let client = Caller::new(gateway.local_addr());
    let joined = |page: &Value| page["data"][0]["state"] == "exact" && page["data"][1]["state"] == "degraded";
    client.until("/admin/workers", "both joined", joined).await;
    (gateway, client)
}

/// Waits until the worker is in a state. Its lease of 30 s does not end before patience does.
pub async fn until_worker(worker: &Worker, what: &str, holds: impl Fn(&homing_worker::Status) -> bool) {
    let looking = async {
        while !holds(&worker.status()) {
            tokio::task::yield_now().await;
        }
    };
    let waited = tokio::time::timeout(PATIENCE, looking).await;
    waited.unwrap_or_else(|_| panic!("waited in vain for: {what}; {:?}", worker.status()));
}

/// A pool that strangers have filled is unknown to the ledger: the worker says so, and new turns wait in the router.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_others_have_filled_says_so_and_is_left_in_peace() {
    let config = WorkerConfig {
        kv_tokens: Some(1_024),
        ..worker_config("w0", homing_worker::Role::Both)
    };
    let worker = Worker::start(config).await.unwrap();
    let front = Front::start(worker.endpoints().http, "/homing/probe", []).await;
    let gateway = before(vec![WorkerSpec::new(front.url(), EngineKind::Homing)]).await;
    let client = Caller::new(gateway.local_addr());
    client
        .until("/admin/workers", "it joined", |page| exact(page) == 1)
        .await;
    // A stranger's export: 700 of 1,024 tokens for as long as nobody pulls it.
    let direct = Caller::new(worker.endpoints().http);
    let held = json!({"prompt": "x".repeat(700), "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true}});
    let named = [("x-request-id", "stranger")];
    let answer = direct
        .send(http::Method::POST, "/v1/completions", &named, held.to_string())
        .await;
    assert_eq!(answer.status(), 200);
    assert_eq!(worker.status().load.exporting, 1);
    let ask = |word: &str, times: usize| {
        let ask = body(&json!([{"role": "user", "content": word.repeat(times)}]), 4, false);
        let client = client.clone();
        tokio::spawn(async move { client.post("/v1/chat/completions", &ask).await.status })
    };
    // It has nothing of the router's, so that the first turn is tried, and waits there.
    let first = ask("long ", 80);
    until_worker(&worker, "the first turn waits", |status| status.load.waiting == 1).await;
    let asked = front.seen() + 2;
    while front.seen() < asked {
        tokio::task::yield_now().await;
    }
    let second = ask("brief ", 5);
    let queued = |page: &Value| page["queued_requests"] == 1;
    client
        .until("/admin/workers", "the second waits in the router", queued)
        .await;
    assert_eq!(worker.status().load.waiting, 1, "it was not sent");
    let over = json!({"request_id": "stranger", "boot_epoch": worker.info().epoch});
    assert_eq!(direct.post("/homing/release", &over).await.status, 200);
    for turn in [first, second] {
        assert_eq!(turn.await.unwrap(), 200);
    }
    gateway.shutdown().await;
    worker.shutdown().await;
}

/// A release that is lost, and lost again, must not leave the worker to its lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_is_said_until_the_worker_has_heard_it() {
    let worker = Worker::start(worker_config("p0", homing_worker::Role::Prefill))
        .await
        .unwrap();
    let fates = [Fate::Stalls, Fate::Refused(503), Fate::Refused(500)];
    let front = Front::start(worker.endpoints().http, "/homing/release", fates).await;
    let fake = Fake::start().await;
    let (gateway, client) = reached_at(front.url(), &worker, &fake).await;
    fake.on_decode(Act::Hang);
    let ask = body(&json!([{"role": "user", "content": "a story. ".repeat(12)}]), 4, true);
    let waiting = tokio::spawn(async move { client.post("/v1/chat/completions", &ask).await.status });
    fake.until("the decode leg is there", |fake| fake.open() == 1).await;
    assert_eq!(worker.status().load.exporting, 1, "it is held for the decode worker");
    waiting.abort();
    let ended = |status: &homing_worker::Status| status.load.exporting == 0;
    until_worker(&worker, "the export is not held any more", ended).await;
    let counters = worker.status().counters;
    assert_eq!(
        (counters.exports_released, counters.exports_expired),
        (1, 0),
        "{counters:?}"
    );
    assert_eq!(
        front.seen(),
        fates.len() + 1,
        "once more than it was lost, and then no more"
    );
    gateway.shutdown().await;
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kv_that_nobody_will_pull_is_let_go_of_at_once() {
    let worker = Worker::start(worker_config("p0", homing_worker::Role::Prefill))
        .await
        .unwrap();
    let fake = Fake::start().await;
    let (gateway, client) = before_a_fake(&worker, &fake).await;
    let ask = |number: usize| {
        body(
            &json!([{"role": "user", "content": format!("{number} stories. ").repeat(12)}]),
            4,
            true,
        )
    };
    // Clients that hang up between the end of the prefill and the pull.
    for number in 1..=3 {
        fake.on_decode(Act::Hang);
        let (client, body) = (client.clone(), ask(number));
        let waiting = tokio::spawn(async move { client.post("/v1/chat/completions", &body).await.status });
        fake.until("the decode leg is there", |fake| fake.open() == 1).await;
        assert_eq!(worker.status().load.exporting, 1, "it is held for the decode worker");
        waiting.abort();
        let released = |status: &homing_worker::Status| {
            status.load.exporting == 0 && status.counters.exports_released == number as u64
        };
        until_worker(&worker, "the export is given up", released).await;
        fake.until("the decode leg is gone", |fake| fake.open() == 0).await;
    }
    // A pull that fails: the turn is planned anew, and what was held for the first plan is let go of.
    fake.on_decode(Act::Refuse(500));
    let answer = client.post("/v1/chat/completions", &ask(4)).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let replanned = |status: &homing_worker::Status| status.counters.exports_released == 4;
    until_worker(&worker, "the failed plan's export is given up", replanned).await;
    assert_eq!(worker.status().counters.exports_expired, 0);
    gateway.shutdown().await;
    worker.shutdown().await;
}

pub const PDD: [(&str, homing_worker::Role); 3] = [
    ("p0", homing_worker::Role::Prefill),
    ("d0", homing_worker::Role::Decode),
    ("d1", homing_worker::Role::Decode),
];

/// A decode worker at the addresses of one that has died. Meanwhile a connection of another test may go out from one of them: for a moment.
async fn back_at(name: &str, endpoints: homing_worker::Endpoints) -> Worker {
    let mut config = worker_config(name, homing_worker::Role::Decode);
    config.listen = Listen {
        http: endpoints.http,
        kv_events: endpoints.kv_events,
        kv_replay: endpoints.kv_replay,
        kv_transfer: endpoints.kv_transfer,
    };
    for _ in 0..200 {
        match Worker::start(config.clone()).await {
            Err(StartError::Listen { .. }) => tokio::time::sleep(Duration::from_millis(50)).await,
            started => return started.unwrap(),
        }
    }
    panic!("its addresses are taken: {endpoints:?}")
}

/// What one worker that holds nothing answers.
async fn answer_alone(body: &Value) -> String {
    let alone = Worker::start(worker_config("alone", homing_worker::Role::Both))
        .await
        .unwrap();
    let answer = Caller::new(alone.endpoints().http)
        .post("/v1/chat/completions", body)
        .await
        .json();
    answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

pub fn body(messages: &Value, max_tokens: u32, stream: bool) -> Value {
    json!({"messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": stream, "ignore_eos": true})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_finds_home_and_answers_as_one_cold_worker_would() {
    let real = start(&PDD).await;
    let mut messages = json!([{"role": "user", "content": "Once upon a time there was a router. ".repeat(12)}]);
    let mut home = None;
    for turn in 0..3 {
        let answer = real
            .client
            .post("/v1/chat/completions", &body(&messages, 12, false))
            .await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        let text = answer.json()["choices"][0]["message"]["content"].clone();
        assert_eq!(text, answer_alone(&body(&messages, 12, false)).await, "turn {turn}");
        let path = answer.header("x-homing-path").unwrap().to_owned();
        assert_eq!(path, if turn == 0 { "seed" } else { "append" }, "turn {turn}");
        let worker = answer.header("x-homing-worker").unwrap().to_owned();
        assert_eq!(home.get_or_insert(worker.clone()), &worker, "turn {turn}");
        if turn > 0 {
            let cached: u32 = answer.header("x-homing-cached-tokens").unwrap().parse().unwrap();
            let reported = &answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"];
            assert!(
                cached > 300 && reported.as_u64().unwrap() >= 300,
                "turn {turn}: {cached} {reported}"
            );
        }
        let grown = |page: &Value| {
            let home = page["data"]
                .as_array()
                .unwrap()
                .iter()
                .find(|entry| entry["name"] == worker.as_str())
                .unwrap();
            home["indexed_gpu_blocks"].as_u64().unwrap() > 20
        };
        real.client
            .until("/admin/workers", "the home's events are in", grown)
            .await;
        let list = messages.as_array_mut().unwrap();
        list.push(json!({"role": "assistant", "content": text}));
        list.push(json!({"role": "user", "content": format!("And then, {turn}?")}));
    }
    real.gateway.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_dies_in_a_stream_is_replaced_and_used_again_when_it_is_back() {
    let mut real = start(&PDD).await;
    let messages = json!([{"role": "user", "content": "A long story, please. ".repeat(10)}]);
    let request = body(&messages, 400, true).to_string();
    let response = real
        .client
        .send(http::Method::POST, "/v1/chat/completions", &[], request)
        .await;
    let mut events = Events::new(response);
    let home = events.header("x-homing-worker").unwrap().to_owned();
    let mut seen: Vec<Value> = Vec::new();
    while text_of(&seen).len() < 5 {
        seen.push(serde_json::from_str(&events.next().await.unwrap()).unwrap());
    }
    let index = PDD.iter().position(|(name, _)| *name == home).unwrap();
    let dead = real.workers.remove(index);
    let (endpoints, old_epoch) = (dead.endpoints(), dead.info().epoch);
    dead.shutdown().await;
    let (rest, done) = events.rest().await;
    assert!(done, "{:?}", rest.last());
    seen.extend(rest);
    assert_eq!(text_of(&seen), answer_alone(&body(&messages, 400, false)).await);
    let entry = |page: &Value| {
        page["data"]
            .as_array()
            .unwrap()
            .iter()
            .find(|entry| entry["name"] == home.as_str())
            .cloned()
    };
    real.client
        .until("/admin/workers", "it is dead", |page| {
            entry(page).unwrap()["state"] == "dead"
        })
        .await;
    let back = back_at(&home, endpoints).await;
    assert_ne!(back.info().epoch, old_epoch);
    let is_back = |page: &Value| {
        let entry = entry(page).unwrap();
        entry["state"] == "exact" && entry["epoch"] == json!(back.info().epoch)
    };
    real.client.until("/admin/workers", "it is back", is_back).await;
    let page = real.client.get("/admin/workers").await.json();
    assert_eq!(
        entry(&page).unwrap()["indexed_gpu_blocks"],
        0,
        "nothing is assumed about its cache"
    );
    // It is used again: where the other one has gone, it serves what that one did.
    let other = PDD
        .iter()
        .position(|(name, _)| name.starts_with('d') && *name != home)
        .unwrap();
    let name = PDD[other].0;
    real.workers.remove(other - usize::from(index < other)).shutdown().await;
    let is_gone = |page: &Value| {
        let data = page["data"].as_array().unwrap();
        data.iter()
            .any(|entry| entry["name"] == name && entry["state"] == "dead")
    };
    real.client.until("/admin/workers", "the other is dead", is_gone).await;
    let answer = real
        .client
        .post("/v1/chat/completions", &body(&messages, 12, false))
        .await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(answer.header("x-homing-worker"), Some(home.as_str()));
    let text = answer.json()["choices"][0]["message"]["content"].clone();
    assert_eq!(text, answer_alone(&body(&messages, 12, false)).await);
    real.gateway.shutdown().await;
}

/// What a session has superseded goes before what was used longer ago: only a worker that is told whose a request is can know.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_is_told_whose_a_request_is() {
    let check = async |expects_returns: bool, kept: bool| {
        let config = WorkerConfig {
            kv_tokens: Some(1_024),
            expects_returns,
            ..worker_config("w0", homing_worker::Role::Both)
        };
        let worker = Worker::start(config).await.unwrap();
        let url = format!("http://{}", worker.endpoints().http);
        let gateway = before(vec![WorkerSpec::new(url, EngineKind::Homing)]).await;
        let client = Caller::new(gateway.local_addr());
        client
            .until("/admin/workers", "it joined", |page| exact(page) == 1)
            .await;
        let direct = Caller::new(worker.endpoints().http);
        let stranger = async |words: &str| {
            let asked = json!({"prompt": words, "max_tokens": 1});
            let answer = direct.post("/v1/completions", &asked).await.json();
            answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()
        };
        let old = "a stranger's text, and an old one; ".repeat(8);
        stranger(&old).await;
        // A session that rewrites its history.
        let beginning = "what stays as it is in both prompts. ".repeat(3);
        for rest in [
            "what is left out the next time; ",
            "what comes in its place, and differs: ",
        ] {
            let asked = json!({"prompt": format!("{beginning}{}", rest.repeat(8)), "max_tokens": 1}).to_string();
            let named = [("x-homing-session", "s")];
            let answer = client.send(http::Method::POST, "/v1/completions", &named, asked).await;
            assert_eq!(answer.status(), 200);
        }
        let free = worker.status().load.blocks_free * 16;
        // A little more than what is free.
        stranger(&"#".repeat(free as usize + 100)).await;
        let found = stranger(&old).await.unwrap_or(0);
        assert_eq!(
            found + 16 >= old.len() as u64,
            kept,
            "{found} of {} tokens, {free} were free",
            old.len()
        );
        gateway.shutdown().await;
        worker.shutdown().await;
    };
    check(true, true).await;
    check(false, false).await;
}
