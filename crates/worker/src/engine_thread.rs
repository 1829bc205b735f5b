//! The one OS thread that owns the executor, and the handle by which everyone else reaches it.
//!
//! A forward pass takes milliseconds to seconds: on an async runtime it would stall every connection. So the executor
//! lives on a thread of its own and is told what to do through a mailbox, between steps. Nobody waits for it who need
//! not: load is published as a snapshot after every turn, tokens go out through channels that never block.
//!
//! Invariant: the mailbox is bounded though its channel is not. A command is sent only by someone who holds a place:
//! a live request (at most [`EngineHandle::places`], each with a submission, an abort, and one answer of its pull at a
//! time), a transfer connection (bounded by the transfer server, one read at a time), an operator's call (one of
//! [`OPERATOR_CALLS_MAX`]), or a release or a renewal of an export (one of [`RELEASES_MAX`]).

mod handle;
mod names;

pub use handle::{EngineHandle, EngineStopped, EngineThread, RequestStream, SubmitError, engine_thread};

use crate::backend::Backend;
use crate::executor::{Effect, Ended, Executor, KvOut, Outcome, PullOrder, TokenOut};
use crate::latency::{Latencies, Moments};
use crate::metrics::{Counters, Status};
use crate::request::Request;
use crate::transfers::ExportView;
use arc_swap::ArcSwap;
use bytes::Bytes;
use handle::Reply;
use homing_engine::api::{ExportEnd, ImportError, Reject, Transfer};
use homing_kv::BlockHash;
use homing_units::{BootEpoch, Duration, Instant, RequestId};
use names::{ExportNames, Named};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

/// Commands that are taken from the mailbox before the next step.
const COMMANDS_PER_TURN: usize = 256;
/// Operator's calls (such as `/reset_prefix_cache`) at once.
pub const OPERATOR_CALLS_MAX: usize = 8;
/// Releases and renewals of exports at once; more wait for their turn.
pub const RELEASES_MAX: usize = 64;

/// Where a request's KV is on offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullSource {
    /// Host of the source's transfer server.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// The source's name of the export.
    pub request: String,
    /// The life of the source that the offer is from.
    pub epoch: BootEpoch,
    /// The hash of the whole prompt.
    pub prompt: BlockHash,
}

/// What the engine thread needs from the outside: how to pull, where KV events go.
pub trait Outside: Send {
    /// Starts to pull; the puller reports with [`EngineHandle::import_done`]. Dropping the guard cancels it.
    fn pull(&mut self, order: PullOrder, source: PullSource) -> PullGuard;

    /// Tells a source that nothing (more) will be pulled.
    fn release(&mut self, source: PullSource);

    /// Publishes a batch of cache changes.
    fn publish(&mut self, changes: Vec<KvOut>);
}

/// Cancels a pull when dropped.
#[derive(Debug)]
pub struct PullGuard(pub tokio::task::AbortHandle);

impl Drop for PullGuard {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What a renewal of an export's lease came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// It is held for so long from now on.
    Held(Duration),
    /// Its request has not come to its end: nothing is held yet, and nothing runs out.
    Computing,
    /// Its puller has it.
    Pulled,
    /// It is not held: its lease has ended, it was given up, or it never was.
    Unknown,
}

/// What happens to a request, as its client sees it.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestEvent {
    /// A token.
    Token(TokenOut),
    /// The end.
    Ended(Ended),
    /// It was not accepted.
    Rejected(Reject),
}

enum Command {
    Submit(Box<Submission>),
    Abort(RequestId),
    ReadExport {
        id: RequestId,
        first: u32,
        bytes_max: usize,
        reply: oneshot::Sender<Option<ExportChunk>>,
    },
    FindExport {
        id: RequestId,
        reply: oneshot::Sender<Option<ExportView>>,
    },
    AckExport {
        id: RequestId,
        reply: oneshot::Sender<bool>,
    },
    ReleaseExport {
        name: String,
        _place: OwnedSemaphorePermit,
        reply: oneshot::Sender<bool>,
    },
    RenewExport {
        name: String,
        _place: OwnedSemaphorePermit,
        reply: oneshot::Sender<Renewal>,
    },
    WriteImport {
        id: RequestId,
        first: u32,
        payloads: Vec<Bytes>,
        reply: oneshot::Sender<Result<(), ImportError>>,
    },
    ImportDone {
        id: RequestId,
        outcome: Result<(), ImportError>,
    },
    ClearCache {
        _place: OwnedSemaphorePermit,
        reply: oneshot::Sender<()>,
    },
    Stop,
}

