//! Policies: who serves a turn. Choosing is pure: a board and a turn in, a choice and its reasons out; booking is the
//! router's. One policy is one file, and only the factory below knows their names.

mod board;
mod contention;
mod dp_cache_aware;
mod elastic;
mod habits;
mod homing;
mod kv_aware;
mod lazy_migration;
mod least_loaded;
mod linear;
mod pd_static;
mod peers;
mod round_robin;
mod spec;
mod sticky;
#[cfg(test)]
mod testing;
mod unified_v2;
mod unified_v3;

pub use board::{Board, Choice, Considered, LinkView, Plan, TurnView, WorkerView};
pub use contention::{Contention, ContentionConfig};
pub use dp_cache_aware::{DpCacheAware, DpCacheAwareConfig};
pub use elastic::{Gate, Ties};
pub use habits::{Admission, ErrandKinds, Habits, Order};
pub use homing::{Homing, HomingConfig};
pub use kv_aware::{KvAware, KvAwareConfig};
pub use lazy_migration::{LazyMigration, LazyMigrationConfig, Trigger};
pub use least_loaded::LeastLoaded;
pub use linear::{Linear, LinearConfig};
pub use pd_static::{PdStatic, PdStaticConfig};
pub use round_robin::RoundRobin;
pub use spec::{PolicyError, PolicySpec};
pub use sticky::{Sticky, StickyConfig};
pub use unified_v2::{UnifiedV2, UnifiedV2Config};
pub use unified_v3::{DecodeTokens, UnifiedV3, UnifiedV3Config};

use homing_units::WorkerId;
use spec::Parameters;
use std::fmt;

/// A way to decide.
pub trait Policy: fmt::Debug + Send {
    /// Chooses a plan for a turn, or none where the turn is to wait. A policy may remember what it chose before, but the
    /// same boards and turns must give the same choices.
    fn choose(&mut self, board: &Board, turn: &TurnView) -> Choice;

    /// Where a session's KV should be carried in the gap before its next turn, which is taken to come as `next` says. The board
    /// shows nothing that is in flight: who is busy now may not be then.
    fn better_home(&self, board: &Board, next: &TurnView) -> Option<WorkerId> {
        let _ = (board, next);
        None
    }

    /// How its system deals with what its scores do not say; asked once.
    fn habits(&self) -> Habits {
        Habits::default()
    }
}

/// Makes a policy from its parameters.
type Make = fn(&mut Parameters<'_>) -> Result<Box<dyn Policy>, PolicyError>;

/// Our own policies and those of the source papers, by name.
const POLICIES: [(&str, Make); 12] = [
    ("homing", |parameters| {
        Ok(Box::new(Homing::new(HomingConfig::parse(parameters)?)))
    }),
    ("round-robin", |_| Ok(Box::new(RoundRobin::default()))),
    ("least-loaded", |_| Ok(Box::new(LeastLoaded))),
    ("dp-cache-aware", |parameters| {
        Ok(Box::new(DpCacheAware::new(DpCacheAwareConfig::parse(parameters)?)))
    }),
    ("pd-static", |parameters| {
        Ok(Box::new(PdStatic::new(PdStaticConfig::parse(parameters)?)))
    }),
    ("sticky", |parameters| {
        Ok(Box::new(Sticky::new(StickyConfig::parse(parameters)?)))
    }),
    ("kv-aware", |parameters| {
        Ok(Box::new(KvAware::new(KvAwareConfig::parse(parameters)?)))
    }),
    ("linear", |parameters| {
        Ok(Box::new(Linear::new(LinearConfig::parse(parameters)?)))
    }),
    ("unified-v2", |parameters| {
        Ok(Box::new(UnifiedV2::new(UnifiedV2Config::parse(parameters)?)))
    }),
    ("unified-v3", |parameters| {
        Ok(Box::new(UnifiedV3::new(UnifiedV3Config::parse(parameters)?)))
    }),
    ("contention", |parameters| {
        Ok(Box::new(Contention::new(ContentionConfig::parse(parameters)?)))
    }),
    ("lazy-migration", |parameters| {
        Ok(Box::new(LazyMigration::new(LazyMigrationConfig::parse(parameters)?)))
    }),
];

/// The names of all policies.
pub fn names() -> impl Iterator<Item = &'static str> {
    all().map(|(name, _)| name)
}

fn all() -> impl Iterator<Item = (&'static str, Make)> {
    POLICIES.into_iter().chain(peers::POLICIES)
}
