//! New turns, the queue, planning and placing. A turn that does not fit waits here and nowhere else; it is tried again when
//! something is freed, and after pauses with jitter, never all at once.

use super::{Router, Timer};
use crate::action::{Action, Decision, RouteError};
use crate::admission::Demand;
use crate::event::Turn;
use crate::handoff::{Phase, Placed, Request, Signal};
use crate::policies::{Board, Choice, Plan};
use homing_units::{Duration, Instant, RequestId};
use std::collections::BTreeSet;

impl Router {
    pub(super) fn on_turn(&mut self, turn: Turn) {
        let id = turn.request;
        if self.requests.contains_key(&id) {
            // The driver uses an id once; a second turn under it could not be told from the first.
            return;
        }
        if let Some(error) = self.turns_away(&turn) {
            self.actions.push_back(Action::Reject { request: id, error });
            return;
        }
        let session = self
            .sessions
            .begin(self.now, turn.session, &turn.prompt, &mut self.residency.index);
        let turn_index = self.sessions.get(session).map_or(0, |session| session.turns - 1);
        let request = Request {
            id,
            session,
            turn_index,
            prompt: turn.prompt,
            max_output_tokens: turn.max_output_tokens,
            phase: Phase::Waiting,
            queued_since: self.now,
            attempt: 0,
            placed: None,
            streamed: false,
            deadline: self.now + self.config.clocks.queue_wait,
            pause: Duration::ZERO,
            not_before: self.now,
            wants_room: false,
            failures: 0,
            transfer_failures: 0,
            avoid: BTreeSet::new(),
        };
        self.history.begin(self.now, &request);
        self.requests.insert(id, request);
        self.wait(id);
    }

    /// Why this turn cannot be taken at all.
    fn turns_away(&mut self, turn: &Turn) -> Option<RouteError> {
        let Some(limit) = self.fleet.longest_context() else {
            return Some(RouteError::NoWorker);
        };
        if self.needed_tokens(turn.prompt.tokens, turn.max_output_tokens) > u64::from(limit) {
            return Some(RouteError::ContextTooLong { limit });
        }
        if !self.may_hope() {
            return Some(RouteError::NoWorker);
        }
        let limits = &self.config.limits;
        let full = self.requests.len() >= limits.requests || self.queue.len() >= limits.queue;
        full.then(|| RouteError::Overloaded {
            retry_after: self.retry_after(),
        })
    }

    /// Whether any worker that decodes is alive, or may be soon.
    pub(super) fn may_hope(&self) -> bool {
        let dead = crate::action::WorkerState::Dead;
        self.fleet
            .iter()
            .any(|worker| worker.info.role.decodes() && worker.state() != dead)
    }

    /// The pool and context that a request needs, as far as it can be told before.
    pub(super) fn needed_tokens(&self, prompt_tokens: u32, max_output_tokens: u32) -> u64 {
        u64::from(prompt_tokens) + u64::from(self.output_tokens(max_output_tokens))
    }

    /// Output tokens to reckon with.
    pub(super) fn output_tokens(&self, max_output_tokens: u32) -> u32 {
        self.expected_output_tokens.min(max_output_tokens)
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
        let deadline = self.requests[&id].deadline;
        self.queue.insert((deadline, id));
        self.pause(id);
        self.try_in_turn(id);
    }

    /// Tries the first few that wait, in order.
    pub(super) fn retry_waiting(&mut self) {
        let ready = self
            .queue
            .iter()
            .filter(|(_, id)| self.requests[id].not_before <= self.now);
        let first: Vec<_> = ready
            .map(|(_, id)| *id)
            .take(self.config.limits.retries_per_release)
            .collect();
        for id in first {
            self.try_in_turn(id);
        }
    }

