//! One simulated worker: an engine, the clock of its steps, its KV event feed, and what it counted.
//!
//! A crash loses the engine with all that is in it; a restart is a new life with a new boot epoch and an empty cache.
//! Nothing here knows the router: the simulation carries what comes out of the engine to it.

use crate::cluster::{Cluster, WorkerSpec};
use crate::noise::Noise;
use crate::stack::{Order, Stack};
use homing_engine::api::{EngineConfig, EngineKind, KvChange, Snapshot, Step};
use homing_engine::{Engine, Resident, ResidentLimits, StepModel, StepShape};
use homing_report::WorkerRecord;
use homing_router::action::WorkerState;
use homing_router::event::{
    Abilities, KvBatch, KvUpdate, LoadReport, Role, RoomReport, SessionSketch, SketchReport, WorkerInfo,
};
use homing_units::{BootEpoch, Duration, Instant, RequestId, WorkerId};
use std::collections::{BTreeSet, VecDeque};

/// Batches of KV events that a worker keeps for a replay, as vLLM does by default.
const KEPT_BATCHES: usize = 10_000;
/// The longest prompt and output that a worker takes, where its pool is larger, in tokens.
const MAX_CONTEXT_TOKENS: u32 = 1 << 20;
/// Leases last so much longer than a transfer timeout, so that the timeout comes first.
const AFTER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a decode worker that has made room waits for KV: SGLang's default for its waiting timeout.
const WAIT_FOR_PREFILL: Duration = Duration::from_secs(300);

/// A simulated worker.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) id: WorkerId,
    pub(crate) spec: WorkerSpec,
    pub(crate) epoch: BootEpoch,
    /// `None` while it is down.
    pub(crate) engine: Option<Engine>,
    /// The step that runs.
    pub(crate) step: Option<Step>,
    /// When it ends.
    step_ends: Instant,
    /// Scheduler time that questions have cost, paid with the next step.
    owed: Duration,
    /// What it last answered a router that asks before each turn.
    pub(crate) asked: Option<LoadReport>,
    /// When the engine's timer is planned.
    pub(crate) armed: Option<Instant>,
    /// Exports that are held, by the engine's id.
    pub(crate) exports: BTreeSet<RequestId>,
    /// What it said of its room last.
    pub(crate) told_room: Option<RoomReport>,
    /// It will be asked for its room after the pause that it asked for.
    pub(crate) asked_again: bool,
    /// What it answered to the last probe.
    pub(crate) probed: Option<(BootEpoch, LoadReport)>,
    /// What its last sample said; a sample that would say the same is left out.
    pub(crate) sampled: Option<Snapshot>,
    pub(crate) counts: Counts,
    /// Its steps take so many percent of their time.
    pub(crate) percent: u32,
    config: EngineConfig,
    model: StepModel,
    noise: Noise,
    next_batch: u64,
    kept: VecDeque<KvBatch>,
    kept_max: usize,
    hides_restarts: bool,
    hides_events: bool,
    /// What the router knows of its cache.
    pub(crate) state: WorkerState,
    /// What it remembers of sessions, where it is asked for sketches.
    remembers: Option<ResidentLimits>,
}

/// What a worker counted over all its lives.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) busy: Duration,
    pub(crate) transfers_in: u64,
    pub(crate) transfers_out: u64,
    pub(crate) transfer_errors: u64,
    /// Tokens that the engine sampled for anybody.
    pub(crate) sampled_tokens: u64,
    pub(crate) evictions: u64,
    pub(crate) evicted_blocks: u64,
    blocks_held_max: u32,
}

impl Node {
    pub(crate) fn new(id: WorkerId, spec: &WorkerSpec, cluster: &Cluster, block_size: u32, seed: u64) -> Self {
        let config = EngineConfig {
            boot_epoch: BootEpoch(1),
            block_size,
            kv_blocks: spec.kv_tokens / block_size,
            max_batch_tokens: cluster.max_batch_tokens,
            max_running: cluster.max_running,
            kind: cluster.stack.engine_of(spec.role.decodes()),
            host_blocks: host_blocks(cluster, block_size),
            eviction: cluster.eviction(),
            max_context_tokens: MAX_CONTEXT_TOKENS.min(spec.kv_tokens / block_size * block_size),
            ..EngineConfig::default()
        };
        let config = wait_for_transfers(config, &cluster.stack);
        let remembers = cluster.stack.tells_sketches;
        let remembers = remembers.then(|| ResidentLimits::of_pool(config.kv_blocks));
        Self {
            id,
            epoch: config.boot_epoch,
            engine: Some(engine(&config, remembers)),
            step: None,
            armed: None,
            step_ends: Instant::ZERO,
            owed: Duration::ZERO,
            asked: None,
            exports: BTreeSet::new(),
            told_room: None,
            asked_again: false,
            probed: None,
            sampled: None,
            counts: Counts::default(),
            percent: 100,
            noise: Noise::new(cluster.step_model.step_error_percent, seed, &spec.name),
            model: cluster.step_model.clone(),
            spec: spec.clone(),
            config,
            next_batch: 0,
            kept: VecDeque::new(),
            kept_max: cluster.stack.kept_batches.unwrap_or(KEPT_BATCHES),
            hides_restarts: cluster.stack.defects.hides_restarts,
            hides_events: cluster.stack.defects.hides_events,
            state: WorkerState::Degraded,
            remembers,
        }
    }

