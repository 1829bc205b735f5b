//! KV between workers: equal answers whatever the path, and no answer at all from KV that is in doubt.

use crate::client::{Answer, Client, PATIENCE, greedy, prompt, start, steps, tiny, token_ids};
use homing_kv::BlockHash;
use homing_units::{BootEpoch, Duration};
use homing_wire::kv_frames::{Message, PullRequest};
use homing_wire::metrics_text::names;
use homing_worker::{Limits, Listen, Worker, WorkerConfig};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Instant;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// A prefill worker and two decode workers, with clients.
struct Trio {
    workers: [Worker; 3],
    p: Client,
    d1: Client,
    d2: Client,
}

impl Trio {
    async fn new(config: fn(&str) -> WorkerConfig) -> Self {
        let workers = [
            start(config("p")).await,
            start(config("d1")).await,
            start(config("d2")).await,
        ];
        let [p, d1, d2] = [&workers[0], &workers[1], &workers[2]].map(Client::of);
        Self { workers, p, d1, d2 }
    }

    /// Everything is free again everywhere, then everything stops.
    async fn end(self) {
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

fn transfer_failed(answer: &Answer, why: &str) {
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

/// The release of what a request of this name asked for, said to this life.
async fn release(client: &Client, name: &str, epoch: BootEpoch) -> Answer {
    let body = json!({"request_id": name, "boot_epoch": epoch});
    client.post("/homing/release", &body).await
}

#[tokio::test]
async fn an_export_that_nobody_will_pull_is_released_at_once() {
    let trio = Trio::new(|name| tiny(name, 128)).await;
    let (p, epoch) = (&trio.p, trio.workers[0].info().epoch);
    let prompt = prompt(1, 150);
    let body = greedy(&prompt, 1, json!({"do_remote_decode": true})).to_string();
    let exported = p
        .send("POST", "/v1/completions", &[("x-request-id", "leg-1")], body.into())
        .await;
    let params = exported.json()["kv_transfer_params"].clone();
    assert_eq!(p.probe().await.load.exporting, 1);
    // To another life, and for another request, it says nothing.
    let elsewhere = release(p, "leg-1", BootEpoch(epoch.0 + 1)).await;
    assert_eq!(
        (elsewhere.status.as_u16(), &elsewhere.error()["code"]),
        (404, &json!("other_life"))
    );
    assert_eq!(release(p, "leg-2", epoch).await.json(), json!({"released": false}));
    assert_eq!(p.probe().await.load.exporting, 1, "it is held still");
    assert_eq!(release(p, "leg-1", epoch).await.json(), json!({"released": true}));
    let load = p.probe().await.load;
    assert_eq!(load.exporting, 0);
    assert_eq!(
        load.blocks_free + load.blocks_evictable,
        load.blocks_total,
        "no block is pinned"
    );
    assert_eq!(
        release(p, "leg-1", epoch).await.json(),
        json!({"released": false}),
        "twice is no error"
    );
    let metrics = p.metrics().await;
    assert_eq!(metrics.sum("homing:exports_released_total"), Some(1.0));
    // Whoever pulls it now fails, as from any export that is gone.
    transfer_failed(&trio.d1.complete(&greedy(&prompt, 4, params)).await, "unknown");
    trio.end().await;
}

#[tokio::test]
async fn a_release_gives_up_a_request_that_holds_nothing_yet() {
    let trio = Trio::new(steps).await;
    let (p, epoch) = (&trio.p, trio.workers[0].info().epoch);
    // Seconds of modelled prefill.
    let body = greedy(&prompt(1, 400_000), 1, json!({"do_remote_decode": true})).to_string();
    let asked = tokio::spawn({
        let p = p.clone();
        async move {
            p.send("POST", "/v1/completions", &[("x-request-id", "long")], body.into())
                .await
        }
    });
    p.until("it runs", |probe| probe.load.running == 1).await;
    assert_eq!(release(p, "long", epoch).await.json(), json!({"released": true}));
    let answer = asked.await.expect("it is answered");
    assert_eq!(
        (answer.status.as_u16(), &answer.error()["code"]),
        (503, &json!("aborted"))
    );
    trio.end().await;
}

/// The two take different connections, and a busy machine serves the later one first.
#[tokio::test]
async fn a_release_that_comes_before_its_request_holds_for_it() {
    let trio = Trio::new(|name| tiny(name, 128)).await;
    let (p, epoch) = (&trio.p, trio.workers[0].info().epoch);
    assert_eq!(release(p, "late", epoch).await.json(), json!({"released": false}));
    let body = greedy(&prompt(1, 150), 1, json!({"do_remote_decode": true})).to_string();
    let ask = async |name: &str| {
        p.send(
            "POST",
            "/v1/completions",
            &[("x-request-id", name)],
            body.clone().into(),
        )
        .await
    };
    let answer = ask("late").await;
    assert_eq!(
        (answer.status.as_u16(), &answer.error()["code"]),
        (503, &json!("aborted"))
    );
    assert_eq!(p.probe().await.load.exporting, 0, "nothing is held for it");
    assert_eq!(ask("other").await.status, 200, "it was said of one request");
    assert_eq!(ask("late").await.status, 200, "and once");
    for name in ["other", "late"] {
        assert_eq!(
            release(p, name, epoch).await.json(),
            json!({"released": true}),
            "{name}"
        );
    }
    trio.end().await;
}

/// The renewal of what a request of this name asked for, said to this life.
async fn renew(client: &Client, name: &str, epoch: BootEpoch) -> Answer {
    let body = json!({"request_id": name, "boot_epoch": epoch});
    client.post("/homing/renew", &body).await
}

/// Held, pulled, and gone are told apart: whoever waits for the pull must know which.
#[tokio::test]
async fn a_renewal_says_what_has_become_of_an_export() {
    let trio = Trio::new(|name| tiny(name, 128)).await;
    let (p, epoch) = (&trio.p, trio.workers[0].info().epoch);
    let gone = |answer: &Answer, code: &str| {
        assert_eq!((answer.status.as_u16(), &answer.error()["code"]), (404, &json!(code)));
    };
    gone(&renew(p, "leg", epoch).await, "unknown_export");
    let own = prompt(1, 150);
    let body = greedy(&own, 1, json!({"do_remote_decode": true})).to_string();
    let ask = async || {
        let named = [("x-request-id", "leg")];
        p.send("POST", "/v1/completions", &named, body.clone().into()).await
    };
    let params = ask().await.json()["kv_transfer_params"].clone();
    gone(&renew(p, "leg", BootEpoch(epoch.0 + 1)).await, "other_life");
    let held = renew(p, "leg", epoch).await.json();
    assert_eq!(held["state"], "held");
    let lease = 10 * PATIENCE;
    assert!(
        held["lease_ms"]
            .as_u64()
            .is_some_and(|left| u128::from(left) > lease.as_millis() - 1_000),
        "{held}"
    );
    trio.d1.greedy(&own, 4, params).await;
    assert_eq!(renew(p, "leg", epoch).await.json(), json!({"state": "pulled"}));
    ask().await;
    assert_eq!(
        renew(p, "leg", epoch).await.json()["state"],
        "held",
        "another of that name"
    );
    release(p, "leg", epoch).await;
    p.until_idle().await;
    // The first of that name was pulled: what was given up must not be taken for it.
    gone(&renew(p, "leg", epoch).await, "unknown_export");
    assert_eq!(p.metrics().await.sum("homing:exports_renewed_total"), Some(2.0));
    trio.end().await;
}

/// A lease that nobody lets end, and then one that nobody renews.
#[tokio::test]
async fn a_lease_that_is_renewed_outlasts_itself() {
    let lease = Duration::from_millis(500);
    let config = tiny("p", 128);
    let limits = Limits {
        export_lease: lease,
        export_renewals: u32::MAX,
        ..config.limits.clone()
    };
    let worker = start(WorkerConfig { limits, ..config }).await;
    let (p, epoch) = (Client::of(&worker), worker.info().epoch);
    let body = greedy(&prompt(1, 150), 1, json!({"do_remote_decode": true})).to_string();
    let named = [("x-request-id", "held")];
    assert_eq!(p.send("POST", "/v1/completions", &named, body.into()).await.status, 200);
    let began = Instant::now();
    while began.elapsed() < 2 * lease {
        assert_eq!(renew(&p, "held", epoch).await.json()["state"], "held");
    }
    assert_eq!(p.probe().await.load.exporting, 1, "two leases later it is held still");
    p.until_idle().await;
    assert_eq!(p.metrics().await.sum(names::NIXL_KV_EXPIRED_REQUESTS), Some(1.0));
    assert_eq!(renew(&p, "held", epoch).await.status, 404);
    worker.shutdown().await;
}

#[tokio::test]
async fn a_renewal_of_what_is_computed_still_waits_for_nothing() {
    let trio = Trio::new(steps).await;
    let (p, epoch) = (&trio.p, trio.workers[0].info().epoch);
    // Seconds of modelled prefill.
    let body = greedy(&prompt(1, 400_000), 1, json!({"do_remote_decode": true})).to_string();
    let asked = tokio::spawn({
        let p = p.clone();
        async move {
            p.send("POST", "/v1/completions", &[("x-request-id", "long")], body.into())
                .await
        }
    });
    p.until("it runs", |probe| probe.load.running == 1).await;
    assert_eq!(renew(p, "long", epoch).await.json(), json!({"state": "computing"}));
    release(p, "long", epoch).await;
    assert_eq!(asked.await.expect("it is answered").status, 503);
    trio.end().await;
}

#[tokio::test]
async fn a_release_or_renewal_that_makes_no_sense_is_refused() {
    let trio = Trio::new(|name| tiny(name, 16)).await;
    let check = async |body: Value, status: u16| {
        for path in ["/homing/release", "/homing/renew"] {
            let answer = trio.p.post(path, &body).await;
            assert_eq!(answer.status.as_u16(), status, "{path} {body}: {answer:?}");
            answer.error();
        }
    };
    check(json!({}), 400).await;
    check(json!([]), 400).await;
    check(json!({"request_id": 1, "boot_epoch": 1}), 400).await;
    check(json!({"request_id": "a"}), 400).await;
    check(json!({"request_id": "a", "boot_epoch": -1}), 400).await;
    check(json!({"request_id": "a".repeat(129), "boot_epoch": 1}), 400).await;
    check(json!({"request_id": "a".repeat(2_000), "boot_epoch": 1}), 413).await;
    trio.end().await;
}
