//! The host tier against a list that is searched from end to end, state for state.

use homing_kv::returns::{BINS, bin_of};
use homing_kv::{BlockHash, CLASSES, Densities, HostChange, HostTier, Mark, Spilled};
use homing_units::{Duration, Instant};
use proptest::collection::vec;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Operation {
    /// Evicted from a pool, in this order, of sessions of this class that left so many milliseconds ago.
    Insert(Vec<u128>, u8, u64),
    /// A reload of the blocks that are here of these.
    Lock(Vec<u128>),
    /// The end of one of the reloads under way, for a session of this class.
    Unlock(usize, Option<u8>),
    /// Milliseconds pass.
    Wait(u64),
    /// The returns a second of one class and bin are these.
    Expect(u8, usize, u8),
    Clear,
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        6 => (vec(0_u128..20, 0..9), 0..4_u8, 0..300_u64).prop_map(|(blocks, class, ago)| Operation::Insert(blocks, class, ago)),
        3 => vec(0_u128..20, 1..5).prop_map(Operation::Lock),
        3 => (0_usize..4, prop::option::of(0..4_u8)).prop_map(|(reload, class)| Operation::Unlock(reload, class)),
        3 => (0..12_u32, 0..8_u64).prop_map(|(power, more)| Operation::Wait((1 << power) + more)),
        3 => (0..4_u8, 0..14_usize, 0..5_u8).prop_map(|(class, bin, density)| Operation::Expect(class, bin, density)),
        1 => Just(Operation::Clear),
    ]
}

#[derive(Clone, Copy, Debug)]
struct Block {
    hash: BlockHash,
    locks: u32,
    mark: Mark,
}

/// Blocks with their locks, the least recently used first.
#[derive(Debug)]
struct Model {
    capacity: usize,
    blocks: Vec<Block>,
    now: Instant,
    /// `None` where the least recently used goes first.
    densities: Option<Densities>,
}

impl Model {
    fn position(&self, hash: BlockHash) -> Option<usize> {
        self.blocks.iter().position(|block| block.hash == hash)
    }

    fn worth(&self, block: &Block) -> f64 {
        let away = self.now.saturating_since(block.mark.left);
        let densities = self.densities.as_ref();
        densities.map_or(0.0, |densities| densities[usize::from(block.mark.class)][bin_of(away)])
    }

    /// What nobody locks, the next to go first: the sort keeps the order by last use.
    fn unlocked(&self) -> Vec<Block> {
        let mut unlocked: Vec<Block> = self.blocks.iter().filter(|block| block.locks == 0).copied().collect();
        unlocked.sort_by(|left, right| self.worth(left).total_cmp(&self.worth(right)));
        unlocked
    }

    fn use_again(&mut self, at: usize, mark: Mark) {
        let block = self.blocks.remove(at);
        self.blocks.push(Block { mark, ..block });
    }

    /// Takes all in, then drops what goes first until the rest fits.
    fn insert(&mut self, evicted: &[Spilled]) -> HostChange {
        let locked = self.blocks.iter().filter(|block| block.locks > 0).count();
        let skipped = evicted.len().saturating_sub(self.capacity - locked);
        let before: Vec<BlockHash> = self.blocks.iter().map(|block| block.hash).collect();
        for spilled in &evicted[skipped..] {
            match self.position(spilled.hash) {
                Some(at) if self.blocks[at].locks == 0 => self.use_again(at, spilled.mark),
                Some(_) => {}
                None => {
                    let Spilled { hash, mark } = *spilled;
                    self.blocks.push(Block { hash, locks: 0, mark });
                }
            }
        }
        let mut removed = Vec::new();
        while self.blocks.len() > self.capacity {
            let victim = self.unlocked()[0].hash;
            self.blocks.retain(|block| block.hash != victim);
            removed.push(victim);
        }
        removed.retain(|hash| before.contains(hash));
        let stored = (0..evicted.len()).filter(|index| {
            let hash = evicted[*index].hash;
            !before.contains(&hash) && self.position(hash).is_some()
        });
        HostChange {
            stored: stored.collect(),
            removed,
        }
    }

    fn lock(&mut self, hashes: &[BlockHash]) {
        for hash in hashes {
            let at = self.position(*hash).expect("here");
            self.blocks[at].locks += 1;
        }
    }

    fn unlock(&mut self, hashes: &[BlockHash], class: Option<u8>) {
        for hash in hashes.iter().rev() {
            let at = self.position(*hash).expect("here");
            self.blocks[at].locks -= 1;
            if self.blocks[at].locks == 0 {
                let class = class.unwrap_or(self.blocks[at].mark.class);
                self.use_again(at, Mark { class, left: self.now });
            }
        }
    }

