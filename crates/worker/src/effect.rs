//! What an executor tells its driver.

use crate::transfers::ExportView;
use homing_engine::api::{ExportEnd, ImportError, KvChange, Reject, Usage};
use homing_units::{Duration, Instant, RequestId};

/// What the executor tells its driver.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// A request got a token.
    Token(TokenOut),
    /// Pull KV into the blocks of this import, then say [`crate::executor::Executor::import_done`].
    Pull(PullOrder),
    /// A request will pull nothing (any more): tell its source that it may release the blocks it holds.
    ReleaseSource {
        /// The request that was to pull.
        id: RequestId,
    },
    /// The request was not accepted.
    Rejected {
        /// The request.
        id: RequestId,
        /// Why.
        reason: Reject,
    },
    /// The request has ended; nothing more comes for it but [`Effect::ExportEnded`].
    Ended(Ended),
    /// Blocks held for a puller were released.
    ExportEnded {
        /// The request that was exported.
        id: RequestId,
        /// Why.
        reason: ExportEnd,
    },
    /// The cache changed.
    Kv(KvOut),
}

/// An order to pull KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullOrder {
    /// The request it is for.
    pub id: RequestId,
    /// Index, in the prompt, of the first block to pull.
    pub first_block: u32,
    /// Blocks to pull, from `first_block` on.
    pub blocks: u32,
    /// The prompt's tokens in those blocks.
    pub tokens: u32,
    /// When the engine gives up.
    pub deadline: Instant,
    /// How long the transfer takes beyond the time that its bytes really take (see [`crate::Backend::transfer_wait`]).
    pub wait: Duration,
}

/// A token of a request's output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenOut {
    /// The request.
    pub id: RequestId,
    /// The token.
    pub token: u32,
    /// Text that it completed; empty while text is held back.
    pub text: String,
    /// Digest of the logits' bits, where the backend gives one.
    pub digest: Option<u64>,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    /// The request.
    pub id: RequestId,
    /// Why.
    pub outcome: Outcome,
    /// Text that was held back until now.
    pub text: String,
    /// What it took.
    pub usage: Usage,
    /// The KV that is held for a puller, where the request asked for that.
    pub export: Option<ExportView>,
}

/// Why a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A stop token, or a stop string.
    Stop(StopCause),
    /// It has as many tokens as it asked for.
    Length,
    /// It was given up.
    Aborted,
    /// Its KV did not arrive.
    ImportFailed(ImportError),
    /// The backend could not compute it.
    BackendFailed,
}

/// What ended an output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// The model's end-of-sequence token.
    EndOfSequence,
    /// A token that the request named.
    Token(u32),
    /// A string that the request named.
    Text(String),
}

/// A change of the cache, with the tokens that it is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvOut {
    /// What changed.
    pub change: KvChange,
    /// The tokens of the blocks of [`KvChange::Stored`]; empty otherwise.
    pub tokens: Vec<u32>,
}
