//! Chained block hashes: a block's hash names its tokens and everything before them, so equal hash means equal KV.
//!
//! BLAKE3 and 128 bits, because the engine reuses KV on the strength of a hash alone: a fast non-cryptographic hash
//! would let one tenant craft a prompt that is answered from another's KV.

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};

/// The chained hash of one whole block: of its tokens and of all blocks before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockHash(pub u128);

impl BlockHash {
    /// The 64 bits that stand for this block in KV events (vLLM's wire form carries integers of 64 bits).
    #[must_use]
    pub const fn wire(self) -> u64 {
        // Truncation is the point: events are mapped back through the tokens they carry.
        (self.0 & 0xffff_ffff_ffff_ffff) as u64
    }
}

impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Tokens that a hasher is told of at once.
const PIECE_TOKENS: usize = 64;

/// The hash of a block of `tokens` that follows `parent` (`None` for the first block of a prompt).
#[must_use]
pub fn chain(parent: Option<BlockHash>, tokens: &[u32]) -> BlockHash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&parent.map_or(0, |hash| hash.0).to_le_bytes());
    // In pieces: a hasher that is told of four bytes at a time spends its time on taking them.
    let mut piece = [0; 4 * PIECE_TOKENS];
    for tokens in tokens.chunks(PIECE_TOKENS) {
        let bytes = &mut piece[..4 * tokens.len()];
        for (bytes, token) in bytes.chunks_exact_mut(4).zip(tokens) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        hasher.update(bytes);
    }
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    BlockHash(u128::from_le_bytes(bytes))
}

/// The chained hashes of the whole blocks of `tokens`; a partial last block has none.
///
/// # Panics
/// If `block_size` is 0.
#[must_use]
pub fn hash_blocks(tokens: &[u32], block_size: u32) -> Vec<BlockHash> {
    let mut hashes = Vec::new();
    chain_blocks(&mut hashes, tokens, block_size);
    hashes
}

/// Hashes the whole blocks of `rest`, the tokens that come right after those that `hashes` are of: what is left to do of a
/// prompt whose beginning is known.
///
/// # Panics
/// If `block_size` is 0.
pub fn chain_blocks(hashes: &mut Vec<BlockHash>, rest: &[u32], block_size: u32) {
    assert!(block_size > 0, "a block holds at least one token");
    let mut parent = hashes.last().copied();
    let blocks = rest.chunks_exact(block_size as usize);
    hashes.extend(blocks.map(|block| *parent.insert(chain(parent, block))));
}

/// A map keyed by block hashes, in insertion order (`swap_remove` keeps removals constant-time and deterministic).
pub type BlockMap<V> = IndexMap<BlockHash, V, BuildHasherDefault<BlockHasher>>;

/// Block hashes are uniform already: the map takes their low bits as they are.
#[derive(Clone, Copy, Debug, Default)]
pub struct BlockHasher(u64);

impl Hasher for BlockHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u128(&mut self, hash: u128) {
        self.0 = BlockHash(hash).wire();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_names_all_that_came_before() {
        let hashes = hash_blocks(&[1, 2, 3, 4, 1, 2, 9], 2);
        assert_eq!(hashes.len(), 3, "the partial block has no hash");
        assert_ne!(hashes[0], hashes[2], "the same tokens elsewhere are another block");
        assert_eq!(hashes[1], chain(Some(hashes[0]), &[3, 4]));
    }

    #[test]
    fn what_is_known_of_a_prompt_is_not_hashed_again() {
        let tokens: Vec<u32> = (0..23).collect();
        for block_size in [1, 2, 5, 16, 64] {
            let whole = hash_blocks(&tokens, block_size);
            for first in 0..=tokens.len() {
                let mut hashes = hash_blocks(&tokens[..first], block_size);
                let hashed = hashes.len() * block_size as usize;
                chain_blocks(&mut hashes, &tokens[hashed..], block_size);
                assert_eq!(hashes, whole, "blocks of {block_size}, {first} tokens first");
            }
        }
    }

    /// Workers of different builds and platforms share KV by these hashes: they are a format.
    #[test]
    fn a_hash_is_the_same_everywhere() {
        let check = |parent, tokens: &[u32], expected: &str| {
            assert_eq!(
                chain(parent, tokens).to_string(),
                expected,
                "tokens {tokens:?} after {parent:?}"
            );
        };
        check(None, &[], "8d55a4c35a556a850b700423f8df72e5");
        check(None, &[1, 2, 3], "eeeb01374a52949f30957a59c4c4f91f");
        check(Some(BlockHash(1)), &[1, 2, 3], "e248f2dc1d2bf416239513cd8be367d6");
    }
}
