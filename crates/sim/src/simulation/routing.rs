//! The router is told what happened, and what it asks for is carried out.

use super::{BROKEN_CONNECTION_LATENCY, Simulation, Wake, rings};
use crate::heap::Rank;
use crate::logs::{decision_line, name, path, sample_line};
use homing_engine::api::Input;
use homing_report::logs::{Admission, AdmissionLine, BackpressureLine, BindingLine, duration_s, seconds};
use homing_router::action::{Action, Decision, Dispatch, KvUse, RouteError, WorkerState};
use homing_router::event::{Event, FailureCause, HealthReport, Leg, LegFailure, LegId, Resume};
use homing_units::{Duration, RequestId, WorkerId};

impl Simulation<'_> {
    pub(super) fn tell_router(&mut self, event: Event) {
        let turn = match &event {
            Event::Turn(turn) => Some(turn.request),
            _ => None,
        };
        if turn.is_some() && self.router.habits().probes {
            self.ask_decoders();
        }
        while let Some(answer) = self.news_first.pop_front() {
            self.hand_in(answer);
        }
        self.hand_in(event);
        while let Some(action) = self.router.poll_action() {
            if let Some(recorder) = &mut self.recorder {
                recorder.action(&action);
            }
            self.carry_out(action);
        }
        if let Some(request) = turn.filter(|request| self.unplanned.contains(request)) {
            self.log_admission(request, None, Admission::Queued, "no place that admits it");
        }
    }

    fn hand_in(&mut self, event: Event) {
        if let Event::ClientGone(request) = &event {
            self.trouble.gone_is_known(*request);
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.event(self.now, &event);
        }
        self.router.handle(self.now, event);
    }

    pub(super) fn router_timer(&mut self) {
        if rings(&mut self.router_armed, self.now) && self.router.poll_timeout().is_some_and(|due| due <= self.now) {
            self.news.push_back(Event::Timeout);
        }
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Decided(decision) => self.decided(&decision),
            Action::Dispatch(dispatch) => self.dispatch(dispatch),
            Action::Cancel { leg, .. } => self.cancel(leg),
            Action::Reject { request, error } => self.reject(request, error),
            Action::Resync { worker, from_sequence } => self.wake(Wake::Resync { worker, from_sequence }),
            Action::Identify { worker } => self.probe_worker(worker.0 as usize, false),
            Action::WorkerState { worker, state } => {
                self.nodes[worker.0 as usize].state = state;
                self.log_state(worker, state);
            }
            Action::Errand(errand) => self.begin_errand(&errand),
            Action::ErrandEnded { errand, .. } => self.errands.end(errand),
        }
    }

    fn decided(&mut self, decision: &Decision) {
        let request = decision.request;
        if let Some(client) = self.clients.get_mut(&request) {
            client.decided(decision);
        }
        self.ask_for_admission(decision);
        self.unplanned.remove(&request);
        self.logs.add(|| decision_line(self.now, decision, &self.names));
        self.log_admission(request, Some(decision.decode), Admission::Admitted, &decision.reason);
        let previous = self.homes.insert(decision.session.0, decision.decode);
        if previous != Some(decision.decode) {
            self.logs.add(|| BindingLine {
                t: seconds(self.now),
                session: decision.session.0,
                request: request.0,
                worker: name(&self.names, decision.decode),
                previous_worker: previous.map(|worker| name(&self.names, worker)),
                path: path(decision.path),
            });
        }
    }

    fn dispatch(&mut self, dispatch: Dispatch) {
        let Some(client) = self.asker(dispatch.leg.request) else {
            if self.trouble.is_gone(dispatch.leg.request) {
                // The router hears soon that nobody wants it.
                return;
            }
            self.checkers.note(
                "that only live requests are dispatched",
                self.now,
                format!("{dispatch:?}"),
            );
            return;
        };
        let cluster = &self.config.cluster;
        let front_end = cluster.step_model.front_end() + cluster.front_end_per_token * client.prompt.tokens;
        let sent = self.now.max(client.admitted);
        if self.handshake_is_complete(dispatch.leg) {
            return;
        }
        self.check_holder(dispatch);
        let Some(engine_id) = self.begin_leg(dispatch) else {
            return;
        };
        let first = self.decode_goes_ahead(engine_id, front_end).unwrap_or(engine_id);
        self.heap.plan(sent + front_end, Rank::Arrival, Wake::Arrival(first));
    }

    /// Whoever is to pull is sent once what it pulls is held, and no sooner: a core that takes the answer of an earlier attempt
    /// for the present one's sends it too soon. A holder that is gone by now says nothing.
    fn check_holder(&mut self, dispatch: Dispatch) {
        let holds = match (dispatch.kv, dispatch.leg.leg) {
            (KvUse::Import { .. }, Leg::Fetch) => Leg::Lend,
            (KvUse::Import { .. }, Leg::Decode) => Leg::Prefill,
            _ => return,
        };
        let holder = LegId {
            leg: holds,
            ..dispatch.leg
        };
        let held = |engine_id| self.legs.get(engine_id).is_none_or(|leg| leg.exported);
        if !self.legs.engine_id(holder).is_none_or(held) {
            let found = format!("{dispatch:?}");
            self.checkers
                .note("that nobody is sent to pull what is not held yet", self.now, found);
        }
    }

    /// A leg of a live client, or of an errand, begins; gives the id that the engine will know it by.
    pub(super) fn begin_leg(&mut self, dispatch: Dispatch) -> Option<RequestId> {
        let client = self.asker(dispatch.leg.request)?;
        let max_output_tokens = match dispatch.leg.leg {
            Leg::Lend | Leg::Fetch | Leg::Prefill => 1,
            Leg::Decode => client.wanted - client.received,
        };
        let block_size = self.trace.block_size;
        let prompt = dispatch.prefix_tokens.map_or_else(
            || client.prompt.clone(),
            |tokens| client.prompt.prefix(tokens / block_size, block_size),
        );
        let node = &self.nodes[dispatch.worker.0 as usize];
        let (keeps, received, sent) = (client.kept_session, client.received, client.sent_tokens());
        let owner = client.owner;
        let engine_id = self.legs.begin(dispatch, node.epoch, prompt, max_output_tokens);
        if sent != received {
            let found = format!("`{sent}` tokens in the prompt, `{received}` received");
            self.checkers
                .note("that an attempt goes on where the last one stopped", self.now, found);
        }
        // A session's history that is lent or fetched is no request of its own.
        if let Some(leg) = self
            .legs
            .get_mut(engine_id)
            .filter(|leg| matches!(leg.id.leg, Leg::Prefill | Leg::Decode))
        {
            leg.owner = owner;
        }
        if let Some(leg) = self.legs.get_mut(engine_id).filter(|leg| leg.id.leg == Leg::Decode) {
            leg.session = keeps;
            leg.begins_after = received;
        }
        Some(engine_id)
    }

    fn cancel(&mut self, leg: LegId) {
        if let Some(engine_id) = self.legs.engine_id(leg) {
            self.give_up(engine_id);
        }
        let live = self.clients.contains_key(&leg.request);
        if leg.leg == Leg::Decode && live {
            // How much reached the client is known at once: the connection was ours.
            self.fail_leg(leg, FailureCause::Engine);
        }
    }

    /// Closes a leg's connection: the engine forgets it, and lets go of what it holds for a puller.
    pub(super) fn give_up(&mut self, engine_id: RequestId) {
        let Some(leg) = self.forget_leg(engine_id) else { return };
        self.end_handshake(leg.id);
        let (node, epoch) = (leg.node, leg.epoch);
        match self.config.cluster.stack.defects.abort_heard_after {
            Some(wait) if leg.waits_for_its_peer() => {
                let heard = Wake::AbortHeard {
                    node,
                    epoch,
                    id: engine_id,
                };
                self.heap.plan(self.now + wait, Rank::Timer, heard);
            }
            _ if leg.arrived => self.tell_engine(node, epoch, Input::Abort(engine_id)),
            _ => {}
        }
    }

    /// The router hears that a leg has failed, and from where another attempt goes on.
    pub(super) fn fail_leg(&mut self, leg: LegId, cause: FailureCause) {
        let leg = self.end_handshake(leg);
        let resume = match self.clients.get_mut(&leg.request) {
            Some(client) => client.resume(self.trace.block_size),
            None => Resume::Start,
        };
        self.news.push_back(Event::LegFailed(LegFailure { leg, cause, resume }));
    }

    fn reject(&mut self, request: RequestId, error: RouteError) {
        self.log_admission(request, None, Admission::Refused, error.kind());
        if let RouteError::Overloaded { retry_after } = error {
            self.logs.add(|| BackpressureLine {
                t: seconds(self.now),
                request: Some(request.0),
                worker: None,
                pause_ms: u64::try_from(retry_after.as_millis()).unwrap_or(u64::MAX),
                reason: "the router's queue is full".to_owned(),
            });
        }
        if !self.trouble.is_gone(request) {
            self.end_turn(request, Some(error.kind()));
        }
    }

    pub(super) fn resync(&mut self, worker: WorkerId, from_sequence: u64) {
        let (batches, complete) = self.nodes[worker.0 as usize].replay(from_sequence);
        let events = batches
            .into_iter()
            .map(Event::Kv)
            .chain([Event::ResyncDone { worker, complete }]);
        for event in events {
            self.heap.plan(
                self.now + BROKEN_CONNECTION_LATENCY,
                Rank::News,
                Wake::News(Box::new(event)),
            );
        }
    }

    /// One worker answers its probes, or does not.
    pub(super) fn probe_worker(&mut self, index: usize, sample: bool) {
        let lost = self.trouble.loses_probe(index);
        let node = &mut self.nodes[index];
        let answers = node.engine.as_ref().filter(|_| !lost);
        let snapshot = answers.map(|engine| engine.snapshot());
        let load = snapshot.as_ref().map(|snapshot| node.load_of(snapshot));
        if let Some(load) = snapshot.filter(|_| sample && node.sampled != snapshot) {
            node.sampled = snapshot;
            let name = &node.spec.name;
            self.logs
                .add(|| sample_line(self.now, name, &load, self.trace.block_size));
        }
        let answer = load.map(|load| (node.told_epoch(), load));
        let news = answer.is_none() || node.probed != answer;
        node.probed = answer;
        if news {
            let epoch = answer.map(|(epoch, _)| epoch);
            self.news.push_back(Event::Health(HealthReport {
                worker: node.id,
                epoch,
                alive: answer.is_some(),
            }));
            let lost = load.is_some() && self.trouble.loses_load(index);
            if lost {
                // It is news as long as it has not arrived.
                self.nodes[index].probed = None;
            }
            self.news.extend(load.filter(|_| !lost).map(Event::Load));
        }
    }

    /// One worker is asked how much room it has, and again after the pause that it asks for.
    pub(super) fn ask_for_room(&mut self, index: usize) {
        let paused = self.trouble.is_paused(index);
        let node = &mut self.nodes[index];
        let Some(room) = node.room().filter(|_| !paused) else {
            return;
        };
        // What an idle worker says again is left out, as with its load.
        if node.is_busy() || node.told_room != Some(room) {
            node.told_room = Some(room);
            self.news.push_back(Event::Room(room));
        }
        if !room.pause.is_zero() && !std::mem::replace(&mut node.asked_again, true) {
            self.heap
                .plan(self.now + room.pause, Rank::Report, Wake::AskRoom(index));
        }
    }

    /// One worker is asked what is resident there, where its events do not tell.
    pub(super) fn ask_for_sketches(&mut self, index: usize) {
        let node = &self.nodes[index];
        if node.state != WorkerState::Exact && !self.trouble.is_paused(index) {
            self.news.extend(node.sketches().map(Event::Sketches));
        }
    }

    pub(super) fn log_admission(
        &mut self,
        request: RequestId,
        worker: Option<WorkerId>,
        admission: Admission,
        reason: &str,
    ) {
        let load = worker
            .and_then(|worker| self.nodes[worker.0 as usize].engine.as_ref())
            .map(|engine| engine.snapshot());
        let answered_s = self.answers_after(request).map(duration_s);
        self.logs.add(|| AdmissionLine {
            t: seconds(self.now),
            request: request.0,
            worker: worker.map(|worker| name(&self.names, worker)),
            admission,
            wanted_tokens: self
                .clients
                .get(&request)
                .map_or(0, |client| client.prompt.tokens + client.wanted - client.received),
            free_tokens: load
                .map(|load| u64::from(load.blocks_free + load.blocks_evictable) * u64::from(self.trace.block_size)),
            queue_length: u32::try_from(self.unplanned.len()).unwrap_or(u32::MAX),
            reason: reason.to_owned(),
            answered_s,
        });
    }

    /// How long a worker that was asked takes to answer whether it takes a request.
    fn answers_after(&self, request: RequestId) -> Option<Duration> {
        let admitted = self.clients.get(&request)?.admitted;
        (admitted > self.now).then(|| admitted - self.now)
    }
}
