//! The one task that owns the router core. It turns messages into events, hands out actions, and wakes when the core
//! wants it; it decides nothing.
//!
//! Every other task talks to it through one bounded channel. Towards requests and engines it never waits: a request
//! whose task does not keep up with its few commands is broken and ends, and a worker whose replay is under way is told
//! the truth about a second one.

use crate::clock::Clock;
use crate::engine::Watched;
use crate::proxy::errands::Order;
use crate::recorder::Recorder;
use crate::telemetry::Telemetry;
use homing_router::action::{Action, Decision, Dispatch, Errand, RouteError, WorkerState};
use homing_router::event::{Event, FailureCause, LegFailure, LegId, Resume, Turn};
use homing_router::{ClientView, Explanation, Router, SessionView, WorkerStatus};
use homing_units::{Duration, Instant, RequestId, WorkerId};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};

/// Messages that wait for the core.
const MESSAGES: usize = 4_096;
/// Messages that are handled before timers are looked at again.
const BUDGET: usize = 256;
/// Sessions that a page shows, the latest first.
const SESSIONS_SHOWN: usize = 10_000;
/// Commands that wait for one request's task: a plan has four, and retries are few.
pub(crate) const COMMANDS: usize = 64;

/// What the core tells a request's task.
#[derive(Debug)]
pub(crate) enum Command {
    Decided(Box<Decision>),
    Dispatch(Dispatch),
    Cancel(LegId),
    Reject(RouteError),
}

/// What other tasks tell the core.
pub(crate) enum Message {
    /// Something happened.
    Event(Event),
    /// A request, and where its commands go.
    Turn(Turn, mpsc::Sender<Command>),
    /// Somebody wants to see.
    Ask(Question),
}

/// What the core can be asked.
pub(crate) enum Question {
    Sessions(oneshot::Sender<Vec<SessionView>>),
    Decisions(oneshot::Sender<Vec<Decision>>),
    Explain(RequestId, oneshot::Sender<Option<Explanation>>),
    Requests(oneshot::Sender<Vec<Explanation>>),
    Summary(oneshot::Sender<Summary>),
}

/// The router at a glance, for metrics.
#[derive(Clone, Debug, Default)]
pub(crate) struct Summary {
    pub(crate) workers: Vec<WorkerStatus>,
    /// What was learnt of each kind of client.
    pub(crate) clients: Vec<ClientView>,
    /// Requests that wait for a place.
    pub(crate) queued: usize,
    /// Requests whose task is running.
    pub(crate) flights: usize,
    /// Sessions that are remembered.
    pub(crate) sessions: usize,
    /// The time on the core's clock.
    pub(crate) now: Instant,
}

impl Summary {
    /// Whether a worker that decodes is alive: with nobody else there it prefills as well, or one that can is alive, too.
    pub(crate) fn can_serve(&self) -> bool {
        let is_alive = |worker: &&WorkerStatus| matches!(worker.state, WorkerState::Exact | WorkerState::Degraded);
        let alive = || self.workers.iter().filter(is_alive);
        let aided = alive().any(|worker| worker.role.prefills());
        alive().any(|worker| worker.role.decodes() && (worker.abilities.prefills_alone || aided))
    }
}

/// How other tasks reach the core.
#[derive(Clone)]
pub(crate) struct CoreHandle {
    messages: mpsc::Sender<Message>,
}

impl CoreHandle {
    /// A handle, and the end of the channel that [`CoreTask::run`] reads.
    pub(crate) fn channel() -> (Self, mpsc::Receiver<Message>) {
        let (messages, receiver) = mpsc::channel(MESSAGES);
        (Self { messages }, receiver)
    }

    /// Tells the core of an event. After the core is gone nothing needs it any more.
    pub(crate) async fn tell(&self, event: Event) {
        drop(self.messages.send(Message::Event(event)).await);
    }

    /// Hands a request over; its commands come through the receiver, which is closed where the core is gone.
    pub(crate) async fn turn(&self, turn: Turn) -> mpsc::Receiver<Command> {
        let (commands, receiver) = mpsc::channel(COMMANDS);
        drop(self.messages.send(Message::Turn(turn, commands)).await);
        receiver
    }

    /// Asks; `None` where the core is gone.
    pub(crate) async fn ask<T>(&self, question: impl FnOnce(oneshot::Sender<T>) -> Question) -> Option<T> {
        let (sender, receiver) = oneshot::channel();
        self.messages.send(Message::Ask(question(sender))).await.ok()?;
        receiver.await.ok()
    }
}

/// The task's state.
pub(crate) struct CoreTask {
    pub(crate) router: Router,
    pub(crate) clock: Clock,
    pub(crate) flights: HashMap<RequestId, mpsc::Sender<Command>>,
    /// Where errands go.
    pub(crate) orders: mpsc::Sender<Order>,
    /// Errands under way; the core bounds them.
    pub(crate) errands: HashMap<RequestId, Errand>,
    /// Who watches each worker.
    pub(crate) watched: HashMap<WorkerId, Watched>,
    pub(crate) recorder: Option<Recorder>,
    pub(crate) telemetry: Arc<Telemetry>,
    /// The last decisions, for `/admin/decisions`.
    pub(crate) decisions: VecDeque<Decision>,
    pub(crate) decisions_max: usize,
}

