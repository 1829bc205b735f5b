//! Answers and failures of legs. An answer is first checked to be of the present attempt, then becomes a signal of the
//! handoff machine, and what the machine says is carried out here: cancels first, then the booking, then the next leg.

use super::{Router, Timer};
use crate::action::{Action, Dispatch, Fetch, KvUse, RouteError};
use crate::admission::Stage;
use crate::event::{Leg, LegFailure, LegId, LegUsage, Resume};
use crate::handoff::{self, Cancels, Cut, Failure, Next, Phase, Placed, Reason, Request, Signal};
use homing_units::{RequestId, WorkerId};
use std::sync::Arc;

/// A report this many blocks below what was expected is an error of the router's, not of rounding.
const SLACK_BLOCKS: u32 = 2;

impl Router {
    pub(super) fn on_prefill_done(&mut self, leg: LegId, cached_tokens: Option<u32>) {
        if self.errand_answers(leg) {
            return;
        }
        let Some(placed) = self.present(leg, leg.leg) else {
            return;
        };
        let Some(worker) = placed.plan.worker_of(leg.leg) else {
            return;
        };
        match (leg.leg, placed.plan.fetch) {
            (Leg::Prefill, _) => {
                self.learn_cached(leg.request, worker, placed.prefill_cached_tokens, cached_tokens);
                self.history.found(leg.request, cached_tokens);
                self.learn_prefill(leg.request, worker);
                self.prefilled(worker);
            }
            (Leg::Lend, Some(fetch)) => self.learn_cached(leg.request, worker, fetch.tokens, cached_tokens),
            (Leg::Fetch, Some(fetch)) => self.links.worked(fetch.from, worker),
            (Leg::Lend | Leg::Fetch, None) | (Leg::Decode, _) => return,
        }
        self.works(worker);
        self.signal(leg.request, Signal::Done(leg.leg));
    }

    pub(super) fn on_first_token(&mut self, leg: LegId) {
        if let Some(placed) = self.present(leg, Leg::Decode) {
            self.works(placed.plan.decode);
            self.history.answers(self.now, leg.request);
            if let Some(request) = self.requests.get_mut(&leg.request) {
                request.streamed = true;
                let ttft = self.now.saturating_since(request.arrived);
                if let Some(worker) = self.fleet.get_mut(placed.plan.decode) {
                    worker.learn_ttft(ttft.as_secs_f64());
                }
            }
            self.learn_prefill(leg.request, placed.plan.decode);
            if placed.plan.prefill.is_none() {
                self.prefilled(placed.plan.decode);
            }
            self.signal(leg.request, Signal::FirstToken);
            self.watch_answer(leg.request, placed.plan.decode);
        }
    }

    pub(super) fn on_finished(&mut self, leg: LegId, usage: LegUsage) {
        if let Some(placed) = self.present(leg, Leg::Decode) {
            let decode = placed.plan.decode;
            self.works(decode);
            self.learn_cached(leg.request, decode, placed.decode_cached_tokens, usage.cached_tokens);
            self.learn_sketched(decode, &placed, usage.cached_tokens);
            if placed.plan.prefill.is_none() {
                self.history.found(leg.request, usage.cached_tokens);
            }
            self.history.generated(leg.request, usage.output_tokens);
            self.sessions
                .answered(self.requests[&leg.request].kind, usage.output_tokens);
            self.learn_answer(leg.request, decode, usage.output_tokens);
            self.predict(leg.request, decode);
            self.signal(leg.request, Signal::Finished);
        }
    }

    pub(super) fn on_leg_failed(&mut self, failure: LegFailure) {
        let LegFailure { leg, cause, resume } = failure;
        if self.errand_fails(leg, cause) || self.present(leg, leg.leg).is_none() {
            return;
        }
        let request = self
            .requests
            .get_mut(&leg.request)
            .expect("the present attempt's request lives");
        let cut = match resume {
            Resume::Start => Cut::Resumable,
            Resume::After {
                prompt,
                max_output_tokens,
            } => {
                request.prompt = prompt;
                request.max_output_tokens = max_output_tokens;
                request.streamed = true;
                Cut::Resumable
            }
            Resume::Impossible => {
                request.streamed = true;
                Cut::Final
            }
        };
        self.signal(
            leg.request,
            match leg.leg {
                Leg::Lend | Leg::Fetch | Leg::Prefill => Signal::Failed(leg.leg, cause),
                Leg::Decode => Signal::DecodeFailed(cause, cut),
            },
        );
    }

