//! What a turn's prompt is made of: block hashes for the cores, token ids or words for a live endpoint.
//!
//! A trace says which blocks are equal, not what is in them. Hashes chain the content ids themselves (a hash over made
//! up tokens would cost a hundred times as much and say the same); tokens and words are drawn from the id, so that equal
//! ids give equal text on every machine. The partial block at a prompt's end has no id: its tokens are the turn's own.
//! The hashes here are not those that an engine computes from the tokens made here.

use crate::trace::{Trace, TurnRef};
use homing_kv::{BlockHash, Prompt};
use xxhash_rust::xxh3::xxh3_128;

/// Who within a session shares ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The root agent.
    Root,
    /// All sub-agents.
    SubAgents,
}

/// Bits of a content id that are local to a session.
const LOCAL_BITS: u32 = 39;

/// The content id of what a session calls `id`; no other session or scope has it, and no id below 2^40 equals it.
/// Nothing where `id` has more than 39 bits.
pub(crate) fn local_id(session: u32, scope: Scope, id: u64) -> Option<u64> {
    let scope = match scope {
        Scope::Root => 0,
        Scope::SubAgents => 1,
    };
    (id >> LOCAL_BITS == 0).then(|| ((u64::from(session) + 1) << (LOCAL_BITS + 1)) | (scope << LOCAL_BITS) | id)
}

/// The turn's prompt with blocks of the trace's own size: each hash chains the parent's hash and the block's content id.
///
/// Two prompts share a prefix of blocks exactly where their content ids do. XXH3 with 128 bits instead of the engine's
/// BLAKE3: nobody crafts content ids, and a simulation chains tens of millions of them.
///
/// # Panics
/// If the trace has no such turn.
#[must_use]
pub fn prompt_of(trace: &Trace, turn: TurnRef) -> Prompt {
    let turn = trace.turn(turn);
    let mut parent = None;
    let blocks: Vec<BlockHash> = turn
        .content
        .iter()
        .map(|&id| *parent.insert(chain(parent, id)))
        .collect();
    Prompt::new(blocks, turn.prompt_tokens, trace.block_size)
}

/// The hash of the block that the turn's own tokens fill as the `index`-th after the whole blocks of its prompt: an
/// answer is no other turn's content, so that nothing is found in a cache because of it but a retry of this very turn.
#[must_use]
pub fn answer_block(parent: Option<BlockHash>, turn: TurnRef, index: u32) -> BlockHash {
    let turn = chain(
        Some(BlockHash(ANSWER)),
        (u64::from(turn.session) << 32) | u64::from(turn.turn),
    );
    chain(
        Some(BlockHash(turn.0 ^ parent.map_or(0, |parent| parent.0))),
        u64::from(index),
    )
}

/// Keeps answers apart from the first blocks of prompts.
const ANSWER: u128 = 0x616e_7377_6572;

fn chain(parent: Option<BlockHash>, id: u64) -> BlockHash {
    let mut bytes = [0; 24];
    bytes[..16].copy_from_slice(&parent.map_or(0, |parent| parent.0).to_le_bytes());
    bytes[16..].copy_from_slice(&id.to_le_bytes());
    BlockHash(xxh3_128(&bytes))
}

/// A count of tokens divided by `shrink`, at least 1: how a replay makes prompts and answers smaller.
///
/// # Panics
/// If `shrink` is 0.
#[must_use]
pub fn shrunk(tokens: u32, shrink: u32) -> u32 {
    (tokens / shrink).max(1)
}

/// Token ids below `vocabulary` for the turn's prompt, [`shrunk`] in length: equal content gives equal tokens.
///
/// # Panics
/// If `vocabulary` or `shrink` is 0, or the trace has no such turn.
#[must_use]
pub fn tokens_of(trace: &Trace, turn: TurnRef, vocabulary: u32, shrink: u32) -> Vec<u32> {
    assert!(vocabulary > 0, "a token is one of at least one");
    let mut tokens = Vec::with_capacity(shrunk(trace.turn(turn).prompt_tokens, shrink) as usize);
    for_each_draw(trace, turn, shrink, |draw| {
        // The high half of the product: uniform over the vocabulary, without a division.
        tokens.push(((u64::from(draw) * u64::from(vocabulary)) >> 32) as u32);
    });
    tokens
}

/// English text for the turn's prompt, one word a token after [`shrunk`], for an endpoint that takes text only. A prompt
/// that begins like another's has text that begins alike; how many tokens a word is, is the tokenizer's business.
///
/// # Panics
/// If `shrink` is 0, or the trace has no such turn.
#[must_use]
pub fn words_of(trace: &Trace, turn: TurnRef, shrink: u32) -> String {
    const LONGEST: usize = 8;
    let mut text = String::with_capacity(shrunk(trace.turn(turn).prompt_tokens, shrink) as usize * LONGEST);
    for_each_draw(trace, turn, shrink, |draw| {
        if !text.is_empty() {
            text.push(' ');
        }
        text.push_str(WORDS[(draw >> 26) as usize]);
    });
    text
}

/// Calls `take` with 32 random bits for each token of the prompt, in order.
fn for_each_draw(trace: &Trace, turn_ref: TurnRef, shrink: u32, mut take: impl FnMut(u32)) {
    let turn = trace.turn(turn_ref);
    let total = shrunk(turn.prompt_tokens, shrink);
    // Where a block begins after shrinking; rounding each place, and not each block, keeps the sum exact.
    let place = |block: usize| (block as u64 * u64::from(trace.block_size) / u64::from(shrink)) as u32;
    for (block, &id) in turn.content.iter().enumerate() {
        let mut draws = Draws::new(chain(None, id).0);
        for _ in place(block)..place(block + 1) {
            take(draws.next());
        }
    }
    let mut draws = Draws::new(answer_block(None, turn_ref, u32::MAX).0);
    for _ in place(turn.content.len())..total {
        take(draws.next());
    }
}

