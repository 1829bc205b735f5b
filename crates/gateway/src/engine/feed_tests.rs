//! A feed against an engine's two event sockets.

use super::*;
use crate::core_task::Message;
use crate::fleet::Fleet;
use homing_kv::hash_blocks;
use homing_wire::kv_events::{BlockStored, CacheEvent, Replay};
use std::sync::Mutex;
use zeromq::{PubSocket, RouterSocket, SocketSend};

const PATIENCE: Duration = Duration::from_secs(120);

/// An engine's two event sockets; what it replays is what a test puts in.
struct Publisher {
    events: PubSocket,
    kept: Arc<Mutex<Vec<Frame>>>,
    endpoints: KvEndpoints,
    replays: tokio::task::JoinHandle<()>,
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.replays.abort();
    }
}

impl Publisher {
    async fn start() -> Self {
        let (mut events, mut replay) = (PubSocket::new(), RouterSocket::new());
        let at = events.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        let replay_at = replay.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        let kept = Arc::new(Mutex::new(Vec::<Frame>::new()));
        let replays = tokio::spawn({
            let kept = Arc::clone(&kept);
            async move {
                while let Ok(request) = replay.recv().await {
                    let request = frames(&request);
                    let from = Replay::decode_request(&request[1..]).unwrap();
                    let kept: Vec<Frame> = kept.lock().unwrap().clone();
                    let batches = kept
                        .into_iter()
                        .filter(|frame| frame.sequence >= from)
                        .map(Replay::Batch);
                    for answer in batches.chain([Replay::End]) {
                        let parts = [&request[..1], &answer.encode()].concat();
                        replay.send(ZmqMessage::try_from(parts).unwrap()).await.unwrap();
                    }
                }
            }
        });
        let endpoints = KvEndpoints {
            events: Some(EventSource::Connect(at)),
            replay: Some(replay_at),
        };
        Self {
            events,
            kept,
            endpoints,
            replays,
        }
    }

    async fn publish(&mut self, frame: &Frame) {
        let message = ZmqMessage::try_from(frame.encode().to_vec()).unwrap();
        self.events.send(message).await.unwrap();
    }

    fn keep(&self, frames: &[Frame]) {
        self.kept.lock().unwrap().extend_from_slice(frames);
    }
}

/// The batch that stores block `sequence` of a chain whose block `n` holds the tokens `2n` and `2n + 1`.
fn batch(sequence: u64) -> Frame {
    let first = u32::try_from(sequence).unwrap() * 2;
    let stored = BlockStored {
        block_hashes: vec![sequence + 100],
        parent_block_hash: (sequence > 0).then(|| sequence + 99),
        token_ids: vec![first, first + 1],
        block_size: 2,
        ..BlockStored::default()
    };
    let batch = EventBatch {
        events: vec![CacheEvent::Stored(stored)],
        ..EventBatch::default()
    };
    Frame {
        topic: "kv@x@m".to_owned(),
        sequence,
        payload: batch.encode(),
    }
}

fn feed(endpoints: KvEndpoints, core: CoreHandle) -> Feed {
    Feed {
        worker: WorkerId(0),
        epoch: BootEpoch(5),
        endpoints,
        core,
        telemetry: Arc::new(Telemetry::new(Arc::new(Fleet::new(&[])))),
        mapping: HashMapping::new(2, 1_000),
        next: 0,
        retry_cap: Duration::from_millis(20),
        rank: None,
        doubt: Arc::default(),
        last_made_s: 0.0,
        began_anew: false,
    }
}

async fn event(messages: &mut mpsc::Receiver<Message>) -> Event {
    match tokio::time::timeout(PATIENCE, messages.recv())
        .await
        .expect("the feed says something")
    {
        Some(Message::Event(event)) => event,
        _ => panic!("a feed sends events"),
    }
}

/// Expects the batch that stores block `sequence`, mapped.
async fn expect_resync_done(messages: &mut mpsc::Receiver<Message>, complete: bool) {
    let worker = WorkerId(0);
    assert_eq!(event(messages).await, Event::ResyncDone { worker, complete });
}

