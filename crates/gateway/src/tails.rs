//! Which earlier prompt a prompt continues, to the token. The core sees whole blocks only; two questions after the same long
//! instructions differ in the tokens after the last of them, so that only who has the tokens can tell them apart.
//!
//! Of each prompt its tip and the tokens after it are remembered, never the whole. A chat template closes a prompt with
//! tokens that open the answer (`assistant`, `<think>`), and renders that answer otherwise once it is history: these
//! last few tokens may differ in a continuation, if it goes on for more than them. A bounded number of prompts is
//! remembered; what was not used for longest is forgotten, and whoever continues it is taken for somebody new. What is idle goes
//! with its session (`idle`).

use homing_kv::{BlockHash, BlockMap, Prompt};
use homing_model::PromptTokens;
use homing_router::event::{Compared, PromptId};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Prompts that are remembered where nobody says how many: as many as the core remembers sessions by default.
const PROMPTS: usize = 65_536;

/// Prompts that are remembered of those that differ in their last [`OPENING_TOKENS`] only.
const VARIANTS: usize = 16;

/// Tokens at a chat prompt's end that a template may render otherwise once the answer is known. Fewer than what closes a
/// message and opens the next one in common templates, so that they hold none of a question.
pub(crate) const OPENING_TOKENS: usize = 4;

/// Tokens that a prompt must have more than one whose opening it renders otherwise: an answer and another message.
const NEXT_MESSAGE_TOKENS: usize = 8;

/// The last prompts.
#[derive(Debug)]
pub(crate) struct Tails(Mutex<Seen>);

#[derive(Debug)]
struct Seen {
    limit: usize,
    /// Counts prompts, and uses of them.
    next: u64,
    /// Looked into once for each block of a prompt that continues none.
    by_tip: BlockMap<TailsOfTip>,
    /// Longest unused first.
    by_use: BTreeMap<u64, Place>,
}

/// Prompts after one tip, by the tokens between it and their openings.
type TailsOfTip = BTreeMap<Box<[u32]>, Vec<Known>>;

/// A prompt that was seen.
#[derive(Debug)]
struct Known {
    id: PromptId,
    /// Its opening of the answer.
    opening: Box<[u32]>,
    used: u64,
}

/// Where a prompt's opening begins: after so many blocks and these tokens.
#[derive(Clone, Debug)]
struct Place {
    tip: BlockHash,
    tail: Box<[u32]>,
}

impl Default for Tails {
    fn default() -> Self {
        Self::new(PROMPTS)
    }
}

impl Tails {
    /// Of so many prompts, at least one.
    pub(crate) fn new(limit: usize) -> Self {
        Self(Mutex::new(Seen {
            limit: limit.max(1),
            next: 0,
            by_tip: BlockMap::default(),
            by_use: BTreeMap::new(),
        }))
    }

    /// Compares a prompt with the earlier ones, and remembers it. At most `opening` tokens at its end open the answer.
    pub(crate) fn compare(&self, tokens: &PromptTokens, prompt: &Prompt, block_size: u32, opening: usize) -> Compared {
        let block_size = block_size as usize;
        let before = tokens.len().saturating_sub(opening);
        let opening = tokens.part(before, opening);
        let depth = before / block_size;
        let place = Place {
            tip: tip(prompt, depth),
            tail: tokens.part(depth * block_size, before % block_size).into(),
        };
        let mut seen = self.seen();
        Compared {
            continues: seen.continued(tokens, prompt, block_size),
            prompt: seen.remember(&place, &opening),
        }
    }

    /// Prompts that are remembered.
    pub(crate) fn len(&self) -> usize {
        self.seen().by_use.len()
    }

    /// Now, in the order of uses.
    pub(crate) fn mark(&self) -> u64 {
        self.seen().next
    }

