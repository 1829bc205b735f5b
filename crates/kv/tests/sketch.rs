//! Sketches against exact sets: what is resident is found, what is not is found as rarely as is said, and walks along prompts are too
//! long by what is said.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use homing_kv::{
    BITS_PER_BLOCK, BlockHash, HASHES, Known, RATE_MAX, SKETCH_BLOCKS_MAX, Sketch, SketchError, hash_blocks,
};
use proptest::prelude::*;
use std::collections::BTreeSet;

/// A chain of its own for each number.
fn chain(number: u32, blocks: usize) -> Vec<BlockHash> {
    let tokens: Vec<u32> = (0..u32::try_from(blocks).unwrap())
        .map(|index| index ^ (number << 16))
        .collect();
    hash_blocks(&tokens, 1)
}

proptest! {
    /// The naive model is the set of blocks that are in it.
    #[test]
    fn a_walk_ends_where_the_exact_set_says_or_a_little_later(
        length in 0_usize..400,
        resident_share in 0_usize..=100,
        branches_at in 0_usize..400,
        number in 0_u32..1_000,
    ) {
        let context = chain(number, length);
        let resident = &context[..length * resident_share / 100];
        let sketch = Sketch::of(resident).unwrap();
        let exact: BTreeSet<BlockHash> = resident.iter().copied().collect();
        prop_assert!(resident.iter().all(|hash| sketch.contains(*hash)), "what is resident is always found");
        // A prompt that goes on with the context: the count in the sketch makes the answer exact.
        let mut goes_on = context.clone();
        goes_on.extend(chain(number + 1_000, 50));
        prop_assert_eq!(sketch.prefix(&goes_on) as usize, resident.len());
        // One that branches off: never less than the exact set says, never more than is in it.
        let mut branches = context[..branches_at.min(length)].to_vec();
        branches.extend(chain(number + 2_000, 50));
        let expected = branches.iter().take_while(|hash| exact.contains(hash)).count();
        let found = sketch.prefix(&branches) as usize;
        prop_assert!((expected..=resident.len()).contains(&found), "{} for {}", found, expected);
        // What came is what was sent.
        let again = Sketch::from_parts(sketch.blocks(), sketch.words().into());
        prop_assert_eq!(again, Ok(sketch));
    }

    /// Whatever another program sends is a sketch within bounds, or refused.
    #[test]
    fn anything_is_a_sketch_within_bounds_or_refused(blocks in any::<u32>(), words in prop::collection::vec(any::<u64>(), 0..40)) {
        match Sketch::from_parts(blocks, words.clone().into_boxed_slice()) {
            Ok(sketch) => {
                prop_assert!(sketch.blocks() <= SKETCH_BLOCKS_MAX && sketch.rate() <= RATE_MAX);
                prop_assert!(sketch.words().len() * 64 < blocks as usize * BITS_PER_BLOCK + 64);
                prop_assert!(sketch.prefix(&chain(1, 100)) <= 100);
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}

/// Over 400 sketches of 300 blocks and 1,000 strange blocks each: the rate that the bits say is the one that is seen, and walks of prompts
/// that branch off are too long by p / (1 - p), each length of it as often as is said.
#[test]
fn false_positives_are_as_frequent_as_the_bits_say() {
    let (mut said, mut seen, mut tried) = (0.0, 0_u32, 0_u32);
    let (mut excess, mut at_least_one) = (0_u32, 0_u32);
    for number in 0..400 {
        let context = chain(number, 300);
        let sketch = Sketch::of(&context[..250]).unwrap();
        said += sketch.rate() / 400.0;
        let strange = chain(number + 1_000, 1_000);
        seen += u32::try_from(strange.iter().filter(|hash| sketch.contains(**hash)).count()).unwrap();
        tried += 1_000;
        for branch in 0..100 {
            let mut prompt = context[..100].to_vec();
            prompt.extend(chain(10_000 + number * 100 + branch, 20));
            let found = sketch.prefix(&prompt);
            excess += found - 100;
            at_least_one += u32::from(found > 100);
        }
    }
    let seen = f64::from(seen) / f64::from(tried);
    let best = 1.0 - libm::exp(-f64::from(HASHES) / BITS_PER_BLOCK as f64);
    let theory = best.powi(i32::try_from(HASHES).unwrap());
    assert!((seen - said).abs() < 0.0005, "{seen} seen, {said} said");
    assert!(
        (said - theory).abs() < 0.001 && theory < 0.01,
        "{said} said, {theory} in theory"
    );
    let (mean, share) = (f64::from(excess) / 40_000.0, f64::from(at_least_one) / 40_000.0);
    assert!(
        (share - said).abs() < 0.002,
        "{share} of walks are too long, {said} said"
    );
    assert!(
        (mean - said / (1.0 - said)).abs() < 0.002,
        "too long by {mean} blocks in the mean"
    );
}

/// With half of the strange blocks found a walk is too long by one block in the mean, and that one is taken off.
#[test]
fn what_false_positives_add_is_taken_off() {
    let (mut naive, mut accounted, mut walks) = (0_i64, 0_i64, 0_i64);
    for number in 0..200 {
        let resident = chain(number, 60);
        let sketch = Sketch::within(&resident, 3).unwrap();
        if !(0.34..RATE_MAX).contains(&sketch.rate()) {
            continue;
        }
        for branch in 0..50 {
            let mut prompt = resident[..30].to_vec();
            prompt.extend(chain(10_000 + number * 50 + branch, 25));
            let found = prompt.iter().take_while(|hash| sketch.contains(**hash)).count();
            naive += i64::try_from(found).unwrap() - 30;
            accounted += i64::from(sketch.prefix(&prompt)) - 30;
            walks += 1;
        }
    }
    assert!(walks > 2_000, "{walks} walks");
    let (naive, accounted) = (naive as f64 / walks as f64, accounted as f64 / walks as f64);
    assert!((0.5..1.0).contains(&naive), "too long by {naive} blocks");
    assert!(
        accounted.abs() < naive.abs() && (accounted - (naive - 1.0)).abs() < 0.05,
        "{accounted}, not {naive}"
    );
}

#[test]
fn what_is_known_beside_a_sketch_counts_before_it() {
    let context = chain(1, 40);
    let sketch = Sketch::of(&context[..20]).unwrap();
    let check = |known: &dyn Fn(usize) -> Known, expected: u32| {
        let of = |hash: BlockHash| known(context.iter().position(|block| *block == hash).unwrap());
        assert_eq!(sketch.prefix_with(&context, of), expected);
    };
    check(&|_| Known::Nothing, 20);
    // Stored since: right behind what is in the sketch, or with a hole before it.
    check(
        &|index| {
            if (20..30).contains(&index) {
                Known::Held
            } else {
                Known::Nothing
            }
        },
        30,
    );
    check(
        &|index| {
            if (21..30).contains(&index) {
                Known::Held
            } else {
                Known::Nothing
            }
        },
        20,
    );
    // Removed since.
    check(&|index| if index == 7 { Known::Gone } else { Known::Nothing }, 7);
}

#[test]
fn sketches_have_bounds() {
    assert_eq!(Sketch::of(&[]).unwrap().prefix(&chain(1, 5)), 0);
    let most = SKETCH_BLOCKS_MAX as usize;
    let blocks: Vec<BlockHash> = (0..=most).map(|index| BlockHash(index as u128)).collect();
    let largest = Sketch::of(&blocks[..most]).unwrap();
    assert_eq!(largest.words().len() * 8, 80 << 10);
    assert!(
        largest.rate() < 0.0083,
        "numbers that are not uniform are mixed: {}",
        largest.rate()
    );
    assert_eq!(Sketch::of(&blocks), None);
    assert_eq!(
        Sketch::from_parts(SKETCH_BLOCKS_MAX + 1, Box::new([0])),
        Err(SketchError::Blocks(SKETCH_BLOCKS_MAX + 1))
    );
    for (blocks, words) in [(0, 1), (1, 0), (6, 2), (7, 3)] {
        let refused = Sketch::from_parts(blocks, vec![0; words].into_boxed_slice());
        assert!(
            matches!(refused, Err(SketchError::Words { .. })),
            "{blocks} in {words} words: {refused:?}"
        );
    }
    assert_eq!(Sketch::from_parts(6, Box::new([u64::MAX])), Err(SketchError::Rate(1.0)));
}
