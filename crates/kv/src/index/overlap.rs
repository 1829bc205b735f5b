//! Questions about a prompt: who holds how much of it from its first block on, how much of that is a family's own, and
//! whose it is.
//!
//! One walk over the prompt's hashes carries the set of workers that hold everything so far. A block costs a step to the
//! neighbouring entry, or a look-up where it is not there, and an AND over the words of that set, so the fleet's size hardly
//! matters; a worker costs something only where its prefix ends.

use super::neighbours::Neighbours;
use super::{Entry, ResidencyIndex};
use crate::BlockHash;
use crate::bits::{Bits, numbers_of};
use homing_units::WorkerId;

/// How much of a prompt a worker holds without a hole, from the first block on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Overlap {
    /// Blocks of the longest prefix that lies in GPU memory: usable at once.
    pub gpu_blocks: u32,
    /// Blocks by which that prefix goes on if the host tier counts too: usable after a reload. `gpu_blocks +
    /// host_blocks` is the longest prefix that the worker holds at all.
    pub host_blocks: u32,
    /// The blocks of that longest prefix that the family owns, each weighted by one over the families that own it;
    /// base content, owned by more than [`super::MAX_OWNERS`] families, counts nothing.
    pub exclusive_weight: f64,
}

impl ResidencyIndex {
    /// What each worker holds of a prompt, for the workers that hold its first block at least, by worker id.
    /// `exclusive_weight` is the given family's; 0 without one.
    ///
    /// `hashes` is the whole prompt; the walk ends at the first block that nobody holds whose prefix is complete.
    #[must_use]
    pub fn overlap(&self, family: Option<u64>, hashes: &[BlockHash]) -> Vec<(WorkerId, Overlap)> {
        let mut walk = Walk::new(self.workers.len());
        let mut neighbours = Neighbours::default();
        for hash in hashes {
            let Some(slot) = neighbours.find(self, *hash) else {
                break;
            };
            let entry = self.entry(slot);
            if !walk.step(entry) {
                break;
            }
            walk.weight += family.map_or(0.0, |family| entry.weight(family));
        }
        let mut overlaps: Vec<(WorkerId, Overlap)> = walk
            .end()
            .into_iter()
            .map(|(number, overlap)| (self.workers[number as usize].worker, overlap))
            .collect();
        overlaps.sort_unstable_by_key(|(worker, _)| *worker);
        overlaps
    }

    /// What these blocks at a prompt's beginning count for a family, each by one over the families that own it: the
    /// [`Overlap::exclusive_weight`] of whoever holds them all.
    #[must_use]
    pub fn exclusive_weight(&self, family: u64, hashes: &[BlockHash]) -> f64 {
        let mut neighbours = Neighbours::default();
        let weights = hashes.iter().map(|hash| {
            let slot = neighbours.find(self, *hash);
            slot.map_or(0.0, |slot| self.entry(slot).weight(family))
        });
        weights.sum()
    }

    /// The family that alone owns the deepest such block of this prompt, and that block's depth: how many blocks of the
    /// prompt end with it. This recognises a session that does not name itself.
    #[must_use]
    pub fn deepest_exclusive(&self, hashes: &[BlockHash]) -> Option<(u64, usize)> {
        hashes.iter().enumerate().rev().find_map(|(index, hash)| {
            let entry = self.entry(*self.names.get(hash)?);
            (entry.owners.len() == 1).then(|| (entry.owners[0], index + 1))
        })
    }

    /// Blocks at the prompt's beginning that others than this family have shown too: boilerplate, as far as it is known.
    /// Whoever owns a block owns those before it, so a binary search finds the end.
    #[must_use]
    pub fn shared_depth(&self, family: u64, hashes: &[BlockHash]) -> usize {
        hashes.partition_point(|hash| {
            let slot = self.names.get(hash);
            slot.is_some_and(|slot| {
                let entry = self.entry(*slot);
                entry.base || entry.owners.iter().any(|owner| *owner != family)
            })
        })
    }

    /// Families that own a block, as far as they are counted: of base content one more than [`super::MAX_OWNERS`].
    #[must_use]
    pub fn owner_count(&self, hash: BlockHash) -> usize {
        self.names.get(&hash).map_or(0, |slot| {
            let entry = self.entry(*slot);
            if entry.base {
                super::MAX_OWNERS + 1
            } else {
                entry.owners.len()
            }
        })
    }

    /// Blocks at the prompt's beginning that so many families own at least, by [`Self::owner_count`] and the same search as
    /// [`Self::shared_depth`].
    #[must_use]
    pub fn owned_depth(&self, owners: usize, hashes: &[BlockHash]) -> usize {
        hashes.partition_point(|hash| self.owner_count(*hash) >= owners)
    }
}

/// The state of a walk after `depth` blocks.
struct Walk {
    depth: u32,
    /// The family's share of those blocks.
    weight: f64,
    /// Workers that hold each of those blocks in either tier.
    usable: Bits,
    /// Workers that hold each of those blocks in GPU memory: a part of `usable`.
    resident: Bits,
    /// For each worker number, where its prefix in GPU memory has ended.
    gpu_blocks: Vec<u32>,
    ended: Vec<(u32, Overlap)>,
}

impl Walk {
    fn new(workers: usize) -> Self {
        Self {
            depth: 0,
            weight: 0.0,
            usable: Bits::default(),
            resident: Bits::default(),
            gpu_blocks: vec![0; workers],
            ended: Vec::new(),
        }
    }

    /// Goes over one more block; whether any worker still holds all of them.
    fn step(&mut self, entry: &Entry) -> bool {
        if self.depth == 0 {
            self.usable = entry.gpu.union(&entry.host);
            self.resident = entry.gpu.clone();
        }
        let (mut any, mut any_lost) = (0, 0);
        for index in self.usable.word_range() {
            let gpu = entry.gpu.word(index);
            let lost_resident = self.resident.keep(index, gpu);
            for number in numbers_of(index, lost_resident) {
                self.gpu_blocks[number as usize] = self.depth;
            }
            let lost = self.usable.keep(index, gpu | entry.host.word(index));
            for number in numbers_of(index, lost) {
                self.ended.push((number, self.overlap_of(number)));
            }
            any |= self.usable.word(index);
            any_lost |= lost;
        }
        if any_lost != 0 {
            self.usable.trim();
        }
        if any != 0 {
            self.depth += 1;
        }
        any != 0
    }

    /// What every worker holds, those included that hold all that was walked over.
    fn end(mut self) -> Vec<(u32, Overlap)> {
        for number in self.resident.iter() {
            self.gpu_blocks[number as usize] = self.depth;
        }
        for number in self.usable.iter() {
            self.ended.push((number, self.overlap_of(number)));
        }
        self.ended
    }

    fn overlap_of(&self, number: u32) -> Overlap {
        let gpu_blocks = self.gpu_blocks[number as usize];
        Overlap {
            gpu_blocks,
            host_blocks: self.depth - gpu_blocks,
            exclusive_weight: self.weight,
        }
    }
}
