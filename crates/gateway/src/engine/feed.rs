//! One engine's KV events, followed for one of its lives: subscribed to, mapped to own hashes, replayed where missed.
//!
//! Batches are mapped strictly in order, because a block can only be mapped after its parent: where a sequence number is
//! missing, the engine is asked for it before what follows is mapped. What its replay no longer has is passed over; the
//! core sees that gap by the numbers and says what follows from it.

use super::mapping::HashMapping;
use super::source::EventSource;
use super::{Doubt, Resync};
use crate::core_task::CoreHandle;
use crate::fleet::KvEndpoints;
use crate::telemetry::Telemetry;
use bytes::Bytes;
use futures::StreamExt;
use homing_router::event::{Event, KvBatch, KvUpdate};
use homing_units::{BootEpoch, WorkerId};
use homing_wire::kv_events::{EventBatch, Frame, Replay};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;
use zeromq::{DealerSocket, Socket, SocketEvent, SocketRecv, SocketSend, SubSocket, ZmqMessage};

/// How long making a connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long an engine may take for the next message of a replay.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(5);
/// First pause before a lost subscription is tried again.
const RETRY_FIRST: Duration = Duration::from_millis(100);
/// How long batches are left aside after a sequence began anew: by then the probes have met the new life, or there is none.
const RESTART_DOUBT: Duration = Duration::from_secs(10);

/// One life's events.
pub(super) struct Feed {
    pub(super) worker: WorkerId,
    pub(super) epoch: BootEpoch,
    pub(super) endpoints: KvEndpoints,
    pub(super) core: CoreHandle,
    pub(super) telemetry: Arc<Telemetry>,
    pub(super) mapping: HashMapping,
    /// The sequence number that is mapped next.
    pub(super) next: u64,
    pub(super) retry_cap: Duration,
    /// The engine of a data-parallel server whose batches these are; `None` where there is only one.
    pub(super) rank: Option<u32>,
    /// Where a sequence that began anew is told.
    pub(super) doubt: Arc<Doubt>,
    /// When the engine made the last batch that was mapped, in its own seconds since 1970.
    pub(super) last_made_s: f64,
    /// Until when batches may be those of a life that is not known yet.
    pub(super) fenced_until: Option<Instant>,
}

impl Feed {
    /// Follows the events until it is dropped.
    pub(super) async fn run(mut self, resyncs: &mut mpsc::Receiver<Resync>) {
        let Some(source) = self.endpoints.events.clone() else {
            return self.refuse(resyncs).await;
        };
        let mut pause = RETRY_FIRST;
        loop {
            match subscribe(&source).await {
                Ok(socket) => {
                    pause = RETRY_FIRST;
                    self.follow(socket, &source, resyncs).await;
                    // A process that was replaced between two probes has shown nothing else yet.
                    self.doubt.raise();
                }
                Err(error) => {
                    tracing::debug!(worker = %self.worker, %source, error, "kv events cannot be subscribed to");
                }
            }
            // An order that comes now is answered by the replay after the next subscription, or is refused in time.
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(self.retry_cap);
        }
    }

    /// An engine without events has no replay either.
    async fn refuse(&self, resyncs: &mut mpsc::Receiver<Resync>) {
        while resyncs.recv().await.is_some() {
            self.resync_done(false).await;
        }
        std::future::pending().await
    }

