//! The residency index: for each block, which workers hold it in which tier, and which session families own it.
//!
//! Fed by KV events or by prediction, asked for each turn: who has how much of this prompt, and how much of that is
//! this family's own. Blocks form a forest by the parent links of the events. The links serve eviction only: look-ups
//! walk the prompt's own hashes, so an event stream with a gap makes roots without parents and nothing worse. A link is
//! made when an entry is made and never changes; the forest has no cycle, whatever a worker reports.
//!
//! Bounded by `max_blocks`: when it is full, the least recently touched leaf is forgotten, which makes the router
//! believe a worker to hold less than it does. An entry is kept while a worker holds it, a family owns it, it is base
//! content, or an entry hangs below it. Owners are bounded by [`MAX_OWNERS`] a block, workers by [`MAX_WORKERS`].
//!
//! Memory: 160 bytes for an entry, about 50 for its name, 1 bit for each worker (in the workers' maps), about 10 for
//! each family that owns it: 250 bytes a block in a fleet of 256 workers, 250 MB for a million blocks. The holders of a
//! block spill to the heap only where their numbers lie far apart.
//!
//! It does not know time, whether a worker lives, or what an overlap is worth.

mod audit;
mod neighbours;
mod overlap;

pub use audit::{IndexDump, IndexedBlock};
pub use overlap::Overlap;

use crate::bits::Bits;
use crate::{BlockHash, BlockMap, Tier};
use homing_units::WorkerId;
use neighbours::Neighbours;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

/// How many families may own a block before it counts as base content, which belongs to nobody.
pub const MAX_OWNERS: usize = 8;

/// How many workers are indexed at once; what further ones store is not noted.
pub const MAX_WORKERS: usize = 4096;

/// Which workers hold which blocks, and which session families own them.
#[derive(Clone, Debug)]
pub struct ResidencyIndex {
    max_blocks: usize,
    names: BlockMap<u32>,
    entries: Vec<Option<Entry>>,
    vacant: Vec<u32>,
    /// Entries without entries below them, by the tick of the last touch: next to be forgotten first.
    leaves: BTreeSet<(u64, u32)>,
    tick: u64,
    forgotten_blocks: u64,
    worker_numbers: BTreeMap<WorkerId, u32>,
    workers: Vec<WorkerEntry>,
    vacant_workers: Vec<u32>,
    families: BTreeMap<u64, BTreeSet<u32>>,
}

/// How many blocks of a worker are indexed in each tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerBlocks {
    /// In the accelerator's memory.
    pub gpu: u32,
    /// In the host's memory.
    pub host: u32,
}

#[derive(Clone, Debug)]
struct Entry {
    hash: BlockHash,
    parent: Option<u32>,
    children: u32,
    /// Whether more than [`MAX_OWNERS`] families have owned it; stays so while the entry lives.
    base: bool,
    touched: u64,
    gpu: Bits,
    host: Bits,
    /// Empty once it is base content.
    owners: SmallVec<[u64; 2]>,
}

// The memory that the header promises.
const _: () = assert!(size_of::<Option<Entry>>() <= 160);

#[derive(Clone, Debug)]
struct WorkerEntry {
    worker: WorkerId,
    /// The entries that it holds in any tier.
    held: Bits,
    blocks: WorkerBlocks,
}

impl Entry {
    fn holders(&mut self, tier: Tier) -> &mut Bits {
        match tier {
            Tier::Gpu => &mut self.gpu,
            Tier::Host => &mut self.host,
        }
    }

    /// Whether nothing speaks for keeping it.
    fn hollow(&self) -> bool {
        self.children == 0 && self.owners.is_empty() && !self.base && self.gpu.is_empty() && self.host.is_empty()
    }

    /// What the block counts for this family: one over the families that own it, if it is one of them.
    fn weight(&self, family: u64) -> f64 {
        if self.owners.contains(&family) {
            1.0 / self.owners.len() as f64
        } else {
            0.0
        }
    }
}

impl WorkerBlocks {
    fn of(&mut self, tier: Tier) -> &mut u32 {
        match tier {
            Tier::Gpu => &mut self.gpu,
            Tier::Host => &mut self.host,
        }
    }
}