async fn expect_batch(messages: &mut mpsc::Receiver<Message>, sequence: u64) {
    let tokens: Vec<u32> = (0..u32::try_from(sequence).unwrap() * 2 + 2).collect();
    let own = hash_blocks(&tokens, 2);
    let Event::Kv(batch) = event(messages).await else {
        panic!("expected batch {sequence}")
    };
    assert_eq!((batch.sequence, batch.epoch), (sequence, BootEpoch(5)));
    let [KvUpdate::Stored { parent, hashes, .. }] = &batch.updates[..] else {
        panic!("{:?}", batch.updates)
    };
    assert_eq!(
        (hashes.last(), *parent),
        (own.last(), own.iter().rev().nth(1).copied()),
        "batch {sequence}"
    );
}

#[tokio::test]
async fn what_was_missed_is_replayed_in_order_before_what_follows() {
    let mut publisher = Publisher::start().await;
    publisher.keep(&[batch(0), batch(1)]);
    let (core, mut messages) = CoreHandle::channel();
    let (orders, mut resyncs) = mpsc::channel(1);
    let feed = feed(publisher.endpoints.clone(), core);
    let task = tokio::spawn(async move { feed.run(&mut resyncs).await });
    // What was before the subscription.
    expect_batch(&mut messages, 0).await;
    expect_batch(&mut messages, 1).await;
    // 2 and 3 are lost on the way: 4 may only come after them. It is sent until the subscription has reached here.
    publisher.keep(&[batch(2), batch(3), batch(4)]);
    let next = tokio::time::timeout(PATIENCE, async {
        loop {
            publisher.publish(&batch(4)).await;
            if let Ok(Message::Event(Event::Kv(batch))) = messages.try_recv() {
                return batch.sequence;
            }
            tokio::task::yield_now().await;
        }
    });
    assert_eq!(next.await.unwrap(), 2);
    expect_batch(&mut messages, 3).await;
    expect_batch(&mut messages, 4).await;
    // The core asks for all of it again.
    orders.send(Resync { from_sequence: 0 }).await.unwrap();
    for sequence in 0..5 {
        expect_batch(&mut messages, sequence).await;
    }
    expect_resync_done(&mut messages, true).await;
    // What the engine does not have any more is said so.
    publisher.kept.lock().unwrap().drain(..3);
    orders.send(Resync { from_sequence: 0 }).await.unwrap();
    expect_batch(&mut messages, 3).await;
    expect_batch(&mut messages, 4).await;
    expect_resync_done(&mut messages, false).await;
    task.abort();
}

#[tokio::test]
async fn an_engine_without_events_refuses_a_replay() {
    let (core, mut messages) = CoreHandle::channel();
    let (orders, mut resyncs) = mpsc::channel(1);
    let feed = feed(KvEndpoints::default(), core);
    let task = tokio::spawn(async move { feed.run(&mut resyncs).await });
    orders.send(Resync { from_sequence: 3 }).await.unwrap();
    expect_resync_done(&mut messages, false).await;
    task.abort();
}

#[tokio::test]
async fn a_subscription_that_breaks_is_made_again() {
    let publisher = Publisher::start().await;
    publisher.keep(&[batch(0)]);
    let endpoints = publisher.endpoints.clone();
    let Some(EventSource::Connect(at)) = endpoints.events.clone() else {
        panic!("a publisher is connected to")
    };
    let (core, mut messages) = CoreHandle::channel();
    let (_orders, mut resyncs) = mpsc::channel(1);
    let feed = feed(endpoints, core);
    let task = tokio::spawn(async move { feed.run(&mut resyncs).await });
    expect_batch(&mut messages, 0).await;
    drop(publisher);
    // The same life behind the same addresses: a proxy that was restarted, say.
    let mut events = PubSocket::new();
    let bound = tokio::time::timeout(PATIENCE, async {
        while events.bind(&at).await.is_err() {
            tokio::task::yield_now().await;
        }
    });
    bound.await.expect("the address is free again");
    let sent = tokio::time::timeout(PATIENCE, async {
        loop {
            let message = ZmqMessage::try_from(batch(1).encode().to_vec()).unwrap();
            events.send(message).await.unwrap();
            if let Ok(Message::Event(Event::Kv(batch))) = messages.try_recv() {
                return batch.sequence;
            }
            tokio::task::yield_now().await;
        }
    });
    assert_eq!(sent.await.expect("the feed comes back"), 1);
    task.abort();
}

