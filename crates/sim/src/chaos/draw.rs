//! What a seed stands for: every choice of an experiment, drawn in a fixed order.

use super::Scenario;
use crate::cluster::Cluster;
use crate::config::SimConfig;
use crate::fault::schedule::Schedule;
use crate::fault::{Fault, LinkState, Mishap};
use homing_router::{Clocks, Limits, PolicySpec, RouterConfig, policies};
use homing_units::{Duration, Instant, Rng, WorkerId, rng_for};
use homing_workload::{ReplayConfig, Session, Start, Trace, Turn};
use rand::Rng as _;

/// Tokens in a block.
const BLOCK: u32 = 16;
/// Faults come within so long of the start of a drawn experiment, which takes about that long.
const HORIZON: Duration = Duration::from_secs(10);
/// Things that go wrong in a drawn experiment, at most; some are two faults, the second of which ends the first.
const MOST_FAULTS: u64 = 10;
/// Beside what its clocks allow, a request may take so much longer: a router that stands still rings late.
const LATENESS: Duration = Duration::from_secs(60);

const CLUSTERS: [&str; 12] = [
    "h100x1-dp",
    "h100x2-dp",
    "h100x3-dp",
    "h100x2-1p1d",
    "h100x3-1p2d",
    "h100x4-2p2d",
    "h100x5-2p3d",
    "h100x4-1p3d:engine=vllm",
    "h100x3-1p2d:host=256MiB",
    "h100x3-dp:host=128MiB:staging=on",
    "h100x3-1p2d:engine=session-slot",
    "h100x4-2p2d:engine=session-slot:order=decode-first:transfer_timeout=2s:dead_peers=4s:admission=loop",
];

/// The numbers that a seed gives.
struct Draw(Rng);

impl Draw {
    /// One of `low..high`.
    fn below(&mut self, low: u64, high: u64) -> u64 {
        low + self.0.next_u64() % (high - low)
    }

    fn count(&mut self, low: u64, high: u64) -> u32 {
        u32::try_from(self.below(low, high)).expect("counts are small")
    }

    fn millis(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_millis(self.below(low, high))
    }

    fn percent(&mut self, percent: u64) -> bool {
        self.below(0, 100) < percent
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        let place = self.below(0, from.len() as u64);
        from[usize::try_from(place).expect("it is below a length")].clone()
    }
}

/// Draws an experiment.
pub(super) fn scenario(seed: u64) -> Scenario {
    let draw = &mut Draw(rng_for(seed, "chaos/experiment"));
    let cluster = cluster(draw);
    let policy = policy(draw);
    let trace = trace(seed, draw);
    let mut config = SimConfig::new(&trace, cluster, policy);
    config.seed = seed;
    config.replay = ReplayConfig {
        start: Start::Concurrency(draw.count(1, 10)),
        start_spread: Duration::from_secs(2),
        time_scale: [1.0, 2.0, 4.0][draw.count(0, 3) as usize],
        ..ReplayConfig::default()
    };
    config.named_sessions = draw.percent(50);
    config.record = draw.percent(10);
    config.router = router(draw);
    config.patience = patience(&config.router);
    config.thorough = true;
    config.faults = draw_faults(seed, &config.cluster, HORIZON);
    draw_errands(seed, &mut config);
    draw_leases(seed, &mut config.cluster);
    draw_sketches(seed, &mut config.cluster);
    Scenario { seed, trace, config }
}