    /// A waiting request's pause or patience is over.
    pub(super) fn on_retry(&mut self, id: RequestId) {
        if self.requests[&id].deadline <= self.now {
            let error = if self.may_hope() {
                RouteError::QueueTimeout
            } else {
                RouteError::NoWorker
            };
            self.reject(id, error);
            return;
        }
        self.pause(id);
        self.try_in_turn(id);
    }

    /// Draws the next pause of a waiting request and sets its clock.
    fn pause(&mut self, id: RequestId) {
        let backoff = self.backoff();
        let request = self.requests.get_mut(&id).expect("only a living request waits");
        request.pause = backoff.pause(request.pause, &mut self.rng);
        let again = (self.now + request.pause).max(request.not_before).min(request.deadline);
        self.timers.set(Timer::Request(id), again);
    }

    /// Tries to place a waiting request, unless one that waited too long for room is before it.
    fn try_in_turn(&mut self, id: RequestId) {
        let request = &self.requests[&id];
        let Some((_, first)) = self.queue.first() else { return };
        let head = &self.requests[first];
        let barred = head.wants_room && self.now.saturating_since(head.queued_since) > self.config.clocks.overtake;
        if request.not_before <= self.now && (*first == id || !barred) {
            self.try_to_place(id);
        }
    }

    /// Plans a waiting request, and places it if there is room.
    fn try_to_place(&mut self, id: RequestId) {
        if !self.may_hope() {
            let error = if self.requests[&id].streamed {
                RouteError::WorkerLost
            } else {
                RouteError::NoWorker
            };
            self.reject(id, error);
            return;
        }
        let (board, turn) = self.survey(id);
        let choice = self.policy.choose(&board, &turn);
        let request = self.requests.get_mut(&id).expect("only a living request is planned");
        match choice.plan {
            Some(plan) => self.place(id, plan, &choice, &board),
            None => {
                request.wants_room = choice
                    .considered
                    .iter()
                    .any(|plan| plan.denied.is_some_and(|why| !why.is_lasting()));
                self.history.waits(id, &choice.reason);
            }
        }
    }

    /// Books a plan, tells it, and starts it: the one place where a request leaves the queue for workers.
    fn place(&mut self, id: RequestId, plan: Plan, choice: &Choice, board: &Board) {
        let request = self.requests.get_mut(&id).expect("only a living request is placed");
        let prompt_tokens = request.prompt.tokens;
        let cached = |worker| {
            board
                .worker(worker)
                .map_or(0, |view| view.held_tokens().min(prompt_tokens))
        };
        let decode_cached_tokens = cached(plan.decode);
        let prefill_cached_tokens = plan.prefill.map_or(0, cached);
        request.placed = Some(Placed {
            plan,
            decode_cached_tokens,
            prefill_cached_tokens,
        });
        request.wants_room = false;
        request.pause = Duration::ZERO;
        self.queue.remove(&(request.deadline, id));
        let prompt = request.prompt.clone();
        let output_tokens = self.expected_output_tokens.min(request.max_output_tokens);
        let reserve_tokens = self
            .ledger
            .reserve_tokens(plan.decode, &prompt, output_tokens, self.config.block_size);
        let demand = Demand {
            decode: plan.decode,
            prefill: plan.prefill,
            prompt,
            reserve_tokens,
            tail_tokens: prompt_tokens - decode_cached_tokens,
            prefill_tokens: prompt_tokens - prefill_cached_tokens,
        };
        self.ledger.book(id, demand);
        self.sessions.settle(self.requests[&id].session, plan.decode, plan.path);
        self.tell(id, plan, decode_cached_tokens, choice);
        self.signal(
            id,
            Signal::Placed {
                prefills_elsewhere: plan.prefill.is_some(),
            },
        );
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
            prompt_tokens: request.prompt.tokens,
            expected_cached_tokens,
            queued: self.now.saturating_since(request.queued_since),
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
        self.now + allowed
    }
}

/// So many times a duration, without overflow.
fn times(duration: Duration, count: u64) -> Duration {
    duration.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX))
}
