//! What the engine has to do and what it has done, kept up to date so that a snapshot costs nothing.

use crate::api::Snapshot;
use crate::engine::Engine;
use crate::sequence::Sequence;
use homing_units::Duration;

/// The pause that each request which waits for room adds to the one that is asked for.
const PAUSE_PER_STARVED: Duration = Duration::from_millis(20);
/// The longest pause that is asked for: then the worker is to be asked again.
const PAUSE_MAX: Duration = Duration::from_secs(1);

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

/// What a worker that is asked for room answers.
impl Snapshot {
    /// Tokens of the pool that hold nothing, or what nobody uses. `block_size` is the engine's, in tokens.
    #[must_use]
    pub fn free_tokens(&self, block_size: u32) -> u64 {
        (u64::from(self.blocks_free) + u64::from(self.blocks_evictable)) * u64::from(block_size)
    }

    /// What is left of them once the prompts that were accepted have their places. A prompt that waits takes all of its
    /// length, whether it is cached or not: what is cached of it counts as free until then.
    #[must_use]
    pub fn spare_tokens(&self, block_size: u32) -> u64 {
        self.free_tokens(block_size).saturating_sub(self.prefill_tokens_pending)
    }

    /// How long new work had better stay away; zero while what was accepted has room. Requests that wait for a place in the
    /// batch alone ask for no pause: that is a matter of time and not of room.
    #[must_use]
    pub fn room_pause(&self, block_size: u32) -> Duration {
        let starved = self.retracted + self.offered;
        let is_full = starved > 0 || (self.waiting > 0 && self.spare_tokens(block_size) == 0);
        if !is_full {
            return Duration::ZERO;
        }
        PAUSE_PER_STARVED
            .saturating_mul(self.waiting.max(starved).max(1))
            .min(PAUSE_MAX)
    }
}

fn count(length: usize) -> u32 {
    u32::try_from(length).expect("every map of the engine is bounded by a u32 limit")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_asked_for_while_there_is_no_room_for_what_was_accepted() {
        let check = |waiting, offered, blocks_free, pending, expected_ms| {
            let snapshot = Snapshot {
                waiting,
                offered,
                blocks_free,
                blocks_evictable: 10,
                prefill_tokens_pending: pending,
                ..Snapshot::default()
            };
            let pause = snapshot.room_pause(16);
            assert_eq!(pause, Duration::from_millis(expected_ms), "{snapshot:?}");
        };
        check(0, 0, 0, 0, 0);
        // The batch is full, the pool is not.
        check(30, 0, 90, 1_599, 0);
        check(30, 0, 90, 1_600, 600);
        // A prompt under way that leaves no room keeps nobody waiting yet.
        check(0, 0, 90, 1_600, 0);
        check(2, 2, 90, 0, 40);
        check(1_000, 0, 0, 160, 1_000);
    }
}
