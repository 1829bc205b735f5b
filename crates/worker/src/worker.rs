//! A whole worker: sockets, tasks and the engine thread, started together and stopped together.

use crate::backend::{ModelBackend, StepBackend};
use crate::config::{Compute, Endpoints, Extension, Listen, WorkerConfig, WorkerInfo};
use crate::engine_thread::{EngineHandle, EngineThread, Outside, PullGuard, PullSource, engine_thread};
use crate::executor::{Executor, KvOut, PullOrder};
use crate::http::{App, routes};
use crate::kv_events::{EventRing, EventSockets, ReplayLimits, encode_batch};
use crate::metrics::{Identity, Status};
use crate::serving::{Served, ServedEngine, unix_seconds};
use crate::transfer::{ExportIds, PullContext, pull, release, serve};
use axum::serve::ListenerExt;
use homing_engine::api::{EngineConfig, EngineKind, Eviction};
use homing_model::{KvStore, OpenError, open};
use homing_units::{BootEpoch, Duration};
use homing_wire::worker_name::{EXPECTED_WORKER_NAME, is_worker_name};
use std::future::IntoFuture as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Tokens of the pool of a model with a forward pass, where the configuration does not say.
const MODEL_KV_TOKENS: u32 = 32_768;
/// Tokens in one step of such a model: a step should not last so long that others wait for it.
const MODEL_BATCH_TOKENS: u32 = 128;
/// Tokens in one step of a step model (vLLM's default on large accelerators).
const STEP_MODEL_BATCH_TOKENS: u32 = 8192;

/// How long open connections may take to end when the worker stops.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);
/// Sources that are being told at once that nothing will be pulled. Beyond that their leases will do.
const RELEASES_MAX: usize = 64;

