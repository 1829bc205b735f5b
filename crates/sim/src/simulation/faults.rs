//! What goes wrong on purpose, and what everybody sees of it.

use super::{BROKEN_CONNECTION_LATENCY, Simulation, Wake};
use crate::fault::Fault;
use crate::heap::Rank;
use homing_router::event::{Event, FailureCause, LegFailure};
use homing_units::WorkerId;

impl Simulation<'_> {
    pub(super) fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::WorkerCrash(worker) => self.crash(worker),
            Fault::WorkerRestart(worker) => {
                let node = &mut self.nodes[worker.0 as usize];
                if node.engine.is_none() {
                    node.restart();
                    self.dead_peers.forget(worker.0 as usize);
                }
            }
        }
    }

    /// A worker dies. The router and the pullers see their connections break; probes go unanswered.
    fn crash(&mut self, worker: WorkerId) {
        let index = worker.0 as usize;
        if self.nodes[index].engine.is_none() {
            return;
        }
        self.nodes[index].crash();
        self.break_pulls_from(index);
        for engine_id in self.legs.on(index) {
            // One that is still on its way finds nobody when it arrives.
            if self.legs.get(engine_id).is_none_or(|leg| !leg.arrived) {
                continue;
            }
            let Some(leg) = self.legs.remove(engine_id) else {
                continue;
            };
            // The answer of an export has ended: there is no connection that could break.
            if leg.exported {
                continue;
            }
            let known = self.end_handshake(leg.id);
            let resume = match self.clients.get_mut(&leg.id.request) {
                Some(client) => client.resume(self.trace.block_size),
                None => continue,
            };
            let failure = LegFailure {
                leg: known,
                cause: FailureCause::Unreachable,
                resume,
            };
            let at = self.now + BROKEN_CONNECTION_LATENCY;
            self.heap
                .plan(at, Rank::News, Wake::News(Box::new(Event::LegFailed(failure))));
        }
    }
}
