//! New turns, the queue, planning and placing. A turn that does not fit waits here and nowhere else; it is tried again when
//! something is freed, and after pauses with jitter, never all at once.

use super::{Router, Timer};
use crate::action::{Action, Decision, Errand, RouteError, WorkerState};
use crate::admission::{Demand, Denied};
use crate::event::{ClientKind, Leg, Turn};
use crate::fleet::Worker;
use crate::handoff::{Phase, Placed, Request, Signal};
use crate::policies::{Board, Choice, Order, Plan, TurnView};
use crate::queue::{Place, Rank};
use homing_units::{Duration, Instant, RequestId, SessionId};

/// So many that wait double their pauses.
const CROWD: usize = 64;

/// Turns that lack numbers of tokens within this factor of each other are about as much work.
const ALIKE: u32 = 8;

impl Router {
    pub(super) fn on_turn(&mut self, turn: Turn) {
        let id = turn.request;
        if self.requests.contains_key(&id) {
            // The driver uses an id once; a second turn under it could not be told from the first.
            return;
        }
        if id >= Errand::FIRST_ID {
            // Nor could one be told from an errand whose id it bears.
            let error = RouteError::Refused;
            self.actions.push_back(Action::Reject { request: id, error });
            return;
        }
        if let Some(error) = self.turns_away(&turn) {
            self.actions.push_back(Action::Reject { request: id, error });
            return;
        }
        let session = self.sessions.begin(self.now, &turn, &mut self.residency.index);
        let turn_index = self.sessions.get(session).map_or(0, |session| session.turns - 1);
        let request = Request {
            max_output_tokens: turn.max_output_tokens,
            priority: turn.priority,
            kind: turn.kind,
            deadline: self.now + self.config.clocks.queue_wait,
            ..Request::new(self.now, id, (session, turn_index), turn.prompt)
        };
        self.history.begin(self.now, &request);
        self.requests.insert(id, request);
        self.errands_meet_turn(id, session);
        self.wait(id);
    }

    /// Why this turn cannot be taken at all.
    fn turns_away(&mut self, turn: &Turn) -> Option<RouteError> {
        let needed = self.needed_tokens(turn.kind, turn.prompt.tokens, turn.max_output_tokens);
        if let Some(error) = self.hopeless(needed) {
            return Some(error);
        }
        let limits = &self.config.limits;
        let full = self.requests.len() >= limits.requests || self.queue.len() >= limits.queue;
        full.then(|| RouteError::Overloaded {
            retry_after: self.retry_after(),
        })
    }

    /// Why waiting does not help a request that needs so many tokens: no worker could ever hold it, or none that could is
    /// alive or may be soon.
    fn hopeless(&self, needed_tokens: u64) -> Option<RouteError> {
        let dead = |worker: &Worker| worker.state() == WorkerState::Dead;
        // Looked at only where a worker needs it, which is seldom.
        let is_aided = || self.fleet.iter().any(|worker| worker.aids() && !dead(worker));
        let able = |worker: &Worker| !dead(worker) && (worker.serves_alone() || is_aided());
        if self.fleet.any_decodes(needed_tokens, able) {
            return None;
        }
        let Some(limit) = self.fleet.longest_context(|_| true) else {
            return Some(RouteError::NoWorker);
        };
        if needed_tokens > u64::from(limit) {
            return Some(RouteError::ContextTooLong { limit });
        }
        let limit = self.fleet.longest_context(able);
        limit
            .is_none_or(|limit| needed_tokens > u64::from(limit))
            .then_some(RouteError::NoWorker)
    }

    /// The pool and context that a request needs, as far as it can be told before.
    pub(super) fn needed_tokens(&self, kind: ClientKind, prompt_tokens: u32, max_output_tokens: u32) -> u64 {
        u64::from(prompt_tokens) + u64::from(self.output_tokens(kind, max_output_tokens))
    }

    /// Output tokens to reckon with.
    pub(super) fn output_tokens(&self, kind: ClientKind, max_output_tokens: u32) -> u32 {
        let expected = self.sessions.clients().output_tokens(kind).max(1.0);
        (expected as u32).min(max_output_tokens)
    }

