//! The loop: pop what happens next, tell whoever it concerns, let everybody finish talking, plan what follows.
//!
//! One virtual clock, one heap. Cores are told things only between two instants, in a fixed order: engines that changed
//! are drained in the order of their ids, then the router hears the news in the order in which they were made. Nothing
//! is done inside a callback of a core, so the order of events is the order of the heap and nothing else.

mod answers;
mod clients;
mod engines;
mod errands;
mod evictions;
mod faults;
mod finish;
mod handshake;
mod leases;
mod routing;
mod stack;
mod thorough;
mod transfers;
mod trouble;
mod watch;

use crate::checkers::{Checkers, MAX_EVENTS_AN_INSTANT};
use crate::client::Client;
use crate::config::{SimConfig, SimError, SimOutcome};
use crate::fault::Fault;
use crate::heap::{Heap, Rank};
use crate::legs::Legs;
use crate::logs::Logs;
use crate::memory::Memory;
use crate::network::{Network, Pcie};
use crate::node::Node;
use errands::Errands;
use handshake::Handshakes;
use homing_engine::api::Input;
use homing_report::logs::BookedLine;
use homing_report::{LeftOut, RequestRecord};
use homing_router::event::{Event, LegId};
use homing_router::recording::Recorder;
use homing_router::{Router, RouterConfig};
use homing_units::{BootEpoch, Duration, Instant, RequestId, WorkerId};
use homing_workload::{Replay, ReplayConfig, Trace};
use stack::DeadPeers;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use transfers::Pull;
use trouble::Trouble;

/// How long a batch of KV events takes from the engine to the router.
const KV_EVENT_LATENCY: Duration = Duration::from_millis(1);
/// How long it takes until a peer sees that a connection broke.
const BROKEN_CONNECTION_LATENCY: Duration = Duration::from_millis(1);
/// How often liveness and load are probed, as the gateway does.
const PROBE_EVERY: Duration = Duration::from_secs(1);
/// How many probes there are to a line of the worker samples.
const PROBES_A_SAMPLE: u64 = 10;
/// How long the books may keep a request whose cancel was lost: the router's own clocks end it.
const LOST_CANCEL_LASTS: Duration = Duration::from_secs(3_600);
/// How long after the last turn everything must be at rest: leases of exports that nobody pulled end in that time.
const REST_AFTER: Duration = Duration::from_secs(120);

/// Something that will happen.
#[derive(Debug)]
enum Wake {
    /// The replay has turns to send.
    TurnsDue,
    /// A leg has passed its worker's front end (the engine's id).
    Arrival(RequestId),
    /// A worker's step ends.
    StepEnds { node: usize, epoch: BootEpoch },
    /// An engine wants to be told the time.
    EngineTimer { node: usize, epoch: BootEpoch },
    /// A transfer ends (the puller's id).
    PullEnds(RequestId),
    /// KV is back from host memory (the engine's id of whom it is for).
    ReloadEnds {
        node: usize,
        epoch: BootEpoch,
        id: RequestId,
    },
    /// The router hears of something.
    News(Box<Event>),
    /// The router wants to be told the time.
    RouterTimer,
    /// Liveness and load are probed.
    Probe,
    /// A worker is asked for its room, after the pause that it asked for.
    AskRoom(usize),
    /// Status is polled, inside the schedulers' loops.
    Poll,
    /// Something goes wrong (its index).
    Fault(usize),
    /// An engine hears of something that reached its worker while that was paused.
    Told {
        node: usize,
        epoch: BootEpoch,
        input: Box<Input>,
    },
    /// A worker is asked for its KV events from this batch on.
    Resync { worker: WorkerId, from_sequence: u64 },
    /// What an answer held back arrives (the engine's id).
    AnswerGoesOn(RequestId),
    /// The router's core goes on after it stood still.
    RouterGoesOn,
    /// KV that was ready should have been fetched by now (the export's id).
    TransferTimeout(RequestId),
    /// The lease of KV that was not pulled yet is renewed (the export's id).
    Renew(RequestId),
    /// The gateway hears that a lease has ended.
    HeldNoMore(LegId),
    /// The decode worker should have had room, and the prompt been prefilled, by now (the decode leg).
    HandshakeTimeout(LegId),
    /// A process that died is started again.
    Restart(WorkerId),
    /// A worker hears that a leg was given up (the engine's id).
    AbortHeard {
        node: usize,
        epoch: BootEpoch,
        id: RequestId,
    },
}