    /// Forgets what was not used since.
    pub(crate) fn forget_unused_since(&self, mark: u64) {
        let mut seen = self.seen();
        while let Some(used) = seen.by_use.keys().next().copied().filter(|used| *used < mark) {
            seen.forget(used);
        }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        // Nothing that is done under the lock can fail half-way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seen {
    /// The longest earlier prompt that this one goes on from.
    fn continued(&mut self, tokens: &PromptTokens, prompt: &Prompt, block_size: usize) -> Option<PromptId> {
        for depth in (0..=prompt.blocks.len()).rev() {
            let tip = tip(prompt, depth);
            let Some(tails) = self.by_tip.get_mut(&tip) else {
                continue;
            };
            let start = depth * block_size;
            let rest = tokens.len() - start;
            // A tail is shorter than a block, and of what follows it no more is compared than an opening.
            let near = tokens.part(start, block_size + OPENING_TOKENS);
            for length in (0..block_size.min(rest + 1)).rev() {
                let (tail, after) = near.split_at(length);
                let after = After {
                    near: after,
                    tokens: rest - length,
                };
                let known = tails.get_mut(tail).and_then(|variants| goes_on(variants, after));
                if let Some(known) = known {
                    let (id, used) = (known.id, known.used);
                    known.used = self.next;
                    if let Some(place) = self.by_use.remove(&used) {
                        self.by_use.insert(self.next, place);
                    }
                    self.next += 1;
                    return Some(id);
                }
            }
        }
        None
    }

    fn remember(&mut self, place: &Place, opening: &[u32]) -> PromptId {
        let used = self.next;
        self.next += 1;
        let tails = self.by_tip.entry(place.tip).or_default();
        let variants = tails.entry(place.tail.clone()).or_default();
        self.by_use.insert(used, place.clone());
        if let Some(known) = variants.iter_mut().find(|known| *known.opening == *opening) {
            self.by_use.remove(&known.used);
            known.used = used;
            return known.id;
        }
        let id = PromptId(used);
        variants.push(Known {
            id,
            opening: opening.into(),
            used,
        });
        let surplus = (variants.len() > VARIANTS)
            .then(|| variants.iter().map(|known| known.used).min())
            .flatten();
        if let Some(used) = surplus {
            self.forget(used);
        }
        while self.by_use.len() > self.limit
            && let Some(used) = self.by_use.keys().next().copied()
        {
            self.forget(used);
        }
        id
    }

    fn forget(&mut self, used: u64) {
        let Some(place) = self.by_use.remove(&used) else {
            return;
        };
        let Some(tails) = self.by_tip.get_mut(&place.tip) else {
            return;
        };
        if let Some(variants) = tails.get_mut(&place.tail) {
            variants.retain(|known| known.used != used);
            if variants.is_empty() {
                tails.remove(&place.tail);
            }
        }
        if tails.is_empty() {
            self.by_tip.swap_remove(&place.tip);
        }
    }
}

/// What follows a tail.
#[derive(Clone, Copy)]
struct After<'tokens> {
    /// The first of its tokens, as many as an opening has at least, as far as there are.
    near: &'tokens [u32],
    /// How many it has.
    tokens: usize,
}

/// Of prompts that end in one of these openings, the one that what comes in its stead goes on from: repeats it, or else
/// renders it otherwise.
fn goes_on<'known>(variants: &'known mut [Known], after: After<'_>) -> Option<&'known mut Known> {
    let rank = |known: &Known| {
        let repeats = after.tokens > known.opening.len() && after.near.starts_with(&known.opening);
        let differs = !known.opening.is_empty() && after.tokens >= known.opening.len() + NEXT_MESSAGE_TOKENS;
        (repeats || differs).then_some((repeats, known.opening.len() * usize::from(repeats), known.used))
    };
    let best = variants
        .iter()
        .enumerate()
        .filter_map(|(index, known)| Some((rank(known)?, index)))
        .max()?;
    Some(&mut variants[best.1])
}

