//! How a gateway starts and ends, and what it leaves: its recording.

use crate::support::engine::PATIENCE;
use crate::support::{Caller, Cluster, chat, conversation, messages, quick};
use homing_gateway::{EngineKind, Gateway, GatewayConfig, GatewayError, WorkerSpec};
use homing_router::event::Role;
use serde_json::json;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

#[tokio::test]
async fn a_shutdown_lets_requests_end_and_tells_those_that_do_not() {
    let cluster = Cluster::start_with(&[Role::Both], |config| config.clocks.drain = Duration::from_millis(300)).await;
    cluster.engines[0].hold();
    cluster.engines[0].release(2);
    let mut long = cluster
        .client
        .stream("/v1/chat/completions", &chat(&messages(3), 50, true))
        .await;
    long.next().await.unwrap();
    let began = Instant::now();
    let (end, ()) = tokio::join!(long.rest(), cluster.gateway.shutdown());
    assert!(began.elapsed() < PATIENCE / 2, "it took {:?}", began.elapsed());
    assert_eq!(end.0.last().unwrap()["error"]["code"], "shutting_down", "{end:?}");
    cluster.engines[0]
        .until("its leg is cancelled", |engine| engine.open() == 0)
        .await;
}

#[tokio::test]
async fn a_shutdown_waits_for_an_answer_that_ends_in_time() {
    let cluster = Cluster::start_with(&[Role::Both], |config| config.clocks.drain = PATIENCE).await;
    cluster.engines[0].hold();
    cluster.engines[0].release(1);
    let mut events = cluster
        .client
        .stream("/v1/chat/completions", &chat(&messages(3), 3, true))
        .await;
    events.next().await.unwrap();
    cluster.engines[0].release(2);
    let (end, ()) = tokio::join!(events.rest(), cluster.gateway.shutdown());
    assert!(end.1, "{end:?}");
}

/// Connects and sends some bytes.
async fn send_raw(address: SocketAddr, bytes: &str) -> TcpStream {
    let mut socket = TcpStream::connect(address).await.unwrap();
    socket.write_all(bytes.as_bytes()).await.unwrap();
    socket
}

#[tokio::test]
async fn a_shutdown_does_not_wait_for_requests_that_have_not_come_in() {
    let cluster = Cluster::start_with(&[Role::Both], |config| config.clocks.drain = PATIENCE).await;
    let address = cluster.gateway.local_addr();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\n{";
    let mut sockets = Vec::new();
    for bytes in [
        "",
        "POST /v1/chat",
        head,
        "GET /health HTTP/1.1\r\nhost: h\r\n\r\nGET /he",
    ] {
        sockets.push(send_raw(address, bytes).await);
    }
    // An answered request means that the bytes before it have been read.
    let mut answered = sockets.pop().unwrap();
    let mut start = [0; 12];
    answered.read_exact(&mut start).await.unwrap();
    assert_eq!(&start, b"HTTP/1.1 200");
    sockets.push(answered);
    let began = Instant::now();
    cluster.gateway.shutdown().await;
    let took = began.elapsed();
    assert!(took < PATIENCE / 2, "it took {took:?}");
    for mut socket in sockets {
        let mut rest = Vec::new();
        let closed = tokio::time::timeout(PATIENCE, socket.read_to_end(&mut rest)).await;
        assert!(closed.is_ok(), "every connection is closed");
    }
}

#[tokio::test]
async fn what_was_recorded_can_be_replayed_to_the_same_actions() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("events.bin");
    let roles = [Role::Prefill, Role::Decode, Role::Decode];
    let mut cluster = Cluster::start_with(&roles, |config| config.record = Some(path.clone())).await;
    for turn in 0..5 {
        let body = chat(&conversation(&format!("w{turn}"), 100), 4, turn % 2 == 0);
        cluster.client.post("/v1/chat/completions", &body).await;
        cluster.turn().await;
    }
    cluster.engines[1].kill().await;
    cluster
        .client
        .until("/admin/workers", "one is dead", |page| {
            page["data"][1]["state"] == "dead"
        })
        .await;
    cluster.gateway.shutdown().await;
    let bytes = std::fs::read(&path).unwrap();
    let mut turns = 0;
    let replay = homing_router::recording::replay(&bytes, |_, event, _, _| {
        turns += u32::from(matches!(event, homing_router::event::Event::Turn(_)));
    });
    let replay = replay.unwrap();
    assert!(replay.complete && replay.compared.is_some(), "{replay:?}");
    assert_eq!(turns, 5);
}

#[tokio::test]
async fn a_worker_that_is_not_there_yet_does_not_keep_the_gateway_from_starting() {
    let address = SocketAddr::from(([127, 0, 0, 1], 0));
    let nobody = std::net::TcpListener::bind(address).unwrap();
    let mut config = GatewayConfig {
        listen: address,
        clocks: quick(),
        ..GatewayConfig::default()
    };
    config.workers = vec![WorkerSpec::new(
        format!("http://{}", nobody.local_addr().unwrap()),
        EngineKind::Homing,
    )];
    config.clocks.poll_timeout = Duration::from_millis(50);
    let gateway = Gateway::start(config.clone()).await.unwrap();
    let client = Caller::new(gateway.local_addr());
    assert_eq!(client.get("/health").await.status, 200);
    assert_eq!(client.get("/ready").await.status, 503);
    let url = format!("http://{}", nobody.local_addr().unwrap());
    let mut listed = client.get("/admin/workers").await.json()["data"].take();
    // Once it was tried there is something to say.
    listed[0].as_object_mut().unwrap().remove("problem");
    let expected = json!([{"id": 0, "name": "w0", "url": url, "state": "joining"}]);
    assert_eq!(listed, expected, "it is listed all the same");
    config.listen = gateway.local_addr();
    let taken = Gateway::start(config.clone()).await.err().unwrap();
    assert!(matches!(taken, GatewayError::Listen { .. }), "{taken}");
    for url in ["127.0.0.1:1", "https://h", "ftp://h:1"] {
        config.workers = vec![WorkerSpec::new(url, EngineKind::Vllm)];
        let error = Gateway::start(config.clone()).await.err().unwrap();
        assert!(matches!(error, GatewayError::Config(_)), "{url}: {error}");
    }
    for name in ["", "a b/é"] {
        config.workers = vec![WorkerSpec {
            name: Some(name.to_owned()),
            ..WorkerSpec::new(&url, EngineKind::Vllm)
        }];
        let error = Gateway::start(config.clone()).await.err().unwrap();
        assert!(error.to_string().contains("1 to 64 letters"), "{name}: {error}");
    }
    gateway.shutdown().await;
}
