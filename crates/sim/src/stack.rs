//! What the source papers' stack did beside its router: session slots, transfer timeouts, lists of dead peers, admission in
//! the scheduler's loop, a handshake in which the decode worker begins. All of it is off by default, and each part can be switched off alone, so that what it causes can
//! be told from what the others cause.
//!
//! Sources: the failure taxonomy (§1 cascade, §3 evict storm, §5 correction crash) and the validation report (§2 idle-only
//! trimming and 32 s timeouts, §4 admission in the loop and 1 Hz status polling, §5 dead peers).
//!
//! Assumed, where they are silent:
//! - A question costs the scheduler [`PROBE`]: the loop stops for it, walks all session slots in Python and answers over a
//!   socket. A status poll, which collects more, costs the same.
//! - A question that finds a step running is answered after that step; an idle scheduler answers at once, and nobody else
//!   pays for it.
//! - The router asks one worker a turn, the one that it chose (report §4: "still once for each turn").
//! - A worker that was restarted is on no list of dead peers: it comes back under another address.
//! - A handshake may take as long as a transfer (`homing_sim`'s `handshake.rs` says what it is).
//! - A process that died serves again after `RESTART_AFTER`.

use homing_engine::api::EngineKind;
use homing_units::Duration;

/// The parts of the papers' stack that a cluster has.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stack {
    /// Who holds KV between requests. Session slots are on workers that decode and on no others.
    pub engine: EngineKind,
    /// Which worker begins with a seed.
    pub order: Order,
    /// KV that is ready and was not fetched for so long is a failed transfer (`mc-transfer-timeout`; 32 s in the papers). With
    /// [`Order::DecodeFirst`] so is a handshake that takes so long.
    pub transfer_timeout: Option<Duration>,
    /// After such a failure the prefill worker takes the decode worker for dead for so long: every transfer to it fails at
    /// once, and those under way are aborted. [`FOR_EVER`] in the papers.
    pub dead_peers: Option<Duration>,
    /// Admission inside the scheduler's loop; without it a snapshot answers, which costs nothing.
    pub admission: Option<LoopAdmission>,
    /// From when on the transfer timeout runs for a handshake.
    pub clock: HandshakeClock,
    /// How long a prefill worker holds KV for a decode worker that does not fetch it; `None` for the engine's 30 s. vLLM held
    /// it for 480 s before it had leases.
    pub lease: Option<Duration>,
    /// Whether the lease of KV that is held for a leg which has not pulled it yet is renewed, as the gateway does with embedded
    /// workers; `None` for what the engine has: [`EngineKind::Block`] can be told, the others cannot.
    pub renews: Option<bool>,
    /// Whether the router asks each worker for its room, as the gateway does of embedded workers: from the snapshot, at no cost.
    pub tells_room: bool,
    /// Whether the router asks each worker whose events do not tell all that is cached there for sketches of it, as the gateway does of
    /// embedded workers: from the snapshot, at no cost.
    pub tells_sketches: bool,
    /// Batches of KV events that a worker keeps for a replay; `None` for vLLM's default.
    pub kept_batches: Option<usize>,
    /// What users of other systems report.
    pub defects: Defects,
}

/// From when on the transfer timeout runs for a handshake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HandshakeClock {
    /// From the request's being sent: it counts the time in which the decode worker has no room, too.
    #[default]
    Sent,
    /// From the decode worker's having made room.
    Room,
}

/// What users of other systems report, each off by default. The failure mode that each one makes is in `homing-doctor`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Defects {
    /// When one leg is given up, the worker of the other hears of it only after so long, or when the KV has arrived: a decode
    /// worker that waits for KV goes on waiting with its blocks taken, and a prefill worker goes on holding the KV.
    pub abort_heard_after: Option<Duration>,
    /// A decode worker whose KV does not arrive computes the prompt itself and says nothing.
    pub recomputes: bool,
    /// A worker that was restarted does not say so: it goes by the boot epoch of its first life.
    pub hides_restarts: bool,
    /// Workers do not announce what they evict.
    pub hides_removals: bool,
    /// Workers send no KV events, and say so.
    pub hides_events: bool,
    /// A client that hangs up is lost on the way to the router's core: connections are closed, bookings stay.
    pub loses_cancels: bool,
}

/// Which worker begins with a seed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// The prompt is prefilled, then the decode worker makes room and pulls it, as with vLLM's connectors.
    #[default]
    PrefillFirst,
    /// The decode worker makes room, then the prompt is prefilled and sent, as with SGLang's bootstrap. On workers with
    /// session slots; on others it is as [`Self::PrefillFirst`], because what a block cache holds may leave nothing to send.
    DecodeFirst,
}

/// Admission inside the scheduler's loop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoopAdmission {
    /// Scheduler time that one question costs.
    pub probe: Duration,
    /// Status is polled so often, each time at the cost of a question; `None` for never.
    pub poll_every: Option<Duration>,
}

/// What a question costs unless told otherwise.
pub const PROBE: Duration = Duration::from_millis(2);

/// A peer that was taken for dead stays so.
pub const FOR_EVER: Duration = Duration::MAX;

/// How long a process that died takes until it serves again: weights are loaded from a page cache.
pub(crate) const RESTART_AFTER: Duration = Duration::from_secs(60);

impl Default for LoopAdmission {
    fn default() -> Self {
        Self {
            probe: PROBE,
            poll_every: None,
        }
    }
}

impl Stack {
    /// Whether leases are renewed.
    pub(crate) const fn renews_leases(&self) -> bool {
        match (self.renews, self.engine) {
            (Some(renews), _) => renews,
            (None, EngineKind::Block) => true,
            (None, EngineKind::SessionSlot(_) | EngineKind::Vllm) => false,
        }
    }

    /// Who holds KV between requests on a worker that decodes, or does not.
    pub(crate) const fn engine_of(&self, decodes: bool) -> EngineKind {
        match self.engine {
            EngineKind::SessionSlot(_) if !decodes => EngineKind::Block,
            engine => engine,
        }
    }
}
