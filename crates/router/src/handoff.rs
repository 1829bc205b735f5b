//! The life of one request as an explicit state machine: waiting, prefilling elsewhere, connecting (its KV is on its way or being
//! computed, no token yet), streaming, and yielding (cancelled, until the driver says how much reached the client).
//!
//! The machine is one pure function over all pairs of state and signal, without a wildcard, so that a new signal has to be
//! thought through for each state. It knows nothing of workers, books nothing and sends nothing: the router does what a
//! transition says. Signals of attempts that were given up never get here; the router drops them by their [`LegId`].
//!
//! Whoever cancels a decode leg waits for its resume point, even where no token was seen: one may be on its way to the
//! client in that very moment, and to start again would send it twice.
//!
//! [`LegId`]: crate::event::LegId

use crate::action::RouteError;
use crate::event::{FailureCause, Leg};
use crate::policies::Plan;
use homing_kv::Prompt;
use homing_units::{Duration, Instant, RequestId, SessionId, WorkerId};
use std::collections::BTreeSet;

/// A request that lives.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) id: RequestId,
    pub(crate) session: SessionId,
    pub(crate) turn_index: u32,
    /// What is to be prefilled: the client's prompt, and what the client was sent already.
    pub(crate) prompt: Prompt,
    pub(crate) max_output_tokens: u32,
    pub(crate) phase: Phase,
    /// When it came into the queue, or came back there; a busy worker does not count as having left it.
    pub(crate) queued_since: Instant,
    /// The number of the present attempt, or of the next one while it waits.
    pub(crate) attempt: u32,
    /// The plan of the present attempt.
    pub(crate) placed: Option<Placed>,
    /// Some of the answer was sent to the client.
    pub(crate) streamed: bool,
    /// The place in the queue: waits until then at most.
    pub(crate) deadline: Instant,
    /// The pause before it was or is tried again.
    pub(crate) pause: Duration,
    /// Not tried again before this.
    pub(crate) not_before: Instant,
    /// What it waits for is room, so that patience helps.
    pub(crate) wants_room: bool,
    /// Attempts that failed for other reasons than a busy worker.
    pub(crate) failures: u32,
    /// Of those, failed transfers.
    pub(crate) transfer_failures: u32,
    /// Workers that failed it.
    pub(crate) avoid: BTreeSet<WorkerId>,
}

/// A plan under way, with what it was made on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed {
    pub(crate) plan: Plan,
    /// Prompt tokens that were expected in the decode worker's cache.
    pub(crate) decode_cached_tokens: u32,
    /// Prompt tokens that were expected in the prefill worker's cache.
    pub(crate) prefill_cached_tokens: u32,
}

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// In the router's queue.
    Waiting,
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
    /// It was placed, with a prefill leg or without.
    Placed {
        prefills_elsewhere: bool,
    },
    PrefillDone,
    FirstToken,
    Finished,
    PrefillFailed(FailureCause),
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
    Prefill,
    Decode,
    Both,
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing.
    Stay,
    /// Send the prefill leg.
    Prefill,
    /// Send the decode leg.
    Connect,
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