/// A simulation under way.
pub(crate) struct Simulation<'a> {
    trace: &'a Trace,
    config: &'a SimConfig,
    now: Instant,
    heap: Heap<Wake>,
    replay: Replay,
    /// When the replay is planned to be asked.
    turns_armed: Option<Instant>,
    router: Router,
    router_armed: Option<Instant>,
    recorder: Option<Recorder>,
    nodes: Vec<Node>,
    names: Vec<String>,
    network: Network,
    pcie: Pcie,
    /// Engines that have something to say.
    changed: BTreeSet<usize>,
    /// What the router is to be told at this instant.
    news: VecDeque<Event>,
    /// What it is to be told before that: answers to questions that it asks before a turn.
    news_first: VecDeque<Event>,
    dead_peers: DeadPeers,
    handshakes: Handshakes,
    trouble: Trouble,
    /// What lies in the workers' memories; empty unless the checks are thorough.
    memories: Vec<Memory>,
    /// What the engines were sent, by their ids; empty likewise.
    remembered: BTreeMap<RequestId, Client>,
    clients: BTreeMap<RequestId, Client>,
    /// Clients without a plan.
    unplanned: BTreeSet<RequestId>,
    errands: Errands,
    /// The decode worker that a session's last turn went to.
    homes: BTreeMap<u64, WorkerId>,
    legs: Legs,
    pulls: BTreeMap<RequestId, Pull>,
    records: Vec<RequestRecord>,
    logs: Logs,
    checkers: Checkers,
    next_request: u64,
    probes: u64,
    /// What the last sample of the router said: its queue, its sessions, and each worker.
    router_sampled: Option<(u32, u64, Vec<BookedLine>)>,
}

/// Simulates a trace on a cluster under a policy.
///
/// # Errors
/// If the input makes no sense, or something that must hold did not: [`SimError::is_wrong_input`] tells them apart.
pub fn simulate(trace: &Trace, config: &SimConfig) -> Result<SimOutcome, SimError> {
    simulate_with(trace, config, |_, _| ())
}

/// The same; `progress` is called with the turns that have ended and all turns, each time that one has ended.
///
/// # Errors
/// As [`simulate`].
pub fn simulate_with(
    trace: &Trace,
    config: &SimConfig,
    progress: impl FnMut(u64, u64),
) -> Result<SimOutcome, SimError> {
    let mut simulation = Simulation::new(trace, config)?;
    simulation.run(progress)?;
    simulation.finish()
}

impl<'a> Simulation<'a> {
    fn new(trace: &'a Trace, config: &'a SimConfig) -> Result<Self, SimError> {
        check_input(trace, config)?;
        let replay = Replay::new(
            trace,
            &ReplayConfig {
                seed: config.seed,
                ..config.replay.clone()
            },
        )?;
        let mut cluster = config.cluster.clone();
        if !config.noise {
            cluster.step_model.step_error_percent = 0.0;
        }
        let nodes: Vec<Node> = cluster
            .workers
            .iter()
            .zip(0..)
            .map(|(spec, id)| Node::new(WorkerId(id), spec, &cluster, trace.block_size, config.seed))
            .collect();
        let router = RouterConfig {
            block_size: trace.block_size,
            policy: config.policy.clone(),
            seed: config.seed,
            ..config.router.clone()
        };
        let mut simulation = Self {
            trace,
            config,
            now: Instant::ZERO,
            heap: Heap::new(),
            replay,
            turns_armed: None,
            recorder: config.record.then(|| Recorder::new(&router)),
            router: Router::new(router),
            router_armed: None,
            names: nodes.iter().map(|node| node.spec.name.clone()).collect(),
            network: Network::new(&cluster.step_model, nodes.len()),
            pcie: Pcie::new(cluster.pcie_bytes_per_second, nodes.len()),
            changed: BTreeSet::new(),
            news: VecDeque::new(),
            news_first: VecDeque::new(),
            dead_peers: DeadPeers::default(),
            handshakes: Handshakes::default(),
            trouble: Trouble::default(),
            memories: Self::memories(&nodes, config.thorough, trace.block_size),
            remembered: BTreeMap::new(),
            clients: BTreeMap::new(),
            unplanned: BTreeSet::new(),
            errands: Errands::default(),
            homes: BTreeMap::new(),
            legs: Legs::default(),
            pulls: BTreeMap::new(),
            records: Vec::new(),
            logs: Logs::new(config.logs),
            checkers: Checkers::default(),
            next_request: 0,
            probes: 0,
            nodes,
            router_sampled: None,
        };
        simulation.begin();
        Ok(simulation)
    }