    /// What the router is told when it joins.
    pub(crate) fn info(&self) -> WorkerInfo {
        WorkerInfo {
            id: self.id,
            name: self.spec.name.clone(),
            role: self.spec.role,
            epoch: self.told_epoch(),
            kv_tokens: u64::from(self.config.kv_blocks) * u64::from(self.config.block_size),
            max_context_tokens: self.config.max_context_tokens,
            transfers: true,
            kv_events: !self.hides_events,
            abilities: Abilities::default(),
        }
    }

    /// How long it holds KV for a puller that does not come.
    pub(crate) const fn lease(&self) -> Duration {
        self.config.export_lease
    }

    /// The life that it says it lives.
    pub(crate) const fn told_epoch(&self) -> BootEpoch {
        if self.hides_restarts { BootEpoch(1) } else { self.epoch }
    }

    /// Whether a request is in its engine.
    pub(crate) fn is_busy(&self) -> bool {
        let snapshot = self.engine.as_ref().map(Engine::snapshot);
        snapshot.is_some_and(|load| load.running + load.waiting + load.importing + load.reloading > 0)
    }

    /// What it says of its room; `None` while it is down.
    pub(crate) fn room(&self) -> Option<RoomReport> {
        let snapshot = self.engine.as_ref()?.snapshot();
        Some(RoomReport {
            worker: self.id,
            epoch: self.told_epoch(),
            spare_tokens: snapshot.spare_tokens(self.config.block_size),
            pause: snapshot.room_pause(self.config.block_size),
        })
    }

    /// What it says is resident of each session; `None` while it is down.
    pub(crate) fn sketches(&self) -> Option<SketchReport> {
        let residents = self.engine.as_ref()?.residents();
        let sketch = |resident: Resident| {
            let (tip_blocks, tip) = resident.tip();
            SessionSketch {
                session: Some(resident.session),
                tip_blocks,
                tip,
                sketch: resident.sketch(),
            }
        };
        Some(SketchReport {
            worker: self.id,
            epoch: self.told_epoch(),
            sequence: self.next_batch,
            age: Duration::ZERO,
            sketches: residents.into_iter().map(sketch).collect(),
        })
    }

    /// What a load probe answers; `None` while it is down.
    pub(crate) fn load(&self) -> Option<LoadReport> {
        let engine = self.engine.as_ref()?;
        Some(self.load_of(&engine.snapshot()))
    }

    /// The same, of a snapshot that was just taken.
    pub(crate) fn load_of(&self, snapshot: &Snapshot) -> LoadReport {
        let used = snapshot.blocks_total - snapshot.blocks_free - snapshot.blocks_evictable;
        LoadReport {
            worker: self.id,
            running: snapshot.running,
            waiting: snapshot.waiting,
            kv_tokens_used: u64::from(used) * u64::from(self.config.block_size),
            transfer_queue: snapshot.importing + snapshot.offered,
            retracted: snapshot.retracted,
        }
    }

    /// Blocks in its pool.
    pub(crate) const fn kv_blocks(&self) -> u32 {
        self.config.kv_blocks
    }

    /// Whether sessions have slots there.
    pub(crate) fn has_slots(&self) -> bool {
        matches!(self.config.kind, EngineKind::SessionSlot(_))
    }

    /// Its scheduler is asked something: when it answers. While a step runs that is after the step and after what it was asked
    /// before, and the next step begins later by what the question costs.
    pub(crate) fn ask(&mut self, now: Instant, cost: Duration) -> Instant {
        if self.step.is_none() {
            return now + cost;
        }
        self.owed += cost;
        self.step_ends + self.owed
    }

    /// The next step takes so much longer.
    pub(crate) fn stall(&mut self, lasts: Duration) {
        self.owed += lasts;
    }

    /// Begins a step; says when it ends.
    pub(crate) fn begin(&mut self, now: Instant, step: Step) -> Instant {
        let computes = self.noise.apply(self.model.step_time(&StepShape::from(&step)));
        let duration = computes * self.percent / 100 + std::mem::take(&mut self.owed);
        self.counts.busy += duration;
        self.step = Some(step);
        self.step_ends = now + duration;
        self.step_ends
    }

    /// KV of so many blocks, in bytes.
    pub(crate) fn block_bytes(&self, blocks: usize) -> u64 {
        self.model.kv_bytes(blocks as u64 * u64::from(self.config.block_size))
    }

