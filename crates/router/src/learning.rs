//! What the router learns of its clients and of its workers while it serves them.
//!
//! Each part starts from an honest prior, is bounded in memory, and depends on nothing but what it was told, so that a
//! recording learns the same again.

mod clients;
mod likeness;
mod steps;

pub(crate) use clients::Clients;
pub(crate) use likeness::Likeness;
pub(crate) use steps::{StepFit, Work};