    fn begin(&mut self) {
        let joined: Vec<Event> = self.nodes.iter().map(|node| Event::WorkerJoined(node.info())).collect();
        self.news.extend(joined);
        self.heap.plan(Instant::ZERO, Rank::Report, Wake::Probe);
        self.plan_poll();
        for (index, (at, _)) in self.config.faults.iter().enumerate() {
            self.heap.plan(*at, Rank::Fault, Wake::Fault(index));
        }
    }

    /// Runs until every turn has ended.
    fn run(&mut self, mut progress: impl FnMut(u64, u64)) -> Result<(), SimError> {
        self.settle()?;
        let mut ended = 0;
        while !self.replay.done() {
            self.step()?;
            if self.replay.turns_ended() > ended {
                ended = self.replay.turns_ended();
                progress(ended, self.replay.turn_count());
            }
        }
        Ok(())
    }

    /// Runs on for a while without probes, so that leases end and late events arrive.
    fn rest(&mut self) -> Result<(), SimError> {
        let stack = &self.config.cluster.stack;
        let lost = stack.defects.loses_cancels.then_some(LOST_CANCEL_LASTS);
        let waits = [
            stack.transfer_timeout,
            stack.lease,
            stack.defects.abort_heard_after,
            lost,
        ];
        let until = waits
            .into_iter()
            .flatten()
            .fold(self.now + REST_AFTER, |until, wait| until + wait);
        while let Some((at, wake)) = self.heap.pop() {
            if at > until {
                break;
            }
            self.now = at;
            if !matches!(wake, Wake::Probe | Wake::Poll) {
                self.wake(wake);
                self.settle()?;
            }
        }
        Ok(())
    }

    fn step(&mut self) -> Result<(), SimError> {
        let (at, wake) = self
            .heap
            .pop()
            .expect("probes are planned for as long as turns are left");
        self.now = at;
        self.wake(wake);
        self.settle()
    }

    fn wake(&mut self, wake: Wake) {
        let Some(wake) = self.unless_held(wake) else { return };
        match wake {
            Wake::TurnsDue => {
                rings(&mut self.turns_armed, self.now);
            }
            Wake::Arrival(engine_id) => self.arrive(engine_id),
            Wake::StepEnds { node, epoch } => self.end_step(node, epoch),
            Wake::EngineTimer { node, epoch } => self.engine_timer(node, epoch),
            Wake::PullEnds(puller) => self.end_pull(puller),
            Wake::ReloadEnds { node, epoch, id } => self.end_reload(node, epoch, id),
            Wake::News(event) => self.news.push_back(*event),
            Wake::RouterTimer => self.router_timer(),
            Wake::Probe => self.probe(),
            Wake::Renew(export) => self.renew_lease(export),
            Wake::HeldNoMore(leg) => self.held_no_more(leg),
            Wake::AskRoom(index) => {
                self.nodes[index].asked_again = false;
                self.ask_for_room(index);
            }
            Wake::Poll => self.poll_status(),
            // What would go wrong after the last turn does not.
            Wake::Fault(_) if self.replay.done() => {}
            Wake::Fault(index) => self.fault(self.config.faults[index].1),
            Wake::Told { node, epoch, input } => self.told(node, epoch, *input),
            Wake::Resync { worker, from_sequence } => self.resync(worker, from_sequence),
            Wake::AnswerGoesOn(engine_id) => self.answer_goes_on(engine_id),
            Wake::RouterGoesOn => self.trouble.router_goes_on(self.now),
            Wake::TransferTimeout(export) => self.transfer_timeout(export),
            Wake::HandshakeTimeout(leg) => self.handshake_timeout(leg),
            Wake::Restart(worker) => self.fault(Fault::WorkerRestart(worker)),
            Wake::AbortHeard { node, epoch, id } => {
                self.tell_engine(node, epoch, Input::Abort(id));
                if !self.pulls.contains_key(&id) {
                    self.unfence(node, id);
                }
            }
        }
    }

