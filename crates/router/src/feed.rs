//! One worker's stream of KV events: what may be applied now, what waits for an earlier batch, and when a gap is given up.
//!
//! Batches are applied strictly in order, because a removal applied before its store would leave a block in the index
//! for good. A gap is asked for a bounded number of times; once it is given up, the index of that worker is cleared and
//! built up again from what comes: everything in it is then true, but not everything that is true is in it.
//! It knows sequence numbers only; lives (epochs) are the fleet's business, and the index is the residency's.

use crate::event::KvUpdate;
use std::collections::BTreeMap;

/// The state of a stream within one life of its worker.
#[derive(Debug, Default)]
pub(crate) struct Feed {
    /// The sequence number that may be applied next; `None` after a loss with nothing held: whatever comes is next.
    next: Next,
    /// Batches that wait for an earlier one.
    held: BTreeMap<u64, Vec<KvUpdate>>,
    /// Times that the present gap was asked for.
    asked: u32,
    /// A replay is under way.
    replaying: bool,
    /// Something was lost for good in this life: the index knows a part only.
    partial: bool,
    /// The numbers began anew: what comes may be of a life that nobody has met yet.
    doubted: bool,
}

/// What may be applied next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Sequence(u64),
    Any,
}

impl Default for Next {
    fn default() -> Self {
        Self::Sequence(0)
    }
}

/// Bounds of a feed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FeedLimits {
    pub(crate) held_batches: usize,
    pub(crate) resyncs: u32,
}

/// What is to be done about a feed, in this order.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct FeedStep {
    /// Clear the index of the worker first: a gap was given up.
    pub(crate) clear: bool,
    /// Then apply these batches.
    pub(crate) apply: Vec<Vec<KvUpdate>>,
    /// Then ask for the events from this one on.
    pub(crate) ask: Option<u64>,
}

impl Feed {
    /// Takes a batch in.
    pub(crate) fn offer(&mut self, sequence: u64, updates: Vec<KvUpdate>, limits: FeedLimits) -> FeedStep {
        if self.doubted {
            return FeedStep::default();
        }
        let next = match self.next {
            Next::Sequence(next) => next,
            Next::Any => sequence,
        };
        if sequence < next {
            return FeedStep::default();
        }
        self.held.entry(sequence).or_insert(updates);
        self.next = Next::Sequence(next);
        let apply = self.take_ready();
        if self.held.is_empty() {
            // During a rebuild from the start only the end of the replay says that all has come.
            self.asked = if self.replaying { self.asked } else { 0 };
            return FeedStep {
                apply,
                ..FeedStep::default()
            };
        }
        if self.held.len() > limits.held_batches {
            return self.give_up();
        }
        if self.replaying {
            return FeedStep {
                apply,
                ..FeedStep::default()
            };
        }
        // Where that gives the gap up, what came before it is cleared with the rest.
        let step = self.ask_again(limits);
        if step.clear { step } else { FeedStep { apply, ..step } }
    }

    /// The replay that was asked for has ended.
    pub(crate) fn replayed(&mut self, complete: bool, limits: FeedLimits) -> FeedStep {
        if !self.replaying {
            return FeedStep::default();
        }
        self.replaying = false;
        match (complete, self.held.is_empty()) {
            (true, true) => {
                self.asked = 0;
                FeedStep::default()
            }
            (true, false) => self.ask_again(limits),
            (false, _) => self.give_up(),
        }
    }

    /// The replay that was asked for did not end in time.
    pub(crate) fn overdue(&mut self, limits: FeedLimits) -> FeedStep {
        self.replaying = false;
        self.ask_again(limits)
    }

    /// The numbers began anew: nothing is believed until another life is met or [`Feed::rebuild`] asks for everything. Whether
    /// that is new.
    pub(crate) const fn doubt(&mut self) -> bool {
        !std::mem::replace(&mut self.doubted, true)
    }

    /// Whether its numbers began anew and no other life was met yet.
    pub(crate) const fn is_doubted(&self) -> bool {
        self.doubted
    }

    /// The cache is as it was but what is known of it was dropped: ask for everything.
    pub(crate) fn rebuild(&mut self) -> FeedStep {
        *self = Self {
            replaying: true,
            asked: 1,
            ..Self::default()
        };
        FeedStep {
            clear: true,
            apply: Vec::new(),
            ask: Some(0),
        }
    }

    /// Whether the index says exactly what the worker holds.
    pub(crate) fn is_exact(&self) -> bool {
        !self.partial && !self.doubted && !self.replaying && self.held.is_empty()
    }

    /// The number of the batch that may be applied next; 0 where any may.
    pub(crate) const fn next(&self) -> u64 {
        match self.next {
            Next::Sequence(next) => next,
            Next::Any => 0,
        }
    }

    /// Whether something was lost for good, so that the index knows a part only.
    pub(crate) const fn is_partial(&self) -> bool {
        self.partial
    }

    /// Whether a replay is under way.
    pub(crate) const fn is_replaying(&self) -> bool {
        self.replaying
    }

    fn ask_again(&mut self, limits: FeedLimits) -> FeedStep {
        if self.asked >= limits.resyncs {
            return self.give_up();
        }
        let Next::Sequence(next) = self.next else {
            return FeedStep::default();
        };
        self.asked += 1;
        self.replaying = true;
        FeedStep {
            ask: Some(next),
            ..FeedStep::default()
        }
    }

