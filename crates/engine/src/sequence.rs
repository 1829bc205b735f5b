//! One request inside the engine: how far its KV reaches, which blocks hold it, and what was counted for it.
//!
//! A sequence is the prompt and the output so far, taken as one list of tokens. KV exists for its first `computed` tokens;
//! prefill and decode differ only in how many are pending. So a request that was preempted needs no special case: its KV
//! is gone, its tokens are not, and the next token is sampled after the last one as if nothing had happened.
//!
//! It decides nothing and touches no pool: the scheduler does.

use crate::api::{Owner, StepItem, Submit, Transfer, Usage};
use homing_kv::{BlockHash, BlockId, Prompt};
use homing_units::{Instant, RequestId, SessionId};
use std::borrow::Cow;

/// Where a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// It waits for a place and blocks, and holds none.
    Waiting,
    /// It waits for blocks to pull KV into, and holds none.
    Offered,
    /// KV is on its way into its blocks from `first_block` on.
    Importing { first_block: u32, deadline: Instant },
    /// KV is on its way from host memory into its blocks from `first_block` on, up to whole `end_tokens`.
    Reloading { first_block: u32, end_tokens: u32 },
    /// It takes part in steps.
    Running,
    /// It was given up while a step that it is part of runs: its blocks are in use until the step is done.
    Ended,
}

/// One request.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub id: RequestId,
    /// Order of arrival; it is the order of service, also after a preemption.
    pub arrival: u64,
    pub prompt: Prompt,
    pub max_output_tokens: u32,
    pub transfer: Transfer,
    /// Whose slot may keep its KV.
    pub session: Option<SessionId>,
    pub owner: Option<Owner>,
    /// While it is here its session's slot is in use.
    pub uses_slot: bool,
    /// Its session may have a slot for its KV even if it has none yet.
    pub opens_slot: bool,
    /// It has ended with an answer.
    pub answered: bool,
    pub phase: Phase,
    /// Tokens whose KV is in `table`, from the first on.
    pub computed: u32,
    /// Blocks from the first on that were offered to the cache under their names.
    pub named: u32,
    pub table: Vec<BlockId>,
    /// Names of the blocks that output tokens filled, after those of the prompt.
    output_hashes: Vec<BlockHash>,
    /// Whether the cache was asked for the prompt; it is counted once.
    pub looked_up: bool,
    /// Prompt tokens whose source was counted: what a preemption makes us compute again is not counted again.
    pub counted: u32,
    pub usage: Usage,
}

impl Sequence {
    pub fn new(submit: Submit, arrival: u64) -> Self {
        let phase = match submit.transfer {
            Transfer::None | Transfer::Export => Phase::Waiting,
            Transfer::Import { .. } => Phase::Offered,
        };
        Self {
            id: submit.id,
            arrival,
            phase,
            usage: Usage {
                prompt_tokens: submit.prompt.tokens,
                ..Usage::default()
            },
            prompt: submit.prompt,
            max_output_tokens: submit.max_output_tokens,
            transfer: submit.transfer,
            session: submit.session,
            owner: submit.owner,
            uses_slot: false,
            opens_slot: false,
            answered: false,
            computed: 0,
            named: 0,
            table: Vec::new(),
            output_hashes: Vec::new(),
            looked_up: false,
            counted: 0,
        }
    }

    /// Prompt and output so far.
    pub fn tokens(&self) -> u32 {
        self.prompt.tokens + self.usage.output_tokens
    }

    /// Tokens without KV. At least one while the request runs: the last one's step samples the next.
    pub fn pending(&self) -> u32 {
        self.tokens() - self.computed
    }

    /// Whether only the last sampled token is pending.
    pub fn decoding(&self) -> bool {
        self.phase == Phase::Running && self.usage.output_tokens > 0 && self.pending() == 1
    }

    /// Whether it runs and has more to compute than the last sampled token.
    pub fn prefilling(&self) -> bool {
        self.phase == Phase::Running && !self.decoding()
    }

    /// Blocks to add to its table before its next `count` tokens can be computed.
    pub fn blocks_missing_for(&self, count: u32, block_size: u32) -> u32 {
        let needed = (self.computed + count).div_ceil(block_size);
        needed.saturating_sub(u32::try_from(self.table.len()).expect("a table is as long as a u32 of tokens"))
    }

    /// Tokens of the prompt that have no KV and will get none from another worker.
    pub fn prefill_pending(&self) -> u32 {
        let had = match self.phase {
            Phase::Waiting | Phase::Running => self.computed,
            Phase::Offered | Phase::Importing { .. } => self.computed.max(self.wanted_import()),
            Phase::Reloading { end_tokens, .. } => end_tokens.max(self.wanted_import()),
            Phase::Ended => self.prompt.tokens,
        };
        self.prompt.tokens.saturating_sub(had)
    }

    /// Tokens of an offer that are of use: the last prompt token is computed here in any case.
    pub fn wanted_import(&self) -> u32 {
        match self.transfer {
            Transfer::None | Transfer::Export => 0,
            Transfer::Import { tokens } => tokens.min(self.prompt.tokens - 1),
        }
    }

    /// The next `count` pending tokens as an item of a step.
    pub fn item(&self, count: u32) -> StepItem {
        StepItem {
            id: self.id,
            start: self.computed,
            count,
            sample: count == self.pending(),
            decode: self.decoding(),
        }
    }

    /// The name of a whole block, where it is known.
    pub fn hash(&self, block: u32) -> Option<BlockHash> {
        let block = block as usize;
        match block.checked_sub(self.prompt.blocks.len()) {
            None => Some(self.prompt.blocks[block]),
            Some(of_output) => self.output_hashes.get(of_output).copied(),
        }
    }

    /// The names under which KV of this request may be cached. The block of the last token is left out even where it is
    /// whole: that token is computed again, because the next one is sampled from it.
    pub fn reusable_hashes(&self, block_size: u32) -> Cow<'_, [BlockHash]> {
        let blocks = ((self.tokens() - 1) / block_size) as usize;
        if let Some(of_prompt) = self.prompt.blocks.get(..blocks) {
            return Cow::Borrowed(of_prompt);
        }
        let known = self.prompt.blocks.iter().chain(&self.output_hashes).copied();
        Cow::Owned(known.take(blocks).collect())
    }

    /// Takes note of a sampled token and of the name of the block that it filled. A name that comes where no block is
    /// full, or after one that is missing, is of no use.
    pub fn append(&mut self, filled: Option<BlockHash>, block_size: u32) {
        self.usage.output_tokens += 1;
        let blocks = (self.tokens() / block_size) as usize;
        let known = self.prompt.blocks.len() + self.output_hashes.len();
        if let Some(hash) = filled
            && self.tokens().is_multiple_of(block_size)
            && known + 1 == blocks
        {
            self.output_hashes.push(hash);
        }
    }

    /// Forgets the KV, not the tokens. Returns the blocks that held it.
    pub fn drop_kv(&mut self) -> Vec<BlockId> {
        self.computed = 0;
        self.named = 0;
        std::mem::take(&mut self.table)
    }
}
