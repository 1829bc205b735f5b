//! KV moves between workers: an engine orders an import, the NICs are booked, and at the end both sides are told.
//!
//! The bytes are those of whole blocks. A pull ends badly when its source is down, was restarted, or let go of the export
//! before the last byte; the puller's blocks are fenced by its engine until it hears the outcome.

use super::{BROKEN_CONNECTION_LATENCY, Simulation, Wake};
use crate::heap::Rank;
use homing_engine::api::{Import, ImportError, Input, KvChange, Reload};
use homing_kv::Tier;
use homing_report::logs::{FailedTransfer, TransferLine, TransferPhase, duration_s, seconds};
use homing_router::event::LegId;
use homing_units::{BootEpoch, Instant, RequestId};

/// A pull under way.
#[derive(Clone, Debug)]
pub(super) struct Pull {
    request: RequestId,
    pub(super) to: usize,
    pub(super) to_epoch: BootEpoch,
    /// Where it pulls from; `None` if there was no such export when it began.
    pub(super) source: Option<Source>,
    pub(super) import: Import,
    blocks: u32,
    bytes: u64,
    began: Instant,
    /// It was given up and counted already.
    dropped: bool,
    /// Its connection broke.
    broken: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Source {
    pub(super) node: usize,
    epoch: BootEpoch,
    pub(super) engine_id: RequestId,
}

impl Simulation<'_> {
    /// An engine wants KV.
    pub(super) fn begin_pull(&mut self, to: usize, import: &Import) {
        let Some(leg) = self.legs.get(import.id) else {
            return self.refuse_pull(to, import);
        };
        let source = self.source_of(leg.id);
        let mut pull = Pull {
            request: leg.id.request,
            to,
            to_epoch: self.nodes[to].epoch,
            source,
            import: import.clone(),
            blocks: u32::try_from(import.blocks.len()).expect("no more blocks than the pool has"),
            bytes: self.nodes[to].block_bytes(import.blocks.len()),
            began: self.now,
            dropped: false,
            broken: source.is_some_and(|source| self.trouble.is_cut((source.node, to))),
        };
        let ends = match source {
            _ if pull.broken => self.now + BROKEN_CONNECTION_LATENCY,
            // The puller had everything: it only lets the source go.
            Some(_) if import.blocks.is_empty() => self.now,
            Some(source) => {
                let link = (source.node, to);
                let percent = self.trouble.link_percent(link);
                let booking = self.network.book(self.now, link, pull.bytes, percent);
                pull.began = booking.starts;
                if self.config.cluster.staging {
                    self.pcie.book_load(booking.ends, to, pull.bytes)
                } else {
                    booking.ends
                }
            }
            None => self.now + BROKEN_CONNECTION_LATENCY,
        };
        self.pulls.insert(import.id, pull);
        self.heap.plan(ends, Rank::Transfer, Wake::PullEnds(import.id));
    }

    /// An engine that was paused orders KV for a leg that was given up meanwhile: nobody has it for it.
    fn refuse_pull(&mut self, to: usize, import: &Import) {
        let input = Box::new(Input::ImportDone {
            id: import.id,
            outcome: Err(ImportError::Unknown),
        });
        let (node, epoch) = (to, self.nodes[to].epoch);
        let at = self.now + BROKEN_CONNECTION_LATENCY;
        self.heap.plan(at, Rank::Transfer, Wake::Told { node, epoch, input });
    }

    /// The export of the leg of the same attempt that this one pulls from.
    fn source_of(&self, leg: LegId) -> Option<Source> {
        let engine_id = self.legs.engine_id(leg.sibling(leg.leg.source()?))?;
        let leg = self.legs.get(engine_id).filter(|leg| leg.exported)?;
        Some(Source {
            node: leg.node,
            epoch: leg.epoch,
            engine_id,
        })
    }

    /// A pull has ended, one way or the other.
    pub(super) fn end_pull(&mut self, puller: RequestId) {
        let Some(pull) = self.pulls.remove(&puller) else { return };
        let outcome = self.outcome_of(&pull);
        self.count_pull(&pull, outcome);
        self.remember_pull(puller, &pull, outcome);
        if let (Ok(()), Some(source)) = (outcome, pull.source) {
            // Moving is not copying: the session lives elsewhere now.
            let moved = self.clients.get(&pull.request).is_some_and(|client| client.moves())
                || self.errands.moves(pull.request);
            let ends = if moved {
                Input::ReleaseExported
            } else {
                Input::ExportAck
            };
            self.tell_engine(source.node, source.epoch, ends(source.engine_id));
        }
        self.tell_engine(pull.to, pull.to_epoch, Input::ImportDone { id: puller, outcome });
        if self.legs.get(puller).is_none() {
            // It was given up, which a worker that has not heard of it sees now.
            self.tell_engine(pull.to, pull.to_epoch, Input::Abort(puller));
        }
    }

