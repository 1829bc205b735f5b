//! How everyone else reaches the engine thread.

use super::{Command, ExportChunk, OPERATOR_CALLS_MAX, PullSource, RELEASES_MAX, Renewal, RequestEvent, Submission};
use crate::metrics::Status;
use crate::request::Request;
use crate::transfers::ExportView;
use arc_swap::ArcSwap;
use bytes::Bytes;
use homing_engine::api::ImportError;
use homing_units::RequestId;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::{Semaphore, oneshot};

/// The engine thread has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the engine has stopped")]
pub struct EngineStopped;

/// Why a request was not handed to the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// As many requests are alive as the worker takes.
    #[error("`{live}` requests are being served, expected fewer")]
    Full {
        /// How many.
        live: usize,
    },
    /// The engine thread has ended.
    #[error(transparent)]
    Stopped(#[from] EngineStopped),
}

/// Reaches the engine thread. Cloning shares it.
#[derive(Clone)]
pub struct EngineHandle {
    shared: Arc<Shared>,
}

pub(super) struct Shared {
    mailbox: Sender<Command>,
    places: Arc<Semaphore>,
    places_total: usize,
    operator_calls: Arc<Semaphore>,
    releases: Arc<Semaphore>,
    next_id: AtomicU64,
    pub(super) status: ArcSwap<Status>,
    pub(super) alive: AtomicBool,
}

/// The engine thread before it runs.
pub struct EngineThread {
    pub(super) shared: Arc<Shared>,
    pub(super) mailbox: Receiver<Command>,
}

/// A handle and the thread it reaches; `places` is how many requests may be alive at once.
#[must_use]
pub fn engine_thread(places: usize) -> (EngineHandle, EngineThread) {
    let (sender, mailbox) = mpsc::channel();
    let shared = Arc::new(Shared {
        mailbox: sender,
        places: Arc::new(Semaphore::new(places)),
        places_total: places,
        operator_calls: Arc::new(Semaphore::new(OPERATOR_CALLS_MAX)),
        releases: Arc::new(Semaphore::new(RELEASES_MAX)),
        next_id: AtomicU64::new(0),
        status: ArcSwap::default(),
        alive: AtomicBool::new(true),
    });
    (
        EngineHandle { shared: shared.clone() },
        EngineThread { shared, mailbox },
    )
}

impl EngineHandle {
    /// Hands a request in that its client calls `name`; `source` is where its KV is on offer, if it is.
    ///
    /// # Errors
    /// When too many requests are alive, or the engine has stopped.
    pub fn submit(
        &self,
        name: String,
        request: Request,
        source: Option<PullSource>,
    ) -> Result<RequestStream, SubmitError> {
        let place = self.shared.places.clone().try_acquire_owned();
        let place = place.map_err(|_| SubmitError::Full {
            live: self.shared.places_total,
        })?;
        let id = RequestId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
        // Unbounded, but a request has at most `max_output_tokens` tokens and one end.
        let (sender, events) = unbounded_channel();
        let submission = Submission {
            id,
            name,
            request,
            events: sender,
            source,
            place,
        };
        self.send(Command::Submit(Box::new(submission)))?;
        Ok(RequestStream {
            id,
            events,
            handle: self.clone(),
            ended: false,
        })
    }

    /// Requests that may be alive at once.
    #[must_use]
    pub fn places(&self) -> usize {
        self.shared.places_total
    }

    /// The load and the counters after the last turn.
    #[must_use]
    pub fn status(&self) -> Arc<Status> {
        self.shared.status.load_full()
    }

