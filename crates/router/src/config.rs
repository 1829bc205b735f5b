//! What can be set about the router, and every bound it keeps. All of it is plain data with a default, so that a
//! recording can carry it and a configuration file can name any part of it.

use crate::policies::PolicySpec;
use homing_units::Duration;
use serde::{Deserialize, Serialize};

/// The router's configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RouterConfig {
    /// Tokens of a block; the hashes of all events are of blocks of this size.
    pub block_size: u32,
    /// Who decides.
    pub policy: PolicySpec,
    /// Whether a session that a policy sends to another decode worker takes its KV along from the one that holds it, instead
    /// of having it computed by a prefill worker.
    pub migrate: bool,
    /// Whether a prefill worker may pull a session's history from the worker that holds it, before it prefills a heavy tail.
    pub fetch: bool,
    /// The seed of jitter and of policies that draw.
    pub seed: u64,
    /// Bounds of queues, maps and retries.
    pub limits: Limits,
    /// How long things may take.
    pub clocks: Clocks,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            block_size: 16,
            policy: PolicySpec::default(),
            migrate: false,
            fetch: true,
            seed: 0,
            limits: Limits::default(),
            clocks: Clocks::default(),
        }
    }
}

/// Bounds: what is above is refused, dropped or waits, as each says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Requests that live at one time; above, new ones are rejected as overloaded.
    pub requests: usize,
    /// Requests that wait in the router's queue; above, new ones are rejected as overloaded.
    pub queue: usize,
    /// Waiting requests that are tried again each time something is freed.
    pub retries_per_release: usize,
    /// Sessions that are remembered; above, the longest idle one is forgotten.
    pub sessions: usize,
    /// Sessions of one family; above, a branch starts a family of its own.
    pub family_sessions: usize,
    /// Blocks of last prompts that sessions remember, all together; above, the longest idle session is forgotten.
    pub session_blocks: usize,
    /// Blocks of the residency index.
    pub index_blocks: usize,
    /// Prompts that are predicted to lie at one worker; above, the oldest is dropped.
    pub predictions: usize,
    /// Batches of KV events that are held while earlier ones are missing; above, the gap counts as lost.
    pub held_batches: usize,
    /// Times that missing KV events are asked for.
    pub resyncs: u32,
    /// Seeds (KV on its way) that one decode worker has pending.
    pub seeds_per_decode: u32,
    /// Prompt tokens of those seeds.
    pub seed_tokens_per_decode: u64,
    /// Prompt tokens that decode-only workers prefill themselves at one time (`append` and `local`), each.
    pub append_tokens_per_decode: u64,
    /// Prompt tokens that wait for or are in prefill at one prefill worker.
    pub prefill_tokens_per_prefill: u64,
    /// Requests in flight at one worker.
    pub requests_per_worker: u32,
    /// Legs that a worker gets after it was suspect or dead, until one of them answers.
    pub trial_requests: u32,
    /// Plans of one request that fail for other reasons than a busy worker, before it is rejected.
    pub attempts: u32,
    /// Failed transfers of one request before it is planned without one.
    pub transfer_retries: u32,
    /// Liveness probes in a row that a worker may miss before it counts as dead.
    pub missed_probes: u32,
    /// Candidates that a decision keeps.
    pub candidates: usize,
    /// Requests that `explain` remembers.
    pub explained: usize,
    /// Errands under way at one time, in all; a worker has part in one.
    pub errands: usize,
    /// Families that own what counts as base content, at least.
    pub base_owners: usize,
    /// Tokens of base content, at least: of less, nothing is to be won.
    pub base_tokens: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            requests: 16_384,
            queue: 4_096,
            retries_per_release: 4,
            sessions: 65_536,
            family_sessions: 64,
            session_blocks: 1 << 22,
            index_blocks: 1 << 21,
            predictions: 1_024,
            held_batches: 4_096,
            resyncs: 3,
            seeds_per_decode: 8,
            seed_tokens_per_decode: 524_288,
            append_tokens_per_decode: 32_768,
            prefill_tokens_per_prefill: 524_288,
            requests_per_worker: 256,
            trial_requests: 2,
            attempts: 4,
            transfer_retries: 2,
            missed_probes: 3,
            candidates: 8,
            explained: 1_024,
            errands: 4,
            base_owners: 4,
            base_tokens: 1_024,
        }
    }
}

