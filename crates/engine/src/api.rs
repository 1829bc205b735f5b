//! What goes into the engine core and what comes out: its whole contract with a driver.
//!
//! Tokens never enter the core. It sees hashes of whole blocks and lengths; the driver knows the tokens, runs the
//! steps, and says which hash an output block got when its last token was sampled.

mod config;

pub use config::{EngineConfig, EngineKind, Eviction, SlotConfig, TrimRule};

use homing_kv::{BlockHash, BlockId, Prompt, Tier};
use homing_units::{BootEpoch, Instant, RequestId, SessionId};
use serde::{Deserialize, Serialize};

/// One request. Ids are the driver's, each used once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Submit {
    /// The driver's id of this request.
    pub id: RequestId,
    /// The prompt. At least one token.
    pub prompt: Prompt,
    /// Tokens to generate at most. At least one.
    pub max_output_tokens: u32,
    /// Where KV comes from and goes to.
    pub transfer: Transfer,
    /// The session whose slot may keep the KV at the end. Without slots, or without a session, it does not matter.
    pub session: Option<SessionId>,
    /// Whose it is, as far as that is known. What is evicted first goes by it (see [`Eviction`]).
    pub owner: Option<Owner>,
}

/// Whose a request is. Of requests without one it is known no more than that they come from somebody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// The session: one thread of prompts, each of which goes on with what the last one said, or nearly.
    pub session: SessionId,
    /// The kind of its client, whose sessions come back alike: the driver's number. 0, and what is beyond the few kinds that are told
    /// apart, is any client of which nothing is known.
    pub kind: u8,
}

/// Where a request's KV comes from and goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// Prefill here what is not cached here, decode here.
    None,
    /// After the last token was sampled hold the prompt's blocks (the partial one too) until they are acknowledged or
    /// the lease ends.
    Export,
    /// Before the prefill pull the KV of the prompt's first `tokens` tokens, less what is cached here. The request gets
    /// [`Output::Import`] exactly once unless it ends before there is room for it.
    Import {
        /// Tokens on offer; at most the prompt's length. The last prompt token is computed here in any case, so it is not
        /// pulled where it would need a block of its own.
        tokens: u32,
    },
}

/// What a driver tells the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A new request.
    Submit(Submit),
    /// Give a request up, whatever its state; it ends with `FinishReason::Aborted`, at once. One that is part of the
    /// outstanding step keeps its blocks until the step is done. For a request that was exported the held blocks are
    /// released. Unknown ids are ignored.
    Abort(RequestId),
    /// The outstanding step was run. One entry for each of its items that samples, in the step's order.
    ///
    /// An item whose entry is missing counts as not run and is planned again (a driver that cannot run it aborts it).
    /// Entries for requests that were aborted meanwhile or are not in the step, second entries for one request, and the
    /// whole input when no step is outstanding, are ignored.
    StepDone(Vec<Sampled>),
    /// An import that was ordered by [`Output::Import`] has ended: the driver writes into its blocks no longer. Comes
    /// exactly once for each order with blocks, also when the request has ended meanwhile (aborted, or timed out): until
    /// then nobody else gets those blocks. For others it is ignored.
    ImportDone {
        /// The request it was for.
        id: RequestId,
        /// Whether every block arrived and was verified.
        outcome: Result<(), ImportError>,
    },
    /// The puller has what it wanted: release the blocks held for it. What is cached of them stays, as the most recently
    /// used. Unknown ids are ignored.
    ExportAck(RequestId),
    /// The puller has what it wanted and is the prompt's home from now on: as [`Self::ExportAck`], but the cached blocks that
    /// lead to nothing else are the first to go when room is needed. [`EngineKind::Vllm`] has no such call and takes it as
    /// the plain ack.
    ReleaseExported(RequestId),
    /// Whoever asked for the export still wants it pulled: its lease begins anew, up to [`EngineConfig::export_renewals`] times;
    /// then it ends when it ends. Unknown ids are ignored, and nothing is renewed that is not held yet.
    RenewExport(RequestId),
    /// A reload that was ordered by [`Output::Reload`] has ended: the driver writes into its blocks no longer. Comes exactly
    /// once for each order, also when the request has ended meanwhile. For others it is ignored.
    ReloadDone(RequestId),
    /// Time has passed (see `poll_timeout`).
    Timeout,
    /// Drop every block that no request uses, as `/reset_prefix_cache` does.
    ClearCache,
}

/// What a step produced for one item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampled {
    /// The request.
    pub id: RequestId,
    /// The sampled token ends the output (end-of-sequence or a stop string).
    pub stop: bool,
    /// The hash of the block whose last token was just sampled, where it was the last of a block.
    pub filled: Option<BlockHash>,
}

