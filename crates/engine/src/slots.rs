//! Session slots: what the source papers' prototype kept KV in between requests, and why it starved.
//!
//! A slot holds a reference on every block of its session's last context, so nothing of it can be evicted while it
//! stands, and all of it goes when it is trimmed. Between requests slots alone hold KV: what has no slot is dropped when its
//! request ends. Whether a session may open a slot is decided when its request arrives (the papers' "admission no-space"): only
//! if the pool's use with the whole prompt stays within the capacity factor, nothing being trimmed for it, and the soft cap
//! on slots is kept. Else it is served without one, and its next turn has to bring everything again. So a long session
//! finds no opening in a full pool that a short one would fit into.
//!
//! A slot is idle while no request of its session uses it. A seed does not: it brings everything anew. Only idle slots are
//! trimmed, the least recently used first, and only when a seed does not fit ([`TrimRule`] has the papers' two readings).
//!
//! Seeds stand in a queue of their own: they hold no append up, and no append holds them up. A seed takes nothing from the
//! tree, so for a while it holds its whole prompt anew; copies of what is cached go back when it has arrived.
//!
//! An assumption, where the papers are silent: what runs, or ran and was preempted, is not left stuck for ever. When
//! nothing can be computed and no KV is on its way, the least recently used slot goes for it, in need one that is not idle.
//!
//! Without slots (`EngineKind::Block`) nothing here does anything.

use crate::api::{Crash, EngineKind, Output, SlotConfig, Submit, Transfer, TrimRule, Trimmed};
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
    /// Requests of each session that use its slot.
    requests: BTreeMap<SessionId, u32>,
    tick: u64,
    /// The sum over all slots.
    tokens: u64,
    /// Slots that were trimmed, since the start.
    pub trims: u64,
    /// Blocks that trimming made free, since the start.
    pub trimmed_blocks: u64,
}

/// A session's KV between requests.
#[derive(Clone, Debug)]
struct Slot {
    blocks: Vec<BlockId>,
    tokens: u32,
    last_used: u64,
}

impl Slot {
    /// Whether it holds more than the prompt of a request that would go on from it.
    fn is_beyond(&self, transfer: Transfer, prompt_tokens: u32) -> bool {
        transfer == Transfer::None && prompt_tokens < self.tokens
    }
}

