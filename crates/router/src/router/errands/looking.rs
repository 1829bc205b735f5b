//! What is worth an errand now: a session whose next turn will better be served elsewhere, or base content that a decode worker lacks.
//!
//! Both are found by a survey of a turn that has not come. It decides only; how an errand goes is its parent's.

use crate::action::{Errand, ErrandKind};
use crate::admission::Account;
use crate::errands::{Beginning, Subject};
use crate::fleet::Worker;
use crate::handoff::Request;
use crate::policies::{TurnView, WorkerView};
use crate::router::{Router, Timer};
use homing_kv::{BlockHash, Prompt, Tier};
use homing_units::{Duration, SessionId, WorkerId};
use std::collections::BTreeSet;

/// So long after the last turn nothing is carried any more: nobody uses the fleet.
const IN_USE: Duration = Duration::from_secs(60);

/// A gap is expected to be at least so many times as long as what is carried in it takes.
const GAP_TIMES: f64 = 2.0;

/// Base content takes at most this part of a pool.
const POOL_PART: u64 = 8;

impl Router {
    /// A turn of it has ended well: its next one may be better served elsewhere.
    pub(in crate::router) fn wish(&mut self, session: SessionId) {
        if self.habits.errands.gaps {
            self.errands.wishes.add(self.now, session);
            self.errands.due = true;
        }
    }

    /// It is time to look again.
    pub(in crate::router) fn on_errand_pace(&mut self) {
        self.errands.due = true;
    }

    /// Starts what can be started, at the end of an event.
    pub(in crate::router) fn run_errands(&mut self) {
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
    pub(super) fn pace_errands(&mut self) {
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
        // A survey of all workers costs more than a look for those that may want it.
        let may_want = |worker: &&Worker| self.may_want(worker, tip, prefix.tokens);
        let able: BTreeSet<WorkerId> = self
            .fleet
            .iter()
            .filter(may_want)
            .map(|worker| worker.info.id)
            .collect();
        if able.is_empty() {
            return Verdict::Later;
        }
        let (board, turn) = self.survey_of(&self.imagined(id, turns, prefix.clone()), turns + 1);
        let enough = self.config.limits.base_tokens;
        let wants = |worker: &&WorkerView| able.contains(&worker.id) && worker.lacks(&turn) >= enough;
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

    /// Whether a worker decodes, has room and time for base content of so many tokens that ends in this block, and lacks that block.
    fn may_want(&self, worker: &Worker, tip: BlockHash, tokens: u32) -> bool {
        let id = worker.info.id;
        let holds = |tier| self.residency.index.holds(id, tip, tier);
        worker.info.role.decodes()
            && u64::from(tokens) <= worker.info.kv_tokens / POOL_PART
            && !holds(Tier::Gpu)
            && !holds(Tier::Host)
            && !self.errands.rests.rests(self.now, Subject::Place(tip, id))
            && self.are_free(&[id])
    }

    /// Who could lend a worker all of a prompt, if that is sooner than computing it: one that is free, over a link that is not in doubt.
    fn lender(&self, workers: &[WorkerView], there: &WorkerView, turn: &TurnView) -> Option<WorkerId> {
        let tokens = there.lacks(turn);
        let computed_s = || {
            let pairs = crate::speed::pairs(tokens, turn.prompt_tokens);
            there
                .speed
                .prefill_s(f64::from(tokens), pairs, &there.speed.beside(0.0, 0.0))
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
            ..Request::new(self.now, self.errands.next_id(), (session, turns), prompt)
        }
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

/// Seconds that so many tokens take to a worker, over a link that nobody else uses.
fn carry_s(there: &WorkerView, tokens: u32) -> f64 {
    there.speed.setup_s + f64::from(tokens) * there.speed.moved_token_s
}

/// Tokens of a prompt's whole blocks.
fn whole_tokens(prompt: &Prompt, block_size: u32) -> u32 {
    u32::try_from(prompt.blocks.len()).map_or(u32::MAX, |blocks| blocks.saturating_mul(block_size))
}
