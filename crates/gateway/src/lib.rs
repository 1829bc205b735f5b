//! The router's shell: HTTP proxy, engine subscriptions, health probes, telemetry, admin pages.
//!
//! The core decides, the shell carries out. One task owns the core ([`homing_router::Router`]); every request, every
//! engine and every page is a task of its own that talks to it by messages. See the README for a map.

#[doc(hidden)]
pub mod bench;
mod clock;
mod config;
mod core_task;
mod engine;
mod error;
mod expectation;
mod fleet;
mod gateway;
mod idle;
mod prefix;
mod proxy;
mod recorder;
mod routes;
mod server;
mod shell;
mod tails;
mod telemetry;
mod tokenise;
mod turn_log;
mod upstream;

pub use config::{EngineKind, GatewayClocks, GatewayConfig, GatewayLimits, WorkerSpec};
pub use gateway::{Gateway, GatewayError};
pub use turn_log::{Forecast, TurnLog};