/// Payloads of an export's blocks, in order.
pub type ExportChunk = Vec<Vec<u8>>;

struct Submission {
    id: RequestId,
    /// What its client calls it.
    name: String,
    request: Request,
    events: UnboundedSender<RequestEvent>,
    source: Option<PullSource>,
    place: OwnedSemaphorePermit,
}

/// The receiving side of a live request.
struct Client {
    events: UnboundedSender<RequestEvent>,
    source: Option<PullSource>,
    pull: Option<PullGuard>,
    moments: Moments,
    _place: OwnedSemaphorePermit,
}

/// Marks the engine as stopped when its thread ends, in whatever way.
struct Alive(Arc<handle::Shared>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.alive.store(false, Ordering::Release);
    }
}

impl EngineThread {
    /// Runs until it is stopped.
    pub fn run<B: Backend, O: Outside>(self, executor: Executor<B>, outside: O) {
        let _alive = Alive(self.shared.clone());
        let mut turn = Turn {
            executor,
            outside,
            clients: HashMap::new(),
            names: ExportNames::default(),
            counters: Counters::default(),
            latencies: Latencies::default(),
            step_ends: None,
            started: std::time::Instant::now(),
            answers: Vec::new(),
            stopping: false,
        };
        while !turn.stopping {
            turn.advance();
            turn.tell(&self.shared.status);
            turn.run_step();
            turn.receive(&self.mailbox);
        }
        turn.give_up_all();
        turn.tell(&self.shared.status);
    }
}

/// The thread's state.
struct Turn<B, O> {
    executor: Executor<B>,
    outside: O,
    clients: HashMap<RequestId, Client>,
    names: ExportNames,
    counters: Counters,
    latencies: Latencies,
    /// When the step that was run counts as done.
    step_ends: Option<Instant>,
    started: std::time::Instant,
    /// What is to be answered once the figures say it: at most one for each command of a turn.
    answers: Vec<Reply>,
    stopping: bool,
}

impl<B: Backend, O: Outside> Turn<B, O> {
    fn now(&self) -> Instant {
        Instant::ZERO + self.started.elapsed()
    }

    fn status(&self) -> Status {
        Status {
            load: self.executor.snapshot(),
            counters: self.counters,
            latencies: self.latencies,
        }
    }

    /// Does what is due: ends the step, hands time in.
    fn advance(&mut self) {
        let now = self.now();
        if self.step_ends.is_some_and(|end| end <= now) {
            self.step_ends = None;
            self.executor.complete_step(now);
        }
        if self.executor.poll_timeout().is_some_and(|due| due <= now) {
            self.executor.timeout(now);
        }
    }

    /// Tells everyone what happened. Whoever hears of it may look at the figures and at the KV events at once, so these
    /// come first.
    fn tell(&mut self, status: &ArcSwap<Status>) {
        loop {
            let (mut effects, mut changes) = (Vec::new(), Vec::new());
            while let Some(effect) = self.executor.poll() {
                match effect {
                    Effect::Kv(change) => changes.push(change),
                    effect => {
                        self.count(&effect);
                        effects.push(effect);
                    }
                }
            }
            if !changes.is_empty() {
                self.outside.publish(changes);
            }
            status.store(Arc::new(self.status()));
            self.answers.drain(..).for_each(Reply::send);
            if effects.is_empty() {
                return;
            }
            effects.into_iter().for_each(|effect| self.dispatch(effect));
        }
    }

    /// Runs the next step, if there is one.
    fn run_step(&mut self) {
        if self.executor.step_ready() {
            let wait = self.executor.run_step().unwrap_or_else(|error| {
                tracing::error!(%error, "a step could not be computed; its requests end");
                Duration::ZERO
            });
            self.step_ends = Some(self.now() + wait);
        }
    }