    fn clear(&mut self) -> Vec<BlockHash> {
        let dropped = self.unlocked().into_iter().map(|block| block.hash).collect();
        self.blocks.retain(|block| block.locks > 0);
        dropped
    }

    fn dump(&self) -> Vec<(BlockHash, u32)> {
        let locked = self.blocks.iter().filter(|block| block.locks > 0);
        let mut locked: Vec<_> = locked.map(|block| (block.hash, block.locks)).collect();
        locked.sort_unstable();
        let unlocked = self.unlocked().into_iter().map(|block| (block.hash, 0));
        unlocked.chain(locked).collect()
    }
}

fn names(numbers: &[u128]) -> Vec<BlockHash> {
    numbers.iter().map(|number| BlockHash(*number)).collect()
}

/// Evicted blocks of one allocation are all different.
fn distinct(numbers: &[u128]) -> Vec<BlockHash> {
    let mut seen = Vec::new();
    for hash in names(numbers) {
        if !seen.contains(&hash) {
            seen.push(hash);
        }
    }
    seen
}

fn spilled(hashes: &[BlockHash], mark: Mark) -> Vec<Spilled> {
    hashes.iter().map(|hash| Spilled { hash: *hash, mark }).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn the_tier_is_what_the_model_says(
        capacity in 0_u32..12,
        expects in any::<bool>(),
        operations in vec(operation(), 1..60),
    ) {
        let mut tier = if expects { HostTier::expecting(capacity) } else { HostTier::new(capacity) };
        let mut model = Model {
            capacity: capacity as usize,
            blocks: Vec::new(),
            now: Instant::ZERO + Duration::from_secs(1),
            densities: expects.then(|| Box::new([[0.0; BINS]; CLASSES])),
        };
        tier.advance(model.now);
        let mut locked: Vec<Vec<BlockHash>> = Vec::new();
        for operation in &operations {
            match operation {
                Operation::Insert(numbers, class, ago) => {
                    let left = Instant::from_nanos(model.now.as_nanos() - ago * 1_000_000);
                    let mark = Mark { class: *class, left };
                    let evicted = spilled(&distinct(numbers), mark);
                    let change = tier.insert(&evicted);
                    prop_assert!(change.stored.iter().all(|index| !change.removed.contains(&evicted[*index].hash)));
                    prop_assert_eq!(change, model.insert(&evicted));
                }
                Operation::Lock(numbers) => {
                    let run: Vec<BlockHash> = distinct(numbers);
                    let here = run.iter().take_while(|hash| model.position(**hash).is_some()).count();
                    prop_assert_eq!(tier.match_run(&run), here);
                    tier.lock(&run[..here]);
                    model.lock(&run[..here]);
                    locked.push(run[..here].to_vec());
                }
                Operation::Wait(milliseconds) => {
                    model.now += Duration::from_millis(*milliseconds);
                    tier.advance(model.now);
                }
                Operation::Expect(class, bin, density) => {
                    if let Some(densities) = &mut model.densities {
                        densities[usize::from(*class)][*bin] = f64::from(*density);
                        tier.expect(densities.clone());
                    }
                }
                Operation::Unlock(index, class) => {
                    if *index < locked.len() {
                        let run = locked.remove(*index);
                        tier.unlock(&run, *class, model.now);
                        model.unlock(&run, *class);
                    }
                }
                Operation::Clear => prop_assert_eq!(tier.clear(), model.clear()),
            }
            tier.check_invariants();
            prop_assert_eq!(tier.dump(), model.dump());
            prop_assert_eq!(tier.len() as usize, model.blocks.len());
            prop_assert_eq!(tier.is_empty(), model.blocks.is_empty());
        }
    }
}

#[test]
fn what_is_being_copied_stays_and_what_finds_no_room_is_lost() {
    let mut tier = HostTier::new(3);
    let insert = |tier: &mut HostTier, numbers: &[u128]| tier.insert(&spilled(&names(numbers), Mark::default()));
    insert(&mut tier, &[1, 2, 3]);
    tier.lock(&names(&[1, 2]));
    let change = insert(&mut tier, &[4, 5]);
    assert_eq!(change.stored, [1], "one place is left: the first to come goes without");
    assert_eq!(change.removed, names(&[3]));
    assert!(tier.contains(BlockHash(1)) && !tier.contains(BlockHash(4)));
    tier.unlock(&names(&[1, 2]), None, Instant::ZERO);
    let change = insert(&mut tier, &[6, 7]);
    assert_eq!(
        change.removed,
        names(&[5, 2]),
        "a prompt's tail goes before its head, and what was copied counts as used"
    );
}
