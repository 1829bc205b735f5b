//! From an engine's block hashes to own ones, through the tokens that its events carry.
//!
//! An engine's hash means something to that engine only. For each of its blocks the map keeps where it stands in own
//! terms: the own chain after the last whole own block, and the tokens since then. So an engine may have blocks of
//! another size: a larger one fills several own blocks, several smaller ones fill one. Bounded: beyond the bound the
//! oldest blocks are forgotten, which costs precision (what hangs on them is no longer mapped) and nothing else.
//!
//! A full pool is a hundred thousand blocks that come and go, so a block of the usual kind, as large as an own one, is kept without a
//! heap of its own, in a map whose memory follows what is in it: a hash table would double once it has seen enough go.

use homing_kv::{BlockHash, Tier, chain};
use homing_router::event::KvUpdate;
use homing_wire::kv_events::{BlockRemoved, BlockStored, CacheEvent};
use std::collections::{BTreeMap, VecDeque};

/// Tokens after the last whole own block that are kept for each engine block: own blocks are no larger than this.
const OWN_BLOCK_MAX: u32 = 4_096;

/// Places in the order of blocks that are gone, fewer than which are not worth a look through it.
const STALE_MIN: usize = 1_024;

/// The map of one life of one engine.
#[derive(Debug)]
pub(crate) struct HashMapping {
    own_block_size: u32,
    capacity: usize,
    blocks: BTreeMap<u64, Known>,
    /// The blocks in the order they were stored, with the number they had then; those stored anew since are stale.
    order: VecDeque<(u64, u64)>,
    stored: u64,
    /// Stored blocks that could not be mapped.
    unmapped: u64,
}

/// A block that is mapped.
#[derive(Debug)]
struct Known {
    place: KeptPlace,
    /// Its number in the order.
    number: u64,
    tiers: Tiers,
}

/// Where a block lies: an engine with a host tier drops it from one and keeps it in the other.
#[derive(Clone, Copy, Debug, Default)]
struct Tiers {
    gpu: bool,
    host: bool,
}

/// [`Place`], as small as it can be.
#[derive(Debug)]
enum KeptPlace {
    /// It is one own block, and ends where that one does: its chain.
    OwnBlock(BlockHash),
    Other(Box<Place>),
}

/// Where an engine's block stands in own terms.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Place {
    /// The own chain after the last whole own block.
    tip: Option<BlockHash>,
    /// Tokens after it.
    rest: Vec<u32>,
    /// Own blocks whose last token lies in this block.
    completes: Vec<BlockHash>,
}

impl Tiers {
    fn set(&mut self, tier: Tier, lies_there: bool) {
        match tier {
            Tier::Gpu => self.gpu = lies_there,
            Tier::Host => self.host = lies_there,
        }
    }

    const fn is_none(self) -> bool {
        !self.gpu && !self.host
    }
}

impl KeptPlace {
    fn new(place: &Place) -> Self {
        match (place.tip, place.completes.as_slice()) {
            (Some(tip), [only]) if tip == *only && place.rest.is_empty() => Self::OwnBlock(tip),
            _ => Self::Other(Box::new(place.clone())),
        }
    }

    fn completes(&self) -> &[BlockHash] {
        match self {
            Self::OwnBlock(hash) => std::slice::from_ref(hash),
            Self::Other(place) => &place.completes,
        }
    }

    /// The place behind which the next block stands.
    fn before_next(&self) -> Place {
        match self {
            Self::OwnBlock(hash) => Place {
                tip: Some(*hash),
                ..Place::default()
            },
            Self::Other(place) => Place::clone(place),
        }
    }
}

impl HashMapping {
    /// # Panics
    /// If an own block holds no token, or more than the bound.
    pub(crate) fn new(own_block_size: u32, capacity: usize) -> Self {
        assert!(
            (1..=OWN_BLOCK_MAX).contains(&own_block_size),
            "a block holds 1 to {OWN_BLOCK_MAX} tokens"
        );
        Self {
            own_block_size,
            capacity: capacity.max(1),
            blocks: BTreeMap::new(),
            order: VecDeque::new(),
            stored: 0,
            unmapped: 0,
        }
    }