/// Why a worker did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address could not be bound.
    #[error("cannot listen on `{address}` for {what}: {problem}")]
    Listen {
        /// What for.
        what: &'static str,
        /// The address.
        address: SocketAddr,
        /// Why not.
        problem: String,
    },
    /// A setting makes no sense.
    #[error("`{setting}` is `{value}`, expected {expected}")]
    Setting {
        /// Which.
        setting: &'static str,
        /// What was given.
        value: u64,
        /// What was expected.
        expected: &'static str,
    },
    /// The name is not fit for headers and topics.
    #[error("the worker's name is `{name}`, expected {EXPECTED_WORKER_NAME}")]
    Name {
        /// What was given.
        name: String,
    },
    /// The model could not be opened.
    #[error(transparent)]
    Model(#[from] OpenError),
    /// The model's loader did not finish.
    #[error("the model could not be loaded: {0}")]
    Loader(#[from] tokio::task::JoinError),
    /// The engine's thread could not be started.
    #[error("the engine's thread could not be started: {0}")]
    Thread(#[source] std::io::Error),
}

/// A running worker. Dropping it without [`Worker::shutdown`] stops it all the same, without waiting.
pub struct Worker {
    info: WorkerInfo,
    engine: EngineHandle,
    stop: CancellationToken,
    tasks: TaskTracker,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Worker {
    /// Opens the model, binds the sockets and starts to serve.
    ///
    /// # Errors
    /// When the model cannot be opened, an address is taken, or the name or a setting makes no sense.
    pub async fn start(config: WorkerConfig) -> Result<Self, StartError> {
        if !is_worker_name(&config.name) {
            return Err(StartError::Name { name: config.name });
        }
        let served = serve_what(&config).await?;
        let plan = Plan::new(&config, served)?;
        let sockets = Sockets::bind(&config.listen).await?;
        plan.run(sockets)
    }

    /// Where it is reached.
    #[must_use]
    pub fn endpoints(&self) -> Endpoints {
        self.info.endpoints
    }

    /// What it says of itself.
    #[must_use]
    pub fn info(&self) -> &WorkerInfo {
        &self.info
    }

    /// The load and the counters after the engine's last turn.
    #[must_use]
    pub fn status(&self) -> Arc<Status> {
        self.engine.status()
    }

    /// Cancelled when the worker stops; cancelling it stops the worker.
    #[must_use]
    pub fn stop_token(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// Stops: no new connection is taken, live requests end with an error, then sockets and threads are closed.
    pub async fn shutdown(mut self) {
        self.stop.cancel();
        self.tasks.wait().await;
        if let Some(thread) = self.thread.take() {
            // Its panic, if it had one, is on stderr already.
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.cancel();
        self.engine.stop();
    }
}

/// The model that a configuration names, in memory.
async fn serve_what(config: &WorkerConfig) -> Result<Served, StartError> {
    let mut served = match config.compute.clone() {
        Compute::Loaded(served) => served,
        Compute::Steps(model) => Served::steps(*model),
        Compute::Model(spec) => {
            let cache = config.cache_dir.clone();
            let bundle = tokio::task::spawn_blocking(move || open(&spec, &cache)).await??;
            if let Some(warning) = &bundle.warning {
                tracing::warn!("{warning}");
            }
            Served::model(bundle.vocabulary, Arc::new(bundle.model))
        }
    };
    if let Some(name) = &config.served_model {
        served.name.clone_from(name);
    }
    Ok(served)
}

/// All sockets, bound, so that a port in use is known before anything runs.
struct Sockets {
    http: TcpListener,
    transfer: TcpListener,
    events: EventSockets,
    endpoints: Endpoints,
}

impl Sockets {
    async fn bind(listen: &Listen) -> Result<Self, StartError> {
        let http = tcp("http", listen.http).await?;
        let transfer = tcp("kv transfer", listen.kv_transfer).await?;
        let events = EventSockets::bind(listen.kv_events, listen.kv_replay).await;
        let events = events.map_err(|(address, error)| StartError::Listen {
            what: "kv events",
            address,
            problem: error.to_string(),
        })?;
        let address = |listener: &TcpListener, asked| listener.local_addr().unwrap_or(asked);
        let endpoints = Endpoints {
            http: address(&http, listen.http),
            kv_events: events.events_addr,
            kv_replay: events.replay_addr,
            kv_transfer: address(&transfer, listen.kv_transfer),
        };
        Ok(Self {
            http,
            transfer,
            events,
            endpoints,
        })
    }
}

async fn tcp(what: &'static str, address: SocketAddr) -> Result<TcpListener, StartError> {
    let bound = TcpListener::bind(address).await;
    bound.map_err(|error| StartError::Listen {
        what,
        address,
        problem: error.to_string(),
    })
}

/// What a worker is before it has sockets.
struct Plan {
    served: Served,
    engine: EngineConfig,
    info: WorkerInfo,
    advertise: Option<String>,
    max_body_bytes: usize,
    replay: ReplayLimits,
}

impl Plan {
    fn new(config: &WorkerConfig, served: Served) -> Result<Self, StartError> {
        let (kv_tokens, batch) = match &served.engine {
            ServedEngine::Model(_) => (MODEL_KV_TOKENS, MODEL_BATCH_TOKENS),
            ServedEngine::Steps(model) => (model.kv_tokens, STEP_MODEL_BATCH_TOKENS),
        };
        let block_size = positive("block_size", config.block_size)?;
        let kv_blocks = config.kv_tokens.unwrap_or(kv_tokens) / block_size;
        let kv_blocks = positive("kv_tokens", kv_blocks).map_err(|_| StartError::Setting {
            setting: "kv_tokens",
            value: u64::from(config.kv_tokens.unwrap_or(kv_tokens)),
            expected: "at least one block's tokens",
        })?;
        let fits = served.context_tokens.min(kv_blocks.saturating_mul(block_size));
        let limits = &config.limits;
        let engine = EngineConfig {
            boot_epoch: config.boot_epoch.unwrap_or_else(epoch_of_clock),
            block_size,
            kv_blocks,
            max_batch_tokens: positive("max_batch_tokens", limits.max_batch_tokens.unwrap_or(batch))?,
            max_running: positive("max_running", limits.max_running)?,
            max_waiting: limits.max_waiting,
            max_context_tokens: positive(
                "max_context_tokens",
                limits.max_context_tokens.unwrap_or(fits).min(fits),
            )?,
            export_lease: limits.export_lease,
            export_renewals: limits.export_renewals,
            import_timeout: limits.import_timeout,
            kind: EngineKind::Block,
            // A worker keeps no KV in host memory.
            host_blocks: 0,
            eviction: eviction(config, &served),
        };
        Ok(Self {
            info: info(config, &served, &engine),
            served,
            engine,
            advertise: config.advertise.clone(),
            max_body_bytes: limits.max_body_bytes,
            replay: limits.replay,
        })
    }

    fn run(mut self, sockets: Sockets) -> Result<Worker, StartError> {
        self.info.endpoints = sockets.endpoints;
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        let ring = Arc::new(EventRing::new(self.replay));
        let places = self.engine.max_running as usize + self.engine.max_waiting as usize;
        let (engine, thread) = engine_thread(places);
        let block_bytes = self.block_bytes();
        let outside = Shell {
            runtime: Handle::current(),
            context: PullContext {
                engine: engine.clone(),
                block_bytes,
            },
            releases: Arc::new(Semaphore::new(RELEASES_MAX)),
            ring: ring.clone(),
            block_size: self.engine.block_size,
        };
        let exports = ExportIds::new(self.engine.boot_epoch);
        tasks.spawn(
            sockets
                .events
                .serve(self.info.kv_events_topic.clone(), ring, stop.clone()),
        );
        tasks.spawn(serve(
            sockets.transfer,
            engine.clone(),
            block_bytes,
            exports.clone(),
            stop.clone(),
        ));
        tasks.spawn(serve_http(
            sockets.http,
            self.app(&engine, exports, &stop),
            engine.clone(),
            stop.clone(),
        ));
        tasks.close();
        let info = self.info.clone();
        let thread = self.spawn(thread, outside, stop.clone())?;
        Ok(Worker {
            info,
            engine,
            stop,
            tasks,
            thread: Some(thread),
        })
    }

    fn block_bytes(&self) -> u32 {
        let bytes = match &self.served.engine {
            ServedEngine::Model(model) => KvStore::new(model.config(), self.engine.block_size, 0).block_bytes(),
            ServedEngine::Steps(_) => StepBackend::PAYLOAD_BYTES,
        };
        u32::try_from(bytes).expect("a block of a model that runs on a CPU is smaller than 4 GiB")
    }

    fn transfer_host(&self) -> String {
        let address = self.info.endpoints.kv_transfer.ip();
        self.advertise.clone().unwrap_or_else(|| {
            if address.is_unspecified() {
                tracing::warn!(%address, "other workers cannot reach this address, expected `advertise` to name one");
            }
            address.to_string()
        })
    }

    fn app(&self, engine: &EngineHandle, exports: ExportIds, stop: &CancellationToken) -> Arc<App> {
        Arc::new(App {
            engine: engine.clone(),
            served: self.served.clone(),
            identity: Identity {
                model: self.served.name.clone(),
                block_size: self.engine.block_size,
                started_unix_seconds: seconds_of_clock(),
            },
            info: self.info.clone(),
            exports,
            transfer_host: self.transfer_host(),
            front_end: match &self.served.engine {
                ServedEngine::Model(_) => Duration::ZERO,
                ServedEngine::Steps(model) => model.front_end(),
            },
            created: unix_seconds(),
            max_body_bytes: self.max_body_bytes,
            readers: Arc::new(Semaphore::new(
                std::thread::available_parallelism().map_or(1, usize::from),
            )),
            stopping: stop.clone(),
            nameless: AtomicU64::new(0),
        })
    }

    /// Starts the engine thread. When it ends, in whatever way, the worker stops: without it nobody is served.
    fn spawn(
        self,
        thread: EngineThread,
        outside: Shell,
        stop: CancellationToken,
    ) -> Result<std::thread::JoinHandle<()>, StartError> {
        let Self {
            served, engine, info, ..
        } = self;
        let builder = std::thread::Builder::new().name(format!("engine-{}", info.name));
        let tokenizer = served.words.tokenizer;
        let spawned = match served.engine {
            ServedEngine::Model(model) => {
                let backend = ModelBackend::new(model, engine.block_size, engine.kv_blocks, false);
                builder.spawn(move || {
                    let _stops = stop.drop_guard();
                    thread.run(Executor::new(engine, backend, tokenizer), outside);
                })
            }
            ServedEngine::Steps(model) => {
                let backend = StepBackend::new(*model, engine.block_size);
                builder.spawn(move || {
                    let _stops = stop.drop_guard();
                    thread.run(Executor::new(engine, backend, tokenizer), outside);
                })
            }
        };
        spawned.map_err(StartError::Thread)
    }
}

async fn serve_http(listener: TcpListener, app: Arc<App>, engine: EngineHandle, stop: CancellationToken) {
    let listener = listener.tap_io(|stream| {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "a connection keeps its delay");
        }
    });
    let stopping = stop.clone();
    let ending = async move {
        stopping.cancelled().await;
        // What is alive ends now, with an error that its client sees, and so do its connections.
        engine.stop();
    };
    let served = axum::serve(listener, routes(app))
        .with_graceful_shutdown(ending)
        .into_future();
    let too_long = async {
        stop.cancelled().await;
        tokio::time::sleep(SHUTDOWN_GRACE).await;
    };
    tokio::select! {
        served = served => if let Err(error) = served {
            tracing::error!(%error, "http has stopped");
        },
        () = too_long => tracing::warn!("a connection did not end in time and is given up"),
    }
}

/// The engine thread's way out: transfers run as tasks, events go into the ring.
struct Shell {
    runtime: Handle,
    context: PullContext,
    releases: Arc<Semaphore>,
    ring: Arc<EventRing>,
    block_size: u32,
}

impl Outside for Shell {
    fn pull(&mut self, order: PullOrder, source: PullSource) -> PullGuard {
        PullGuard(
            self.runtime
                .spawn(pull(self.context.clone(), order, source))
                .abort_handle(),
        )
    }

    fn release(&mut self, source: PullSource) {
        if let Ok(place) = self.releases.clone().try_acquire_owned() {
            self.runtime.spawn(async move {
                release(source).await;
                drop(place);
            });
        }
    }

    fn publish(&mut self, changes: Vec<KvOut>) {
        self.ring
            .push(encode_batch(changes, self.block_size, seconds_of_clock()));
    }
}

/// What is evicted first.
fn eviction(config: &WorkerConfig, served: &Served) -> Eviction {
    if !config.expects_returns {
        return Eviction::Lru;
    }
    Eviction::Expected {
        cost_doubles_after_tokens: served.cost_doubles_after_tokens(),
    }
}

fn info(config: &WorkerConfig, served: &Served, engine: &EngineConfig) -> WorkerInfo {
    WorkerInfo {
        name: config.name.clone(),
        role: config.role,
        epoch: engine.boot_epoch,
        model: served.name.clone(),
        block_size: engine.block_size,
        kv_tokens: u64::from(engine.kv_blocks) * u64::from(engine.block_size),
        max_context_tokens: engine.max_context_tokens,
        step_model: match &served.engine {
            ServedEngine::Model(_) => None,
            ServedEngine::Steps(model) => Some(model.model.clone()),
        },
        endpoints: Endpoints {
            http: config.listen.http,
            kv_events: config.listen.kv_events,
            kv_replay: config.listen.kv_replay,
            kv_transfer: config.listen.kv_transfer,
        },
        kv_events_topic: format!("kv@{}@{}", config.name, served.name),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        extensions: vec![Extension::Probe, Extension::Release, Extension::Renew],
        export_lease_ms: u64::try_from(engine.export_lease.as_millis()).unwrap_or(u64::MAX),
    }
}

fn positive(setting: &'static str, value: u32) -> Result<u32, StartError> {
    match value {
        0 => Err(StartError::Setting {
            setting,
            value: 0,
            expected: "at least 1",
        }),
        value => Ok(value),
    }
}

/// A life's number from the clock: microseconds since 1970, which a JSON number holds exactly.
fn epoch_of_clock() -> BootEpoch {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    BootEpoch(u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX))
}

fn seconds_of_clock() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |elapsed| elapsed.as_secs_f64())
}