    pub(super) fn on_client_gone(&mut self, request: RequestId) {
        self.signal(request, Signal::ClientGone);
    }

    pub(super) fn on_overdue(&mut self, request: RequestId) {
        self.signal(request, Signal::Overdue);
    }

    /// The plan of a leg, if it is of the present attempt: the fence against late answers.
    fn present(&self, leg: LegId, expected: Leg) -> Option<Placed> {
        let request = self.requests.get(&leg.request)?;
        let placed = request.placed?;
        (leg.leg == expected && request.attempt == leg.attempt).then_some(placed)
    }

    /// Steps a request's machine and carries out what it says.
    pub(super) fn signal(&mut self, id: RequestId, signal: Signal) {
        let Some(request) = self.requests.get(&id) else { return };
        let transition = handoff::step(request.phase, signal);
        self.cancel(id, transition.cancels);
        match transition.next {
            Next::Stay => {}
            Next::Send(Leg::Lend) => self.send_lend(id),
            Next::Send(Leg::Fetch) => self.send_fetch(id),
            Next::Send(Leg::Prefill) => self.send_prefill(id),
            Next::Send(Leg::Decode) => self.send_decode(id),
            Next::Stream => self.stream(id),
            Next::Yield(failure) => self.yields(id, failure),
            Next::Presume(failure) => self.presume(id, failure),
            Next::Replan(failure) => self.replan(id, failure),
            Next::Retry => self.on_retry(id),
            Next::Reject(failure) => self.fail(id, failure),
            Next::Finish => {
                let session = self.requests[&id].session;
                self.sessions.resident(session);
                self.end(id, "finished");
                self.wish(session);
            }
            Next::Drop => self.end(id, "client gone"),
        }
    }

    fn cancel(&mut self, id: RequestId, cancels: Cancels) {
        let Some(Request {
            attempt,
            placed: Some(placed),
            ..
        }) = self.requests.get(&id)
        else {
            return;
        };
        let legs = [Leg::Lend, Leg::Fetch, Leg::Prefill, Leg::Decode];
        let cancelled = legs.into_iter().filter(|leg| cancels.contains(*leg));
        for (leg, worker) in cancelled.filter_map(|leg| Some((leg, placed.plan.worker_of(leg)?))) {
            self.actions.push_back(Action::Cancel {
                leg: LegId {
                    request: id,
                    attempt: *attempt,
                    leg,
                },
                worker,
            });
        }
    }

    fn send_lend(&mut self, id: RequestId) {
        self.enter(id, Phase::Lending);
        let fetch = self.fetch(id);
        self.dispatch(id, Leg::Lend, fetch.from, KvUse::Export);
    }

    fn send_fetch(&mut self, id: RequestId) {
        self.enter(id, Phase::Fetching);
        let (fetch, plan) = (self.fetch(id), self.plan(id));
        let prefill = plan.prefill.expect("a history is fetched by a prefill worker");
        self.dispatch(id, Leg::Fetch, prefill, KvUse::Import { from: fetch.from });
    }

    fn send_prefill(&mut self, id: RequestId) {
        if let Some(fetch) = self.plan(id).fetch {
            self.ledger.advance(id, Stage::Prefill);
            self.queue.free(fetch.from);
        }
        self.enter(id, Phase::Prefilling);
        let prefill = self.plan(id).prefill.expect("a plan with a prefill leg says where");
        self.predict(id, prefill);
        let lacks = self.requests[&id].prompt.tokens - self.placed(id).prefill_cached_tokens;
        self.watch_prefill(id, prefill, lacks);
        self.dispatch(id, Leg::Prefill, prefill, KvUse::Export);
    }

    fn send_decode(&mut self, id: RequestId) {
        let plan = self.plan(id);
        if let Some(prefill) = plan.prefill {
            self.ledger.advance(id, Stage::Pull);
            self.queue.free(prefill);
        }
        self.enter(id, Phase::Connecting);
        self.predict(id, plan.decode);
        let lacks = self.requests[&id].prompt.tokens - self.placed(id).decode_cached_tokens;
        match plan.prefill {
            None => self.watch_prefill(id, plan.decode, lacks),
            Some(from) => self.watch_pull(id, from, plan.decode, lacks),
        }
        let kv = plan.prefill.map_or(KvUse::Local, |from| KvUse::Import { from });
        self.dispatch(id, Leg::Decode, plan.decode, kv);
    }

