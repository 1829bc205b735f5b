//! The router: events in, actions out. This file holds what it knows and the order in which a driver asks; what each kind
//! of event does is in the files below.
//!
//! - `workers`: joins, leaves, probes, loads, KV events
//! - `turns`: new turns, the queue, planning and placing
//! - `legs`: answers and failures of legs, and what the handoff machine makes of them
//! - `sources`: who hands a session's KV over when it moves
//! - `speeds`: what legs took, for what is learnt of their workers
//! - `survey`: the board that a policy sees
//! - `errands`: KV that is carried while no client waits for it
//! - `views`: what operators see
//!
//! Nothing is decided inside a callback: whatever frees something notes it in the queue, and the queue is looked at once, at
//! the end of the event.

mod errands;
mod legs;
mod sources;
mod speeds;
mod survey;
mod turns;
mod views;
mod workers;

pub(crate) use speeds::{Prefilled, Watch};
pub use views::{AttemptView, ClientView, Explanation, SessionView, WorkerStatus};

use crate::action::Action;
use crate::admission::Ledger;
use crate::backoff::Backoff;
use crate::config::RouterConfig;
use crate::errands::{Errands, Signal};
use crate::event::Event;
use crate::feed::FeedLimits;
use crate::fleet::Fleet;
use crate::handoff::{Phase, Request};
use crate::links::Links;
use crate::policies::{Admission, Habits, Policy};
use crate::queue::WaitQueue;
use crate::residency::Residency;
use crate::sessions::{SessionLimits, Sessions};
use crate::timers::Timers;
use homing_units::{Instant, RequestId, Rng, WorkerId, rng_for};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use views::History;

/// The router core. Call [`Router::handle`], then [`Router::poll_action`] until it is `None`, then
/// [`Router::poll_timeout`]; at that time at the latest, hand in [`Event::Timeout`].
#[derive(Debug)]
pub struct Router {
    config: RouterConfig,
    policy: Box<dyn Policy>,
    habits: Habits,
    rng: Rng,
    /// The latest time that it was told; it never goes back.
    now: Instant,
    fleet: Fleet,
    residency: Residency,
    sessions: Sessions,
    ledger: Ledger,
    links: Links,
    requests: BTreeMap<RequestId, Request>,
    queue: WaitQueue,
    timers: Timers<Timer>,
    actions: VecDeque<Action>,
    history: History,
    errands: Errands,
}

/// What a timer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// The phase of a request has taken too long, or a waiting one is to be tried again.
    Request(RequestId),
    /// A replay of KV events has taken too long.
    Resync(WorkerId),
    /// A worker whose KV events began anew has shown no other life.
    Restart(WorkerId),
    /// The phase of an errand has taken too long.
    Errand(RequestId),
    /// It is to be looked again whether an errand can be run.
    ErrandPace,
}

impl Router {
    /// A router without workers.
    ///
    /// # Panics
    /// If the block size or a bound on blocks is 0.
    #[must_use]
    pub fn new(config: RouterConfig) -> Self {
        assert!(config.block_size > 0, "a block holds at least one token");
        let limits = &config.limits;
        let session_limits = SessionLimits {
            sessions: limits.sessions,
            family_sessions: limits.family_sessions,
            blocks: limits.session_blocks,
            idle: config.clocks.session_idle,
            live: config.clocks.session_live,
        };
        let policy = config.policy.build();
        Self {
            habits: policy.habits(),
            policy,
            rng: rng_for(config.seed, "router"),
            now: Instant::ZERO,
            fleet: Fleet::default(),
            residency: Residency::new(limits.index_blocks, limits.predictions),
            sessions: Sessions::new(session_limits),
            ledger: Ledger::default(),
            links: Links::default(),
            requests: BTreeMap::new(),
            queue: WaitQueue::default(),
            timers: Timers::new(),
            actions: VecDeque::new(),
            history: History::new(limits.explained),
            errands: Errands::default(),
            config,
        }
    }

    /// Takes an event in. Then poll for actions.
    pub fn handle(&mut self, now: Instant, event: Event) {
        self.now = self.now.max(now);
        self.sessions.cool(self.now);
        match event {
            Event::WorkerJoined(info) => self.on_joined(info),
            Event::WorkerLeft(worker) => self.on_left(worker),
            Event::Health(report) => self.on_health(report),
            Event::Load(report) => self.on_load(report),
            Event::Room(report) => self.on_room(report),
            Event::Sketches(report) => self.on_sketches(report),
            Event::Kv(batch) => self.on_kv(batch),
            Event::KvRestarted { worker, epoch } => self.on_kv_restarted(worker, epoch),
            Event::ResyncDone { worker, complete } => self.on_resync_done(worker, complete),
            Event::Turn(turn) => self.on_turn(turn),
            Event::PrefillDone { leg, cached_tokens } => self.on_prefill_done(leg, cached_tokens),
            Event::FirstToken { leg } => self.on_first_token(leg),
            Event::Finished { leg, usage } => self.on_finished(leg, usage),
            Event::LegFailed(failure) => self.on_leg_failed(failure),
            Event::ClientGone(request) => self.on_client_gone(request),
            Event::Timeout => {}
        }
        // What has come at the last moment counts; only then is time up.
        self.ring();
        self.sessions.expire(self.now, &mut self.residency.index);
        while self.queue.is_freed() {
            self.retry_waiting();
            // A turn that waited until its own time was up is overdue as it is sent, and its end may free a place again.
            if !self.ring() {
                break;
            }
        }
        self.run_errands();
    }

