//! Time, ids and seeded randomness that every crate shares.
//!
//! The pure crates see no clock: they are given an [`Instant`], nanoseconds since the start of a run, so the same
//! code runs live and in the simulator. Ids are counters, so that the same seed gives the same bytes.

mod ids;
mod rng;
mod time;

pub use ids::{BootEpoch, RequestId, SessionId, WorkerId};
pub use rng::{Rng, rng_for};
pub use std::time::Duration;
pub use time::Instant;
