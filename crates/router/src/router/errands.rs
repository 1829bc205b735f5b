//! Errands: when one is run, and what becomes of it. Nobody waits for an errand, so clients come first in everything.
//!
//! One begins only while no turn waits in the router, and between workers where nothing is queued, nothing is pending to be
//! prefilled and nothing is on its way from or to; a worker has part in one at a time. It is booked like a seed, so that whoever is placed
//! meanwhile sees it. It is dropped when the turn comes that it was to spare, when it stands in the way of a turn that finds no
//! room, and, where its destination computes, when a turn is placed there. It has one attempt; then its subject rests.
//!
//! They are looked at when a turn has ended, and once in `Clocks::errand_pace` as long as there is anything to look at.

use super::{Router, Timer};
use crate::action::{Action, Dispatch, Errand, ErrandKind, ErrandOutcome, KvUse};
use crate::admission::{Account, Demand, Stage};
use crate::errands::{Beginning, ErrandTotal, Next, Phase, Signal, Subject, UnderWay, step};
use crate::event::{FailureCause, Leg, LegId};
use crate::handoff::Request;
use crate::policies::{Choice, TurnView, WorkerView};
use crate::residency::Predicted;
use homing_kv::{BlockHash, Prompt};
use homing_units::{Duration, RequestId, SessionId, WorkerId};
use std::collections::BTreeSet;

/// So long after the last turn nothing is carried any more: nobody uses the fleet.
const IN_USE: Duration = Duration::from_secs(60);

/// A gap is expected to be at least so many times as long as what is carried in it takes.
const GAP_TIMES: f64 = 2.0;

