//! Errands: what becomes of one. Nobody waits for an errand, so clients come first in everything. `looking` finds what is worth one.
//!
//! One begins only while no turn waits in the router, and between workers where nothing is queued, nothing is pending to be
//! prefilled and nothing is on its way from or to; a worker has part in one at a time. It is booked like a seed, so that whoever is placed
//! meanwhile sees it. It is dropped when the turn comes that it was to spare, when it stands in the way of a turn that finds no
//! room, and, where its destination computes, when a turn is placed there. It has one attempt; then its subject rests.
//!
//! They are looked at when a turn has ended, and once in `Clocks::errand_pace` as long as there is anything to look at.

mod looking;

use super::{Router, Timer};
use crate::action::{Action, Dispatch, Errand, ErrandKind, ErrandOutcome, KvUse};
use crate::admission::{Demand, Stage};
use crate::errands::{Beginning, ErrandTotal, Next, Phase, Signal, Subject, UnderWay, step};
use crate::event::{FailureCause, Leg, LegId};
use crate::policies::Choice;
use crate::residency::Predicted;
use homing_kv::Prompt;
use homing_units::{RequestId, SessionId, WorkerId};
use std::collections::BTreeSet;

impl Router {
    /// What errands came to, by kind and outcome.
    #[must_use]
    pub fn view_errands(&self) -> Vec<ErrandTotal> {
        self.errands.totals()
    }

    /// A turn has come and is its session's latest: what was to be carried for it is not any more.
    pub(super) fn errands_meet_turn(&mut self, request: RequestId, session: SessionId) {
        if !self.habits.errands.any() {
            return;
        }
        self.sessions.asked_by(session, request);
        self.errands.last_turn = Some(self.now);
        self.errands.wishes.remove(session);
        for errand in self.errands.of_session(session) {
            self.errand_signal(errand, Signal::Unwanted);
        }
        let Some(prompt) = self.sessions.get(session).map(|session| session.last.clone()) else {
            return;
        };
        self.note_tail(session, &prompt);
        if self.habits.errands.base {
            self.note_beginning(session, &prompt);
        }
        self.pace_errands();
    }

    fn note_tail(&mut self, session: SessionId, prompt: &Prompt) {
        let history = self.sessions.get(session).map_or(0, |session| session.history_blocks);
        if history > 0 {
            let tail = prompt
                .tokens
                .saturating_sub(history.saturating_mul(self.config.block_size));
            self.errands.learn_tail(tail);
        }
    }

    fn note_beginning(&mut self, session: SessionId, prompt: &Prompt) {
        let index = &self.residency.index;
        let blocks = index.owned_depth(self.config.limits.base_owners, &prompt.blocks);
        let Some(tip) = blocks.checked_sub(1).and_then(|last| prompt.blocks.get(last)) else {
            return;
        };
        let owners = u32::try_from(index.owner_count(*tip)).unwrap_or(u32::MAX);
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        if blocks.saturating_mul(self.config.block_size) >= self.config.limits.base_tokens {
            let beginning = Beginning {
                session,
                blocks,
                owners,
            };
            self.errands.base.shown(*tip, beginning);
        }
    }

    /// Books an errand, tells it, and sends its first leg. `lacks` is what its destination computes, if it does.
    fn start_errand(&mut self, errand: Errand, prefix: Prompt, subject: Subject, lacks: u32) {
        let (id, from, to) = (errand.errand, errand.from, errand.to);
        let demand = Demand {
            decode: to,
            prefill: from,
            fetch: None,
            reserve_tokens: self.ledger.reserve_tokens(to, &prefix, 1, self.config.block_size),
            tail_tokens: lacks,
            prefill_tokens: 0,
            export_tokens: self.export_tokens(from, &prefix),
            prompt: prefix.clone(),
        };
        self.ledger.book(id, demand);
        self.actions.push_back(Action::Errand(Box::new(errand.clone())));
        let phase = if from.is_some() {
            Phase::Lending
        } else {
            Phase::Computing
        };
        self.errands.begin(UnderWay {
            errand,
            phase,
            prefix,
            subject,
        });
        match from {
            Some(from) => self.send_errand(id, Leg::Lend, from, KvUse::Export),
            None => self.send_errand(id, Leg::Fetch, to, KvUse::Local),
        }
    }

