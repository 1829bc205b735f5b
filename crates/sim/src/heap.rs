//! The heap of what will happen, ordered by (time, rank, sequence).
//!
//! Two things at one instant happen in the order of their ranks, and within a rank in the order in which they were
//! planned: the order never depends on how a heap breaks ties, so the same seed gives the same bytes.

use homing_units::Instant;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// What is planned for one instant comes in this order: results before news of them, news before new work, new work
/// before timers and reports, so that whoever decides knows everything that has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rank {
    Fault,
    Step,
    Transfer,
    News,
    Arrival,
    Turn,
    Timer,
    Report,
}

/// Things that are planned.
#[derive(Debug)]
pub(crate) struct Heap<T> {
    entries: BinaryHeap<Reverse<Entry<T>>>,
    next_sequence: u64,
}

#[derive(Debug)]
struct Entry<T> {
    at: Instant,
    rank: Rank,
    sequence: u64,
    thing: T,
}

impl<T> Heap<T> {
    pub(crate) const fn new() -> Self {
        Self {
            entries: BinaryHeap::new(),
            next_sequence: 0,
        }
    }

    pub(crate) fn plan(&mut self, at: Instant, rank: Rank, thing: T) {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.entries.push(Reverse(Entry {
            at,
            rank,
            sequence,
            thing,
        }));
    }

    /// The next thing and when it happens.
    pub(crate) fn pop(&mut self) -> Option<(Instant, T)> {
        self.entries.pop().map(|Reverse(entry)| (entry.at, entry.thing))
    }
}

impl<T> Entry<T> {
    const fn key(&self) -> (Instant, Rank, u64) {
        (self.at, self.rank, self.sequence)
    }
}

impl<T> PartialEq for Entry<T> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<T> Eq for Entry<T> {}

impl<T> PartialOrd for Entry<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Entry<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn things_come_by_time_then_rank_then_plan(plans in prop::collection::vec((0_u64..5, 0_usize..4), 0..50)) {
            const RANKS: [Rank; 4] = [Rank::Step, Rank::News, Rank::Turn, Rank::Report];
            let mut heap = Heap::new();
            let mut expected = Vec::new();
            for (index, (at, rank)) in plans.into_iter().enumerate() {
                heap.plan(Instant::from_nanos(at), RANKS[rank], index);
                expected.push((Instant::from_nanos(at), RANKS[rank], index));
            }
            expected.sort();
            let found: Vec<_> = std::iter::from_fn(|| heap.pop()).collect();
            let expected: Vec<_> = expected.into_iter().map(|(at, _, index)| (at, index)).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
