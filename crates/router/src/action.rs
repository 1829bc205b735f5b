//! What the router core asks for. The driver carries actions out in order and decides nothing itself.

use crate::event::LegId;
use homing_units::{Duration, RequestId, SessionId, WorkerId};
use serde::{Deserialize, Serialize};

/// Something to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Action {
    /// How a turn will be served; comes before its first [`Action::Dispatch`].
    Decided(Box<Decision>),
    /// Send a leg to a worker.
    Dispatch(Dispatch),
    /// Give a leg up: close its connection, and let go of KV that it holds for its other leg. The answer of a given-up
    /// prefill leg matters no more. For a decode leg the driver says how much of the answer reached the client, with
    /// [`crate::event::Event::LegFailed`] and its `resume`: the request may go on elsewhere. Where no such answer comes within
    /// `Clocks::cancel_answer`, or the request is over, nothing more is expected.
    Cancel {
        /// Which leg.
        leg: LegId,
        /// Where it runs.
        worker: WorkerId,
    },
    /// End the request with an error, as an error body or, where its stream has begun, as an error event.
    Reject {
        /// The request.
        request: RequestId,
        /// What to tell the client.
        error: RouteError,
    },
    /// Ask a worker for its KV events from this sequence number on, then say [`crate::event::Event::ResyncDone`].
    Resync {
        /// The worker.
        worker: WorkerId,
        /// First sequence number that is missing.
        from_sequence: u64,
    },
    /// Ask a worker who it is, and report it with [`crate::event::Event::Health`]: it may live another life than the one that is known.
    Identify {
        /// The worker.
        worker: WorkerId,
    },
    /// A worker's state has changed; for logs and metrics.
    WorkerState {
        /// The worker.
        worker: WorkerId,
        /// Its new state.
        state: WorkerState,
    },
    /// KV is about to be carried though no client waits for it; comes before its first [`Action::Dispatch`].
    Errand(Box<Errand>),
    /// An errand is over: no leg of it is out any more, and nothing that is still said of it matters.
    ErrandEnded {
        /// The errand.
        errand: RequestId,
        /// How it ended.
        outcome: ErrandOutcome,
    },
}

/// A leg to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dispatch {
    /// Which leg of which attempt.
    pub leg: LegId,
    /// Where to.
    pub worker: WorkerId,
    /// What happens with its KV.
    pub kv: KvUse,
    /// Only so many first tokens of the prompt, whole blocks, are the leg's own prompt ([`Leg::Lend`], [`Leg::Fetch`]); `None`
    /// where it is the whole prompt. The prompt of an [`Errand`]'s legs is that of the turn that it names.
    ///
    /// [`Leg::Lend`]: crate::event::Leg::Lend
    /// [`Leg::Fetch`]: crate::event::Leg::Fetch
    pub prefix_tokens: Option<u32>,
}

/// The history that a prefill worker pulls from the worker that holds it, before it prefills what follows: a heavy tail is
/// computed elsewhere without the history being computed twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetch {
    /// Who holds it, and lends it.
    pub from: WorkerId,
    /// So many first tokens of the prompt, whole blocks.
    pub tokens: u32,
}

/// What happens with a leg's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvUse {
    /// The worker prefills what it lacks (`append`, `local`, and an errand without a worker to carry from).
    Local,
    /// Hold the KV for the leg of the same attempt that pulls from this one (`Lend`, `Prefill`).
    Export,
    /// Pull from the leg of the same attempt that holds the KV, with the parameters of its answer (`Fetch`, `Decode`).
    Import {
        /// Where that leg ran.
        from: WorkerId,
    },
}

/// KV that is carried to a worker while no client waits for it: the first whole blocks of a prompt that some turn had. Its legs are
/// [`Leg::Lend`] at the worker that holds them and [`Leg::Fetch`] at the one that gets them, of attempt 0; the latter alone, with
/// [`KvUse::Local`], where it computes them itself. Each generates one token, which is nobody's. A driver that does not have the
/// prompt any more says that its first leg has failed as [`FailureCause::Invalid`].
///
/// [`Leg::Lend`]: crate::event::Leg::Lend
/// [`Leg::Fetch`]: crate::event::Leg::Fetch
/// [`FailureCause::Invalid`]: crate::event::FailureCause::Invalid
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Errand {
    /// What its legs are known by: at least [`Errand::FIRST_ID`], and used once.
    pub errand: RequestId,
    /// Why it is carried.
    pub kind: ErrandKind,
    /// The session whose prompt begins with it.
    pub session: SessionId,
    /// The turn whose prompt begins with it, the latest of that session.
    pub of: RequestId,
    /// So many first tokens of that prompt, whole blocks.
    pub tokens: u32,
    /// Who holds them, and lends them; `None` where they are computed at the destination.
    pub from: Option<WorkerId>,
    /// Who gets them.
    pub to: WorkerId,
}

impl Errand {
    /// Ids from here on are those of errands; drivers number requests below.
    pub const FIRST_ID: RequestId = RequestId(1 << 48);

