//! What the papers' stack does when KV is not fetched in time, and what asking its workers costs.

use super::{Simulation, Wake};
use crate::heap::Rank;
use crate::stack::{FOR_EVER, RESTART_AFTER};
use homing_engine::api::Crash;
use homing_report::logs::{FailedTransfer, TransferLine, TransferPhase, WorkerChange, duration_s, seconds};
use homing_router::action::{Decision, KvUse};
use homing_router::event::{Event, FailureCause};
use homing_units::{Duration, Instant, RequestId, WorkerId};
use std::collections::BTreeMap;

/// Decode workers that prefill workers take for dead, and until when.
#[derive(Clone, Debug, Default)]
pub(super) struct DeadPeers {
    until: BTreeMap<(usize, usize), Option<Instant>>,
}

/// What the papers' logs said of a transfer that took too long, and of one to a peer on the list.
pub(super) const TIMED_OUT: &str = "Failed to send kv chunk";
const PEER_DEAD: &str = "Decode instance could be dead";

impl DeadPeers {
    fn add(&mut self, now: Instant, from: usize, to: usize, lasts: Duration) {
        let until = (lasts != FOR_EVER).then(|| now + lasts);
        self.until.insert((from, to), until);
    }

    /// A worker that was restarted has another address.
    pub(super) fn forget(&mut self, worker: usize) {
        self.until.retain(|(from, to), _| *from != worker && *to != worker);
    }

    fn lists(&self, now: Instant, from: usize, to: usize) -> bool {
        let until = self.until.get(&(from, to));
        until.is_some_and(|until| until.is_none_or(|until| now < until))
    }
}

