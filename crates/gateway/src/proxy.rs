//! A client's request from its bytes to its end: read, planned by the core, sent to engines, answered.

mod abort;
mod agents;
pub(crate) mod client;
pub(crate) mod dialect;
pub(crate) mod errands;
mod exactness;
pub(crate) mod flight;
pub(crate) mod intake;
mod leg;
pub(crate) mod legs;
mod native;
mod pair;
pub(crate) mod release;
mod renewal;
pub(crate) mod session;
mod transcript;
mod voice;
mod whole;

pub(crate) use agents::Agent;
