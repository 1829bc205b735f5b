//! The tokens and block hashes of a prompt that goes on from an earlier one, at the price of what is new.
//!
//! The prompt comes whole, as its template rendered it: a template may change earlier text when a turn is added. Its text
//! is compared with those of earlier prompts, and only from the last kept cut before the first difference it is tokenised
//! and hashed. What comes out is what tokenising and hashing the whole gives, for any tokenizer, by the argument of
//! `cuts.rs` and the test of `prompt_memory_tests.rs`; tokenizers that it does not cover start at the beginning each time, and
//! [`PromptMemory::why_cold`] says why.
//!
//! No session is named here: a prompt finds the longest beginning that is known, whoever brought it. Sub-agents, forks
//! and a thousand sessions behind one system prompt share what they have in common.
//!
//! Memory: for each token about 4 bytes of text, 4 of the token and 16 / block size of the hash, 9 in all with blocks of
//! 16, and 320 for each message or so. An idle session of 128K tokens that shares nothing takes about 1.3 MB, and all
//! together never more than the bound that was set: the longest unused goes, and costs its session one cold prompt. Idle
//! sessions are forgotten by whoever has a clock ([`PromptMemory::forget_unused_since`]).

use crate::cuts::{Cuts, Uncuttable};
use crate::prompt_tokens::PromptTokens;
use crate::prompt_tree::{Known, Segment, Segmenter, Tree};
use crate::tokenizer::Tokenizer;
use homing_kv::{BlockHash, Prompt, chain_blocks};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a router remembers by default, in bytes: 200 idle sessions of 128K tokens or 1,600 of 16K that share nothing.
pub const PROMPT_MEMORY_BYTES: usize = 256 << 20;

/// Segments that are forgotten under one lock: prompts that are tokenised meanwhile wait for no more.
const FORGOTTEN_AT_ONCE: usize = 256;

/// Shortest segment that is kept apart, in bytes: a message of a few words is not worth a node of the tree.
const SEGMENT_BYTES_MIN: usize = 256;

/// How a prompt's tokens begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// With the text's own ([`Tokenizer::encode`]): chat templates write what begins a prompt themselves.
    Text,
    /// With the token that begins every prompt, where the model has one ([`Tokenizer::encode_prompt`]).
    Bos,
}

/// A prompt's tokens and their blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedPrompt {
    /// The tokens.
    pub tokens: PromptTokens,
    /// The hashes of their whole blocks.
    pub prompt: Prompt,
    /// Of the tokens, how many at the beginning were known and not computed again.
    pub known_tokens: usize,
}

impl EncodedPrompt {
    /// The prompt of these tokens, hashed from its beginning.
    ///
    /// # Panics
    /// If `block_size` is 0.
    #[must_use]
    pub fn of_tokens(tokens: Vec<u32>, block_size: u32) -> Self {
        Self {
            prompt: Prompt::of_tokens(&tokens, block_size),
            tokens: tokens.into(),
            known_tokens: 0,
        }
    }
}

/// A moment in the order in which prompts are used: whoever keeps the time takes one now and then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PromptMark(u64);

/// Earlier prompts of one tokenizer and block size.
pub struct PromptMemory {
    tokenizer: Tokenizer,
    block_size: u32,
    segmenter: Segmenter,
    tree: Mutex<Tree>,
}

impl PromptMemory {
    /// An empty memory that holds at most so many bytes.
    ///
    /// # Panics
    /// If `block_size` is 0.
    #[must_use]
    pub fn new(tokenizer: Tokenizer, block_size: u32, bytes_max: usize) -> Self {
        let bytes_min = SEGMENT_BYTES_MIN;
        Self::with_segments(tokenizer, block_size, Segmenter { bytes_min }, bytes_max)
    }

    fn with_segments(tokenizer: Tokenizer, block_size: u32, segmenter: Segmenter, bytes_max: usize) -> Self {
        assert!(block_size > 0, "a block holds at least one token");
        Self {
            tokenizer,
            block_size,
            segmenter,
            // One root for each opening: with another first token everything after it has another hash.
            tree: Mutex::new(Tree::new(2, segmenter, bytes_max)),
        }
    }

    /// Why each prompt is tokenised from its beginning, if it is.
    #[must_use]
    pub fn why_cold(&self) -> Option<Uncuttable> {
        self.tokenizer.cuts().err()
    }

