//! The gateway before engines, over loopback. One binary, so that what the tests share is built once.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod agents;
mod errands;
mod failures;
mod inputs;
mod joins;
mod leases;
mod life;
mod messages;
mod proxy;
mod quiet;
mod responses;
mod sessions;
mod sglang;
mod sglang_double;
mod support;
mod transfers;
mod workers;
