//! A request as the executor keeps it: its tokens, how to choose the next one, and when to stop.

use crate::executor::{StopCause, TokenOut};
use crate::sampler::{Sampling, draw};
use crate::text::{StopStrings, TextStream};
use crate::transfers::ExportView;
use homing_engine::api::{Owner, Transfer};
use homing_kv::{BlockHash, Prompt, chain};
use homing_model::Tokenizer;
use homing_units::{RequestId, Rng};
use homing_wire::transfer_params::prompt_hash;
use std::sync::Arc;

/// Output tokens for which there is room from the start, at most: few outputs are longer.
const OUTPUT_ROOM: usize = 4_096;

/// A request with its tokens.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt's tokens.
    pub tokens: Arc<[u32]>,
    /// The hashes of the prompt's whole blocks, and its length.
    pub prompt: Prompt,
    /// The hash of the whole prompt, which both ends of a transfer compare.
    pub prompt_hash: BlockHash,
    /// Tokens to generate at most.
    pub max_output_tokens: u32,
    /// Where KV comes from and goes to.
    pub transfer: Transfer,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// When the output ends before its length.
    pub stop: StopRules,
    /// Whose it is, where a router says so.
    pub owner: Option<Owner>,
}

/// When an output ends before its length.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopRules {
    /// The model's end-of-sequence token is a token like any other.
    pub ignore_end_of_sequence: bool,
    /// Tokens that end the output.
    pub tokens: Vec<u32>,
    /// Strings that end the output.
    pub strings: StopStrings,
    /// No rule holds before so many tokens were generated.
    pub min_output_tokens: u32,
}

impl Request {
    /// A greedy request with no stop rule but its length. Hashes the prompt: not for the engine thread.
    #[must_use]
    pub fn greedy(tokens: impl Into<Arc<[u32]>>, block_size: u32, max_output_tokens: u32, transfer: Transfer) -> Self {
        let tokens = tokens.into();
        Self {
            prompt: Prompt::of_tokens(&tokens, block_size),
            prompt_hash: prompt_hash(&tokens),
            tokens,
            max_output_tokens,
            transfer,
            sampling: Sampling::GREEDY,
            stop: StopRules {
                ignore_end_of_sequence: true,
                ..StopRules::default()
            },
            owner: None,
        }
    }
}

/// Where a request's KV comes from, and how far that has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Everything is computed here.
    Here,
    /// KV is on offer elsewhere, or being pulled.
    Offered,
    /// The source needs no word from us any more.
    Settled,
}

/// A live request.
pub struct RequestState {
    /// As it was submitted.
    pub request: Request,
    /// Prompt and output.
    pub sequence: Vec<u32>,
    /// The chained hash of the sequence's whole blocks.
    pub tip: Option<BlockHash>,
    /// Where its KV comes from.
    pub source: Source,
    /// Its prompt's KV, held for a puller.
    pub export: Option<ExportView>,
    /// What ended the output, where a stop rule did.
    pub stopped_by: Option<StopCause>,
    /// The backend could not compute it.
    pub backend_failed: bool,
    block_size: u32,
    rng: Rng,
    text: TextStream,
}

/// What a new token means for the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// It ends the output.
    pub stop: bool,
    /// The hash of the block that it filled.
    pub filled: Option<BlockHash>,
}

impl RequestState {
    /// A request that has no output yet.
    #[must_use]
    pub fn new(request: Request, block_size: u32, tokenizer: &Tokenizer) -> Self {
        // Room for the output, too: to double that of a long prompt for its first token would waste as much again.
        let output = OUTPUT_ROOM.min(request.max_output_tokens as usize);
        let mut sequence = Vec::with_capacity(request.tokens.len() + output);
        sequence.extend_from_slice(&request.tokens);
        Self {
            sequence,
            tip: request.prompt.tip(),
            source: if matches!(request.transfer, Transfer::Import { .. }) {
                Source::Offered
            } else {
                Source::Here
            },
            export: None,
            stopped_by: None,
            backend_failed: false,
            block_size,
            rng: request.sampling.rng(),
            text: TextStream::new(tokenizer, request.stop.strings.clone()),
            request,
        }
    }

    /// The random number for the next token; greedy requests use none.
    pub fn draw(&mut self) -> f64 {
        if self.request.sampling.is_greedy() {
            0.0
        } else {
            draw(&mut self.rng)
        }
    }

    /// Appends a token to the output.
    pub fn accept(
        &mut self,
        id: RequestId,
        token: u32,
        digest: Option<u64>,
        tokenizer: &Tokenizer,
    ) -> (TokenOut, Accepted) {
        self.sequence.push(token);
        let filled = self.sequence.len().is_multiple_of(self.block_size as usize).then(|| {
            let start = self.sequence.len() - self.block_size as usize;
            *self.tip.insert(chain(self.tip, &self.sequence[start..]))
        });
        let may_stop = self.output_tokens() >= self.request.stop.min_output_tokens as usize;
        self.stopped_by = self.stop_token(token, tokenizer).filter(|_| may_stop);
        let mut text = String::new();
        if self.stopped_by.is_none() {
            let piece = self.text.push(token, may_stop);
            self.stopped_by = piece.stopped_by.map(StopCause::Text);
            text = piece.text;
        }
        (
            TokenOut {
                id,
                token,
                text,
                digest,
            },
            Accepted {
                stop: self.stopped_by.is_some(),
                filled,
            },
        )
    }

    /// Text that is still held back when the output ends well.
    pub fn rest_of_text(&mut self) -> String {
        match self.stopped_by {
            Some(StopCause::Text(_)) => String::new(),
            _ => self.text.finish(),
        }
    }

    fn output_tokens(&self) -> usize {
        self.sequence.len() - self.request.tokens.len()
    }

    fn stop_token(&self, token: u32, tokenizer: &Tokenizer) -> Option<StopCause> {
        let rules = &self.request.stop;
        if !rules.ignore_end_of_sequence && tokenizer.is_end(token) {
            return Some(StopCause::EndOfSequence);
        }
        rules.tokens.contains(&token).then_some(StopCause::Token(token))
    }
}
