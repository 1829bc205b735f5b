//! What the engine has to do and what it has done, kept up to date so that a snapshot costs nothing.

use crate::api::Snapshot;
use crate::engine::Engine;
use crate::sequence::Sequence;

/// Work in hand, summed over the requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    pub prefill_tokens_pending: u64,
    pub decode_context_tokens: u64,
}

impl Load {
    /// What one request adds.
    pub fn of(sequence: &Sequence) -> Self {
        let context = if sequence.decoding() { sequence.tokens() } else { 0 };
        Self {
            prefill_tokens_pending: u64::from(sequence.prefill_pending()),
            decode_context_tokens: u64::from(context),
        }
    }

    pub fn add(&mut self, other: Self) {
        self.prefill_tokens_pending += other.prefill_tokens_pending;
        self.decode_context_tokens += other.decode_context_tokens;
    }

    pub fn subtract(&mut self, other: Self) {
        self.prefill_tokens_pending -= other.prefill_tokens_pending;
        self.decode_context_tokens -= other.decode_context_tokens;
    }
}

/// Work done since the start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub preemptions: u64,
    pub cache_query_tokens: u64,
    pub cache_hit_tokens: u64,
    pub host_hit_tokens: u64,
    pub imported_tokens: u64,
    pub computed_tokens: u64,
    pub output_tokens: u64,
}

impl Engine {
    /// The load now. Costs the same whatever the number of requests and the length of their contexts.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let pool = self.cache.pool();
        Snapshot {
            running: count(self.running.len()),
            waiting: self.waiting.len() + self.offered.len(),
            importing: count(self.importing.len()),
            exporting: count(self.exports.len()),
            blocks_total: pool.capacity(),
            blocks_free: pool.free(),
            blocks_evictable: pool.evictable(),
            prefill_tokens_pending: self.load.prefill_tokens_pending,
            decode_context_tokens: self.load.decode_context_tokens,
            evicted_blocks: self.cache.evicted_blocks,
            evictions: self.cache.evictions,
            preemptions: self.totals.preemptions,
            cache_query_tokens: self.totals.cache_query_tokens,
            cache_hit_tokens: self.totals.cache_hit_tokens,
            imported_tokens: self.totals.imported_tokens,
            computed_tokens: self.totals.computed_tokens,
            output_tokens: self.totals.output_tokens,
            slots: self.slots.len(),
            slots_idle: self.slots.idle(),
            slot_tokens: self.slots.tokens(),
            trims: self.slots.trims,
            trimmed_tokens: self.slots.trimmed_blocks * u64::from(self.config.block_size),
            retracted: self.waiting.retracted(),
            offered: self.offered.len(),
            reloading: count(self.reloading.len()),
            host_blocks_total: self.cache.host().capacity(),
            host_blocks_used: self.cache.host().len(),
            host_hit_tokens: self.totals.host_hit_tokens,
        }
    }
}

fn count(length: usize) -> u32 {
    u32::try_from(length).expect("every map of the engine is bounded by a u32 limit")
}
