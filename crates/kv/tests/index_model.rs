//! The index against a naive model: after every operation of a random sequence, both must have the same state, block
//! for block, and answer every question alike. The small bounds make the index forget all the time; the reports include
//! gaps, repetitions and nonsense, as an event stream of a faulty worker would.
//!
//! The model keeps sets and no links to children, and answers every question by looking at all blocks.

#![expect(clippy::unwrap_used, reason = "a test ends at the first surprise")]

use homing_kv::{
    BlockHash, IndexDump, IndexedBlock, MAX_OWNERS, Overlap, ResidencyIndex, Tier, WorkerBlocks, hash_blocks,
};
use homing_units::WorkerId;
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// Tokens of a prompt, one a block. Few values, so that prompts share prefixes.
type Tokens = Vec<u32>;

/// Ids with holes: the index must not take them for places in an array.
const WORKERS: [WorkerId; 5] = [
    WorkerId(4_000_000),
    WorkerId(0),
    WorkerId(7),
    WorkerId(64),
    WorkerId(u32::MAX),
];

/// Enough to go above the bound on owners.
const FAMILIES: u64 = MAX_OWNERS as u64 + 3;

#[derive(Clone, Debug)]
enum Operation {
    /// A worker stores a prompt from this block on.
    Store(WorkerId, Tokens, usize, Tier),
    /// A worker reports blocks that are no chain, below a parent that is none of theirs.
    StoreNonsense(WorkerId, Tokens, Vec<Tokens>, Tier),
    Remove(WorkerId, Vec<Tokens>, Tier),
    Clear(WorkerId),
    Own(u64, Tokens),
    /// So many families own a prompt.
    OwnMany(u64, Tokens),
    Disown(u64),
    Touch(Tokens),
}

fn tokens() -> impl Strategy<Value = Tokens> {
    vec(0..3_u32, 1..6)
}

fn worker() -> impl Strategy<Value = WorkerId> {
    proptest::sample::select(&WORKERS[..])
}

fn tier() -> impl Strategy<Value = Tier> {
    prop_oneof![2 => Just(Tier::Gpu), 1 => Just(Tier::Host)]
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        8 => (worker(), tokens(), 0..3_usize, tier()).prop_map(|(a, b, c, d)| Operation::Store(a, b, c, d)),
        2 => (worker(), tokens(), vec(tokens(), 0..4), tier())
            .prop_map(|(a, b, c, d)| Operation::StoreNonsense(a, b, c, d)),
        4 => (worker(), vec(tokens(), 0..4), tier()).prop_map(|(a, b, c)| Operation::Remove(a, b, c)),
        1 => worker().prop_map(Operation::Clear),
        5 => (0..FAMILIES, tokens()).prop_map(|(a, b)| Operation::Own(a, b)),
        1 => (1..=FAMILIES, tokens()).prop_map(|(a, b)| Operation::OwnMany(a, b)),
        2 => (0..FAMILIES).prop_map(Operation::Disown),
        2 => tokens().prop_map(Operation::Touch),
    ]
}

#[derive(Clone, Debug, Default)]
struct ModelBlock {
    parent: Option<BlockHash>,
    gpu: BTreeSet<WorkerId>,
    host: BTreeSet<WorkerId>,
    owners: BTreeSet<u64>,
    base: bool,
    touched: u64,
}

impl ModelBlock {
    fn holders(&mut self, tier: Tier) -> &mut BTreeSet<WorkerId> {
        match tier {
            Tier::Gpu => &mut self.gpu,
            Tier::Host => &mut self.host,
        }
    }
}

#[derive(Debug)]
struct Model {
    max_blocks: usize,
    blocks: BTreeMap<BlockHash, ModelBlock>,
    tick: u64,
    forgotten: u64,
}

impl Model {
    fn childless(&self, hash: BlockHash) -> bool {
        self.blocks.values().all(|block| block.parent != Some(hash))
    }

    /// Blocks without blocks below them, next to be forgotten first.
    fn leaves(&self) -> Vec<BlockHash> {
        let mut leaves: Vec<BlockHash> = self
            .blocks
            .keys()
            .copied()
            .filter(|hash| self.childless(*hash))
            .collect();
        leaves.sort_by_key(|hash| self.blocks[hash].touched);
        leaves
    }

    /// Drops all that nothing speaks for.
    fn prune(&mut self, spared: Option<BlockHash>) {
        let hollow = |model: &Self, hash: BlockHash| {
            let block = &model.blocks[&hash];
            let held = !block.gpu.is_empty() || !block.host.is_empty();
            !held && block.owners.is_empty() && !block.base && model.childless(hash) && Some(hash) != spared
        };
        while let Some(hash) = self.blocks.keys().copied().find(|hash| hollow(self, *hash)) {
            self.blocks.remove(&hash);
        }
    }

