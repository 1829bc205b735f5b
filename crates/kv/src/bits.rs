//! A set of small numbers as a bitmap: who holds a block, and which blocks a worker holds.
//!
//! Four words lie inline, so a set of worker numbers below 256 costs no allocation and one cache line; more spill to
//! the heap. Words beyond the end count as zero, so sets of different lengths combine.

use smallvec::SmallVec;

/// Words of 64 numbers that lie inline.
const INLINE_WORDS: usize = 4;

/// A set of small numbers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bits {
    words: SmallVec<[u64; INLINE_WORDS]>,
}

impl Bits {
    /// The set that has the numbers of both.
    pub(crate) fn union(&self, other: &Self) -> Self {
        let length = self.words.len().max(other.words.len());
        Self {
            words: (0..length).map(|index| self.word(index) | other.word(index)).collect(),
        }
    }

    /// Adds a number; whether it was missing.
    pub(crate) fn insert(&mut self, number: u32) -> bool {
        let (index, bit) = place(number);
        if index >= self.words.len() {
            self.words.resize(index + 1, 0);
        }
        let added = self.words[index] & bit == 0;
        self.words[index] |= bit;
        added
    }

    /// Takes a number out; whether it was there.
    pub(crate) fn remove(&mut self, number: u32) -> bool {
        let (index, bit) = place(number);
        let removed = self.word(index) & bit != 0;
        if removed {
            self.words[index] &= !bit;
        }
        removed
    }

    pub(crate) fn contains(&self, number: u32) -> bool {
        let (index, bit) = place(number);
        self.word(index) & bit != 0
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// How many words there are; all further ones are zero.
    pub(crate) fn len_words(&self) -> usize {
        self.words.len()
    }

    /// The numbers from `64 * index` on, the least in the lowest bit.
    pub(crate) fn word(&self, index: usize) -> u64 {
        self.words.get(index).copied().unwrap_or(0)
    }

    /// Keeps of the word's numbers those whose bit is set in `mask`, and returns those that went.
    pub(crate) fn keep(&mut self, index: usize, mask: u64) -> u64 {
        let lost = self.word(index) & !mask;
        if lost != 0 {
            self.words[index] &= mask;
        }
        lost
    }

    /// The numbers, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> {
        self.words
            .iter()
            .enumerate()
            .flat_map(|(index, word)| numbers_of(index, *word))
    }
}

/// The numbers of one word at this index, ascending.
pub(crate) fn numbers_of(index: usize, mut word: u64) -> impl Iterator<Item = u32> {
    let first = u32::try_from(index * 64).expect("numbers are u32");
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros())?;
        word &= word - 1;
        Some(first + bit)
    })
}

fn place(number: u32) -> (usize, u64) {
    (number as usize / 64, 1 << (number % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_keeps_what_was_put_in_across_words_and_the_heap() {
        let mut set = Bits::default();
        for number in [300, 0, 63, 64, 255] {
            assert!(set.insert(number), "`{number}` was missing");
            assert!(!set.insert(number), "`{number}` is there now");
        }
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 63, 64, 255, 300]);
        assert!(set.remove(64) && !set.remove(64) && !set.remove(10_000));
        assert!(!set.contains(64) && set.contains(300) && !set.contains(10_000));
        assert_eq!(set.keep(0, 1), 1 << 63, "63 is lost");
        let mut other = Bits::default();
        other.insert(5);
        assert_eq!(set.union(&other).iter().collect::<Vec<_>>(), [0, 5, 255, 300]);
        assert_eq!(other.union(&set).iter().collect::<Vec<_>>(), [0, 5, 255, 300]);
    }
}
