//! What a worker is told at its start, and what it says of itself.

use crate::kv_events::ReplayLimits;
use crate::serving::Served;
use homing_engine::StepModel;
use homing_model::{ModelSpec, default_cache_dir};
use homing_units::{BootEpoch, Duration};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

/// What a worker may be used for. A limit for the router to keep: the worker itself serves whoever asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Prefill only.
    Prefill,
    /// Decode and the prefill of tails.
    Decode,
    /// Anything.
    #[default]
    Both,
}

/// What computes.
#[derive(Clone)]
pub enum Compute {
    /// A model's forward pass, on this CPU.
    Model(ModelSpec),
    /// No forward pass: the time that an accelerator would take, and deterministic tokens.
    Steps(Box<StepModel>),
    /// A model that is in memory already: workers of one process share its weights.
    Loaded(Served),
}

/// The settings of a worker.
#[derive(Clone)]
pub struct WorkerConfig {
    /// Its name, such as `d0`.
    pub name: String,
    /// What it may be used for.
    pub role: Role,
    /// What computes.
    pub compute: Compute,
    /// Where fetched models are kept.
    pub cache_dir: PathBuf,
    /// The model's name in requests, where it is not the model's own.
    pub served_model: Option<String>,
    /// Where HTTP, KV events, their replay and KV transfer listen. Port 0 takes a free one.
    pub listen: Listen,
    /// The host under which other workers reach this one's transfer port; by default the address it listens on.
    pub advertise: Option<String>,
    /// Size of the KV pool in tokens; by default what suits the model.
    pub kv_tokens: Option<u32>,
    /// Tokens in a block.
    pub block_size: u32,
    /// This life of the worker; by default from the clock, in microseconds since 1970.
    pub boot_epoch: Option<BootEpoch>,
    /// Whether it evicts first what is worth least to keep, by the returns of sessions that it has seen; otherwise the least recently used.
    pub expects_returns: bool,
    /// What bounds the work.
    pub limits: Limits,
}

/// Where a worker listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen {
    /// HTTP.
    pub http: SocketAddr,
    /// KV events (ZMQ PUB).
    pub kv_events: SocketAddr,
    /// Replay of KV events (ZMQ ROUTER).
    pub kv_replay: SocketAddr,
    /// KV transfer (TCP).
    pub kv_transfer: SocketAddr,
}

/// What bounds the work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens in one step; by default what suits the model.
    pub max_batch_tokens: Option<u32>,
    /// Requests that run at once.
    pub max_running: u32,
    /// Requests that wait for a place.
    pub max_waiting: u32,
    /// Prompt and output of one request, in tokens; at most what the model and the pool take, which is the default.
    pub max_context_tokens: Option<u32>,
    /// Bytes of a request's body.
    pub max_body_bytes: usize,
    /// How long exported KV is held for a puller that does not come.
    pub export_lease: Duration,
    /// How often that may begin anew, for whoever asks.
    pub export_renewals: u32,
    /// How long a pull may take.
    pub import_timeout: Duration,
    /// KV events that are kept for a replay.
    pub replay: ReplayLimits,
}

/// Where a worker is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoints {
    /// HTTP.
    pub http: SocketAddr,
    /// KV events (ZMQ PUB).
    pub kv_events: SocketAddr,
    /// Replay of KV events (ZMQ ROUTER).
    pub kv_replay: SocketAddr,
    /// KV transfer (TCP).
    pub kv_transfer: SocketAddr,
}

/// What a worker says of itself (`/homing/info`): what a router cannot learn through vLLM's dialect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerInfo {
    /// Its name.
    pub name: String,
    /// What it may be used for.
    pub role: Role,
    /// This life of it.
    pub epoch: BootEpoch,
    /// The served model's name.
    pub model: String,
    /// Tokens in a block.
    pub block_size: u32,
    /// Size of its KV pool in tokens.
    pub kv_tokens: u64,
    /// Prompt and output of one request at most, in tokens.
    pub max_context_tokens: u32,
    /// The step-time model's name, where no forward pass is run.
    pub step_model: Option<String>,
    /// Where it is reached.
    pub endpoints: Endpoints,
    /// The topic of its KV events.
    pub kv_events_topic: String,
    /// The version of this program.
    pub version: String,
    /// What it can be asked beyond vLLM's dialect.
    pub extensions: Vec<Extension>,
    /// How long it holds KV for a puller that does not come, unless that is renewed; in milliseconds.
    pub export_lease_ms: u64,
}

/// What a worker can be asked beyond vLLM's dialect. A router that does not know one leaves it alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Extension {
    /// `GET /homing/probe`: whether there is room, and how long to stay away.
    Probe,
    /// `POST /homing/release`: nobody will pull what a request asked to be held.
    Release,
    /// `POST /homing/renew`: somebody still will.
    Renew,
}

impl Listen {
    /// Free ports of one address, except for HTTP.
    #[must_use]
    pub const fn at(http: SocketAddr) -> Self {
        let free = SocketAddr::new(http.ip(), 0);
        Self {
            http,
            kv_events: free,
            kv_replay: free,
            kv_transfer: free,
        }
    }
}

impl Default for Listen {
    fn default() -> Self {
        Self::at(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0))
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_batch_tokens: None,
            max_running: 256,
            max_waiting: 1024,
            max_context_tokens: None,
            max_body_bytes: 32 << 20,
            export_lease: Duration::from_secs(30),
            export_renewals: 64,
            import_timeout: Duration::from_secs(30),
            replay: ReplayLimits::default(),
        }
    }
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self {
            name: "w0".to_owned(),
            role: Role::Both,
            compute: Compute::Model(ModelSpec::Auto),
            cache_dir: default_cache_dir(),
            served_model: None,
            listen: Listen::default(),
            advertise: None,
            kv_tokens: None,
            block_size: 16,
            boot_epoch: None,
            expects_returns: false,
            limits: Limits::default(),
        }
    }
}