impl ResidencyIndex {
    /// An empty index of at most so many blocks.
    ///
    /// # Panics
    /// If `max_blocks` is 0 or does not fit 32 bits.
    #[must_use]
    pub fn new(max_blocks: usize) -> Self {
        assert!(
            max_blocks > 0 && u32::try_from(max_blocks).is_ok(),
            "expected 1 to 2^32 - 1 blocks, not `{max_blocks}`"
        );
        Self {
            max_blocks,
            names: BlockMap::default(),
            entries: Vec::new(),
            vacant: Vec::new(),
            leaves: BTreeSet::new(),
            tick: 0,
            forgotten_blocks: 0,
            worker_numbers: BTreeMap::new(),
            workers: Vec::new(),
            vacant_workers: Vec::new(),
            families: BTreeMap::new(),
        }
    }

    /// Blocks that are indexed; at most `max_blocks`.
    #[must_use]
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Whether nothing is indexed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Blocks that were forgotten because the index was full, since it was made.
    #[must_use]
    pub fn forgotten_blocks(&self) -> u64 {
        self.forgotten_blocks
    }

    /// How many indexed blocks this worker holds.
    #[must_use]
    pub fn worker_blocks(&self, worker: WorkerId) -> WorkerBlocks {
        let number = self.worker_numbers.get(&worker);
        number.map_or(WorkerBlocks::default(), |number| self.workers[*number as usize].blocks)
    }

    /// How many indexed blocks this family owns, base content not counted.
    #[must_use]
    pub fn family_blocks(&self, family: u64) -> usize {
        self.families.get(&family).map_or(0, BTreeSet::len)
    }

    /// Whether this worker holds this block in this tier.
    #[must_use]
    pub fn holds(&self, worker: WorkerId, hash: BlockHash, tier: Tier) -> bool {
        let Some((number, slot)) = self.worker_numbers.get(&worker).zip(self.names.get(&hash)) else {
            return false;
        };
        let entry = self.entry(*slot);
        match tier {
            Tier::Gpu => entry.gpu.contains(*number),
            Tier::Host => entry.host.contains(*number),
        }
    }

    /// A worker holds these blocks now, each the parent of the next; `parent` is the block before the first. Where the
    /// index cannot hold all of a chain, it keeps the head.
    pub fn store(&mut self, worker: WorkerId, parent: Option<BlockHash>, hashes: &[BlockHash], tier: Tier) {
        if hashes.is_empty() {
            return;
        }
        let Some(number) = self.worker_number(worker) else {
            return;
        };
        self.visit_chain(parent, hashes, |index, slot| index.add_holder(slot, number, tier));
    }

    /// A worker holds these blocks no more in this tier. Blocks that it was not known to hold are passed over.
    pub fn remove(&mut self, worker: WorkerId, hashes: &[BlockHash], tier: Tier) {
        let Some(number) = self.worker_numbers.get(&worker).copied() else {
            return;
        };
        for hash in hashes {
            let Some(slot) = self.names.get(hash).copied() else {
                continue;
            };
            self.remove_holder(slot, number, tier);
            self.prune(slot);
        }
    }

    /// A worker holds nothing any more, or has left. Costs a step for each block that it held.
    pub fn clear_worker(&mut self, worker: WorkerId) {
        let Some(number) = self.worker_numbers.remove(&worker) else {
            return;
        };
        let held = std::mem::take(&mut self.workers[number as usize].held);
        for slot in held.iter() {
            self.remove_holder(slot, number, Tier::Gpu);
            self.remove_holder(slot, number, Tier::Host);
        }
        for slot in held.iter() {
            // An entry that fell with the one below it is gone already, and its slot is not taken again meanwhile.
            if self.entries[slot as usize].is_some() {
                self.prune(slot);
            }
        }
        self.vacant_workers.push(number);
    }

    /// This family uses these blocks, a prompt from its first block on: notes it as an owner of each, held by a worker
    /// or not, and touches them.
    pub fn own(&mut self, family: u64, hashes: &[BlockHash]) {
        self.visit_chain(None, hashes, |index, slot| index.add_owner(slot, family));
    }

