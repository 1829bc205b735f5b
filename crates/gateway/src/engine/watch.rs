//! One engine under watch: reached, joined, probed, polled, followed into its next lives.

use super::Resync;
use super::agreement::compare;
use super::discovery::{discover, epoch_of, load_of, metrics_of};
use super::feed::Feed;
use super::mapping::HashMapping;
use super::room::room;
use super::sglang;
use crate::config::{EngineKind, GatewayClocks};
use crate::core_task::CoreHandle;
use crate::fleet::{Fleet, Known, Member};
use crate::telemetry::Telemetry;
use crate::tokenise::Tokeniser;
use crate::upstream::Upstream;
use homing_router::event::{Event, HealthReport};
use homing_units::{BootEpoch, WorkerId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;

/// First pause before an engine that could not be reached is tried again.
const RETRY_FIRST: Duration = Duration::from_millis(50);
/// Engine blocks that are mapped for each block of its pool: blocks go and come back under the same hash.
const MAPPED_FACTOR: u64 = 2;
/// Engine blocks that are mapped at most, whatever the pool.
const MAPPED_MAX: u64 = 1 << 21;
/// Engine blocks that are mapped at least: a pool's size may be understated.
const MAPPED_MIN: u64 = 1 << 12;
/// The smallest block of an engine that does not say it, in tokens, for sizing the map.
const ENGINE_BLOCK_MIN: u64 = 16;

/// A worker is not asked for its room more often than this, whatever pause it asks for.
const ROOM_AGAIN_MIN: Duration = Duration::from_millis(20);

/// What speaks for another life of an engine than the one that is known, from whoever sees it.
#[derive(Debug, Default)]
pub(crate) struct Doubt {
    pending: AtomicBool,
    /// Sequences of KV events that began anew: for an engine that does not say when it was started they count its lives.
    restarts: AtomicU64,
}

impl Doubt {
    /// Something speaks of another life: its metrics, or a connection that broke.
    pub(super) fn raise(&self) {
        self.pending.store(true, Ordering::Relaxed);
    }

    fn take(&self) -> bool {
        self.pending.swap(false, Ordering::Relaxed)
    }

    /// Its KV events are numbered from the start again.
    pub(crate) fn sequence_began_anew(&self) {
        self.restarts.fetch_add(1, Ordering::Relaxed);
        self.raise();
    }

    /// The life of an engine, where it does not say it: the number of its restarts that were seen.
    fn epoch(&self) -> BootEpoch {
        BootEpoch(self.restarts.load(Ordering::Relaxed) + 1)
    }
}

/// What a watch needs.
pub(crate) struct Watch {
    pub(crate) worker: WorkerId,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) upstream: Upstream,
    pub(crate) core: CoreHandle,
    pub(crate) telemetry: Arc<Telemetry>,
    pub(crate) clocks: GatewayClocks,
    pub(crate) block_size: u32,
    pub(crate) doubt: Arc<Doubt>,
    pub(crate) tokeniser: Arc<Tokeniser>,
}

impl Watch {
    /// Watches until it is dropped.
    pub(crate) async fn run(self, mut resyncs: mpsc::Receiver<Resync>) {
        let known = self.reach().await;
        self.compare_tokens().await;
        self.join(&known).await;
        let (lives, mut life) = watch::channel(known.clone());
        tokio::join!(
            self.probe(lives, known),
            self.poll(),
            self.ask_for_room(),
            self.follow(&mut life, &mut resyncs)
        );
    }

    fn member(&self) -> &Member {
        &self.fleet.members()[self.worker.0 as usize]
    }

    /// Tries until the engine says who it is.
    async fn reach(&self) -> Known {
        let mut pause = RETRY_FIRST;
        let mut missing = false;
        loop {
            match self.discover(self.clocks.poll_timeout).await {
                Ok(known) => return known,
                Err(error) => {
                    self.member().set_problem(error.clone());
                    self.missed(
                        &mut missing,
                        &error,
                        "a worker cannot be reached, it is tried again and again",
                    );
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(self.clocks.retry_cap);
                }
            }
        }
    }

    /// An engine that tokenises otherwise than the router is found out before a turn is sent there.
    async fn compare_tokens(&self) {
        compare(self.member(), &self.upstream, &self.tokeniser, self.clocks.poll_timeout).await;
    }

    /// Asks the engine who it is; whether it fits its peers is asked as well, because it must not be sent anything else.
    async fn discover(&self, timeout: Duration) -> Result<Known, String> {
        let member = self.member();
        let mut known = discover(member, &self.upstream, timeout).await?;
        known.info.epoch = match member.spec.kind {
            EngineKind::Homing | EngineKind::Vllm if known.info.epoch != BootEpoch::default() => known.info.epoch,
            EngineKind::Homing | EngineKind::Vllm => self.doubt.epoch(),
            EngineKind::Sglang => sglang::epoch(known.info.epoch, self.doubt.epoch()),
        };
        self.fleet.admit(member.id, &known)?;
        Ok(known)
    }

    /// Says at the first miss of a row what is wrong, and is silent about the others.
    fn missed(&self, missing: &mut bool, error: &str, what: &'static str) {
        let (worker, url) = (&self.member().name, self.member().uri(""));
        if std::mem::replace(missing, true) {
            tracing::debug!(worker, url, error, "{what}");
        } else {
            tracing::warn!(worker, url, error, "{what}");
        }
    }

    async fn join(&self, known: &Known) {
        let member = self.member();
        tracing::info!(worker = member.name, role = ?known.info.role, kv_tokens = known.info.kv_tokens, "a worker joined");
        self.core.tell(Event::WorkerJoined(known.info.clone())).await;
    }

