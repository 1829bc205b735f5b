//! The tokens of a prompt of which most are remembered: those are shared with who remembers them, not copied.
//!
//! A prompt of 128K tokens is half a megabyte of them. What is done to a turn that goes on from another needs its last few; all
//! of them are needed where an answer goes on elsewhere or KV is handed over. Whoever holds a prompt's tokens keeps its segments
//! from being freed, also after the memory has forgotten them: for as long as a request is under way.

use crate::prompt_tree::Segment;
use std::borrow::Cow;
use std::sync::Arc;

/// A prompt's tokens. Cloning shares them.
#[derive(Clone, Debug, Default)]
pub struct PromptTokens {
    /// The beginning.
    known: Arc<[Arc<Segment>]>,
    /// Tokens that `known` has.
    known_tokens: usize,
    /// The rest.
    fresh: Arc<[u32]>,
}

impl PromptTokens {
    /// Those of what is known of a prompt.
    pub(crate) fn known(known: Vec<Arc<Segment>>) -> Self {
        Self {
            known_tokens: known.iter().map(|segment| segment.tokens.len()).sum(),
            known: known.into(),
            ..Self::default()
        }
    }

    /// The same, and what comes after it.
    pub(crate) fn followed_by(self, fresh: &[u32]) -> Self {
        Self {
            fresh: fresh.into(),
            ..self
        }
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.known_tokens + self.fresh.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Up to `length` of them from place `from` on; copied only where they do not lie together.
    #[must_use]
    pub fn part(&self, from: usize, length: usize) -> Cow<'_, [u32]> {
        let from = from.min(self.len());
        let end = from.saturating_add(length).min(self.len());
        let mut part = Cow::Borrowed(&[][..]);
        let mut start = 0;
        let segments = self.known.iter().map(|segment| &segment.tokens[..]);
        for tokens in segments.chain([&self.fresh[..]]) {
            let within = |place: usize| place.saturating_sub(start).min(tokens.len());
            let piece = &tokens[within(from)..within(end)];
            if part.is_empty() {
                part = Cow::Borrowed(piece);
            } else if !piece.is_empty() {
                part.to_mut().extend_from_slice(piece);
            }
            start += tokens.len();
            if start >= end {
                break;
            }
        }
        part
    }

    /// All of them.
    #[must_use]
    pub fn whole(&self) -> Cow<'_, [u32]> {
        self.part(0, self.len())
    }
}

impl From<Vec<u32>> for PromptTokens {
    fn from(tokens: Vec<u32>) -> Self {
        Self {
            fresh: tokens.into(),
            ..Self::default()
        }
    }
}

impl PartialEq for PromptTokens {
    fn eq(&self, other: &Self) -> bool {
        self.whole() == other.whole()
    }
}

impl Eq for PromptTokens {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_part_is_that_of_the_whole() {
        let segment = |tokens: &[u32]| Arc::new(Segment::new("text", 4, tokens, &[]));
        for lengths in [&[][..], &[3], &[1, 0, 4], &[2, 2, 2]] {
            for fresh in [0, 1, 5] {
                let all: Vec<u32> = (0..lengths.iter().sum::<u32>() + fresh).collect();
                let mut rest = &all[..];
                let mut known = Vec::new();
                for length in lengths {
                    let (tokens, after) = rest.split_at(*length as usize);
                    known.push(segment(tokens));
                    rest = after;
                }
                let tokens = PromptTokens::known(known).followed_by(rest);
                assert_eq!(tokens, PromptTokens::from(all.clone()), "{lengths:?} {fresh}");
                assert_eq!((tokens.len(), tokens.is_empty()), (all.len(), all.is_empty()));
                for from in 0..all.len() + 2 {
                    for length in 0..all.len() + 2 {
                        let (start, end) = (from.min(all.len()), (from + length).min(all.len()));
                        let part = tokens.part(from, length);
                        assert_eq!(part, &all[start..end], "{lengths:?} {fresh}: {from} {length}");
                    }
                }
            }
        }
    }
}