/// Our own policy runs errands in most experiments, often and for little. Drawn apart, so that the rest of an experiment is what it
/// was before there were any.
fn draw_errands(seed: u64, config: &mut SimConfig) {
    let draw = &mut Draw(rng_for(seed, "chaos/errands"));
    if config.policy.name() != "homing" || draw.percent(25) {
        return;
    }
    let how = draw.pick(&["", ":margin=0:margin_s=0", ":margin=0:margin_s=0:base=off", ":gaps=off"]);
    let policy = format!("{}:errands=on{how}", config.policy);
    config.policy = policy.parse().expect("the planner knows these parameters");
    let RouterConfig { limits, clocks, .. } = &mut config.router;
    limits.errands = draw.count(1, 5) as usize;
    limits.base_owners = draw.count(1, 4) as usize;
    limits.base_tokens = draw.count(1, 5) * BLOCK;
    clocks.errand_pace = draw.millis(20, 1_000);
    clocks.errand_rest = draw.millis(50, 5_000);
    clocks.errand_rest_cap = draw.millis(500, 20_000);
}

/// Half the experiments have leases that are over in the time that legs wait here, renewed or not. Drawn apart, likewise.
fn draw_leases(seed: u64, cluster: &mut Cluster) {
    let draw = &mut Draw(rng_for(seed, "chaos/leases"));
    if draw.percent(50) {
        return;
    }
    cluster.stack.lease = Some(draw.millis(20, 4_000));
    cluster.stack.renews = draw.percent(50).then(|| draw.percent(50));
}

/// In half the experiments KV events are lost for good where they are lost, or never sent, and in most of these workers are asked for
/// sketches. Drawn apart, likewise.
fn draw_sketches(seed: u64, cluster: &mut Cluster) {
    let draw = &mut Draw(rng_for(seed, "chaos/sketches"));
    if draw.percent(50) {
        return;
    }
    cluster.stack.tells_sketches = draw.percent(80);
    cluster.stack.kept_batches = Some(draw.count(0, 12) as usize);
    cluster.stack.defects.hides_events = draw.percent(25);
}

fn cluster(draw: &mut Draw) -> Cluster {
    let kv_tokens = draw.below(40, 400) * u64::from(BLOCK);
    let name = format!("{}:kv={kv_tokens}", draw.pick(&CLUSTERS));
    let mut cluster = Cluster::preset(&name).expect("all presets are known");
    cluster.max_batch_tokens = draw.pick(&[32, 128, 512, 8192]);
    cluster.max_running = draw.pick(&[1, 2, 4, 16, 64]);
    cluster
}

/// Ours in every other experiment, and every third time such that histories as short as these are worth fetching.
fn policy(draw: &mut Draw) -> PolicySpec {
    let all: Vec<&str> = policies::names().collect();
    let name = match draw.below(0, 6) {
        0 => "homing:fetch_s=0",
        1 | 2 => "homing",
        _ => draw.pick(&all),
    };
    name.parse().expect("all policies are known")
}

/// Sessions of growing prompts with shared boilerplate, some with a sub-agent, some with rewritten history.
fn trace(seed: u64, draw: &mut Draw) -> Trace {
    let (sessions, turns) = (draw.count(1, 9), draw.count(1, 7));
    Trace {
        name: format!("chaos:seed={seed}"),
        block_size: BLOCK,
        sessions: (0..sessions).map(|index| session(index, turns, draw)).collect(),
    }
}

fn session(index: u32, turns: u32, draw: &mut Draw) -> Session {
    let mut content: Vec<u64> = (0..draw.below(1, 12)).collect();
    let mut next = (u64::from(index) + 1) << 32;
    let mut made = Vec::new();
    for turn in 0..turns {
        if turn > 0 && draw.percent(10) {
            content.truncate(content.len() / 2 + 1);
        }
        let grown = draw.below(0, 16);
        content.extend(next..next + grown);
        next += grown;
        made.push(Turn {
            agent: 0,
            prompt_tokens: whole(content.len()) + draw.count(0, u64::from(BLOCK)),
            output_tokens: draw.count(1, 40),
            content: content.clone().into(),
            after: turn.checked_sub(1).into_iter().collect(),
            gap: draw.millis(0, 1_500),
        });
    }
    if draw.percent(30) {
        let blocks = draw.below(1, 9);
        made.push(Turn {
            agent: 1,
            prompt_tokens: whole(usize::try_from(blocks).expect("a few")),
            output_tokens: draw.count(1, 9),
            content: (next..next + blocks).collect(),
            after: vec![draw.count(0, u64::from(turns))],
            gap: Duration::ZERO,
        });
    }
    Session {
        id: format!("session-{index}"),
        start: None,
        turns: made,
    }
}