/// Why an import failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportError {
    /// The source could not be reached or the connection broke.
    Unreachable,
    /// The source knows no such export: it was released, it expired, or the source was restarted.
    Unknown,
    /// A frame did not match its length or checksum.
    Corrupt,
    /// It took longer than `import_timeout`.
    TimedOut,
}

/// What the engine tells its driver.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Run this step, then answer with [`Input::StepDone`]. There is at most one outstanding step.
    Step(Step),
    /// Pull KV into these blocks, then answer with [`Input::ImportDone`]. It may come while a step is outstanding. Without
    /// blocks there is nothing to pull, since all is cached here: tell the source that it may release what it holds; no
    /// answer is needed and the request goes on at once.
    Import(Import),
    /// Copy KV from host memory into these blocks, then answer with [`Input::ReloadDone`]. It may come while a step is
    /// outstanding. Only with `host_blocks`.
    Reload(Reload),
    /// The prompt's KV is ready and held for a puller. Comes just before the request's [`Output::Finished`].
    Exported(Export),
    /// The blocks held for a puller were released.
    ExportEnded {
        /// The request that was exported.
        id: RequestId,
        /// Why they were released.
        reason: ExportEnd,
    },
    /// The request was not accepted.
    Rejected {
        /// The request.
        id: RequestId,
        /// Why.
        reason: Reject,
    },
    /// A running request lost its blocks to others. It waits, before all that came after it, and its prompt and output so far
    /// are computed again; no token is sampled twice.
    Preempted {
        /// The request.
        id: RequestId,
    },
    /// The request has ended. Nothing more comes for it but [`Output::ExportEnded`].
    Finished(Finished),
    /// The cache changed.
    Kv(KvEvent),
    /// An idle session lost its slot and all of its KV at once; its [`Output::Kv`] came just before.
    Trimmed(Trimmed),
    /// The engine's process has died of a broken invariant; nothing that it is told from now on matters.
    Crashed {
        /// The request that it died of.
        id: RequestId,
        /// The invariant.
        reason: Crash,
    },
}

/// The broken invariant that an engine's process dies of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Crash {
    /// A prompt is shorter than the KV that its session's slot holds, so its part to compute has a negative length.
    Correction {
        /// The prompt's length.
        fill_tokens: u32,
        /// Tokens whose KV the slot holds.
        prefix_tokens: u32,
    },
}

/// A slot that was taken from an idle session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trimmed {
    /// The session.
    pub session: SessionId,
    /// Blocks that are free now.
    pub blocks: u32,
}

/// One step of the engine: prefill chunks and decodes in one batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Counts from 0.
    pub number: u64,
    /// At most one item a request.
    pub items: Vec<StepItem>,
}

/// The part of a step that belongs to one request. Its block table is `Engine::block_table(id)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepItem {
    /// The request.
    pub id: RequestId,
    /// Position of the first token computed.
    pub start: u32,
    /// Tokens computed: 1 for a decode.
    pub count: u32,
    /// Whether a token is sampled from the last one.
    pub sample: bool,
    /// Whether this is a decode (its one token was sampled by an earlier step) and no prefill.
    pub decode: bool,
}

/// An order to pull KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Import {
    /// The request it is for.
    pub id: RequestId,
    /// Index, in the prompt, of the first block to pull: those before it are cached here.
    pub first_block: u32,
    /// Where to put them, one for each block from `first_block` on; the last may be partial, and the source may hold one
    /// more. Empty where there is nothing to pull.
    pub blocks: Vec<BlockId>,
    /// When the engine gives up.
    pub deadline: Instant,
}

/// An order to copy KV from host memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reload {
    /// The request it is for.
    pub id: RequestId,
    /// Index, in the request's tokens, of the first block to copy.
    pub first_block: u32,
    /// Where to put them, one for each block from `first_block` on, all of them whole.
    pub blocks: Vec<BlockId>,
    /// The names of what is copied, in the same order. The host keeps them until the driver's answer.
    pub hashes: Vec<BlockHash>,
}

/// KV held for a puller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// The request that was prefilled.
    pub id: RequestId,
    /// The prompt's blocks in order; the last may be partial.
    pub blocks: Vec<BlockId>,
    /// The prompt's length in tokens.
    pub tokens: u32,
    /// When the blocks are released if nobody acknowledges.
    pub lease_ends: Instant,
}

/// Why held blocks were released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExportEnd {
    /// The puller acknowledged.
    Acked,
    /// Nobody did in time.
    LeaseEnded,
    /// The request was aborted.
    Aborted,
}

