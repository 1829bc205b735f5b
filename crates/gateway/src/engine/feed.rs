//! One engine's KV events, followed for one of its lives: subscribed to, mapped to own hashes, replayed where missed.
//!
//! Batches are mapped strictly in order, because a block can only be mapped after its parent: where a sequence number is
//! missing, the engine is asked for it before what follows is mapped. What its replay no longer has is passed over; the
//! core sees that gap by the numbers and says what follows from it. Where the numbers begin anew the core is told, and nothing
//! is passed on until it asks for a replay or the feed is ended for another life.

use super::mapping::HashMapping;
use super::sockets::{Replaying, frames, subscribe};
use super::source::EventSource;
use super::{Doubt, Resync};
use crate::core_task::CoreHandle;
use crate::fleet::KvEndpoints;
use crate::telemetry::Telemetry;
use futures::StreamExt;
use homing_router::event::{Event, KvBatch, KvUpdate};
use homing_units::{BootEpoch, WorkerId};
use homing_wire::kv_events::{EventBatch, Frame};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use zeromq::{Socket, SocketEvent, SocketRecv, SubSocket, ZmqMessage};

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
    /// The engine of a data-parallel server whose batches these are; `None` where there is only one.
    pub(super) rank: Option<u32>,
    /// Where what speaks of another life is told.
    pub(super) doubt: Arc<Doubt>,
    /// When the engine made the last batch that was mapped, in its own seconds since 1970.
    pub(super) last_made_s: f64,
    /// The numbers began anew: what comes may be of a life that is not known yet.
    pub(super) began_anew: bool,
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
                        self.began_anew = false;
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
        if self.began_anew || self.is_of_another_rank(&frame) {
            return;
        }
        // A number that was had is what a replay brought already, or a new life, whose feed begins anew.
        if frame.sequence < self.next {
            return self.had_before(&frame).await;
        }
        if frame.sequence > self.next {
            self.telemetry.kv_gap(self.worker);
            self.replay(self.next).await;
        }
        if frame.sequence >= self.next {
            self.apply(&frame).await;
        }
    }

    /// A batch that is a copy is as old as the first one. A newer one under a number that was had is of another life, or
    /// of none that anybody knows.
    async fn had_before(&mut self, frame: &Frame) {
        let made_s = EventBatch::decode(&frame.payload).map_or(0.0, |batch| batch.timestamp);
        if made_s > self.last_made_s {
            tracing::info!(worker = %self.worker, sequence = frame.sequence, "the sequence of kv events began anew");
            self.began_anew = true;
            let (worker, epoch) = (self.worker, self.epoch);
            self.core.tell(Event::KvRestarted { worker, epoch }).await;
        }
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
        let mut replaying = Replaying::begin(endpoint, from).await?;
        while let Some(frame) = replaying.next().await? {
            *expected += u64::from(frame.sequence == *expected);
            self.apply(&frame).await;
        }
        Ok(())
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

#[cfg(test)]
#[path = "feed_tests.rs"]
mod tests;
