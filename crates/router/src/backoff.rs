//! Pauses with decorrelated jitter: each is drawn between the base and three times the one before, up to a cap, so that
//! many who wait for one thing do not come back together.
//!
//! Formula: "Exponential Backoff And Jitter", Marc Brooker, AWS Architecture Blog, 2015.

use homing_units::{Duration, Rng};
use rand::RngExt as _;

/// Bounds of a pause.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    /// The shortest.
    pub base: Duration,
    /// The longest.
    pub cap: Duration,
}

impl Backoff {
    /// The pause after one of `last` (zero before the first).
    #[must_use]
    pub fn pause(self, last: Duration, rng: &mut Rng) -> Duration {
        let base = nanos(self.base).max(1);
        let top = nanos(last).saturating_mul(3).max(base + 1);
        Duration::from_nanos(rng.random_range(base..top)).min(self.cap)
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_stay_between_base_and_cap_and_differ() {
        let backoff = Backoff {
            base: Duration::from_millis(50),
            cap: Duration::from_secs(2),
        };
        let mut rng = homing_units::rng_for(7, "backoff");
        let mut last = Duration::ZERO;
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..200 {
            last = backoff.pause(last, &mut rng);
            assert!(last >= backoff.base && last <= backoff.cap, "{last:?}");
            seen.insert(last);
        }
        assert!(seen.len() > 50, "only {} different pauses", seen.len());
    }
}