/// Why a request was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reject {
    /// The waiting queue is full.
    QueueFull,
    /// Prompt and output are longer than the model's context.
    ContextTooLong,
    /// Prompt and output do not fit into an empty pool.
    PoolTooSmall,
    /// No prompt token, no output token, an id in use, an offer longer than the prompt, or a number of hashes that is not
    /// the prompt's number of whole blocks.
    Invalid,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    /// The request.
    pub id: RequestId,
    /// Why.
    pub reason: FinishReason,
    /// What it took.
    pub usage: Usage,
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The driver said so with [`Sampled::stop`].
    Stop,
    /// `max_output_tokens` were generated.
    Length,
    /// The driver gave it up.
    Aborted,
    /// Its KV did not arrive; nothing was generated.
    ImportFailed(ImportError),
}

/// Where a request's prompt tokens came from: cached, copied from host memory, imported, and the rest computed. What a preemption makes the engine
/// compute again, or find again, is not counted again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// The prompt's length.
    pub prompt_tokens: u32,
    /// Found in this worker's cache when the request was scheduled.
    pub local_cached_tokens: u32,
    /// Copied from this worker's host memory.
    pub host_cached_tokens: u32,
    /// Pulled from another worker.
    pub imported_tokens: u32,
    /// Tokens sampled.
    pub output_tokens: u32,
    /// How often the request lost its blocks and started again.
    pub preemptions: u32,
}

/// One change of the cache, in the order in which they happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvEvent {
    /// The worker's life.
    pub epoch: BootEpoch,
    /// Counts from 0 in each life, without gaps.
    pub sequence: u64,
    /// What changed.
    pub change: KvChange,
}

/// What changed in the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvChange {
    /// These blocks are cached now, each the parent of the next.
    Stored {
        /// The request that computed, pulled or reloaded them; in the host tier, the one that they made room for.
        request: RequestId,
        /// Index of the first of them in their prompt; in the accelerator's tier, that request's tokens.
        first_block: u32,
        /// The block before the first, if any.
        parent: Option<BlockHash>,
        /// Their hashes.
        hashes: Vec<BlockHash>,
        /// Where they lie.
        tier: Tier,
    },
    /// These blocks are no longer cached.
    Removed {
        /// Their hashes.
        hashes: Vec<BlockHash>,
        /// Where they lay.
        tier: Tier,
    },
    /// Nothing is cached any more.
    Cleared,
}

/// A copy of the engine's load, published for admission and metrics; reading it costs the scheduler nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Requests in the batch.
    pub running: u32,
    /// Requests that wait for a place.
    pub waiting: u32,
    /// Requests that wait for KV from another worker.
    pub importing: u32,
    /// Requests that are held for a puller.
    pub exporting: u32,
    /// Blocks in the pool.
    pub blocks_total: u32,
    /// Blocks that hold nothing.
    pub blocks_free: u32,
    /// Blocks that hold cached KV and that no request uses: free for the taking.
    pub blocks_evictable: u32,
    /// Prompt tokens of accepted requests that are to be computed here and are not yet; for requests that wait, as if nothing
    /// of them were cached.
    pub prefill_tokens_pending: u64,
    /// Context of the decoding requests, in tokens.
    pub decode_context_tokens: u64,
    /// Blocks evicted since the start.
    pub evicted_blocks: u64,
    /// Times that blocks were evicted, since the start.
    pub evictions: u64,
    /// Requests that lost their blocks, since the start.
    pub preemptions: u64,
    /// Prompt tokens looked up in the cache, since the start.
    pub cache_query_tokens: u64,
    /// Prompt tokens found in the cache, since the start.
    pub cache_hit_tokens: u64,
    /// Prompt tokens pulled from other workers, since the start.
    pub imported_tokens: u64,
    /// Prompt tokens computed, since the start; those computed again after a preemption count once.
    pub computed_tokens: u64,
    /// Tokens sampled, since the start.
    pub output_tokens: u64,
    /// Sessions that have a slot.
    pub slots: u32,
    /// Those of them without a request in the engine.
    pub slots_idle: u32,
    /// Tokens that slots hold; those of a block that two slots share count twice.
    pub slot_tokens: u64,
    /// Slots that were trimmed, since the start.
    pub trims: u64,
    /// Tokens that trimming made room for, since the start, in whole blocks.
    pub trimmed_tokens: u64,
    /// Requests that lost their blocks and wait to run again.
    pub retracted: u32,
    /// Requests that wait for room before their KV is pulled.
    pub offered: u32,
    /// Requests that wait for KV from host memory.
    pub reloading: u32,
    /// Blocks of host memory.
    pub host_blocks_total: u32,
    /// Those of them that hold KV.
    pub host_blocks_used: u32,
    /// Prompt tokens copied from host memory, since the start.
    pub host_hit_tokens: u64,
}
