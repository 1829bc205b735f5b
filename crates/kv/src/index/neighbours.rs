//! From one block of a prompt to the next without a look-up by name.
//!
//! Blocks of a prompt are indexed one after the other, so the next block's entry mostly lies beside the last one's: above
//! it where the index still grew, below it where it took the places of a prompt that was forgotten from its tail on. An
//! entry says its own hash, so a guess is checked and a wrong one costs a look-up and nothing else. Without this a
//! walk misses the processor's cache several times a block, and a router is slower the more it has indexed.

use super::ResidencyIndex;
use crate::BlockHash;

/// A walk along a prompt.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Neighbours {
    last: Option<u32>,
    /// The last step went down.
    down: bool,
}

impl Neighbours {
    /// A walk that goes on behind this entry.
    pub(super) const fn after(entry: Option<u32>) -> Self {
        Self {
            last: entry,
            down: false,
        }
    }

    /// The entry of the walk's next block; `None` where it is not indexed.
    pub(super) fn find(&mut self, index: &ResidencyIndex, hash: BlockHash) -> Option<u32> {
        let slot = self.guess(index, hash).or_else(|| index.names.get(&hash).copied());
        self.last = slot;
        slot
    }

    fn guess(&mut self, index: &ResidencyIndex, hash: BlockHash) -> Option<u32> {
        let last = self.last?;
        for down in [self.down, !self.down] {
            let slot = if down { last.wrapping_sub(1) } else { last + 1 };
            let entry = index.entries.get(slot as usize).and_then(Option::as_ref);
            if entry.is_some_and(|entry| entry.hash == hash) {
                self.down = down;
                return Some(slot);
            }
        }
        None
    }
}
