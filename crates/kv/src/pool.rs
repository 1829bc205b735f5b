//! The paged pool: blocks of fixed size with reference counts, and a prefix tree over the hashes of the named ones.
//!
//! A block is free, private (referenced, without a name), or cached (named by the chained hash of its tokens). Cached
//! blocks form a tree: a block's parent is the block before it, and a cached block's parent is cached too. Eviction
//! takes leaves only, so a hit is always a whole prefix and never a hole.
//!
//! A cached block is *pinned* while it is referenced or lies above a pinned one. Requests that computed the same block
//! twice make the second case: the second copy stays private while its successor hangs below the first copy. Pinned
//! blocks cannot be evicted, so they count as in use, and `free() + evictable()` is exactly what `allocate` can hand
//! out.
//!
//! Only unpinned leaves stand in the eviction order: by the tick of their last release, or by what their session's return is worth
//! (`order.rs`). `release` works from the tail to the head, so a prompt's tail has the older tick and goes first. Every operation costs
//! O(1) a block, plus O(log leaves) for each leaf that enters or leaves the order; nothing scans the pool.
//!
//! It does not hold KV, know tokens, or look at a clock: the tick counts releases, and the time is what it was told, so the same calls
//! evict the same blocks.

mod audit;

pub use audit::{BlockState, PoolDump};

use crate::order::{Densities, EvictionOrder, Expectations, Mark, Standing};
use crate::{BlockHash, BlockId, BlockMap};
use homing_units::Instant;

/// A paged pool of KV blocks with a prefix tree over the cached ones.
#[derive(Clone, Debug)]
pub struct BlockPool {
    slots: Vec<Slot>,
    /// Last freed, first taken.
    free: Vec<BlockId>,
    names: BlockMap<BlockId>,
    /// Unpinned leaves of the tree.
    leaves: EvictionOrder<BlockId>,
    evictable: u32,
    tick: u64,
    statistics: PoolStatistics,
}

/// What [`BlockPool::allocate`] hands out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The blocks, each with one reference and no name.
    pub blocks: Vec<BlockId>,
    /// What was evicted to make room, in the order in which it went: children before parents.
    pub evicted: Vec<Evicted>,
}

/// A cached block that was evicted, and its place in the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evicted {
    /// Its name.
    pub hash: BlockHash,
    /// The name of the block before it; `None` for the first block of a prompt.
    pub parent: Option<BlockHash>,
    /// Its index in the prompt.
    pub index: u32,
    /// Whose it was last.
    pub mark: Mark,
}

/// What became of a block that was to be named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Committed {
    /// The block is cached under this name now.
    Stored,
    /// The name is cached already, in another block or in this very one: nothing changed, and another block stays
    /// private.
    Duplicate,
    /// The parent is not cached (it was a duplicate, and the cached copy has been evicted since): nothing changed, the
    /// block stays private. The holder of the parent's private copy may commit that first and then try again.
    Orphan,
}

/// What eviction has done since the pool was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStatistics {
    /// Cached blocks that were dropped.
    pub evicted_blocks: u64,
    /// Those of them that had been demoted.
    pub evicted_demoted_blocks: u64,
    /// Allocations that had to evict.
    pub evictions: u64,
    /// The most blocks that one allocation evicted.
    pub largest_eviction_blocks: u32,
}

#[derive(Clone, Debug, Default)]
struct Slot {
    references: u32,
    node: Option<Node>,
}

/// A cached block's place in the tree.
#[derive(Clone, Debug)]
struct Node {
    hash: BlockHash,
    parent: Option<BlockId>,
    /// Blocks of the prompt up to and including this one.
    depth: u32,
    children: u32,
    pinned_children: u32,
    demoted_children: u32,
    demoted: bool,
    released_at: u64,
    mark: Mark,
}

impl Slot {
    fn pinned(&self) -> bool {
        self.references > 0 || self.node.as_ref().is_some_and(|node| node.pinned_children > 0)
    }
}

impl Node {
    const fn standing(&self) -> Standing {
        Standing {
            demoted: self.demoted,
            tick: self.released_at,
            depth: self.depth - 1,
            mark: self.mark,
        }
    }
}

impl BlockPool {
    /// A pool of so many free blocks, of which the least recently used goes first.
    #[must_use]
    pub fn new(blocks: u32) -> Self {
        Self::with_order(blocks, EvictionOrder::new(None))
    }

