//! What the source papers' stack did beside its router: session slots, transfer timeouts, lists of dead peers, admission in
//! the scheduler's loop. All of it is off by default, and each part can be switched off alone, so that what it causes can
//! be told from what the others cause.
//!
//! Sources: the failure taxonomy (§1 cascade, §3 evict storm, §5 correction crash) and the validation report (§2 idle-only
//! trimming and 32 s timeouts, §4 admission in the loop, §5 dead peers).

use homing_engine::api::{EngineKind, SlotConfig};
use homing_units::Duration;

/// The parts of the papers' stack that a cluster has.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stack {
    /// Session slots on workers that decode.
    pub slots: Option<SlotConfig>,
    /// KV that is ready and was not fetched for so long is a failed transfer (`mc-transfer-timeout`; 32 s in the papers).
    pub transfer_timeout: Option<Duration>,
    /// After such a failure the prefill worker takes the decode worker for dead for so long: every transfer to it fails at
    /// once. [`FOR_EVER`] in the papers.
    pub dead_peers: Option<Duration>,
    /// Time that one admission question costs the scheduler of the worker that is asked. Admission is answered from a
    /// snapshot where it is zero.
    pub probe: Duration,
    /// Time that status polling costs each scheduler in a second.
    pub poll: Duration,
}

/// A peer that was taken for dead stays so.
pub const FOR_EVER: Duration = Duration::MAX;

/// How long a process that died takes until it serves again: weights are loaded from a page cache. Assumed; the papers' run
/// was over at that point.
pub(crate) const RESTART_AFTER: Duration = Duration::from_secs(60);

impl Stack {
    /// Who holds KV between requests on a worker that decodes, or does not.
    pub(crate) fn engine(&self, decodes: bool) -> EngineKind {
        match self.slots.filter(|_| decodes) {
            Some(slots) => EngineKind::SessionSlot(slots),
            None => EngineKind::Block,
        }
    }
}