    fn send_errand(&mut self, id: RequestId, leg: Leg, worker: WorkerId, kv: KvUse) {
        let prefix_tokens = self.errands.get(id).map(|under_way| under_way.errand.tokens);
        self.timers.set(Timer::Errand(id), self.now + self.config.clocks.fetch);
        self.actions.push_back(Action::Dispatch(Dispatch {
            leg: errand_leg(id, leg),
            worker,
            kv,
            prefix_tokens,
        }));
    }

    /// A leg was answered: whether it is an errand's.
    pub(super) fn errand_answers(&mut self, leg: LegId) -> bool {
        let Some(worker) = self.errand_worker(leg) else {
            return false;
        };
        self.works(worker);
        self.errand_signal(leg.request, Signal::Done(leg.leg));
        true
    }

    /// A leg has failed: whether it is an errand's.
    pub(super) fn errand_fails(&mut self, leg: LegId, cause: FailureCause) -> bool {
        let Some(worker) = self.errand_worker(leg) else {
            return false;
        };
        let errand = self.errands.get(leg.request).map(|under_way| under_way.errand.clone());
        match (cause, errand.and_then(|errand| Some((errand.from?, errand.to)))) {
            (FailureCause::Transfer, Some((from, to))) => {
                self.links.failed(self.now, from, to, self.config.clocks.link_memory);
            }
            (FailureCause::Unreachable, _) => {
                if let Some(worker) = self.fleet.get_mut(worker) {
                    worker.doubt();
                }
                self.announce(worker);
            }
            // It may be busy, or refuse what no client has asked for: that says nothing of clients' turns.
            (FailureCause::Transfer | FailureCause::Busy | FailureCause::Engine | FailureCause::Invalid, _) => {}
        }
        self.errand_signal(leg.request, Signal::Failed(leg.leg));
        true
    }

    /// Where a leg of an errand that is under way runs; `None` where it has no such leg.
    fn errand_worker(&self, leg: LegId) -> Option<WorkerId> {
        let errand = &self.errands.get(leg.request).filter(|_| leg.attempt == 0)?.errand;
        match leg.leg {
            Leg::Lend => errand.from,
            Leg::Fetch => Some(errand.to),
            Leg::Prefill | Leg::Decode => None,
        }
    }

    pub(super) fn errand_signal(&mut self, id: RequestId, signal: Signal) {
        let Some(under_way) = self.errands.get(id) else { return };
        match step(under_way.phase, signal) {
            Next::Stay => {}
            Next::Carry => {
                let (from, to) = (under_way.errand.from, under_way.errand.to);
                let from = from.expect("only what is lent is carried");
                self.ledger.advance(id, Stage::Pull);
                self.errands.enter(id, Phase::Carrying);
                self.send_errand(id, Leg::Fetch, to, KvUse::Import { from });
            }
            Next::End(outcome, cancels) => self.end_errand(id, outcome, cancels),
        }
    }

