//! The router core: sessions, fleet, residency, policies, admission, handoff, health.
//!
//! Pure and sans-IO. A driver calls `Router::handle(now, Event)`, then `Router::poll_action()` until it is `None`, then
//! `Router::poll_timeout()`. The gateway drives it with sockets, the simulator with an event heap, and a recording of
//! `(now, Event)` with neither: the actions are the same.

pub mod action;
pub mod event;
