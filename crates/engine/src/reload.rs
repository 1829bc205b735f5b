//! KV that comes back from host memory: like an import, but from here.
//!
//! A request whose prefix goes on in the host tier behind what the pool has cached gets blocks for all of that at once and
//! waits, with a place, until the driver has copied it; it is never preempted meanwhile. It may start beside a step. One
//! that also imports reloads first and pulls only what is in neither tier; its blocks for both are taken together, so
//! no request holds half of what it needs. A reload is always taken: what it brings back comes more than four times faster
//! than it is computed, on every accelerator that there is a profile for.
//!
//! The host keeps its copy, and keeps it for certain until the driver's answer. The blocks of a request that is given up
//! meanwhile are fenced until then.
//!
//! It copies nothing: the driver does, and PCIe time is the driver's.

use crate::api::{Output, Reload, Transfer};
use crate::engine::Engine;
use crate::sequence::Phase;
use homing_kv::BlockHash;
use homing_units::RequestId;

impl Engine {
    /// Starts the reloads of waiting requests that there is room for, oldest first, up to one that has nothing to reload.
    pub(crate) fn start_reloads(&mut self) {
        if self.cache.host().is_empty() {
            return;
        }
        while self.place_left() && !self.waiting.blocked {
            let Some(id) = self.waiting.head() else { return };
            let sequence = &self.sequences[&id];
            let hashes = sequence.reusable_hashes(self.config.block_size);
            let cached = self.cache.pool().match_prefix(&hashes);
            if self.cache.host().match_run(&hashes[cached..]) == 0 {
                return;
            }
            if !self.admit(id) {
                self.waiting.blocked = true;
            }
        }
    }

    /// The names of the blocks in host memory that go on where a request's KV ends.
    pub(crate) fn host_continuation(&self, id: RequestId) -> Vec<BlockHash> {
        if self.cache.host().is_empty() {
            return Vec::new();
        }
        let sequence = &self.sequences[&id];
        let hashes = sequence.reusable_hashes(self.config.block_size);
        let missing = &hashes[sequence.table.len()..];
        missing[..self.cache.host().match_run(missing)].to_vec()
    }

    /// Orders a reload into the blocks that follow a request's KV in its table. The host keeps `hashes` already.
    pub(crate) fn order_reload(&mut self, id: RequestId, hashes: Vec<BlockHash>) {
        let block_size = self.config.block_size;
        let count = u32::try_from(hashes.len()).expect("no more than the pool has blocks");
        let (first_block, blocks) = self.update(id, |sequence| {
            let first_block = sequence.computed / block_size;
            let end_tokens = (first_block + count) * block_size;
            sequence.phase = Phase::Reloading {
                first_block,
                end_tokens,
            };
            let end = (first_block + count) as usize;
            (first_block, sequence.table[first_block as usize..end].to_vec())
        });
        self.reloading.insert(id);
        self.reloads.insert(id, hashes.clone());
        self.outputs.push_back(Output::Reload(Reload {
            id,
            first_block,
            blocks,
            hashes,
        }));
    }

    /// The driver writes into a reload's blocks no longer.
    pub(crate) fn reload_done(&mut self, id: RequestId) {
        let Some(hashes) = self.reloads.remove(&id) else { return };
        let owner = self.sequences.get(&id).and_then(|sequence| sequence.owner);
        self.cache.unlock_host(&hashes, owner);
        if let Some(blocks) = self.fenced.remove(&id) {
            self.release(&blocks, owner);
            return;
        }
        self.leave_phase(id);
        let found = self.update(id, |sequence| {
            if let Phase::Reloading { end_tokens, .. } = sequence.phase {
                sequence.computed = end_tokens;
            }
            let found = sequence
                .computed
                .min(sequence.prompt.tokens)
                .saturating_sub(sequence.counted);
            sequence.counted += found;
            sequence.usage.host_cached_tokens += found;
            found
        });
        self.totals.host_hit_tokens += u64::from(found);
        self.commit(id);
        match self.sequences[&id].transfer {
            Transfer::None | Transfer::Export => self.enter_running(id),
            Transfer::Import { .. } => self.order_import(id),
        }
    }
}