/// A stream of random numbers for one block (SplitMix64): 200,000 tokens must take milliseconds.
struct Draws(u64);

impl Draws {
    const fn new(seed: u128) -> Self {
        Self((seed ^ (seed >> 64)) as u64)
    }

    const fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 32) as u32
    }
}

/// Short common words, most of them one token in any English vocabulary.
const WORDS: [&str; 64] = [
    "the", "a", "of", "and", "to", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are", "with", "as",
    "his", "they", "be", "at", "one", "have", "this", "from", "or", "had", "by", "hot", "but", "some", "what", "there",
    "we", "can", "out", "other", "were", "all", "your", "when", "up", "use", "word", "how", "said", "an", "each",
    "she", "which", "do", "their", "time", "if", "will", "way", "about", "many", "then", "them", "would", "write",
    "like", "so",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Session, Turn};
    use homing_units::Duration;
    use proptest::prelude::*;

    /// A trace of sessions of one turn with blocks of 8 tokens: for each its content and the tokens after it.
    fn trace_of(prompts: &[(Vec<u64>, u32)]) -> Trace {
        let turn = |(content, rest): &(Vec<u64>, u32)| Turn {
            agent: 0,
            prompt_tokens: content.len() as u32 * 8 + rest,
            output_tokens: 1,
            content: content.clone().into(),
            after: Vec::new(),
            gap: Duration::ZERO,
        };
        let session = |prompt| Session {
            id: "s".to_owned(),
            start: None,
            turns: vec![turn(prompt)],
        };
        Trace {
            name: "test".to_owned(),
            block_size: 8,
            sessions: prompts.iter().map(session).collect(),
        }
    }

    fn first_of(session: u32) -> TurnRef {
        TurnRef { session, turn: 0 }
    }

    fn common<T: PartialEq>(one: &[T], other: &[T]) -> usize {
        one.iter().zip(other).take_while(|(a, b)| a == b).count()
    }

    proptest! {
        #[test]
        fn prompts_share_hashes_and_tokens_exactly_where_they_share_content(
            one in proptest::collection::vec(0_u64..3, 0..12),
            other in proptest::collection::vec(0_u64..3, 0..12),
            rest in 1_u32..8,
            shrink in 1_u32..12,
        ) {
            let trace = trace_of(&[(one.clone(), rest), (other.clone(), rest)]);
            let shared = common(&one, &other);
            let (a, b) = (prompt_of(&trace, first_of(0)), prompt_of(&trace, first_of(1)));
            prop_assert_eq!(common(&a.blocks, &b.blocks), shared);
            prop_assert_eq!(a.tokens, one.len() as u32 * 8 + rest);
            let tokens = |session| tokens_of(&trace, first_of(session), 50_000, shrink);
            prop_assert_eq!(tokens(0).len() as u32, shrunk(a.tokens, shrink));
            prop_assert!(tokens(0).iter().all(|&token| token < 50_000));
            prop_assert!(common(&tokens(0), &tokens(1)) >= shared * 8 / shrink as usize);
            if shrink == 1 {
                prop_assert!(common(&tokens(0), &tokens(1)) < (shared + 1) * 8);
            }
            let words = words_of(&trace, first_of(0), shrink);
            prop_assert_eq!(words.split(' ').count(), tokens(0).len());
        }

        #[test]
        fn local_ids_name_one_thing_each(a in (0_u32..9, any::<bool>(), 0_u64..1 << 39), b in (0_u32..9, any::<bool>(), 0_u64..1 << 39)) {
            let id = |(session, root, id): (u32, bool, u64)| {
                local_id(session, if root { Scope::Root } else { Scope::SubAgents }, id)
            };
            prop_assert_eq!(id(a) == id(b), a == b);
            prop_assert!(id(a) >= Some(1 << 40));
            prop_assert_eq!(local_id(0, Scope::Root, a.2 | (1 << 39)), None);
        }
    }

    #[test]
    fn tokens_are_the_same_on_every_machine() {
        let trace = trace_of(&[(vec![7], 2)]);
        assert_eq!(
            tokens_of(&trace, first_of(0), 49_152, 1),
            [36367, 18284, 31133, 11122, 40815, 21731, 48430, 25086, 18045, 41394]
        );
        assert_eq!(words_of(&trace, first_of(0), 2), "each this when are this");
    }

    #[test]
    fn an_answer_is_nobodys_content() {
        let trace = trace_of(&[(vec![7], 0), (vec![7], 0)]);
        let tip = prompt_of(&trace, first_of(0)).tip();
        let block = answer_block(tip, first_of(0), 0);
        assert_eq!(block, answer_block(tip, first_of(0), 0), "the same turn again");
        assert_ne!(block, answer_block(tip, first_of(1), 0), "another turn");
        assert_ne!(block, answer_block(tip, first_of(0), 1), "the next block");
        assert_ne!(block, answer_block(None, first_of(0), 0), "another prompt");
    }

    #[test]
    fn tokens_use_the_whole_vocabulary_evenly() {
        let trace = trace_of(&[((0..4000).collect(), 0)]);
        let mut counts = [0_u32; 10];
        for token in tokens_of(&trace, first_of(0), 10, 1) {
            counts[token as usize] += 1;
        }
        assert!(counts.iter().all(|count| (3000..3400).contains(count)), "{counts:?}");
    }
}
