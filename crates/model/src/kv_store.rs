//! The storage of keys and values: a pool of fixed-size blocks, addressed by the ids that the engine's pool hands out.
//!
//! Float32, because attention then reads the very values that were computed, whether they were written a moment ago by
//! this process or came as bytes from another: there is no rounding between the two that could tell paths apart. A block
//! is one contiguous run, `[layer][keys, values][token][kv head][element]`, so that it leaves and enters as one string of
//! bytes. The memory is zeroed lazily by the system: a block costs nothing until it is written.
//!
//! It knows nothing of who owns a block, of hashes or of eviction; that is `homing-kv`.

use crate::config::ModelConfig;
use homing_kv::BlockId;

/// Keys and values of a pool of blocks.
pub struct KvStore {
    values: Vec<f32>,
    layers: usize,
    /// Width of one token's keys (or values) in one layer.
    width: usize,
    block_size: usize,
    blocks: u32,
}

/// Why bytes were not taken as a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvError {
    /// The pool has no such block.
    #[error("block `{block}` is outside the pool, expected less than {blocks}")]
    NoSuchBlock {
        /// The block that was named.
        block: u32,
        /// Blocks of the pool.
        blocks: u32,
    },
    /// The bytes are not those of whole tokens of this model, or of more tokens than a block holds.
    #[error("block of {found} bytes, expected a multiple of {token_bytes} up to {block_bytes}")]
    WrongLength {
        /// Bytes that came.
        found: usize,
        /// Bytes of one token.
        token_bytes: usize,
        /// Bytes of a full block.
        block_bytes: usize,
    },
    /// More tokens were asked for than a block holds.
    #[error("`{tokens}` tokens of a block, expected at most {block_size}")]
    TooManyTokens {
        /// Tokens that were asked for.
        tokens: u32,
        /// Tokens that a block holds.
        block_size: u32,
    },
}

impl KvStore {
    /// A pool of `blocks` blocks of `block_size` tokens each for a model of this shape.
    ///
    /// # Panics
    /// If `block_size` is 0, or the pool is larger than the address space.
    #[must_use]
    pub fn new(config: &ModelConfig, block_size: u32, blocks: u32) -> Self {
        assert!(block_size > 0, "a block holds at least one token");
        let (layers, width) = (config.layers, config.kv_width());
        let elements = [2, width, block_size as usize, blocks as usize]
            .iter()
            .try_fold(layers, |product: usize, factor| product.checked_mul(*factor))
            .expect("the pool fits into the address space");
        Self {
            values: vec![0.0; elements],
            layers,
            width,
            block_size: block_size as usize,
            blocks,
        }
    }