    /// Stored blocks so far that could not be mapped: their parent is not known, or their KV is private.
    pub(crate) fn unmapped(&self) -> u64 {
        self.unmapped
    }

    /// The same changes in own hashes.
    pub(crate) fn translate(&mut self, events: &[CacheEvent]) -> Vec<KvUpdate> {
        events.iter().filter_map(|event| self.translate_one(event)).collect()
    }

    fn translate_one(&mut self, event: &CacheEvent) -> Option<KvUpdate> {
        match event {
            CacheEvent::Stored(stored) => self.stored(stored),
            CacheEvent::Removed(removed) => self.removed(removed),
            CacheEvent::AllCleared => {
                self.blocks.clear();
                self.order.clear();
                Some(KvUpdate::Cleared)
            }
        }
    }

    fn stored(&mut self, stored: &BlockStored) -> Option<KvUpdate> {
        let start = match stored.parent_block_hash {
            None => Some(Place::default()),
            Some(parent) => self.blocks.get(&parent).map(|known| known.place.before_next()),
        };
        // What is private serves nobody else's tokens; of a hybrid model only the first group is the prefix cache.
        let shared = !stored.is_private() && stored.group_idx.unwrap_or(0) == 0;
        let Some(mut place) = start.filter(|_| shared) else {
            self.unmapped += stored.block_hashes.len() as u64;
            return None;
        };
        let tier = tier(stored.medium.as_deref())?;
        let parent = place.tip;
        let mut hashes = Vec::new();
        for (block, tokens) in stored.blocks() {
            place = self.after(place, tokens);
            hashes.extend_from_slice(&place.completes);
            self.insert(block, KeptPlace::new(&place), tier);
        }
        (!hashes.is_empty()).then_some(KvUpdate::Stored { parent, hashes, tier })
    }

    /// Where a block of these tokens stands that follows another.
    fn after(&self, before: Place, tokens: &[u32]) -> Place {
        let mut run = before.rest;
        run.extend_from_slice(tokens);
        let mut tip = before.tip;
        let whole = run.chunks_exact(self.own_block_size as usize);
        let rest = whole.remainder().to_vec();
        let completes = whole.map(|block| *tip.insert(chain(tip, block))).collect();
        Place { tip, rest, completes }
    }

    fn removed(&mut self, removed: &BlockRemoved) -> Option<KvUpdate> {
        let tier = tier(removed.medium.as_deref())?;
        let mut hashes = Vec::new();
        for block in &removed.block_hashes {
            let Some(known) = self.blocks.get_mut(block) else {
                continue;
            };
            known.tiers.set(tier, false);
            hashes.extend_from_slice(known.place.completes());
            if known.tiers.is_none() {
                self.blocks.remove(block);
            }
        }
        (!hashes.is_empty()).then_some(KvUpdate::Removed { hashes, tier })
    }

    fn insert(&mut self, block: u64, place: KeptPlace, tier: Tier) {
        self.stored += 1;
        let number = self.stored;
        let mut tiers = self
            .blocks
            .get(&block)
            .map_or_else(Tiers::default, |before| before.tiers);
        tiers.set(tier, true);
        self.blocks.insert(block, Known { place, number, tiers });
        self.order.push_back((block, number));
        while self.blocks.len() > self.capacity {
            let Some((oldest, number)) = self.order.pop_front() else {
                break;
            };
            if self.is_current(oldest, number) {
                self.blocks.remove(&oldest);
            }
        }
        // An engine drops most blocks long before this map is full: their places in the order go when they are the most of it.
        if self.order.len() > STALE_MIN + 2 * self.blocks.len() {
            let order = std::mem::take(&mut self.order);
            self.order = order
                .into_iter()
                .filter(|(block, number)| self.is_current(*block, *number))
                .collect();
        }
    }

    fn is_current(&self, block: u64, number: u64) -> bool {
        self.blocks.get(&block).is_some_and(|known| known.number == number)
    }
}