    /// What was missed stays unknown; goes on with the batches that nothing is missing after.
    fn give_up(&mut self) -> FeedStep {
        self.next = self
            .held
            .last_key_value()
            .map_or(Next::Any, |(last, _)| Next::Sequence(last + 1));
        let mut run: Vec<Vec<KvUpdate>> = Vec::new();
        let mut before = None;
        for (sequence, updates) in std::mem::take(&mut self.held) {
            if before.is_some_and(|before: u64| before + 1 != sequence) {
                run.clear();
            }
            run.push(updates);
            before = Some(sequence);
        }
        (self.replaying, self.asked) = (false, 0);
        self.partial = !run.iter().any(|updates| clears(updates));
        FeedStep {
            clear: true,
            apply: run,
            ask: None,
        }
    }

    /// Takes the held batches that follow each other from the next one on.
    fn take_ready(&mut self) -> Vec<Vec<KvUpdate>> {
        let mut ready = Vec::new();
        while let Next::Sequence(next) = self.next
            && let Some(updates) = self.held.remove(&next)
        {
            // After a clear everything is known again: nothing.
            self.partial &= !clears(&updates);
            ready.push(updates);
            self.next = Next::Sequence(next + 1);
        }
        ready
    }
}

fn clears(updates: &[KvUpdate]) -> bool {
    updates.iter().any(|update| matches!(update, KvUpdate::Cleared))
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_kv::{BlockHash, Tier};

    const LIMITS: FeedLimits = FeedLimits {
        held_batches: 4,
        resyncs: 2,
    };

    /// A batch that names its own sequence number.
    fn batch(sequence: u64) -> Vec<KvUpdate> {
        vec![KvUpdate::Removed {
            hashes: vec![BlockHash(u128::from(sequence))],
            tier: Tier::Gpu,
        }]
    }

    #[derive(Clone, Copy)]
    enum Do {
        Offer(u64),
        Clear(u64),
        Replayed(bool),
        Overdue,
        Rebuild,
    }

    /// Runs steps; compares what was applied and asked for, in order, and whether the feed is exact at the end.
    fn check(steps: &[Do], applied: &[u64], asked: &[u64], cleared: usize, exact: bool) {
        let mut feed = Feed::default();
        let (mut seen, mut asks, mut clears) = (Vec::new(), Vec::new(), 0);
        for step in steps {
            let result = match step {
                Do::Offer(sequence) => feed.offer(*sequence, batch(*sequence), LIMITS),
                Do::Clear(sequence) => {
                    feed.offer(*sequence, [batch(*sequence), vec![KvUpdate::Cleared]].concat(), LIMITS)
                }
                Do::Replayed(complete) => feed.replayed(*complete, LIMITS),
                Do::Overdue => feed.overdue(LIMITS),
                Do::Rebuild => feed.rebuild(),
            };
            clears += usize::from(result.clear);
            asks.extend(result.ask);
            seen.extend(result.apply.iter().map(|updates| match &updates[0] {
                KvUpdate::Removed { hashes, .. } => u64::try_from(hashes[0].0).unwrap(),
                other => panic!("{other:?}"),
            }));
        }
        assert_eq!((seen.as_slice(), asks.as_slice(), clears), (applied, asked, cleared));
        assert_eq!(feed.is_exact(), exact);
    }

    #[test]
    fn batches_are_applied_once_and_in_order() {
        use Do::{Clear, Offer, Overdue, Rebuild, Replayed};
        check(&[Offer(0), Offer(1), Offer(1), Offer(0)], &[0, 1], &[], 0, true);
        // Reordered: held, asked for once, and done when it comes.
        check(
            &[Offer(1), Offer(2), Offer(0), Replayed(true)],
            &[0, 1, 2],
            &[0],
            0,
            true,
        );
        // Lost and replayed.
        check(
            &[
                Offer(0),
                Offer(3),
                Offer(1),
                Offer(2),
                Offer(3),
                Replayed(true),
                Offer(4),
            ],
            &[0, 1, 2, 3, 4],
            &[1],
            0,
            true,
        );
        // Lost for good: cleared, then goes on as a part.
        check(
            &[Offer(0), Offer(3), Replayed(false), Offer(4)],
            &[0, 3, 4],
            &[1],
            1,
            false,
        );
        // A clear makes it whole again.
        check(
            &[Offer(0), Offer(3), Replayed(false), Clear(4)],
            &[0, 3, 4],
            &[1],
            1,
            true,
        );
        // The replay lies or stalls: asked for again, then given up.
        check(&[Offer(1), Replayed(true), Replayed(true)], &[1], &[0, 0], 1, false);
        check(&[Offer(1), Overdue, Overdue, Offer(2)], &[1, 2], &[0, 0], 1, false);
        // More is held than the bound: given up.
        check(
            &[Offer(1), Offer(2), Offer(3), Offer(4), Offer(5)],
            &[1, 2, 3, 4, 5],
            &[0],
            1,
            false,
        );
        // Of what was held, only what nothing is missing after may be believed.
        check(
            &[Offer(1), Offer(3), Offer(4), Replayed(false)],
            &[3, 4],
            &[0],
            1,
            false,
        );
        // Built up again from the start; only the end of the replay makes it exact.
        check(&[Offer(0), Rebuild, Offer(0), Offer(1)], &[0, 0, 1], &[0], 1, false);
        check(
            &[Offer(0), Rebuild, Offer(0), Offer(1), Replayed(true)],
            &[0, 0, 1],
            &[0],
            1,
            true,
        );
        // Nothing came of it: whatever comes next is next.
        check(&[Rebuild, Replayed(false), Offer(7), Offer(8)], &[7, 8], &[0], 2, false);
    }
}
