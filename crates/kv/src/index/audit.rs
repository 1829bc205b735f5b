//! The index's self-check and its dump: slow, complete, and apart from the code that they judge.

use super::{Entry, MAX_OWNERS, MAX_WORKERS, ResidencyIndex, WorkerBlocks};
use crate::BlockHash;
use crate::bits::Bits;
use homing_units::WorkerId;
use std::collections::{BTreeMap, BTreeSet};

/// What is known of one block, for comparison with a model and for debugging.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexedBlock {
    /// The block.
    pub hash: BlockHash,
    /// The block above it, if that was indexed when this one was first seen.
    pub parent: Option<BlockHash>,
    /// Who holds it in GPU memory, by id.
    pub gpu: Vec<WorkerId>,
    /// Who holds it in host memory, by id.
    pub host: Vec<WorkerId>,
    /// Which families own it, ascending; none where it is base content.
    pub owners: Vec<u64>,
    /// Whether it is base content: too many families have owned it.
    pub base: bool,
}

/// The whole state of an index, for comparison with a model and for debugging.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexDump {
    /// Every block, by hash.
    pub blocks: Vec<IndexedBlock>,
    /// The blocks without blocks below them, next to be forgotten first.
    pub leaves: Vec<BlockHash>,
    /// The workers that hold something, by id.
    pub workers: Vec<(WorkerId, WorkerBlocks)>,
    /// How many blocks each family owns, by family.
    pub families: Vec<(u64, usize)>,
}

impl ResidencyIndex {
    /// The whole state, for comparison with a model and for debugging. Costs a pass over the index.
    #[must_use]
    pub fn dump(&self) -> IndexDump {
        let mut blocks: Vec<IndexedBlock> = self.entries.iter().flatten().map(|entry| self.indexed(entry)).collect();
        blocks.sort_unstable_by_key(|block| block.hash);
        let workers = self
            .worker_numbers
            .iter()
            .map(|(id, number)| (*id, self.workers[*number as usize].blocks));
        IndexDump {
            blocks,
            leaves: self.leaves.iter().map(|(_, slot)| self.entry(*slot).hash).collect(),
            workers: workers
                .filter(|(_, blocks)| *blocks != WorkerBlocks::default())
                .collect(),
            families: self
                .families
                .iter()
                .map(|(family, slots)| (*family, slots.len()))
                .collect(),
        }
    }

    /// Checks everything that must hold between two calls: names and entries agree; links, child counts and the order
    /// of leaves agree; workers and families know exactly their blocks; the bounds hold. Costs a pass over the index.
    ///
    /// # Panics
    /// If something does not hold, which is a bug in the index.
    pub fn check_invariants(&self) {
        self.check_names();
        self.check_links();
        self.check_workers();
        self.check_families();
    }

    fn indexed(&self, entry: &Entry) -> IndexedBlock {
        let mut owners = entry.owners.to_vec();
        owners.sort_unstable();
        IndexedBlock {
            hash: entry.hash,
            parent: entry.parent.map(|parent| self.entry(parent).hash),
            gpu: self.workers_of(&entry.gpu),
            host: self.workers_of(&entry.host),
            owners,
            base: entry.base,
        }
    }

    fn workers_of(&self, numbers: &Bits) -> Vec<WorkerId> {
        let mut workers: Vec<WorkerId> = numbers
            .iter()
            .map(|number| self.workers[number as usize].worker)
            .collect();
        workers.sort_unstable();
        workers
    }

    fn slots(&self) -> impl Iterator<Item = (u32, &Entry)> {
        (0..)
            .zip(&self.entries)
            .filter_map(|(slot, entry)| Some((slot, entry.as_ref()?)))
    }

    fn check_names(&self) {
        assert!(self.names.len() <= self.max_blocks, "the bound holds");
        let named: BTreeMap<u32, BlockHash> = self.names.iter().map(|(hash, slot)| (*slot, *hash)).collect();
        let placed: BTreeMap<u32, BlockHash> = self.slots().map(|(slot, entry)| (slot, entry.hash)).collect();
        assert_eq!(named, placed, "each entry is found by its name, and nothing else is");
        let vacant: BTreeSet<u32> = self.vacant.iter().copied().collect();
        assert_eq!(vacant.len(), self.vacant.len(), "no slot is vacant twice");
        assert_eq!(
            vacant.len() + placed.len(),
            self.entries.len(),
            "each slot is vacant or holds an entry"
        );
        assert!(
            vacant.iter().all(|slot| !placed.contains_key(slot)),
            "no vacant slot holds an entry"
        );
    }

    fn check_links(&self) {
        let mut children: BTreeMap<u32, u32> = BTreeMap::new();
        for parent in self.slots().filter_map(|(_, entry)| entry.parent) {
            assert!(
                self.entries[parent as usize].is_some(),
                "what an entry hangs below is an entry"
            );
            *children.entry(parent).or_default() += 1;
        }
        let mut leaves = BTreeSet::new();
        for (slot, entry) in self.slots() {
            assert_eq!(
                entry.children,
                children.get(&slot).copied().unwrap_or(0),
                "children of `{slot}` are counted"
            );
            assert!(!entry.hollow(), "something speaks for keeping `{slot}`");
            assert!(entry.touched <= self.tick, "`{slot}` was touched in the past");
            if entry.children == 0 {
                leaves.insert((entry.touched, slot));
            }
        }
        assert_eq!(
            self.leaves, leaves,
            "the order of leaves holds the leaves, and nothing else"
        );
    }

    fn check_workers(&self) {
        assert!(self.worker_numbers.len() <= MAX_WORKERS, "the bound on workers holds");
        assert_eq!(
            self.worker_numbers.len() + self.vacant_workers.len(),
            self.workers.len(),
            "numbers are used once"
        );
        for (worker, number) in &self.worker_numbers {
            let known = &self.workers[*number as usize];
            assert_eq!(known.worker, *worker, "a number leads back to its worker");
            let mut held = BTreeSet::new();
            let mut blocks = WorkerBlocks::default();
            for (slot, entry) in self.slots() {
                let (gpu, host) = (entry.gpu.contains(*number), entry.host.contains(*number));
                blocks.gpu += u32::from(gpu);
                blocks.host += u32::from(host);
                if gpu || host {
                    held.insert(slot);
                }
            }
            assert_eq!(known.blocks, blocks, "the blocks of `{worker}` are counted");
            assert_eq!(
                known.held.iter().collect::<BTreeSet<_>>(),
                held,
                "`{worker}` knows its blocks"
            );
        }
        for (_, entry) in self.slots() {
            for number in entry.gpu.iter().chain(entry.host.iter()) {
                assert!(!self.vacant_workers.contains(&number), "a holder is a known worker");
            }
        }
    }

    fn check_families(&self) {
        let mut owned: BTreeMap<u64, BTreeSet<u32>> = BTreeMap::new();
        for (slot, entry) in self.slots() {
            let distinct: BTreeSet<u64> = entry.owners.iter().copied().collect();
            assert_eq!(distinct.len(), entry.owners.len(), "no family owns `{slot}` twice");
            assert!(entry.owners.len() <= MAX_OWNERS, "the bound on owners holds");
            assert!(!entry.base || entry.owners.is_empty(), "base content belongs to nobody");
            for family in distinct {
                owned.entry(family).or_default().insert(slot);
            }
        }
        assert_eq!(self.families, owned, "each family knows its blocks");
    }
}
