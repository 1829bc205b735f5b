//! The paged pool, the host tier behind it, and the log of what changed in them: nothing enters or leaves the cache
//! without a KV event.
//!
//! It does not know who should get blocks; the scheduler does.

use crate::api::{KvChange, KvEvent, Output};
use crate::sequence::Sequence;
use homing_kv::{BlockHash, BlockId, BlockPool, Committed, Evicted, HostTier, Tier};
use homing_units::{BootEpoch, RequestId};
use std::collections::VecDeque;

/// The pool with its event log.
#[derive(Debug)]
pub(crate) struct Cache {
    pool: BlockPool,
    host: HostTier,
    epoch: BootEpoch,
    next_event: u64,
    /// Blocks evicted since the start.
    pub evicted_blocks: u64,
    /// Allocations that evicted, since the start.
    pub evictions: u64,
}

impl Cache {
    pub fn new(blocks: u32, host_blocks: u32, epoch: BootEpoch) -> Self {
        Self {
            pool: BlockPool::new(blocks),
            host: HostTier::new(host_blocks),
            epoch,
            next_event: 0,
            evicted_blocks: 0,
            evictions: 0,
        }
    }

    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    pub fn host(&self) -> &HostTier {
        &self.host
    }

    /// Blocks that can be had: free ones and cached ones that nobody uses.
    pub fn available(&self) -> u32 {
        self.pool.free() + self.pool.evictable()
    }

    pub fn acquire_prefix(&mut self, hashes: &[BlockHash]) -> Vec<BlockId> {
        self.pool.acquire_prefix(hashes)
    }

    /// All of `count` blocks or none. What is evicted for `id` goes to the host tier.
    pub fn allocate(&mut self, id: RequestId, count: u32, outputs: &mut VecDeque<Output>) -> Option<Vec<BlockId>> {
        let allocation = self.pool.allocate(count)?;
        if !allocation.evicted.is_empty() {
            self.evictions += 1;
            self.evicted_blocks += allocation.evicted.len() as u64;
            let hashes: Vec<BlockHash> = allocation.evicted.iter().map(|evicted| evicted.hash).collect();
            self.offload(id, &allocation.evicted, &hashes, outputs);
            self.removed(Tier::Gpu, hashes, outputs);
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

    /// Puts the cached blocks of this prompt that lead to nothing else among the first to go.
    pub fn demote(&mut self, hashes: &[BlockHash]) {
        self.pool.demote(hashes);
    }

    /// Keeps blocks in the host tier until they are unlocked.
    pub fn lock_host(&mut self, hashes: &[BlockHash]) {
        self.host.lock(hashes);
    }

    pub fn unlock_host(&mut self, hashes: &[BlockHash]) {
        self.host.unlock(hashes);
    }

    /// Drops from the pool what nobody uses, as one change.
    pub fn drop_unused(&mut self, outputs: &mut VecDeque<Output>) {
        let dropped = self.pool.clear_unused();
        self.removed(Tier::Gpu, dropped, outputs);
    }

    /// Drops what nobody uses, in both tiers.
    pub fn clear(&mut self, outputs: &mut VecDeque<Output>) {
        let dropped = self.pool.clear_unused();
        let dropped_from_host = self.host.clear();
        let nothing_dropped = dropped.is_empty() && dropped_from_host.is_empty();
        if self.pool.cached() == 0 && self.host.is_empty() && !nothing_dropped {
            self.log(KvChange::Cleared, outputs);
            return;
        }
        self.removed(Tier::Gpu, dropped, outputs);
        self.removed(Tier::Host, dropped_from_host, outputs);
    }

    /// Gives a private copy back for the cached block of that name.
    fn exchange(&mut self, ours: BlockId, hash: BlockHash) -> BlockId {
        let cached = self.pool.find(hash).expect("a duplicate is cached");
        self.pool.retain(cached);
        self.pool.release(&[ours]);
        cached
    }

    /// Evicted blocks go to the host tier. Announced before they are gone from the pool, so that a listener knows their
    /// parents still.
    fn offload(&mut self, id: RequestId, evicted: &[Evicted], hashes: &[BlockHash], outputs: &mut VecDeque<Output>) {
        let change = self.host.insert(hashes);
        let mut stored = change.stored.iter().map(|index| evicted[*index]).rev().peekable();
        while let Some(first) = stored.next() {
            let mut hashes = vec![first.hash];
            while let Some(next) = stored.next_if(|next| next.parent == hashes.last().copied()) {
                hashes.push(next.hash);
            }
            let change = KvChange::Stored {
                request: id,
                first_block: first.index,
                parent: first.parent,
                hashes,
                tier: Tier::Host,
            };
            self.log(change, outputs);
        }
        self.removed(Tier::Host, change.removed, outputs);
    }

    fn removed(&mut self, tier: Tier, hashes: Vec<BlockHash>, outputs: &mut VecDeque<Output>) {
        if !hashes.is_empty() {
            self.log(KvChange::Removed { hashes, tier }, outputs);
        }
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
