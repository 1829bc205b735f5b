//! A sketch of a session's resident blocks: a Bloom filter that a worker makes and a router asks, block by block of a prompt.
//!
//! The worker knows what is in its cache; the router may have lost the events that said so. A sketch says it in ten bits a block
//! instead of sixteen bytes, and errs in one direction only: a block that is resident is always found, one that is not is found with
//! the false-positive rate `p`.
//!
//! What is resident of a session is the beginning of its chain, since leaves are evicted first. So a prompt is walked from its first
//! block on, and the walk ends at the first block that is not found. With `T` blocks resident it finds `T + X`, where `X` is how many
//! false positives follow each other:
//!
//! ```text
//! P(X >= k) = p^k        E[X] = p / (1 - p)
//! ```
//!
//! Three things account for that:
//!
//! - `p` is not what the filter was made for but what its bits say: with a share `f` of them set, a strange block is found with `f^k` for
//!   `k` hashes, since block hashes are uniform.
//! - The sketch says how many blocks are in it, and a walk never finds more. A prompt that goes on with the session's chain, which is nearly
//!   every one, is therefore answered exactly: false positives beyond a chain's end cannot lengthen it.
//! - `E[X]`, rounded to whole blocks, is taken off where a walk ends before. Below `p` = 1/3 that is none: a worker's own sketches have
//!   `p` <= 1%, so what is believed of a prompt that branches off is too much by 0.01 blocks in the mean. A filter that says yes more often
//!   than not is refused ([`RATE_MAX`]).
//!
//! It does not know whose it is, how old it is, or which events came since: that is for whoever keeps it.

use crate::BlockHash;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Bits for each block: with [`HASHES`] of them set by each, p = (1 - e^(-7/10))^7 = 0.82%.
pub const BITS_PER_BLOCK: usize = 10;

/// Bits that a block sets; the best number for that many is 10 ln 2 = 6.9.
pub const HASHES: u32 = 7;

/// Blocks of one sketch at most: a million tokens in blocks of 16, and 80 KiB.
pub const SKETCH_BLOCKS_MAX: u32 = 1 << 16;

/// A filter with a higher false-positive rate says nothing and is refused. One with [`BITS_PER_BLOCK`] cannot have it: at most 7 in 10 of its
/// bits are set, and 0.7^7 is 8%.
pub const RATE_MAX: f64 = 0.5;

/// Which blocks of a session's chain are resident, up to false positives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sketch {
    /// How many blocks are in it.
    blocks: u32,
    words: Box<[u64]>,
}

/// Why a sketch of another process is refused.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum SketchError {
    /// More blocks than a session has.
    #[error("expected at most `{SKETCH_BLOCKS_MAX}` blocks in a sketch, found `{0}`")]
    Blocks(u32),
    /// Too few bits for its blocks, or too many.
    #[error("expected 1 to `{most}` words for `{blocks}` blocks in a sketch (0 for none), found `{words}`")]
    Words {
        /// Its blocks.
        blocks: u32,
        /// The words that they take.
        most: usize,
        /// The words that came.
        words: usize,
    },
    /// It finds nearly everything.
    #[error("expected a sketch with at most `{RATE_MAX}` false positives, found `{0:.2}`")]
    Rate(f64),
}

impl Sketch {
    /// A sketch of these blocks; `None` where they are more than [`SKETCH_BLOCKS_MAX`].
    #[must_use]
    pub fn of(blocks: &[BlockHash]) -> Option<Self> {
        Self::within(blocks, usize::MAX)
    }

    /// The same in at most so many words, for whoever has less room and takes more false positives for it.
    #[must_use]
    pub fn within(blocks: &[BlockHash], words_max: usize) -> Option<Self> {
        let count = u32::try_from(blocks.len())
            .ok()
            .filter(|count| *count <= SKETCH_BLOCKS_MAX)?;
        let mut words = vec![0; words_for(count).min(words_max)].into_boxed_slice();
        let bits = bits_of(&words);
        for hash in blocks {
            for position in positions(*hash, bits) {
                words[position / 64] |= 1 << (position % 64);
            }
        }
        Some(Self { blocks: count, words })
    }

