//! The pool against a naive model: after every operation of a random sequence, both must have the same state, block for
//! block. The pools have a handful of blocks, so that nearly every allocation evicts.
//!
//! The model keeps no counters and no order: it answers every question by looking at all blocks.

#![expect(clippy::unwrap_used, reason = "a test ends at the first surprise")]

use homing_kv::{Allocation, BlockHash, BlockId, BlockPool, BlockState, Committed, Evicted, PoolDump, hash_blocks};
use proptest::collection::vec;
use proptest::prelude::*;

/// Tokens of a prompt, one a block. Few values, so that prompts share prefixes.
type Tokens = Vec<u32>;

#[derive(Clone, Debug)]
enum Operation {
    /// A whole request: takes the cached prefix, allocates and names the rest; gives up where the pool is full.
    Compute(Tokens),
    /// Holds the cached prefix of a prompt.
    Acquire(Tokens),
    /// Holds so many private blocks.
    Allocate(u32),
    /// Names one block of a holder as the last block of a prompt, whatever else is cached.
    Commit(usize, usize, Tokens),
    /// One more holder for one block of a holder.
    Retain(usize, usize),
    /// One more holder for a block that is cached, held or not.
    RetainCached(Tokens),
    /// A holder gives all of its blocks back.
    Release(usize),
    Demote(Tokens),
    ClearUnused,
}

fn tokens() -> impl Strategy<Value = Tokens> {
    vec(0..3_u32, 1..6)
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        6 => tokens().prop_map(Operation::Compute),
        1 => tokens().prop_map(Operation::Acquire),
        2 => (0..4_u32).prop_map(Operation::Allocate),
        4 => (any::<usize>(), any::<usize>(), tokens()).prop_map(|(a, b, c)| Operation::Commit(a, b, c)),
        1 => (any::<usize>(), any::<usize>()).prop_map(|(a, b)| Operation::Retain(a, b)),
        1 => tokens().prop_map(Operation::RetainCached),
        8 => any::<usize>().prop_map(Operation::Release),
        3 => tokens().prop_map(Operation::Demote),
        1 => Just(Operation::ClearUnused),
    ]
}

#[derive(Clone, Debug, Default)]
struct ModelBlock {
    references: u32,
    name: Option<(BlockHash, Option<BlockHash>)>,
    released_at: u64,
    demoted: bool,
}

#[derive(Debug)]
struct Model {
    blocks: Vec<ModelBlock>,
    free: Vec<BlockId>,
    releases: u64,
}

impl Model {
    fn new(blocks: u32) -> Self {
        let free = (0..blocks).rev().map(BlockId).collect();
        Self {
            blocks: vec![ModelBlock::default(); blocks as usize],
            free,
            releases: 0,
        }
    }

    fn block(&mut self, block: BlockId) -> &mut ModelBlock {
        &mut self.blocks[block.0 as usize]
    }

    fn find(&self, hash: BlockHash) -> Option<BlockId> {
        let index = self
            .blocks
            .iter()
            .position(|block| block.name.is_some_and(|(name, _)| name == hash))?;
        Some(BlockId(u32::try_from(index).unwrap()))
    }

    fn children(&self, index: usize) -> Vec<usize> {
        let Some((hash, _)) = self.blocks[index].name else {
            return Vec::new();
        };
        let below = |block: &ModelBlock| block.name.is_some_and(|(_, parent)| parent == Some(hash));
        (0..self.blocks.len())
            .filter(|other| below(&self.blocks[*other]))
            .collect()
    }

    fn pinned(&self, index: usize) -> bool {
        self.blocks[index].references > 0 || self.children(index).into_iter().any(|child| self.pinned(child))
    }

    /// Cached blocks that nothing needs and that have nothing below them, next to go first.
    fn leaves(&self) -> Vec<usize> {
        let idle = |index: &usize| self.blocks[*index].name.is_some() && !self.pinned(*index);
        let mut leaves: Vec<usize> = (0..self.blocks.len())
            .filter(idle)
            .filter(|index| self.children(*index).is_empty())
            .collect();
        leaves.sort_by_key(|index| (!self.blocks[*index].demoted, self.blocks[*index].released_at));
        leaves
    }

    fn evictable(&self) -> usize {
        (0..self.blocks.len())
            .filter(|index| self.blocks[*index].name.is_some() && !self.pinned(*index))
            .count()
    }