    /// This family uses no block any more: it has ended. Costs a step for each block that it owned.
    pub fn disown(&mut self, family: u64) {
        let Some(slots) = self.families.remove(&family) else {
            return;
        };
        for slot in &slots {
            self.entry_mut(*slot).owners.retain(|owner| *owner != family);
        }
        for slot in slots {
            if self.entries[slot as usize].is_some() {
                self.prune(slot);
            }
        }
    }

    /// These blocks were of use: makes those of them that are indexed the last to be forgotten.
    pub fn touch(&mut self, hashes: &[BlockHash]) {
        let newest = self.advance(hashes.len());
        let mut walk = Neighbours::default();
        for (index, hash) in hashes.iter().enumerate() {
            if let Some(slot) = walk.find(self, *hash) {
                self.touch_entry(slot, newest - index as u64);
            }
        }
    }

    /// Finds or makes the entries of a chain, touches them, and does `note` to each. The head is touched last, so that
    /// of entries that no link holds together the tail is forgotten first too.
    fn visit_chain(&mut self, parent: Option<BlockHash>, hashes: &[BlockHash], mut note: impl FnMut(&mut Self, u32)) {
        let newest = self.advance(hashes.len());
        let mut above = parent.and_then(|parent| self.names.get(&parent).copied());
        // The last entry made: it stands in the order of leaves only if the next one does not hang below it.
        let mut made = None;
        let mut walk = Neighbours::after(above);
        for (index, hash) in hashes.iter().enumerate() {
            let touched = newest - index as u64;
            let slot = if let Some(slot) = walk.find(self, *hash) {
                self.touch_entry(slot, touched);
                self.enqueue_made(made.take());
                slot
            } else {
                let Some(slot) = self.make_entry(*hash, above, made == above, touched) else {
                    break;
                };
                made = Some(slot);
                walk = Neighbours::after(made);
                slot
            };
            note(self, slot);
            above = Some(slot);
        }
        self.enqueue_made(made);
    }

    /// Ticks for a chain of so many blocks; the highest of them, which is the head's.
    fn advance(&mut self, blocks: usize) -> u64 {
        self.tick += blocks as u64;
        self.tick
    }

    fn enqueue_made(&mut self, made: Option<u32>) {
        if let Some(slot) = made {
            let touched = self.entry(slot).touched;
            self.leaves.insert((touched, slot));
        }
    }

    fn touch_entry(&mut self, slot: u32, touched: u64) {
        let entry = self.entries[slot as usize].as_mut().expect("a name leads to an entry");
        let before = std::mem::replace(&mut entry.touched, touched);
        if entry.children == 0 && self.leaves.remove(&(before, slot)) {
            self.leaves.insert((touched, slot));
        }
    }

    /// A new entry below `above`, not in the order of leaves yet; `None` where the index is full of entries that cannot
    /// be forgotten, which all lie above this one.
    fn make_entry(&mut self, hash: BlockHash, above: Option<u32>, above_is_new: bool, touched: u64) -> Option<u32> {
        // First the link, so that making room cannot take the parent.
        if let Some(above) = above {
            self.add_child(above, above_is_new);
        }
        if self.names.len() == self.max_blocks && !self.forget_leaf() {
            if let Some(above) = above {
                self.remove_child(above);
            }
            return None;
        }
        let entry = Entry {
            hash,
            parent: above,
            children: 0,
            base: false,
            touched,
            gpu: Bits::default(),
            host: Bits::default(),
            owners: SmallVec::new(),
        };
        let slot = self.place_entry(entry);
        self.names.insert(hash, slot);
        Some(slot)
    }

    fn place_entry(&mut self, entry: Entry) -> u32 {
        if let Some(slot) = self.vacant.pop() {
            self.entries[slot as usize] = Some(entry);
            return slot;
        }
        self.entries.push(Some(entry));
        u32::try_from(self.entries.len() - 1).expect("the bound on blocks fits 32 bits")
    }

    fn add_child(&mut self, slot: u32, unqueued: bool) {
        let entry = self.entry_mut(slot);
        entry.children += 1;
        let key = (entry.touched, slot);
        if entry.children == 1 && !unqueued {
            self.leaves.remove(&key);
        }
    }

    fn remove_child(&mut self, slot: u32) {
        let entry = self.entry_mut(slot);
        entry.children -= 1;
        if entry.children == 0 {
            let key = (entry.touched, slot);
            self.leaves.insert(key);
        }
    }

