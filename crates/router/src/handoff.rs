//! The life of one request as an explicit state machine: waiting, lending and fetching (its history is on its way to the
//! worker that will prefill it), prefilling elsewhere, connecting (its KV is on its way or being
//! computed, no token yet), streaming, and yielding (cancelled, until the driver says how much reached the client).
//!
//! The machine is a pure function over all pairs of state and signal, without a wildcard, so that a new signal has to be
//! thought through for each state. It knows nothing of workers, books nothing and sends nothing: the router does what a
//! transition says. Signals of attempts that were given up never get here; the router drops them by their [`LegId`].
//!
//! Whoever cancels a decode leg waits for its resume point, even where no token was seen: one may be on its way to the
//! client in that very moment, and to start again would send it twice.
//!
//! [`LegId`]: crate::event::LegId

use crate::action::RouteError;
use crate::event::{ClientKind, FailureCause, Leg};
use crate::policies::Plan;
use crate::router::Watch;
use homing_kv::Prompt;
use homing_units::{Duration, Instant, RequestId, SessionId, WorkerId};
use std::collections::BTreeSet;

/// A request that lives.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) id: RequestId,
    pub(crate) session: SessionId,
    pub(crate) turn_index: u32,
    /// When it came.
    pub(crate) arrived: Instant,
    /// What is to be prefilled: the client's prompt, and what the client was sent already.
    pub(crate) prompt: Prompt,
    pub(crate) max_output_tokens: u32,
    /// Its priority, lower first.
    pub(crate) priority: i32,
    pub(crate) kind: ClientKind,
    pub(crate) phase: Phase,
    /// When it came into the queue, or came back there; a busy worker does not count as having left it.
    pub(crate) queued_since: Instant,
    /// The number of the present attempt, or of the next one while it waits.
    pub(crate) attempt: u32,
    /// The plan of the present attempt.
    pub(crate) placed: Option<Placed>,
    /// Since when it has a place at workers, as long as it has one.
    pub(crate) served_since: Option<Instant>,
    /// Some of the answer was sent to the client.
    pub(crate) streamed: bool,
    /// The place in the queue: waits until then at most.
    pub(crate) deadline: Instant,
    /// The pause before it was or is tried again.
    pub(crate) pause: Duration,
    /// Not tried again before this.
    pub(crate) not_before: Instant,
    /// What it waits for is room, so that patience helps: the plan that it would take if there were any.
    pub(crate) wants_room: Option<Plan>,
    /// Attempts that failed for other reasons than a busy worker.
    pub(crate) failures: u32,
    /// Of those, failed transfers.
    pub(crate) transfer_failures: u32,
    /// The stretch of it that is being timed.
    pub(crate) watch: Option<Watch>,
    /// Workers that failed it.
    pub(crate) avoid: BTreeSet<WorkerId>,
}

impl Request {
    /// One that has come now and waits for its first plan, of a session that had so many turns before.
    pub(crate) fn new(now: Instant, id: RequestId, (session, turn_index): (SessionId, u32), prompt: Prompt) -> Self {
        Self {
            id,
            session,
            turn_index,
            arrived: now,
            prompt,
            max_output_tokens: u32::MAX,
            priority: 0,
            kind: ClientKind::default(),
            phase: Phase::Waiting,
            queued_since: now,
            attempt: 0,
            placed: None,
            served_since: None,
            streamed: false,
            deadline: now,
            pause: Duration::ZERO,
            not_before: now,
            wants_room: None,
            failures: 0,
            transfer_failures: 0,
            watch: None,
            avoid: BTreeSet::new(),
        }
    }
}

/// A plan under way, with what it was made on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed {
    pub(crate) plan: Plan,
    /// Prompt tokens that were expected in the decode worker's cache.
    pub(crate) decode_cached_tokens: u32,
    /// Those of them that were expected without its sketches, where it tells any.
    pub(crate) decode_untold_tokens: Option<u32>,
    /// Prompt tokens that were expected in the prefill worker's cache.
    pub(crate) prefill_cached_tokens: u32,
}

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// In the router's queue.
    Waiting,
    /// The worker that holds its history is asked to hold it for the prefill worker.
    Lending,
    /// The prefill worker pulls its history.
    Fetching,
    /// Its prefill leg is under way; its decode worker has a place for it.
    Prefilling,
    /// Its decode leg was sent and has not answered.
    Connecting,
    /// Its answer is being sent.
    Streaming,
    /// Its decode leg was cancelled; how much of its answer reached the client is to be said.
    Yielding(Failure),
}

