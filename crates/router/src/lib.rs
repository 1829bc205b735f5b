//! The router core: sessions, fleet, residency, policies, admission, handoff, health.
//!
//! Pure and sans-IO. A driver calls [`Router::handle`], then [`Router::poll_action`] until it is `None`, then
//! [`Router::poll_timeout`]. The gateway drives it with sockets, the simulator with an event heap, and a recording of
//! `(now, Event)` with neither: the actions are the same.

pub mod action;
pub mod event;
pub mod policies;
pub mod recording;

mod admission;
mod backoff;
mod config;
mod errands;
mod feed;
mod fleet;
mod handoff;
mod learning;
mod links;
mod queue;
mod residency;
mod room;
mod router;
mod sessions;
mod sharing;
mod sketches;
pub mod speed;
mod timers;

pub use admission::{Account, Denied};
pub use backoff::Backoff;
pub use config::{Clocks, Limits, RouterConfig};
pub use errands::ErrandTotal;
pub use policies::{PolicyError, PolicySpec};
pub use router::{AttemptView, ClientView, Explanation, Router, SessionView, WorkerStatus};