/// The hash of the last of so many blocks; of none a value that no block has, but by a chance of 2^-128.
fn tip(prompt: &Prompt, depth: usize) -> BlockHash {
    depth.checked_sub(1).map_or(BlockHash(0), |last| prompt.blocks[last])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compare(tails: &Tails, tokens: &[u32], block_size: u32, opening: usize) -> Compared {
        let prompt = Prompt::of_tokens(tokens, block_size);
        let compared = tails.compare(&tokens.to_vec().into(), &prompt, block_size, opening);
        let seen = tails.0.lock().unwrap();
        let known: usize = seen.by_tip.values().flat_map(BTreeMap::values).map(Vec::len).sum();
        assert_eq!(known, seen.by_use.len(), "each prompt is known by place and by use");
        assert!(known <= seen.limit, "bounded");
        compared
    }

    fn joined(parts: &[std::ops::Range<u32>]) -> Vec<u32> {
        parts.iter().cloned().flatten().collect()
    }

    #[test]
    fn the_longest_prompt_that_is_repeated_to_the_token_is_continued() {
        for block_size in [1, 3, 16, 64] {
            let tails = Tails::default();
            let system = 0..1_600;
            let questions: Vec<_> = (0..6)
                .map(|n| joined(&[system.clone(), 5_000 + 20 * n..5_010 + 20 * n]))
                .collect();
            let mut ids = Vec::new();
            for question in &questions {
                let compared = compare(&tails, question, block_size, 0);
                assert_eq!(compared.continues, None, "block size {block_size}");
                assert!(!ids.contains(&compared.prompt));
                ids.push(compared.prompt);
            }
            for (question, id) in questions.iter().zip(&ids) {
                let again = compare(&tails, question, block_size, 0);
                assert_eq!(
                    (again.prompt, again.continues),
                    (*id, None),
                    "a retry is the same prompt"
                );
                let next: Vec<_> = question.iter().copied().chain(9_000..9_003).collect();
                let next = compare(&tails, &next, block_size, 0);
                assert_eq!(next.continues, Some(*id), "block size {block_size}");
                let later: Vec<_> = question.iter().copied().chain(9_000..9_200).collect();
                assert_eq!(
                    compare(&tails, &later, block_size, 0).continues,
                    Some(next.prompt),
                    "the longest one"
                );
            }
        }
    }

    #[test]
    fn an_opening_may_be_rendered_otherwise_and_a_question_may_not() {
        let check = |block_size: u32, next: &[std::ops::Range<u32>], expected: bool| {
            let tails = Tails::default();
            // Instructions, a question, the end of the message, and the opening of an answer.
            let first = compare(
                &tails,
                &joined(&[0..100, 200..210, 900..907]),
                block_size,
                OPENING_TOKENS,
            );
            let next = compare(&tails, &joined(next), block_size, OPENING_TOKENS);
            assert_eq!(next.continues.is_some(), expected, "blocks of {block_size}: {next:?}");
            assert!(next.continues.is_none_or(|continued| continued == first.prompt));
        };
        for block_size in [1, 4, 16, 64] {
            check(block_size, &[0..100, 200..210, 900..907, 300..320, 900..907], true);
            // The last two tokens of the opening are gone from the history.
            check(block_size, &[0..100, 200..210, 900..905, 300..320, 900..907], true);
            check(block_size, &[0..100, 210..220, 900..907], false);
            check(block_size, &[0..100, 200..209, 250..251, 900..907, 300..320], false);
            check(block_size, &[0..100, 200..210, 900..905, 300..302], false);
            check(block_size, &[0..100, 200..204], false);
        }
    }

    #[test]
    fn memory_is_bounded_and_the_longest_unused_goes_first() {
        let tails = Tails::new(10);
        let prompt = |n: u32| joined(&[0..30, n..n + 3]);
        let first = compare(&tails, &prompt(100), 16, 0);
        let second = compare(&tails, &prompt(200), 16, 0);
        for n in 10..18 {
            compare(&tails, &prompt(n * 100), 16, 0);
            compare(&tails, &prompt(100), 16, 0);
        }
        compare(&tails, &prompt(5_000), 16, 0);
        assert_eq!(compare(&tails, &prompt(100), 16, 0).prompt, first.prompt, "in use");
        assert_ne!(compare(&tails, &prompt(200), 16, 0).prompt, second.prompt, "forgotten");
        // So are prompts that differ in their openings only.
        let tails = Tails::default();
        for n in 0..40 {
            compare(&tails, &joined(&[0..30, n * 10..n * 10 + 4]), 16, OPENING_TOKENS);
        }
        assert_eq!(tails.0.lock().unwrap().by_use.len(), VARIANTS);
    }
}