    fn add_holder(&mut self, slot: u32, number: u32, tier: Tier) {
        if self.entry_mut(slot).holders(tier).insert(number) {
            let worker = &mut self.workers[number as usize];
            worker.held.insert(slot);
            *worker.blocks.of(tier) += 1;
        }
    }

    fn remove_holder(&mut self, slot: u32, number: u32, tier: Tier) {
        let entry = self.entries[slot as usize].as_mut().expect("a held block has an entry");
        if !entry.holders(tier).remove(number) {
            return;
        }
        let worker = &mut self.workers[number as usize];
        *worker.blocks.of(tier) -= 1;
        if !entry.gpu.contains(number) && !entry.host.contains(number) {
            worker.held.remove(slot);
        }
    }

    fn add_owner(&mut self, slot: u32, family: u64) {
        let entry = self.entries[slot as usize]
            .as_mut()
            .expect("an owned block has an entry");
        if entry.base || entry.owners.contains(&family) {
            return;
        }
        if entry.owners.len() < MAX_OWNERS {
            entry.owners.push(family);
            self.families.entry(family).or_default().insert(slot);
            return;
        }
        entry.base = true;
        for owner in std::mem::take(&mut entry.owners) {
            self.remove_from_family(owner, slot);
        }
    }

    fn remove_from_family(&mut self, family: u64, slot: u32) {
        if let Some(slots) = self.families.get_mut(&family) {
            slots.remove(&slot);
            if slots.is_empty() {
                self.families.remove(&family);
            }
        }
    }

    /// Forgets the least recently touched leaf; whether there was one.
    fn forget_leaf(&mut self) -> bool {
        let Some((_, slot)) = self.leaves.first().copied() else {
            return false;
        };
        let parent = self.drop_entry(slot);
        self.forgotten_blocks += 1;
        if let Some(parent) = parent {
            self.prune(parent);
        }
        true
    }

    /// Drops this entry if nothing speaks for it, and then those above it that were kept for it alone.
    fn prune(&mut self, slot: u32) {
        let mut next = Some(slot);
        while let Some(slot) = next.filter(|slot| self.entry(*slot).hollow()) {
            next = self.drop_entry(slot);
        }
    }

    /// Drops an entry that has none below it, and returns the one above.
    fn drop_entry(&mut self, slot: u32) -> Option<u32> {
        let entry = self.entries[slot as usize].take().expect("only an entry is dropped");
        self.leaves.remove(&(entry.touched, slot));
        self.names.swap_remove(&entry.hash);
        self.vacant.push(slot);
        for (holders, tier) in [(&entry.gpu, Tier::Gpu), (&entry.host, Tier::Host)] {
            for number in holders.iter() {
                let worker = &mut self.workers[number as usize];
                worker.held.remove(slot);
                *worker.blocks.of(tier) -= 1;
            }
        }
        for owner in entry.owners {
            self.remove_from_family(owner, slot);
        }
        if let Some(parent) = entry.parent {
            self.remove_child(parent);
        }
        entry.parent
    }

    /// The worker's number, a new one if it has none; `None` where all are taken.
    fn worker_number(&mut self, worker: WorkerId) -> Option<u32> {
        if let Some(number) = self.worker_numbers.get(&worker) {
            return Some(*number);
        }
        let entry = WorkerEntry {
            worker,
            held: Bits::default(),
            blocks: WorkerBlocks::default(),
        };
        let number = if let Some(number) = self.vacant_workers.pop() {
            self.workers[number as usize] = entry;
            number
        } else if self.workers.len() < MAX_WORKERS {
            self.workers.push(entry);
            u32::try_from(self.workers.len() - 1).expect("the bound on workers fits 32 bits")
        } else {
            return None;
        };
        self.worker_numbers.insert(worker, number);
        Some(number)
    }

    fn entry(&self, slot: u32) -> &Entry {
        self.entries[slot as usize]
            .as_ref()
            .expect("names and links lead to entries")
    }

    fn entry_mut(&mut self, slot: u32) -> &mut Entry {
        self.entries[slot as usize]
            .as_mut()
            .expect("names and links lead to entries")
    }
}