    fn evict(&mut self) -> Evicted {
        let leaf = self.leaves()[0];
        let (hash, parent) = std::mem::take(&mut self.blocks[leaf]).name.unwrap();
        self.free.push(BlockId(u32::try_from(leaf).unwrap()));
        let index = parent.map_or(0, |parent| self.index(parent) + 1);
        Evicted { hash, parent, index }
    }

    /// How many blocks come before a cached one in its prompt.
    fn index(&self, hash: BlockHash) -> u32 {
        let block = self.find(hash).expect("a cached block's parent is cached");
        let (_, parent) = self.blocks[block.0 as usize].name.unwrap();
        parent.map_or(0, |parent| self.index(parent) + 1)
    }

    /// What is used again is an ordinary block again.
    fn forgive(&mut self) {
        for index in 0..self.blocks.len() {
            if self.pinned(index) {
                self.blocks[index].demoted = false;
            }
        }
    }

    fn match_prefix(&self, hashes: &[BlockHash]) -> usize {
        hashes.iter().take_while(|hash| self.find(**hash).is_some()).count()
    }

    fn acquire_prefix(&mut self, hashes: &[BlockHash]) -> Vec<BlockId> {
        let blocks: Vec<BlockId> = hashes.iter().map_while(|hash| self.find(*hash)).collect();
        blocks.iter().for_each(|block| self.retain(*block));
        blocks
    }

    fn allocate(&mut self, count: u32) -> Option<Allocation> {
        let count = count as usize;
        if self.free.len() + self.evictable() < count {
            return None;
        }
        let mut evicted = Vec::new();
        while self.free.len() < count {
            evicted.push(self.evict());
        }
        let blocks: Vec<BlockId> = (0..count).map(|_| self.free.pop().unwrap()).collect();
        blocks.iter().for_each(|block| self.block(*block).references = 1);
        Some(Allocation { blocks, evicted })
    }

    fn commit(&mut self, block: BlockId, parent: Option<BlockHash>, hash: BlockHash) -> Committed {
        if self.find(hash).is_some() {
            return Committed::Duplicate;
        }
        if parent.is_some_and(|parent| self.find(parent).is_none()) {
            return Committed::Orphan;
        }
        self.block(block).name = Some((hash, parent));
        self.forgive();
        Committed::Stored
    }

    fn retain(&mut self, block: BlockId) {
        self.block(block).references += 1;
        self.forgive();
    }

    fn release(&mut self, blocks: &[BlockId]) {
        for id in blocks.iter().rev() {
            let now = self.releases;
            let block = self.block(*id);
            block.references -= 1;
            if block.references == 0 && block.name.is_none() {
                self.free.push(*id);
            } else if block.references == 0 {
                block.released_at = now;
                self.releases += 1;
            }
        }
    }

    fn demote(&mut self, hashes: &[BlockHash]) -> u32 {
        let mut demoted = 0;
        for hash in hashes[..self.match_prefix(hashes)].iter().rev() {
            let block = self.find(*hash).unwrap();
            let index = block.0 as usize;
            if self.pinned(index)
                || self
                    .children(index)
                    .into_iter()
                    .any(|child| !self.blocks[child].demoted)
            {
                break;
            }
            demoted += u32::from(!self.blocks[index].demoted);
            self.blocks[index].demoted = true;
        }
        demoted
    }

    fn clear_unused(&mut self) -> Vec<BlockHash> {
        (0..self.evictable()).map(|_| self.evict().hash).collect()
    }

    fn dump(&self) -> PoolDump {
        let state = |index: usize| {
            let block = &self.blocks[index];
            (block.references > 0 || block.name.is_some()).then(|| BlockState {
                block: BlockId(u32::try_from(index).unwrap()),
                references: block.references,
                hash: block.name.map(|(hash, _)| hash),
                parent: block.name.and_then(|(_, parent)| parent),
                pinned: self.pinned(index),
                demoted: block.demoted,
            })
        };
        PoolDump {
            blocks: (0..self.blocks.len()).filter_map(state).collect(),
            free: self.free.clone(),
            leaves: self
                .leaves()
                .into_iter()
                .map(|index| self.blocks[index].name.unwrap().0)
                .collect(),
        }
    }
}

/// The pool, its model, and who holds what.
struct Pair {
    pool: BlockPool,
    model: Model,
    holders: Vec<Vec<BlockId>>,
}

impl Pair {
    fn new(blocks: u32) -> Self {
        Self {
            pool: BlockPool::new(blocks),
            model: Model::new(blocks),
            holders: Vec::new(),
        }
    }

    fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Compute(tokens) => self.compute(tokens),
            Operation::Acquire(tokens) => {
                let blocks = self.acquire(&hash_blocks(tokens, 1));
                self.holders.push(blocks);
            }
            Operation::Allocate(count) => {
                let blocks = self.allocate(*count).unwrap_or_default();
                self.holders.push(blocks);
            }
            Operation::Commit(holder, place, tokens) => {
                if let Some(block) = self.held(*holder, *place) {
                    self.commit_last(block, &hash_blocks(tokens, 1));
                }
            }
            Operation::Retain(holder, place) => {
                if let Some(block) = self.held(*holder, *place) {
                    self.retain(block);
                }
            }
            Operation::RetainCached(tokens) => {
                let cached = self.model.find(*hash_blocks(tokens, 1).last().unwrap());
                if let Some(block) = cached {
                    self.retain(block);
                }
            }
            Operation::Release(holder) => {
                if !self.holders.is_empty() {
                    let blocks = self.holders.swap_remove(holder % self.holders.len());
                    self.pool.release(&blocks);
                    self.model.release(&blocks);
                }
            }
            Operation::Demote(tokens) => {
                let hashes = hash_blocks(tokens, 1);
                assert_eq!(self.pool.demote(&hashes), self.model.demote(&hashes));
            }
            Operation::ClearUnused => assert_eq!(self.pool.clear_unused(), self.model.clear_unused()),
        }
        self.compare();
    }

    fn compute(&mut self, tokens: &[u32]) {
        let hashes = hash_blocks(tokens, 1);
        let mut blocks = self.acquire(&hashes);
        let cached = blocks.len();
        let rest = u32::try_from(hashes.len() - cached).unwrap();
        blocks.extend(self.allocate(rest).unwrap_or_default());
        for length in cached + 1..=blocks.len() {
            self.commit_last(blocks[length - 1], &hashes[..length]);
        }
        self.holders.push(blocks);
    }

    fn held(&self, holder: usize, place: usize) -> Option<BlockId> {
        let blocks = self.holders.get(holder.checked_rem(self.holders.len())?)?;
        blocks.get(place.checked_rem(blocks.len())?).copied()
    }

    fn acquire(&mut self, hashes: &[BlockHash]) -> Vec<BlockId> {
        assert_eq!(self.pool.match_prefix(hashes), self.model.match_prefix(hashes));
        let blocks = self.pool.acquire_prefix(hashes);
        assert_eq!(blocks, self.model.acquire_prefix(hashes));
        blocks
    }

    fn allocate(&mut self, count: u32) -> Option<Vec<BlockId>> {
        let allocation = self.pool.allocate(count);
        assert_eq!(allocation, self.model.allocate(count));
        allocation.map(|allocation| allocation.blocks)
    }

    /// Names a block as the last of a prompt, unless it has another name, which the contract forbids.
    fn commit_last(&mut self, block: BlockId, hashes: &[BlockHash]) {
        let (hash, before) = hashes.split_last().unwrap();
        if self.model.block(block).name.is_some_and(|(name, _)| name != *hash) {
            return;
        }
        let parent = before.last().copied();
        assert_eq!(
            self.pool.commit(block, parent, *hash),
            self.model.commit(block, parent, *hash)
        );
    }

    fn retain(&mut self, block: BlockId) {
        self.pool.retain(block);
        self.model.retain(block);
        self.holders.push(vec![block]);
    }

    fn compare(&self) {
        self.pool.check_invariants();
        let dump = self.pool.dump();
        for (block, hash) in dump.blocks.iter().filter_map(|state| Some((state.block, state.hash?))) {
            assert_eq!(self.pool.find(hash), Some(block));
        }
        assert_eq!(dump, self.model.dump());
        assert_eq!(self.pool.evictable() as usize, self.model.evictable());
        assert_eq!(self.pool.free() as usize, self.model.free.len());
        let cached = self.model.blocks.iter().filter(|block| block.name.is_some()).count();
        assert_eq!(self.pool.cached() as usize, cached);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn the_pool_does_what_the_model_does(blocks in 1..12_u32, operations in vec(operation(), 1..80)) {
        let mut pair = Pair::new(blocks);
        for operation in &operations {
            pair.apply(operation);
        }
        // Whatever was done, a pool whose holders have all gone can be emptied.
        for blocks in std::mem::take(&mut pair.holders) {
            pair.pool.release(&blocks);
        }
        pair.pool.clear_unused();
        pair.pool.check_invariants();
        prop_assert_eq!(pair.pool.free(), blocks);
    }
}
