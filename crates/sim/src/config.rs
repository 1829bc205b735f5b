//! What to simulate, what comes of it, and why it could not be done.

use crate::cluster::Cluster;
use crate::fault::Fault;
use crate::logs::Logs;
use homing_report::{LeftOut, RunRecord};
use homing_router::{ErrandTotal, PolicySpec, RouterConfig};
use homing_units::{Duration, Instant, RequestId};
use homing_workload::{ReplayConfig, ReplayError, Start, Trace};
use thiserror::Error;

/// What to simulate.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// The cluster on paper.
    pub cluster: Cluster,
    /// Who decides.
    pub policy: PolicySpec,
    /// Makes the step noise, the order of the sessions and their starts, and the router's jitter.
    pub seed: u64,
    /// What of the trace to send and when. Its seed is replaced by `seed`.
    pub replay: ReplayConfig,
    /// Noise on step times.
    pub noise: bool,
    /// Whether clients name their sessions; otherwise the router recognises them by their prompts.
    pub named_sessions: bool,
    /// Whether to write structural logs.
    pub logs: bool,
    /// Whether to record the router's events.
    pub record: bool,
    /// What goes wrong, and when.
    pub faults: Vec<(Instant, Fault)>,
    /// The router's bounds, clocks and switches. Its block size, policy and seed are replaced by those above.
    pub router: RouterConfig,
    /// No request may take longer, from when it was sent.
    pub patience: Duration,
    /// Whether to check what costs: what lies in each block of each worker's memory, and that the router's index comes to
    /// know what there is once all faults are mended.
    pub thorough: bool,
}

/// The longest that a request may take unless told otherwise.
const PATIENCE: Duration = Duration::from_secs(6 * 3600);

impl SimConfig {
    /// The plain experiment: this cluster and policy, seed 1, the trace's own gaps, four live sessions a worker where the
    /// trace has no start times, no logs, no recording, no faults.
    #[must_use]
    pub fn new(trace: &Trace, cluster: Cluster, policy: PolicySpec) -> Self {
        let workers = u32::try_from(cluster.workers.len()).expect("a cluster is bounded");
        let replay = ReplayConfig {
            start: Start::default_for(trace, workers),
            ..ReplayConfig::default()
        };
        Self {
            cluster,
            policy,
            seed: 1,
            replay,
            noise: true,
            named_sessions: true,
            logs: false,
            record: false,
            faults: Vec::new(),
            router: RouterConfig::default(),
            patience: PATIENCE,
            thorough: false,
        }
    }
}

/// What came of a simulation.
#[derive(Clone, Debug)]
pub struct SimOutcome {
    /// One record a request and a worker.
    pub run: RunRecord,
    /// The structural logs; empty unless asked for.
    pub logs: Logs,
    /// The router's events and a digest of its actions, unless not asked for.
    pub recording: Option<Vec<u8>>,
    /// What the limits left out of the trace.
    pub left_out: LeftOut,
    /// What errands came to, by kind and outcome.
    pub errands: Vec<ErrandTotal>,
}

/// Why a simulation failed.
#[derive(Debug, Error)]
pub enum SimError {
    /// The replay's figures make no sense (wrong input: exit code 2).
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// A block of the trace is larger than a worker's pool (wrong input: exit code 2).
    #[error("worker `{worker}` has room for `{kv_tokens}` tokens, expected at least one block of `{block_size}`")]
    PoolTooSmall {
        /// The worker.
        worker: String,
        /// Its room for KV in tokens.
        kv_tokens: u32,
        /// Tokens in a block of the trace.
        block_size: u32,
    },
    /// No worker can hold any prompt of the trace (wrong input: exit code 2).
    #[error(
        "the largest worker that decodes has room for `{room}` tokens, expected at least `{wanted}`: the shortest prompt of the trace and a token of its answer"
    )]
    NothingFits {
        /// Its room for KV in tokens.
        room: u32,
        /// What the shortest prompt of the trace needs.
        wanted: u32,
    },
    /// A fault names a worker that does not exist (wrong input: exit code 2).
    #[error("a fault names worker `{worker}`, expected one of `{workers}` workers")]
    NoSuchWorker {
        /// Its index.
        worker: u32,
        /// How many there are.
        workers: usize,
    },
    /// Something that must hold did not: a bug in the cores or in the simulator.
    #[error("{check} did not hold at `{at}`: {found}")]
    Check {
        /// What must hold.
        check: &'static str,
        /// When it was seen.
        at: Instant,
        /// What was found instead.
        found: String,
    },
    /// A request did not end.
    #[error("request `{request}` has not ended `{waited:?}` after it was sent, expected it to end within `{bound:?}`")]
    Stuck {
        /// The request.
        request: RequestId,
        /// How long it has waited.
        waited: Duration,
        /// How long it may.
        bound: Duration,
    },
}

impl SimError {
    /// Whether the input was wrong (exit code 2) and not the run (exit code 1).
    #[must_use]
    pub const fn is_wrong_input(&self) -> bool {
        match self {
            Self::Replay(_) | Self::PoolTooSmall { .. } | Self::NothingFits { .. } | Self::NoSuchWorker { .. } => true,
            Self::Check { .. } | Self::Stuck { .. } => false,
        }
    }
}