/// Tokens of so many whole blocks.
fn whole(blocks: usize) -> u32 {
    u32::try_from(blocks).expect("prompts are short") * BLOCK
}

fn router(draw: &mut Draw) -> RouterConfig {
    let mut limits = Limits::default();
    if draw.percent(50) {
        limits.queue = draw.count(1, 9) as usize;
        limits.requests = draw.count(2, 25) as usize;
        limits.sessions = draw.count(2, 13) as usize;
        limits.session_blocks = draw.count(40, 900) as usize;
        limits.predictions = draw.count(1, 9) as usize;
        limits.held_batches = draw.count(1, 7) as usize;
        limits.requests_per_worker = draw.count(1, 9);
        limits.seeds_per_decode = draw.count(1, 5);
        limits.attempts = draw.count(1, 6);
        limits.trial_requests = draw.count(1, 3);
    }
    RouterConfig {
        migrate: draw.percent(30),
        limits,
        clocks: clocks(draw),
        ..RouterConfig::default()
    }
}

/// Short ones: an experiment is over in seconds.
fn clocks(draw: &mut Draw) -> Clocks {
    let per_token = Duration::from_millis(1);
    Clocks {
        queue_wait: draw.millis(300, 15_000),
        overtake: draw.millis(10, 5_000),
        prefill_base: draw.millis(200, 4_000),
        prefill_per_token: per_token,
        first_token_base: draw.millis(200, 4_000),
        first_token_per_token: per_token,
        stream_base: draw.millis(300, 6_000),
        stream_per_token: per_token * 20,
        cancel_answer: draw.millis(100, 1_000),
        fetch: draw.millis(100, 3_000),
        resync: draw.millis(100, 1_500),
        restart_doubt: draw.millis(100, 2_000),
        predicted_with_events: draw.millis(100, 10_000),
        predicted: draw.millis(1_000, 60_000),
        session_idle: draw.millis(2_000, 600_000),
        session_live: draw.millis(500, 300_000),
        ..Clocks::default()
    }
}

/// The longest that a request may take with these clocks: each attempt may use all of them up.
fn patience(router: &RouterConfig) -> Duration {
    /// More tokens than a prompt, its answer and what is before it at a worker have.
    const TOKENS: u32 = 16_384;
    let clocks = &router.clocks;
    let bases = [
        clocks.queue_wait,
        clocks.prefill_base,
        clocks.first_token_base,
        clocks.stream_base,
        clocks.cancel_answer,
    ];
    let tokens = (clocks.prefill_per_token + clocks.first_token_per_token) * TOKENS + clocks.stream_per_token * 64;
    let attempt: Duration = bases.into_iter().sum::<Duration>() + tokens;
    attempt * (router.limits.attempts + 1) + LATENESS
}

/// Draws a schedule of faults on a cluster within so long from the start.
#[must_use]
pub fn draw_faults(seed: u64, cluster: &Cluster, horizon: Duration) -> Schedule {
    let draw = &mut Draw(rng_for(seed, "chaos/faults"));
    let workers: Vec<WorkerId> = (0..).map(WorkerId).take(cluster.workers.len()).collect();
    let horizon_ms = u64::try_from(horizon.as_millis()).unwrap_or(u64::MAX).max(1);
    let mut schedule = Schedule::new();
    for _ in 0..draw.below(0, MOST_FAULTS + 1) {
        let at = Instant::ZERO + draw.millis(0, horizon_ms);
        let (fault, ends) = fault(draw, &workers, cluster.workers[0].kv_tokens);
        schedule.push((at, fault));
        schedule.extend(ends.map(|(after, end)| (at + after, end)));
    }
    schedule.sort_by_key(|(at, _)| *at);
    schedule
}

