//! The service that a session has had: seconds for which its turns had a place at workers, of which half is forgotten with each
//! half-life. Seconds and not tokens, because they are what others wait for, on whatever hardware, and need no weights.
//!
//! Sessions are compared by levels: the logarithm of the service, and one more for each three half-lives that have passed since the
//! router began. All service fades alike, so two levels that were taken at different times compare as if both had been taken
//! now, and whoever waits moves ahead of those who come later. A level is a whole number: sessions within a factor of eight of
//! each other count as having had as much, so that sessions that are alike take turns as they come, and only one that floods the
//! router waits for the others.

use homing_units::{Duration, Instant};

/// Service below this is none, in seconds.
const LEAST_S: f64 = 1.0;

/// Doublings of service that make a level.
const DOUBLINGS: f64 = 3.0;

/// What a session has had.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Service {
    /// As much as it was then.
    seconds: f64,
    then: Instant,
}

impl Service {
    /// One of its turns had a place for so long, up to now.
    pub(crate) fn add(&mut self, now: Instant, served: Duration, half_life: Duration) {
        let faded = self.seconds * libm::exp2(-half_lives(now.saturating_since(self.then), half_life));
        *self = Self {
            seconds: faded + served.as_secs_f64(),
            then: now,
        };
    }

    /// Its level, as of now.
    pub(crate) fn level(&self, now: Instant, half_life: Duration) -> i32 {
        let elapsed = |at: Instant| half_lives(at.saturating_since(Instant::ZERO), half_life);
        let had = libm::log2(self.seconds.max(f64::MIN_POSITIVE)) + elapsed(self.then);
        let none = libm::log2(LEAST_S) + elapsed(now);
        // Nanoseconds fill 64 bits, which is fewer than 2^35 seconds.
        libm::floor(had.max(none) / DOUBLINGS).min(f64::from(i32::MAX)) as i32
    }
}

fn half_lives(elapsed: Duration, half_life: Duration) -> f64 {
    elapsed.as_secs_f64() / half_life.as_secs_f64().max(LEAST_S)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALF_LIFE: Duration = Duration::from_secs(60);

    fn at(seconds: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(seconds)
    }

    /// The service of turns that ended at these seconds, having taken so many.
    fn served(turns: &[(u64, u64)]) -> Service {
        let mut service = Service::default();
        for (end, seconds) in turns {
            service.add(at(*end), Duration::from_secs(*seconds), HALF_LIFE);
        }
        service
    }

    #[track_caller]
    fn check(turns: &[(u64, u64)], asked_at: u64, expected: i32) {
        let level = served(turns).level(at(asked_at), HALF_LIFE);
        assert_eq!(level, expected, "{turns:?} at {asked_at} s");
    }

    #[test]
    fn a_level_is_the_logarithm_of_what_a_session_had_and_half_fades_in_each_half_life() {
        check(&[], 0, 0);
        check(&[(0, 7)], 0, 0);
        check(&[(0, 8)], 0, 1);
        check(&[(0, 4), (0, 4)], 0, 1);
        check(&[(0, 64)], 0, 2);
        check(&[(0, 64)], 350, 2);
        // Of 16 seconds eight are left after a half-life: with 24 more 32, which count as 64 then.
        check(&[(0, 16), (60, 24)], 60, 2);
        check(&[(0, 16), (60, 23)], 60, 1);
        // Once next to nothing is left of it, it is as if it had had none.
        check(&[(0, 64)], 60 * 9, 3);
        check(&[], 60 * 9, 3);
    }

    #[test]
    fn who_waits_moves_ahead_of_those_who_come_later() {
        let waits = served(&[(0, 30)]).level(at(0), HALF_LIFE);
        let comes = |second| Service::default().level(at(second), HALF_LIFE);
        assert!(comes(170) < waits && waits < comes(360));
    }

    #[test]
    fn levels_stay_in_range() {
        let mut service = Service::default();
        service.add(Instant::from_nanos(u64::MAX), Duration::MAX, Duration::ZERO);
        assert!(service.level(Instant::from_nanos(u64::MAX), Duration::ZERO) > 0);
    }
}