impl Slots {
    pub fn new(kind: EngineKind) -> Self {
        let config = match kind {
            EngineKind::Block | EngineKind::Vllm => None,
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

    pub fn idle(&self) -> u32 {
        u32::try_from(self.idle.len()).expect("each slot holds a block")
    }

    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// All references that slots hold.
    pub fn blocks(&self) -> impl Iterator<Item = &BlockId> {
        self.by_session.values().flat_map(|slot| &slot.blocks)
    }

    pub fn has(&self, session: SessionId) -> bool {
        self.by_session.contains_key(&session)
    }

    /// A request of a session has come that uses its slot: that is not idle any more. What the engine dies of, if it does.
    fn enter(&mut self, session: SessionId, sequence: &Sequence) -> Option<Crash> {
        let config = self.config?;
        *self.requests.entry(session).or_default() += 1;
        let slot = self.by_session.get(&session)?;
        self.idle.remove(&(slot.last_used, session));
        let fill_tokens = sequence.prompt.tokens;
        let crashes = config.correction_crash && slot.is_beyond(sequence.transfer, fill_tokens);
        crashes.then_some(Crash::Correction {
            fill_tokens,
            prefix_tokens: slot.tokens,
        })
    }

    /// A request that used its session's slot has gone.
    fn leave(&mut self, session: SessionId) {
        let count = self.requests.get_mut(&session).expect("it came before it went");
        *count -= 1;
        if *count == 0 {
            self.requests.remove(&session);
        }
    }

    /// A session's slot was used just now; it is idle if no request uses it.
    fn touch(&mut self, session: SessionId) {
        self.tick += 1;
        let Some(slot) = self.by_session.get_mut(&session) else {
            return;
        };
        self.idle.remove(&(slot.last_used, session));
        slot.last_used = self.tick;
        if !self.requests.contains_key(&session) {
            self.idle.insert((self.tick, session));
        }
    }

    /// Whether a session without a slot may open one, with so many of the pool's blocks in use then.
    fn admits(&self, in_use: u32, capacity: u32) -> bool {
        let Some(config) = self.config else { return false };
        let capped = config.soft_cap.is_some_and(|cap| self.by_session.len() >= cap as usize);
        !capped && f64::from(in_use) <= config.capacity_factor * f64::from(capacity)
    }

    /// Blocks that a session's slot holds.
    fn blocks_of(&self, session: SessionId) -> u32 {
        let slot = self.by_session.get(&session);
        slot.map_or(0, |slot| {
            u32::try_from(slot.blocks.len()).expect("no more than the pool has")
        })
    }

    /// Puts KV into a session's slot; returns what was in it.
    fn put(&mut self, session: SessionId, blocks: Vec<BlockId>, tokens: u32) -> Vec<BlockId> {
        let slot = Slot {
            blocks,
            tokens,
            last_used: self.tick,
        };
        self.tokens += u64::from(tokens);
        let Some(before) = self.by_session.insert(session, slot) else {
            return Vec::new();
        };
        self.idle.remove(&(before.last_used, session));
        self.tokens -= u64::from(before.tokens);
        before.blocks
    }

    /// The idle slot that was used least recently.
    fn next_idle(&self) -> Option<SessionId> {
        self.idle.first().map(|(_, session)| *session)
    }

    /// The slot that was used least recently, idle or not.
    fn next_of_all(&self) -> Option<SessionId> {
        let slots = self.by_session.iter();
        slots
            .min_by_key(|(_, slot)| slot.last_used)
            .map(|(session, _)| *session)
    }

    /// Takes a slot away.
    fn take(&mut self, session: SessionId) -> Option<Vec<BlockId>> {
        let slot = self.by_session.remove(&session)?;
        self.idle.remove(&(slot.last_used, session));
        self.tokens -= u64::from(slot.tokens);
        Some(slot.blocks)
    }

    /// Checks that its parts agree.
    pub fn check_invariants(&self) {
        let idle = self.by_session.iter().filter(|(id, _)| !self.requests.contains_key(id));
        let expected: BTreeSet<_> = idle.map(|(id, slot)| (slot.last_used, *id)).collect();
        assert_eq!(self.idle, expected, "a slot is idle while no request uses it");
        let tokens: u64 = self.by_session.values().map(|slot| u64::from(slot.tokens)).sum();
        assert_eq!(self.tokens, tokens, "the slots' tokens add up");
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

    /// Whether a request is turned away because its prompt is shorter than what its session's slot holds.
    pub(crate) fn refuses_correction(&self, submit: &Submit) -> bool {
        let refuses = self.slots.config.is_some_and(|config| config.correction_refused);
        let slot = submit.session.and_then(|session| self.slots.by_session.get(&session));
        refuses && slot.is_some_and(|slot| slot.is_beyond(submit.transfer, submit.prompt.tokens))
    }

    /// A request comes. What the engine dies of, if it does.
    pub(crate) fn enter_slot(&mut self, sequence: &mut Sequence) -> Option<Crash> {
        let session = sequence.session.filter(|_| self.slots.are_used())?;
        let pool = self.cache.pool();
        // A new context takes the place of the old one.
        let others = pool.in_use().saturating_sub(self.slots.blocks_of(session));
        let needed = sequence.prompt.tokens.div_ceil(self.config.block_size);
        sequence.opens_slot = self.slots.admits(others.saturating_add(needed), pool.capacity());
        sequence.uses_slot = !matches!(sequence.transfer, Transfer::Import { .. });
        if sequence.uses_slot {
            self.slots.enter(session, sequence)
        } else {
            None
        }
    }

    /// A request goes: its KV moves into its session's slot, if it may have one.
    pub(crate) fn leave_slot(&mut self, sequence: &mut Sequence) {
        let Some(session) = sequence.session.filter(|_| self.slots.are_used()) else {
            return;
        };
        // An exported prompt's blocks are held for its puller and no longer the request's own.
        let keeps = sequence.answered && sequence.transfer != Transfer::Export;
        if keeps && (sequence.opens_slot || self.slots.has(session)) {
            let tokens = sequence.named * self.config.block_size;
            let partial = sequence.table.split_off(sequence.named as usize);
            let whole = std::mem::take(&mut sequence.table);
            let before = self.slots.put(session, whole, tokens);
            self.release(&before, None);
            self.release(&partial, None);
            sequence.drop_kv();
        }
        if sequence.uses_slot {
            self.slots.leave(session);
        }
        self.slots.touch(session);
    }

    /// Blocks that seeds must leave for the growth of requests that run.
    pub(crate) fn slot_reserve_blocks(&self) -> u64 {
        let Some(config) = self.slots.config else { return 0 };
        let blocks = config.reserve_tokens_per_running.div_ceil(self.config.block_size);
        (self.running.len() + self.importing.len()) as u64 * u64::from(blocks)
    }

    /// Whether running requests may want all that is free.
    pub(crate) fn nothing_allocatable(&self) -> bool {
        u64::from(self.cache.available()) <= self.slot_reserve_blocks()
    }

    /// While somebody waits and no allocatable token is left, idle slots go.
    pub(crate) fn trim_for_those_who_wait(&mut self) {
        let waits = self.waiting.len() + self.offered.len() > 0;
        while self.slots.are_used() && waits && self.nothing_allocatable() && self.trim_idle_slot() {}
    }

    /// Nothing can be computed and no KV is on its way, yet somebody runs or ran: a slot goes, an idle one if there is one.
    /// Whether one did.
    pub(crate) fn trim_for_those_who_are_stuck(&mut self) -> bool {
        let runs = !self.running.is_empty() || self.waiting.retracted() > 0;
        if !runs || !self.importing.is_empty() {
            return false;
        }
        let session = self.slots.next_idle().or_else(|| self.slots.next_of_all());
        session.is_some_and(|session| self.trim(session))
    }

    /// Blocks are wanted that are not to be had: makes room, where the rule says so. Whether there is more room now.
    pub(crate) fn trim_for_lack_of_room(&mut self) -> bool {
        let rule = self.slots.config.map(|config| config.trim);
        (rule == Some(TrimRule::NoRoom) || self.nothing_allocatable()) && self.trim_idle_slot()
    }

    /// Takes the least recently used idle slot away, with all of its KV. Whether there was one.
    pub(crate) fn trim_idle_slot(&mut self) -> bool {
        self.slots.next_idle().is_some_and(|session| self.trim(session))
    }

    /// Takes all idle slots away, as no eviction.
    pub(crate) fn drop_idle_slots(&mut self) {
        while let Some(session) = self.slots.next_idle() {
            let held = self.slots.take(session).unwrap_or_default();
            self.cache.release(&held, None);
        }
        self.unblock();
    }

    fn trim(&mut self, session: SessionId) -> bool {
        let Some(held) = self.slots.take(session) else {
            return false;
        };
        let before = self.cache.pool().free();
        self.release(&held, None);
        let blocks = self.cache.pool().free() - before;
        self.slots.trims += 1;
        self.slots.trimmed_blocks += u64::from(blocks);
        self.cache.evictions += 1;
        self.cache.evicted_blocks += u64::from(blocks);
        self.outputs.push_back(Output::Trimmed(Trimmed { session, blocks }));
        true
    }
}
