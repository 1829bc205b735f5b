//! KV that goes out and comes in: what is held for whom, until when, and who may write where.
//!
//! Out: the prompt's blocks of an ended request are held until the puller acknowledges, the lease ends, or the request is
//! aborted. A lease is short, because whoever asked for it may have died; who lives renews it as long as the puller is late for
//! a reason (it waits for a place or for room), a bounded number of times. In: a request takes what is cached here and all blocks for the rest of the offer at once, so two imports
//! cannot each hold half of what both need; while the KV is on its way the request holds a place and is never preempted.
//! An import that is given up leaves its blocks behind a fence: the driver may still write into them, so nobody gets them
//! before its answer comes.
//!
//! It moves no bytes and knows no peer: the driver does.

use crate::api::{EngineKind, Export, ExportEnd, FinishReason, Import, ImportError, Output, Owner, Transfer};
use crate::engine::Engine;
use crate::sequence::Phase;
use homing_kv::{BlockHash, BlockId};
use homing_units::{Instant, RequestId};
use std::sync::Arc;

/// KV held for a puller.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub blocks: Vec<BlockId>,
    /// Names of its whole blocks.
    pub hashes: Arc<[BlockHash]>,
    pub owner: Option<Owner>,
    pub lease_ends: Instant,
    /// How often its lease has begun anew.
    pub renewals: u32,
}

impl Engine {
    /// When the lease of an export ends; `None` where none is held.
    #[must_use]
    pub fn lease_ends(&self, id: RequestId) -> Option<Instant> {
        self.exports.get(&id).map(|held| held.lease_ends)
    }

    /// The lease begins anew, unless it did so too often: who never comes must not hold the pool for ever.
    pub(crate) fn renew_export(&mut self, id: RequestId) {
        // What has ended by now must not live again.
        self.expire();
        let (now, config) = (self.now, &self.config);
        let Some(held) = self.exports.get_mut(&id) else { return };
        if held.renewals >= config.export_renewals {
            return;
        }
        self.deadlines.remove(&(held.lease_ends, id));
        held.renewals += 1;
        held.lease_ends = now + config.export_lease;
        self.deadlines.insert((held.lease_ends, id));
    }

    /// Sets the blocks of an ending request's prompt aside for a puller.
    pub(crate) fn hold(&mut self, id: RequestId) -> Export {
        let lease_ends = self.now + self.config.export_lease;
        let sequence = self.sequences.get_mut(&id).expect("an ending request is known");
        let tokens = sequence.prompt.tokens;
        let hashes = Arc::clone(&sequence.prompt.blocks);
        let owner = sequence.owner;
        let beyond = sequence
            .table
            .split_off(tokens.div_ceil(self.config.block_size) as usize);
        let blocks = std::mem::take(&mut sequence.table);
        // What the output filled alone is not part of the offer.
        self.release(&beyond, owner);
        let held = Held {
            blocks: blocks.clone(),
            hashes,
            owner,
            lease_ends,
            renewals: 0,
        };
        self.exports.insert(id, held);
        self.deadlines.insert((lease_ends, id));
        Export {
            id,
            blocks,
            tokens,
            lease_ends,
        }
    }

    /// Releases the blocks held for a puller, if there are any.
    pub(crate) fn end_export(&mut self, id: RequestId, reason: ExportEnd) {
        let Some(held) = self.exports.remove(&id) else { return };
        self.deadlines.remove(&(held.lease_ends, id));
        self.release(&held.blocks, held.owner);
        self.outputs.push_back(Output::ExportEnded { id, reason });
    }

    /// The puller is the prompt's home now: what is left here goes first. vLLM has no such call.
    pub(crate) fn release_exported(&mut self, id: RequestId) {
        let Some(held) = self.exports.get(&id) else { return };
        let hashes = Arc::clone(&held.hashes);
        self.end_export(id, ExportEnd::Acked);
        match self.config.kind {
            EngineKind::Block => self.cache.demote(&hashes),
            // What nobody holds is dropped there anyway.
            EngineKind::SessionSlot(_) | EngineKind::Vllm => {}
        }
    }

    /// Orders the imports that there is room for, oldest first.
    pub(crate) fn start_imports(&mut self) {
        while self.place_left() && !self.offered.blocked {
            let Some(id) = self.offered.head() else { return };
            if !self.start_import(id) && !self.trim_for_lack_of_room() {
                self.offered.blocked = true;
            }
        }
    }

