//! What goes wrong on purpose, what everybody sees of it, and how it is mended at the end.

use super::{BROKEN_CONNECTION_LATENCY, Simulation, Wake};
use crate::fault::{Fault, LinkState};
use crate::heap::Rank;
use crate::legs::Wire;
use homing_engine::api::{Input, Submit, Transfer};
use homing_report::logs::WorkerChange;
use homing_router::event::{Event, FailureCause, LegFailure, LegId, Resume};
use homing_units::{Duration, RequestId, WorkerId};

impl Simulation<'_> {
    pub(super) fn fault(&mut self, fault: Fault) {
        let index = |worker: WorkerId| worker.0 as usize;
        match fault {
            Fault::WorkerCrash(worker) => {
                self.log_worker(worker, WorkerChange::Crashed, Some("killed".to_owned()));
                self.crash(index(worker));
            }
            Fault::WorkerRestart(worker) => self.restart(index(worker)),
            Fault::WorkerPause(worker) => self.pause(index(worker)),
            Fault::WorkerResume(worker) => self.resume(index(worker)),
            Fault::WorkerStall { worker, lasts } => self.nodes[index(worker)].stall(lasts),
            Fault::WorkerSlow { worker, percent } => self.nodes[index(worker)].percent = percent,
            Fault::Link { from, to, state } => self.change_link((index(from), index(to)), state),
            Fault::ProbesLost { worker, probes } => self.trouble.lose_probes(index(worker), probes),
            Fault::LoadsLost { worker, reports } => self.trouble.lose_loads(index(worker), reports),
            Fault::KvBatches {
                worker,
                batches,
                mishap,
            } => self.trouble.disturb_batches(index(worker), batches, mishap),
            Fault::Answers { worker, mishap } => self.answers_meet(index(worker), mishap),
            Fault::ConnectionsBreak(worker) => self.connections_break(index(worker)),
            Fault::ClientAbort { nth } => self.client_hangs_up(nth),
            Fault::RouterStall { lasts } => self.router_stalls(lasts),
            Fault::CacheCleared(worker) => self.clear_cache(index(worker)),
            Fault::Stranger {
                worker,
                prompt_tokens,
                output_tokens,
            } => self.stranger(index(worker), prompt_tokens, output_tokens),
        }
    }

    /// Everything that a fault left behind is mended: workers are up and run, links are up, the router goes on.
    pub(super) fn heal(&mut self) {
        self.trouble.calm();
        for node in self.trouble.all_paused() {
            self.resume(node);
        }
        for link in self.trouble.all_links() {
            self.change_link(link, LinkState::Up);
        }
        for index in 0..self.nodes.len() {
            self.nodes[index].percent = 100;
        }
    }

    /// A worker dies. The router and the pullers see their connections break; probes go unanswered.
    pub(super) fn crash(&mut self, index: usize) {
        if self.nodes[index].engine.is_none() {
            return;
        }
        self.nodes[index].crash();
        self.remember_crash(index);
        // What had reached it and was not looked at finds nobody now.
        self.go_on(index);
        self.break_pulls_from(index);
        for engine_id in self.open_connections(index) {
            if let Some(leg) = self.forget_leg(engine_id) {
                self.connection_broke(index, leg.id);
            }
        }
        for engine_id in self.legs.on(index) {
            // The answer of an export has ended: there is no connection that could break.
            let ended = self.legs.get(engine_id).is_some_and(|leg| leg.exported && leg.arrived);
            if ended {
                self.forget_leg(engine_id);
            }
        }
    }

    fn restart(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        if node.engine.is_none() {
            node.restart();
            let worker = node.id;
            self.dead_peers.forget(index);
            self.log_worker(worker, WorkerChange::Restarted, None);
        }
    }

    fn pause(&mut self, index: usize) {
        if self.nodes[index].engine.is_some() {
            self.trouble.pause(index);
        }
    }

    fn resume(&mut self, index: usize) {
        self.go_on(index);
    }

    /// What reached a paused worker reaches it now, in order.
    fn go_on(&mut self, index: usize) {
        for wake in self.trouble.unpause(index) {
            self.heap.plan(self.now, Rank::Step, wake);
        }
    }

    /// The legs whose answers are on their way over connections that live. One that is still on its way to the worker finds
    /// nobody when it arrives; of a silent one nobody hears anything, not even that it broke.
    fn open_connections(&self, index: usize) -> Vec<RequestId> {
        let open = |engine_id: &RequestId| {
            self.legs
                .get(*engine_id)
                .is_some_and(|leg| leg.arrived && !leg.exported && leg.wire != Wire::Silent)
        };
        self.legs.on(index).into_iter().filter(open).collect()
    }

    /// Connections between router and worker break; the worker gives up what nobody waits for.
    fn connections_break(&mut self, index: usize) {
        for engine_id in self.open_connections(index) {
            let Some(leg) = self.legs.get(engine_id) else { continue };
            let id = leg.id;
            self.connection_broke(index, id);
            self.give_up(engine_id);
        }
    }

    /// The router's shell sees that the connection of a leg broke.
    fn connection_broke(&mut self, index: usize, leg: LegId) {
        // The router doubts the worker: the next probe is news, whatever the last one said.
        self.nodes[index].probed = None;
        let known = self.end_handshake(leg);
        let resume = match self.clients.get_mut(&leg.request) {
            Some(client) => client.resume(self.trace.block_size),
            None if self.errands.asker(leg.request).is_some() => Resume::Start,
            None => return,
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

    fn change_link(&mut self, link: (usize, usize), state: LinkState) {
        for puller in self.trouble.set_link(link, state) {
            self.heap.plan(self.now, Rank::Transfer, Wake::PullEnds(puller));
        }
        if state == LinkState::Cut {
            self.break_link(link);
        }
    }

    fn client_hangs_up(&mut self, nth: u32) {
        let live = self.clients.len();
        if live == 0 {
            return;
        }
        let request = *self
            .clients
            .keys()
            .nth(nth as usize % live)
            .expect("it is below their number");
        self.trouble.hung_up(request);
        self.end_turn(request, Some("client_gone"));
        if self.config.cluster.stack.defects.loses_cancels {
            self.give_up_all(request);
        } else {
            self.news.push_back(Event::ClientGone(request));
        }
    }

    /// The connections of a request that nobody waits for are closed, without a word to the router's core.
    fn give_up_all(&mut self, request: RequestId) {
        for node in 0..self.nodes.len() {
            for engine_id in self.legs.on(node) {
                if self.legs.get(engine_id).is_some_and(|leg| leg.id.request == request) {
                    self.give_up(engine_id);
                }
            }
        }
    }

    fn router_stalls(&mut self, lasts: Duration) {
        let until = self.now + lasts;
        self.trouble.router_stops(until);
        self.heap.plan(until, Rank::Fault, Wake::RouterGoesOn);
    }

    fn clear_cache(&mut self, index: usize) {
        self.tell_engine(index, self.nodes[index].epoch, Input::ClearCache);
    }

    fn stranger(&mut self, index: usize, prompt_tokens: u32, output_tokens: u32) {
        if self.nodes[index].engine.is_none() {
            return;
        }
        let (id, prompt) = self.trouble.stranger(prompt_tokens, self.trace.block_size);
        let submit = Submit {
            id,
            prompt,
            max_output_tokens: output_tokens,
            transfer: Transfer::None,
            session: None,
            owner: None,
        };
        self.tell_engine(index, self.nodes[index].epoch, Input::Submit(submit));
    }
}