    /// Waits for commands until something is due, and takes those that came.
    fn receive(&mut self, mailbox: &Receiver<Command>) {
        let due = self.step_ends.into_iter().chain(self.executor.poll_timeout()).min();
        let first = match due.map(|due| due.saturating_since(self.now())) {
            None => mailbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(wait) if wait.is_zero() => mailbox.try_recv().map_err(|error| match error {
                TryRecvError::Empty => RecvTimeoutError::Timeout,
                TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
            }),
            Some(wait) => mailbox.recv_timeout(wait),
        };
        match first {
            Ok(command) => self.obey(command),
            Err(RecvTimeoutError::Timeout) => return,
            // Cannot happen while `EngineThread` holds a sender itself; nobody would be served any more.
            Err(RecvTimeoutError::Disconnected) => self.stopping = true,
        }
        for command in mailbox.try_iter().take(COMMANDS_PER_TURN) {
            self.obey(command);
        }
    }

    fn obey(&mut self, command: Command) {
        let now = self.now();
        match command {
            Command::Submit(submission) => self.submit(*submission),
            Command::Abort(id) => self.executor.abort(now, id),
            // A puller that does not wait for its answer any more is gone: nothing to do about it here.
            Command::FindExport { id, reply } => {
                let _ = reply.send(self.executor.export(id).cloned());
            }
            Command::ReadExport {
                id,
                first,
                bytes_max,
                reply,
            } => {
                let _ = reply.send(self.read_export(id, first, bytes_max));
            }
            Command::AckExport { id, reply } => {
                let held = self.executor.export(id).is_some();
                self.executor.export_ack(now, id);
                self.answers.push(Reply::OfExport(reply, held));
            }
            Command::ReleaseExport { name, reply, .. } => {
                let id = self.names.release(now, name);
                if let Some(id) = id {
                    self.executor.abort(now, id);
                }
                self.answers.push(Reply::OfExport(reply, id.is_some()));
            }
            Command::RenewExport { name, reply, .. } => {
                let renewal = self.renew_export(now, &name);
                self.answers.push(Reply::Renewed(reply, renewal));
            }
            Command::WriteImport {
                id,
                first,
                payloads,
                reply,
            } => {
                let _ = reply.send(self.write_import(id, first, &payloads));
            }
            Command::ImportDone { id, outcome } => {
                match (outcome, self.clients.get_mut(&id)) {
                    (Err(_), _) => self.counters.transfer_failures += 1,
                    (Ok(()), Some(client)) => client.moments.end_pull(now, &mut self.latencies),
                    (Ok(()), None) => {}
                }
                self.executor.import_done(now, id, outcome);
            }
            Command::ClearCache { reply, .. } => {
                self.executor.clear_cache(now);
                self.answers.push(Reply::Cleared(reply));
            }
            Command::Stop => self.stopping = true,
        }
    }

    fn submit(&mut self, submission: Submission) {
        let Submission {
            id,
            name,
            request,
            events,
            source,
            place,
        } = submission;
        let now = self.now();
        let client = Client {
            events,
            source,
            pull: None,
            moments: Moments::begin(now),
            _place: place,
        };
        self.clients.insert(id, client);
        let exports = request.transfer == Transfer::Export;
        let was_released = exports && self.names.was_released(now, &name);
        if exports {
            self.names.insert(id, name);
        }
        self.executor.submit(now, id, request);
        if was_released {
            self.executor.abort(now, id);
        }
    }

    fn renew_export(&mut self, now: Instant, name: &str) -> Renewal {
        let id = match self.names.find(now, name) {
            Some(Named::Request(id)) => id,
            Some(Named::Pulled) => return Renewal::Pulled,
            None => return Renewal::Unknown,
        };
        let before = self.executor.export(id).map(|view| view.lease_ends);
        match (before, self.executor.renew_export(now, id)) {
            (None, _) => Renewal::Computing,
            // It ends in this moment.
            (Some(_), None) => Renewal::Unknown,
            (Some(before), Some(ends)) => {
                self.counters.exports_renewed += u64::from(ends != before);
                Renewal::Held(ends.saturating_since(now))
            }
        }
    }