/// What a signal does to a request in a phase.
pub(crate) fn step(phase: Phase, signal: Signal) -> Transition {
    use Cancels::{Both, Decode, Nothing, Prefill};
    use Phase::{Connecting, Prefilling, Streaming, Waiting, Yielding};
    let (cancels, next) = match (phase, signal) {
        (
            Waiting,
            Signal::Placed {
                prefills_elsewhere: true,
            },
        ) => (Nothing, Next::Prefill),
        (
            Waiting,
            Signal::Placed {
                prefills_elsewhere: false,
            },
        ) => (Nothing, Next::Connect),
        (Waiting, Signal::Overdue) => (Nothing, Next::Retry),
        (Waiting, Signal::ClientGone) => (Nothing, Next::Drop),

        (Prefilling, Signal::PrefillDone) => (Nothing, Next::Connect),
        (Prefilling, Signal::PrefillFailed(cause)) => (Nothing, failed(cause, Leg::Prefill)),
        (Prefilling, Signal::Lost(leg)) => (
            Prefill,
            Next::Replan(Failure {
                reason: Reason::Lost,
                leg,
            }),
        ),
        (Prefilling, Signal::Overdue) => (
            Prefill,
            Next::Replan(Failure {
                reason: Reason::Slow,
                leg: Leg::Prefill,
            }),
        ),
        (Prefilling, Signal::ClientGone) => (Prefill, Next::Drop),

        (Connecting, Signal::FirstToken) => (Nothing, Next::Stream),
        (Connecting | Streaming | Yielding(_), Signal::Finished) => (Nothing, Next::Finish),
        // What the prefill worker still holds for this leg is of no use any more.
        (Connecting, Signal::DecodeFailed(cause, cut)) => (Prefill, cut_off(cause, cut)),
        (Connecting, Signal::PrefillFailed(cause)) => (
            Decode,
            Next::Yield(Failure {
                reason: Reason::of(cause),
                leg: Leg::Prefill,
            }),
        ),
        (Connecting, Signal::Lost(leg)) => (
            Both,
            Next::Yield(Failure {
                reason: Reason::Lost,
                leg,
            }),
        ),
        (Connecting, Signal::Overdue) => (
            Both,
            Next::Yield(Failure {
                reason: Reason::Slow,
                leg: Leg::Decode,
            }),
        ),
        (Connecting, Signal::ClientGone) => (Both, Next::Drop),

        (Streaming, Signal::DecodeFailed(cause, cut)) => (Nothing, cut_off(cause, cut)),
        (Streaming, Signal::Lost(Leg::Decode)) => (
            Decode,
            Next::Yield(Failure {
                reason: Reason::Lost,
                leg: Leg::Decode,
            }),
        ),
        (Streaming, Signal::Overdue) => (
            Decode,
            Next::Yield(Failure {
                reason: Reason::Slow,
                leg: Leg::Decode,
            }),
        ),
        (Streaming, Signal::ClientGone) => (Decode, Next::Drop),

        (Yielding(failure), Signal::DecodeFailed(_, Cut::Resumable)) => (Nothing, Next::Replan(failure)),
        (Yielding(failure), Signal::DecodeFailed(_, Cut::Final)) => (Nothing, Next::Reject(failure)),
        (Yielding(failure), Signal::Overdue) => (Nothing, Next::Presume(failure)),
        (Yielding(_), Signal::ClientGone) => (Nothing, Next::Drop),

        // Placing is for those that wait; answers are of legs that were sent, once; where the KV has arrived, the prefill
        // leg matters no more.
        (Prefilling | Connecting | Streaming | Yielding(_), Signal::Placed { .. })
        | (
            Waiting,
            Signal::PrefillDone
            | Signal::FirstToken
            | Signal::Finished
            | Signal::PrefillFailed(_)
            | Signal::DecodeFailed(..)
            | Signal::Lost(_),
        )
        | (Prefilling, Signal::FirstToken | Signal::Finished | Signal::DecodeFailed(..))
        | (Connecting, Signal::PrefillDone)
        | (
            Streaming,
            Signal::PrefillDone | Signal::FirstToken | Signal::PrefillFailed(_) | Signal::Lost(Leg::Prefill),
        )
        | (Yielding(_), Signal::PrefillDone | Signal::FirstToken | Signal::PrefillFailed(_) | Signal::Lost(_)) => {
            (Nothing, Next::Stay)
        }
    };
    Transition { cancels, next }
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
            Self::Prefilling | Self::Connecting | Self::Streaming => true,
            Self::Waiting | Self::Yielding(_) => false,
        }
    }

    /// Its name.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
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
        let leg = match self.leg {
            Leg::Prefill => "prefill",
            Leg::Decode => "decode",
        };
        format!("{leg}: {reason}")
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
    pub(crate) const fn prefill(self) -> bool {
        matches!(self, Self::Prefill | Self::Both)
    }

    pub(crate) const fn decode(self) -> bool {
        matches!(self, Self::Decode | Self::Both)
    }
}
