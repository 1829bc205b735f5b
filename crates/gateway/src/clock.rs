//! The one place where the router's time comes from: monotonic nanoseconds since the gateway started, so that a
//! recording's times mean the same when it is fed back.

use homing_units::{Duration, Instant};

/// Counts from its creation. Copies count from the same start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    start: std::time::Instant,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self {
            start: std::time::Instant::now(),
        }
    }

    pub(crate) fn now(self) -> Instant {
        Instant::ZERO + self.start.elapsed()
    }

    /// How long until `deadline`; zero where it has passed.
    pub(crate) fn until(self, deadline: Instant) -> Duration {
        deadline.saturating_since(self.now())
    }
}