    /// Reads one subscription to its end.
    async fn follow(&mut self, mut socket: SubSocket, source: &EventSource, resyncs: &mut mpsc::Receiver<Resync>) {
        let mut monitor = socket.monitor();
        // What was published before the subscription.
        self.replay(self.next).await;
        loop {
            tokio::select! {
                message = socket.recv() => match message {
                    Ok(message) => self.published(&message).await,
                    Err(error) => {
                        tracing::debug!(worker = %self.worker, %error, "the subscription to kv events broke");
                        return;
                    }
                },
                event = monitor.next() => match (event, source) {
                    // A socket of ours stays; whoever left may have published in vain before coming back.
                    (Some(SocketEvent::Accepted(..)), EventSource::Bind(_)) => drop(self.replay(self.next).await),
                    (Some(SocketEvent::Disconnected(_)), EventSource::Bind(_)) => {}
                    (None | Some(SocketEvent::Disconnected(_) | SocketEvent::Closed), _) => return,
                    (Some(_), _) => {}
                },
                order = resyncs.recv() => match order {
                    Some(Resync { from_sequence }) => {
                        let complete = self.replay(from_sequence).await;
                        self.resync_done(complete).await;
                    }
                    None => std::future::pending().await,
                },
            }
        }
    }

    async fn published(&mut self, message: &ZmqMessage) {
        let frame = match Frame::decode(&frames(message)) {
            Ok(frame) => frame,
            Err(error) => return tracing::warn!(worker = %self.worker, %error, "a kv event message is malformed"),
        };
        if self.is_fenced() || self.is_of_another_rank(&frame) {
            return;
        }
        // A number that was had is what a replay brought already, or a new life, whose feed begins anew.
        if frame.sequence < self.next {
            return self.had_before(&frame);
        }
        if frame.sequence > self.next {
            self.telemetry.kv_gap(self.worker);
            self.replay(self.next).await;
        }
        if frame.sequence >= self.next {
            self.apply(&frame).await;
        }
    }

    /// A batch that is a copy is as old as the first one. A newer one under a number that was had is of another life,
    /// which the probes are to meet: until then nothing of it may be taken for this one's.
    fn had_before(&mut self, frame: &Frame) {
        let made_s = EventBatch::decode(&frame.payload).map_or(0.0, |batch| batch.timestamp);
        if made_s > self.last_made_s {
            tracing::info!(worker = %self.worker, sequence = frame.sequence, "the sequence of kv events began anew");
            self.fenced_until = Some(Instant::now() + RESTART_DOUBT);
            self.doubt.sequence_began_anew();
        }
    }

    fn is_fenced(&self) -> bool {
        self.fenced_until.is_some_and(|until| Instant::now() < until)
    }

    /// Whether a batch is of another engine of the same server, whose cache is another worker's.
    fn is_of_another_rank(&self, frame: &Frame) -> bool {
        let Some(rank) = self.rank else { return false };
        let batch = EventBatch::decode(&frame.payload);
        batch.is_ok_and(|batch| batch.data_parallel_rank.is_some_and(|of| of != rank))
    }

    /// Asks for all batches from a number on; says whether all that were published since came.
    async fn replay(&mut self, from: u64) -> bool {
        let Some(endpoint) = self.endpoints.replay.clone() else {
            return false;
        };
        let had = self.next;
        let mut expected = from;
        match self.replay_from(&endpoint, from, &mut expected).await {
            Ok(()) => expected >= had,
            Err(error) => {
                tracing::debug!(worker = %self.worker, endpoint, error, "a replay of kv events failed");
                false
            }
        }
    }

    /// `expected` counts the batches that came without a gap.
    async fn replay_from(&mut self, endpoint: &str, from: u64, expected: &mut u64) -> Result<(), String> {
        let mut socket = DealerSocket::new();
        within(CONNECT_TIMEOUT, socket.connect(endpoint)).await?;
        let request = ZmqMessage::try_from(Replay::encode_request(from).to_vec()).map_err(|error| error.to_string())?;
        within(CONNECT_TIMEOUT, socket.send(request)).await?;
        loop {
            let message = within(REPLAY_TIMEOUT, socket.recv()).await?;
            match Replay::decode(&frames(&message)).map_err(|error| error.to_string())? {
                Replay::End => return Ok(()),
                Replay::Batch(frame) => {
                    *expected += u64::from(frame.sequence == *expected);
                    self.apply(&frame).await;
                }
            }
        }
    }