/// Something that happened to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    /// It was placed, with this leg first.
    Placed {
        first: Leg,
    },
    /// A leg that answers no client has ended well.
    Done(Leg),
    FirstToken,
    Finished,
    /// A leg that answers no client has failed.
    Failed(Leg, FailureCause),
    DecodeFailed(FailureCause, Cut),
    /// The worker of this leg was lost.
    Lost(Leg),
    /// The phase has taken too long.
    Overdue,
    ClientGone,
}

/// Where the answer was cut, as far as the machine cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Another attempt may go on.
    Resumable,
    /// Going on would not be exact.
    Final,
}

/// Why an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) reason: Reason,
    /// Whose.
    pub(crate) leg: Leg,
}

/// What went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The worker takes no more.
    Busy,
    /// The KV did not arrive.
    Transfer,
    /// The worker answered with an error.
    Engine,
    /// The worker took too long.
    Slow,
    /// The worker cannot be reached.
    Unreachable,
    /// The worker was lost, as probes or a new life told.
    Lost,
    /// The request itself is refused.
    Invalid,
}

/// What a signal leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Transition {
    /// Legs to cancel, first.
    pub(crate) cancels: Cancels,
    /// Then.
    pub(crate) next: Next,
}

/// Legs to cancel; a leg that the plan does not have is no matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cancels {
    Nothing,
    Lend,
    Fetch,
    /// The lend and the fetch leg.
    History,
    Prefill,
    Decode,
    /// The prefill and the decode leg.
    Both,
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing.
    Stay,
    /// Send this leg.
    Send(Leg),
    /// The first token is there.
    Stream,
    /// Wait for the resume point of the cancelled decode leg.
    Yield(Failure),
    /// Nobody said where to resume: from the start if nothing was sent, not at all otherwise.
    Presume(Failure),
    /// Plan again, or give up if the budget is spent.
    Replan(Failure),
    /// Look at the queue again: its pause or its patience is over.
    Retry,
    /// End it with an error.
    Reject(Failure),
    /// It has ended well.
    Finish,
    /// Nobody wants it any more.
    Drop,
}

/// What a signal does to a request in a phase: all pairs, a function for each phase.
pub(crate) const fn step(phase: Phase, signal: Signal) -> Transition {
    match phase {
        Phase::Waiting => waiting(signal),
        Phase::Lending => lending(signal),
        Phase::Fetching => fetching(signal),
        Phase::Prefilling => prefilling(signal),
        Phase::Connecting => connecting(signal),
        Phase::Streaming => streaming(signal),
        Phase::Yielding(failure) => yielding(signal, failure),
    }
}

/// No leg is out, so nothing but time and its client can touch it.
const fn waiting(signal: Signal) -> Transition {
    match signal {
        Signal::Placed { first } => then(Next::Send(first)),
        Signal::Overdue => then(Next::Retry),
        Signal::ClientGone => then(Next::Drop),
        Signal::Done(_)
        | Signal::FirstToken
        | Signal::Finished
        | Signal::Failed(..)
        | Signal::DecodeFailed(..)
        | Signal::Lost(_) => then(Next::Stay),
    }
}

/// The worker that holds the history was asked to hold it for the prefill worker.
const fn lending(signal: Signal) -> Transition {
    match signal {
        Signal::Done(Leg::Lend) => then(Next::Send(Leg::Fetch)),
        Signal::Failed(leg, cause) => then(without_history(Reason::of_history(cause), leg)),
        Signal::Lost(leg) => Cancels::Lend.then(without_history(Reason::Lost, leg)),
        Signal::Overdue => Cancels::Lend.then(without_history(Reason::Transfer, Leg::Lend)),
        Signal::ClientGone => Cancels::Lend.then(Next::Drop),
        Signal::Placed { .. }
        | Signal::Done(Leg::Fetch | Leg::Prefill | Leg::Decode)
        | Signal::FirstToken
        | Signal::Finished
        | Signal::DecodeFailed(..) => then(Next::Stay),
    }
}

