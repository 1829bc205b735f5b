//! The index against a naive model, and the cases that its contract names.

use super::*;

#[test]
fn overlap_counts_whole_prefixes_and_what_a_family_owns() {
    let prompt = crate::hash_blocks(&[1, 2, 3, 4], 1);
    let (first, second) = (WorkerId(0), WorkerId(9));
    let mut index = ResidencyIndex::new(100);
    index.store(first, None, &prompt[..3], Tier::Gpu);
    index.store(second, None, &prompt[..1], Tier::Gpu);
    index.store(second, Some(prompt[0]), &prompt[1..], Tier::Host);
    index.own(7, &prompt);
    index.own(8, &prompt[..2]);
    index.check_invariants();
    let expected = [
        (
            first,
            Overlap {
                gpu_blocks: 3,
                host_blocks: 0,
                exclusive_weight: 2.0,
            },
        ),
        (
            second,
            Overlap {
                gpu_blocks: 1,
                host_blocks: 3,
                exclusive_weight: 3.0,
            },
        ),
    ];
    assert_eq!(index.overlap(Some(7), &prompt), expected);
    assert_eq!(index.deepest_exclusive(&prompt), Some((7, 4)));
    index.disown(7);
    index.clear_worker(first);
    index.check_invariants();
    assert_eq!(index.overlap(Some(7), &prompt).len(), 1);
    assert_eq!(index.deepest_exclusive(&prompt), Some((8, 2)));
}
