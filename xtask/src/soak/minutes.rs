//! How flat a process's resident memory was: the medians of its minutes.

use std::collections::BTreeMap;

/// A process's samples by the minute, as many as a run has.
#[derive(Default)]
pub struct Minutes(BTreeMap<u64, Vec<u64>>);

impl Minutes {
    /// Adds a sample.
    pub fn add(&mut self, minute: u64, kib: u64) {
        self.0.entry(minute).or_default().push(kib);
    }

    /// The median of a minute.
    pub fn median(&self, minute: u64) -> Option<u64> {
        let mut sorted = self.0.get(&minute)?.clone();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).copied()
    }

    /// How much the highest minute from `first` on is above the lowest, in percent of the lowest.
    pub fn spread_percent(&self, first: u64) -> f64 {
        let medians = || self.0.range(first..).filter_map(|(minute, _)| self.median(*minute));
        match (medians().min(), medians().max()) {
            (Some(lowest), Some(highest)) if lowest > 0 => (highest - lowest) as f64 * 100.0 / lowest as f64,
            _ => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_minutes_after_the_warm_up_count_each_by_its_median() {
        let check = |samples: &[(u64, u64)], percent: f64| {
            let mut minutes = Minutes::default();
            for (minute, kib) in samples {
                minutes.add(*minute, *kib);
            }
            let found = minutes.spread_percent(1);
            assert!(
                (found - percent).abs() < 1e-9,
                "{samples:?}: {found} instead of {percent}"
            );
        };
        check(&[], 0.0);
        check(&[(0, 10), (1, 100), (2, 104)], 4.0);
        // One sample far off does not count.
        check(&[(1, 100), (1, 100), (1, 900), (2, 100)], 0.0);
        check(&[(1, 100), (2, 120), (3, 90)], 100.0 / 3.0);
    }
}