/// A fault, and what ends it after how long.
type Drawn = (Fault, Option<(Duration, Fault)>);

fn fault(draw: &mut Draw, workers: &[WorkerId], kv_tokens: u32) -> Drawn {
    let (worker, other) = (draw.pick(workers), draw.pick(workers));
    match draw.below(0, 6) {
        0 | 1 => of_a_process(draw, worker),
        2 if worker != other => link(draw, worker, other),
        2 | 3 => (of_messages(draw, worker), None),
        4 => (of_clients(draw), None),
        _ => (of_a_pool(draw, worker, kv_tokens), None),
    }
}

fn of_a_process(draw: &mut Draw, worker: WorkerId) -> Drawn {
    let ends = |lasts: Option<Duration>, end: Fault| lasts.map(|lasts| (lasts, end));
    match draw.below(0, 6) {
        0 | 1 => {
            let lasts = draw.percent(90).then(|| draw.millis(10, 4_000));
            (Fault::WorkerCrash(worker), ends(lasts, Fault::WorkerRestart(worker)))
        }
        2 | 3 => {
            let lasts = draw.percent(90).then(|| draw.millis(5, 7_000));
            (Fault::WorkerPause(worker), ends(lasts, Fault::WorkerResume(worker)))
        }
        4 => {
            let lasts = draw.millis(10, 4_000);
            (Fault::WorkerStall { worker, lasts }, None)
        }
        _ => {
            let percent = draw.count(120, 2_000);
            let lasts = Some(draw.millis(50, 5_000));
            let slow = Fault::WorkerSlow { worker, percent };
            (slow, ends(lasts, Fault::WorkerSlow { worker, percent: 100 }))
        }
    }
}

fn of_messages(draw: &mut Draw, worker: WorkerId) -> Fault {
    match draw.below(0, 6) {
        0 | 1 => Fault::KvBatches {
            worker,
            batches: draw.count(1, 7),
            mishap: mishap(draw),
        },
        2 => Fault::Answers {
            worker,
            mishap: mishap(draw),
        },
        3 => Fault::ProbesLost {
            worker,
            probes: draw.count(1, 6),
        },
        4 => Fault::LoadsLost {
            worker,
            reports: draw.count(1, 12),
        },
        _ => Fault::ConnectionsBreak(worker),
    }
}

fn of_clients(draw: &mut Draw) -> Fault {
    if draw.percent(70) {
        return Fault::ClientAbort { nth: draw.count(0, 16) };
    }
    let lasts = draw.millis(5, 2_500);
    Fault::RouterStall { lasts }
}

fn of_a_pool(draw: &mut Draw, worker: WorkerId, kv_tokens: u32) -> Fault {
    if draw.percent(30) {
        return Fault::CacheCleared(worker);
    }
    Fault::Stranger {
        worker,
        prompt_tokens: draw.count(1, u64::from(kv_tokens)),
        output_tokens: draw.count(1, 60),
    }
}

fn link(draw: &mut Draw, from: WorkerId, to: WorkerId) -> Drawn {
    let slow = LinkState::Slow {
        percent: draw.count(200, 100_000),
    };
    let state = draw.pick(&[LinkState::Cut, LinkState::Stalled, slow]);
    let up = LinkState::Up;
    let ends = draw.percent(90).then(|| draw.millis(5, 6_000));
    (
        Fault::Link { from, to, state },
        ends.map(|after| (after, Fault::Link { from, to, state: up })),
    )
}

fn mishap(draw: &mut Draw) -> Mishap {
    let late = Mishap::Late(draw.millis(2, 3_000));
    draw.pick(&[Mishap::Lost, Mishap::Twice, late])
}
