//! KV between workers: equal answers whatever the path, and no answer at all from KV that is in doubt.

use crate::client::{Answer, Client, PATIENCE, greedy, prompt, start, steps, tiny, token_ids};
use homing_kv::BlockHash;
use homing_units::{BootEpoch, Duration};
use homing_wire::kv_frames::{Message, PullRequest};
use homing_wire::metrics_text::names;
use homing_worker::{Limits, Listen, Worker, WorkerConfig};
use serde_json::{Value, json};
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// A prefill worker and two decode workers, with clients.
pub struct Trio {
    pub workers: [Worker; 3],
    pub p: Client,
    pub d1: Client,
    pub d2: Client,
}

impl Trio {
    pub async fn new(config: fn(&str) -> WorkerConfig) -> Self {
        let workers = [
            start(config("p")).await,
            start(config("d1")).await,
            start(config("d2")).await,
        ];
        let [p, d1, d2] = [&workers[0], &workers[1], &workers[2]].map(Client::of);
        Self { workers, p, d1, d2 }
    }

    /// Everything is free again everywhere, then everything stops.
    pub async fn end(self) {
        for client in [&self.p, &self.d1, &self.d2] {
            client.until_idle().await;
        }
        for worker in self.workers {
            worker.shutdown().await;
        }
    }
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .expect("always there")
}

async fn every_path(config: fn(&str) -> WorkerConfig) {
    let trio = Trio::new(config).await;
    let Trio { p, d1, d2, .. } = &trio;
    // Seed: P prefills, D1 pulls.
    let first = prompt(1, 150);
    let exported = p.export(&first).await;
    let decoded = d1.greedy(&first, 10, exported["kv_transfer_params"].clone()).await;
    let single = d2.greedy(&first, 10, Value::Null).await;
    assert_eq!(token_ids(&decoded), token_ids(&single));
    assert_eq!(token_ids(&exported), token_ids(&single)[..1]);
    assert_eq!(decoded["kv_transfer_params"], Value::Null);
    let metrics = d1.metrics().await;
    assert_eq!(
        metrics.sum(names::EXTERNAL_PREFIX_CACHE_HITS),
        Some(149.0),
        "the last token is computed where it is used"
    );
    assert_eq!(metrics.sum(names::EXTERNAL_PREFIX_CACHE_QUERIES), Some(150.0));
    // The next turn: D1 holds the beginning and pulls the rest.
    let second = [first.clone(), token_ids(&decoded), prompt(2, 60)].concat();
    let exported = p.export(&second).await;
    assert_eq!(cached(&exported), 144);
    let decoded = d1.greedy(&second, 10, exported["kv_transfer_params"].clone()).await;
    assert_eq!(cached(&decoded), 144);
    assert_eq!(
        token_ids(&decoded),
        token_ids(&d2.greedy(&second, 10, Value::Null).await)
    );
    // Append: nothing is transferred.
    let third = [second, token_ids(&decoded), prompt(3, 20)].concat();
    let appended = d1.greedy(&third, 10, Value::Null).await;
    assert!(cached(&appended) > 210, "{appended}");
    assert_eq!(
        token_ids(&appended),
        token_ids(&d2.greedy(&third, 10, Value::Null).await)
    );
    // Migrate: P has the third turn from D1, for once.
    let exported = d1.export(&third).await;
    let migrated = p.greedy(&third, 10, exported["kv_transfer_params"].clone()).await;
    assert_eq!(token_ids(&migrated), token_ids(&appended));
    // Everything is here already: nothing is pulled, and the source is told.
    let exported = d1.export(&third[..160]).await;
    let known = p.greedy(&third[..160], 1, exported["kv_transfer_params"].clone()).await;
    assert_eq!(token_ids(&known), token_ids(&exported));
    trio.end().await;
}

#[tokio::test]
async fn every_path_gives_the_same_tokens() {
    every_path(|name| tiny(name, 128)).await;
}

#[tokio::test]
async fn every_path_gives_the_same_tokens_with_a_step_model() {
    every_path(steps).await;
}

#[tokio::test]
async fn a_conversation_is_handed_over() {
    let trio = Trio::new(|name| tiny(name, 128)).await;
    let messages = json!([{"role": "user", "content": "A first question that is longer than two blocks of tokens."}]);
    let body = |tokens: u32, params: Value| json!({"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": true, "kv_transfer_params": params});
    let ask = |client: &Client, body: Value| {
        let client = client.clone();
        async move { client.post("/v1/chat/completions", &body).await }
    };
    let exported = ask(&trio.p, body(1, json!({"do_remote_decode": true}))).await.json();
    let decoded = ask(&trio.d1, body(12, exported["kv_transfer_params"].clone()))
        .await
        .json();
    let single = ask(&trio.d2, body(12, Value::Null)).await.json();
    assert_eq!(decoded["choices"][0]["message"], single["choices"][0]["message"]);
    let mut streaming = body(1, json!({"do_remote_decode": true}));
    streaming["stream"] = json!(true);
    assert_eq!(ask(&trio.p, streaming).await.error()["param"], "stream");
    trio.end().await;
}