    fn stream(&mut self, id: RequestId) {
        let plan = self.plan(id);
        self.ledger.advance(id, Stage::Decode);
        self.queue.free(plan.decode);
        self.sessions.resident(self.requests[&id].session);
        if let Some(prefill) = plan.prefill {
            self.queue.free(prefill);
            self.links.worked(prefill, plan.decode);
        }
        self.enter(id, Phase::Streaming);
    }

    /// The decode leg was cancelled: what it had booked is free, and the driver is to say where to resume.
    fn yields(&mut self, id: RequestId, failure: Failure) {
        self.release(id);
        self.enter(id, Phase::Yielding(failure));
    }

    fn presume(&mut self, id: RequestId, failure: Failure) {
        if self.requests[&id].streamed {
            self.fail(id, failure)
        } else {
            self.replan(id, failure)
        }
    }

    /// Accounts for a failure, and plans again or gives up.
    fn replan(&mut self, id: RequestId, failure: Failure) {
        self.release(id);
        self.blame(id, failure);
        let request = self
            .requests
            .get_mut(&id)
            .expect("only a living request is planned again");
        request.placed = None;
        request.attempt += 1;
        if failure.reason == Reason::Busy {
            request.not_before = self.now + self.config.clocks.backoff_base;
        } else {
            request.failures += 1;
            // A new chance is a new wait; the number of chances is bounded.
            request.queued_since = self.now;
            request.deadline = self.now + self.config.clocks.queue_wait;
        }
        if request.failures >= self.habits.attempts.unwrap_or(self.config.limits.attempts) {
            self.fail(id, failure);
            return;
        }
        request.phase = Phase::Waiting;
        self.history.failed(self.now, id, failure);
        self.wait(id);
    }

    /// Who is to be avoided, doubted or left in peace because of a failure.
    fn blame(&mut self, id: RequestId, failure: Failure) {
        let plan = self.plan(id);
        let culprit = plan.worker_of(failure.leg).unwrap_or(plan.decode);
        if matches!(failure.leg, Leg::Prefill | Leg::Decode) {
            self.residency.retract(culprit, self.requests[&id].session);
        }
        let pause = self.backoff();
        let request = self.requests.get_mut(&id).expect("only a living request fails");
        match failure.reason {
            Reason::Busy => {
                if let Some(worker) = self.fleet.get_mut(culprit) {
                    worker.busy_pause = pause.pause(worker.busy_pause, &mut self.rng);
                    worker.busy_until = self.now + worker.busy_pause;
                }
            }
            Reason::Transfer => request.transfer_failures += 1,
            Reason::Engine | Reason::Slow => {
                request.avoid.insert(culprit);
            }
            Reason::Unreachable => {
                // Others may wait for it to come back; this one has waited enough.
                request.avoid.insert(culprit);
                if let Some(worker) = self.fleet.get_mut(culprit) {
                    worker.doubt();
                }
                self.announce(culprit);
            }
            Reason::Lost => {
                request.avoid.insert(culprit);
            }
            Reason::Invalid => {}
        }
        if let (Reason::Transfer, Some((from, to))) = (failure.reason, plan.link_of(failure.leg)) {
            self.links.failed(self.now, from, to, self.config.clocks.link_memory);
        }
    }

    /// The last failure: the client is told.
    fn fail(&mut self, id: RequestId, failure: Failure) {
        if self.requests[&id].placed.is_some() {
            self.blame(id, failure);
        }
        let retry_after = self.retry_after();
        self.reject(id, failure.reason.error(retry_after));
    }

    /// Ends a request with an error.
    pub(super) fn reject(&mut self, id: RequestId, error: RouteError) {
        self.actions.push_back(Action::Reject { request: id, error });
        self.end(id, error.kind());
    }

