//! A set of small numbers as a bitmap: who holds a block, and which blocks a worker holds.
//!
//! Only the words from the first to the last that were ever needed are kept, two of them inline: most blocks are held by one
//! worker or by a few, and then neither the number of workers nor a worker's own number costs an allocation. Words beyond
//! either end count as zero, so sets of different lengths combine.

use smallvec::SmallVec;

/// Words of 64 numbers that lie inline.
const INLINE_WORDS: usize = 2;

/// A set of small numbers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bits {
    /// The index of the first of the words.
    first: u32,
    words: SmallVec<[u64; INLINE_WORDS]>,
}

impl Bits {
    /// The set that has the numbers of both.
    pub(crate) fn union(&self, other: &Self) -> Self {
        let (longer, shorter) = if self.words.len() < other.words.len() {
            (other, self)
        } else {
            (self, other)
        };
        let mut union = longer.clone();
        for (index, word) in shorter.word_range().zip(&shorter.words) {
            if *word != 0 {
                *union.reach(index) |= word;
            }
        }
        union
    }

    /// Adds a number; whether it was missing.
    pub(crate) fn insert(&mut self, number: u32) -> bool {
        let (index, bit) = place(number);
        let word = self.reach(index);
        let added = *word & bit == 0;
        *word |= bit;
        added
    }

    /// Takes a number out; whether it was there.
    pub(crate) fn remove(&mut self, number: u32) -> bool {
        let (index, bit) = place(number);
        self.keep(index, !bit) != 0
    }

    pub(crate) fn contains(&self, number: u32) -> bool {
        let (index, bit) = place(number);
        self.word(index) & bit != 0
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// The indices of the words that may have numbers; all others are zero.
    pub(crate) fn word_range(&self) -> std::ops::Range<usize> {
        let first = self.first as usize;
        first..first + self.words.len()
    }

    /// The numbers from `64 * index` on, the least in the lowest bit.
    pub(crate) fn word(&self, index: usize) -> u64 {
        let place = index.checked_sub(self.first as usize);
        place.and_then(|place| self.words.get(place)).copied().unwrap_or(0)
    }

    /// Keeps of the word's numbers those whose bit is set in `mask`, and returns those that went.
    pub(crate) fn keep(&mut self, index: usize, mask: u64) -> u64 {
        let lost = self.word(index) & !mask;
        if lost != 0 {
            self.words[index - self.first as usize] &= mask;
        }
        lost
    }

    /// The numbers, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> {
        self.word_range()
            .zip(&self.words)
            .flat_map(|(index, word)| numbers_of(index, *word))
    }

    /// Drops the words without numbers at both ends.
    pub(crate) fn trim(&mut self) {
        while self.words.last() == Some(&0) {
            self.words.pop();
        }
        let zeros = self.words.iter().take_while(|word| **word == 0).count();
        self.words.drain(..zeros);
        self.first += to_u32(zeros);
    }

    /// The word of this index, made where it is missing.
    fn reach(&mut self, index: usize) -> &mut u64 {
        let wanted = to_u32(index);
        if self.words.is_empty() {
            self.first = wanted;
        }
        if wanted < self.first {
            // At least as many again as there are, so that a set that grows downwards is moved a few times only.
            let missing = (self.first - wanted).max(self.first.min(to_u32(self.words.len())));
            self.words.insert_many(0, std::iter::repeat_n(0, missing as usize));
            self.first -= missing;
        }
        let place = (wanted - self.first) as usize;
        if place >= self.words.len() {
            self.words.resize(place + 1, 0);
        }
        &mut self.words[place]
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

fn to_u32(count: usize) -> u32 {
    u32::try_from(count).expect("numbers are u32")
}

fn place(number: u32) -> (usize, u64) {
    (number as usize / 64, 1 << (number % 64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn a_set_is_a_set(operations in prop::collection::vec((any::<bool>(), 0_u32..700), 0..60), others in prop::collection::btree_set(0_u32..700, 0..9)) {
            let (mut set, mut model) = (Bits::default(), BTreeSet::new());
            for (inserts, number) in operations {
                if inserts {
                    prop_assert_eq!(set.insert(number), model.insert(number));
                } else {
                    prop_assert_eq!(set.remove(number), model.remove(&number));
                    set.trim();
                }
                prop_assert_eq!(set.contains(number), model.contains(&number));
                prop_assert_eq!(set.is_empty(), model.is_empty());
            }
            prop_assert!(set.iter().eq(model.iter().copied()));
            let mut other = Bits::default();
            others.iter().for_each(|number| { other.insert(*number); });
            for union in [set.union(&other), other.union(&set)] {
                prop_assert!(union.iter().eq(model.union(&others).copied()));
            }
        }
    }

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