    /// The next batch of KV events, kept for a replay.
    pub(crate) fn batch(&mut self, changes: Vec<KvChange>) -> KvBatch {
        let batch = KvBatch {
            worker: self.id,
            epoch: self.told_epoch(),
            sequence: self.next_batch,
            updates: changes.into_iter().map(update).collect(),
        };
        self.next_batch += 1;
        self.kept.push_back(batch.clone());
        if self.kept.len() > self.kept_max {
            self.kept.pop_front();
        }
        batch
    }

    /// The batches from this one on, and whether those that are kept reach back so far.
    pub(crate) fn replay(&self, from_sequence: u64) -> (Vec<KvBatch>, bool) {
        let oldest = self.kept.front().map_or(self.next_batch, |batch| batch.sequence);
        let batches = self
            .kept
            .iter()
            .filter(|batch| batch.sequence >= from_sequence)
            .cloned()
            .collect();
        (batches, self.engine.is_some() && oldest <= from_sequence)
    }

    /// Notes how full the pool is. Called after everything that the engine did.
    pub(crate) fn note_usage(&mut self) {
        let Some(engine) = &self.engine else { return };
        let snapshot = engine.snapshot();
        let held = snapshot.blocks_total - snapshot.blocks_free;
        self.counts.blocks_held_max = self.counts.blocks_held_max.max(held);
    }

    /// Loses the engine and all that is in it.
    pub(crate) fn crash(&mut self) {
        self.close_life();
        self.engine = None;
        self.step = None;
        self.owed = Duration::ZERO;
        self.asked = None;
        self.armed = None;
        self.exports.clear();
        self.kept.clear();
        self.next_batch = 0;
    }

    /// Begins a new life with an empty cache.
    pub(crate) fn restart(&mut self) {
        self.epoch = BootEpoch(self.epoch.0 + 1);
        self.config.boot_epoch = self.epoch;
        self.engine = Some(engine(&self.config, self.remembers));
    }

    /// Adds what only the engine of this life has counted.
    pub(crate) fn close_life(&mut self) {
        let Some(engine) = &self.engine else { return };
        let snapshot = engine.snapshot();
        self.counts.sampled_tokens += snapshot.output_tokens;
        self.counts.evictions += snapshot.evictions;
        self.counts.evicted_blocks += snapshot.evicted_blocks;
    }

    /// Its line of the report. Call after [`Self::close_life`].
    pub(crate) fn record(&self) -> WorkerRecord {
        let role = match self.spec.role {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Both => "both",
        };
        let counts = &self.counts;
        WorkerRecord {
            name: self.spec.name.clone(),
            role: role.to_owned(),
            kv_usage_max: Some(f64::from(counts.blocks_held_max) / f64::from(self.config.kv_blocks.max(1))),
            evictions: Some(counts.evictions),
            evicted_tokens: Some(counts.evicted_blocks * u64::from(self.config.block_size)),
            transfers_in: Some(counts.transfers_in),
            transfers_out: Some(counts.transfers_out),
            transfer_errors: Some(counts.transfer_errors),
            busy: Some(counts.busy),
        }
    }
}

/// An engine that begins to live.
fn engine(config: &EngineConfig, remembers: Option<ResidentLimits>) -> Engine {
    let mut engine = Engine::new(config.clone());
    if let Some(limits) = remembers {
        engine.remember_sessions(limits);
    }
    engine
}

/// Blocks that fit into the host memory of a worker.
fn host_blocks(cluster: &Cluster, block_size: u32) -> u32 {
    let block_bytes = cluster.step_model.kv_bytes(u64::from(block_size)).max(1);
    u32::try_from(cluster.host_bytes / block_bytes).unwrap_or(u32::MAX)
}

/// With a transfer timeout of its own a worker's leases outlast it. A decode worker that has made room waits for the
/// prefill, too.
fn wait_for_transfers(mut config: EngineConfig, stack: &Stack) -> EngineConfig {
    if stack.order == Order::DecodeFirst {
        config.import_timeout = config.import_timeout.max(WAIT_FOR_PREFILL);
    }
    if let Some(lease) = stack.lease {
        config.export_lease = lease;
    }
    if let Some(timeout) = stack.transfer_timeout {
        let outlasts = timeout.saturating_add(AFTER_TIMEOUT);
        config.export_lease = config.export_lease.max(outlasts);
        config.import_timeout = config.import_timeout.max(outlasts);
    }
    config
}

/// A change of the engine's cache as the router sees it.
fn update(change: KvChange) -> KvUpdate {
    match change {
        KvChange::Stored {
            parent, hashes, tier, ..
        } => KvUpdate::Stored { parent, hashes, tier },
        KvChange::Removed { hashes, tier } => KvUpdate::Removed { hashes, tier },
        KvChange::Cleared => KvUpdate::Cleared,
    }
}
