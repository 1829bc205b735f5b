//! KV that goes out and comes in: what is held for whom, until when, and who may write where.
//!
//! Out: the prompt's blocks of an ended request are held until the puller acknowledges, the lease ends, or the request is
//! aborted. In: a request takes what is cached here and all blocks for the rest of the offer at once, so two imports
//! cannot each hold half of what both need; while the KV is on its way the request holds a place and is never preempted.
//! An import that is given up leaves its blocks behind a fence: the driver may still write into them, so nobody gets them
//! before its answer comes.
//!
//! It moves no bytes and knows no peer: the driver does.

use crate::api::{Export, ExportEnd, FinishReason, Import, ImportError, Output, Transfer};
use crate::engine::Engine;
use crate::sequence::Phase;
use homing_kv::BlockId;
use homing_units::{Instant, RequestId};

/// KV held for a puller.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub blocks: Vec<BlockId>,
    pub lease_ends: Instant,
}

impl Engine {
    /// Sets the blocks of an ending request's prompt aside for a puller.
    pub(crate) fn hold(&mut self, id: RequestId) -> Export {
        let lease_ends = self.now + self.config.export_lease;
        let sequence = self.sequences.get_mut(&id).expect("an ending request is known");
        let tokens = sequence.prompt.tokens;
        let beyond = sequence
            .table
            .split_off(tokens.div_ceil(self.config.block_size) as usize);
        let blocks = std::mem::take(&mut sequence.table);
        // What the output filled alone is not part of the offer.
        self.release(&beyond);
        let held = Held {
            blocks: blocks.clone(),
            lease_ends,
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
        self.release(&held.blocks);
        self.outputs.push_back(Output::ExportEnded { id, reason });
    }

    /// Orders the imports that there is room for, oldest first.
    pub(crate) fn start_imports(&mut self) {
        while self.place_left() && !self.offered.blocked {
            let Some(id) = self.offered.head() else { return };
            if !self.start_import(id) {
                self.offered.blocked = true;
            }
        }
    }

    fn start_import(&mut self, id: RequestId) -> bool {
        let sequence = &self.sequences[&id];
        let older_waiting = self.waiting.oldest().is_some_and(|oldest| oldest < sequence.arrival);
        let older = if older_waiting { self.waiting.demand_blocks() } else { 0 };
        let reserved = older + self.slot_reserve_blocks();
        let wanted = sequence.wanted_import().div_ceil(self.config.block_size);
        let Some(prefix) = self.lock_prefix(id, reserved) else {
            return false;
        };
        let first_block = u32::try_from(prefix.len()).expect("no more blocks than hashes");
        let blocks = self
            .cache
            .allocate(wanted.saturating_sub(first_block), &mut self.outputs)
            .expect("there is room for all of the request's tokens");
        self.leave_phase(id);
        self.take_prefix(id, prefix);
        let deadline = self.now + self.config.import_timeout;
        if blocks.is_empty() {
            self.update(id, |sequence| sequence.transfer = Transfer::None);
            self.enter_running(id);
        } else {
            self.update(id, |sequence| {
                sequence.table.extend(&blocks);
                sequence.phase = Phase::Importing { first_block, deadline };
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
        true
    }

    /// The driver writes into an import's blocks no longer.
    pub(crate) fn import_done(&mut self, id: RequestId, outcome: Result<(), ImportError>) {
        if let Some(blocks) = self.fenced.remove(&id) {
            self.release(&blocks);
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
    pub(crate) fn give_up_import(&mut self, id: RequestId, reason: FinishReason) {
        let sequence = self.sequences.get_mut(&id).expect("an importing request is known");
        if let Phase::Importing { first_block, .. } = sequence.phase {
            let written = sequence.table.split_off(first_block as usize);
            self.fenced.insert(id, written);
        }
        self.end(id, reason);
    }

    /// Ends the leases and the imports whose time is over.
    pub(crate) fn expire(&mut self) {
        while let Some((_, id)) = self.deadlines.first().copied().filter(|(at, _)| *at <= self.now) {
            if self.exports.contains_key(&id) {
                self.end_export(id, ExportEnd::LeaseEnded);
            } else {
                self.give_up_import(id, FinishReason::ImportFailed(ImportError::TimedOut));
            }
        }
    }
}
