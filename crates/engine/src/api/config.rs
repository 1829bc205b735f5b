//! How an engine is set up: its limits, and who holds KV between requests.
//!
//! It is fixed for a worker's life. What an accelerator can do is not here but in the step model: the core is told when a
//! step has ended and never how long it took.

use homing_units::{BootEpoch, Duration};
use serde::{Deserialize, Serialize};

/// The engine's limits. Every queue and map in the core is bounded by one of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// This life of the worker; stamped on every KV event.
    pub boot_epoch: BootEpoch,
    /// Tokens in a block.
    pub block_size: u32,
    /// Blocks in the pool.
    pub kv_blocks: u32,
    /// Tokens (prefill chunks and decodes together) in one step: the chunk budget.
    pub max_batch_tokens: u32,
    /// Requests that run at once.
    pub max_running: u32,
    /// Requests that wait for a place; more are rejected.
    pub max_waiting: u32,
    /// Prompt and output of one request, in tokens.
    pub max_context_tokens: u32,
    /// How long exported blocks are held for a puller that does not answer.
    pub export_lease: Duration,
    /// How often such a lease may begin anew; see [`Input::RenewExport`](super::Input::RenewExport).
    pub export_renewals: u32,
    /// How long an import may take before the request fails.
    pub import_timeout: Duration,
    /// Who holds KV between requests.
    pub kind: EngineKind,
    /// Blocks of host memory that evicted blocks go to; 0 for none. With session slots it is not used: what they drop is
    /// gone, as it was in the prototype.
    pub host_blocks: u32,
    /// What is evicted first, in both tiers, where nobody holds KV between requests.
    pub eviction: Eviction,
}

/// What is evicted first of what no request uses, beside branches that have moved away, which go first in any case. Always tail first:
/// what other cached blocks follow on stays. Running requests are preempted only when nothing of all this is left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Eviction {
    /// The least recently used.
    #[default]
    Lru,
    /// First branches that their session has superseded, then what is worth least: the returns that keeping it brings, a second, as
    /// the engine has learnt of sessions like its owner's that have been away for as long, times what it costs to bring it back.
    /// [`EngineKind::Vllm`] does not know it and evicts the least recently used.
    Expected {
        /// A prompt's token behind so many others takes twice as long to compute as the first one does
        /// ([`StepModel::cost_doubles_after_tokens`](crate::StepModel::cost_doubles_after_tokens)); `None` where all take the same.
        /// With host memory it does not matter: what is evicted is copied back from there.
        cost_doubles_after_tokens: Option<u32>,
    },
}

/// Who holds KV between requests, and so what can be evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EngineKind {
    /// Nobody: what no request uses is cached block by block, and evicted block by block, the least recently used first.
    #[default]
    Block,
    /// A slot for each session, as the source papers' prototype had it: a session's KV is pinned as a whole and evicted as a
    /// whole. For the laboratory; it starves, which is why it is here.
    SessionSlot(SlotConfig),
    /// As [`Self::Block`], but KV that has moved to another worker is not given up: the source keeps its copy as the most
    /// recently used, as vLLM does. See [`Input::ReleaseExported`](super::Input::ReleaseExported).
    Vllm,
}

/// The rules of session slots.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SlotConfig {
    /// A session gets or keeps a slot only while the pool's use stays within this share of it (the papers' rho).
    pub capacity_factor: f64,
    /// Slots at most; `None` for no limit.
    pub soft_cap: Option<u32>,
    /// Tokens set aside for the growth of each running request before others may allocate.
    pub reserve_tokens_per_running: u32,
    /// When an idle slot is trimmed for a seed that waits.
    pub trim: TrimRule,
    /// Whether a request whose prompt is shorter than what its session's slot holds kills the engine, as the prototype's
    /// streaming-session correction did; otherwise it is served like any other.
    pub correction_crash: bool,
    /// Whether such a request is turned away before it can do that, as the prototype's pre-filter did.
    pub correction_refused: bool,
}

/// When an idle slot is trimmed for a seed that waits. The papers say that the queue of seeds triggers it on finding
/// `available_size() <= 0`, which can be read in two ways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TrimRule {
    /// When what is available, less what the first seed in the queue needs, is not above zero: it does not fit.
    #[default]
    NoRoom,
    /// When no allocatable token is left at all: a seed that needs more than what is free waits beside idle slots.
    Exhausted,
}

impl Default for SlotConfig {
    fn default() -> Self {
        Self {
            capacity_factor: 0.95,
            soft_cap: None,
            reserve_tokens_per_running: 512,
            trim: TrimRule::NoRoom,
            correction_crash: false,
            correction_refused: false,
        }
    }
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            boot_epoch: BootEpoch(1),
            block_size: 16,
            kv_blocks: 4096,
            max_batch_tokens: 8192,
            max_running: 256,
            max_waiting: 4096,
            max_context_tokens: 1 << 20,
            export_lease: Duration::from_secs(30),
            export_renewals: 64,
            import_timeout: Duration::from_secs(30),
            kind: EngineKind::Block,
            host_blocks: 0,
            eviction: Eviction::Lru,
        }
    }
}
