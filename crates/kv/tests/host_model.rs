//! The host tier against a list that is searched from end to end, state for state.

use homing_kv::{BlockHash, HostChange, HostTier};
use proptest::collection::vec;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Operation {
    /// Evicted from a pool, in this order.
    Insert(Vec<u128>),
    /// A reload of the blocks that are here of these.
    Lock(Vec<u128>),
    /// The end of one of the reloads under way.
    Unlock(usize),
    Clear,
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        6 => vec(0_u128..20, 0..9).prop_map(Operation::Insert),
        3 => vec(0_u128..20, 1..5).prop_map(Operation::Lock),
        3 => (0_usize..4).prop_map(Operation::Unlock),
        1 => Just(Operation::Clear),
    ]
}

/// Blocks with their locks, the next to go first.
#[derive(Debug)]
struct Model {
    capacity: usize,
    blocks: Vec<(BlockHash, u32)>,
}

impl Model {
    fn position(&self, hash: BlockHash) -> Option<usize> {
        self.blocks.iter().position(|(known, _)| *known == hash)
    }

    fn insert(&mut self, evicted: &[BlockHash]) -> HostChange {
        let locked = self.blocks.iter().filter(|(_, locks)| *locks > 0).count();
        let skipped = evicted.len().saturating_sub(self.capacity - locked);
        let mut change = HostChange::default();
        for (index, hash) in evicted.iter().enumerate().skip(skipped) {
            match self.position(*hash) {
                Some(at) => {
                    let block = self.blocks.remove(at);
                    self.blocks.push(block);
                }
                None => {
                    self.blocks.push((*hash, 0));
                    change.stored.push(index);
                }
            }
        }
        while self.blocks.len() > self.capacity {
            let victim = self.blocks.iter().position(|(_, locks)| *locks == 0).expect("room");
            change.removed.push(self.blocks.remove(victim).0);
        }
        change
    }

    fn lock(&mut self, hashes: &[BlockHash]) {
        for hash in hashes {
            let at = self.position(*hash).expect("here");
            self.blocks[at].1 += 1;
        }
    }

    fn unlock(&mut self, hashes: &[BlockHash]) {
        for hash in hashes.iter().rev() {
            let at = self.position(*hash).expect("here");
            self.blocks[at].1 -= 1;
            if self.blocks[at].1 == 0 {
                let block = self.blocks.remove(at);
                self.blocks.push(block);
            }
        }
    }

    fn clear(&mut self) -> Vec<BlockHash> {
        let (dropped, kept) = self.blocks.iter().partition(|(_, locks)| *locks == 0);
        self.blocks = kept;
        dropped.into_iter().map(|(hash, _): (BlockHash, u32)| hash).collect()
    }

    fn dump(&self) -> Vec<(BlockHash, u32)> {
        let (mut dump, mut locked): (Vec<_>, Vec<_>) = self.blocks.iter().partition(|(_, locks)| *locks == 0);
        locked.sort_unstable();
        dump.extend(locked);
        dump
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn the_tier_is_what_the_model_says(capacity in 0_u32..12, operations in vec(operation(), 1..60)) {
        let mut tier = HostTier::new(capacity);
        let mut model = Model { capacity: capacity as usize, blocks: Vec::new() };
        let mut locked: Vec<Vec<BlockHash>> = Vec::new();
        for operation in &operations {
            match operation {
                Operation::Insert(numbers) => {
                    let evicted = distinct(numbers);
                    let change = tier.insert(&evicted);
                    prop_assert!(change.stored.iter().all(|index| !change.removed.contains(&evicted[*index])));
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
                Operation::Unlock(index) => {
                    if *index < locked.len() {
                        let run = locked.remove(*index);
                        tier.unlock(&run);
                        model.unlock(&run);
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
    tier.insert(&names(&[1, 2, 3]));
    tier.lock(&names(&[1, 2]));
    let change = tier.insert(&names(&[4, 5]));
    assert_eq!(change.stored, [1], "one place is left: the first to come goes without");
    assert_eq!(change.removed, names(&[3]));
    assert!(tier.contains(BlockHash(1)) && !tier.contains(BlockHash(4)));
    tier.unlock(&names(&[1, 2]));
    let change = tier.insert(&names(&[6, 7]));
    assert_eq!(
        change.removed,
        names(&[5, 2]),
        "a prompt's tail goes before its head, and what was copied counts as used"
    );
}