/// How long things may take. A phase's clock starts with the phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Clocks {
    /// A request waits in the queue for so long at most.
    pub queue_wait: Duration,
    /// Once the one in the queue that came first has waited for so long, nobody overtakes it where it waits for room, but those of better
    /// priority or whose sessions had less service.
    pub overtake: Duration,
    /// Whoever has waited for so long is looked at before all who have not, whatever their priority and their sessions' service.
    pub overdue: Duration,
    /// So long after it, half of the service that a session has had is forgotten.
    pub service_half_life: Duration,
    /// First and shortest pause before a waiting request is tried again, or a busy worker is asked again.
    pub backoff_base: Duration,
    /// Longest such pause.
    pub backoff_cap: Duration,
    /// What an overloaded answer tells the client to wait for, about.
    pub retry_after: Duration,
    /// A prefill leg may take so long...
    pub prefill_base: Duration,
    /// ...and so much more for each token of its prompt and of the queue that it joined.
    pub prefill_per_token: Duration,
    /// A history may take so long to be lent, and again to be fetched: what takes longer had better be computed.
    pub fetch: Duration,
    /// A decode leg's first token may take so long after the leg was sent...
    pub first_token_base: Duration,
    /// ...and so much more for each token that it pulls or prefills, and of the queue that it joined.
    pub first_token_per_token: Duration,
    /// A stream may take so long after its first token...
    pub stream_base: Duration,
    /// ...and so much more for each token it may generate.
    pub stream_per_token: Duration,
    /// How long a cancelled decode leg may take to say how much of its answer reached the client.
    pub cancel_answer: Duration,
    /// How long a replay of KV events may take before it is asked for again.
    pub resync: Duration,
    /// How long a worker whose KV events began anew may take to be met in another life; then it has none, and its events are
    /// asked for from the start.
    pub restart_doubt: Duration,
    /// Predicted residency of a worker that sends KV events lasts so long: its events tell soon.
    pub predicted_with_events: Duration,
    /// Predicted residency of a worker whose events are missing lasts so long.
    pub predicted: Duration,
    /// A session that is idle for so long is forgotten.
    pub session_idle: Duration,
    /// A session that was not used for so long does not count towards how full its worker's pool is any more: few agents
    /// pause longer between turns (7 in 100), and its KV goes first. It keeps its home.
    pub session_live: Duration,
    /// A failed transfer counts against its link for so long.
    pub link_memory: Duration,
    /// How often it is looked whether an errand can be run that could not be.
    pub errand_pace: Duration,
    /// Nothing more is carried for a session, or of base content to a worker, for so long after an errand...
    pub errand_rest: Duration,
    /// ...and for twice as long after each that failed, up to this; for this after base content that has landed.
    pub errand_rest_cap: Duration,
}

impl Default for Clocks {
    fn default() -> Self {
        Self {
            queue_wait: Duration::from_secs(300),
            overtake: Duration::from_secs(10),
            overdue: Duration::from_secs(60),
            service_half_life: Duration::from_secs(60),
            backoff_base: Duration::from_millis(50),
            backoff_cap: Duration::from_secs(2),
            retry_after: Duration::from_secs(5),
            prefill_base: Duration::from_secs(30),
            prefill_per_token: Duration::from_millis(2),
            fetch: Duration::from_secs(10),
            first_token_base: Duration::from_secs(30),
            first_token_per_token: Duration::from_millis(2),
            stream_base: Duration::from_secs(120),
            stream_per_token: Duration::from_millis(500),
            cancel_answer: Duration::from_secs(1),
            resync: Duration::from_secs(10),
            restart_doubt: Duration::from_secs(10),
            predicted_with_events: Duration::from_secs(10),
            predicted: Duration::from_secs(600),
            session_idle: Duration::from_secs(3_600),
            session_live: Duration::from_secs(300),
            link_memory: Duration::from_secs(30),
            errand_pace: Duration::from_secs(1),
            errand_rest: Duration::from_secs(30),
            errand_rest_cap: Duration::from_secs(600),
        }
    }
}
