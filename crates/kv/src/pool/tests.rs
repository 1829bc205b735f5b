//! The pool against a naive model, and the cases that its contract names.

use super::*;

/// The hashes of a prompt that ends in these tokens, one token a block.
fn chain_of(tokens: &[u32]) -> Vec<BlockHash> {
    crate::hash_blocks(tokens, 1)
}

/// Computes this prompt as a request would: takes what is cached, allocates and names the rest.
fn compute(pool: &mut BlockPool, hashes: &[BlockHash]) -> (Vec<BlockId>, Vec<BlockHash>) {
    let mut blocks = pool.acquire_prefix(hashes);
    let cached = blocks.len();
    let rest = u32::try_from(hashes.len() - cached).unwrap();
    let allocation = pool.allocate(rest).expect("the test's pool is large enough");
    blocks.extend(allocation.blocks);
    for index in cached..hashes.len() {
        let parent = index.checked_sub(1).map(|before| hashes[before]);
        assert_eq!(pool.commit(blocks[index], parent, hashes[index]), Committed::Stored);
    }
    pool.check_invariants();
    (blocks, allocation.evicted)
}

#[test]
fn a_prompt_is_evicted_from_its_tail() {
    let mut pool = BlockPool::new(4);
    let first = chain_of(&[1, 2, 3]);
    let (blocks, _) = compute(&mut pool, &first);
    pool.release(&blocks);
    let (_, evicted) = compute(&mut pool, &chain_of(&[7, 8, 9]));
    assert_eq!(evicted, [first[2], first[1]], "the tail goes first");
    assert_eq!(pool.match_prefix(&first), 1);
    assert_eq!((pool.free(), pool.evictable(), pool.in_use()), (0, 1, 3));
}
