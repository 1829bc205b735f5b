//! KV events over ZMQ in vLLM's wire form: a PUB socket for what happens now, a ROUTER socket for what was missed.
//!
//! The engine thread encodes a batch for each step and puts it into a ring; a task publishes from the ring. Nothing
//! waits for a subscriber: one that is slow or joins late sees a gap in the sequence numbers and asks for a replay, and
//! beyond the ring there is no replay, which it sees by the first number that comes.

use crate::executor::KvOut;
use bytes::Bytes;
use homing_engine::api::KvChange;
use homing_kv::{BlockHash, Tier};
use homing_wire::kv_events::{BlockRemoved, BlockStored, CacheEvent, EventBatch, Frame, Replay};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use zeromq::{Endpoint, PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqError, ZmqMessage};

/// Batches that are kept for a replay by default: vLLM's default.
pub const REPLAY_BATCHES: usize = 10_000;
/// Bytes of the batches that are kept for a replay by default.
pub const REPLAY_BYTES: usize = 256 << 20;
/// How long a replay waits for a subscriber that does not read.
const REPLAY_SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// Batches that are taken from the ring at once.
const PUBLISHED_AT_ONCE: usize = 64;

/// What is kept for a replay at most; the newest batch always is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayLimits {
    /// Batches: vLLM's `buffer_steps`. A few hundred bytes to some kilobytes each.
    pub batches: usize,
    /// Bytes of all together.
    pub bytes: usize,
}

impl Default for ReplayLimits {
    fn default() -> Self {
        Self {
            batches: REPLAY_BATCHES,
            bytes: REPLAY_BYTES,
        }
    }
}

/// The last batches, numbered from 0.
#[derive(Debug)]
pub struct EventRing {
    limits: ReplayLimits,
    state: Mutex<RingState>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct RingState {
    /// The sequence number of the next batch.
    next: u64,
    batches: VecDeque<Bytes>,
    bytes: usize,
}

/// A batch and its sequence number.
pub type Numbered = (u64, Bytes);

impl EventRing {
    /// An empty ring.
    #[must_use]
    pub fn new(limits: ReplayLimits) -> Self {
        Self {
            limits,
            state: Mutex::default(),
            changed: Notify::new(),
        }
    }