pub fn transfer_failed(answer: &Answer, why: &str) {
    let error = answer.error();
    assert_eq!(
        (answer.status.as_u16(), error["code"].as_str()),
        (500, Some("kv_transfer_failed")),
        "{error}"
    );
    assert!(
        error["message"].as_str().unwrap().contains(why),
        "{error}, expected `{why}`"
    );
}

#[tokio::test]
async fn params_serve_once_and_for_one_prompt() {
    let trio = Trio::new(|name| tiny(name, 128)).await;
    let Trio { p, d1, d2, .. } = &trio;
    let (own, other) = (prompt(1, 100), prompt(2, 100));
    let params = p.export(&own).await["kv_transfer_params"].clone();
    let with = |name: &str, value: Value| {
        let mut params = params.clone();
        params[name] = value;
        params
    };
    let wrong = [
        (other.clone(), params.clone()),
        (own[..99].to_vec(), params.clone()),
        ([own.clone(), vec![1]].concat(), params.clone()),
        (own.clone(), with("remote_num_tokens", json!(99))),
        (own.clone(), with("remote_num_tokens", json!(101))),
        (own.clone(), with("remote_num_tokens", json!(4_000_000_000_u32))),
        (own.clone(), with("remote_block_ids", json!([[1, 2]]))),
        (own.clone(), with("remote_block_ids", Value::Null)),
        (own.clone(), with("remote_prompt_hash", Value::Null)),
        (own.clone(), with("remote_prompt_hash", json!("ff"))),
        (own.clone(), with("remote_boot_epoch", Value::Null)),
        (own.clone(), with("remote_host", Value::Null)),
        (own.clone(), with("remote_port", json!(70_000))),
        (own.clone(), with("transfer_mode", json!("push"))),
    ];
    for (prompt, params) in wrong {
        let answer = d1.complete(&greedy(&prompt, 4, params.clone())).await;
        assert_eq!(answer.status, 400, "{params}");
        answer.error();
    }
    // Forged, so that D cannot tell: P does.
    let forged = [
        with("remote_request_id", json!("cmpl-x-77-1")),
        with("remote_boot_epoch", json!(1)),
    ];
    for params in forged {
        transfer_failed(&d1.complete(&greedy(&own, 4, params)).await, "unknown");
    }
    d1.greedy(&own, 4, params.clone()).await;
    p.until_idle().await;
    // D1 has it all; D2 must pull, and P has released it.
    transfer_failed(&d2.complete(&greedy(&own, 4, params)).await, "unknown");
    assert_eq!(d2.metrics().await.sum(names::NIXL_FAILED_TRANSFERS), Some(1.0));
    trio.end().await;
}

#[tokio::test]
async fn a_source_that_was_restarted_is_another() {
    let p = start(tiny("p", 128)).await;
    let d = start(tiny("d", 128)).await;
    let (own, kv_transfer) = (prompt(1, 100), p.endpoints().kv_transfer);
    let params = Client::of(&p).export(&own).await["kv_transfer_params"].clone();
    p.shutdown().await;
    let client = Client::of(&d);
    transfer_failed(&client.complete(&greedy(&own, 4, params.clone())).await, "unreachable");
    let listen = Listen {
        kv_transfer,
        ..Listen::default()
    };
    let p = start(WorkerConfig {
        listen,
        boot_epoch: Some(BootEpoch(7)),
        ..tiny("p", 128)
    })
    .await;
    // The new life has an export under the same number.
    let again = Client::of(&p).export(&own).await["kv_transfer_params"].clone();
    transfer_failed(&client.complete(&greedy(&own, 4, params)).await, "unknown");
    client.greedy(&own, 4, again).await;
    for worker in [p, d] {
        Client::of(&worker).until_idle().await;
        worker.shutdown().await;
    }
}