/// The prefill worker pulls the history. Its lender holds it until then, so it is told of whatever ends this phase early.
const fn fetching(signal: Signal) -> Transition {
    match signal {
        Signal::Done(Leg::Fetch) => then(Next::Send(Leg::Prefill)),
        Signal::Failed(Leg::Lend, cause) => Cancels::Fetch.then(without_history(Reason::of_history(cause), Leg::Lend)),
        Signal::Failed(leg, cause) => Cancels::Lend.then(without_history(Reason::of_history(cause), leg)),
        Signal::Lost(leg) => Cancels::History.then(without_history(Reason::Lost, leg)),
        Signal::Overdue => Cancels::History.then(without_history(Reason::Transfer, Leg::Fetch)),
        Signal::ClientGone => Cancels::History.then(Next::Drop),
        Signal::Placed { .. }
        | Signal::Done(Leg::Lend | Leg::Prefill | Leg::Decode)
        | Signal::FirstToken
        | Signal::Finished
        | Signal::DecodeFailed(..) => then(Next::Stay),
    }
}

/// The history does not come. Nothing of the request itself was tried yet, so that it is never refused for it: whatever
/// does not say that a worker is gone or busy is a transfer that failed, and the request is planned again.
const fn without_history(reason: Reason, leg: Leg) -> Next {
    Next::Replan(Failure { reason, leg })
}

/// The prefill leg is out; the decode leg has a place. Drivers of engines whose prefill workers push (SGLang) have sent it
/// along, since neither leg gets anywhere without the other, and so it can fail already.
const fn prefilling(signal: Signal) -> Transition {
    match signal {
        Signal::Done(Leg::Prefill) => then(Next::Send(Leg::Decode)),
        Signal::Failed(Leg::Prefill, cause) => then(failed(cause, Leg::Prefill)),
        Signal::Lost(leg @ (Leg::Fetch | Leg::Prefill | Leg::Decode)) => Cancels::Prefill.then(Next::Replan(Failure {
            reason: Reason::Lost,
            leg,
        })),
        Signal::Overdue => Cancels::Prefill.then(Next::Replan(Failure {
            reason: Reason::Slow,
            leg: Leg::Prefill,
        })),
        Signal::DecodeFailed(cause, cut) => Cancels::Prefill.then(cut_off(cause, cut)),
        Signal::ClientGone => Cancels::Prefill.then(Next::Drop),
        Signal::Placed { .. }
        | Signal::Done(_)
        | Signal::FirstToken
        | Signal::Finished
        | Signal::Failed(..)
        | Signal::Lost(Leg::Lend) => then(Next::Stay),
    }
}

/// The decode leg is out. A prefill worker may still hold KV for it, so it is told of whatever ends this phase early.
const fn connecting(signal: Signal) -> Transition {
    match signal {
        Signal::FirstToken => then(Next::Stream),
        Signal::Finished => then(Next::Finish),
        Signal::DecodeFailed(cause, cut) => Cancels::Prefill.then(cut_off(cause, cut)),
        Signal::Failed(Leg::Prefill, cause) => Cancels::Decode.then(Next::Yield(Failure {
            reason: Reason::of(cause),
            leg: Leg::Prefill,
        })),
        Signal::Lost(leg @ (Leg::Fetch | Leg::Prefill | Leg::Decode)) => Cancels::Both.then(Next::Yield(Failure {
            reason: Reason::Lost,
            leg,
        })),
        Signal::Overdue => Cancels::Both.then(Next::Yield(Failure {
            reason: Reason::Slow,
            leg: Leg::Decode,
        })),
        Signal::ClientGone => Cancels::Both.then(Next::Drop),
        Signal::Placed { .. } | Signal::Done(_) | Signal::Failed(..) | Signal::Lost(Leg::Lend) => then(Next::Stay),
    }
}

/// The KV has arrived and the answer is on its way: the prefill leg matters no more.
const fn streaming(signal: Signal) -> Transition {
    match signal {
        Signal::Finished => then(Next::Finish),
        Signal::DecodeFailed(cause, cut) => then(cut_off(cause, cut)),
        Signal::Lost(Leg::Decode) => Cancels::Decode.then(Next::Yield(Failure {
            reason: Reason::Lost,
            leg: Leg::Decode,
        })),
        Signal::Overdue => Cancels::Decode.then(Next::Yield(Failure {
            reason: Reason::Slow,
            leg: Leg::Decode,
        })),
        Signal::ClientGone => Cancels::Decode.then(Next::Drop),
        Signal::Placed { .. }
        | Signal::Done(_)
        | Signal::FirstToken
        | Signal::Failed(..)
        | Signal::Lost(Leg::Lend | Leg::Fetch | Leg::Prefill) => then(Next::Stay),
    }
}

