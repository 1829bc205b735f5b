//! Recent failures of the links between workers. A failed transfer says something about its link for a while, and
//! nothing about the life of either end; there is no blacklist.
//!
//! A link whose last transfer failed lately is left alone as long as another will do. What is older does not count as a failure any
//! more, but the link is on trial: one transfer at a time, until one comes through. So a link that is down for an hour costs a failed
//! transfer now and then, and not a handful of them each time its failures have been forgotten.

use homing_units::{Duration, Instant, WorkerId};
use std::collections::BTreeMap;

/// Links whose failures are remembered; above, the one that failed longest ago is dropped.
const LINKS: usize = 4_096;

/// Failures by link, from prefill to decode worker.
#[derive(Debug, Default)]
pub(crate) struct Links {
    failures: BTreeMap<(WorkerId, WorkerId), Failures>,
}

#[derive(Clone, Copy, Debug)]
struct Failures {
    count: u32,
    last: Instant,
}

impl Links {
    /// A transfer failed. Failures that are older than `memory` do not count any more.
    pub(crate) fn failed(&mut self, now: Instant, from: WorkerId, to: WorkerId, memory: Duration) {
        let count = self.recent(now, from, to, memory) + 1;
        self.failures.insert((from, to), Failures { count, last: now });
        if self.failures.len() > LINKS {
            let oldest = self
                .failures
                .iter()
                .min_by_key(|(_, failures)| failures.last)
                .map(|(link, _)| *link);
            self.failures
                .remove(&oldest.expect("what is over the bound is not empty"));
        }
    }

    /// A transfer came through: the link works.
    pub(crate) fn worked(&mut self, from: WorkerId, to: WorkerId) {
        self.failures.remove(&(from, to));
    }

    /// Failures in a row, the last of them within `memory`.
    pub(crate) fn recent(&self, now: Instant, from: WorkerId, to: WorkerId, memory: Duration) -> u32 {
        let failures = self.failures.get(&(from, to));
        failures
            .filter(|failures| now.saturating_since(failures.last) <= memory)
            .map_or(0, |failures| failures.count)
    }

    /// All links whose last transfer failed, with their recent failures: 0 for those that are on trial.
    pub(crate) fn all_failed(
        &self,
        now: Instant,
        memory: Duration,
    ) -> impl Iterator<Item = ((WorkerId, WorkerId), u32)> + '_ {
        let recent = move |failures: &Failures| now.saturating_since(failures.last) <= memory;
        self.failures
            .iter()
            .map(move |(link, failures)| (*link, if recent(failures) { failures.count } else { 0 }))
    }

    /// What was known of a worker's links is void.
    pub(crate) fn forget(&mut self, worker: WorkerId) {
        self.failures.retain(|(from, to), _| *from != worker && *to != worker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_count_for_a_while_and_until_it_works() {
        let (from, to, memory) = (WorkerId(0), WorkerId(1), Duration::from_secs(30));
        let at = |seconds| Instant::ZERO + Duration::from_secs(seconds);
        let mut links = Links::default();
        links.failed(at(0), from, to, memory);
        links.failed(at(20), from, to, memory);
        assert_eq!(links.recent(at(50), from, to, memory), 2);
        assert_eq!(
            links.recent(at(50), to, from, memory),
            0,
            "the other direction is another link"
        );
        assert_eq!(links.recent(at(51), from, to, memory), 0);
        assert_eq!(
            links.all_failed(at(51), memory).collect::<Vec<_>>(),
            [((from, to), 0)],
            "it is on trial"
        );
        links.failed(at(60), from, to, memory);
        assert_eq!(links.recent(at(60), from, to, memory), 1);
        links.worked(from, to);
        assert_eq!(links.recent(at(60), from, to, memory), 0);
        assert_eq!(links.all_failed(at(60), memory).count(), 0);
    }
}
