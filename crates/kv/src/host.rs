//! The host tier: which blocks lie in host memory, bounded, the least recently used first to go, or what is worth least.
//!
//! A block comes here when the accelerator's pool evicts it, and it stays when it is copied back: so a block may be in
//! both, and what is evicted a second time needs no second copy. A prompt's blocks come tail first, as the pool evicts
//! them, so its tail is also the first to go from here. Nothing enforces that a block's parent is here too: a reload looks
//! for the run of blocks that continues what is cached, and what lies behind a hole ages and goes.
//!
//! What is worth least is judged as in the pool (`order.rs`), but a block's cost counts for nothing here: of one session all blocks are
//! worth the same, so that its tail goes before its head.
//!
//! Blocks that are being copied back are locked and stay until they are unlocked; where all is locked, what is evicted is
//! lost as if there were no host tier.
//!
//! It holds no KV and knows no bandwidth: the driver does.

use crate::order::{Densities, EvictionOrder, Expectations, Mark, Standing};
use crate::{BlockHash, BlockMap};
use homing_units::Instant;
use std::collections::BTreeMap;

/// The blocks in host memory.
#[derive(Clone, Debug)]
pub struct HostTier {
    capacity: u32,
    entries: BlockMap<Entry>,
    /// What is not locked.
    order: EvictionOrder<BlockHash>,
    tick: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    used_at: u64,
    locks: u32,
    mark: Mark,
}

impl Entry {
    const fn standing(&self) -> Standing {
        Standing {
            demoted: false,
            tick: self.used_at,
            depth: 0,
            mark: self.mark,
        }
    }
}

/// A block that the pool evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spilled {
    /// Its name.
    pub hash: BlockHash,
    /// Whose it was last.
    pub mark: Mark,
}

/// What [`HostTier::insert`] changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostChange {
    /// Indices, ascending, of the offered blocks that are new here and stay.
    pub stored: Vec<usize>,
    /// Blocks that went to make room, in the order in which they went.
    pub removed: Vec<BlockHash>,
}

impl HostTier {
    /// A tier of so many empty blocks, of which the least recently used goes first; with 0 nothing is ever kept.
    #[must_use]
    pub fn new(capacity: u32) -> Self {
        Self::with_order(capacity, EvictionOrder::new(None))
    }

    /// A tier of so many empty blocks, of which the one that is worth least goes first.
    #[must_use]
    pub fn expecting(capacity: u32) -> Self {
        Self::with_order(capacity, EvictionOrder::new(Some(Expectations::default())))
    }

    fn with_order(capacity: u32, order: EvictionOrder<BlockHash>) -> Self {
        Self {
            capacity,
            entries: BlockMap::default(),
            order,
            tick: 0,
        }
    }

    /// All blocks.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Blocks that hold KV.
    #[must_use]
    pub fn len(&self) -> u32 {
        u32::try_from(self.entries.len()).expect("no more than the capacity")
    }

    /// Whether nothing is here.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether this block is here.
    #[must_use]
    pub fn contains(&self, hash: BlockHash) -> bool {
        self.entries.contains_key(&hash)
    }

    /// How many of these blocks, from the first on, are here without a gap.
    #[must_use]
    pub fn match_run(&self, hashes: &[BlockHash]) -> usize {
        hashes.iter().take_while(|hash| self.contains(**hash)).count()
    }

    /// Takes in what was evicted, in the order in which it went, the last of it as the most recently used; then what is to go first goes
    /// until the rest fits, be it of the new blocks. Blocks that are here already are only used again. Where not all fit beside what is
    /// locked, the first of them are left out.
    pub fn insert(&mut self, evicted: &[Spilled]) -> HostChange {
        let mut change = HostChange::default();
        let locked = self.entries.len() - self.order.len();
        let room = self.capacity as usize - locked;
        let skipped = evicted.len().saturating_sub(room);
        let kept = &evicted[skipped..];
        let mut new = BTreeMap::new();
        for (index, spilled) in kept.iter().enumerate() {
            if self.uses(spilled) {
                new.insert(spilled.hash, skipped + index);
            }
        }
        for _ in self.capacity as usize..self.entries.len() {
            let victim = self.evict();
            if new.remove(&victim).is_none() {
                change.removed.push(victim);
            }
        }
        change.stored = new.into_values().collect();
        change.stored.sort_unstable();
        change
    }