    /// Adds a batch under the next sequence number.
    pub fn push(&self, batch: Bytes) {
        let mut state = self.lock();
        state.next += 1;
        state.bytes += batch.len();
        state.batches.push_back(batch);
        let too_much = |state: &RingState| state.batches.len() > self.limits.batches || state.bytes > self.limits.bytes;
        while state.batches.len() > 1 && too_much(&state) {
            let dropped = state.batches.pop_front().map_or(0, |batch| batch.len());
            state.bytes -= dropped;
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Up to `limit` batches from sequence number `from` on, or from the oldest that is kept.
    #[must_use]
    pub fn since(&self, from: u64, limit: usize) -> Vec<Numbered> {
        let state = self.lock();
        let oldest = state.next - state.batches.len() as u64;
        let first = from.max(oldest);
        let skip = usize::try_from(first - oldest).unwrap_or(usize::MAX);
        // The batches lead: the numbers' iterator must not be asked for one beyond the last.
        let batches = state.batches.iter().skip(skip).take(limit).cloned();
        batches
            .zip(first..)
            .map(|(batch, sequence)| (sequence, batch))
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, RingState> {
        // Every change above leaves the state whole, so a panic elsewhere under the lock does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The two sockets, bound.
pub struct EventSockets {
    events: PubSocket,
    replay: RouterSocket,
    /// Where events are published.
    pub events_addr: SocketAddr,
    /// Where replays are asked for.
    pub replay_addr: SocketAddr,
}

impl EventSockets {
    /// Binds both sockets; port 0 takes a free one.
    ///
    /// # Errors
    /// The address that could not be bound, and why.
    pub async fn bind(events: SocketAddr, replay: SocketAddr) -> Result<Self, (SocketAddr, ZmqError)> {
        let (mut events_socket, mut replay_socket) = (PubSocket::new(), RouterSocket::new());
        let events_addr = bind(&mut events_socket, events)
            .await
            .map_err(|error| (events, error))?;
        let replay_addr = bind(&mut replay_socket, replay)
            .await
            .map_err(|error| (replay, error))?;
        Ok(Self {
            events: events_socket,
            replay: replay_socket,
            events_addr,
            replay_addr,
        })
    }

    /// Publishes and replays until `stop`.
    pub async fn serve(self, topic: String, ring: Arc<EventRing>, stop: CancellationToken) {
        tokio::join!(
            publish(self.events, &topic, &ring, &stop),
            serve_replays(self.replay, &topic, &ring, &stop)
        );
    }
}

/// The payload of a batch of changes: vLLM's form, with our hashes' 64 bits that stand for them on the wire.
#[must_use]
pub fn encode_batch(changes: Vec<KvOut>, block_size: u32, timestamp: f64) -> Bytes {
    let events = changes.into_iter().map(|change| event(change, block_size)).collect();
    EventBatch {
        timestamp,
        events,
        data_parallel_rank: Some(0),
        skipped: 0,
    }
    .encode()
}

fn event(change: KvOut, block_size: u32) -> CacheEvent {
    let wire = |hashes: &[BlockHash]| hashes.iter().map(|hash| hash.wire()).collect();
    match change.change {
        KvChange::Stored {
            parent, hashes, tier, ..
        } => CacheEvent::Stored(BlockStored {
            block_hashes: wire(&hashes),
            parent_block_hash: parent.map(BlockHash::wire),
            token_ids: change.tokens,
            block_size,
            medium: Some(medium(tier)),
            extra_keys: vec![None; hashes.len()],
            group_idx: Some(0),
            ..BlockStored::default()
        }),
        KvChange::Removed { hashes, tier } => CacheEvent::Removed(BlockRemoved {
            block_hashes: wire(&hashes),
            medium: Some(medium(tier)),
            group_idx: Some(0),
        }),
        KvChange::Cleared => CacheEvent::AllCleared,
    }
}

fn medium(tier: Tier) -> String {
    match tier {
        Tier::Gpu => "GPU".to_owned(),
        Tier::Host => "CPU".to_owned(),
    }
}

/// Binds a socket; the address with the port that it got.
async fn bind(socket: &mut impl Socket, mut address: SocketAddr) -> Result<SocketAddr, ZmqError> {
    if let Endpoint::Tcp(_, port) = socket.bind(&format!("tcp://{address}")).await? {
        address.set_port(port);
    }
    Ok(address)
}

async fn publish(mut socket: PubSocket, topic: &str, ring: &EventRing, stop: &CancellationToken) {
    let mut next = 0;
    loop {
        let batches = ring.since(next, PUBLISHED_AT_ONCE);
        if batches.is_empty() {
            tokio::select! {
                () = ring.changed.notified() => continue,
                () = stop.cancelled() => return,
            }
        }
        for (sequence, payload) in batches {
            next = sequence + 1;
            let frame = Frame {
                topic: topic.to_owned(),
                sequence,
                payload,
            };
            if let Err(error) = socket.send(message(frame.encode())).await {
                tracing::warn!(%error, sequence, "a batch of kv events was not published");
            }
        }
    }
}

async fn serve_replays(mut socket: RouterSocket, topic: &str, ring: &EventRing, stop: &CancellationToken) {
    loop {
        let request = tokio::select! {
            request = socket.recv() => request,
            () = stop.cancelled() => return,
        };
        match request {
            Ok(request) => {
                let served = tokio::time::timeout(REPLAY_SEND_TIMEOUT, replay(&mut socket, topic, ring, request));
                let outcome = tokio::select! {
                    outcome = served => outcome,
                    () = stop.cancelled() => return,
                };
                if !matches!(outcome, Ok(Ok(()))) {
                    tracing::warn!("a replay of kv events was broken off: its reader is gone or too slow");
                }
            }
            Err(error) => tracing::debug!(%error, "a replay request could not be read"),
        }
    }
}

/// Sends the batches that a request asks for, then the end mark. A request that is none is passed over.
async fn replay(socket: &mut RouterSocket, topic: &str, ring: &EventRing, request: ZmqMessage) -> Result<(), ZmqError> {
    let frames = request.into_vec();
    let Some((identity, Ok(start))) = frames
        .split_first()
        .map(|(first, rest)| (first, Replay::decode_request(rest)))
    else {
        return Ok(());
    };
    for (sequence, payload) in ring.since(start, ring.limits.batches) {
        let frame = Frame {
            topic: topic.to_owned(),
            sequence,
            payload,
        };
        socket.send(addressed(identity, &Replay::Batch(frame))).await?;
    }
    socket.send(addressed(identity, &Replay::End)).await
}

fn addressed(identity: &Bytes, replay: &Replay) -> ZmqMessage {
    let mut message = message(replay.encode());
    message.push_front(identity.clone());
    message
}

fn message<const N: usize>(frames: [Bytes; N]) -> ZmqMessage {
    ZmqMessage::try_from(frames.to_vec()).expect("a message has a frame")
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_units::RequestId;

    #[test]
    fn the_ring_keeps_the_newest() {
        const KEPT: usize = 1_000;
        let ring = EventRing::new(ReplayLimits {
            batches: KEPT,
            ..ReplayLimits::default()
        });
        let count = KEPT as u64 + 5;
        (0..count).for_each(|index| ring.push(Bytes::copy_from_slice(&index.to_be_bytes())));
        assert_eq!(ring.since(0, usize::MAX).len(), KEPT);
        let check = |from, limit, first: Option<u64>, length| {
            let batches = ring.since(from, limit);
            assert_eq!(
                (batches.first().map(|batch| batch.0), batches.len()),
                (first, length),
                "from {from}"
            );
            assert!(
                batches
                    .iter()
                    .all(|(sequence, batch)| batch.as_ref() == sequence.to_be_bytes())
            );
        };
        check(0, 3, Some(5), 3);
        check(count - 2, 9, Some(count - 2), 2);
        check(count, 9, None, 0);
        check(u64::MAX, 9, None, 0);
    }

    #[test]
    fn a_batch_takes_no_more_room_than_it_has_bytes() {
        let stored = |tokens: u32| KvOut {
            change: KvChange::Stored {
                request: RequestId(1),
                first_block: 0,
                parent: None,
                hashes: vec![BlockHash(7); tokens as usize / 16],
                tier: Tier::Gpu,
            },
            tokens: (0..tokens).collect(),
        };
        for tokens in [16, 160, 16_000] {
            let batch = encode_batch(vec![stored(tokens), stored(16)], 16, 0.0);
            let length = batch.len();
            let room = batch.try_into_mut().expect("nobody else has it").capacity();
            assert_eq!(room, length, "{tokens} tokens");
        }
    }

    #[test]
    fn the_ring_is_bounded_in_bytes_too() {
        let ring = EventRing::new(ReplayLimits {
            bytes: 1_000,
            ..ReplayLimits::default()
        });
        (0..3).for_each(|_| ring.push(Bytes::from(vec![0; 500])));
        assert_eq!(ring.since(0, 9).iter().map(|batch| batch.0).collect::<Vec<_>>(), [1, 2]);
        ring.push(Bytes::from(vec![0; 1_001]));
        assert_eq!(ring.since(0, 9).iter().map(|batch| batch.0).collect::<Vec<_>>(), [3]);
    }
}
