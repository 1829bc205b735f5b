//! One engine's KV events, followed for one of its lives: subscribed to, mapped to own hashes, replayed where missed.
//!
//! Batches are mapped strictly in order, because a block can only be mapped after its parent: where a sequence number is
//! missing, the engine is asked for it before what follows is mapped. What its replay no longer has is passed over; the
//! core sees that gap by the numbers and says what follows from it.

use super::Resync;
use super::mapping::HashMapping;
use crate::core_task::CoreHandle;
use crate::fleet::KvEndpoints;
use crate::telemetry::Telemetry;
use bytes::Bytes;
use futures::StreamExt;
use homing_router::event::{Event, KvBatch};
use homing_units::{BootEpoch, WorkerId};
use homing_wire::kv_events::{EventBatch, Frame, Replay};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use zeromq::{DealerSocket, Socket, SocketEvent, SocketRecv, SocketSend, SubSocket, ZmqMessage};

/// How long making a connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long an engine may take for the next message of a replay.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(5);
/// First pause before a lost subscription is tried again.
const RETRY_FIRST: Duration = Duration::from_millis(100);

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
}

impl Feed {
    /// Follows the events until it is dropped.
    pub(super) async fn run(mut self, resyncs: &mut mpsc::Receiver<Resync>) {
        let Some(endpoint) = self.endpoints.events.clone() else {
            return self.refuse(resyncs).await;
        };
        let mut pause = RETRY_FIRST;
        loop {
            match subscribe(&endpoint).await {
                Ok(socket) => {
                    pause = RETRY_FIRST;
                    self.follow(socket, resyncs).await;
                }
                Err(error) => {
                    tracing::debug!(worker = %self.worker, endpoint, error, "kv events cannot be subscribed to");
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
    async fn follow(&mut self, mut socket: SubSocket, resyncs: &mut mpsc::Receiver<Resync>) {
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
                event = monitor.next() => if matches!(event, None | Some(SocketEvent::Disconnected(_) | SocketEvent::Closed)) {
                    return;
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
        // A number that was had is what a replay brought already, or a new life, whose feed begins anew.
        if frame.sequence < self.next {
            return;
        }
        if frame.sequence > self.next {
            self.replay(self.next).await;
        }
        if frame.sequence >= self.next {
            self.apply(&frame).await;
        }
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
            Ok(batch) => batch.events,
            Err(error) => {
                // The batch is lost but not its number: a gap that no replay fills would be asked for again and again.
                tracing::warn!(worker = %self.worker, %error, sequence, "a batch of kv events is malformed");
                Vec::new()
            }
        };
        let before = self.mapping.unmapped();
        let updates = self.mapping.translate(&events);
        self.telemetry.kv_batch(self.worker, self.mapping.unmapped() - before);
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

async fn subscribe(endpoint: &str) -> Result<SubSocket, String> {
    let mut socket = SubSocket::new();
    within(CONNECT_TIMEOUT, socket.connect(endpoint)).await?;
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