    /// Whether the copy of whoever lends it becomes the first to go there, as when a session migrates.
    #[must_use]
    pub const fn moves(&self) -> bool {
        matches!(self.kind, ErrandKind::Gap) && self.from.is_some()
    }
}

/// Why KV is carried while nobody waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ErrandKind {
    /// A session's KV goes to where its next turn will better be served, in the gap before that.
    Gap,
    /// Boilerplate that many sessions show goes to a decode worker that lacks it.
    Base,
}

impl ErrandKind {
    /// Its name in logs and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Gap => "gap",
            Self::Base => "base",
        }
    }
}

/// How an errand ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ErrandOutcome {
    /// The KV is there.
    Landed,
    /// It did not come.
    Failed,
    /// It was given up for a client's turn.
    Dropped,
}

impl ErrandOutcome {
    /// Its name in logs and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Landed => "landed",
            Self::Failed => "failed",
            Self::Dropped => "dropped",
        }
    }
}

/// How a turn is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Path {
    /// The decode worker holds the prefix and prefills the tail itself.
    Append,
    /// A prefill worker prefills, the decode worker receives the KV it lacks, for the first time.
    Seed,
    /// The same because the KV was evicted.
    Reseed,
    /// Another decode worker pulls the session's KV from the one that holds it, then appends.
    Migrate,
    /// A worker prefills everything itself.
    Local,
}

impl Path {
    /// Its name in headers, metrics and reports.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Append => "append",
            Self::Seed => "seed",
            Self::Reseed => "reseed",
            Self::Migrate => "migrate",
            Self::Local => "local",
        }
    }
}

/// How a turn will be served, and what else was considered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// The request.
    pub request: RequestId,
    /// Which plan for it this is.
    pub attempt: u32,
    /// The session it was taken for.
    pub session: SessionId,
    /// Turns of this session before this one.
    pub turn_index: u32,
    /// How.
    pub path: Path,
    /// Where its prefill leg goes, if it has one.
    pub prefill: Option<WorkerId>,
    /// Where its decode leg goes.
    pub decode: WorkerId,
    /// What the prefill worker pulls before it prefills, if anything.
    pub fetch: Option<Fetch>,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Prompt tokens expected in the decode worker's cache.
    pub expected_cached_tokens: u32,
    /// Whether the decode worker may keep the session's KV for its next turn: a driver whose engines give sessions a place
    /// submits the decode leg without its session where this is `false`.
    pub keeps_kv: bool,
    /// How long it waited in the router's queue.
    pub queued: Duration,
    /// How long it is expected to take from its first leg to the first token, where the policy reckons in seconds.
    pub expected_ttft: Option<Duration>,
    /// What was considered, the chosen one first.
    pub candidates: Vec<Candidate>,
    /// Why this one, in a few words.
    pub reason: String,
}

/// A plan that was considered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// How.
    pub path: Path,
    /// Where its prefill leg would go.
    pub prefill: Option<WorkerId>,
    /// Where its decode leg would go.
    pub decode: WorkerId,
    /// What the prefill worker would pull before it prefills, if anything.
    pub fetch: Option<Fetch>,
    /// Prompt tokens resident at the decode worker.
    pub resident_tokens: u32,
    /// The policy's score; lower is better. Its unit is the policy's (seconds for `homing`).
    pub score: f64,
    /// Why it is out of the question, if it is.
    pub forbidden: Option<String>,
}

/// Why a request ends with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouteError {
    /// The router's queue is full (429, `Retry-After`).
    Overloaded {
        /// When to try again.
        retry_after: Duration,
    },
    /// It waited in the queue for longer than its deadline (503).
    QueueTimeout,
    /// No worker that could serve it is alive (503).
    NoWorker,
    /// No worker can hold prompt and output (400).
    ContextTooLong {
        /// The longest that any worker takes, in tokens.
        limit: u32,
    },
    /// The KV did not reach the decode worker, and the retry budget is spent (502).
    TransferFailed,
    /// The worker was lost, and the retry budget is spent or going on would not be exact (502).
    WorkerLost,
    /// The worker answered with an error of its own, and the retry budget is spent (502).
    EngineFailed,
    /// The worker refused the request; its own answer is passed on.
    Refused,
}

impl RouteError {
    /// Its kind in `errors.by_kind` of a run and in the `code` of an error body.
    #[must_use]
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Overloaded { .. } => "overloaded",
            Self::QueueTimeout => "queue_timeout",
            Self::NoWorker => "no_worker",
            Self::ContextTooLong { .. } => "context_too_long",
            Self::TransferFailed => "transfer_failed",
            Self::WorkerLost => "worker_lost",
            Self::EngineFailed => "engine_failed",
            Self::Refused => "refused",
        }
    }
}

/// What the router thinks of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkerState {
    /// Alive; its KV is known from its events.
    Exact,
    /// Alive; its KV is predicted, or events are missing.
    Degraded,
    /// It missed probes or broke connections: no new work until a probe succeeds.
    Suspect,
    /// Taken for dead: its work was given to others. A probe that succeeds brings it back, with nothing in its cache.
    Dead,
}