    /// A pool of so many free blocks, of which goes first what is worth least.
    #[must_use]
    pub fn expecting(blocks: u32, expectations: Expectations) -> Self {
        Self::with_order(blocks, EvictionOrder::new(Some(expectations)))
    }

    fn with_order(blocks: u32, leaves: EvictionOrder<BlockId>) -> Self {
        Self {
            slots: vec![Slot::default(); blocks as usize],
            free: (0..blocks).rev().map(BlockId).collect(),
            names: BlockMap::default(),
            leaves,
            evictable: 0,
            tick: 0,
            statistics: PoolStatistics::default(),
        }
    }

    /// All blocks: `free() + evictable() + in_use()`.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        to_u32(self.slots.len())
    }

    /// Blocks that hold nothing.
    #[must_use]
    pub fn free(&self) -> u32 {
        to_u32(self.free.len())
    }

    /// Cached blocks that nobody needs: exactly what `allocate` may take beyond the free ones.
    #[must_use]
    pub fn evictable(&self) -> u32 {
        self.evictable
    }

    /// Blocks that are referenced, or that lie above a referenced one in the tree.
    #[must_use]
    pub fn in_use(&self) -> u32 {
        self.capacity() - self.free() - self.evictable
    }

    /// Blocks that have a name, in use or not.
    #[must_use]
    pub fn cached(&self) -> u32 {
        to_u32(self.names.len())
    }

    /// What eviction has done since the pool was made.
    #[must_use]
    pub fn statistics(&self) -> PoolStatistics {
        self.statistics
    }

    /// Whether a block of this name is cached.
    #[must_use]
    pub fn contains(&self, hash: BlockHash) -> bool {
        self.names.contains_key(&hash)
    }

    /// The block that is cached under this name.
    #[must_use]
    pub fn find(&self, hash: BlockHash) -> Option<BlockId> {
        self.names.get(&hash).copied()
    }

    /// How many hold this block; 0 for a free or an idle cached one.
    #[must_use]
    pub fn references(&self, block: BlockId) -> u32 {
        self.slots[block.0 as usize].references
    }

    /// How many of these blocks, from the first on, are cached. Takes nothing and leaves the eviction order as it is.
    ///
    /// `hashes` is a chain, as [`crate::hash_blocks`] makes it. A cached block's parent is cached, so the end of the
    /// prefix is found by bisection: about 14 look-ups for 12,000 blocks.
    #[must_use]
    pub fn match_prefix(&self, hashes: &[BlockHash]) -> usize {
        hashes.partition_point(|hash| self.contains(*hash))
    }

    /// Takes a reference on each block of the longest cached prefix and returns them in order.
    ///
    /// # Panics
    /// If `hashes` is not a chain.
    #[must_use]
    pub fn acquire_prefix(&mut self, hashes: &[BlockHash]) -> Vec<BlockId> {
        let length = self.match_prefix(hashes);
        let mut blocks = Vec::with_capacity(length);
        let mut next = length.checked_sub(1).map(|last| self.names[&hashes[last]]);
        let depth = next.map_or(0, |last| self.node(last).depth as usize);
        assert_eq!(depth, length, "the hashes of a prompt are a chain");
        while let Some(block) = next {
            self.add_reference(block);
            blocks.push(block);
            next = self.node(block).parent;
        }
        blocks.reverse();
        blocks
    }

    /// Takes `count` blocks, each with one reference and no name; evicts as much as that needs. `None`, and nothing
    /// changed, where the free and the evictable blocks are too few.
    #[must_use]
    pub fn allocate(&mut self, count: u32) -> Option<Allocation> {
        let missing = count.saturating_sub(self.free());
        if missing > self.evictable {
            return None;
        }
        let evicted = self.evict(missing);
        if missing > 0 {
            self.statistics.evictions += 1;
            self.statistics.largest_eviction_blocks = self.statistics.largest_eviction_blocks.max(missing);
        }
        let kept = self.free.len() - count as usize;
        let mut blocks = self.free.split_off(kept);
        blocks.reverse();
        for block in &blocks {
            self.slots[block.0 as usize].references = 1;
        }
        Some(Allocation { blocks, evicted })
    }

    /// Names a block whose tokens are complete: from now on it can be found by `hash`, the chained hash of its tokens
    /// after those of `parent` (`None` for the first block of a prompt).
    ///
    /// # Panics
    /// If nobody holds the block, or it has another name.
    pub fn commit(&mut self, block: BlockId, parent: Option<BlockHash>, hash: BlockHash) -> Committed {
        let slot = &self.slots[block.0 as usize];
        assert!(slot.references > 0, "only a held block is named, `{}` is not", block.0);
        let named = slot.node.as_ref().map(|node| node.hash);
        assert!(
            named.is_none_or(|name| name == hash),
            "block `{}` has another name",
            block.0
        );
        if self.contains(hash) {
            return Committed::Duplicate;
        }
        let parent = match parent.map(|parent| self.names.get(&parent)) {
            None => None,
            Some(Some(parent)) => Some(*parent),
            Some(None) => return Committed::Orphan,
        };
        let depth = parent.map_or(0, |parent| self.node(parent).depth) + 1;
        if let Some(parent) = parent {
            self.add_pinned_child(parent);
            self.node_mut(parent).children += 1;
        }
        self.slots[block.0 as usize].node = Some(Node {
            hash,
            parent,
            depth,
            children: 0,
            pinned_children: 0,
            demoted_children: 0,
            demoted: false,
            released_at: 0,
            mark: Mark::default(),
        });
        self.names.insert(hash, block);
        Committed::Stored
    }

    /// Takes one more reference on a block that is held or cached.
    ///
    /// # Panics
    /// If the block is free.
    pub fn retain(&mut self, block: BlockId) {
        let slot = &self.slots[block.0 as usize];
        assert!(
            slot.references > 0 || slot.node.is_some(),
            "block `{}` is free",
            block.0
        );
        self.add_reference(block);
    }

    /// Gives back one reference on each of these blocks of a prompt, in the prompt's order. A block that nobody holds
    /// any more is free if it has no name and evictable if it has one, the last of them first.
    ///
    /// # Panics
    /// If nobody holds one of them.
    pub fn release(&mut self, blocks: &[BlockId]) {
        self.release_as(blocks, None, Instant::ZERO);
    }

    /// As [`Self::release`], at this time, by a session of this class. What several sessions share is the last one's; where none is named,
    /// it is of the class that it was.
    ///
    /// # Panics
    /// If nobody holds one of them.
    pub fn release_as(&mut self, blocks: &[BlockId], class: Option<u8>, now: Instant) {
        for block in blocks.iter().rev() {
            self.drop_reference(*block, class, now);
        }
    }

    /// Time has passed. Without expectations it does not matter.
    pub fn advance(&mut self, now: Instant) {
        self.leaves.advance(now);
    }

    /// What is known of returns has changed. Without expectations it does not matter.
    pub fn expect(&mut self, densities: Densities) {
        self.leaves.expect(densities);
    }

    /// Puts the end of this prompt among the first to go: for branches that are superseded and sessions that have moved
    /// away. Returns how many blocks that were not so before.
    ///
    /// Works from the tail to the head and stops at the first block that is in use or that also leads to blocks which
    /// are not demoted, so what other sessions share stays. Call it after the blocks' release. A demoted block that is
    /// used again is an ordinary one again.
    pub fn demote(&mut self, hashes: &[BlockHash]) -> u32 {
        let mut demoted = 0;
        let mut next = self
            .match_prefix(hashes)
            .checked_sub(1)
            .map(|last| self.names[&hashes[last]]);
        while let Some(block) = next {
            let pinned = self.slots[block.0 as usize].pinned();
            let node = self.node(block);
            if pinned || node.children != node.demoted_children {
                break;
            }
            next = node.parent;
            demoted += u32::from(self.demote_block(block));
        }
        demoted
    }

    /// Drops every cached block that nobody needs; what is in use stays. Returns their names, children before parents.
    pub fn clear_unused(&mut self) -> Vec<BlockHash> {
        let dropped = self.evict(self.evictable);
        dropped.into_iter().map(|evicted| evicted.hash).collect()
    }

    fn evict(&mut self, count: u32) -> Vec<Evicted> {
        (0..count).map(|_| self.evict_leaf()).collect()
    }

    fn evict_leaf(&mut self) -> Evicted {
        let block = self
            .leaves
            .first()
            .expect("a finite tree with an unpinned block has an unpinned leaf");
        let node = self.slots[block.0 as usize]
            .node
            .take()
            .expect("a leaf is a cached block");
        self.leaves.remove(block, &node.standing());
        self.names.swap_remove(&node.hash);
        self.free.push(block);
        self.evictable -= 1;
        self.statistics.evicted_blocks += 1;
        self.statistics.evicted_demoted_blocks += u64::from(node.demoted);
        if let Some(parent) = node.parent {
            let above = self.node_mut(parent);
            above.children -= 1;
            above.demoted_children -= u32::from(node.demoted);
            self.enqueue_if_evictable_leaf(parent);
        }
        Evicted {
            hash: node.hash,
            parent: node.parent.map(|parent| self.node(parent).hash),
            index: node.depth - 1,
            mark: node.mark,
        }
    }

    fn enqueue_if_evictable_leaf(&mut self, block: BlockId) {
        let slot = &self.slots[block.0 as usize];
        let node = slot
            .node
            .as_ref()
            .expect("only cached blocks stand in the eviction order");
        if node.children == 0 && !slot.pinned() {
            self.leaves.insert(block, node.standing());
        }
    }

    fn demote_block(&mut self, block: BlockId) -> bool {
        let node = self.node(block);
        if node.demoted {
            return false;
        }
        let (standing, parent) = (node.standing(), node.parent);
        self.leaves.remove(block, &standing);
        self.node_mut(block).demoted = true;
        if let Some(parent) = parent {
            self.node_mut(parent).demoted_children += 1;
        }
        self.enqueue_if_evictable_leaf(block);
        true
    }

    fn add_reference(&mut self, block: BlockId) {
        let slot = &mut self.slots[block.0 as usize];
        let was_pinned = slot.pinned();
        slot.references += 1;
        if !was_pinned {
            self.became_pinned(block);
        }
    }

    fn drop_reference(&mut self, block: BlockId, class: Option<u8>, now: Instant) {
        let slot = &mut self.slots[block.0 as usize];
        assert!(slot.references > 0, "nobody holds block `{}`", block.0);
        slot.references -= 1;
        if slot.references > 0 {
            return;
        }
        let Some(node) = &mut slot.node else {
            self.free.push(block);
            return;
        };
        node.released_at = self.tick;
        node.mark = node.mark.used(class, now);
        self.tick += 1;
        if node.pinned_children == 0 {
            self.became_unpinned(block);
        }
    }

    fn add_pinned_child(&mut self, block: BlockId) {
        let was_pinned = self.slots[block.0 as usize].pinned();
        self.node_mut(block).pinned_children += 1;
        if !was_pinned {
            self.became_pinned(block);
        }
    }

    /// A cached block, unpinned until now, is pinned: so are the blocks above it. Each step up turns an unpinned block
    /// into a pinned one, so the walk is paid for by the releases that unpinned them.
    fn became_pinned(&mut self, block: BlockId) {
        let mut next = Some(block);
        while let Some(block) = next {
            self.evictable -= 1;
            let standing = self.node(block).standing();
            self.leaves.remove(block, &standing);
            let node = self.node_mut(block);
            let was_demoted = std::mem::take(&mut node.demoted);
            next = node.parent.filter(|parent| {
                let above = &mut self.slots[parent.0 as usize];
                let was_pinned = above.pinned();
                let above = above.node.as_mut().expect("a cached block's parent is cached");
                above.pinned_children += 1;
                above.demoted_children -= u32::from(was_demoted);
                !was_pinned
            });
        }
    }

    /// A cached block, pinned until now, is unpinned: so are the blocks above it that only it had pinned.
    fn became_unpinned(&mut self, block: BlockId) {
        let mut next = Some(block);
        while let Some(block) = next {
            self.evictable += 1;
            self.enqueue_if_evictable_leaf(block);
            next = self.node(block).parent.filter(|parent| {
                self.node_mut(*parent).pinned_children -= 1;
                !self.slots[parent.0 as usize].pinned()
            });
        }
    }

    fn node(&self, block: BlockId) -> &Node {
        self.slots[block.0 as usize]
            .node
            .as_ref()
            .expect("the tree links cached blocks only")
    }

    fn node_mut(&mut self, block: BlockId) -> &mut Node {
        self.slots[block.0 as usize]
            .node
            .as_mut()
            .expect("the tree links cached blocks only")
    }
}

fn to_u32(blocks: usize) -> u32 {
    u32::try_from(blocks).expect("a pool is made with a u32 of blocks")
}