    /// What came from another process.
    ///
    /// # Errors
    /// If it has more blocks or bits than a sketch may have, or finds nearly everything.
    pub fn from_parts(blocks: u32, words: Box<[u64]>) -> Result<Self, SketchError> {
        if blocks > SKETCH_BLOCKS_MAX {
            return Err(SketchError::Blocks(blocks));
        }
        let most = words_for(blocks);
        if words.len() > most || words.is_empty() != (blocks == 0) {
            let words = words.len();
            return Err(SketchError::Words { blocks, most, words });
        }
        let sketch = Self { blocks, words };
        let rate = sketch.rate();
        if rate > RATE_MAX {
            return Err(SketchError::Rate(rate));
        }
        Ok(sketch)
    }

    /// How many blocks are in it.
    #[must_use]
    pub const fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Its bits, 64 in each.
    #[must_use]
    pub const fn words(&self) -> &[u64] {
        &self.words
    }

    /// Whether this block is in it, or taken to be.
    #[must_use]
    pub fn contains(&self, hash: BlockHash) -> bool {
        let bits = bits_of(&self.words);
        bits > 0 && positions(hash, bits).all(|position| self.words[position / 64] >> (position % 64) & 1 == 1)
    }

    /// The share of blocks that are not in it and are taken to be, by the bits that are set.
    #[must_use]
    pub fn rate(&self) -> f64 {
        let set: u32 = self.words.iter().map(|word| word.count_ones()).sum();
        let share = f64::from(set) / (bits_of(&self.words).max(1) as f64);
        (0..HASHES).fold(1.0, |rate, _| rate * share)
    }

    /// How many blocks of a prompt, from the first on, are taken to be resident.
    #[must_use]
    pub fn prefix(&self, prompt: &[BlockHash]) -> u32 {
        self.prefix_with(prompt, |_| Known::Nothing)
    }

    /// The same where something is known beside the sketch of some blocks.
    #[must_use]
    pub fn prefix_with(&self, prompt: &[BlockHash], known: impl Fn(BlockHash) -> Known) -> u32 {
        let (mut found, mut believed, mut believed_last) = (0, 0, 0);
        for hash in prompt {
            let is_believed = match known(*hash) {
                Known::Gone => break,
                Known::Held => false,
                Known::Nothing if believed < self.blocks && self.contains(*hash) => true,
                Known::Nothing => break,
            };
            found += 1;
            believed += u32::from(is_believed);
            believed_last = if is_believed { believed_last + 1 } else { 0 };
        }
        if believed == self.blocks {
            return found;
        }
        found - self.usual_excess().min(believed_last)
    }

    /// Blocks by which false positives lengthen a walk in the mean, rounded.
    fn usual_excess(&self) -> u32 {
        let rate = self.rate();
        let mean = rate / (1.0 - rate);
        // `RATE_MAX` makes it 1 at most.
        u32::from(mean >= 0.5)
    }
}

/// What is known of a block beside a sketch, and counts before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// Nothing.
    Nothing,
    /// It was stored since.
    Held,
    /// It was removed since.
    Gone,
}

/// Words that so many blocks take.
const fn words_for(blocks: u32) -> usize {
    (blocks as usize * BITS_PER_BLOCK).div_ceil(64)
}

const fn bits_of(words: &[u64]) -> u64 {
    words.len() as u64 * 64
}

/// The bits of a block, in a filter of so many. Block hashes are uniform, but a filter does not hang on it.
fn positions(hash: BlockHash, bits: u64) -> impl Iterator<Item = usize> {
    let (low, high) = (hash.wire(), BlockHash(hash.0 >> 64).wire());
    let first = mix(low ^ mix(high));
    let step = mix(first) | 1;
    (0..u64::from(HASHES)).map(move |index| {
        let number = mix(first.wrapping_add(step.wrapping_mul(index)));
        // The high half of the product: a number below `bits`, without a division.
        let position = (u128::from(number) * u128::from(bits)) >> 64;
        usize::try_from(position).expect("a filter fits the memory that it lies in")
    })
}

/// `splitmix64`'s finaliser.
const fn mix(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
