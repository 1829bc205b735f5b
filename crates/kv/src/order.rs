//! Which of the blocks that may go goes next.
//!
//! First what was put among the first to go. Of the rest the least recently used, or, where it is known how sessions of each class
//! come back ([`crate::returns`]), the one that is worth least:
//!
//! ```text
//! worth = returns a second of keeping (by class and time away) * what it costs to have the block back (by its depth)
//! ```
//!
//! The worth of a block changes all the time, so no order by worth could be kept. But among blocks of one class that have been away
//! for about as long, up to a factor of two, only the cost differs, and that never changes. So there is a queue for each class and
//! bin of time away, the cheapest block at its head, then the least recently used; the next to go is the worst of the heads. A block that is
//! away for longer moves to the next bin when the time is told. An operation costs O(log blocks), a choice one look at each queue that is
//! not empty, of which there are at most [`CLASSES`] * [`BINS`]; nothing scans the blocks.
//!
//! It knows no tree: whoever keeps it offers only what may go.

use crate::returns::{BINS, bin_end, bin_of};
use homing_units::Instant;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

/// The class of what no session that is known has used.
pub const UNKNOWN: u8 = 0;

/// Classes of sessions that are told apart, [`UNKNOWN`] among them.
pub const CLASSES: usize = 49;

/// Whose a block was last, and until when.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// The class of the session that used it last, below [`CLASSES`].
    pub class: u8,
    /// When nobody needed it any more.
    pub left: Instant,
}

impl Mark {
    /// As it is after a use by a session of this class, or by somebody of whom nothing is known.
    pub(crate) fn used(self, class: Option<u8>, now: Instant) -> Self {
        Self {
            class: class.unwrap_or(self.class),
            left: now,
        }
    }
}

/// Returns a second that keeping a session brings, for each class and time away.
pub type Densities = Box<[[f64; BINS]; CLASSES]>;

/// What is known of the worth of blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct Expectations {
    /// By class and bin.
    pub densities: Densities,
    /// After so many blocks one costs twice as much to compute as the first, for what it attends to; `None` where a block costs the same
    /// wherever it lies, as one does that is copied back.
    pub cost_doubles_after: Option<u32>,
}

impl Default for Expectations {
    /// Nobody comes back, and all blocks cost the same.
    fn default() -> Self {
        Self {
            densities: Box::new([[0.0; BINS]; CLASSES]),
            cost_doubles_after: None,
        }
    }
}

impl Expectations {
    /// What it is worth to keep a block whose session is of this class and has been away for this bin.
    fn worth(&self, class: u8, bin: u8, depth: u32) -> f64 {
        let density = self.densities[usize::from(class)][usize::from(bin)];
        let deeper = self.depth_that_counts(class, depth);
        let deeper = self
            .cost_doubles_after
            .map_or(0.0, |blocks| f64::from(deeper) / f64::from(blocks));
        density * (1.0 + deeper)
    }

    /// 0 where the depth does not matter. Of what nothing is known the least recently used goes first.
    fn depth_that_counts(&self, class: u8, depth: u32) -> u32 {
        if self.cost_doubles_after.is_some() && class != UNKNOWN {
            depth
        } else {
            0
        }
    }
}

/// How a block stands among those that may go. No two blocks have the same tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    /// Among the first to go.
    pub(crate) demoted: bool,
    /// Of its last use.
    pub(crate) tick: u64,
    /// Blocks of its prompt before it.
    pub(crate) depth: u32,
    pub(crate) mark: Mark,
}

/// A place in a queue: cheap ones first, then by the last use.
type Place<K> = (u32, u64, K);

/// The blocks that may go.
#[derive(Clone, Debug)]
pub(crate) struct EvictionOrder<K> {
    demoted: BTreeSet<(u64, K)>,
    /// By class and bin. Without expectations there is one queue.
    queues: BTreeMap<(u8, u8), BTreeSet<Place<K>>>,
    /// When a block is in the next bin.
    ages: BTreeMap<(Instant, K), Standing>,
    expectations: Option<Expectations>,
    now: Instant,
}