    fn start_import(&mut self, id: RequestId) -> bool {
        let sequence = &self.sequences[&id];
        let older_waiting = self.waiting.oldest().is_some_and(|oldest| oldest < sequence.arrival);
        let reserved = if self.slots.are_used() {
            self.slot_reserve_blocks()
        } else if older_waiting {
            self.waiting.demand_blocks()
        } else {
            0
        };
        let wanted = sequence.wanted_import().div_ceil(self.config.block_size);
        let Some(prefix) = self.lock_prefix(id, reserved) else {
            return false;
        };
        self.leave_phase(id);
        self.take_prefix(id, prefix);
        let on_host = self.host_continuation(id);
        let table = self.sequences[&id].table.len();
        let count = on_host.len().max((wanted as usize).saturating_sub(table));
        self.take_blocks_for_fetch(id, count, &on_host);
        if on_host.is_empty() {
            self.order_import(id);
        } else {
            self.order_reload(id, on_host);
        }
        true
    }

    /// Orders to pull into the blocks that follow a request's KV in its table. Without any it goes on at once.
    pub(crate) fn order_import(&mut self, id: RequestId) {
        let deadline = self.now + self.config.import_timeout;
        let sequence = &self.sequences[&id];
        let first_block = sequence.computed / self.config.block_size;
        let blocks = sequence.table[first_block as usize..].to_vec();
        if blocks.is_empty() {
            self.update(id, |sequence| sequence.transfer = Transfer::None);
            self.enter_running(id);
        } else {
            self.update(id, |sequence| {
                sequence.phase = Phase::Importing { first_block, deadline }
            });
            self.importing.insert(id);
            self.deadlines.insert((deadline, id));
        }
        self.outputs.push_back(Output::Import(Import {
            id,
            first_block,
            blocks,
            deadline,
        }));
    }

    /// The driver writes into an import's blocks no longer.
    pub(crate) fn import_done(&mut self, id: RequestId, outcome: Result<(), ImportError>) {
        if self.reloads.contains_key(&id) {
            return;
        }
        if let Some(blocks) = self.fenced.remove(&id) {
            self.release(&blocks, None);
            return;
        }
        if !self.importing.contains(&id) {
            return;
        }
        match outcome {
            Ok(()) => self.imported(id),
            Err(error) => self.end(id, FinishReason::ImportFailed(error)),
        }
    }

    fn imported(&mut self, id: RequestId) {
        self.leave_phase(id);
        let imported = self.update(id, |sequence| {
            sequence.computed = sequence.wanted_import();
            sequence.transfer = Transfer::None;
            let imported = sequence.computed - sequence.counted;
            sequence.counted = sequence.computed;
            sequence.usage.imported_tokens = imported;
            imported
        });
        self.totals.imported_tokens += u64::from(imported);
        self.enter_running(id);
        self.commit(id);
    }

    /// Ends a request whose KV is on its way. The driver may still write it.
    pub(crate) fn give_up_fetch(&mut self, id: RequestId, reason: FinishReason) {
        let block_size = self.config.block_size;
        let sequence = self
            .sequences
            .get_mut(&id)
            .expect("a request that waits for KV is known");
        let (first, end) = match sequence.phase {
            Phase::Importing { first_block, .. } => (first_block as usize, sequence.table.len()),
            Phase::Reloading {
                first_block,
                end_tokens,
            } => (first_block as usize, (end_tokens / block_size) as usize),
            Phase::Waiting | Phase::Offered | Phase::Running | Phase::Ended => {
                unreachable!("only a request that waits for KV is given up so")
            }
        };
        let owner = sequence.owner;
        let unordered = sequence.table.split_off(end);
        let written = sequence.table.split_off(first);
        self.fenced.insert(id, written);
        self.release(&unordered, owner);
        self.end(id, reason);
    }

    /// Ends the leases and the imports whose time is over.
    pub(crate) fn expire(&mut self) {
        while let Some((_, id)) = self.deadlines.first().copied().filter(|(at, _)| *at <= self.now) {
            if self.exports.contains_key(&id) {
                self.end_export(id, ExportEnd::LeaseEnded);
            } else {
                self.give_up_fetch(id, FinishReason::ImportFailed(ImportError::TimedOut));
            }
        }
    }
}