    /// Tokens that a block holds.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        u32::try_from(self.block_size).expect("it was made from a u32")
    }

    /// Blocks of the pool.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Bytes of a full block: keys and values of all layers.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.block_size * self.token_bytes()
    }

    /// Bytes of one token: keys and values of all layers.
    #[must_use]
    pub fn token_bytes(&self) -> usize {
        self.layers * 2 * self.width * size_of::<f32>()
    }

    /// The bytes of the first `tokens` tokens of a block, appended to `bytes`: for each layer their keys, then their
    /// values, float32 in little endian. Asking for fewer than a full block keeps what an earlier owner left out of it.
    ///
    /// # Errors
    /// If the pool has no such block, or a block holds fewer tokens.
    pub fn read_block(&self, block: BlockId, tokens: u32, bytes: &mut Vec<u8>) -> Result<(), KvError> {
        self.check(block)?;
        if tokens as usize > self.block_size {
            return Err(KvError::TooManyTokens {
                tokens,
                block_size: self.block_size(),
            });
        }
        bytes.reserve(tokens as usize * self.token_bytes());
        for plane in 0..2 * self.layers {
            let start = self.plane_start(block, plane);
            for value in &self.values[start..start + tokens as usize * self.width] {
                bytes.extend_from_slice(&value.to_le_bytes());
            }
        }
        Ok(())
    }

    /// Takes bytes that [`read_block`](Self::read_block) gave, of as many tokens as they are long, into a block.
    ///
    /// # Errors
    /// If the pool has no such block, or the length is not that of whole tokens up to a full block. Nothing is written then.
    pub fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), KvError> {
        self.check(block)?;
        let (token_bytes, block_bytes) = (self.token_bytes(), self.block_bytes());
        if !bytes.len().is_multiple_of(token_bytes) || bytes.len() > block_bytes {
            return Err(KvError::WrongLength {
                found: bytes.len(),
                token_bytes,
                block_bytes,
            });
        }
        let run = bytes.len() / token_bytes * self.width;
        if run == 0 {
            return Ok(());
        }
        for (plane, bytes) in bytes.chunks_exact(run * size_of::<f32>()).enumerate() {
            let start = self.plane_start(block, plane);
            let (words, _) = bytes.as_chunks::<{ size_of::<f32>() }>();
            for (value, word) in self.values[start..start + run].iter_mut().zip(words) {
                *value = f32::from_le_bytes(*word);
            }
        }
        Ok(())
    }

    /// Copies the first `tokens` tokens of one block into another of the same pool (a shared partial block that two
    /// branches continue).
    ///
    /// # Errors
    /// If either block is outside the pool, or a block holds fewer tokens.
    pub fn copy_block(&mut self, from: BlockId, into: BlockId, tokens: u32) -> Result<(), KvError> {
        self.check(from)?;
        self.check(into)?;
        if tokens as usize > self.block_size {
            return Err(KvError::TooManyTokens {
                tokens,
                block_size: self.block_size(),
            });
        }
        for plane in 0..2 * self.layers {
            let start = self.plane_start(from, plane);
            let target = self.plane_start(into, plane);
            self.values
                .copy_within(start..start + tokens as usize * self.width, target);
        }
        Ok(())
    }

    /// Keys of all tokens of a block in one layer: `[token][kv head][element]`.
    pub(crate) fn keys(&self, block: BlockId, layer: usize) -> &[f32] {
        self.plane(block, 2 * layer)
    }

    /// Values of all tokens of a block in one layer: `[token][kv head][element]`.
    pub(crate) fn values(&self, block: BlockId, layer: usize) -> &[f32] {
        self.plane(block, 2 * layer + 1)
    }

    /// Writes one token's keys and values of one layer into place `slot` of a block.
    pub(crate) fn write(&mut self, block: BlockId, layer: usize, slot: usize, keys: &[f32], values: &[f32]) {
        for (plane, source) in [(2 * layer, keys), (2 * layer + 1, values)] {
            let start = self.plane_start(block, plane) + slot * self.width;
            self.values[start..start + self.width].copy_from_slice(source);
        }
    }

    fn plane(&self, block: BlockId, plane: usize) -> &[f32] {
        let start = self.plane_start(block, plane);
        &self.values[start..start + self.block_size * self.width]
    }

    fn plane_start(&self, block: BlockId, plane: usize) -> usize {
        (block.0 as usize * 2 * self.layers + plane) * self.block_size * self.width
    }

    fn check(&self, block: BlockId) -> Result<(), KvError> {
        if block.0 < self.blocks {
            return Ok(());
        }
        Err(KvError::NoSuchBlock {
            block: block.0,
            blocks: self.blocks,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Model;

    fn store() -> KvStore {
        KvStore::new(Model::tiny(1).config(), 4, 3)
    }

    #[test]
    fn bytes_survive_a_round_trip() {
        let (mut from, mut into) = (store(), store());
        for (index, value) in from.values.iter_mut().enumerate() {
            *value = (index as f32).sin();
        }
        for tokens in 0..=4 {
            let mut bytes = Vec::new();
            from.read_block(BlockId(2), tokens, &mut bytes).unwrap();
            assert_eq!(bytes.len(), tokens as usize * from.token_bytes());
            into.write_block(BlockId(1), &bytes).unwrap();
            let mut again = Vec::new();
            into.read_block(BlockId(1), tokens, &mut again).unwrap();
            assert_eq!(bytes, again, "{tokens} tokens");
        }
        into.copy_block(BlockId(1), BlockId(0), 4).unwrap();
        let (mut copied, mut original) = (Vec::new(), Vec::new());
        into.read_block(BlockId(0), 4, &mut copied).unwrap();
        from.read_block(BlockId(2), 4, &mut original).unwrap();
        assert_eq!(copied, original);
    }

    #[test]
    fn wrong_bytes_are_refused_and_change_nothing() {
        let mut store = store();
        let (token_bytes, block_bytes) = (store.token_bytes(), store.block_bytes());
        for found in [1, token_bytes - 1, block_bytes + token_bytes] {
            let refused = store.write_block(BlockId(0), &vec![1; found]);
            assert_eq!(
                refused,
                Err(KvError::WrongLength {
                    found,
                    token_bytes,
                    block_bytes
                })
            );
        }
        let outside = KvError::NoSuchBlock { block: 3, blocks: 3 };
        assert_eq!(store.write_block(BlockId(3), &[]), Err(outside));
        assert_eq!(store.read_block(BlockId(3), 1, &mut Vec::new()), Err(outside));
        let too_many = KvError::TooManyTokens {
            tokens: 5,
            block_size: 4,
        };
        assert_eq!(store.read_block(BlockId(0), 5, &mut Vec::new()), Err(too_many));
        assert!(store.values.iter().all(|value| *value == 0.0));
    }
}
