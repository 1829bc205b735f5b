//! How a policy's system deals with what its scores do not say: whether it waits, retries, and asks workers first.
//!
//! The planner's own habits are the default. The policies that stand for other systems bring those systems' habits along,
//! because much of what is measured of a system is its habits: one that sends at once and gives up at the first failure
//! behaves unlike one that waits for room.

use homing_units::Duration;

/// A policy's habits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Habits {
    /// Who keeps a turn from a worker without room.
    pub admission: Admission,
    /// Plans of one request that may fail before it is rejected, at least 1; `None` for the router's own limit.
    pub attempts: Option<u32>,
    /// How long a request may take from its arrival to its first token before it is given up; `None` for the router's own clocks.
    pub request_timeout: Option<Duration>,
    /// In which order turns that wait are looked at, of those whose clients ask for the same priority.
    pub order: Order,
    /// Every decode worker is asked for its load before each turn is placed, and not only once a second. What that costs
    /// the worker is the driver's to model.
    pub probes: bool,
    /// KV that is carried while no client waits for it.
    pub errands: ErrandKinds,
}

/// Which errands are run; none as a rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrandKinds {
    /// A session's KV goes where [`Policy::better_home`](super::Policy::better_home) says, in the gap before its next turn.
    pub gaps: bool,
    /// What many sessions show goes to each decode worker.
    pub base: bool,
}

impl ErrandKinds {
    /// Whether any is run.
    #[must_use]
    pub const fn any(self) -> bool {
        self.gaps || self.base
    }
}

/// Who keeps a turn from a worker without room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Admission {
    /// The router's ledger: what does not fit waits in the router.
    #[default]
    Ledger,
    /// Nobody: a turn is sent at once, and waits in the engine. Only what can never work is denied.
    AtOnce,
}

/// In which order turns that wait are looked at. Whoever has waited too long comes first in either.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// As they came.
    #[default]
    Arrival,
    /// Turns of sessions that had far less service first, old service fading; of those that had about as much, as they came.
    Service,
    /// The same, but of those that had about as much service, the ones that lack far less of their prompts first. It cost a quarter of
    /// the TTFT p90 of 52 SWE sessions on eight H100s: whose KV was evicted waits, and evicts others when its turn comes.
    Work,
}