/// All legs are cancelled already. If the answer turns out to be complete, the cancel came too late, and all is well.
const fn yielding(signal: Signal, failure: Failure) -> Transition {
    match signal {
        Signal::Finished => then(Next::Finish),
        Signal::DecodeFailed(_, Cut::Resumable) => then(Next::Replan(failure)),
        Signal::DecodeFailed(_, Cut::Final) => then(Next::Reject(failure)),
        Signal::Overdue => then(Next::Presume(failure)),
        Signal::ClientGone => then(Next::Drop),
        Signal::Placed { .. } | Signal::Done(_) | Signal::FirstToken | Signal::Failed(..) | Signal::Lost(_) => {
            then(Next::Stay)
        }
    }
}

/// A transition that cancels nothing.
const fn then(next: Next) -> Transition {
    Cancels::Nothing.then(next)
}

/// A leg failed before anything of its answer was sent.
const fn failed(cause: FailureCause, leg: Leg) -> Next {
    let failure = Failure {
        reason: Reason::of(cause),
        leg,
    };
    if matches!(cause, FailureCause::Invalid) {
        Next::Reject(failure)
    } else {
        Next::Replan(failure)
    }
}

/// A decode leg failed, and said where.
const fn cut_off(cause: FailureCause, cut: Cut) -> Next {
    match cut {
        Cut::Resumable => failed(cause, Leg::Decode),
        Cut::Final => Next::Reject(Failure {
            reason: Reason::of(cause),
            leg: Leg::Decode,
        }),
    }
}

impl Phase {
    /// Whether legs of it are out, so that it has a booking.
    pub(crate) const fn is_booked(self) -> bool {
        match self {
            Self::Lending | Self::Fetching | Self::Prefilling | Self::Connecting | Self::Streaming => true,
            Self::Waiting | Self::Yielding(_) => false,
        }
    }

    /// Its name.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Lending => "lending",
            Self::Fetching => "fetching",
            Self::Prefilling => "prefilling",
            Self::Connecting => "connecting",
            Self::Streaming => "streaming",
            Self::Yielding(_) => "yielding",
        }
    }
}

impl Failure {
    /// In words: `leg: reason`.
    pub(crate) fn describe(self) -> String {
        let reason = match self.reason {
            Reason::Busy => "busy",
            Reason::Transfer => "transfer failed",
            Reason::Engine => "engine error",
            Reason::Slow => "too slow",
            Reason::Unreachable => "unreachable",
            Reason::Lost => "worker lost",
            Reason::Invalid => "refused",
        };
        format!("{}: {reason}", self.leg.as_str())
    }
}

impl Reason {
    pub(crate) const fn of(cause: FailureCause) -> Self {
        match cause {
            FailureCause::Unreachable => Self::Unreachable,
            FailureCause::Busy => Self::Busy,
            FailureCause::Transfer => Self::Transfer,
            FailureCause::Engine => Self::Engine,
            FailureCause::Invalid => Self::Invalid,
        }
    }

    /// The same for a leg that only moves a history. What a worker refuses there the router has asked for, not the client.
    pub(crate) const fn of_history(cause: FailureCause) -> Self {
        match cause {
            FailureCause::Unreachable => Self::Unreachable,
            FailureCause::Busy => Self::Busy,
            FailureCause::Transfer | FailureCause::Engine | FailureCause::Invalid => Self::Transfer,
        }
    }

    /// What the client is told when this was the last straw.
    pub(crate) const fn error(self, retry_after: Duration) -> RouteError {
        match self {
            Self::Busy => RouteError::Overloaded { retry_after },
            Self::Transfer => RouteError::TransferFailed,
            Self::Engine | Self::Slow => RouteError::EngineFailed,
            Self::Unreachable | Self::Lost => RouteError::WorkerLost,
            Self::Invalid => RouteError::Refused,
        }
    }
}

impl Cancels {
    const fn then(self, next: Next) -> Transition {
        Transition { cancels: self, next }
    }

    pub(crate) const fn contains(self, leg: Leg) -> bool {
        match leg {
            Leg::Lend => matches!(self, Self::Lend | Self::History),
            Leg::Fetch => matches!(self, Self::Fetch | Self::History),
            Leg::Prefill => matches!(self, Self::Prefill | Self::Both),
            Leg::Decode => matches!(self, Self::Decode | Self::Both),
        }
    }
}

#[cfg(test)]
#[path = "handoff_tests.rs"]
mod tests;
