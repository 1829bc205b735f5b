//! The paged pool, the host tier behind it, what is learnt of who comes back to them, and the log of what changed in them: nothing
//! enters or leaves the cache without a KV event.
//!
//! It does not know who should get blocks; the scheduler does.

use crate::api::{EngineConfig, EngineKind, Eviction, KvChange, KvEvent, Output, Owner};
use crate::returns::Returns;
use crate::sequence::Sequence;
use homing_kv::{BlockHash, BlockId, BlockPool, Committed, Evicted, Expectations, HostTier, Spilled, Tier};
use homing_units::{BootEpoch, Instant, RequestId, SessionId};
use std::collections::{BTreeMap, VecDeque};

/// Contexts of sessions are kept, to see what supersedes them, up to so many times the blocks of the pool.
const CONTEXTS_PER_POOL: usize = 2;

/// The pool with its event log.
#[derive(Debug)]
pub(crate) struct Cache {
    pool: BlockPool,
    host: HostTier,
    /// `None` where the least recently used is evicted first.
    returns: Option<Returns>,
    now: Instant,
    epoch: BootEpoch,
    next_event: u64,
    /// Blocks evicted since the start.
    pub evicted_blocks: u64,
    /// Allocations that evicted, since the start.
    pub evictions: u64,
}

impl Cache {
    pub fn new(config: &EngineConfig) -> Self {
        let (blocks, host_blocks) = (config.kv_blocks, host_blocks(config));
        let (pool, host, returns) = match expectations(config) {
            None => (BlockPool::new(blocks), HostTier::new(host_blocks), None),
            Some(expectations) => (
                BlockPool::expecting(blocks, expectations),
                HostTier::expecting(host_blocks),
                Some(Returns::new(CONTEXTS_PER_POOL * blocks as usize)),
            ),
        };
        Self {
            pool,
            host,
            returns,
            now: Instant::ZERO,
            epoch: config.boot_epoch,
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

    /// Time has passed, which never goes back.
    pub const fn advance(&mut self, now: Instant) {
        self.now = now;
    }

    /// A request with this owner has come.
    pub fn arrives(&mut self, owner: Option<Owner>) {
        if let (Some(returns), Some(owner)) = (&mut self.returns, owner) {
            returns.arrives(self.now, owner);
        }
    }

    /// A request has gone, and its blocks are given back. What it has superseded of its session is among the first to go.
    pub fn leaves(&mut self, sequence: &Sequence, block_size: u32) {
        let (Some(returns), Some(owner)) = (&mut self.returns, sequence.owner) else {
            return;
        };
        let context = sequence
            .answered
            .then(|| sequence.reusable_hashes(block_size).into_owned());
        let superseded = returns.leaves(self.now, owner.session, context);
        if !superseded.is_empty() {
            self.pool.demote(&superseded);
        }
    }

    /// All of `count` blocks or none. What is evicted for `id` goes to the host tier.
    pub fn allocate(&mut self, id: RequestId, count: u32, outputs: &mut VecDeque<Output>) -> Option<Vec<BlockId>> {
        if count > self.pool.free() {
            self.judge_again();
        }
        let allocation = self.pool.allocate(count)?;
        if !allocation.evicted.is_empty() {
            self.evictions += 1;
            self.evicted_blocks += allocation.evicted.len() as u64;
            let hashes: Vec<BlockHash> = allocation.evicted.iter().map(|evicted| evicted.hash).collect();
            self.offload(id, &allocation.evicted, outputs);
            self.removed(Tier::Gpu, hashes, outputs);
        }
        Some(allocation.blocks)
    }

    /// Gives back what a request with this owner used.
    pub fn release(&mut self, blocks: &[BlockId], owner: Option<Owner>) {
        self.pool.release_as(blocks, self.class(owner), self.now);
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

    /// They were copied back for a request with this owner.
    pub fn unlock_host(&mut self, hashes: &[BlockHash], owner: Option<Owner>) {
        self.host.unlock(hashes, self.class(owner), self.now);
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

    /// Checks what is remembered of sessions, given how many requests of each are in the engine.
    ///
    /// # Panics
    /// If something does not hold, which is a bug in the engine.
    pub fn check_returns(&self, here: &BTreeMap<SessionId, u32>) {
        if let Some(returns) = &self.returns {
            returns.check_invariants(here);
        }
    }

    fn class(&self, owner: Option<Owner>) -> Option<u8> {
        self.returns.as_ref()?.class(owner?.session)
    }

    /// What is worth how much now; before something is evicted.
    fn judge_again(&mut self) {
        let Some(returns) = &mut self.returns else { return };
        if let Some(densities) = returns.densities(self.now) {
            self.host.expect(densities.clone());
            self.pool.expect(densities);
        }
        self.pool.advance(self.now);
        self.host.advance(self.now);
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
    fn offload(&mut self, id: RequestId, evicted: &[Evicted], outputs: &mut VecDeque<Output>) {
        let spilled: Vec<Spilled> = evicted
            .iter()
            .map(|evicted| Spilled {
                hash: evicted.hash,
                mark: evicted.mark,
            })
            .collect();
        let change = self.host.insert(&spilled);
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

/// What a session-slot engine drops is gone.
const fn host_blocks(config: &EngineConfig) -> u32 {
    match config.kind {
        EngineKind::Block | EngineKind::Vllm => config.host_blocks,
        EngineKind::SessionSlot(_) => 0,
    }
}

/// What is known of the worth of blocks before anything was seen; `None` where that is not what counts.
fn expectations(config: &EngineConfig) -> Option<Expectations> {
    let Eviction::Expected {
        cost_doubles_after_tokens,
    } = config.eviction
    else {
        return None;
    };
    match config.kind {
        EngineKind::Block => Some(Expectations {
            cost_doubles_after: cost_doubles_after_tokens
                .filter(|_| config.host_blocks == 0)
                .map(|tokens| (tokens / config.block_size).max(1)),
            ..Expectations::default()
        }),
        EngineKind::SessionSlot(_) | EngineKind::Vllm => None,
    }
}

/// The name of the block before this one.
fn parent_of(sequence: &Sequence, block: u32) -> Option<BlockHash> {
    block.checked_sub(1).and_then(|before| sequence.hash(before))
}