impl<K: Copy + Ord> EvictionOrder<K> {
    /// The least recently used goes first, unless there are expectations.
    pub(crate) const fn new(expectations: Option<Expectations>) -> Self {
        Self {
            demoted: BTreeSet::new(),
            queues: BTreeMap::new(),
            ages: BTreeMap::new(),
            expectations,
            now: Instant::ZERO,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.demoted.len() + self.queues.values().map(BTreeSet::len).sum::<usize>()
    }

    /// Time has passed, which never goes back.
    pub(crate) fn advance(&mut self, now: Instant) {
        self.now = self.now.max(now);
        while let Some(((at, block), standing)) = self.ages.first_key_value().map(|(age, standing)| (*age, *standing))
            && at <= self.now
        {
            self.ages.pop_first();
            // It stands where it came when the time was told last.
            let before = at.saturating_since(standing.mark.left);
            let bin = bin_of(before) - 1;
            self.take(self.queue_of(&standing, bin), self.place(&standing, block));
            self.queue(block, standing);
        }
    }

    /// What is known of returns has changed.
    pub(crate) fn expect(&mut self, densities: Densities) {
        if let Some(expectations) = &mut self.expectations {
            expectations.densities = densities;
        }
    }

    pub(crate) fn insert(&mut self, block: K, standing: Standing) {
        if standing.demoted {
            self.demoted.insert((standing.tick, block));
        } else {
            self.queue(block, standing);
        }
    }

    /// Takes a block out, if it is there.
    pub(crate) fn remove(&mut self, block: K, standing: &Standing) {
        if standing.demoted {
            self.demoted.remove(&(standing.tick, block));
            return;
        }
        let bin = self.bin(standing);
        self.take(self.queue_of(standing, bin), self.place(standing, block));
        if let Some(at) = self.next_bin_at(standing) {
            self.ages.remove(&(at, block));
        }
    }

    /// The next to go, which is not taken out.
    pub(crate) fn first(&self) -> Option<K> {
        if let Some((_, block)) = self.demoted.first() {
            return Some(*block);
        }
        let heads = self
            .queues
            .iter()
            .filter_map(|(queue, places)| Some((*queue, *places.first()?)));
        heads
            .min_by(|left, right| self.compare(left, right))
            .map(|(_, (_, _, block))| block)
    }

    /// All of them, the next to go first.
    pub(crate) fn in_order(&self) -> Vec<K> {
        let mut places: Vec<((u8, u8), Place<K>)> = self
            .queues
            .iter()
            .flat_map(|(queue, places)| places.iter().map(|place| (*queue, *place)))
            .collect();
        places.sort_by(|left, right| self.compare(left, right));
        let demoted = self.demoted.iter().map(|(_, block)| *block);
        demoted
            .chain(places.into_iter().map(|(_, (_, _, block))| block))
            .collect()
    }

    /// By worth; where that is the same, the cheaper one first, then by last use.
    fn compare(&self, left: &((u8, u8), Place<K>), right: &((u8, u8), Place<K>)) -> Ordering {
        let worth = |((class, bin), (depth, ..)): &((u8, u8), Place<K>)| {
            let expectations = self.expectations.as_ref();
            expectations.map_or(0.0, |expectations| expectations.worth(*class, *bin, *depth))
        };
        let place = |(_, (depth, tick, _)): &((u8, u8), Place<K>)| (*depth, *tick);
        worth(left)
            .total_cmp(&worth(right))
            .then_with(|| place(left).cmp(&place(right)))
    }

    fn queue(&mut self, block: K, standing: Standing) {
        let queue = self.queue_of(&standing, self.bin(&standing));
        let place = self.place(&standing, block);
        self.queues.entry(queue).or_default().insert(place);
        if let Some(at) = self.next_bin_at(&standing) {
            self.ages.insert((at, block), standing);
        }
    }

    fn take(&mut self, queue: (u8, u8), place: Place<K>) {
        let Some(places) = self.queues.get_mut(&queue) else {
            return;
        };
        places.remove(&place);
        if places.is_empty() {
            self.queues.remove(&queue);
        }
    }

    /// The bin in which it was when the time was told last.
    fn bin(&self, standing: &Standing) -> usize {
        bin_of(self.now.saturating_since(standing.mark.left))
    }

    fn next_bin_at(&self, standing: &Standing) -> Option<Instant> {
        self.expectations.as_ref()?;
        Some(standing.mark.left + bin_end(self.bin(standing))?)
    }

    fn queue_of(&self, standing: &Standing, bin: usize) -> (u8, u8) {
        let bin = u8::try_from(bin).expect("there are few bins");
        self.expectations
            .as_ref()
            .map_or((0, 0), |_| (standing.mark.class, bin))
    }

    fn place(&self, standing: &Standing, block: K) -> Place<K> {
        let expectations = self.expectations.as_ref();
        let depth = expectations.map_or(0, |known| known.depth_that_counts(standing.mark.class, standing.depth));
        (depth, standing.tick, block)
    }
}
