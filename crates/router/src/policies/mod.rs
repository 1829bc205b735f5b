//! Policies: who serves a turn. Choosing is pure: a board and a turn in, a choice and its reasons out; booking is the
//! router's. One policy is one file, and only the factory below knows their names.

mod board;
mod dp_cache_aware;
mod habits;
mod homing;
mod peers;
mod round_robin;
mod spec;
#[cfg(test)]
mod testing;

pub use board::{Board, Choice, Considered, LinkView, Plan, TurnView, WorkerView};
pub use dp_cache_aware::{DpCacheAware, DpCacheAwareConfig};
pub use habits::{Admission, Habits};
pub use homing::{Homing, HomingConfig};
pub use round_robin::RoundRobin;
pub use spec::{PolicyError, PolicySpec};

use spec::Parameters;
use std::fmt;

/// A way to decide.
pub trait Policy: fmt::Debug + Send {
    /// Chooses a plan for a turn, or none where the turn is to wait. A policy may remember what it chose before, but the
    /// same boards and turns must give the same choices.
    fn choose(&mut self, board: &Board, turn: &TurnView) -> Choice;

    /// How its system deals with what its scores do not say; asked once.
    fn habits(&self) -> Habits {
        Habits::default()
    }
}

/// Makes a policy from its parameters.
type Make = fn(&mut Parameters<'_>) -> Result<Box<dyn Policy>, PolicyError>;

/// Our own policies and those of the source papers, by name.
const POLICIES: [(&str, Make); 3] = [
    ("homing", |parameters| {
        Ok(Box::new(Homing::new(HomingConfig::parse(parameters)?)))
    }),
    ("round-robin", |_| Ok(Box::new(RoundRobin::default()))),
    ("dp-cache-aware", |parameters| {
        Ok(Box::new(DpCacheAware::new(DpCacheAwareConfig::parse(parameters)?)))
    }),
];

/// The names of all policies.
pub fn names() -> impl Iterator<Item = &'static str> {
    all().map(|(name, _)| name)
}

fn all() -> impl Iterator<Item = (&'static str, Make)> {
    POLICIES.into_iter().chain(peers::POLICIES)
}
