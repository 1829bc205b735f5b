//! KV events as a router hears them: in order, without gaps, with the tokens that it hashes itself, and again on demand.

use crate::client::{Client, PATIENCE, prompt, start, tiny};
use bytes::Bytes;
use homing_kv::{BlockHash, hash_blocks};
use homing_wire::kv_events::{CacheEvent, EventBatch, Frame, Replay};
use homing_worker::Worker;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use zeromq::{DealerSocket, Socket as _, SocketRecv as _, SocketSend as _, SubSocket, ZmqMessage};

async fn subscribe(worker: &Worker) -> SubSocket {
    let mut socket = SubSocket::new();
    socket
        .connect(&format!("tcp://{}", worker.endpoints().kv_events))
        .await
        .unwrap();
    socket.subscribe(&worker.info().kv_events_topic).await.unwrap();
    socket
}

async fn heard(socket: &mut SubSocket) -> (u64, EventBatch) {
    let message = tokio::time::timeout(PATIENCE, socket.recv())
        .await
        .expect("events come")
        .unwrap();
    let frame = Frame::decode(&message.into_vec()).unwrap();
    (frame.sequence, EventBatch::decode(&frame.payload).unwrap())
}

async fn replay(worker: &Worker, start: u64) -> Vec<Frame> {
    let mut socket = DealerSocket::new();
    socket
        .connect(&format!("tcp://{}", worker.endpoints().kv_replay))
        .await
        .unwrap();
    let request = ZmqMessage::try_from(Replay::encode_request(start).to_vec()).unwrap();
    socket.send(request).await.unwrap();
    let mut frames = Vec::new();
    loop {
        let message = tokio::time::timeout(PATIENCE, socket.recv())
            .await
            .expect("the replay ends")
            .unwrap();
        match Replay::decode(&message.into_vec()).unwrap() {
            Replay::Batch(frame) => frames.push(frame),
            Replay::End => return frames,
        }
    }
}

/// The blocks that a listener takes for cached, in its own hashes.
#[derive(Default)]
struct Listener {
    cached: BTreeSet<u64>,
}

impl Listener {
    fn take(&mut self, batch: &EventBatch) {
        assert_eq!(batch.skipped, 0);
        for event in &batch.events {
            match event {
                CacheEvent::Stored(stored) => {
                    assert_eq!((stored.block_size, stored.medium.as_deref()), (16, Some("GPU")));
                    assert_eq!(stored.token_ids.len(), 16 * stored.block_hashes.len());
                    let parent = stored.parent_block_hash;
                    assert!(
                        parent.is_none_or(|parent| self.cached.contains(&parent)),
                        "a parent comes first"
                    );
                    self.cached.extend(&stored.block_hashes);
                }
                CacheEvent::Removed(removed) => removed.block_hashes.iter().for_each(|hash| {
                    assert!(self.cached.remove(hash), "only what is cached is removed");
                }),
                CacheEvent::AllCleared => self.cached.clear(),
            }
        }
    }
}

fn wire(tokens: &[u32]) -> Vec<u64> {
    hash_blocks(tokens, 16).into_iter().map(BlockHash::wire).collect()
}

#[tokio::test]
async fn events_and_their_replay_tell_what_is_cached() {
    let worker = start(tiny("d0", 16)).await;
    let client = Client::of(&worker);
    assert_eq!(worker.info().kv_events_topic, "kv@d0@tiny");
    for number in 0..4 {
        client.greedy(&prompt(number, 100), 20, Value::Null).await;
    }
    // Nobody listened until now: the replay tells.
    let missed = replay(&worker, 0).await;
    assert!(
        missed.iter().map(|frame| frame.sequence).eq(0..missed.len() as u64),
        "no gaps, from 0"
    );
    let mut listener = Listener::default();
    missed
        .iter()
        .for_each(|frame| listener.take(&EventBatch::decode(&frame.payload).unwrap()));
    let last = wire(&prompt(3, 100));
    assert!(
        last.iter().all(|hash| listener.cached.contains(hash)),
        "the newest is cached"
    );
    assert!(
        !wire(&prompt(0, 100)).iter().all(|hash| listener.cached.contains(hash)),
        "the oldest gave way"
    );
    assert!(listener.cached.len() <= 16);
    let part = replay(&worker, 3).await;
    assert_eq!(part, missed[3..]);
    assert!(replay(&worker, u64::MAX - 1).await.is_empty());
    // Now someone listens. A subscription takes effect in its own time: clear until one is heard.
    let mut socket = subscribe(&worker).await;
    let first = loop {
        client.post("/reset_prefix_cache", &json!({})).await;
        client.greedy(&prompt(9, 20), 1, Value::Null).await;
        match tokio::time::timeout(std::time::Duration::from_millis(200), heard(&mut socket)).await {
            Ok(first) => break first,
            Err(_) => continue,
        }
    };
    let known = replay(&worker, 0).await;
    let mut listener = Listener::default();
    known
        .iter()
        .take_while(|frame| frame.sequence < first.0)
        .for_each(|frame| {
            listener.take(&EventBatch::decode(&frame.payload).unwrap());
        });
    listener.take(&first.1);
    client.greedy(&prompt(10, 100), 1, Value::Null).await;
    let mut sequence = first.0;
    while !wire(&prompt(10, 100)).iter().all(|hash| listener.cached.contains(hash)) {
        let (next, batch) = heard(&mut socket).await;
        assert_eq!(next, sequence + 1, "no gaps");
        sequence = next;
        listener.take(&batch);
    }
    worker.shutdown().await;
}

#[tokio::test]
async fn pulled_blocks_are_announced_by_the_puller() {
    let (p, d) = (start(tiny("p", 64)).await, start(tiny("d", 64)).await);
    let own = prompt(1, 100);
    let params = Client::of(&p).export(&own).await["kv_transfer_params"].clone();
    Client::of(&d).greedy(&own, 1, params).await;
    let mut listener = Listener::default();
    for frame in replay(&d, 0).await {
        listener.take(&EventBatch::decode(&frame.payload).unwrap());
    }
    assert!(
        listener
            .cached
            .iter()
            .copied()
            .eq(wire(&own).into_iter().collect::<BTreeSet<u64>>())
    );
    p.shutdown().await;
    d.shutdown().await;
}

#[tokio::test]
async fn a_garbled_replay_request_is_passed_over() {
    let worker = start(tiny("d0", 16)).await;
    Client::of(&worker).greedy(&prompt(1, 40), 1, Value::Null).await;
    let mut socket = DealerSocket::new();
    socket
        .connect(&format!("tcp://{}", worker.endpoints().kv_replay))
        .await
        .unwrap();
    for garbled in [
        vec![Bytes::from_static(b"x")],
        vec![Bytes::new(), Bytes::from_static(b"123")],
        vec![Bytes::new(); 3],
    ] {
        socket.send(ZmqMessage::try_from(garbled).unwrap()).await.unwrap();
    }
    assert_eq!(replay(&worker, 0).await.len(), 1);
    worker.shutdown().await;
}