    fn read_export(&self, id: RequestId, first: u32, bytes_max: usize) -> Option<ExportChunk> {
        let mut chunk = vec![self.executor.read_export(id, first)?];
        let mut bytes = chunk[0].len();
        for index in first + 1.. {
            if bytes + self.executor.backend().payload_bytes() > bytes_max {
                break;
            }
            let Some(block) = self.executor.read_export(id, index) else {
                break;
            };
            bytes += block.len();
            chunk.push(block);
        }
        Some(chunk)
    }

    fn write_import(&mut self, id: RequestId, first: u32, payloads: &[Bytes]) -> Result<(), ImportError> {
        (first..)
            .zip(payloads)
            .try_for_each(|(index, payload)| self.executor.write_import(id, index, payload))
    }

    fn count(&mut self, effect: &Effect) {
        let now = self.now();
        match effect {
            Effect::Token(token) => {
                if let Some(client) = self.clients.get_mut(&token.id) {
                    client.moments.token(now, &mut self.latencies);
                }
            }
            Effect::Pull(order) => {
                self.counters.external_query_tokens += u64::from(order.tokens);
                if let Some(client) = self.clients.get_mut(&order.id) {
                    client.moments.begin_pull(now);
                }
            }
            Effect::Rejected { .. } => self.counters.rejected += 1,
            Effect::Ended(ended) => {
                self.counters.count(&ended.outcome);
                let well = matches!(ended.outcome, Outcome::Stop(_) | Outcome::Length);
                if let Some(client) = self.clients.get(&ended.id).filter(|_| well) {
                    client.moments.end(now, &mut self.latencies);
                }
            }
            Effect::ExportEnded { reason, .. } => match reason {
                ExportEnd::Acked => self.counters.exports_acked += 1,
                ExportEnd::LeaseEnded => self.counters.exports_expired += 1,
                ExportEnd::Aborted => self.counters.exports_released += 1,
            },
            Effect::ReleaseSource { .. } | Effect::Kv(_) => {}
        }
    }

    fn dispatch(&mut self, effect: Effect) {
        match effect {
            Effect::Token(token) => self.token(token),
            Effect::Pull(order) => self.pull(order),
            Effect::ReleaseSource { id } => {
                if let Some(source) = self.clients.get_mut(&id).and_then(|client| client.source.take()) {
                    self.outside.release(source);
                }
            }
            Effect::Rejected { id, reason } => {
                self.names.remove(id);
                self.end(id, RequestEvent::Rejected(reason));
            }
            Effect::Ended(ended) => {
                if ended.export.is_none() {
                    self.names.remove(ended.id);
                }
                self.end(ended.id, RequestEvent::Ended(ended));
            }
            // Counted and published before.
            Effect::ExportEnded {
                id,
                reason: ExportEnd::Acked,
            } => self.names.pulled(self.now(), id),
            Effect::ExportEnded { id, .. } => self.names.remove(id),
            Effect::Kv(_) => {}
        }
    }

    fn token(&mut self, token: TokenOut) {
        let id = token.id;
        let Some(client) = self.clients.get(&id) else { return };
        if client.events.send(RequestEvent::Token(token)).is_err() {
            // Its stream was dropped; the abort that came with that may still be in the mailbox.
            self.executor.abort(self.now(), id);
        }
    }

    fn pull(&mut self, order: PullOrder) {
        let id = order.id;
        let now = self.now();
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        match client.source.clone() {
            Some(source) => client.pull = Some(self.outside.pull(order, source)),
            // Whoever submits an import names its source; without one there is nothing to reach.
            None => self.executor.import_done(now, id, Err(ImportError::Unreachable)),
        }
    }

    fn end(&mut self, id: RequestId, event: RequestEvent) {
        if let Some(client) = self.clients.remove(&id) {
            // A client that is gone needs no end. Dropping the rest frees its place and cancels its pull.
            let _ = client.events.send(event);
        }
    }

    fn give_up_all(&mut self) {
        let now = self.now();
        let ids: Vec<RequestId> = self.clients.keys().copied().collect();
        ids.into_iter().for_each(|id| self.executor.abort(now, id));
    }
}

impl Counters {
    /// Counts a request that has ended.
    fn count(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Stop(_) => self.stopped += 1,
            Outcome::Length => self.reached_length += 1,
            Outcome::Aborted => self.aborted += 1,
            Outcome::ImportFailed(_) | Outcome::BackendFailed => self.failed += 1,
        }
    }
}