/// The tier of a medium; `None` for what an engine does not have by itself: SGLang's disks and shared stores.
fn tier(medium: Option<&str>) -> Option<Tier> {
    match medium {
        None | Some("GPU") => Some(Tier::Gpu),
        Some("DISK" | "EXTERNAL") => None,
        Some(_) => Some(Tier::Host),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_kv::hash_blocks;
    use proptest::prelude::*;

    fn stored(blocks: &[u64], parent: Option<u64>, tokens: &[u32], block_size: u32) -> CacheEvent {
        CacheEvent::Stored(BlockStored {
            block_hashes: blocks.to_vec(),
            parent_block_hash: parent,
            token_ids: tokens.to_vec(),
            block_size,
            ..BlockStored::default()
        })
    }

    fn removed(blocks: &[u64]) -> CacheEvent {
        CacheEvent::Removed(BlockRemoved {
            block_hashes: blocks.to_vec(),
            ..BlockRemoved::default()
        })
    }

    fn hashes(updates: &[KvUpdate]) -> Vec<BlockHash> {
        let of = |update: &KvUpdate| match update {
            KvUpdate::Stored { hashes, .. } | KvUpdate::Removed { hashes, .. } => hashes.clone(),
            KvUpdate::Cleared => Vec::new(),
        };
        updates.iter().flat_map(of).collect()
    }

    #[test]
    fn a_chain_is_followed_through_the_engines_names() {
        let mut mapping = HashMapping::new(2, 100);
        let own = hash_blocks(&[1, 2, 3, 4, 5, 6], 2);
        let first = mapping.translate(&[stored(&[77], None, &[1, 2], 2)]);
        assert_eq!(
            first,
            [KvUpdate::Stored {
                parent: None,
                hashes: vec![own[0]],
                tier: Tier::Gpu
            }]
        );
        let next = mapping.translate(&[stored(&[88, 99], Some(77), &[3, 4, 5, 6], 2)]);
        assert_eq!(
            next,
            [KvUpdate::Stored {
                parent: Some(own[0]),
                hashes: own[1..].to_vec(),
                tier: Tier::Gpu
            }]
        );
        assert_eq!(hashes(&mapping.translate(&[removed(&[99])])), [own[2]]);
        assert_eq!(mapping.translate(&[removed(&[99])]), [], "it is gone already");
        assert_eq!(
            mapping.translate(&[stored(&[5], Some(99), &[7, 8], 2)]),
            [],
            "nobody knows what came before"
        );
        assert_eq!(mapping.unmapped(), 1);
        assert_eq!(mapping.translate(&[CacheEvent::AllCleared]), [KvUpdate::Cleared]);
        assert_eq!(mapping.translate(&[removed(&[77])]), []);
    }

    #[test]
    fn private_blocks_are_not_mapped() {
        let mut mapping = HashMapping::new(2, 100);
        let salted = BlockStored {
            block_hashes: vec![1],
            token_ids: vec![1, 2],
            block_size: 2,
            extra_keys: vec![Some(vec!["salt".to_owned()])],
            ..BlockStored::default()
        };
        assert_eq!(mapping.translate(&[CacheEvent::Stored(salted)]), []);
        assert_eq!(mapping.unmapped(), 1);
    }

    #[test]
    fn a_block_is_followed_through_the_tiers() {
        let mut mapping = HashMapping::new(2, 100);
        let own = hash_blocks(&[1, 2, 3, 4], 2);
        let on = |medium: &str, block: u64, parent, tokens: &[u32]| {
            CacheEvent::Stored(BlockStored {
                block_hashes: vec![block],
                parent_block_hash: parent,
                token_ids: tokens.to_vec(),
                block_size: 2,
                medium: Some(medium.to_owned()),
                ..BlockStored::default()
            })
        };
        let off = |medium: &str, block: u64| {
            CacheEvent::Removed(BlockRemoved {
                block_hashes: vec![block],
                medium: Some(medium.to_owned()),
                ..BlockRemoved::default()
            })
        };
        let tiers = |updates: &[KvUpdate]| -> Vec<Option<Tier>> {
            let of = |update: &KvUpdate| match update {
                KvUpdate::Stored { tier, .. } | KvUpdate::Removed { tier, .. } => Some(*tier),
                KvUpdate::Cleared => None,
            };
            updates.iter().map(of).collect()
        };
        mapping.translate(&[on("GPU", 1, None, &[1, 2]), on("CPU_PINNED", 1, None, &[1, 2])]);
        assert_eq!(tiers(&mapping.translate(&[off("GPU", 1)])), [Some(Tier::Gpu)]);
        // It is in the host's memory still, so that what hangs on it is known, and its end there is told.
        assert_eq!(hashes(&mapping.translate(&[on("GPU", 2, Some(1), &[3, 4])])), [own[1]]);
        assert_eq!(tiers(&mapping.translate(&[off("CPU_PINNED", 1)])), [Some(Tier::Host)]);
        assert_eq!(mapping.translate(&[off("CPU_PINNED", 1)]), [], "it is gone");
        // What lies in a store that the engine shares with others is nobody's residency.
        assert_eq!(
            mapping.translate(&[on("EXTERNAL", 3, None, &[1, 2]), off("DISK", 2)]),
            []
        );
    }

    #[test]
    fn a_block_of_the_usual_kind_has_no_heap_of_its_own() {
        let mut mapping = HashMapping::new(2, 100);
        mapping.translate(&[
            stored(&[1, 2], None, &[1, 2, 3, 4], 2),
            stored(&[3], Some(2), &[5, 6, 7], 3),
        ]);
        let usual = |block: u64| matches!(mapping.blocks[&block].place, KeptPlace::OwnBlock(_));
        assert!(usual(1) && usual(2) && !usual(3), "{mapping:?}");
        assert!(size_of::<Known>() <= 64);
    }

    #[test]
    fn the_map_is_bounded() {
        let mut mapping = HashMapping::new(1, 3);
        for block in 0..10 {
            mapping.translate(&[stored(&[block], None, &[block as u32], 1)]);
            assert!(mapping.blocks.len() <= 3 && mapping.order.len() <= STALE_MIN + 6);
        }
        assert_eq!(mapping.translate(&[removed(&[0])]), []);
        assert_eq!(mapping.translate(&[removed(&[9])]).len(), 1);
    }

    #[test]
    fn blocks_that_come_and_go_leave_nothing() {
        let mut mapping = HashMapping::new(1, 1 << 20);
        for block in 0..20_000 {
            mapping.translate(&[stored(&[block], None, &[block as u32], 1)]);
            if let Some(gone) = block.checked_sub(10) {
                mapping.translate(&[removed(&[gone])]);
            }
            assert!(mapping.blocks.len() <= 11, "{block}");
            assert!(
                mapping.order.len() <= STALE_MIN + 22,
                "{block}: {}",
                mapping.order.len()
            );
        }
    }

    proptest! {
        /// Whatever the two block sizes and however the engine cuts its events: all own blocks of the prompt, once each.
        #[test]
        fn block_sizes_need_not_agree(own in 1_u32..9, theirs in 1_u32..9, blocks in 1_usize..20, cuts in prop::collection::vec(1_usize..5, 20)) {
            let tokens: Vec<u32> = (0..).take(blocks * theirs as usize).collect();
            let mut mapping = HashMapping::new(own, 1_000);
            let (mut found, mut done) = (Vec::new(), 0);
            for cut in cuts {
                let until = (done + cut).min(blocks);
                let names: Vec<u64> = (done as u64..until as u64).map(|block| block + 1).collect();
                let part = &tokens[done * theirs as usize..until * theirs as usize];
                let parent = (done > 0).then_some(done as u64);
                found.extend(hashes(&mapping.translate(&[stored(&names, parent, part, theirs)])));
                done = until;
            }
            prop_assert_eq!(&found, &hash_blocks(&tokens[..done * theirs as usize], own));
            let names: Vec<u64> = (1..=done as u64).rev().collect();
            let mut gone = hashes(&mapping.translate(&[removed(&names)]));
            gone.sort();
            found.sort();
            prop_assert_eq!(gone, found);
        }
    }
}