    /// Makes room for a block below `above`; whether that could be done.
    fn make_room(&mut self, above: Option<BlockHash>) -> bool {
        if self.blocks.len() < self.max_blocks {
            return true;
        }
        let Some(leaf) = self.leaves().into_iter().find(|hash| Some(*hash) != above) else {
            return false;
        };
        self.blocks.remove(&leaf);
        self.forgotten += 1;
        self.prune(above);
        true
    }

    fn visit(&mut self, parent: Option<BlockHash>, hashes: &[BlockHash], note: impl Fn(&mut ModelBlock)) {
        self.tick += hashes.len() as u64;
        let mut above = parent.filter(|parent| self.blocks.contains_key(parent));
        for (index, hash) in hashes.iter().enumerate() {
            if !self.blocks.contains_key(hash) {
                if !self.make_room(above) {
                    break;
                }
                self.blocks.insert(
                    *hash,
                    ModelBlock {
                        parent: above,
                        ..ModelBlock::default()
                    },
                );
            }
            let block = self.blocks.get_mut(hash).unwrap();
            block.touched = self.tick - index as u64;
            note(block);
            above = Some(*hash);
        }
    }

    fn store(&mut self, worker: WorkerId, parent: Option<BlockHash>, hashes: &[BlockHash], tier: Tier) {
        self.visit(parent, hashes, |block| {
            block.holders(tier).insert(worker);
        });
    }

    fn remove(&mut self, worker: WorkerId, hashes: &[BlockHash], tier: Tier) {
        for hash in hashes {
            if let Some(block) = self.blocks.get_mut(hash) {
                block.holders(tier).remove(&worker);
            }
        }
        self.prune(None);
    }

    fn clear_worker(&mut self, worker: WorkerId) {
        for block in self.blocks.values_mut() {
            block.gpu.remove(&worker);
            block.host.remove(&worker);
        }
        self.prune(None);
    }

    fn own(&mut self, family: u64, hashes: &[BlockHash]) {
        self.visit(None, hashes, |block| {
            block.owners.insert(family);
            block.base |= block.owners.len() > MAX_OWNERS;
            if block.base {
                block.owners.clear();
            }
        });
    }

    fn disown(&mut self, family: u64) {
        for block in self.blocks.values_mut() {
            block.owners.remove(&family);
        }
        self.prune(None);
    }

    fn touch(&mut self, hashes: &[BlockHash]) {
        self.tick += hashes.len() as u64;
        for (index, hash) in hashes.iter().enumerate() {
            if let Some(block) = self.blocks.get_mut(hash) {
                block.touched = self.tick - index as u64;
            }
        }
    }

    fn overlap(&self, family: Option<u64>, hashes: &[BlockHash]) -> Vec<(WorkerId, Overlap)> {
        let held = |hash: &BlockHash, test: &dyn Fn(&ModelBlock) -> bool| self.blocks.get(hash).is_some_and(test);
        let prefix = |test: &dyn Fn(&ModelBlock) -> bool| hashes.iter().take_while(|hash| held(hash, test)).count();
        let mut overlaps = Vec::new();
        for worker in WORKERS {
            let gpu_blocks = prefix(&|block| block.gpu.contains(&worker));
            let usable = prefix(&|block| block.gpu.contains(&worker) || block.host.contains(&worker));
            let mut exclusive_weight = 0.0;
            for hash in &hashes[..usable] {
                let owners = &self.blocks[hash].owners;
                if family.is_some_and(|family| owners.contains(&family)) {
                    exclusive_weight += 1.0 / owners.len() as f64;
                }
            }
            if usable > 0 {
                let gpu_blocks = u32::try_from(gpu_blocks).unwrap();
                let host_blocks = u32::try_from(usable).unwrap() - gpu_blocks;
                overlaps.push((
                    worker,
                    Overlap {
                        gpu_blocks,
                        host_blocks,
                        exclusive_weight,
                    },
                ));
            }
        }
        overlaps.sort_by_key(|(worker, _)| *worker);
        overlaps
    }

    fn deepest_exclusive(&self, hashes: &[BlockHash]) -> Option<(u64, usize)> {
        let mut deepest = None;
        for (index, hash) in hashes.iter().enumerate() {
            let owners = self
                .blocks
                .get(hash)
                .map(|block| block.owners.clone())
                .unwrap_or_default();
            if owners.len() == 1 {
                deepest = owners.first().map(|family| (*family, index + 1));
            }
        }
        deepest
    }

