//! What the tasks of requests and the handlers share: the ways to the core and to the engines, and nothing mutable
//! beyond counters.

use crate::clock::Clock;
use crate::core_task::CoreHandle;
use crate::engine::OpenSessions;
use crate::fleet::Fleet;
use crate::idle::Memories;
use crate::prefix::canonical::Canonical;
use crate::prefix::watch::Watch;
use crate::proxy::errands::prompts::Prompts;
use crate::proxy::release::Releases;
use crate::telemetry::Telemetry;
use crate::tokenise::{Tokeniser, Words};
use crate::turn_log::TurnLog;
use crate::upstream::Upstream;
use homing_units::RequestId;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// What is shared.
pub(crate) struct Shell {
    pub(crate) core: CoreHandle,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) upstream: Upstream,
    /// How workers are told that nobody will pull what they hold.
    pub(crate) releases: Releases,
    pub(crate) telemetry: Arc<Telemetry>,
    pub(crate) tokeniser: Arc<Tokeniser>,
    pub(crate) clock: Clock,
    /// Who decides, with parameters.
    pub(crate) policy: String,
    pub(crate) block_size: u32,
    pub(crate) default_output_tokens: u32,
    pub(crate) client_stall: Duration,
    /// See `GatewayClocks::keep_alive`; `None` where it is off.
    pub(crate) keep_alive: Option<Duration>,
    /// See `GatewayClocks::offer`.
    pub(crate) offer: Duration,
    /// What sessions' last prompts were.
    pub(crate) prefixes: Watch,
    /// The prompts that errands may carry.
    pub(crate) prompts: Prompts,
    /// Undoes known breaks of prefixes, where that is wanted.
    pub(crate) canonical: Option<Arc<Canonical>>,
    /// Sessions that SGLang servers keep apart.
    pub(crate) open_sessions: OpenSessions,
    pub(crate) turns: broadcast::Sender<TurnLog>,
    /// Cancelled when requests under way are not waited for any longer.
    pub(crate) abandon: CancellationToken,
    /// The tasks of requests.
    pub(crate) flights: TaskTracker,
    /// Names this life of the gateway in request ids: counters begin anew in each.
    pub(crate) life: u32,
    pub(crate) requests: AtomicU64,
}

impl Shell {
    /// An id that no request of this life has had.
    pub(crate) fn next_request(&self) -> RequestId {
        RequestId(self.requests.fetch_add(1, Ordering::Relaxed))
    }

    /// A request's name in headers and logs.
    pub(crate) fn request_name(&self, request: RequestId) -> String {
        format!("{:08x}-{}", self.life, request.0)
    }

    /// The request of a name, also given as the bare number; `None` where it is of another life or no name.
    pub(crate) fn request_of(&self, name: &str) -> Option<RequestId> {
        let (life, number) = name
            .split_once('-')
            .map_or((None, name), |(life, number)| (Some(life), number));
        let same_life = life.is_none_or(|life| u32::from_str_radix(life, 16) == Ok(self.life));
        let number = number.strip_prefix('r').unwrap_or(number);
        same_life.then_some(number)?.parse().ok().map(RequestId)
    }

    /// What is remembered of prompts.
    pub(crate) fn memories<'a>(&'a self, words: Option<&'a Words>) -> Memories<'a> {
        Memories {
            words,
            tails: &self.tokeniser.tails,
            prefixes: &self.prefixes,
            carried: &self.prompts,
        }
    }

    /// Tells those who follow the turns; nobody need.
    pub(crate) fn publish(&self, log: TurnLog) {
        drop(self.turns.send(log));
    }
}
