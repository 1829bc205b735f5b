//! The embedded engine's shell: HTTP in vLLM's dialect, KV events, KV transfer.
//!
//! [`Worker::start`] runs a whole worker: the engine core on a thread of its own, with a real model or a model of an
//! accelerator's time, and the sockets around it. [`executor::Executor`] is the same engine without thread or socket.

mod backend;
mod config;
mod effect;
pub mod engine_thread;
pub mod executor;
mod http;
mod kv_events;
mod latency;
mod metrics;
mod request;
mod sampler;
mod serving;
mod text;
mod transfer;
mod transfers;
mod worker;

pub use backend::{Backend, BackendError, Choice, Chosen, Item, ModelBackend, NamedBlock, StepBackend, StepOutcome};
pub use config::{Compute, Endpoints, Extension, Limits, Listen, Role, WorkerConfig, WorkerInfo};
pub use http::{Probe, Released, Renewed};
pub use kv_events::{REPLAY_BATCHES, REPLAY_BYTES, ReplayLimits};
pub use latency::{Histogram, Latencies};
pub use metrics::{Counters, Status};
pub use request::{Request, StopRules};
pub use sampler::Sampling;
pub use serving::{Served, ServedEngine};
pub use text::StopStrings;
pub use transfers::ExportView;
pub use worker::{StartError, Worker};