    /// The next thing to do, in order; `None` when all is said.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Does what is due by now. Whether anything was.
    fn ring(&mut self) -> bool {
        let mut rang = false;
        while let Some(timer) = self.timers.pop_due(self.now) {
            rang = true;
            match timer {
                Timer::Request(request) => self.on_overdue(request),
                Timer::Resync(worker) => self.on_resync_overdue(worker),
                Timer::Restart(worker) => self.on_restart_overdue(worker),
                Timer::Errand(errand) => self.errand_signal(errand, Signal::Overdue),
                Timer::ErrandPace => self.on_errand_pace(),
            }
        }
        rang
    }

    /// When to hand in [`Event::Timeout`] at the latest; `None` where nothing is waited for.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// The configuration that it was made with.
    #[must_use]
    pub const fn config(&self) -> &RouterConfig {
        &self.config
    }

    /// The habits of its policy.
    #[must_use]
    pub const fn habits(&self) -> Habits {
        self.habits
    }

    /// Whether no request lives, no errand is under way and nothing is booked.
    #[must_use]
    pub fn idle(&self) -> bool {
        self.requests.is_empty() && self.errands.len() == 0 && self.queue.is_empty() && self.ledger.is_empty()
    }

    /// Checks that its parts agree, for tests and the simulator.
    ///
    /// # Panics
    /// If they do not.
    pub fn check_invariants(&self) {
        self.ledger.check_invariants();
        self.sessions.check_invariants();
        self.residency.check_invariants();
        self.timers.check_invariants();
        self.queue.check_invariants();
        self.errands.check_invariants(self.config.limits.errands);
        let errands = || self.errands.iter().map(|under_way| under_way.errand.errand);
        let booked = self.requests.values().filter(|request| request.phase.is_booked());
        assert_eq!(
            self.ledger.requests().collect::<Vec<_>>(),
            booked.map(|request| request.id).chain(errands()).collect::<Vec<_>>(),
            "requests with legs and errands are booked, no others"
        );
        let waits = self.requests.values().filter(|request| request.phase == Phase::Waiting);
        let waiting: BTreeSet<_> = waits.map(|request| (request.id, request.deadline)).collect();
        assert_eq!(
            self.queue.iter().collect::<BTreeSet<_>>(),
            waiting,
            "those that wait are in the queue, no others"
        );
        let timed = self.timers.keys().filter_map(|timer| match timer {
            Timer::Request(request) | Timer::Errand(request) => Some(request),
            Timer::Resync(_) | Timer::Restart(_) | Timer::ErrandPace => None,
        });
        assert!(
            timed.eq(self.requests.keys().copied().chain(errands())),
            "each request and each errand has one clock running"
        );
        let mut in_flight: BTreeMap<_, u32> = BTreeMap::new();
        for request in self.requests.values() {
            *in_flight.entry(request.session).or_default() += 1;
        }
        for session in self.sessions.iter() {
            let turns = in_flight.get(&session.id).copied().unwrap_or(0);
            assert_eq!(session.in_flight, turns, "{} counts its turns in flight", session.id);
        }
        assert!(
            self.requests.len() <= self.config.limits.requests,
            "requests are bounded"
        );
        let budget = self.config.limits.seeds_per_decode;
        for worker in self.fleet.iter().filter(|_| self.habits.admission == Admission::Ledger) {
            let seeds = self.ledger.account(worker.info.id).seeds;
            assert!(
                seeds <= budget,
                "{}: {seeds} seeds are pending, {budget} may be",
                worker.info.id
            );
        }
    }

    /// Announces a worker's state where it has changed; those that wait may look again then.
    fn announce(&mut self, worker: WorkerId) {
        let now = self.now;
        if let Some(state) = self.fleet.get_mut(worker).and_then(|worker| worker.announce(now)) {
            self.actions.push_back(Action::WorkerState { worker, state });
            self.queue.free_all();
        }
    }

    const fn feed_limits(&self) -> FeedLimits {
        FeedLimits {
            held_batches: self.config.limits.held_batches,
            resyncs: self.config.limits.resyncs,
        }
    }

    const fn backoff(&self) -> Backoff {
        Backoff {
            base: self.config.clocks.backoff_base,
            cap: self.config.clocks.backoff_cap,
        }
    }
}