/// Base content takes at most this part of a pool.
const POOL_PART: u64 = 8;

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

    /// A turn of it has ended well: its next one may be better served elsewhere.
    pub(super) fn wish(&mut self, session: SessionId) {
        if self.habits.errands.gaps {
            self.errands.wishes.add(self.now, session);
            self.errands.due = true;
        }
    }

    /// It is time to look again.
    pub(super) fn on_errand_pace(&mut self) {
        self.errands.due = true;
    }

    /// Starts what can be started, at the end of an event.
    pub(super) fn run_errands(&mut self) {
        if !std::mem::take(&mut self.errands.due) {
            return;
        }
        if self.queue.is_empty() && self.errands_fit() {
            for session in self.errands.wishes.open(self.now) {
                self.consider_gap(session);
            }
            if self.habits.errands.base && self.errands_fit() {
                self.consider_base();
            }
        }
        self.pace_errands();
    }

    /// Looks again after a while, if there will be anything to look at.
    fn pace_errands(&mut self) {
        let used = |last| self.now.saturating_since(last) < IN_USE;
        let any = !self.errands.wishes.is_empty() || !self.errands.base.is_empty();
        if any && self.errands.last_turn.is_some_and(used) {
            if !self.timers.is_set(Timer::ErrandPace) {
                let again = self.now + self.config.clocks.errand_pace;
                self.timers.set(Timer::ErrandPace, again);
            }
        } else {
            self.timers.clear(Timer::ErrandPace);
        }
    }

    fn errands_fit(&self) -> bool {
        self.errands.len() < self.config.limits.errands
    }

    /// Has a session's KV carried to where its next turn will better be served, or leaves the wish for later where that place or
    /// its home is not free.
    fn consider_gap(&mut self, session: SessionId) {
        if self.errands_fit() && self.gap_errand(session) != Verdict::Later {
            self.errands.wishes.remove(session);
        }
    }

    fn gap_errand(&mut self, id: SessionId) -> Verdict {
        let subject = Subject::Session(id);
        let Some(session) = self.sessions.get(id).filter(|session| session.in_flight == 0) else {
            return Verdict::Never;
        };
        let (Some(home), Some(of)) = (session.home, session.last_request) else {
            return Verdict::Never;
        };
        if self.errands.rests.rests(self.now, subject) {
            return Verdict::Never;
        }
        let (last, turns) = (session.last.clone(), session.turns);
        let next = Prompt {
            blocks: last.blocks.clone(),
            tokens: last.tokens.saturating_add(self.errands.tail_tokens()),
        };
        let (mut board, mut turn) = self.survey_of(&self.imagined(id, turns, next), turns + 1);
        turn.history_tokens = whole_tokens(&last, self.config.block_size);
        for worker in &mut board.workers {
            worker.account = Account::default();
        }
        let Some(to) = self.policy.better_home(&board, &turn).filter(|to| *to != home) else {
            return Verdict::Never;
        };
        let (Some(here), Some(there)) = (board.worker(home), board.worker(to)) else {
            return Verdict::Never;
        };
        let tokens = here.resident_tokens.min(turn.history_tokens);
        let blocks = tokens / self.config.block_size;
        if blocks == 0 || turn.expected_gap_s < GAP_TIMES * carry_s(there, tokens) {
            return Verdict::Never;
        }
        if here.denies_lend.is_some() || there.denies_seed.is_some() || !self.are_free(&[home, to]) {
            return Verdict::Later;
        }
        let errand = Errand {
            errand: self.errands.next_id(),
            kind: ErrandKind::Gap,
            session: id,
            of,
            tokens: blocks * self.config.block_size,
            from: Some(home),
            to,
        };
        let lacks = errand.tokens.saturating_sub(there.held_tokens());
        self.start_errand(errand, last.prefix(blocks, self.config.block_size), subject, lacks);
        Verdict::Started
    }

    /// Has base content carried to a decode worker that lacks it, one at a time.
    fn consider_base(&mut self) {
        for (tip, beginning) in self.errands.base.by_worth() {
            if self.base_errand(tip, beginning) == Verdict::Started {
                return;
            }
        }
    }

    fn base_errand(&mut self, tip: BlockHash, beginning: Beginning) -> Verdict {
        let block_size = self.config.block_size;
        let session = self.sessions.get(beginning.session);
        let shows = session.filter(|session| session.last.blocks.get(beginning.blocks as usize - 1) == Some(&tip));
        let Some((session, of)) = shows.and_then(|session| Some((session, session.last_request?))) else {
            self.errands.base.forget(tip);
            return Verdict::Never;
        };
        let prefix = session.last.prefix(beginning.blocks, block_size);
        let (id, turns) = (session.id, session.turns);
        let (board, turn) = self.survey_of(&self.imagined(id, turns, prefix.clone()), turns + 1);
        let enough = self.config.limits.base_tokens;
        let wants = |worker: &&WorkerView| {
            worker.role.decodes()
                && worker.lacks(&turn) >= enough
                && u64::from(prefix.tokens) <= worker.kv_tokens / POOL_PART
                && !self.errands.rests.rests(self.now, Subject::Place(tip, worker.id))
                && self.are_free(&[worker.id])
        };
        let ways = board.workers.iter().filter(wants).filter_map(|there| {
            let lacks = there.lacks(&turn);
            let from = self.lender(&board.workers, there, &turn);
            (from.is_some() || self.computes(there)).then_some((there.id, from, lacks))
        });
        let Some((to, from, lacks)) = ways.max_by_key(|(to, _, lacks)| (*lacks, std::cmp::Reverse(*to))) else {
            return Verdict::Later;
        };
        let errand = Errand {
            errand: self.errands.next_id(),
            kind: ErrandKind::Base,
            session: id,
            of,
            tokens: prefix.tokens,
            from,
            to,
        };
        self.start_errand(errand, prefix, Subject::Place(tip, to), lacks);
        Verdict::Started
    }

    /// Who could lend a worker all of a prompt, if that is sooner than computing it: one that is free, over a link that is not in doubt.
    fn lender(&self, workers: &[WorkerView], there: &WorkerView, turn: &TurnView) -> Option<WorkerId> {
        let tokens = there.lacks(turn);
        let computed_s = || {
            let pairs = crate::speed::pairs(tokens, turn.prompt_tokens);
            there.speed.prefill_s(f64::from(tokens), pairs, 0.0, 0.0)
        };
        let sooner = carry_s(there, tokens) < computed_s();
        let takes = there.transfers && there.denies_seed.is_none() && (sooner || !self.computes(there));
        let lends = |worker: &&WorkerView| {
            worker.id != there.id
                && worker.lacks(turn) == 0
                && worker.host_tokens == 0
                && worker.denies_lend.is_none()
                && self.are_free(&[worker.id])
                && !self.is_doubted(worker.id, there.id)
        };
        let lender = workers.iter().filter(|_| takes).find(lends);
        lender.map(|lender| lender.id)
    }

    fn is_doubted(&self, from: WorkerId, to: WorkerId) -> bool {
        self.links
            .all_failed(self.now, self.config.clocks.link_memory)
            .any(|(link, _)| link == (from, to))
    }

    /// Whether a worker can compute base content itself now: nobody decodes there whom it would hold up.
    fn computes(&self, there: &WorkerView) -> bool {
        there.denies_alone.is_none() && there.account.requests == 0 && there.running == 0
    }

    /// Whether nothing is queued or on its way at these workers, and none has part in an errand.
    fn are_free(&self, workers: &[WorkerId]) -> bool {
        workers.iter().all(|id| {
            let account = self.ledger.account(*id);
            let load = self.fleet.get(*id).and_then(|worker| worker.load).map(|(_, load)| load);
            let pending = account.append_tokens + account.prefill_tokens + account.seed_tokens;
            let queued = load.map_or(0, |load| load.waiting + load.transfer_queue + load.retracted);
            pending == 0 && account.seeds + account.exports == 0 && queued == 0 && !self.errands.involves(*id)
        })
    }

    /// A turn of a session with this prompt, as if it had come.
    fn imagined(&self, session: SessionId, turns: u32, prompt: Prompt) -> Request {
        let kind = self.sessions.get(session).map(|session| session.kind);
        Request {
            kind: kind.unwrap_or_default(),
            id: self.errands.next_id(),
            session,
            turn_index: turns,
            arrived: self.now,
            prompt,
            max_output_tokens: u32::MAX,
            priority: 0,
            phase: crate::handoff::Phase::Waiting,
            queued_since: self.now,
            attempt: 0,
            placed: None,
            served_since: None,
            streamed: false,
            deadline: self.now,
            pause: Duration::ZERO,
            not_before: self.now,
            wants_room: None,
            failures: 0,
            transfer_failures: 0,
            watch: None,
            avoid: BTreeSet::new(),
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

/// What became of something that was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// An errand was started for it.
    Started,
    /// It is worth one, and there is no room for it now.
    Later,
    /// It is not worth one.
    Never,
}

/// The leg of an errand: it has one attempt.
const fn errand_leg(errand: RequestId, leg: Leg) -> LegId {
    LegId {
        request: errand,
        attempt: 0,
        leg,
    }
}

/// Seconds that so many tokens take to a worker, over a link that nobody else uses.
fn carry_s(there: &WorkerView, tokens: u32) -> f64 {
    there.speed.setup_s + f64::from(tokens) * there.speed.moved_token_s
}

/// Tokens of a prompt's whole blocks.
fn whole_tokens(prompt: &Prompt, block_size: u32) -> u32 {
    u32::try_from(prompt.blocks.len()).map_or(u32::MAX, |blocks| blocks.saturating_mul(block_size))
}
