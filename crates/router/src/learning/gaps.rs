//! How long clients pause between a session's turns: when a session that has not come back yet is no longer expected soon.
//!
//! A histogram over powers of two of milliseconds, in which old gaps fade: every [`MEMORY`] gaps all counts are halved. The
//! window is the upper edge of the bin in which the wanted share of all gaps is reached, so it errs towards waiting longer,
//! by a factor of two at most. Until [`ENOUGH`] gaps were seen the given bound holds. Only gaps that ended are seen, so the
//! first ones that a router learns are short; the window grows as longer ones end.

use homing_units::Duration;

/// Bins: up to 2^31 ms.
const BINS: usize = 32;

/// Gaps after which what was learnt counts half.
const MEMORY: u32 = 4_096;

/// Gaps without which nothing is concluded.
const ENOUGH: u32 = 64;

/// A session is expected back as long as so many of a hundred gaps last.
const EXPECTED_PERCENT: u32 = 99;

/// Sessions that are taken to have gone for good before anything was seen: where every request is a session of its own, nobody is
/// expected back from the first one on.
const GONE_BEFORE: u32 = 8;

/// Further turns that each of these had: few for an agent, many for a chat.
const TURNS_BEFORE: u32 = 5;

/// So many gaps of so many seconds are taken to have been seen before: the median of coding agents.
const GAPS_BEFORE: u32 = 8;
const GAP_BEFORE_S: f64 = 10.0;

/// The distribution of gaps.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gaps {
    bins: [u32; BINS],
    count: u32,
    /// Sessions that were given up.
    gone: u32,
}

impl Gaps {
    /// A session was away for so long.
    pub(crate) fn learn(&mut self, gap: Duration) {
        let milliseconds = u64::try_from(gap.as_millis()).unwrap_or(u64::MAX);
        let bin = (u64::BITS - milliseconds.leading_zeros()) as usize;
        self.bins[bin.min(BINS - 1)] += 1;
        self.count += 1;
        if self.count >= MEMORY {
            self.fade();
        }
    }

    /// A session is no longer expected back.
    pub(crate) fn gave_up(&mut self) {
        self.gone += 1;
        if self.gone >= MEMORY {
            self.fade();
        }
    }

    fn fade(&mut self) {
        self.bins.iter_mut().for_each(|bin| *bin /= 2);
        self.count = self.bins.iter().sum();
        self.gone /= 2;
    }

    /// The share of idle sessions that come back.
    pub(crate) fn return_share(&self) -> f64 {
        f64::from(self.count) / f64::from(self.count + self.gone + GONE_BEFORE)
    }

    /// Further turns that a session has after one of its turns, on average: turns that came by sessions that ended.
    pub(crate) fn expected_turns(&self) -> f64 {
        f64::from(self.count + TURNS_BEFORE * GONE_BEFORE) / f64::from(self.gone + GONE_BEFORE)
    }

    /// Seconds that a session is away between two turns, on average over the gaps within the window.
    pub(crate) fn expected_gap_s(&self, longest: Duration) -> f64 {
        let window_ms = self.window(longest).as_millis() as f64;
        let before = f64::from(GAPS_BEFORE);
        // The bin of index n ends at 2^n milliseconds.
        let middles_ms = (0..).map(|index| 0.75 * f64::from(1_u32 << index));
        let within = self
            .bins
            .iter()
            .zip(middles_ms)
            .take_while(|(_, middle_ms)| *middle_ms < window_ms);
        let (sum_ms, count) = within.fold(
            (before * GAP_BEFORE_S * 1e3, before),
            |(sum_ms, count), (bin, middle_ms)| (sum_ms + f64::from(*bin) * middle_ms, count + f64::from(*bin)),
        );
        sum_ms / count / 1e3
    }

    /// How long a session is expected back; `longest` at most.
    pub(crate) fn window(&self, longest: Duration) -> Duration {
        if self.count < ENOUGH {
            return longest;
        }
        let wanted = (self.count * EXPECTED_PERCENT).div_ceil(100);
        let mut seen = 0;
        let reached = self.bins.iter().position(|bin| {
            seen += bin;
            seen >= wanted
        });
        let bin = u32::try_from(reached.unwrap_or(BINS - 1)).expect("there are few bins");
        Duration::from_millis(1 << bin).min(longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(gaps_ms: impl IntoIterator<Item = u64>, expected_ms: u64) {
        let mut gaps = Gaps::default();
        gaps_ms
            .into_iter()
            .for_each(|gap| gaps.learn(Duration::from_millis(gap)));
        assert_eq!(
            gaps.window(Duration::from_secs(300)),
            Duration::from_millis(expected_ms)
        );
    }

    #[test]
    fn the_window_covers_nearly_all_gaps() {
        check([], 300_000);
        check((0..63).map(|_| 1_000), 300_000);
        check((0..64).map(|_| 1_000), 1_024);
        // One in ten is long, and one in two hundred.
        check(
            (0..1_000).map(|index| if index % 10 == 0 { 30_000 } else { 1_000 }),
            32_768,
        );
        check(
            (0..1_000).map(|index| if index % 200 == 0 { 30_000 } else { 1_000 }),
            1_024,
        );
        check((0..100).map(|_| u64::MAX), 300_000);
    }

    #[test]
    fn nobody_is_expected_back_where_nobody_ever_came() {
        let mut gaps = Gaps::default();
        assert_eq!(gaps.return_share(), 0.0);
        (0..10_000).for_each(|_| gaps.gave_up());
        assert_eq!(gaps.return_share(), 0.0);
        (0..20_000).for_each(|_| gaps.learn(Duration::from_secs(1)));
        assert!(gaps.return_share() > 0.9, "{gaps:?}");
    }

    #[test]
    fn sessions_have_as_many_turns_as_they_had() {
        let mut gaps = Gaps::default();
        assert_eq!(gaps.expected_turns(), 5.0);
        for _ in 0..50 {
            (0..20).for_each(|_| gaps.learn(Duration::from_secs(1)));
            gaps.gave_up();
        }
        assert!((17.0..19.0).contains(&gaps.expected_turns()), "{gaps:?}");
        (0..2_000).for_each(|_| gaps.gave_up());
        assert!(gaps.expected_turns() < 1.0, "{gaps:?}");
    }

    #[test]
    fn the_mean_gap_is_that_of_sessions_that_come_back_soon() {
        let mut gaps = Gaps::default();
        let longest = Duration::from_secs(300);
        assert_eq!(gaps.expected_gap_s(longest), 10.0);
        (0..2_000).for_each(|_| gaps.learn(Duration::from_secs(3)));
        let mean = gaps.expected_gap_s(longest);
        assert!((2.0..4.5).contains(&mean), "within half of three seconds: {mean}");
        // Who comes back after an hour was live neither then nor before.
        (0..15).for_each(|_| gaps.learn(Duration::from_secs(3_600)));
        assert!((gaps.expected_gap_s(longest) - mean).abs() < 0.1, "{gaps:?}");
    }

    #[test]
    fn old_gaps_fade() {
        let (long, short) = ((0..4_000).map(|_| 60_000), (0..100_000).map(|_| 500));
        check(long.chain(short), 512);
    }
}
