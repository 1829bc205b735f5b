//! The paged pool and the log of what changed in it: nothing enters or leaves the cache without a KV event.
//!
//! It does not know who should get blocks; the scheduler does.

use crate::api::{KvChange, KvEvent, Output};
use crate::sequence::Sequence;
use homing_kv::{BlockHash, BlockId, BlockPool, Committed, Tier};
use homing_units::BootEpoch;
use std::collections::VecDeque;

/// The pool with its event log.
#[derive(Debug)]
pub(crate) struct Cache {
    pool: BlockPool,
    epoch: BootEpoch,
    next_event: u64,
    /// Blocks evicted since the start.
    pub evicted_blocks: u64,
    /// Allocations that evicted, since the start.
    pub evictions: u64,
}

impl Cache {
    pub fn new(blocks: u32, epoch: BootEpoch) -> Self {
        Self {
            pool: BlockPool::new(blocks),
            epoch,
            next_event: 0,
            evicted_blocks: 0,
            evictions: 0,
        }
    }

    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Blocks that can be had: free ones and cached ones that nobody uses.
    pub fn available(&self) -> u32 {
        self.pool.free() + self.pool.evictable()
    }

    pub fn acquire_prefix(&mut self, hashes: &[BlockHash]) -> Vec<BlockId> {
        self.pool.acquire_prefix(hashes)
    }

    /// All of `count` blocks or none.
    pub fn allocate(&mut self, count: u32, outputs: &mut VecDeque<Output>) -> Option<Vec<BlockId>> {
        let allocation = self.pool.allocate(count)?;
        if !allocation.evicted.is_empty() {
            self.evictions += 1;
            self.evicted_blocks += allocation.evicted.len() as u64;
            self.removed(allocation.evicted, outputs);
        }
        Some(allocation.blocks)
    }

    pub fn release(&mut self, blocks: &[BlockId]) {
        self.pool.release(blocks);
    }

    /// Names the whole computed blocks of a request that are not named yet, as far as their names are known.
    ///
    /// Where another request computed the same block first, the request gives its own copy back and uses the cached one. So
    /// a request holds every cached block above its own, none is pinned by a stranger's successor, and a request that is
    /// alone can have the whole pool.
    pub fn commit(&mut self, sequence: &mut Sequence, block_size: u32, outputs: &mut VecDeque<Output>) {
        let end = sequence.computed / block_size;
        let mut first = sequence.named;
        let mut hashes = Vec::new();
        while sequence.named < end {
            let block = sequence.named;
            let Some(hash) = sequence.hash(block) else { break };
            let ours = sequence.table[block as usize];
            match self.pool.commit(ours, parent_of(sequence, block), hash) {
                Committed::Stored => hashes.push(hash),
                Committed::Duplicate => {
                    assert!(hashes.is_empty(), "the block before a cached one is cached");
                    sequence.table[block as usize] = self.exchange(ours, hash);
                    first = block + 1;
                }
                Committed::Orphan => unreachable!("a request holds the cached block before block `{block}`"),
            }
            sequence.named += 1;
        }
        if hashes.is_empty() {
            return;
        }
        let change = KvChange::Stored {
            request: sequence.id,
            first_block: first,
            parent: parent_of(sequence, first),
            hashes,
            tier: Tier::Gpu,
        };
        self.log(change, outputs);
    }

    /// Drops what nobody uses.
    pub fn clear(&mut self, outputs: &mut VecDeque<Output>) {
        let dropped = self.pool.clear_unused();
        if dropped.is_empty() {
            return;
        }
        if self.pool.cached() == 0 {
            self.log(KvChange::Cleared, outputs);
        } else {
            self.removed(dropped, outputs);
        }
    }

    /// Gives a private copy back for the cached block of that name.
    fn exchange(&mut self, ours: BlockId, hash: BlockHash) -> BlockId {
        let cached = self.pool.find(hash).expect("a duplicate is cached");
        self.pool.retain(cached);
        self.pool.release(&[ours]);
        cached
    }

    fn removed(&mut self, hashes: Vec<BlockHash>, outputs: &mut VecDeque<Output>) {
        let tier = Tier::Gpu;
        self.log(KvChange::Removed { hashes, tier }, outputs);
    }

    fn log(&mut self, change: KvChange, outputs: &mut VecDeque<Output>) {
        outputs.push_back(Output::Kv(KvEvent {
            epoch: self.epoch,
            sequence: self.next_event,
            change,
        }));
        self.next_event += 1;
    }
}

/// The name of the block before this one.
fn parent_of(sequence: &Sequence, block: u32) -> Option<BlockHash> {
    block.checked_sub(1).and_then(|before| sequence.hash(before))
}
