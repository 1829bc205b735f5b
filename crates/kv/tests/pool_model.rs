//! The pool against a naive model: after every operation of a random sequence, both must have the same state, block for
//! block. The pools have a handful of blocks, so that nearly every allocation evicts.
//!
//! The model keeps no counters and no order: it answers every question by looking at all blocks. It does so for both orders of
//! eviction, by last use and by worth.

#![expect(clippy::unwrap_used, reason = "a test ends at the first surprise")]

use homing_kv::returns::{BINS, bin_of};
use homing_kv::{
    Allocation, BlockHash, BlockId, BlockPool, BlockState, CLASSES, Committed, Densities, Evicted, Expectations, Mark,
    PoolDump, UNKNOWN, hash_blocks,
};
use homing_units::{Duration, Instant};
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
    /// A holder gives all of its blocks back, as a session of this class, if any.
    Release(usize, Option<u8>),
    /// Milliseconds pass.
    Wait(u64),
    /// The returns a second of one class and bin are these.
    Expect(u8, usize, u8),
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
        8 => (any::<usize>(), prop::option::weighted(0.8, 0..4_u8)).prop_map(|(holder, class)| Operation::Release(holder, class)),
        3 => (0..12_u32, 0..8_u64).prop_map(|(power, more)| Operation::Wait((1 << power) + more)),
        2 => (0..4_u8, 0..14_usize, 0..5_u8).prop_map(|(class, bin, density)| Operation::Expect(class, bin, density)),
        3 => tokens().prop_map(Operation::Demote),
        1 => Just(Operation::ClearUnused),
    ]
}

#[derive(Clone, Debug, Default)]
struct ModelBlock {
    references: u32,
    name: Option<(BlockHash, Option<BlockHash>)>,
    released_at: u64,
    mark: Mark,
    demoted: bool,
}

#[derive(Debug)]
struct Model {
    blocks: Vec<ModelBlock>,
    free: Vec<BlockId>,
    releases: u64,
    now: Instant,
    /// `None` where the least recently used goes first.
    expectations: Option<Expectations>,
}

impl Model {
    fn new(blocks: u32, expectations: Option<Expectations>) -> Self {
        let free = (0..blocks).rev().map(BlockId).collect();
        Self {
            blocks: vec![ModelBlock::default(); blocks as usize],
            free,
            releases: 0,
            now: Instant::ZERO,
            expectations,
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
        leaves.sort_by(|left, right| {
            let key = |index: &usize| (!self.blocks[*index].demoted, self.blocks[*index].released_at);
            let worth = |index: &usize| self.worth(*index);
            let demoted = key(left).0.cmp(&key(right).0);
            let cost = self.depth_that_counts(*left).cmp(&self.depth_that_counts(*right));
            demoted
                .then(worth(left).total_cmp(&worth(right)))
                .then(cost)
                .then(key(left).cmp(&key(right)))
        });
        leaves
    }

    /// Returns a second that keeping a block brings, times what it costs; 0 where that is not what counts.
    fn worth(&self, index: usize) -> f64 {
        let block = &self.blocks[index];
        let Some(expectations) = self.expectations.as_ref().filter(|_| !block.demoted) else {
            return 0.0;
        };
        let away = self.now.saturating_since(block.mark.left);
        let density = expectations.densities[usize::from(block.mark.class)][bin_of(away)];
        let depth = self.depth_that_counts(index);
        let deeper = expectations
            .cost_doubles_after
            .map_or(0.0, |blocks| f64::from(depth) / f64::from(blocks));
        density * (1.0 + deeper)
    }

    /// Blocks before this one, where its cost goes by them.
    fn depth_that_counts(&self, index: usize) -> u32 {
        let block = &self.blocks[index];
        let counts = self
            .expectations
            .as_ref()
            .and_then(|known| known.cost_doubles_after)
            .is_some();
        if counts && block.mark.class != UNKNOWN && !block.demoted {
            self.index(block.name.unwrap().0)
        } else {
            0
        }
    }

    fn evictable(&self) -> usize {
        (0..self.blocks.len())
            .filter(|index| self.blocks[*index].name.is_some() && !self.pinned(*index))
            .count()
    }

    fn evict(&mut self) -> Evicted {
        let leaf = self.leaves()[0];
        let ModelBlock { name, mark, .. } = std::mem::take(&mut self.blocks[leaf]);
        let (hash, parent) = name.unwrap();
        self.free.push(BlockId(u32::try_from(leaf).unwrap()));
        let index = parent.map_or(0, |parent| self.index(parent) + 1);
        Evicted {
            hash,
            parent,
            index,
            mark,
        }
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
        self.block(block).mark = Mark::default();
        self.forgive();
        Committed::Stored
    }

    fn retain(&mut self, block: BlockId) {
        self.block(block).references += 1;
        self.forgive();
    }

    fn release(&mut self, blocks: &[BlockId], class: Option<u8>) {
        for id in blocks.iter().rev() {
            let (now, left) = (self.releases, self.now);
            let block = self.block(*id);
            block.references -= 1;
            if block.references == 0 && block.name.is_none() {
                self.free.push(*id);
            } else if block.references == 0 {
                block.released_at = now;
                block.mark = Mark {
                    class: class.unwrap_or(block.mark.class),
                    left,
                };
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

/// Small whole numbers, so that many blocks are worth the same.
fn expectations() -> impl Strategy<Value = Expectations> {
    (prop::option::of(1..4_u32), vec(vec(0..5_u8, 14), 4)).prop_map(|(cost_doubles_after, rows)| {
        let mut densities: Densities = Box::new([[0.0; BINS]; CLASSES]);
        for (of_class, row) in densities.iter_mut().zip(rows) {
            for (density, value) in of_class.iter_mut().zip(row) {
                *density = f64::from(value);
            }
        }
        Expectations {
            densities,
            cost_doubles_after,
        }
    })
}

/// The pool, its model, and who holds what.
struct Pair {
    pool: BlockPool,
    model: Model,
    holders: Vec<Vec<BlockId>>,
}

impl Pair {
    fn new(blocks: u32, expectations: Option<Expectations>) -> Self {
        let pool = match expectations.clone() {
            None => BlockPool::new(blocks),
            Some(expectations) => BlockPool::expecting(blocks, expectations),
        };
        Self {
            pool,
            model: Model::new(blocks, expectations),
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
            Operation::Release(holder, class) => {
                if !self.holders.is_empty() {
                    let blocks = self.holders.swap_remove(holder % self.holders.len());
                    self.pool.release_as(&blocks, *class, self.model.now);
                    self.model.release(&blocks, *class);
                }
            }
            Operation::Wait(milliseconds) => {
                self.model.now += Duration::from_millis(*milliseconds);
                self.pool.advance(self.model.now);
            }
            Operation::Expect(class, bin, density) => {
                if let Some(expectations) = &mut self.model.expectations {
                    expectations.densities[usize::from(*class)][*bin] = f64::from(*density);
                    self.pool.expect(expectations.densities.clone());
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
    fn the_pool_does_what_the_model_does(
        blocks in 1..12_u32,
        expectations in prop::option::weighted(0.7, expectations()),
        operations in vec(operation(), 1..80),
    ) {
        let mut pair = Pair::new(blocks, expectations);
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
