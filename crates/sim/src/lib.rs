//! The deterministic simulator: virtual clock, network, simulated engines, checkers.
//!
//! The cores that run live run here: the same router, the same engines, driven by an event heap instead of sockets and
//! timers. Same trace, configuration and seed: same bytes, in the records, the logs and the recording.

pub mod chaos;
mod checkers;
mod client;
pub mod cluster;
mod config;
pub mod fault;
mod heap;
mod legs;
mod logs;
mod memory;
mod nearest;
mod network;
mod node;
mod noise;
mod replay_events;
mod simulation;
pub mod stack;

pub use cluster::{Cluster, ClusterError, WorkerSpec};
pub use config::{SimConfig, SimError, SimOutcome};
pub use fault::{Fault, LinkState, Mishap};
pub use logs::Logs;
pub use replay_events::{EventsError, EventsOutcome, replay_events};
pub use simulation::{simulate, simulate_with};