impl CoreTask {
    /// Runs until every handle is gone.
    pub(crate) async fn run(mut self, mut messages: mpsc::Receiver<Message>) {
        let mut batch = Vec::with_capacity(BUDGET);
        loop {
            let wait = self.router.poll_timeout().map(|deadline| self.clock.until(deadline));
            tokio::select! {
                count = messages.recv_many(&mut batch, BUDGET) => {
                    if count == 0 {
                        break;
                    }
                    for message in batch.drain(..) {
                        self.take(message);
                    }
                }
                () = sleep(wait) => self.handle(Event::Timeout),
            }
            if let Some(recorder) = &mut self.recorder {
                recorder.hand_over();
            }
        }
        if let Some(recorder) = self.recorder.take() {
            recorder.finish().await;
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Turn(turn, commands) => {
                self.flights.insert(turn.request, commands);
                self.handle(Event::Turn(turn));
            }
            Message::Event(event) => {
                let ended = match &event {
                    Event::Finished { leg, .. } => Some(leg.request),
                    Event::ClientGone(request) => Some(*request),
                    _ => None,
                };
                self.handle(event);
                if let Some(request) = ended {
                    self.flights.remove(&request);
                }
            }
            Message::Ask(question) => self.answer(question),
        }
    }

    /// One event, and all actions that follow, with the events that carrying them out brings at once.
    fn handle(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let now = self.clock.now();
            if let Some(recorder) = &mut self.recorder {
                recorder.event(now, &event);
            }
            self.telemetry.event(&event);
            self.router.handle(now, event);
            while let Some(action) = self.router.poll_action() {
                if let Some(recorder) = &mut self.recorder {
                    recorder.action(&action);
                }
                events.extend(self.carry_out(action));
            }
        }
    }

    /// Carries an action out; what cannot be is an event.
    fn carry_out(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Decided(decision) => {
                self.remember(&decision);
                self.command(decision.request, Command::Decided(decision))
            }
            Action::Dispatch(dispatch) if self.lacks(dispatch.leg.request) => Some(Event::LegFailed(LegFailure {
                leg: dispatch.leg,
                cause: FailureCause::Invalid,
                resume: Resume::Start,
            })),
            Action::Dispatch(dispatch) => self.command(dispatch.leg.request, Command::Dispatch(dispatch)),
            Action::Cancel { leg, .. } => self.command(leg.request, Command::Cancel(leg)),
            Action::Reject { request, error } => {
                let event = self.command(request, Command::Reject(error));
                self.flights.remove(&request);
                event
            }
            Action::Resync { worker, from_sequence } => {
                self.telemetry.kv_resync(worker);
                let watched = self.watched.get(&worker);
                let taken = watched.is_some_and(|watched| watched.replay_from(from_sequence));
                (!taken).then_some(Event::ResyncDone {
                    worker,
                    complete: false,
                })
            }
            Action::Identify { worker } => {
                if let Some(watched) = self.watched.get(&worker) {
                    watched.identify();
                }
                None
            }
            Action::WorkerState { worker, state } => {
                tracing::info!(%worker, ?state, "worker state");
                None
            }
            Action::Errand(errand) => {
                self.begin_errand(*errand);
                None
            }
            Action::ErrandEnded { errand, outcome } => {
                self.flights.remove(&errand);
                if let Some(errand) = self.errands.remove(&errand) {
                    self.telemetry.errand_ended(&errand, outcome);
                }
                None
            }
        }
    }

    /// Hands an errand over to who runs it; where that is stuck or gone, its first leg fails.
    fn begin_errand(&mut self, errand: Errand) {
        let (commands, receiver) = mpsc::channel(COMMANDS);
        let order = Order {
            errand: errand.clone(),
            commands: receiver,
        };
        if self.orders.try_send(order).is_ok() {
            self.flights.insert(errand.errand, commands);
        }
        self.errands.insert(errand.errand, errand);
    }

    /// Whether nobody runs this errand.
    fn lacks(&self, request: RequestId) -> bool {
        request >= Errand::FIRST_ID && !self.flights.contains_key(&request)
    }

    fn command(&mut self, request: RequestId, command: Command) -> Option<Event> {
        let flight = self.flights.get(&request)?;
        if flight.try_send(command).is_ok() {
            return None;
        }
        // Its task is gone or stuck; either way nobody is served by it.
        self.flights.remove(&request);
        Some(Event::ClientGone(request))
    }

    fn remember(&mut self, decision: &Decision) {
        if self.decisions_max == 0 {
            return;
        }
        if self.decisions.len() >= self.decisions_max {
            self.decisions.pop_front();
        }
        self.decisions.push_back(decision.clone());
    }

    /// Answers; whoever asked may be gone.
    fn answer(&self, question: Question) {
        match question {
            Question::Sessions(asker) => drop(asker.send(self.router.view_sessions(SESSIONS_SHOWN))),
            Question::Decisions(asker) => drop(asker.send(self.decisions.iter().rev().cloned().collect())),
            Question::Explain(request, asker) => {
                drop(asker.send(self.router.explain(request)));
            }
            Question::Requests(asker) => drop(asker.send(self.router.view_requests())),
            Question::Summary(asker) => drop(asker.send(Summary {
                workers: self.router.view_workers(),
                clients: self.router.view_clients(),
                queued: self.router.queue_length(),
                sessions: self.router.session_count(),
                flights: self.flights.len() - self.flights.keys().filter(|id| **id >= Errand::FIRST_ID).count(),
                now: self.clock.now(),
            })),
        }
    }
}

/// Sleeps so long, or for ever.
async fn sleep(wait: Option<Duration>) {
    match wait {
        Some(wait) => tokio::time::sleep(wait).await,
        None => std::future::pending().await,
    }
}