    /// Bytes that are held now.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.tree().bytes()
    }

    /// Now, in the order in which prompts are used.
    #[must_use]
    pub fn mark(&self) -> PromptMark {
        PromptMark(self.tree().next_use())
    }

    /// Forgets what no prompt has used since; bytes that are held after it.
    pub fn forget_unused_since(&self, mark: PromptMark) -> usize {
        while self.tree().forget_before(mark.0, FORGOTTEN_AT_ONCE) {}
        self.bytes()
    }

    /// The tokens and blocks of a text, from what is known of it and what is not; it is known from now on.
    ///
    /// # Panics
    /// Never: no text has too many bytes.
    #[must_use]
    pub fn encode(&self, text: &str, opening: Opening) -> EncodedPrompt {
        self.encode_near(text, opening, usize::MAX)
            .expect("no text is longer than the largest number")
    }

    /// The same where at most so many bytes of the text are not known, so that it does not take long.
    #[must_use]
    pub fn encode_near(&self, text: &str, opening: Opening, new_bytes_max: usize) -> Option<EncodedPrompt> {
        let is_near = |known: usize| text.len() - known <= new_bytes_max;
        let Ok(cuts) = self.tokenizer.cuts() else {
            return is_near(0).then(|| self.encode_cold(text, opening));
        };
        let root = Tree::root(match opening {
            Opening::Text => 0,
            Opening::Bos => 1,
        });
        let known = self.tree().follow(root, text, cuts);
        if !is_near(known.length) {
            return None;
        }
        let place = known.place;
        let is_cold = known.length == 0;
        let mut work = Work::begin(self, text, known);
        let mut segments = Vec::new();
        while let Some(segment) = work.segment(self, cuts, opening) {
            if segment.tokens.len() <= 1 && is_cold && segments.is_empty() {
                // A text of no tokens: whether the opening is put before it hangs on what follows.
                return Some(self.encode_cold(text, opening));
            }
            segments.push(segment);
        }
        work.finish(self, opening);
        // The lock is not held while texts are tokenised: what another request forgot meanwhile is not grown upon.
        if !segments.is_empty() {
            self.tree().grow(place, segments);
        }
        Some(work.encoded(self.block_size))
    }

    /// A prompt that came as tokens; nothing is remembered of it.
    #[must_use]
    pub fn of_tokens(&self, tokens: Vec<u32>) -> EncodedPrompt {
        EncodedPrompt::of_tokens(tokens, self.block_size)
    }

    /// The same as [`encode`](Self::encode) from nothing, leaving nothing behind.
    #[must_use]
    pub fn encode_cold(&self, text: &str, opening: Opening) -> EncodedPrompt {
        self.of_tokens(self.tokens(text, opening))
    }

    fn tokens(&self, text: &str, opening: Opening) -> Vec<u32> {
        match opening {
            Opening::Text => self.tokenizer.encode(text),
            Opening::Bos => self.tokenizer.encode_prompt(text),
        }
    }

    fn tree(&self) -> MutexGuard<'_, Tree> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A prompt that is being put together: what is known of it stays where it is, and what is new is tokenised and hashed.
struct Work<'text> {
    text: &'text str,
    /// Bytes of the text that have tokens.
    done: usize,
    known: PromptTokens,
    /// Of the known tokens those after the last whole block, then the new ones.
    tokens: Vec<u32>,
    /// How many of `tokens` are known.
    carried: usize,
    /// Of all whole blocks.
    hashes: Vec<BlockHash>,
}

/// Bytes a token at least has, for the size of what is allocated at once.
const TOKEN_BYTES: usize = 3;

impl<'text> Work<'text> {
    fn begin(memory: &PromptMemory, text: &'text str, known: Known) -> Self {
        let Known { segments, length, .. } = known;
        let new_tokens = (text.len() - length) / TOKEN_BYTES + 1;
        let block_size = memory.block_size as usize;
        let known_tokens = segments.iter().map(|segment| segment.tokens.len()).sum::<usize>();
        let mut hashes = Vec::with_capacity((known_tokens + new_tokens) / block_size);
        for segment in &segments {
            hashes.extend_from_slice(&segment.hashes);
        }
        let known = PromptTokens::known(segments);
        let carried = known_tokens % block_size;
        let mut tokens = Vec::with_capacity(carried + new_tokens);
        tokens.extend_from_slice(&known.part(known_tokens - carried, carried));
        Self {
            text,
            done: length,
            known,
            tokens,
            carried,
            hashes,
        }
    }

    /// Tokenises and hashes up to the next cut.
    fn segment(&mut self, memory: &PromptMemory, cuts: &Cuts, opening: Opening) -> Option<Segment> {
        let cut = memory.segmenter.next(self.text, self.done, cuts)?;
        let (from, tokens, hashes) = (self.done, self.tokens.len(), self.hashes.len());
        self.advance(memory, cut.at, opening);
        Some(Segment::new(
            &self.text[from..cut.end],
            cut.at - from,
            &self.tokens[tokens..],
            &self.hashes[hashes..],
        ))
    }

    /// Tokenises and hashes what is left.
    fn finish(&mut self, memory: &PromptMemory, opening: Opening) {
        self.advance(memory, self.text.len(), opening);
    }

    fn advance(&mut self, memory: &PromptMemory, to: usize, opening: Opening) {
        let opening = if self.done == 0 { opening } else { Opening::Text };
        self.tokens.extend(memory.tokens(&self.text[self.done..to], opening));
        // `tokens` begin where a block does.
        let before = self.known.len() - self.carried;
        let hashed = self.hashes.len() * memory.block_size as usize - before;
        chain_blocks(&mut self.hashes, &self.tokens[hashed..], memory.block_size);
        self.done = to;
    }

    fn encoded(self, block_size: u32) -> EncodedPrompt {
        let known_tokens = self.known.len();
        let tokens = self.known.followed_by(&self.tokens[self.carried..]);
        let length = u32::try_from(tokens.len()).expect("a prompt is shorter than 2^32 tokens");
        EncodedPrompt {
            prompt: Prompt::new(self.hashes, length, block_size),
            tokens,
            known_tokens,
        }
    }
}

#[cfg(test)]
#[path = "prompt_memory_tests.rs"]
mod tests;
