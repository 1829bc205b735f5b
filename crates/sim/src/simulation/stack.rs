//! What the papers' stack does when KV is not fetched in time, and what asking its workers costs.

use super::{Simulation, Wake};
use crate::fault::Fault;
use crate::heap::Rank;
use crate::stack::{FOR_EVER, RESTART_AFTER};
use homing_engine::api::Input;
use homing_report::logs::{TransferLine, seconds};
use homing_router::action::{Decision, KvUse};
use homing_router::event::{Event, FailureCause, Leg, LegId};
use homing_units::{Duration, Instant, RequestId, WorkerId};
use std::collections::BTreeMap;

/// Decode workers that prefill workers take for dead, and until when.
#[derive(Clone, Debug, Default)]
pub(super) struct DeadPeers {
    until: BTreeMap<(usize, usize), Option<Instant>>,
}

/// What the papers' logs said of a transfer that took too long, and of one to a peer on the list.
const TIMED_OUT: &str = "Failed to send kv chunk";
const PEER_DEAD: &str = "Decode instance could be dead";

impl DeadPeers {
    fn add(&mut self, now: Instant, from: usize, to: usize, lasts: Duration) {
        let until = (lasts != FOR_EVER).then(|| now + lasts);
        self.until.insert((from, to), until);
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
        self.drop_transfer(from, export, TIMED_OUT);
        let lasts = self.config.cluster.stack.dead_peers;
        if let (Some(to), Some(lasts)) = (to, lasts) {
            self.dead_peers.add(self.now, from, to, lasts);
            self.abort_link(from, to);
        }
    }

    /// Whether a decode leg that has just arrived is turned away because its source takes this worker for dead.
    pub(super) fn dropped_for_dead(&mut self, engine_id: RequestId) -> bool {
        let Some(leg) = self.legs.get(engine_id) else {
            return false;
        };
        let KvUse::Import { from } = leg.kv else { return false };
        let from = from.0 as usize;
        let listed = self.dead_peers.lists(self.now, from, leg.node);
        let export = self.legs.engine_id(LegId {
            leg: Leg::Prefill,
            ..leg.id
        });
        if let Some(export) = export.filter(|_| listed) {
            self.drop_transfer(from, export, PEER_DEAD);
        }
        listed
    }

    /// All that is on its way over a link is given up.
    fn abort_link(&mut self, from: usize, to: usize) {
        let exports: Vec<RequestId> = self.nodes[from].exports.iter().copied().collect();
        for export in exports {
            let decode = self.held_export(export).and_then(|(_, decode)| self.legs.get(decode));
            if decode.is_some_and(|leg| leg.node == to) {
                self.drop_transfer(from, export, PEER_DEAD);
            }
        }
    }

    /// Where an export is held, and the engine's id of the decode leg that it is for.
    fn held_export(&self, export: RequestId) -> Option<(usize, RequestId)> {
        let leg = self.legs.get(export).filter(|leg| leg.exported)?;
        let held = self.nodes[leg.node].exports.contains(&export);
        let decode = LegId {
            leg: Leg::Decode,
            ..leg.id
        };
        held.then_some((leg.node, self.legs.engine_id(decode)?))
    }

    /// Gives a transfer up on both sides, and tells the router.
    fn drop_transfer(&mut self, from: usize, export: RequestId, why: &str) {
        let Some((_, decode)) = self.held_export(export) else {
            return;
        };
        let leg = self.legs.get(decode).expect("its leg was found").clone();
        self.nodes[from].counts.transfer_errors += 1;
        self.nodes[leg.node].counts.transfer_errors += 1;
        self.logs.add(|| TransferLine {
            t: seconds(self.now),
            request: leg.id.request.0,
            from: self.names[from].clone(),
            to: self.names[leg.node].clone(),
            tokens: leg.prompt.tokens,
            bytes: None,
            duration_s: 0.0,
            error: Some(why.to_owned()),
        });
        self.give_up(decode);
        self.legs.remove(export);
        if let Some(engine) = &mut self.nodes[from].engine {
            engine.handle(self.now, Input::Abort(export));
            self.changed.insert(from);
        }
        self.fail_leg(leg.id, FailureCause::Transfer);
    }

    /// Asks every decode worker for its load, as a router does that asks before it places a turn. Only the one that is
    /// chosen pays for the question: the papers' router asks no other.
    pub(super) fn ask_decoders(&mut self) {
        for index in 0..self.nodes.len() {
            let node = &mut self.nodes[index];
            if !node.spec.role.decodes() {
                continue;
            }
            let load = node.load();
            if node.asked != load {
                node.asked = load;
                self.news_first.extend(load.map(Event::Load));
            }
        }
    }

    /// The chosen worker was asked: its scheduler's next step takes longer by the question.
    pub(super) fn pay_for_question(&mut self, decision: &Decision) {
        if self.router.habits().probes {
            self.nodes[decision.decode.0 as usize].owed += self.config.cluster.stack.probe;
        }
    }

    /// When the worker's scheduler answers: at the end of its step, if it is asked there.
    pub(super) fn answers_at(&self, worker: usize) -> Instant {
        let asked_in_loop = self.router.habits().probes && !self.config.cluster.stack.probe.is_zero();
        let step_ends = self.nodes[worker].step_ends;
        if asked_in_loop {
            step_ends.max(self.now)
        } else {
            self.now
        }
    }

    /// An engine's process has died of itself; it is started again after a while.
    pub(super) fn die(&mut self, index: usize) {
        let worker = WorkerId(u32::try_from(index).expect("workers are bounded"));
        self.fault(Fault::WorkerCrash(worker));
        self.heap
            .plan(self.now + RESTART_AFTER, Rank::Fault, Wake::Restart(worker));
    }
}
