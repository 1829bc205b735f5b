//! The pool's self-check and its dump: slow, complete, and apart from the code that they judge.
//!
//! The check recomputes every counter from the tree's parent links alone, so a counter that drifted cannot confirm
//! itself. The simulator and the tests call it; nothing on a hot path does.

use super::{BlockPool, Slot};
use crate::{BlockHash, BlockId};
use std::collections::{BTreeMap, BTreeSet};

/// The whole state of one block that is not free, for comparison with a model and for debugging.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockState {
    /// The block.
    pub block: BlockId,
    /// How many hold it.
    pub references: u32,
    /// Its name, if it is cached.
    pub hash: Option<BlockHash>,
    /// The name of the block before it, if it is cached and not the first of a prompt.
    pub parent: Option<BlockHash>,
    /// Whether it, or a cached block after it, is referenced.
    pub pinned: bool,
    /// Whether it is among the first to go.
    pub demoted: bool,
}

/// The whole state of a pool, for comparison with a model and for debugging.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolDump {
    /// Every block that is not free, by id.
    pub blocks: Vec<BlockState>,
    /// Free blocks, next to be taken last.
    pub free: Vec<BlockId>,
    /// Blocks that could be evicted right now, next to go first; their parents follow as they become leaves.
    pub leaves: Vec<BlockHash>,
}

/// What a block's counters must be, counted from the links of its children.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counted {
    children: u32,
    pinned: u32,
    demoted: u32,
}

impl BlockPool {
    /// The whole state, for comparison with a model and for debugging. Costs a pass over the pool.
    #[must_use]
    pub fn dump(&self) -> PoolDump {
        let states = self
            .slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| slot.references > 0 || slot.node.is_some());
        PoolDump {
            blocks: states.map(|(index, slot)| self.state(index, slot)).collect(),
            free: self.free.clone(),
            leaves: self
                .leaves
                .in_order()
                .into_iter()
                .map(|block| self.node(block).hash)
                .collect(),
        }
    }

    /// Checks everything that must hold between two calls: every block is free, private or cached exactly once; the
    /// counts add up; names, tree, pins, demotions and eviction order agree. Costs a pass over the pool.
    ///
    /// # Panics
    /// If something does not hold, which is a bug in the pool.
    pub fn check_invariants(&self) {
        self.check_free_list();
        self.check_names();
        self.check_tree();
        self.check_eviction_order();
        assert_eq!(
            self.free() + self.evictable() + self.in_use(),
            self.capacity(),
            "the counts add up"
        );
    }

    fn state(&self, index: usize, slot: &Slot) -> BlockState {
        let node = slot.node.as_ref();
        BlockState {
            block: block_id(index),
            references: slot.references,
            hash: node.map(|node| node.hash),
            parent: node.and_then(|node| node.parent).map(|parent| self.node(parent).hash),
            pinned: slot.pinned(),
            demoted: node.is_some_and(|node| node.demoted),
        }
    }

    fn check_free_list(&self) {
        let listed: BTreeSet<BlockId> = self.free.iter().copied().collect();
        assert_eq!(listed.len(), self.free.len(), "no block is free twice");
        for (index, slot) in self.slots.iter().enumerate() {
            let empty = slot.references == 0 && slot.node.is_none();
            assert_eq!(
                listed.contains(&block_id(index)),
                empty,
                "block `{index}` is free if and only if it is empty"
            );
        }
    }

    fn check_names(&self) {
        let in_slots: BTreeMap<BlockHash, BlockId> = self
            .slots
            .iter()
            .enumerate()
            .filter_map(|(index, slot)| Some((slot.node.as_ref()?.hash, block_id(index))))
            .collect();
        let in_map: BTreeMap<BlockHash, BlockId> = self.names.iter().map(|(hash, block)| (*hash, *block)).collect();
        assert_eq!(
            in_slots, in_map,
            "each cached block is found by its name, and nothing else is"
        );
    }

    fn check_tree(&self) {
        let mut counted: BTreeMap<BlockId, Counted> = BTreeMap::new();
        for (index, slot) in self.slots.iter().enumerate() {
            let Some(node) = &slot.node else { continue };
            let Some(parent) = node.parent else {
                assert_eq!(
                    node.depth, 1,
                    "block `{index}` has no parent, so it is a prompt's first"
                );
                continue;
            };
            let above = self.slots[parent.0 as usize].node.as_ref();
            let above = above.unwrap_or_else(|| panic!("the parent of cached block `{index}` is cached"));
            assert_eq!(node.depth, above.depth + 1, "block `{index}` lies one below its parent");
            let counts = counted.entry(parent).or_default();
            counts.children += 1;
            counts.pinned += u32::from(slot.pinned());
            counts.demoted += u32::from(node.demoted);
        }
        for (index, slot) in self.slots.iter().enumerate() {
            let Some(node) = &slot.node else { continue };
            let stored = Counted {
                children: node.children,
                pinned: node.pinned_children,
                demoted: node.demoted_children,
            };
            let expected = counted.get(&block_id(index)).copied().unwrap_or_default();
            assert_eq!(
                stored, expected,
                "the counters of block `{index}` agree with the links of its children"
            );
            assert!(
                !(node.demoted && slot.pinned()),
                "block `{index}` is demoted, so nobody uses it"
            );
            assert!(
                !node.demoted || node.demoted_children == node.children,
                "below demoted `{index}` all is demoted"
            );
        }
    }

    fn check_eviction_order(&self) {
        let mut expected = BTreeSet::new();
        let mut unpinned = 0;
        for (index, slot) in self.slots.iter().enumerate() {
            let Some(node) = slot.node.as_ref().filter(|_| !slot.pinned()) else {
                continue;
            };
            unpinned += 1;
            assert!(node.released_at < self.tick, "block `{index}` was released in the past");
            if node.children == 0 {
                expected.insert(block_id(index));
            }
        }
        let listed: BTreeSet<BlockId> = self.leaves.in_order().into_iter().collect();
        assert_eq!(self.leaves.len(), listed.len(), "no leaf stands twice");
        assert_eq!(
            listed, expected,
            "the eviction order holds the unpinned leaves, and nothing else"
        );
        assert_eq!(self.evictable, unpinned, "every unpinned cached block is evictable");
    }
}

fn block_id(index: usize) -> BlockId {
    BlockId(u32::try_from(index).expect("a pool is made with a u32 of blocks"))
}