impl Simulation<'_> {
    /// KV is ready: its clock starts.
    pub(super) fn start_transfer_clock(&mut self, export: RequestId) {
        if let Some(timeout) = self.config.cluster.stack.transfer_timeout {
            self.heap
                .plan(self.now + timeout, Rank::Timer, Wake::TransferTimeout(export));
        }
    }

    /// KV was ready and its time is up: if it was not fetched, its peer counts as dead.
    pub(super) fn transfer_timeout(&mut self, export: RequestId) {
        let Some((from, decode)) = self.held_export(export) else {
            return;
        };
        let to = self.legs.get(decode).map(|leg| leg.node);
        self.drop_transfer(from, Some(export), decode, TIMED_OUT);
        if let Some(to) = to {
            self.take_for_dead(from, to);
        }
    }

    /// A worker puts a peer on its list, if it keeps one.
    pub(super) fn take_for_dead(&mut self, from: usize, to: usize) {
        if let Some(lasts) = self.config.cluster.stack.dead_peers {
            self.dead_peers.add(self.now, from, to, lasts);
            self.abort_link(from, to);
        }
    }

    /// Whether a decode leg that has just arrived is turned away because its source takes this worker for dead.
    pub(super) fn dropped_for_dead(&mut self, decode: RequestId) -> bool {
        let Some(leg) = self.legs.get(decode) else { return false };
        let KvUse::Import { from } = leg.kv else { return false };
        let (from, to, leg) = (from.0 as usize, leg.node, leg.id);
        let listed = self.dead_peers.lists(self.now, from, to);
        if listed {
            let source = leg.leg.source();
            let export = source.and_then(|source| self.legs.engine_id(leg.sibling(source)));
            self.drop_transfer(from, export, decode, PEER_DEAD);
        }
        listed
    }

    /// All that is on its way over a link is given up.
    fn abort_link(&mut self, from: usize, to: usize) {
        let exports: Vec<RequestId> = self.nodes[from].exports.iter().copied().collect();
        for export in exports {
            let Some((_, decode)) = self.held_export(export) else {
                continue;
            };
            if self.legs.get(decode).is_some_and(|leg| leg.node == to) {
                self.drop_transfer(from, Some(export), decode, PEER_DEAD);
            }
        }
    }

    /// Where an export is held, and the engine's id of the leg that is to pull it.
    fn held_export(&self, export: RequestId) -> Option<(usize, RequestId)> {
        let leg = self.legs.get(export).filter(|leg| leg.exported)?;
        let held = self.nodes[leg.node].exports.contains(&export);
        let puller = leg.id.sibling(leg.id.leg.puller()?);
        held.then_some((leg.node, self.legs.engine_id(puller)?))
    }

    /// Gives a transfer up on both sides, and tells the router. The NICs stay booked for what was under way: the bytes that
    /// were sent were sent.
    fn drop_transfer(&mut self, from: usize, export: Option<RequestId>, decode: RequestId, why: &str) {
        let Some(leg) = self.legs.get(decode) else { return };
        let (leg, to) = (leg.id, leg.node);
        self.note_failed_transfer((from, to), decode, why, TransferPhase::Ready);
        self.break_pull(decode);
        self.give_up(decode);
        if let Some(export) = export {
            self.give_up(export);
        }
        self.fail_leg(leg, FailureCause::Transfer);
    }

    /// Counts and logs a transfer between two workers that failed.
    pub(super) fn note_failed_transfer(
        &mut self,
        (from, to): (usize, usize),
        decode: RequestId,
        why: &str,
        phase: TransferPhase,
    ) {
        let timeout = self.config.cluster.stack.transfer_timeout;
        let Some(leg) = self.legs.get(decode) else { return };
        self.nodes[from].counts.transfer_errors += 1;
        self.nodes[to].counts.transfer_errors += 1;
        self.logs.add(|| TransferLine {
            t: seconds(self.now),
            request: leg.id.request.0,
            from: self.names[from].clone(),
            to: self.names[to].clone(),
            tokens: leg.prompt.tokens,
            bytes: None,
            duration_s: 0.0,
            error: Some(why.to_owned()),
            failed: Some(FailedTransfer {
                phase,
                clock_s: timeout.filter(|_| why == TIMED_OUT).map(duration_s),
            }),
        });
    }

    /// Asks every decode worker for its load, as a router does that asks before it places a turn.
    pub(super) fn ask_decoders(&mut self) {
        let decoders = self.nodes.iter_mut().enumerate();
        for (index, node) in decoders.filter(|(_, node)| node.spec.role.decodes()) {
            if self.trouble.is_paused(index) {
                continue;
            }
            let load = node.load();
            if node.asked != load {
                node.asked = load;
                self.news_first.extend(load.map(Event::Load));
            }
        }
    }

    /// The chosen worker is asked whether it takes the turn, by a router that asks. Nothing is sent before its answer.
    pub(super) fn ask_for_admission(&mut self, decision: &Decision) {
        let admission = self.config.cluster.stack.admission;
        let Some(admission) = admission.filter(|_| self.router.habits().probes) else {
            return;
        };
        let answers = self.nodes[decision.decode.0 as usize].ask(self.now, admission.probe);
        if let Some(client) = self.clients.get_mut(&decision.request) {
            client.admitted = answers;
        }
    }

    /// Everybody's status is polled, if it is.
    pub(super) fn poll_status(&mut self) {
        let Some(admission) = self.config.cluster.stack.admission else {
            return;
        };
        for node in &mut self.nodes {
            node.ask(self.now, admission.probe);
        }
        self.plan_poll();
    }

    pub(super) fn plan_poll(&mut self) {
        let every = self
            .config
            .cluster
            .stack
            .admission
            .and_then(|admission| admission.poll_every);
        if let Some(every) = every {
            self.heap.plan(self.now + every, Rank::Report, Wake::Poll);
        }
    }

    /// An engine's process has died of itself; it is started again after a while.
    pub(super) fn die(&mut self, index: usize, reason: Crash) {
        let worker = WorkerId(u32::try_from(index).expect("workers are bounded"));
        let Crash::Correction {
            fill_tokens,
            prefix_tokens,
        } = reason;
        let reason = format!(
            "AssertionError: seq_len - pre_len == req.extend_input_len ({fill_tokens} tokens to fill, {prefix_tokens} in the prefix)"
        );
        self.log_worker(worker, WorkerChange::Crashed, Some(reason));
        self.crash(index);
        self.heap
            .plan(self.now + RESTART_AFTER, Rank::Fault, Wake::Restart(worker));
    }
}
