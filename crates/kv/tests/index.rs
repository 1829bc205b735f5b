//! What the index's contract says, case by case.

use homing_kv::{BlockHash, MAX_OWNERS, MAX_WORKERS, Overlap, ResidencyIndex, Tier, WorkerBlocks, hash_blocks};
use homing_units::WorkerId;

/// The hashes of a prompt of one token a block.
fn prompt(tokens: &[u32]) -> Vec<BlockHash> {
    hash_blocks(tokens, 1)
}

/// The hashes of a prompt of so many blocks.
fn long_prompt(blocks: u32) -> Vec<BlockHash> {
    prompt(&(0..blocks).collect::<Vec<_>>())
}

/// One worker holds these blocks of a prompt of six in GPU memory and those in host memory: what is its overlap?
fn check_overlap(gpu: &[usize], host: &[usize], expected: Option<(u32, u32)>) {
    let hashes = long_prompt(6);
    let mut index = ResidencyIndex::new(100);
    for (places, tier) in [(gpu, Tier::Gpu), (host, Tier::Host)] {
        for place in places {
            index.store(
                WorkerId(3),
                place.checked_sub(1).map(|before| hashes[before]),
                &[hashes[*place]],
                tier,
            );
        }
    }
    index.check_invariants();
    let overlap = |(gpu_blocks, host_blocks)| Overlap {
        gpu_blocks,
        host_blocks,
        exclusive_weight: 0.0,
    };
    let expected: Vec<(WorkerId, Overlap)> = expected
        .map(|blocks| (WorkerId(3), overlap(blocks)))
        .into_iter()
        .collect();
    assert_eq!(
        index.overlap(None, &hashes),
        expected,
        "in GPU memory {gpu:?}, in host memory {host:?}"
    );
}

#[test]
fn overlap_is_a_prefix_without_holes() {
    check_overlap(&[], &[], None);
    check_overlap(&[0, 1, 2], &[], Some((3, 0)));
    check_overlap(&[0, 1, 3], &[], Some((2, 0)));
    check_overlap(&[1, 2, 3], &[], None);
    check_overlap(&[0, 1, 2, 3, 4, 5], &[0, 1], Some((6, 0)));
    check_overlap(&[], &[0, 1], Some((0, 2)));
    check_overlap(&[0, 1], &[2, 3], Some((2, 2)));
    // Beyond the first block of the host tier everything needs the reload to end first.
    check_overlap(&[0, 2, 4], &[1, 3], Some((1, 4)));
    check_overlap(&[0, 2], &[4], Some((1, 0)));
}

#[test]
fn only_what_the_family_owns_pulls() {
    let (base, own) = (prompt(&[1, 2]), prompt(&[1, 2, 3, 4]));
    let mut index = ResidencyIndex::new(100);
    index.store(WorkerId(0), None, &own, Tier::Gpu);
    let weight = |index: &ResidencyIndex, family| index.overlap(family, &own)[0].1.exclusive_weight;
    assert_eq!(weight(&index, Some(1)), 0.0, "what nobody owns pulls nobody");
    index.own(1, &own);
    assert_eq!(weight(&index, Some(1)), 4.0);
    assert_eq!(weight(&index, Some(2)), 0.0, "another family's blocks pull nobody else");
    index.own(2, &base);
    assert_eq!(weight(&index, Some(1)), 3.0, "two blocks are shared by two");
    index.own(1, &prompt(&[1, 2, 3, 9]));
    assert_eq!(weight(&index, Some(1)), 3.0, "a fork in the family changes nothing");
    for family in 3..=MAX_OWNERS as u64 + 1 {
        index.own(family, &base);
    }
    index.check_invariants();
    assert_eq!(weight(&index, Some(1)), 2.0, "what all own is base content");
    assert_eq!(index.family_blocks(1), 3);
    assert_eq!(weight(&index, None), 0.0);
    for family in 2..=MAX_OWNERS as u64 + 1 {
        index.disown(family);
    }
    assert_eq!(weight(&index, Some(1)), 2.0, "base content stays base content");
}