    /// Ends a request: the one place where one leaves the router.
    fn end(&mut self, id: RequestId, outcome: &'static str) {
        self.release(id);
        self.timers.clear(Timer::Request(id));
        let request = self.requests.remove(&id).expect("only a living request ends");
        self.queue.remove(id);
        self.sessions.end(self.now, request.session, &mut self.residency.index);
        self.history.ended(self.now, id, outcome);
    }

    fn release(&mut self, id: RequestId) {
        if self.ledger.release(id) {
            self.account_for_service(id);
            let plan = self.plan(id);
            self.queue.free(plan.decode);
            let lender = plan.fetch.map(|fetch| fetch.from);
            plan.prefill
                .into_iter()
                .chain(lender)
                .for_each(|other| self.queue.free(other));
        }
    }

    /// Its session has had the place that the request gives up.
    fn account_for_service(&mut self, id: RequestId) {
        let request = self.requests.get_mut(&id).expect("only a living request had a place");
        if let Some(since) = request.served_since.take() {
            let served = self.now.saturating_since(since);
            let half_life = self.config.clocks.service_half_life;
            let session = request.session;
            self.sessions.serve(self.now, session, served, half_life);
            self.queue.served(session, self.service_level(session));
        }
    }

    fn enter(&mut self, id: RequestId, phase: Phase) {
        self.requests
            .get_mut(&id)
            .expect("only a living request changes its phase")
            .phase = phase;
        let deadline = self.phase_deadline(&self.requests[&id]);
        self.timers.set(Timer::Request(id), deadline);
    }

    fn dispatch(&mut self, id: RequestId, leg: Leg, worker: WorkerId, kv: KvUse) {
        let attempt = self.requests[&id].attempt;
        let history = matches!(leg, Leg::Lend | Leg::Fetch);
        let prefix_tokens = self.plan(id).fetch.filter(|_| history).map(|fetch| fetch.tokens);
        self.actions.push_back(Action::Dispatch(Dispatch {
            leg: LegId {
                request: id,
                attempt,
                leg,
            },
            worker,
            kv,
            prefix_tokens,
        }));
    }

    fn placed(&self, id: RequestId) -> Placed {
        self.requests[&id].placed.expect("a request with legs has a plan")
    }

    fn plan(&self, id: RequestId) -> crate::policies::Plan {
        self.placed(id).plan
    }

    fn fetch(&self, id: RequestId) -> Fetch {
        self.plan(id)
            .fetch
            .expect("a request whose history is moved has a plan that says so")
    }

    /// A leg was answered there: it lives and works.
    pub(super) fn works(&mut self, worker: WorkerId) {
        if let Some(worker) = self.fleet.get_mut(worker) {
            worker.trust();
        }
    }

    /// This request's prompt will lie, or lies, at this worker.
    fn predict(&mut self, id: RequestId, worker: WorkerId) {
        let request = &self.requests[&id];
        let (session, prompt) = (request.session, request.prompt.clone());
        self.predict_prompt(session, &prompt, worker);
    }

    /// Compares what a worker's sketches said with what was found there, and with what would have been expected without.
    fn learn_sketched(&mut self, worker: WorkerId, placed: &Placed, reported: Option<u32>) {
        let told = placed.decode_untold_tokens.zip(reported);
        if let (Some((untold, reported)), Some(record)) = (told, self.fleet.get_mut(worker)) {
            record.sketched.count(untold, placed.decode_cached_tokens, reported);
        }
    }

    /// Compares what was expected in a cache with what was found there.
    fn learn_cached(&mut self, id: RequestId, worker: WorkerId, expected: u32, reported: Option<u32>) {
        let (Some(record), Some(reported)) = (self.fleet.get_mut(worker), reported) else {
            return;
        };
        let prompt = Arc::clone(&self.requests[&id].prompt.blocks);
        let reported = reported.min(self.requests[&id].prompt.tokens);
        record.cache.count(expected, reported);
        let block_size = self.config.block_size;
        if reported + SLACK_BLOCKS * block_size < expected {
            let reported_blocks = (reported / block_size) as usize;
            let partial = record.feed.is_partial();
            self.residency.correct(worker, &prompt, reported_blocks);
            self.residency.sketches.disbelieve(worker, self.requests[&id].session);
            // A gap that is still being filled says nothing about what came before it.
            if partial {
                self.residency.disbelieve(worker, &prompt, reported_blocks);
            }
        }
    }
}
