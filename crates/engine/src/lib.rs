//! The engine core: continuous batching, chunked prefill, KV admission, transfers, KV events, step-time models.
//!
//! Pure and sans-IO. A driver calls `Engine::handle(now, Input)`, then `Engine::poll_output()` until it is `None`, then
//! `Engine::poll_timeout()`. The same core runs in the simulator (steps timed by a [`StepModel`]) and in the embedded
//! worker (steps run by a real model).

pub mod api;
mod cache;
mod completion;
mod engine;
mod invariants;
mod load;
mod profiles;
mod queue;
mod reload;
mod residents;
mod returns;
mod scheduler;
mod sequence;
mod slots;
mod step_time;
mod transfers;

pub use engine::Engine;
pub use residents::{Resident, ResidentLimits};
pub use step_time::{Chunk, DenseForm, MoeForm, StepModel, StepModelError, StepShape};