    /// What to tell a client that comes at a bad time; drawn, so that those who are turned away together do not come
    /// back together.
    pub(super) fn retry_after(&mut self) -> Duration {
        let about = self.config.clocks.retry_after;
        let backoff = crate::backoff::Backoff {
            base: about / 2,
            cap: about * 2,
        };
        backoff.pause(about, &mut self.rng)
    }

    /// Puts a request that is in phase `Waiting` into the queue, and tries to place it at once where it may overtake.
    pub(super) fn wait(&mut self, id: RequestId) {
        let request = &self.requests[&id];
        let place = Place {
            session: request.session,
            rank: self.rank(request),
            deadline: request.deadline,
            overdue: request.queued_since + self.config.clocks.overdue,
            not_before: request.not_before,
            waits_for: None,
        };
        self.queue.insert(id, place);
        self.pause(id);
        self.try_in_turn(id);
    }

    /// Where a request that begins to wait stands in the queue's order. What it lacks is not known yet.
    fn rank(&self, request: &Request) -> Rank {
        Rank {
            priority: request.priority,
            service: self.service_level(request.session),
            work: 0,
        }
    }

    /// How much service a session has had, as far as the queue's order is by that.
    pub(super) fn service_level(&self, session: SessionId) -> i32 {
        let half_life = self.config.clocks.service_half_life;
        match self.habits.order {
            Order::Arrival => 0,
            Order::Service | Order::Work => {
                let session = self.sessions.get(session);
                session.map_or(0, |session| session.service.level(self.now, half_life))
            }
        }
    }

    /// How much is to be computed for a turn, as far as the queue's order is by that: what no worker holds of its prompt.
    fn work(&self, board: &Board, turn: &TurnView) -> u32 {
        match self.habits.order {
            Order::Arrival | Order::Service => 0,
            Order::Work => {
                let lacks = board.workers.iter().map(|worker| worker.lacks(turn)).min();
                lacks.unwrap_or(turn.prompt_tokens).checked_ilog(ALIKE).unwrap_or(0)
            }
        }
    }

    /// Tries the first few of those that what was freed may help, in order.
    pub(super) fn retry_waiting(&mut self) {
        for id in self.queue.take_ready(self.now, self.config.limits.retries_per_release) {
            self.try_in_turn(id);
        }
    }

    /// A waiting request's pause or patience is over.
    pub(super) fn on_retry(&mut self, id: RequestId) {
        if self.requests[&id].deadline <= self.now {
            self.reject(id, RouteError::QueueTimeout);
            return;
        }
        self.pause(id);
        self.try_in_turn(id);
    }

    /// Draws the next pause of a waiting request and sets its clock. The more there are, the longer they sleep, so that looking
    /// at them in vain stays a small part of the work.
    fn pause(&mut self, id: RequestId) {
        let crowd = u32::try_from(self.queue.len() / CROWD + 1).unwrap_or(u32::MAX);
        let backoff = self.backoff();
        let request = self.requests.get_mut(&id).expect("only a living request waits");
        request.pause = backoff.pause(request.pause, &mut self.rng);
        let again = (self.now + request.pause.saturating_mul(crowd))
            .max(request.not_before)
            .min(request.deadline);
        self.timers.set(Timer::Request(id), again);
    }

    /// Tries to place a waiting request, unless it is not to be looked at yet.
    fn try_in_turn(&mut self, id: RequestId) {
        if self.requests[&id].not_before <= self.now {
            self.try_to_place(id);
        }
    }

    /// The plan whose workers are kept from this request, for the senior of the queue once that has waited too long for room.
    /// Nobody overtakes it there but those who may go before it; elsewhere others go on, since they take nothing from it.
    pub(super) fn kept_from(&self, request: &Request) -> Option<Plan> {
        let senior = self.queue.senior(self.now).filter(|senior| senior.id != request.id)?;
        let rank = self.queue.rank_of(request.id).unwrap_or_default();
        let first = &self.requests[&senior.id];
        let long = self.now.saturating_since(first.queued_since) > self.config.clocks.overtake;
        first.wants_room.filter(|_| long && senior.precedes(rank))
    }