    fn dump(&self) -> IndexDump {
        let mut workers: BTreeMap<WorkerId, WorkerBlocks> = BTreeMap::new();
        let mut families: BTreeMap<u64, usize> = BTreeMap::new();
        for block in self.blocks.values() {
            block
                .gpu
                .iter()
                .for_each(|worker| workers.entry(*worker).or_default().gpu += 1);
            block
                .host
                .iter()
                .for_each(|worker| workers.entry(*worker).or_default().host += 1);
            block
                .owners
                .iter()
                .for_each(|family| *families.entry(*family).or_default() += 1);
        }
        let indexed = |(hash, block): (&BlockHash, &ModelBlock)| IndexedBlock {
            hash: *hash,
            parent: block.parent,
            gpu: block.gpu.iter().copied().collect(),
            host: block.host.iter().copied().collect(),
            owners: block.owners.iter().copied().collect(),
            base: block.base,
        };
        IndexDump {
            blocks: self.blocks.iter().map(indexed).collect(),
            leaves: self.leaves(),
            workers: workers.into_iter().collect(),
            families: families.into_iter().collect(),
        }
    }
}

struct Pair {
    index: ResidencyIndex,
    model: Model,
}

impl Pair {
    fn new(max_blocks: usize) -> Self {
        let model = Model {
            max_blocks,
            blocks: BTreeMap::new(),
            tick: 0,
            forgotten: 0,
        };
        Self {
            index: ResidencyIndex::new(max_blocks),
            model,
        }
    }

    fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Store(worker, tokens, from, tier) => {
                let hashes = hash_blocks(tokens, 1);
                let (before, stored) = hashes.split_at((*from).min(hashes.len()));
                self.store(*worker, before.last().copied(), stored, *tier);
            }
            Operation::StoreNonsense(worker, parent, prompts, tier) => {
                self.store(*worker, Some(last(parent)), &lasts(prompts), *tier);
            }
            Operation::Remove(worker, prompts, tier) => {
                self.index.remove(*worker, &lasts(prompts), *tier);
                self.model.remove(*worker, &lasts(prompts), *tier);
            }
            Operation::Clear(worker) => {
                self.index.clear_worker(*worker);
                self.model.clear_worker(*worker);
            }
            Operation::Own(family, tokens) => self.own(*family, tokens),
            Operation::OwnMany(families, tokens) => (0..*families).for_each(|family| self.own(family, tokens)),
            Operation::Disown(family) => {
                self.index.disown(*family);
                self.model.disown(*family);
            }
            Operation::Touch(tokens) => {
                self.index.touch(&hash_blocks(tokens, 1));
                self.model.touch(&hash_blocks(tokens, 1));
            }
        }
        self.compare();
    }

    fn store(&mut self, worker: WorkerId, parent: Option<BlockHash>, hashes: &[BlockHash], tier: Tier) {
        self.index.store(worker, parent, hashes, tier);
        self.model.store(worker, parent, hashes, tier);
    }

    fn own(&mut self, family: u64, tokens: &[u32]) {
        self.index.own(family, &hash_blocks(tokens, 1));
        self.model.own(family, &hash_blocks(tokens, 1));
    }

    fn compare(&self) {
        self.index.check_invariants();
        assert_eq!(self.index.dump(), self.model.dump());
        assert_eq!(self.index.forgotten_blocks(), self.model.forgotten);
        assert_eq!(self.index.len(), self.model.blocks.len());
    }

    /// Asks both everything that can be asked about a prompt.
    fn ask(&self, tokens: &[u32]) {
        let hashes = hash_blocks(tokens, 1);
        assert_eq!(
            self.index.deepest_exclusive(&hashes),
            self.model.deepest_exclusive(&hashes)
        );
        for family in (0..FAMILIES).map(Some).chain([None]) {
            assert_eq!(self.index.overlap(family, &hashes), self.model.overlap(family, &hashes));
        }
        for (worker, hash) in WORKERS
            .into_iter()
            .flat_map(|worker| hashes.iter().map(move |hash| (worker, *hash)))
        {
            let block = self.model.blocks.get(&hash).cloned().unwrap_or_default();
            assert_eq!(self.index.holds(worker, hash, Tier::Gpu), block.gpu.contains(&worker));
            assert_eq!(self.index.holds(worker, hash, Tier::Host), block.host.contains(&worker));
        }
    }
}

fn last(tokens: &[u32]) -> BlockHash {
    *hash_blocks(tokens, 1).last().unwrap()
}

fn lasts(prompts: &[Tokens]) -> Vec<BlockHash> {
    prompts.iter().map(|tokens| last(tokens)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn the_index_does_what_the_model_does(
        max_blocks in prop_oneof![1..8_usize, 8..40_usize],
        operations in vec((operation(), tokens()), 1..60),
    ) {
        let mut pair = Pair::new(max_blocks);
        for (operation, question) in &operations {
            pair.apply(operation);
            pair.ask(question);
        }
        // Whatever was told, nothing is left once all workers and families have gone, but base content.
        WORKERS.into_iter().for_each(|worker| pair.apply(&Operation::Clear(worker)));
        (0..FAMILIES).for_each(|family| pair.apply(&Operation::Disown(family)));
        prop_assert!(pair.index.dump().blocks.iter().all(|block| block.base || !pair.model.childless(block.hash)));
    }
}
