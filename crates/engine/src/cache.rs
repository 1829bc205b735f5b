//! The paged pool and the log of what changed in it: nothing enters or leaves the cache without a KV event.
//!
//! It does not know who should get blocks; the scheduler does.

use crate::api::{KvChange, KvEvent, Output};
use crate::sequence::Sequence;
use homing_kv::{BlockHash, BlockId, BlockPool, Committed, Tier};
use homing_units::{BootEpoch, RequestId};
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
        let mut run = Run::new(sequence.id);
        let mut block = sequence.named;
        while block < end {
            let Some(hash) = sequence.hash(block) else { break };
            let parent = block.checked_sub(1).and_then(|before| sequence.hash(before));
            let ours = sequence.table[block as usize];
            match self.pool.commit(ours, parent, hash) {
                Committed::Stored => run.push(block, parent, hash),
                Committed::Duplicate => {
                    sequence.table[block as usize] = self.exchange(ours, hash);
                    self.stored(run.take(), outputs);
                }
                Committed::Orphan => unreachable!("a request holds the cached block before block `{block}`"),
            }
            block += 1;
        }
        self.stored(run.take(), outputs);
        sequence.named = block;
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

    fn stored(&mut self, run: Option<KvChange>, outputs: &mut VecDeque<Output>) {
        if let Some(change) = run {
            self.log(change, outputs);
        }
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

/// Blocks of one request that were stored one after the other: one event.
struct Run {
    request: RequestId,
    first_block: u32,
    parent: Option<BlockHash>,
    hashes: Vec<BlockHash>,
}

impl Run {
    fn new(request: RequestId) -> Self {
        Self {
            request,
            first_block: 0,
            parent: None,
            hashes: Vec::new(),
        }
    }

    fn push(&mut self, block: u32, parent: Option<BlockHash>, hash: BlockHash) {
        if self.hashes.is_empty() {
            self.first_block = block;
            self.parent = parent;
        }
        self.hashes.push(hash);
    }

    fn take(&mut self) -> Option<KvChange> {
        let hashes = std::mem::take(&mut self.hashes);
        (!hashes.is_empty()).then_some(KvChange::Stored {
            request: self.request,
            first_block: self.first_block,
            parent: self.parent,
            hashes,
            tier: Tier::Gpu,
        })
    }
}