#[tokio::test]
async fn an_export_that_nobody_pulls_is_released() {
    let config = tiny("p", 128);
    let limits = Limits {
        export_lease: Duration::from_millis(50),
        ..config.limits.clone()
    };
    let p = start(WorkerConfig { limits, ..config }).await;
    let d = start(tiny("d", 128)).await;
    let own = prompt(1, 100);
    let client = Client::of(&p);
    let params = client.export(&own).await["kv_transfer_params"].clone();
    client.until_idle().await;
    assert_eq!(client.metrics().await.sum(names::NIXL_KV_EXPIRED_REQUESTS), Some(1.0));
    transfer_failed(&Client::of(&d).complete(&greedy(&own, 4, params)).await, "unknown");
    p.shutdown().await;
    d.shutdown().await;
}

/// What a proxy between puller and source does to what passes.
#[derive(Clone, Copy, Debug)]
enum Harm {
    /// Flips a bit of this byte on the way to the puller.
    FlipDown(usize),
    /// Flips a bit of this byte on the way to the source.
    FlipUp(usize),
    /// Closes both connections after so many bytes to the puller.
    Cut(usize),
    /// Passes so many bytes to the puller and then nothing, with open connections.
    Stall(usize),
}

/// Passes one connection on to `source`, with harm done.
async fn proxy(source: SocketAddr, harm: Harm) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let passing = tokio::spawn(async move {
        let (puller, _) = listener.accept().await.unwrap();
        let source = TcpStream::connect(source).await.unwrap();
        let ((puller_read, puller_write), (source_read, source_write)) = (puller.into_split(), source.into_split());
        let down = pass(source_read, puller_write, move |at, bytes| match harm {
            Harm::FlipDown(flip) => flip_in(at, bytes, flip),
            Harm::Cut(end) if at + bytes.len() > end => Passed::Close,
            Harm::Stall(end) if at + bytes.len() > end => Passed::Stall,
            Harm::FlipUp(_) | Harm::Cut(_) | Harm::Stall(_) => Passed::On,
        });
        let up = pass(puller_read, source_write, move |at, bytes| match harm {
            Harm::FlipUp(flip) => flip_in(at, bytes, flip),
            Harm::FlipDown(_) | Harm::Cut(_) | Harm::Stall(_) => Passed::On,
        });
        tokio::select! { () = down => {}, () = up => {} }
    });
    (address, passing)
}

enum Passed {
    On,
    Close,
    Stall,
}

fn flip_in(at: usize, bytes: &mut [u8], flip: usize) -> Passed {
    if let Some(byte) = flip.checked_sub(at).and_then(|index| bytes.get_mut(index)) {
        *byte ^= 0x10;
    }
    Passed::On
}

async fn pass(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut into: tokio::net::tcp::OwnedWriteHalf,
    mut harm: impl FnMut(usize, &mut [u8]) -> Passed,
) {
    let (mut buffer, mut at) = (vec![0; 4096], 0);
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        match harm(at, &mut buffer[..length]) {
            Passed::On => {}
            Passed::Close => return,
            Passed::Stall => std::future::pending().await,
        }
        at += length;
        if into.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}

fn through(params: &Value, proxy: SocketAddr) -> Value {
    let mut params = params.clone();
    params["remote_host"] = json!(proxy.ip().to_string());
    params["remote_port"] = json!(proxy.port());
    params
}

#[tokio::test]
async fn a_flipped_byte_is_refused_wherever_it_is() {
    let trio = Trio::new(|name| tiny(name, 128)).await;
    let Trio { p, d1, d2, .. } = &trio;
    let own = prompt(1, 50);
    let expected = token_ids(&d2.greedy(&own, 4, Value::Null).await);
    let source = trio.workers[0].endpoints().kv_transfer;
    let params = p.export(&own).await["kv_transfer_params"].clone();
    // Four blocks of 12 KiB in frames: every part of the first frames, then some offsets all over.
    let whole = 28 + 4 * (12 << 10);
    let mut harms: Vec<Harm> = (0..60).map(Harm::FlipDown).collect();
    harms.extend((0..40).map(|step| Harm::FlipDown(60 + step * (whole - 60) / 40)));
    harms.extend((0..80).step_by(3).map(Harm::FlipUp));
    harms.extend([0, 10, 30, 5000, 30_000].map(Harm::Cut));
    for harm in harms {
        let (proxy, passing) = proxy(source, harm).await;
        let answer = d1.complete(&greedy(&own, 4, through(&params, proxy))).await;
        assert_eq!(answer.status, 500, "{harm:?} {answer:?}");
        transfer_failed(&answer, "");
        passing.await.expect("the proxy ends with its connections");
        d1.until_idle().await;
        assert_eq!(
            p.probe().await.load.exporting,
            1,
            "P holds what was not acknowledged: {harm:?}"
        );
    }
    assert_eq!(
        token_ids(&d1.greedy(&own, 4, params).await),
        expected,
        "the same offer, unharmed"
    );
    trio.end().await;
}