    /// Keeps these blocks until they are unlocked.
    ///
    /// # Panics
    /// If one of them is not here.
    pub fn lock(&mut self, hashes: &[BlockHash]) {
        for hash in hashes {
            let entry = self.entries.get_mut(hash).expect("only what is here is locked");
            if entry.locks == 0 {
                self.order.remove(*hash, &entry.standing());
            }
            entry.locks += 1;
        }
    }

    /// Takes one lock off each of these blocks of a prompt, in the prompt's order. What nobody locks any more counts as just
    /// used, the first of them the most recently, by a session of this class;
    /// where none is named, they are of the class that they were.
    ///
    /// # Panics
    /// If one of them is not locked.
    pub fn unlock(&mut self, hashes: &[BlockHash], class: Option<u8>, now: Instant) {
        for hash in hashes.iter().rev() {
            let entry = self.entries.get_mut(hash).expect("what is locked stays");
            assert!(entry.locks > 0, "`{hash}` is locked");
            entry.locks -= 1;
            if entry.locks == 0 {
                self.tick += 1;
                entry.used_at = self.tick;
                entry.mark = entry.mark.used(class, now);
                self.order.insert(*hash, entry.standing());
            }
        }
    }

    /// Time has passed. Without expectations it does not matter.
    pub fn advance(&mut self, now: Instant) {
        self.order.advance(now);
    }

    /// What is known of returns has changed. Without expectations it does not matter.
    pub fn expect(&mut self, densities: Densities) {
        self.order.expect(densities);
    }

    /// Drops all that is not locked. Returns it, in the order in which it would have gone.
    pub fn clear(&mut self) -> Vec<BlockHash> {
        let dropped = self.order.in_order();
        for hash in &dropped {
            self.forget(*hash);
        }
        dropped
    }

    /// What is here with its locks: first what is not locked, the next to go first, then the rest by name.
    #[must_use]
    pub fn dump(&self) -> Vec<(BlockHash, u32)> {
        let free = self.order.in_order().into_iter().map(|hash| (hash, 0));
        let mut locked: Vec<(BlockHash, u32)> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.locks > 0)
            .map(|(hash, entry)| (*hash, entry.locks))
            .collect();
        locked.sort_unstable();
        free.chain(locked).collect()
    }

    /// Checks everything that must hold between two calls.
    ///
    /// # Panics
    /// If something does not hold, which is a bug here.
    pub fn check_invariants(&self) {
        assert!(self.entries.len() <= self.capacity as usize, "the tier is bounded");
        let locked = self.entries.values().filter(|entry| entry.locks > 0).count();
        assert_eq!(
            self.order.len() + locked,
            self.entries.len(),
            "a block is locked or may go, and here once"
        );
        for hash in self.order.in_order() {
            let entry = self.entries.get(&hash).expect("what may go is here");
            assert_eq!(entry.locks, 0, "`{hash}` may go, so nobody locks it");
        }
    }

    /// A block is the most recently used, unless it is locked. Whether it is new here.
    fn uses(&mut self, spilled: &Spilled) -> bool {
        let known = self.entries.get(&spilled.hash);
        if known.is_some_and(|entry| entry.locks > 0) {
            return false;
        }
        if let Some(entry) = known {
            self.order.remove(spilled.hash, &entry.standing());
        }
        self.tick += 1;
        let entry = Entry {
            used_at: self.tick,
            locks: 0,
            mark: spilled.mark,
        };
        self.order.insert(spilled.hash, entry.standing());
        self.entries.insert(spilled.hash, entry).is_none()
    }

    fn evict(&mut self) -> BlockHash {
        let hash = self.order.first().expect("there is room beside what is locked");
        self.forget(hash);
        hash
    }

    /// Takes out a block that nobody locks.
    fn forget(&mut self, hash: BlockHash) {
        let entry = self.entries.swap_remove(&hash).expect("what may go is here");
        self.order.remove(hash, &entry.standing());
    }
}