    /// Lets everybody finish talking at this instant, then plans what they wait for.
    fn settle(&mut self) -> Result<(), SimError> {
        self.send_due_turns();
        for _ in 0..MAX_EVENTS_AN_INSTANT {
            if let Some(node) = self.changed.pop_first() {
                self.drain_engine(node);
            } else if let Some(event) = self.next_news() {
                self.tell_router(event);
            } else if !self.send_due_turns() {
                self.arm();
                self.check_cores();
                return self
                    .checkers
                    .each_instant(self.now, &self.nodes, &self.clients, self.config.patience);
            }
        }
        Err(SimError::Check {
            check: "that an instant ends",
            at: self.now,
            found: format!("more than {MAX_EVENTS_AN_INSTANT} events"),
        })
    }

    /// Plans the timers of the replay and of the router.
    fn arm(&mut self) {
        let due = self.replay.next_due();
        if let Some(due) = earlier(due, &mut self.turns_armed, self.now) {
            self.heap.plan(due, Rank::Turn, Wake::TurnsDue);
        }
        let due = self.router.poll_timeout().filter(|_| !self.trouble.router_stands());
        if let Some(due) = earlier(due, &mut self.router_armed, self.now) {
            self.heap.plan(due, Rank::Timer, Wake::RouterTimer);
        }
    }

    /// Asks every worker whether it lives and how busy it is.
    ///
    /// Where a gateway's probe would say again what the last one said of an idle worker, the router is not told: a trace of
    /// days is mostly such probes, and they change nothing in the router.
    fn probe(&mut self) {
        let sample = self.probes.is_multiple_of(PROBES_A_SAMPLE);
        self.probes += 1;
        for index in 0..self.nodes.len() {
            self.probe_worker(index, sample);
            if self.config.cluster.stack.tells_room {
                self.ask_for_room(index);
            }
            if self.config.cluster.stack.tells_sketches {
                self.ask_for_sketches(index);
            }
        }
        if sample {
            self.sample_router();
        }
        self.heap.plan(self.now + PROBE_EVERY, Rank::Report, Wake::Probe);
    }

    fn left_out(&self) -> LeftOut {
        let left_out = self.replay.left_out();
        LeftOut {
            sessions: left_out.sessions,
            sessions_shortened: left_out.sessions_shortened,
            turns: left_out.turns,
            turns_over_limit: left_out.turns_over_limit,
            sessions_over_limit: left_out.sessions_over_limit,
        }
    }
}

/// When a timer is to be planned: `due`, unless it is planned for as early already. It counts as planned from now on.
fn earlier(due: Option<Instant>, armed: &mut Option<Instant>, now: Instant) -> Option<Instant> {
    let due = due?.max(now);
    if armed.is_some_and(|armed| armed <= due) {
        return None;
    }
    *armed = Some(due);
    Some(due)
}

/// Whether a timer that was planned is still wanted now: planning it earlier leaves the later one in the heap.
fn rings(armed: &mut Option<Instant>, now: Instant) -> bool {
    let rings = *armed == Some(now);
    if rings {
        *armed = None;
    }
    rings
}

fn check_input(trace: &Trace, config: &SimConfig) -> Result<(), SimError> {
    check_pools(trace, config)?;
    let workers = config.cluster.workers.len();
    let known = |worker: WorkerId| (worker.0 as usize) < workers;
    match config
        .faults
        .iter()
        .flat_map(|(_, fault)| fault.workers())
        .find(|worker| !known(*worker))
    {
        Some(worker) => Err(SimError::NoSuchWorker {
            worker: worker.0,
            workers,
        }),
        None => Ok(()),
    }
}

/// A pool holds a block at least, and some worker can serve some turn.
fn check_pools(trace: &Trace, config: &SimConfig) -> Result<(), SimError> {
    for worker in &config.cluster.workers {
        if worker.kv_tokens < trace.block_size {
            return Err(SimError::PoolTooSmall {
                worker: worker.name.clone(),
                kv_tokens: worker.kv_tokens,
                block_size: trace.block_size,
            });
        }
    }
    let turns = trace.sessions.iter().flat_map(|session| &session.turns);
    let smallest = turns.map(|turn| turn.prompt_tokens.saturating_add(1)).min();
    let room = config.cluster.largest_decode_tokens();
    match smallest.filter(|smallest| *smallest > room) {
        Some(wanted) => Err(SimError::NothingFits { room, wanted }),
        None => Ok(()),
    }
}