    /// Whether the engine thread runs.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.shared.alive.load(Ordering::Acquire)
    }

    /// Drops every cached block that no request uses.
    ///
    /// # Errors
    /// When the engine has stopped.
    pub async fn clear_cache(&self) -> Result<(), EngineStopped> {
        let place = self
            .shared
            .operator_calls
            .clone()
            .acquire_owned()
            .await
            .map_err(|_| EngineStopped)?;
        self.ask(|reply| Command::ClearCache { _place: place, reply }).await
    }

    /// The export of a request, while it is held.
    ///
    /// # Errors
    /// When the engine has stopped.
    pub async fn find_export(&self, id: RequestId) -> Result<Option<ExportView>, EngineStopped> {
        self.ask(|reply| Command::FindExport { id, reply }).await
    }

    /// Payloads of an exported prompt's blocks from index `first` on: one or more, up to `bytes_max` together; `None` when
    /// that block is not held (any more).
    ///
    /// # Errors
    /// When the engine has stopped.
    pub async fn read_export(
        &self,
        id: RequestId,
        first: u32,
        bytes_max: usize,
    ) -> Result<Option<ExportChunk>, EngineStopped> {
        self.ask(|reply| Command::ReadExport {
            id,
            first,
            bytes_max,
            reply,
        })
        .await
    }

    /// The puller has what it wanted. Says whether the export was held until now.
    ///
    /// # Errors
    /// When the engine has stopped.
    pub async fn ack_export(&self, id: RequestId) -> Result<bool, EngineStopped> {
        self.ask(|reply| Command::AckExport { id, reply }).await
    }

    /// Gives the export up that a request of this name asked for, or the request itself while it has none yet. Says
    /// whether there was anything to give up.
    ///
    /// # Errors
    /// When the engine has stopped.
    pub async fn release_export(&self, name: String) -> Result<bool, EngineStopped> {
        let place = self.shared.releases.clone().acquire_owned().await;
        let _place = place.map_err(|_| EngineStopped)?;
        self.ask(|reply| Command::ReleaseExport { name, _place, reply }).await
    }

    /// Begins the lease anew of what a request of this name asked to be held.
    ///
    /// # Errors
    /// When the engine has stopped.
    pub async fn renew_export(&self, name: String) -> Result<Renewal, EngineStopped> {
        let place = self.shared.releases.clone().acquire_owned().await;
        let _place = place.map_err(|_| EngineStopped)?;
        self.ask(|reply| Command::RenewExport { name, _place, reply }).await
    }

    /// Stores pulled blocks from index `first` of the prompt on.
    ///
    /// # Errors
    /// `TimedOut` when the import was given up, `Corrupt` when a payload is not its block's, `Unreachable` when the
    /// engine has stopped.
    pub async fn write_import(&self, id: RequestId, first: u32, payloads: Vec<Bytes>) -> Result<(), ImportError> {
        let asked = self
            .ask(|reply| Command::WriteImport {
                id,
                first,
                payloads,
                reply,
            })
            .await;
        asked.map_err(|EngineStopped| ImportError::Unreachable)?
    }

    /// A pull has ended.
    pub fn import_done(&self, id: RequestId, outcome: Result<(), ImportError>) {
        // A stopped engine has no import to end.
        let _ = self.send(Command::ImportDone { id, outcome });
    }

    /// Ends the engine thread: every live request is given up.
    pub fn stop(&self) {
        // Stopped already, where it fails.
        let _ = self.send(Command::Stop);
    }

    fn abort(&self, id: RequestId) {
        // A stopped engine has given it up already.
        let _ = self.send(Command::Abort(id));
    }

    fn send(&self, command: Command) -> Result<(), EngineStopped> {
        self.shared.mailbox.send(command).map_err(|_| EngineStopped)
    }

    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, EngineStopped> {
        let (reply, answer) = oneshot::channel();
        self.send(command(reply))?;
        answer.await.map_err(|_| EngineStopped)
    }
}

/// What happens to one request. Dropping it before the end gives the request up.
pub struct RequestStream {
    id: RequestId,
    events: UnboundedReceiver<RequestEvent>,
    handle: EngineHandle,
    ended: bool,
}

impl RequestStream {
    /// The worker's own id of the request.
    #[must_use]
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The next event; `None` after the last one, or when the engine has stopped before it.
    pub async fn next(&mut self) -> Option<RequestEvent> {
        if self.ended {
            return None;
        }
        let event = self.events.recv().await;
        self.ended = !matches!(event, Some(RequestEvent::Token(_)));
        event
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        if !self.ended {
            self.handle.abort(self.id);
        }
    }
}

/// An answer that waits until the figures say what it says: whoever gets it may look at them at once.
pub(super) enum Reply {
    /// The cache is cleared.
    Cleared(oneshot::Sender<()>),
    /// Whether there was an export that ended.
    OfExport(oneshot::Sender<bool>, bool),
    /// What a renewal came to.
    Renewed(oneshot::Sender<Renewal>, Renewal),
}

impl Reply {
    pub(super) fn send(self) {
        // A caller that does not wait any more needs no answer.
        match self {
            Self::Cleared(reply) => drop(reply.send(())),
            Self::OfExport(reply, was_there) => drop(reply.send(was_there)),
            Self::Renewed(reply, renewal) => drop(reply.send(renewal)),
        }
    }
}
