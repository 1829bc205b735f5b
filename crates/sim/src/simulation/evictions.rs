//! The lines of the eviction log: what a worker gave up, in one piece or block by block, and what for.
//!
//! An engine announces what it evicts before it says what it made room for: an import, a reload or a step. So evictions are
//! kept while its outputs are taken, and written with the next of these. A slot that is trimmed is one choice, whatever its
//! size; everywhere else leaf blocks go one by one, each of them the least recently used, until there is room for the blocks
//! that are taken at once. What a request of a session-slot engine leaves behind without a slot is dropped, not evicted.

use super::Simulation;
use homing_engine::api::{KvChange, Trimmed};
use homing_kv::Tier;
use homing_report::logs::{EvictionCause, EvictionLine, seconds};
use homing_units::RequestId;

/// Blocks of each eviction that was announced and is not written yet.
#[derive(Debug, Default)]
pub(super) struct Announced(Vec<u32>);

impl Simulation<'_> {
    /// Keeps an eviction until it is known what for.
    pub(super) fn announce_eviction(&self, index: usize, change: &KvChange, announced: &mut Announced) {
        let KvChange::Removed {
            hashes,
            tier: Tier::Gpu,
        } = change
        else {
            return;
        };
        if !self.nodes[index].has_slots() {
            let blocks = u32::try_from(hashes.len()).expect("no more blocks than the pool has");
            announced.0.push(blocks);
        }
    }

    /// Writes what was announced; `request` is the engine's id of the one that it made room for.
    pub(super) fn log_evictions(
        &mut self,
        index: usize,
        announced: &mut Announced,
        cause: EvictionCause,
        request: Option<RequestId>,
    ) {
        let request = request.and_then(|id| self.legs.get(id)).map(|leg| leg.id.request.0);
        for blocks in announced.0.drain(..) {
            self.logs.add(|| EvictionLine {
                t: seconds(self.now),
                worker: self.names[index].clone(),
                request,
                blocks,
                tokens: u64::from(blocks) * u64::from(self.trace.block_size),
                cause: Some(cause),
                decisions: blocks,
                session: None,
            });
        }
    }

    /// A slot went, with all that no other slot and no request holds of it.
    pub(super) fn log_trim(&mut self, index: usize, trimmed: Trimmed) {
        self.logs.add(|| EvictionLine {
            t: seconds(self.now),
            worker: self.names[index].clone(),
            request: None,
            blocks: trimmed.blocks,
            tokens: u64::from(trimmed.blocks) * u64::from(self.trace.block_size),
            cause: Some(EvictionCause::Trim),
            decisions: 1,
            session: Some(trimmed.session.0),
        });
    }
}
