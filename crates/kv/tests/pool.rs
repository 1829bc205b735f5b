//! What the pool's contract says, case by case.

#![expect(clippy::unwrap_used, reason = "a test ends at the first surprise")]

use homing_kv::{BlockHash, BlockId, BlockPool, Committed, Evicted, PoolStatistics, hash_blocks};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The hashes of a prompt of one token a block.
fn prompt(tokens: &[u32]) -> Vec<BlockHash> {
    hash_blocks(tokens, 1)
}

/// Computes a prompt as a request would: takes what is cached, allocates and names the rest.
fn compute(pool: &mut BlockPool, hashes: &[BlockHash]) -> (Vec<BlockId>, Vec<BlockHash>) {
    let mut blocks = pool.acquire_prefix(hashes);
    let cached = blocks.len();
    let rest = u32::try_from(hashes.len() - cached).unwrap();
    let allocation = pool.allocate(rest).expect("the test's pool is large enough");
    blocks.extend(allocation.blocks);
    name(pool, &blocks, hashes, cached);
    pool.check_invariants();
    (blocks, names(&allocation.evicted))
}

fn names(evicted: &[Evicted]) -> Vec<BlockHash> {
    evicted.iter().map(|evicted| evicted.hash).collect()
}

/// Names these blocks of a prompt from one on; each must be stored.
fn name(pool: &mut BlockPool, blocks: &[BlockId], hashes: &[BlockHash], from: usize) {
    for (index, block) in blocks.iter().enumerate().skip(from) {
        assert_eq!(commit(pool, *block, hashes, index), Committed::Stored);
    }
}

fn commit(pool: &mut BlockPool, block: BlockId, hashes: &[BlockHash], index: usize) -> Committed {
    pool.commit(block, index.checked_sub(1).map(|before| hashes[before]), hashes[index])
}

/// Computes prompts one after the other, each released at once; then checks what a request for `blocks` evicts.
fn check_eviction(capacity: u32, prompts: &[&[u32]], demoted: &[&[u32]], blocks: u32, expected: &[&[u32]]) {
    let mut pool = BlockPool::new(capacity);
    for tokens in prompts {
        let (held, _) = compute(&mut pool, &prompt(tokens));
        pool.release(&held);
    }
    for tokens in demoted {
        pool.demote(&prompt(tokens));
        pool.check_invariants();
    }
    let allocation = pool.allocate(blocks).expect("everything can be evicted");
    let evicted = names(&allocation.evicted);
    pool.check_invariants();
    let expected: Vec<BlockHash> = expected.iter().map(|tokens| *prompt(tokens).last().unwrap()).collect();
    assert_eq!(
        evicted, expected,
        "prompts {prompts:?}, demoted {demoted:?}, {blocks} blocks wanted"
    );
}

#[test]
fn the_longest_unused_tail_goes_first() {
    let one: &[u32] = &[1, 2, 3];
    let two: &[u32] = &[1, 2, 4];
    let three: &[u32] = &[7, 8];
    check_eviction(5, &[one, two], &[], 1, &[]);
    check_eviction(4, &[one, two], &[], 1, &[one]);
    check_eviction(4, &[one, two, one], &[], 1, &[two]);
    // A shared block outlives all that is below it, and goes when its own last use is the longest ago.
    check_eviction(6, &[one, two, three], &[], 2, &[one, two]);
    check_eviction(6, &[one, two, three], &[], 5, &[one, two, &[1, 2], &[1], three]);
}

#[test]
fn the_demoted_go_before_the_longest_unused() {
    let one: &[u32] = &[1, 2, 3];
    let two: &[u32] = &[1, 2, 4];
    check_eviction(4, &[one, two], &[two], 1, &[two]);
    // What the demoted share with others stays until the others are gone.
    check_eviction(6, &[one, two, &[7, 8]], &[two], 3, &[two, one, &[1, 2]]);
    // Demoting both branches demotes what they share as well.
    check_eviction(6, &[&[7, 8], one, two], &[two, one], 4, &[one, two, &[1, 2], &[1]]);
    // What is not cached demotes nothing.
    check_eviction(6, &[one, &[7]], &[&[9]], 3, &[one]);
}

#[test]
fn use_makes_ordinary_again_what_was_demoted() {
    let mut pool = BlockPool::new(4);
    let (old, new) = (prompt(&[1, 2]), prompt(&[3, 4]));
    for hashes in [&old, &new] {
        let (held, _) = compute(&mut pool, hashes);
        pool.release(&held);
    }
    assert_eq!(pool.demote(&new), 2);
    assert_eq!(pool.demote(&new), 0, "they are demoted already");
    let held = pool.acquire_prefix(&new);
    assert_eq!(pool.demote(&new), 0, "they are in use");
    pool.release(&held);
    assert_eq!(names(&pool.allocate(1).unwrap().evicted), [old[1]]);
}

