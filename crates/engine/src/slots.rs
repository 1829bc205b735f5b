//! Session slots: what the source papers' prototype kept KV in between requests, and why it starved.
//!
//! A slot holds a reference on every block of its session's last context, so nothing of it can be evicted while it
//! stands, and all of it goes when it is trimmed. Between requests slots alone hold KV: what has no slot is dropped when its
//! request ends. A session gets its slot at the end of a request, if the pool's use stays within the capacity factor and the
//! soft cap on slots is kept. Else it is served without one, and its next turn has to bring everything again.
//!
//! A slot is idle while its session has no request in the engine, waiting ones included. Only idle slots are trimmed, the
//! least recently used first, and only when no allocatable token is left: free tokens less those set aside for the
//! growth of running requests. So a seed that needs more than what is free waits beside idle slots, and two sessions that
//! wait for each other's slots wait for ever; the driver's timeout ends that.
//!
//! Without slots (`EngineKind::Block`) nothing here does anything.

use crate::api::{EngineKind, Output, SlotConfig, Transfer, Trimmed};
use crate::engine::Engine;
use crate::sequence::Sequence;
use homing_kv::BlockId;
use homing_units::SessionId;
use std::collections::{BTreeMap, BTreeSet};

/// All slots, and which sessions have requests in the engine.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slots {
    config: Option<SlotConfig>,
    by_session: BTreeMap<SessionId, Slot>,
    /// Idle slots by last use.
    idle: BTreeSet<(u64, SessionId)>,
    /// Requests of each session that has some.
    requests: BTreeMap<SessionId, u32>,
    tick: u64,
}

/// A session's KV between requests.
#[derive(Clone, Debug)]
struct Slot {
    blocks: Vec<BlockId>,
    tokens: u32,
    last_used: u64,
}

impl Slots {
    pub fn new(kind: EngineKind) -> Self {
        let config = match kind {
            EngineKind::Block => None,
            EngineKind::SessionSlot(config) => Some(config),
        };
        Self {
            config,
            ..Self::default()
        }
    }

    /// Whether the engine has slots at all.
    pub fn are_used(&self) -> bool {
        self.config.is_some()
    }

    pub fn len(&self) -> u32 {
        u32::try_from(self.by_session.len()).expect("each slot holds a block")
    }

    /// All references that slots hold.
    pub fn blocks(&self) -> impl Iterator<Item = &BlockId> {
        self.by_session.values().flat_map(|slot| &slot.blocks)
    }

    pub fn has(&self, session: SessionId) -> bool {
        self.by_session.contains_key(&session)
    }

    /// A request has come: its session's slot is not idle any more. Whether the engine dies of it.
    pub fn enter(&mut self, sequence: &Sequence) -> bool {
        let (Some(config), Some(session)) = (self.config, sequence.session) else {
            return false;
        };
        *self.requests.entry(session).or_default() += 1;
        let Some(slot) = self.by_session.get(&session) else {
            return false;
        };
        self.idle.remove(&(slot.last_used, session));
        config.correction_crash && sequence.transfer == Transfer::None && sequence.prompt.tokens < slot.tokens
    }

    /// A request has gone: its session's slot may be idle now.
    fn leave(&mut self, session: SessionId) {
        let count = self.requests.get_mut(&session).expect("it came before it went");
        *count -= 1;
        if *count > 0 {
            return;
        }
        self.requests.remove(&session);
        self.tick += 1;
        if let Some(slot) = self.by_session.get_mut(&session) {
            slot.last_used = self.tick;
            self.idle.insert((self.tick, session));
        }
    }

    /// Whether a session may have a slot, with so many of the pool's blocks in use.
    fn admits(&self, session: SessionId, in_use: u32, capacity: u32) -> bool {
        let Some(config) = self.config else { return false };
        let others = self.by_session.len() - usize::from(self.has(session));
        let capped = config.soft_cap.is_some_and(|cap| others >= cap as usize);
        !capped && f64::from(in_use) <= config.capacity_factor * f64::from(capacity)
    }

    /// Puts KV into a session's slot; returns what was in it.
    fn put(&mut self, session: SessionId, blocks: Vec<BlockId>, tokens: u32) -> Vec<BlockId> {
        let slot = Slot {
            blocks,
            tokens,
            last_used: self.tick,
        };
        let before = self.by_session.insert(session, slot);
        before.map(|slot| slot.blocks).unwrap_or_default()
    }

    /// Takes the least recently used idle slot away.
    fn take_idle(&mut self) -> Option<(SessionId, Vec<BlockId>)> {
        let (_, session) = self.idle.pop_first()?;
        let slot = self.by_session.remove(&session).expect("an idle slot is a slot");
        Some((session, slot.blocks))
    }

    /// Checks that its parts agree.
    pub fn check_invariants(&self) {
        let idle = self.by_session.iter().filter(|(id, _)| !self.requests.contains_key(id));
        let expected: BTreeSet<_> = idle.map(|(id, slot)| (slot.last_used, *id)).collect();
        assert_eq!(self.idle, expected, "a slot is idle while its session has no request");
        assert!(
            self.config.is_some() || self.by_session.is_empty() && self.requests.is_empty(),
            "without slots there are none"
        );
    }
}

impl Engine {
    /// Whether a session has a slot here.
    #[must_use]
    pub fn has_slot(&self, session: SessionId) -> bool {
        self.slots.has(session)
    }

    /// A request goes: its KV moves into its session's slot, if it may have one.
    pub(crate) fn leave_slot(&mut self, sequence: &mut Sequence) {
        let Some(session) = sequence.session.filter(|_| self.slots.are_used()) else {
            return;
        };
        let pool = self.cache.pool();
        if sequence.answered && self.slots.admits(session, pool.in_use(), pool.capacity()) {
            let tokens = sequence.named * self.config.block_size;
            let partial = sequence.table.split_off(sequence.named as usize);
            let whole = std::mem::take(&mut sequence.table);
            let before = self.slots.put(session, whole, tokens);
            self.release(&before);
            self.release(&partial);
            sequence.drop_kv();
        }
        self.slots.leave(session);
    }

    /// Blocks that seeds must leave for the growth of requests that run.
    pub(crate) fn slot_reserve_blocks(&self) -> u64 {
        let Some(config) = self.slots.config else { return 0 };
        let blocks = config.reserve_tokens_per_running.div_ceil(self.config.block_size);
        (self.running.len() + self.importing.len()) as u64 * u64::from(blocks)
    }

    /// While somebody waits and no allocatable token is left, idle slots go.
    pub(crate) fn trim_for_those_who_wait(&mut self) {
        let waits = self.waiting.len() + self.offered.len() > 0;
        while self.slots.are_used() && waits && u64::from(self.cache.available()) <= self.slot_reserve_blocks() {
            if !self.trim_idle_slot() {
                return;
            }
        }
    }

    /// Takes the least recently used idle slot away, with all of its KV. Whether there was one.
    pub(crate) fn trim_idle_slot(&mut self) -> bool {
        let Some((session, held)) = self.slots.take_idle() else {
            return false;
        };
        let before = self.cache.pool().free();
        self.release(&held);
        let blocks = self.cache.pool().free() - before;
        self.cache.evictions += 1;
        self.cache.evicted_blocks += u64::from(blocks);
        self.outputs.push_back(Output::Trimmed(Trimmed { session, blocks }));
        true
    }
}