    async fn apply(&mut self, frame: &Frame) {
        let Frame { sequence, payload, .. } = frame;
        let events = match EventBatch::decode(payload) {
            Ok(batch) => {
                self.last_made_s = batch.timestamp.max(self.last_made_s);
                batch.events
            }
            Err(error) => {
                // The batch is lost but not its number: a gap that no replay fills would be asked for again and again.
                tracing::warn!(worker = %self.worker, %error, sequence, "a batch of kv events is malformed");
                Vec::new()
            }
        };
        let before = self.mapping.unmapped();
        let updates = self.mapping.translate(&events);
        let removes = |update: &&KvUpdate| matches!(update, KvUpdate::Removed { .. } | KvUpdate::Cleared);
        let removals = updates.iter().filter(removes).count() as u64;
        self.telemetry
            .kv_batch(self.worker, self.mapping.unmapped() - before, removals);
        self.next = self.next.max(sequence + 1);
        let batch = KvBatch {
            worker: self.worker,
            epoch: self.epoch,
            sequence: *sequence,
            updates,
        };
        self.core.tell(Event::Kv(batch)).await;
    }

    async fn resync_done(&self, complete: bool) {
        self.core
            .tell(Event::ResyncDone {
                worker: self.worker,
                complete,
            })
            .await;
    }
}

async fn subscribe(source: &EventSource) -> Result<SubSocket, String> {
    let mut socket = SubSocket::new();
    match source {
        EventSource::Connect(endpoint) => within(CONNECT_TIMEOUT, socket.connect(endpoint)).await?,
        EventSource::Bind(endpoint) => drop(within(CONNECT_TIMEOUT, socket.bind(endpoint)).await?),
    }
    within(CONNECT_TIMEOUT, socket.subscribe("")).await?;
    Ok(socket)
}

async fn within<T>(timeout: Duration, work: impl Future<Output = Result<T, zeromq::ZmqError>>) -> Result<T, String> {
    match tokio::time::timeout(timeout, work).await {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer within {timeout:?}")),
    }
}

fn frames(message: &ZmqMessage) -> Vec<Bytes> {
    message.iter().cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core_task::Message;
    use crate::fleet::Fleet;
    use homing_kv::hash_blocks;
    use homing_wire::kv_events::{BlockStored, CacheEvent};
    use std::sync::Mutex;
    use zeromq::{PubSocket, RouterSocket};

    const PATIENCE: Duration = Duration::from_secs(20);

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
            fenced_until: None,
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
        assert_eq!(
            event(&mut messages).await,
            Event::ResyncDone {
                worker: WorkerId(0),
                complete: true
            }
        );
        // What the engine does not have any more is said so.
        publisher.kept.lock().unwrap().drain(..3);
        orders.send(Resync { from_sequence: 0 }).await.unwrap();
        expect_batch(&mut messages, 3).await;
        expect_batch(&mut messages, 4).await;
        assert_eq!(
            event(&mut messages).await,
            Event::ResyncDone {
                worker: WorkerId(0),
                complete: false
            }
        );
        task.abort();
    }

    #[tokio::test]
    async fn an_engine_without_events_refuses_a_replay() {
        let (core, mut messages) = CoreHandle::channel();
        let (orders, mut resyncs) = mpsc::channel(1);
        let feed = feed(KvEndpoints::default(), core);
        let task = tokio::spawn(async move { feed.run(&mut resyncs).await });
        orders.send(Resync { from_sequence: 3 }).await.unwrap();
        assert_eq!(
            event(&mut messages).await,
            Event::ResyncDone {
                worker: WorkerId(0),
                complete: false
            }
        );
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
        assert!(!feed.is_fenced(), "a copy of a batch is no new life");
        feed.published(&made(0, 20.0)).await;
        feed.published(&made(2, 21.0)).await;
        assert!(feed.is_fenced() && feed.doubt.is_raised());
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
}
