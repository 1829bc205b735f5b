//! Requests that wait, in order of arrival, with the blocks that they will need together.
//!
//! A preempted request comes back under its old arrival and so stands before everything that waited behind it. The queue
//! remembers that its head did not fit, so that a full pool is not searched again at every step, only after a change.

use crate::sequence::Sequence;
use homing_units::RequestId;
use std::collections::BTreeMap;

/// Waiting requests. Bounded by the engine: `max_waiting` new ones and `max_running` preempted ones.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue {
    entries: BTreeMap<u64, RequestId>,
    demand_blocks: u64,
    /// Those that ran before.
    retracted: u32,
    /// The head did not fit, and nothing has changed since.
    pub blocked: bool,
}

impl Queue {
    /// The oldest request.
    pub fn head(&self) -> Option<RequestId> {
        self.entries.first_key_value().map(|(_, id)| *id)
    }

    /// When the oldest request arrived.
    pub fn oldest(&self) -> Option<u64> {
        self.entries.first_key_value().map(|(arrival, _)| *arrival)
    }

    pub fn len(&self) -> u32 {
        u32::try_from(self.entries.len()).expect("a queue is bounded by u32 limits")
    }

    /// Blocks for all tokens of all waiting requests, were none of them cached.
    pub fn demand_blocks(&self) -> u64 {
        self.demand_blocks
    }

    /// Requests that ran before and lost their blocks.
    pub fn retracted(&self) -> u32 {
        self.retracted
    }

    pub fn insert(&mut self, sequence: &Sequence, block_size: u32) {
        self.entries.insert(sequence.arrival, sequence.id);
        self.demand_blocks += demand(sequence, block_size);
        self.retracted += u32::from(sequence.usage.preemptions > 0);
        self.blocked = false;
    }

    pub fn remove(&mut self, sequence: &Sequence, block_size: u32) {
        let removed = self.entries.remove(&sequence.arrival);
        assert_eq!(removed, Some(sequence.id), "only a waiting request leaves the queue");
        self.demand_blocks -= demand(sequence, block_size);
        self.retracted -= u32::from(sequence.usage.preemptions > 0);
        self.blocked = false;
    }

    pub fn ids(&self) -> impl Iterator<Item = RequestId> {
        self.entries.values().copied()
    }
}

/// Blocks for the tokens that a request has so far; constant while it waits.
fn demand(sequence: &Sequence, block_size: u32) -> u64 {
    u64::from(sequence.tokens().div_ceil(block_size))
}
