//! What computes a step and keeps the blocks' content: a real model, or a model of its time.
//!
//! The executor owns scheduling, sequences and stop rules; a backend sees one batch and blocks, nothing of requests'
//! lives. Every block that crosses to another worker has a *name*, the chained hash of its tokens and all before them
//! (for a partial block, of the tokens it has): equal name means equal KV, so a payload is checked against its name.

mod model;
mod step;

pub use model::ModelBackend;
pub use step::StepBackend;

use crate::sampler::Sampling;
use homing_engine::api::Step;
use homing_kv::{BlockHash, BlockId};
use homing_units::Duration;

/// One request's part of a step.
#[derive(Debug)]
pub struct Item<'a> {
    /// The whole sequence so far, prompt and output.
    pub sequence: &'a [u32],
    /// Position of the first token to compute.
    pub start: usize,
    /// Tokens to compute, from `start` on.
    pub count: usize,
    /// The request's blocks, in order.
    pub table: &'a [BlockId],
    /// The chained hash of the sequence's whole blocks.
    pub tip: Option<BlockHash>,
    /// How to choose a token after the last computed one, if one is wanted.
    pub choice: Option<Choice<'a>>,
}

/// A block that crosses to or from another worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedBlock {
    /// Where it lies in the pool.
    pub block: BlockId,
    /// Tokens of the prompt that it holds: less than a whole block's for a partial last one.
    pub tokens: u32,
    /// The chained hash of those tokens and all before them.
    pub name: BlockHash,
}

/// How to choose a token.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'a> {
    /// The request's settings.
    pub sampling: &'a Sampling,
    /// A number in [0, 1).
    pub draw: f64,
}

/// A chosen token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// The token.
    pub token: u32,
    /// A digest of the bits of the logits it was chosen from, where the backend was asked for one.
    pub digest: Option<u64>,
}

/// What a step gave.
#[derive(Debug, Default)]
pub struct StepOutcome {
    /// A token for each item that wants one, in order.
    pub chosen: Vec<Chosen>,
    /// How long to wait before the step counts as done: zero where the time was spent computing.
    pub wait: Duration,
}

/// A step or a block could not be computed or stored.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The forward pass failed.
    #[error("forward pass failed: {0}")]
    Forward(String),
    /// A payload is no block of this worker.
    #[error("a block's payload has `{got}` bytes, expected `{want}`")]
    PayloadLength {
        /// Bytes that came.
        got: usize,
        /// Bytes of a block here.
        want: usize,
    },
    /// A payload belongs to other tokens.
    #[error("a block's payload is not the one of its tokens, expected `{want}`")]
    PayloadName {
        /// The name of the block that was asked for.
        want: BlockHash,
    },
}

/// Computes steps and stores blocks.
pub trait Backend: Send {
    /// Runs a step. `items` are those of `step`, in order.
    ///
    /// # Errors
    /// When the forward pass fails; nothing of the step counts then.
    fn run(&mut self, step: &Step, items: &[Item<'_>]) -> Result<StepOutcome, BackendError>;

    /// Bytes of a block's payload, whole or partial.
    fn payload_bytes(&self) -> usize;

    /// The payload of a block: `payload_bytes` of them, zeros where it is partial.
    fn read_block(&self, block: &NamedBlock) -> Vec<u8>;

    /// Stores a payload.
    ///
    /// # Errors
    /// When it is no payload of a block with this name; the block's content is unspecified then.
    fn write_block(&mut self, block: &NamedBlock, payload: &[u8]) -> Result<(), BackendError>;

    /// How long a transfer of so many tokens takes beyond the time that its bytes really take.
    fn transfer_wait(&self, tokens: u32) -> Duration;
}