#[test]
fn a_session_is_recognised_by_what_it_alone_owns() {
    let mut index = ResidencyIndex::new(100);
    let check = |index: &ResidencyIndex, tokens: &[u32], expected| {
        assert_eq!(index.deepest_exclusive(&prompt(tokens)), expected, "prompt {tokens:?}");
    };
    check(&index, &[1, 2, 3], None);
    index.own(10, &prompt(&[1, 2, 3]));
    index.own(20, &prompt(&[1, 2, 4]));
    check(&index, &[1, 2, 3, 5], Some((10, 3)));
    check(&index, &[1, 2, 4, 5], Some((20, 3)));
    check(&index, &[1, 2, 5], None);
    index.disown(20);
    check(&index, &[1, 2, 5], Some((10, 2)));
}

#[test]
fn a_gap_in_the_reports_costs_nothing_but_the_gap() {
    let hashes = long_prompt(6);
    let mut index = ResidencyIndex::new(100);
    index.store(WorkerId(0), Some(hashes[2]), &hashes[3..], Tier::Gpu);
    assert_eq!(index.overlap(None, &hashes), [], "the head is not known to be there");
    index.store(WorkerId(0), None, &hashes[..3], Tier::Gpu);
    index.check_invariants();
    assert_eq!(index.overlap(None, &hashes)[0].1.gpu_blocks, 6);
}

#[test]
fn a_full_index_forgets_the_longest_untouched_tail() {
    let (old, new) = (prompt(&[1, 2, 3]), prompt(&[1, 2, 4]));
    let mut index = ResidencyIndex::new(4);
    index.store(WorkerId(0), None, &old, Tier::Gpu);
    index.store(WorkerId(1), None, &new, Tier::Gpu);
    index.touch(&old);
    index.store(WorkerId(1), None, &prompt(&[7]), Tier::Gpu);
    index.check_invariants();
    assert_eq!((index.len(), index.forgotten_blocks()), (4, 1));
    assert!(
        !index.holds(WorkerId(1), new[2], Tier::Gpu),
        "it was touched before the other"
    );
    assert_eq!(index.worker_blocks(WorkerId(1)), WorkerBlocks { gpu: 3, host: 0 });
    // A prompt that does not fit keeps its head, which is the part that can be of use.
    let long = long_prompt(9);
    index.store(WorkerId(0), None, &long, Tier::Gpu);
    index.own(5, &long);
    index.check_invariants();
    assert_eq!(index.len(), 4);
    assert_eq!(
        index.overlap(Some(5), &long)[0].1,
        Overlap {
            gpu_blocks: 4,
            host_blocks: 0,
            exclusive_weight: 4.0
        }
    );
}

#[test]
fn a_cleared_worker_leaves_nothing_behind_and_its_place_is_taken_again() {
    let hashes = long_prompt(5);
    let mut index = ResidencyIndex::new(100);
    index.store(WorkerId(1), None, &hashes, Tier::Gpu);
    index.store(WorkerId(1), None, &hashes[..2], Tier::Host);
    index.store(WorkerId(2), None, &hashes[..3], Tier::Gpu);
    assert_eq!(index.worker_blocks(WorkerId(1)), WorkerBlocks { gpu: 5, host: 2 });
    index.clear_worker(WorkerId(1));
    index.clear_worker(WorkerId(1));
    index.check_invariants();
    assert_eq!(index.worker_blocks(WorkerId(1)), WorkerBlocks::default());
    assert_eq!(index.len(), 3, "what the other holds stays");
    index.store(WorkerId(3), None, &hashes[..1], Tier::Gpu);
    index.check_invariants();
    let holders: Vec<WorkerId> = index
        .overlap(None, &hashes)
        .into_iter()
        .map(|(worker, _)| worker)
        .collect();
    assert_eq!(holders, [WorkerId(2), WorkerId(3)]);
}

#[test]
fn a_large_fleet_is_indexed_up_to_its_bound() {
    let hashes = prompt(&[1]);
    let mut index = ResidencyIndex::new(10);
    for worker in 0..=MAX_WORKERS as u32 {
        index.store(WorkerId(worker), None, &hashes, Tier::Gpu);
    }
    index.check_invariants();
    assert_eq!(index.overlap(None, &hashes).len(), MAX_WORKERS);
    index.clear_worker(WorkerId(17));
    index.store(WorkerId(MAX_WORKERS as u32), None, &hashes, Tier::Gpu);
    assert_eq!(
        index.overlap(None, &hashes).len(),
        MAX_WORKERS,
        "a place that became free is taken"
    );
    assert!(index.holds(WorkerId(MAX_WORKERS as u32), hashes[0], Tier::Gpu));
}