    fn outcome_of(&self, pull: &Pull) -> Result<(), ImportError> {
        let source = pull.source.ok_or(ImportError::Unknown)?;
        let (node, puller) = (&self.nodes[source.node], &self.nodes[pull.to]);
        // Nobody acknowledges for a puller that is gone.
        if pull.broken || puller.engine.is_none() || puller.epoch != pull.to_epoch {
            return Err(ImportError::Unreachable);
        }
        match (&node.engine, node.exports.contains(&source.engine_id)) {
            (None, _) => Err(ImportError::Unreachable),
            (Some(_), held) if !held || node.epoch != source.epoch => Err(ImportError::Unknown),
            (Some(_), _) => Ok(()),
        }
    }

    fn count_pull(&mut self, pull: &Pull, outcome: Result<(), ImportError>) {
        if pull.blocks == 0 || pull.dropped {
            return;
        }
        match outcome {
            Ok(()) => self.nodes[pull.to].counts.transfers_in += 1,
            Err(_) => self.nodes[pull.to].counts.transfer_errors += 1,
        }
        if let Some(source) = pull.source {
            let counts = &mut self.nodes[source.node].counts;
            match outcome {
                Ok(()) => counts.transfers_out += 1,
                Err(_) => counts.transfer_errors += 1,
            }
        }
        self.logs.add(|| TransferLine {
            t: seconds(pull.began),
            request: pull.request.0,
            from: pull
                .source
                .map_or_else(|| "unknown".to_owned(), |source| self.names[source.node].clone()),
            to: self.names[pull.to].clone(),
            tokens: pull.blocks * self.trace.block_size,
            bytes: outcome.is_ok().then_some(pull.bytes),
            duration_s: duration_s(self.now - pull.began),
            error: outcome.err().map(|error| format!("{error:?}")),
            failed: outcome.err().map(|_| FailedTransfer {
                phase: TransferPhase::Ready,
                clock_s: None,
            }),
        });
    }

    /// An engine wants KV back from its host memory.
    pub(super) fn begin_reload(&mut self, index: usize, reload: &Reload) {
        self.remember_reload(index, reload);
        let node = &self.nodes[index];
        let bytes = node.block_bytes(reload.blocks.len());
        let wake = Wake::ReloadEnds {
            node: index,
            epoch: node.epoch,
            id: reload.id,
        };
        let ends = self.pcie.book_load(self.now, index, bytes);
        self.heap.plan(ends, Rank::Transfer, wake);
    }

    pub(super) fn end_reload(&mut self, index: usize, epoch: BootEpoch, id: RequestId) {
        if self.nodes[index].epoch == epoch {
            self.remember_reloaded(index, id);
        }
        self.tell_engine(index, epoch, Input::ReloadDone(id));
    }

    /// What an engine puts into its host memory crosses PCIe.
    pub(super) fn spill(&mut self, index: usize, change: &KvChange) {
        let KvChange::Stored {
            hashes,
            tier: Tier::Host,
            ..
        } = change
        else {
            return;
        };
        let bytes = self.nodes[index].block_bytes(hashes.len());
        self.pcie.book_spill(self.now, index, bytes);
    }

    /// A pull is given up, by whoever has counted it: the puller's blocks are its own again soon.
    pub(super) fn break_pull(&mut self, puller: RequestId) {
        if let Some(pull) = self.pulls.get_mut(&puller) {
            pull.dropped = true;
            let at = self.now + BROKEN_CONNECTION_LATENCY;
            self.heap.plan(at, Rank::Transfer, Wake::PullEnds(puller));
        }
    }

    /// What has to hold still before a pull can end: the link that it is on and the workers at its ends. `None` for one
    /// that has ended or broke.
    pub(super) fn ends_of(&self, puller: RequestId) -> Option<(Option<usize>, usize)> {
        let pull = self.pulls.get(&puller).filter(|pull| !pull.broken && !pull.dropped)?;
        Some((pull.source.map(|source| source.node), pull.to))
    }

    /// Connections over a link break: its pullers hear of it soon.
    pub(super) fn break_link(&mut self, link: (usize, usize)) {
        let at = self.now + BROKEN_CONNECTION_LATENCY;
        for (puller, pull) in &mut self.pulls {
            if pull.source.is_some_and(|source| (source.node, pull.to) == link) {
                pull.broken = true;
                self.heap.plan(at, Rank::Transfer, Wake::PullEnds(*puller));
            }
        }
    }

    /// The connections of a worker that died break: its pullers hear of it soon.
    pub(super) fn break_pulls_from(&mut self, node: usize) {
        let broken = |pull: &Pull| pull.source.is_some_and(|source| source.node == node);
        let pullers: Vec<RequestId> = self
            .pulls
            .iter()
            .filter(|(_, pull)| broken(pull))
            .map(|(puller, _)| *puller)
            .collect();
        for puller in pullers {
            self.heap.plan(
                self.now + BROKEN_CONNECTION_LATENCY,
                Rank::Transfer,
                Wake::PullEnds(puller),
            );
        }
    }
}