    /// Plans a waiting request, and places it if there is room.
    fn try_to_place(&mut self, id: RequestId) {
        let request = &self.requests[&id];
        if let Some(error) =
            self.hopeless(self.needed_tokens(request.kind, request.prompt.tokens, request.max_output_tokens))
        {
            let error = if request.streamed {
                RouteError::WorkerLost
            } else {
                error
            };
            self.reject(id, error);
            return;
        }
        let (mut board, mut turn, mut choice) = self.consider(id);
        if choice.is_stuck() && self.forgive(id) {
            (board, turn, choice) = self.consider(id);
        }
        if choice.plan.is_none() && self.errands_make_way(&choice) {
            (board, turn, choice) = self.consider(id);
        }
        if let Some(plan) = choice.plan {
            self.place(id, plan, &choice, &board);
            return;
        }
        let request = self.requests.get_mut(&id).expect("only a living request is planned");
        // Who waits for sessions to end bars nobody: those that run on have to.
        let crowded = choice
            .considered
            .iter()
            .any(|plan| plan.denied == Some(Denied::Crowded));
        let full = choice
            .considered
            .iter()
            .find(|plan| plan.denied.is_some_and(Denied::is_room));
        request.wants_room = full.filter(|_| !crowded).map(|full| full.plan);
        if let Some(pause) = choice.pause {
            request.not_before = self.now + pause;
            self.queue.sleeps(id, request.not_before);
            let again = request.not_before.min(request.deadline);
            self.timers.set(Timer::Request(id), again);
        }
        if crowded {
            self.sessions.pause(self.requests[&id].session);
        }
        let work = self.work(&board, &turn);
        self.queue.waits_for(id, choice.waits_for, work);
        self.history.waits(id, &choice.reason);
    }

    /// What the policy makes of the board as it is now.
    fn consider(&mut self, id: RequestId) -> (Board, TurnView, Choice) {
        let (board, turn) = self.survey(id);
        let choice = board.aided(self.policy.choose(&board, &turn), &turn);
        let choice = self.sourced(choice, &board, &turn);
        (board, turn, choice)
    }

    /// Avoids nobody any more; whether there was anybody. To avoid those who failed a request is right while there are
    /// others; it must not keep it from the only prefill worker until its patience is over.
    fn forgive(&mut self, id: RequestId) -> bool {
        let request = self.requests.get_mut(&id).expect("only a living request is planned");
        !std::mem::take(&mut request.avoid).is_empty()
    }

    /// Books a plan, tells it, and starts it: the one place where a request leaves the queue for workers.
    fn place(&mut self, id: RequestId, plan: Plan, choice: &Choice, board: &Board) {
        for worker in plan.prefill.into_iter().chain([plan.decode]) {
            self.errands_yield(worker);
        }
        let decode_untold_tokens = self.untold_tokens(id, plan.decode);
        let request = self.requests.get_mut(&id).expect("only a living request is placed");
        let prompt_tokens = request.prompt.tokens;
        let cached = |worker| {
            board
                .worker(worker)
                .map_or(0, |view| view.held_tokens().min(prompt_tokens))
        };
        let decode_cached_tokens = cached(plan.decode);
        let fetched_tokens = plan.fetch.map_or(0, |fetch| fetch.tokens);
        let prefill_cached_tokens = plan.prefill.map_or(0, cached).max(fetched_tokens);
        request.placed = Some(Placed {
            plan,
            decode_cached_tokens,
            decode_untold_tokens,
            prefill_cached_tokens,
        });
        request.pause = Duration::ZERO;
        request.served_since = Some(self.now);
        let is_senior = self.queue.senior(self.now).is_some_and(|senior| senior.id == id);
        if request.wants_room.take().is_some() && is_senior {
            // Whom it kept from overtaking may look again.
            self.queue.free_all();
        }
        self.queue.remove(id);
        let prompt = request.prompt.clone();
        let request = &self.requests[&id];
        let output_tokens = self.output_tokens(request.kind, request.max_output_tokens);
        let reserve_tokens = self
            .ledger
            .reserve_tokens(plan.decode, &prompt, output_tokens, self.config.block_size);
        let export_tokens = self.export_tokens(plan.prefill, &prompt);
        let demand = Demand {
            decode: plan.decode,
            prefill: plan.prefill,
            fetch: plan.fetch,
            prompt,
            reserve_tokens,
            tail_tokens: prompt_tokens - decode_cached_tokens,
            prefill_tokens: prompt_tokens - prefill_cached_tokens,
            export_tokens,
        };
        self.ledger.book(id, demand);
        if let Some(worker) = self.fleet.get_mut(plan.decode) {
            worker.assigned_requests += 1;
        }
        self.sessions.settle(self.requests[&id].session, plan.decode, plan.path);
        self.tell(id, plan, decode_cached_tokens, choice);
        self.signal(id, Signal::Placed { first: first_leg(plan) });
    }

