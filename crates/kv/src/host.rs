//! The host tier: which blocks lie in host memory, bounded, the least recently used first to go.
//!
//! A block comes here when the accelerator's pool evicts it, and it stays when it is copied back: so a block may be in
//! both, and what is evicted a second time needs no second copy. A prompt's blocks come tail first, as the pool evicts
//! them, so its tail is also the first to go from here. Nothing enforces that a block's parent is here too: a reload looks
//! for the run of blocks that continues what is cached, and what lies behind a hole ages and goes.
//!
//! Blocks that are being copied back are locked and stay until they are unlocked; where all is locked, what is evicted is
//! lost as if there were no host tier.
//!
//! It holds no KV and knows no bandwidth: the driver does.

use crate::{BlockHash, BlockMap};
use std::collections::BTreeMap;

/// The blocks in host memory.
#[derive(Clone, Debug)]
pub struct HostTier {
    capacity: u32,
    entries: BlockMap<Entry>,
    /// What is not locked, by last use.
    order: BTreeMap<u64, BlockHash>,
    tick: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    used_at: u64,
    locks: u32,
}

/// What [`HostTier::insert`] changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostChange {
    /// Indices, ascending, of the offered blocks that are new here.
    pub stored: Vec<usize>,
    /// Blocks that went to make room, the least recently used first.
    pub removed: Vec<BlockHash>,
}

impl HostTier {
    /// A tier of so many empty blocks; with 0 nothing is ever kept.
    #[must_use]
    pub fn new(capacity: u32) -> Self {
        Self {
            capacity,
            entries: BlockMap::default(),
            order: BTreeMap::new(),
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

    /// Takes in what was evicted, in the order in which it went, the last of it as the most recently used. Blocks that are
    /// here already are only used again. Where not all fit beside what is locked, the first of them are left out.
    pub fn insert(&mut self, evicted: &[BlockHash]) -> HostChange {
        let mut change = HostChange::default();
        let locked = self.entries.len() - self.order.len();
        let room = self.capacity as usize - locked;
        let skipped = evicted.len().saturating_sub(room);
        let kept = &evicted[skipped..];
        // First of all: what comes again is not what goes for the others.
        kept.iter().for_each(|hash| self.touch(*hash));
        for (index, hash) in kept.iter().enumerate() {
            if self.entries.contains_key(hash) {
                self.touch(*hash);
                continue;
            }
            if self.entries.len() == self.capacity as usize {
                change.removed.push(self.evict());
            }
            self.tick += 1;
            let entry = Entry {
                used_at: self.tick,
                locks: 0,
            };
            self.entries.insert(*hash, entry);
            self.order.insert(self.tick, *hash);
            change.stored.push(skipped + index);
        }
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
                self.order.remove(&entry.used_at);
            }
            entry.locks += 1;
        }
    }

    /// Takes one lock off each of these blocks of a prompt, in the prompt's order. What nobody locks any more counts as just
    /// used, the first of them the most recently.
    ///
    /// # Panics
    /// If one of them is not locked.
    pub fn unlock(&mut self, hashes: &[BlockHash]) {
        for hash in hashes.iter().rev() {
            let entry = self.entries.get_mut(hash).expect("what is locked stays");
            assert!(entry.locks > 0, "`{hash}` is locked");
            entry.locks -= 1;
            if entry.locks == 0 {
                self.tick += 1;
                entry.used_at = self.tick;
                self.order.insert(self.tick, *hash);
            }
        }
    }

    /// Drops all that is not locked. Returns it, the least recently used first.
    pub fn clear(&mut self) -> Vec<BlockHash> {
        let dropped: Vec<BlockHash> = std::mem::take(&mut self.order).into_values().collect();
        for hash in &dropped {
            self.entries.swap_remove(hash);
        }
        dropped
    }

    /// What is here with its locks: first what is not locked, the next to go first, then the rest by name.
    #[must_use]
    pub fn dump(&self) -> Vec<(BlockHash, u32)> {
        let free = self.order.values().map(|hash| (*hash, 0));
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
        for (used_at, hash) in &self.order {
            let entry = self.entries.get(hash).expect("what may go is here");
            assert_eq!(entry.used_at, *used_at, "`{hash}` stands at its last use");
            assert_eq!(entry.locks, 0, "`{hash}` may go, so nobody locks it");
        }
    }

    /// Used again, if it is here; a locked block is not in the order.
    fn touch(&mut self, hash: BlockHash) {
        let Some(entry) = self.entries.get_mut(&hash).filter(|entry| entry.locks == 0) else {
            return;
        };
        self.order.remove(&entry.used_at);
        self.tick += 1;
        entry.used_at = self.tick;
        self.order.insert(self.tick, hash);
    }

    fn evict(&mut self) -> BlockHash {
        let (_, hash) = self.order.pop_first().expect("there is room beside what is locked");
        self.entries.swap_remove(&hash);
        hash
    }
}