/// A publisher that connects, as vLLM does to an endpoint without a wildcard; published again and again until it is seen.
async fn published_until(endpoint: &str, frame: &Frame, messages: &mut mpsc::Receiver<Message>) -> Event {
    let mut events = PubSocket::new();
    events.connect(endpoint).await.unwrap();
    let sent = async {
        loop {
            let message = ZmqMessage::try_from(frame.encode().to_vec()).unwrap();
            events.send(message).await.unwrap();
            if let Ok(Message::Event(event)) = messages.try_recv() {
                return event;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, sent).await.expect("it arrives")
}

#[tokio::test]
async fn engines_connect_to_a_socket_of_the_router() {
    let publisher = Publisher::start().await;
    let folder = tempfile::tempdir().unwrap();
    let endpoint = format!("ipc://{}", folder.path().join("events").display());
    let endpoints = KvEndpoints {
        events: Some(EventSource::Bind(endpoint.clone())),
        replay: publisher.endpoints.replay.clone(),
    };
    let (core, mut messages) = CoreHandle::channel();
    let (_orders, mut resyncs) = mpsc::channel(1);
    let feed = feed(endpoints, core);
    let task = tokio::spawn(async move { feed.run(&mut resyncs).await });
    let bound = tokio::time::timeout(PATIENCE, async {
        while !folder.path().join("events").exists() {
            tokio::task::yield_now().await;
        }
    });
    bound.await.expect("the router listens");
    let Event::Kv(first) = published_until(&endpoint, &batch(0), &mut messages).await else {
        panic!("expected a batch")
    };
    assert_eq!(first.sequence, 0);
    // It left. What it published in vain is replayed when it is back.
    publisher.keep(&[batch(1), batch(2)]);
    let mut events = PubSocket::new();
    events.connect(&endpoint).await.unwrap();
    expect_batch(&mut messages, 1).await;
    expect_batch(&mut messages, 2).await;
    task.abort();
}

#[tokio::test]
async fn a_sequence_that_begins_anew_is_another_life() {
    let (core, mut messages) = CoreHandle::channel();
    let mut feed = feed(KvEndpoints::default(), core);
    let made = |sequence: u64, timestamp: f64| {
        let mut frame = batch(sequence);
        let mut of = EventBatch::decode(&frame.payload).unwrap();
        of.timestamp = timestamp;
        frame.payload = of.encode();
        ZmqMessage::try_from(frame.encode().to_vec()).unwrap()
    };
    feed.published(&made(0, 10.0)).await;
    feed.published(&made(1, 11.0)).await;
    feed.published(&made(0, 10.0)).await;
    expect_batch(&mut messages, 0).await;
    expect_batch(&mut messages, 1).await;
    assert!(!feed.began_anew, "a copy of a batch is no new life");
    feed.published(&made(0, 20.0)).await;
    feed.published(&made(2, 21.0)).await;
    let told = Event::KvRestarted {
        worker: WorkerId(0),
        epoch: BootEpoch(5),
    };
    assert_eq!(event(&mut messages).await, told, "the core decides what follows");
    assert!(
        messages.try_recv().is_err(),
        "the new life's batch 2 does not follow the old one's batch 1"
    );
}

#[tokio::test]
async fn another_ranks_batches_are_another_workers() {
    let (core, mut messages) = CoreHandle::channel();
    let mut feed = feed(KvEndpoints::default(), core);
    feed.rank = Some(1);
    for (rank, sequence) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
        let mut frame = batch(sequence);
        let mut of = EventBatch::decode(&frame.payload).unwrap();
        of.data_parallel_rank = Some(rank);
        frame.payload = of.encode();
        feed.published(&ZmqMessage::try_from(frame.encode().to_vec()).unwrap())
            .await;
    }
    expect_batch(&mut messages, 0).await;
    expect_batch(&mut messages, 1).await;
    assert!(messages.try_recv().is_err());
}