#[test]
fn an_allocation_is_all_or_nothing() {
    let mut pool = BlockPool::new(4);
    let hashes = prompt(&[1, 2, 3]);
    let (held, _) = compute(&mut pool, &hashes);
    pool.release(&held[1..]);
    let before = pool.dump();
    assert_eq!((pool.free(), pool.evictable(), pool.in_use()), (1, 2, 1));
    assert_eq!(pool.allocate(4), None);
    assert_eq!(pool.dump(), before, "a refusal changes nothing");
    let evicted = pool.allocate(3).unwrap().evicted;
    assert_eq!(names(&evicted), [hashes[2], hashes[1]]);
    assert_eq!(
        evicted
            .iter()
            .map(|block| (block.parent, block.index))
            .collect::<Vec<_>>(),
        [(Some(hashes[1]), 2), (Some(hashes[0]), 1)]
    );
    assert_eq!(pool.allocate(0).unwrap().blocks, []);
    let expected = PoolStatistics {
        evicted_blocks: 2,
        evicted_demoted_blocks: 0,
        evictions: 1,
        largest_eviction_blocks: 2,
    };
    assert_eq!(pool.statistics(), expected);
}

#[test]
fn a_duplicate_stays_private_and_its_successor_pins_the_first_copy() {
    let mut pool = BlockPool::new(4);
    let hashes = prompt(&[1, 2]);
    let (first, _) = compute(&mut pool, &hashes[..1]);
    let second = pool.allocate(2).unwrap().blocks;
    assert_eq!(commit(&mut pool, second[0], &hashes, 0), Committed::Duplicate);
    assert_eq!(commit(&mut pool, second[1], &hashes, 1), Committed::Stored);
    assert_eq!(
        commit(&mut pool, second[1], &hashes, 1),
        Committed::Duplicate,
        "naming twice changes nothing"
    );
    pool.release(&first);
    pool.check_invariants();
    assert_eq!(
        (pool.free(), pool.evictable()),
        (1, 0),
        "the first copy is needed below"
    );
    assert_eq!(pool.allocate(2), None);
    pool.release(&second);
    pool.check_invariants();
    assert_eq!(
        (pool.free(), pool.evictable()),
        (2, 2),
        "the private copy is free, the others are cached"
    );
}

#[test]
fn a_block_without_its_parent_stays_private_until_the_parent_is_named_again() {
    let mut pool = BlockPool::new(3);
    let hashes = prompt(&[1, 2]);
    let (first, _) = compute(&mut pool, &hashes[..1]);
    let second = pool.allocate(2).unwrap().blocks;
    assert_eq!(commit(&mut pool, second[0], &hashes, 0), Committed::Duplicate);
    pool.release(&first);
    assert_eq!(pool.clear_unused(), [hashes[0]]);
    assert_eq!(commit(&mut pool, second[1], &hashes, 1), Committed::Orphan);
    assert_eq!((pool.contains(hashes[1]), pool.find(hashes[1])), (false, None));
    name(&mut pool, &second, &hashes, 0);
    pool.release(&second);
    pool.check_invariants();
    assert_eq!(pool.match_prefix(&hashes), 2);
    assert_eq!(pool.find(hashes[1]), Some(second[1]));
}

#[test]
fn clearing_spares_what_is_in_use() {
    let mut pool = BlockPool::new(6);
    let (kept, dropped) = (prompt(&[1, 2]), prompt(&[1, 3, 4]));
    let (held, _) = compute(&mut pool, &kept);
    let (unused, _) = compute(&mut pool, &dropped);
    pool.release(&unused);
    assert_eq!(pool.clear_unused(), [dropped[2], dropped[1]]);
    pool.check_invariants();
    assert_eq!(pool.match_prefix(&kept), 2);
    assert_eq!(pool.references(held[0]), 1);
}

#[test]
fn misuse_is_caught() {
    let check = |what: &str, misuse: fn(&mut BlockPool, BlockId)| {
        // Block 0 is held and named; block 1 is free.
        let mut pool = BlockPool::new(2);
        let (held, _) = compute(&mut pool, &prompt(&[1]));
        let caught = catch_unwind(AssertUnwindSafe(|| misuse(&mut pool, held[0])));
        assert!(caught.is_err(), "{what} must be caught");
    };
    check("releasing twice", |pool, block| pool.release(&[block, block]));
    check("another name", |pool, block| {
        let _ = pool.commit(block, None, BlockHash(7));
    });
    check("naming a free block", |pool, _| {
        let _ = pool.commit(BlockId(1), None, BlockHash(7));
    });
    check("hashes that are no chain", |pool, _| {
        drop(pool.acquire_prefix(&[prompt(&[1])[0]; 2]))
    });
    check("retaining a free block", |pool, _| pool.retain(BlockId(1)));
}
