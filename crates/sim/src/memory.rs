//! What lies in a worker's memory, block by block: a check that costs, for runs that look for bugs.
//!
//! The engine core moves numbers of blocks about and never sees what is in them. Here each block of the pool carries the
//! name of what was written into it and how much of it. A step reads its whole context through the block table and writes
//! what it computes; a transfer copies from the source's blocks. A block that was freed before the puller's acknowledgement,
//! handed out while somebody still wrote into it, or shared by mistake is found as the wrong name, where a real worker
//! would have answered with wrong text.
//!
//! It also keeps what the worker's KV events say that is cached, all of them and at once, to compare the router's index with.

use homing_engine::api::{KvChange, Reload};
use homing_kv::{BlockHash, BlockId, Tier};
use homing_units::RequestId;
use std::collections::{BTreeMap, BTreeSet};

/// The memory of one worker.
#[derive(Debug)]
pub(crate) struct Memory {
    block_size: u32,
    blocks: Vec<Cell>,
    /// What is being copied from host memory, and for whom.
    reloads: BTreeMap<RequestId, Reload>,
    cached: BTreeSet<(Tier, BlockHash)>,
}

/// What a block holds: the first tokens of a block of this name; `None` for garbage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cell {
    name: Option<BlockHash>,
    tokens: u32,
}

impl Memory {
    pub(crate) fn new(blocks: u32, block_size: u32) -> Self {
        Self {
            block_size,
            blocks: vec![Cell::default(); blocks as usize],
            reloads: BTreeMap::new(),
            cached: BTreeSet::new(),
        }
    }

    /// All is lost.
    pub(crate) fn lose(&mut self) {
        *self = Self::new(
            u32::try_from(self.blocks.len()).expect("it was made of so many"),
            self.block_size,
        );
    }

    /// Whether the first `tokens` tokens of a request lie where its table says. `names` are those of its blocks.
    ///
    /// # Errors
    /// What was found instead.
    pub(crate) fn check(&self, table: &[BlockId], names: &[BlockHash], tokens: u32) -> Result<(), String> {
        let needed = tokens.div_ceil(self.block_size) as usize;
        if table.len() < needed || names.len() < needed {
            return Err(format!("`{}` blocks in the table for `{tokens}` tokens", table.len()));
        }
        for (place, (block, name)) in table.iter().zip(names).enumerate().take(needed) {
            let before = u32::try_from(place).expect("no more blocks than tokens") * self.block_size;
            let wanted = (tokens - before).min(self.block_size);
            let cell = self.blocks[block.0 as usize];
            if cell.name != Some(*name) || cell.tokens < wanted {
                return Err(format!(
                    "{cell:?} in block `{}`, the `{place}`th of the table, expected `{wanted}` tokens of `{name}`",
                    block.0
                ));
            }
        }
        Ok(())
    }

    /// A step computes these tokens of a request.
    pub(crate) fn write(&mut self, table: &[BlockId], names: &[BlockHash], start: u32, count: u32) {
        for token in start..start + count {
            let place = (token / self.block_size) as usize;
            let (Some(block), Some(name)) = (table.get(place), names.get(place)) else {
                continue;
            };
            self.blocks[block.0 as usize] = Cell {
                name: Some(*name),
                tokens: token % self.block_size + 1,
            };
        }
    }

    /// A step computes tokens of a request that nobody knows any more.
    pub(crate) fn scribble(&mut self, table: &[BlockId], start: u32, count: u32) {
        let first = (start / self.block_size) as usize;
        let last = ((start + count).div_ceil(self.block_size) as usize).min(table.len());
        self.spoil(table.get(first..last).unwrap_or_default());
    }

    /// Half of what was to come into these blocks has come.
    pub(crate) fn spoil(&mut self, blocks: &[BlockId]) {
        for block in blocks {
            self.blocks[block.0 as usize] = Cell::default();
        }
    }

    /// What lies in these blocks.
    pub(crate) fn read(&self, blocks: &[BlockId]) -> Vec<Cell> {
        blocks.iter().map(|block| self.blocks[block.0 as usize]).collect()
    }

    /// What was read elsewhere comes into these blocks.
    pub(crate) fn fill(&mut self, blocks: &[BlockId], cells: &[Cell]) {
        for (block, cell) in blocks.iter().zip(cells) {
            self.blocks[block.0 as usize] = *cell;
        }
    }

    pub(crate) fn begin_reload(&mut self, reload: Reload) {
        self.reloads.insert(reload.id, reload);
    }

    pub(crate) fn end_reload(&mut self, id: RequestId) {
        let Some(reload) = self.reloads.remove(&id) else { return };
        for (block, name) in reload.blocks.iter().zip(&reload.hashes) {
            self.blocks[block.0 as usize] = Cell {
                name: Some(*name),
                tokens: self.block_size,
            };
        }
    }

    /// A KV event of the worker.
    pub(crate) fn note(&mut self, change: &KvChange) {
        match change {
            KvChange::Stored { hashes, tier, .. } => self.cached.extend(hashes.iter().map(|hash| (*tier, *hash))),
            KvChange::Removed { hashes, tier } => {
                for hash in hashes {
                    self.cached.remove(&(*tier, *hash));
                }
            }
            KvChange::Cleared => self.cached.clear(),
        }
    }

    /// What is cached, as all events say.
    pub(crate) const fn cached(&self) -> &BTreeSet<(Tier, BlockHash)> {
        &self.cached
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_that_others_wrote_into_is_found() {
        let [one, two, other] = [1, 2, 3].map(BlockHash);
        let table = [BlockId(3), BlockId(0)];
        let mut memory = Memory::new(4, 16);
        memory.write(&table, &[one, two], 0, 20);
        assert_eq!(memory.check(&table, &[one, two], 20), Ok(()));
        assert!(memory.check(&table, &[one, two], 21).is_err(), "never computed");
        assert!(memory.check(&table, &[one, other], 20).is_err(), "another's block");
        memory.write(&[BlockId(3)], &[other], 0, 1);
        assert!(memory.check(&table, &[one, two], 20).is_err(), "overwritten");
        let mut puller = Memory::new(2, 16);
        puller.fill(&[BlockId(1)], &memory.read(&[BlockId(0)]));
        assert_eq!(puller.check(&[BlockId(1)], &[two], 4), Ok(()));
        puller.spoil(&[BlockId(1)]);
        assert!(puller.check(&[BlockId(1)], &[two], 4).is_err());
    }
}