#[tokio::test]
async fn a_client_that_hangs_up_during_a_pull_frees_both_sides() {
    let trio = Trio::new(|name| tiny(name, 128)).await;
    let Trio { p, d1, .. } = &trio;
    let own = prompt(1, 100);
    let source = trio.workers[0].endpoints().kv_transfer;
    let params = p.export(&own).await["kv_transfer_params"].clone();
    let (proxy, passing) = proxy(source, Harm::Stall(20_000)).await;
    let asking = tokio::spawn({
        let (client, body) = (Client::of(&trio.workers[1]), greedy(&own, 4, through(&params, proxy)));
        async move { client.complete(&body).await }
    });
    d1.until("a pull", |probe| probe.load.importing == 1).await;
    asking.abort();
    d1.until_idle().await;
    tokio::time::timeout(PATIENCE, passing)
        .await
        .expect("the pull's connection is closed")
        .unwrap();
    // The word that nothing will be pulled goes to the address in the params, and nobody listens there any more; P keeps
    // the export until its lease ends, and a release over the right address ends it now.
    assert_eq!(p.probe().await.load.exporting, 1);
    d1.greedy(&own, 4, params).await;
    trio.end().await;
}

#[tokio::test]
async fn a_request_that_is_given_up_before_its_pull_releases_the_source() {
    let p = start(tiny("p", 128)).await;
    let config = tiny("d", 128);
    let limits = Limits {
        max_running: 1,
        ..config.limits.clone()
    };
    let d = start(WorkerConfig { limits, ..config }).await;
    let (client, own) = (Client::of(&d), prompt(1, 100));
    let params = Client::of(&p).export(&own).await["kv_transfer_params"].clone();
    let ask = |body: Value| {
        let client = Client::of(&d);
        tokio::spawn(async move { client.complete(&body).await })
    };
    let running = ask(greedy(&prompt(2, 50), 1500, Value::Null));
    client.until("a running request", |probe| probe.load.running == 1).await;
    let waiting = ask(greedy(&own, 4, params));
    client.until("a waiting request", |probe| probe.load.waiting == 1).await;
    waiting.abort();
    Client::of(&p).until_idle().await;
    running.abort();
    client.until_idle().await;
    p.shutdown().await;
    d.shutdown().await;
}

#[tokio::test]
async fn who_speaks_something_else_is_not_served() {
    let worker = start(tiny("p", 128)).await;
    let address = worker.endpoints().kv_transfer;
    let own = prompt(1, 50);
    Client::of(&worker).export(&own).await;
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 64], b"HMKV"] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = Vec::new();
        // A reset is as good an end as any.
        let _ = stream.read_to_end(&mut answer).await;
        assert!(answer.is_empty());
    }
    assert_eq!(Client::of(&worker).probe().await.load.exporting, 1);
    worker.shutdown().await;
}

/// Pulls that a holder serves at once.
const PULLS_MAX: usize = 64;

#[tokio::test]
async fn a_holder_serves_so_many_pulls_and_no_more() {
    let trio = Trio::new(|name| tiny(name, 128)).await;
    let own = prompt(1, 50);
    let params = trio.p.export(&own).await["kv_transfer_params"].clone();
    let text = |name: &str| params[name].as_str().expect("a string").to_owned();
    let request = Message::Request(PullRequest {
        epoch: BootEpoch(params["remote_boot_epoch"].as_u64().expect("a number")),
        request: text("remote_request_id"),
        prompt: BlockHash(u128::from_str_radix(&text("remote_prompt_hash"), 16).expect("hexadecimal")),
        first_block: 0,
        count: 0,
        block_bytes: 0,
    });
    let address = trio.workers[0].endpoints().kv_transfer;
    // Pullers that are accepted, and neither acknowledge nor leave.
    let mut pullers = Vec::new();
    for _ in 0..PULLS_MAX {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(&request.encode()).await.unwrap();
        let mut accepted = vec![0; Message::Accepted.encode().len()];
        stream.read_exact(&mut accepted).await.unwrap();
        assert_eq!(accepted, Message::Accepted.encode());
        pullers.push(stream);
    }
    let body = greedy(&own, 4, params.clone());
    transfer_failed(&trio.d1.complete(&body).await, "unreachable");
    drop(pullers);
    let served = async { while trio.d1.complete(&body).await.status != 200 {} };
    tokio::time::timeout(PATIENCE, served)
        .await
        .expect("places are free again");
    trio.end().await;
}