    /// Asks for a sign of life at every tick, and follows the engine into new lives.
    async fn probe(&self, lives: watch::Sender<Known>, mut known: Known) {
        let mut ticks = tokio::time::interval(self.clocks.probe_every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // After a missed probe the life may be another one.
        let mut certain = true;
        let mut missing = false;
        loop {
            ticks.tick().await;
            certain &= !self.doubt.take();
            let sign = self.sign_of_life(&known, certain).await;
            self.member().set_reachable(sign.is_ok());
            let found = match sign {
                Ok(found) => found,
                Err(error) => {
                    self.missed(&mut missing, &error, "a worker does not answer its probes");
                    certain = false;
                    self.report(None, false).await;
                    continue;
                }
            };
            certain = true;
            if std::mem::take(&mut missing) {
                tracing::info!(worker = self.member().name, "a worker answers its probes again");
            }
            self.report(Some(found.info.epoch), true).await;
            if found != known {
                self.follow_into(&found, &known).await;
                lives.send_replace(found.clone());
                known = found;
            }
        }
    }

    /// The core learns of a new life by its epoch; only an engine that came back as another one joins anew.
    async fn follow_into(&self, found: &Known, known: &Known) {
        let mut same_life = found.info.clone();
        same_life.epoch = known.info.epoch;
        tracing::info!(worker = self.member().name, epoch = %found.info.epoch, "a worker has a new life");
        self.compare_tokens().await;
        if same_life != known.info {
            self.join(found).await;
        }
    }

    async fn report(&self, epoch: Option<BootEpoch>, alive: bool) {
        self.core
            .tell(Event::Health(HealthReport {
                worker: self.worker,
                epoch,
                alive,
            }))
            .await;
    }

    /// The embedded worker names its life in every answer. Others do not: their health is the sign, and who they are is
    /// asked again where their life is not certain.
    async fn sign_of_life(&self, known: &Known, certain: bool) -> Result<Known, String> {
        let timeout = self.clocks.probe_timeout;
        let member = self.member();
        match member.spec.kind {
            EngineKind::Homing => return self.discover(timeout).await,
            EngineKind::Vllm => drop(self.upstream.get(&member.uri("/health"), timeout).await?),
            EngineKind::Sglang => sglang::sign_of_life(member, &self.upstream, timeout).await?,
        }
        if certain {
            return Ok(known.clone());
        }
        // Until it says who it is, its old cache must not be assumed.
        self.discover(self.clocks.poll_timeout).await
    }

    /// Reads the engine's figures at every tick; what it does not say is not reported.
    async fn poll(&self) {
        let mut ticks = tokio::time::interval(self.clocks.poll_every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let Ok(page) = self
                .upstream
                .get(&self.member().uri("/metrics"), self.clocks.poll_timeout)
                .await
            else {
                continue;
            };
            let Some(known) = self.member().known() else { continue };
            let metrics = metrics_of(self.member(), &page);
            // Figures of a life that the probes have not met yet would be taken for those of the old one.
            let other_life = self.member().spec.kind == EngineKind::Vllm
                && epoch_of(&metrics).is_some_and(|epoch| epoch != known.info.epoch);
            if other_life {
                self.doubt.raise();
                continue;
            }
            if let Some(load) = load_of(self.member(), &metrics, known.info.kv_tokens) {
                self.core.tell(Event::Load(load)).await;
            }
        }
    }

    /// Asks a worker that can tell how much room it has, and again after the pause that it asks for: the core keeps work away
    /// until then, and must hear when that is over.
    async fn ask_for_room(&self) {
        loop {
            let known = self.member().known();
            let asked = known.is_some_and(|known| known.extensions.tells_room);
            let room = match asked {
                true => room(self.member(), &self.upstream, self.clocks.poll_timeout).await,
                false => None,
            };
            let pause = room.map_or(Duration::ZERO, |room| room.pause);
            if let Some(room) = room {
                self.core.tell(Event::Room(room)).await;
            }
            let again = match pause.is_zero() {
                true => self.clocks.poll_every,
                false => pause.clamp(ROOM_AGAIN_MIN, self.clocks.poll_every.max(ROOM_AGAIN_MIN)),
            };
            tokio::time::sleep(again).await;
        }
    }

    /// Follows the KV events of each life.
    async fn follow(&self, life: &mut watch::Receiver<Known>, resyncs: &mut mpsc::Receiver<Resync>) {
        loop {
            let known = life.borrow_and_update().clone();
            tokio::select! {
                () = self.feed(&known).run(resyncs) => {}
                changed = life.changed() => if changed.is_err() {
                    return;
                },
            }
        }
    }

    fn feed(&self, known: &Known) -> Feed {
        let page_size = known.sglang.as_ref().and_then(|server| server.page_size);
        let blocks = known.info.kv_tokens / page_size.map_or(ENGINE_BLOCK_MIN, u64::from) * MAPPED_FACTOR;
        let capacity = usize::try_from(blocks.clamp(MAPPED_MIN, MAPPED_MAX)).unwrap_or(usize::MAX);
        Feed {
            worker: self.worker,
            epoch: known.info.epoch,
            endpoints: known.endpoints.clone(),
            core: self.core.clone(),
            telemetry: Arc::clone(&self.telemetry),
            mapping: HashMapping::new(self.block_size, capacity),
            next: 0,
            retry_cap: self.clocks.retry_cap,
            rank: self.member().spec.data_parallel_rank,
            doubt: Arc::clone(&self.doubt),
            last_made_s: 0.0,
            began_anew: false,
        }
    }
}