    fn tell(&mut self, id: RequestId, plan: Plan, expected_cached_tokens: u32, choice: &Choice) {
        let request = &self.requests[&id];
        let considered = choice.considered.iter().take(self.config.limits.candidates);
        let decision = Decision {
            request: id,
            attempt: request.attempt,
            session: request.session,
            turn_index: request.turn_index,
            path: plan.path,
            prefill: plan.prefill,
            decode: plan.decode,
            fetch: plan.fetch,
            prompt_tokens: request.prompt.tokens,
            expected_cached_tokens,
            keeps_kv: choice.keeps_kv,
            queued: self.now.saturating_since(request.queued_since),
            expected_ttft: choice.expected_ttft,
            candidates: considered.map(crate::policies::Considered::candidate).collect(),
            reason: choice.reason.clone(),
        };
        self.history.decided(self.now, &decision);
        self.actions.push_back(Action::Decided(Box::new(decision)));
    }

    /// The clock of a request's phase, which starts with the phase.
    pub(super) fn phase_deadline(&self, request: &Request) -> Instant {
        let clocks = &self.config.clocks;
        let prompt = u64::from(request.prompt.tokens);
        let plan = request.placed.map(|placed| placed.plan);
        let account = |worker: Option<_>| worker.map(|worker| self.ledger.account(worker)).unwrap_or_default();
        let allowed = match request.phase {
            Phase::Waiting => return request.deadline,
            Phase::Lending | Phase::Fetching => clocks.fetch,
            Phase::Prefilling => {
                let ahead = account(plan.and_then(|plan| plan.prefill)).prefill_tokens;
                clocks.prefill_base + times(clocks.prefill_per_token, prompt + ahead)
            }
            Phase::Connecting => {
                let ahead = account(plan.map(|plan| plan.decode)).append_tokens;
                clocks.first_token_base + times(clocks.first_token_per_token, prompt + ahead)
            }
            Phase::Streaming => {
                clocks.stream_base + times(clocks.stream_per_token, u64::from(request.max_output_tokens))
            }
            Phase::Yielding(_) => clocks.cancel_answer,
        };
        let given_up = match (request.phase, self.habits.request_timeout) {
            (Phase::Lending | Phase::Fetching | Phase::Prefilling | Phase::Connecting, Some(timeout)) => {
                (request.arrived + timeout).max(self.now)
            }
            _ => return self.now + allowed,
        };
        given_up.min(self.now + allowed)
    }
}

/// The leg that a plan begins with.
const fn first_leg(plan: Plan) -> Leg {
    match (plan.fetch, plan.prefill) {
        (Some(_), Some(_)) => Leg::Lend,
        (None, Some(_)) => Leg::Prefill,
        (_, None) => Leg::Decode,
    }
}

/// So many times a duration, without overflow.
fn times(duration: Duration, count: u64) -> Duration {
    duration.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX))
}
