//! The legs that are under way: the router's name for each, the engine's, and how far it is.
//!
//! An engine's id is used once, over all workers and lives, so that nothing of an old attempt is taken for a new one.

use homing_engine::api::Owner;
use homing_kv::{BlockHash, Prompt};
use homing_router::action::{Dispatch, KvUse};
use homing_router::event::{LegId, LegUsage};
use homing_units::{BootEpoch, Instant, RequestId, SessionId};
use std::collections::BTreeMap;

/// One leg.
#[derive(Clone, Debug)]
pub(crate) struct Leg {
    pub(crate) id: LegId,
    /// Where it runs.
    pub(crate) node: usize,
    /// The worker's life that it was sent to.
    pub(crate) epoch: BootEpoch,
    pub(crate) kv: KvUse,
    /// The session that may keep its KV there.
    pub(crate) session: Option<SessionId>,
    /// Whose its request is.
    pub(crate) owner: Option<Owner>,
    pub(crate) prompt: Prompt,
    pub(crate) max_output_tokens: u32,
    /// Tokens sampled so far.
    pub(crate) sampled: u32,
    /// The last whole block of prompt and output.
    pub(crate) tip: Option<BlockHash>,
    /// It has passed the front end: the engine knows it.
    pub(crate) arrived: bool,
    /// A prefill leg's KV is ready.
    pub(crate) exported: bool,
    /// What its answer goes through.
    pub(crate) wire: Wire,
    /// Tokens of the whole answer that its client had when the leg was sent.
    pub(crate) begins_after: u32,
    /// Tokens of it that arrived.
    pub(crate) arrived_tokens: u32,
}

/// What the answer of a leg goes through on its way to the router's shell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Wire {
    /// It arrives at once.
    #[default]
    Open,
    /// The router's core hears of everything twice.
    Twice,
    /// It stands still until then.
    Held { until: Instant, pieces: Vec<Piece> },
    /// Nothing arrives any more, and nobody is told.
    Silent,
}

/// A piece of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// A prefill leg has ended well.
    Prefilled { cached_tokens: u32 },
    /// A token of a decode leg.
    Token,
    /// A decode leg has ended well.
    Ended(LegUsage),
}

impl Leg {
    /// Whether its worker does nothing for it but wait for the worker of the other leg: for KV, or for KV to be fetched.
    pub(crate) const fn waits_for_its_peer(&self) -> bool {
        match self.kv {
            KvUse::Import { .. } => self.arrived && self.sampled == 0,
            KvUse::Export => self.exported,
            KvUse::Local => false,
        }
    }
}

/// All legs, by the engine's id and by the router's.
#[derive(Clone, Debug, Default)]
pub(crate) struct Legs {
    by_engine_id: BTreeMap<RequestId, Leg>,
    by_leg_id: BTreeMap<LegId, RequestId>,
    next: u64,
}

impl Legs {
    /// A leg begins; gives the id that the engine will know it by.
    pub(crate) fn begin(
        &mut self,
        dispatch: Dispatch,
        epoch: BootEpoch,
        prompt: Prompt,
        max_output_tokens: u32,
    ) -> RequestId {
        let engine_id = RequestId(self.next);
        self.next += 1;
        let leg = Leg {
            id: dispatch.leg,
            node: dispatch.worker.0 as usize,
            epoch,
            kv: dispatch.kv,
            session: None,
            owner: None,
            tip: prompt.tip(),
            prompt,
            max_output_tokens,
            sampled: 0,
            arrived: false,
            exported: false,
            wire: Wire::Open,
            begins_after: 0,
            arrived_tokens: 0,
        };
        self.by_engine_id.insert(engine_id, leg);
        self.by_leg_id.insert(dispatch.leg, engine_id);
        engine_id
    }

    pub(crate) fn get(&self, engine_id: RequestId) -> Option<&Leg> {
        self.by_engine_id.get(&engine_id)
    }

    pub(crate) fn get_mut(&mut self, engine_id: RequestId) -> Option<&mut Leg> {
        self.by_engine_id.get_mut(&engine_id)
    }

    /// The engine's id of a leg that is under way.
    pub(crate) fn engine_id(&self, leg: LegId) -> Option<RequestId> {
        self.by_leg_id.get(&leg).copied()
    }

    pub(crate) fn remove(&mut self, engine_id: RequestId) -> Option<Leg> {
        let leg = self.by_engine_id.remove(&engine_id)?;
        self.by_leg_id.remove(&leg.id);
        Some(leg)
    }

    /// The engine's ids of the legs on a worker.
    pub(crate) fn on(&self, node: usize) -> Vec<RequestId> {
        self.by_engine_id
            .iter()
            .filter(|(_, leg)| leg.node == node)
            .map(|(engine_id, _)| *engine_id)
            .collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_engine_id.is_empty()
    }
}