    /// Ends an errand: the one place where one leaves the router.
    fn end_errand(&mut self, id: RequestId, outcome: ErrandOutcome, cancels: &[Leg]) {
        for leg in cancels {
            let leg = errand_leg(id, *leg);
            if let Some(worker) = self.errand_worker(leg) {
                self.actions.push_back(Action::Cancel { leg, worker });
            }
        }
        self.timers.clear(Timer::Errand(id));
        self.ledger.release(id);
        let Some(ended) = self.errands.end(id, outcome) else {
            return;
        };
        let ends = ended.errand.from.into_iter().chain([ended.errand.to]);
        ends.for_each(|worker| self.queue.free(worker));
        self.actions.push_back(Action::ErrandEnded { errand: id, outcome });
        let clocks = &self.config.clocks;
        let (least, most) = (clocks.errand_rest, clocks.errand_rest_cap);
        let (now, rests) = (self.now, &mut self.errands.rests);
        match (outcome, ended.errand.kind) {
            (ErrandOutcome::Failed, _) => rests.rest_longer(now, ended.subject, least, most),
            (ErrandOutcome::Landed, ErrandKind::Base) => rests.rest(now, ended.subject, most),
            (ErrandOutcome::Landed, ErrandKind::Gap) | (ErrandOutcome::Dropped, _) => {
                rests.rest(now, ended.subject, least);
            }
        }
        if outcome == ErrandOutcome::Landed {
            self.landed(&ended);
        }
    }

    /// The KV is where it was to be.
    fn landed(&mut self, ended: &UnderWay) {
        let Errand { session, from, to, .. } = ended.errand;
        if let Some(from) = from {
            self.links.worked(from, to);
        }
        self.predict_prompt(session, &ended.prefix, to);
        if ended.errand.kind == ErrandKind::Gap {
            self.sessions.carried(session, to);
        }
    }

    /// This prompt of a session lies at a worker, or will.
    pub(super) fn predict_prompt(&mut self, session: SessionId, prompt: &Prompt, worker: WorkerId) {
        let Some(record) = self.fleet.get(worker).filter(|record| record.info.abilities.caches) else {
            return;
        };
        let clocks = &self.config.clocks;
        let exact = record.state() == crate::action::WorkerState::Exact;
        let predicted = Predicted {
            session,
            prompt: &prompt.blocks,
            ttl: if exact {
                clocks.predicted_with_events
            } else {
                clocks.predicted
            },
            pool_blocks: usize::try_from(record.info.kv_tokens / u64::from(self.config.block_size))
                .unwrap_or(usize::MAX),
        };
        self.residency.predict(self.now, worker, predicted);
    }

    /// A worker was lost, and what it had part in.
    pub(super) fn errands_lose(&mut self, worker: WorkerId) {
        for id in self.errands_at(worker) {
            self.errand_signal(id, Signal::Lost);
        }
    }

    /// A turn is placed here: whatever is computed here that nobody waits for stops.
    pub(super) fn errands_yield(&mut self, worker: WorkerId) {
        for id in self.errands_at(worker) {
            let computes = self
                .errands
                .get(id)
                .is_some_and(|under_way| under_way.phase == Phase::Computing);
            if computes {
                self.errand_signal(id, Signal::Unwanted);
            }
        }
    }

    /// A turn finds no room: drops errands at workers that have none for it. Whether there were any.
    pub(super) fn errands_make_way(&mut self, choice: &Choice) -> bool {
        if self.errands.len() == 0 {
            return false;
        }
        let full = choice.considered.iter().filter(|plan| plan.denied.is_some());
        let workers: BTreeSet<WorkerId> = full
            .flat_map(|considered| [Some(considered.plan.decode), considered.plan.prefill])
            .flatten()
            .collect();
        let in_the_way: Vec<RequestId> = workers.into_iter().flat_map(|worker| self.errands_at(worker)).collect();
        for id in &in_the_way {
            self.errand_signal(*id, Signal::Unwanted);
        }
        !in_the_way.is_empty()
    }

    fn errands_at(&self, worker: WorkerId) -> Vec<RequestId> {
        let here = self.errands.iter().filter(|under_way| under_way.involves(worker));
        here.map(|under_way| under_way.errand.errand).collect()
    }
}

/// The leg of an errand: it has one attempt.
const fn errand_leg(errand: RequestId, leg: Leg) -> LegId {
    LegId {
        request: errand,
        attempt: 0,
        leg,
    }
}
