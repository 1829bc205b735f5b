//! A prompt as the cores see it: hashes of its whole blocks and its length, never its tokens or text.

use crate::BlockHash;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The whole blocks of a prompt and its length in tokens. Cloning shares the hashes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prompt {
    /// Chained hashes of the whole blocks; the partial last block has none.
    pub blocks: Arc<[BlockHash]>,
    /// Length in tokens, the partial last block included.
    pub tokens: u32,
}

impl Prompt {
    /// A prompt of `tokens` tokens.
    ///
    /// # Panics
    /// If `blocks` is not one hash for each whole block of `block_size` tokens.
    #[must_use]
    pub fn new(blocks: impl Into<Arc<[BlockHash]>>, tokens: u32, block_size: u32) -> Self {
        let blocks = blocks.into();
        assert_eq!(
            blocks.len(),
            (tokens / block_size) as usize,
            "one hash for each whole block of {block_size}"
        );
        Self { blocks, tokens }
    }

    /// The prompt of these tokens.
    #[must_use]
    pub fn of_tokens(tokens: &[u32], block_size: u32) -> Self {
        let length = u32::try_from(tokens.len()).expect("a prompt is shorter than 2^32 tokens");
        Self::new(crate::hash_blocks(tokens, block_size), length, block_size)
    }

    /// Its first so many blocks, of `block_size` tokens, as a prompt of their own.
    ///
    /// # Panics
    /// If it has fewer.
    #[must_use]
    pub fn prefix(&self, blocks: u32, block_size: u32) -> Self {
        Self::new(&self.blocks[..blocks as usize], blocks * block_size, block_size)
    }

    /// The chained hash after the last whole block.
    #[must_use]
    pub fn tip(&self) -> Option<BlockHash> {
        self.blocks.last().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_has_a_hash_for_each_whole_block_and_all_its_tokens() {
        let check = |tokens: &[u32], blocks: usize| {
            let prompt = Prompt::of_tokens(tokens, 2);
            assert_eq!(
                (prompt.blocks.len(), prompt.tokens as usize),
                (blocks, tokens.len()),
                "tokens {tokens:?}"
            );
            assert_eq!(
                prompt.tip(),
                crate::hash_blocks(tokens, 2).last().copied(),
                "tokens {tokens:?}"
            );
        };
        check(&[], 0);
        check(&[1], 0);
        check(&[1, 2], 1);
        check(&[1, 2, 3, 4, 5], 2);
    }
}
