//! The gateway as a whole: started from its configuration, stopped in bounded time.

use crate::clock::Clock;
use crate::config::{GatewayConfig, WorkerSpec};
use crate::core_task::{CoreHandle, CoreTask};
use crate::engine::{Doubt, EXPECTED_SOURCE, EventSource, OpenSessions, Watch, Watched, bootstrap_at, is_endpoint};
use crate::fleet::Fleet;
use crate::idle::forget_idle;
use crate::prefix::canonical::Canonical;
use crate::prefix::watch::Watch as PrefixWatch;
use crate::proxy::errands::prompts::Prompts;
use crate::proxy::errands::{ORDERS, Order, run_errands};
use crate::proxy::release::Releases;
use crate::recorder::Recorder;
use crate::routes::routes;
use crate::server::{Ends, serve};
use crate::shell::Shell;
use crate::telemetry::Telemetry;
use crate::tokenise::Tokeniser;
use crate::turn_log::TurnLog;
use crate::upstream::Upstream;
use homing_model::{ModelSpec, OpenError, Vocabulary, default_cache_dir, open_vocabulary};
use homing_router::Router;
use homing_units::WorkerId;
use homing_wire::worker_name::{EXPECTED_WORKER_NAME, is_worker_name};
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::net::TcpListener;
use tokio::sync::{broadcast, mpsc};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Turns that a follower may be behind before it misses some.
const TURN_LOGS: usize = 1_024;
/// Replays that wait for one worker: a second one while one is under way is refused.
const RESYNCS: usize = 1;
/// Largest own block, in tokens.
const BLOCK_SIZE_MAX: u32 = 4_096;
/// How long the end of a request's task may take once it is not waited for any longer.
const ABANDON_GRACE: Duration = Duration::from_millis(500);

/// Why the gateway did not start.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// The address cannot be listened on.
    #[error("cannot listen on `{address}`: {error}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system says.
        error: std::io::Error,
    },
    /// A setting makes no sense.
    #[error("{0}")]
    Config(String),
    /// The recording cannot be written.
    #[error("cannot record to `{path}`: {error}")]
    Record {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
}

/// A running gateway. Dropped without [`Gateway::shutdown`] it stops at once.
pub struct Gateway {
    address: SocketAddr,
    turns: broadcast::Sender<TurnLog>,
    ends: Ends,
    abandon: CancellationToken,
    flights: TaskTracker,
    connections: TaskTracker,
    server: JoinHandle<()>,
    /// The workers' watches, what forgets idle sessions' prompts, and what runs errands.
    watches: Vec<JoinHandle<()>>,
    core: JoinHandle<()>,
    drain: Duration,
}

impl Gateway {
    /// Starts. Workers need not be there yet.
    ///
    /// # Errors
    /// The configuration makes no sense, the tokenizer's model cannot be opened, the address is taken, or the recording
    /// cannot be written.
    pub async fn start(config: GatewayConfig) -> Result<Self, GatewayError> {
        config.check()?;
        let vocabulary = open_tokenizer(&config).await?;
        let listen = |error| GatewayError::Listen {
            address: config.listen,
            error,
        };
        let listener = TcpListener::bind(config.listen).await.map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        let parts = Parts::new(&config, vocabulary);
        let (core, messages) = CoreHandle::channel();
        let recorder = recorder(&config)?;
        let (mut watches, watched) = parts.watch(&config, &core);
        let (orders, errands) = mpsc::channel(ORDERS);
        let core_task = tokio::spawn(parts.core(&config, watched, recorder, orders).run(messages));
        let shell = Arc::new(parts.shell(&config, core));
        let idle = config.router.clocks.session_idle;
        watches.push(tokio::spawn(forget_idle(Arc::clone(&shell), idle)));
        watches.push(tokio::spawn(run_errands(Arc::clone(&shell), errands)));
        let turns = shell.turns.clone();
        let ends = Ends {
            stop: CancellationToken::new(),
            sever: CancellationToken::new(),
        };
        let connections = TaskTracker::new();
        let (abandon, flights) = (shell.abandon.clone(), shell.flights.clone());
        let routes = routes(shell, config.limits.body_bytes);
        let server = serve(
            listener,
            routes,
            config.limits.connections,
            ends.clone(),
            connections.clone(),
        );
        let server = tokio::spawn(server);
        let drain = config.clocks.drain;
        Ok(Self {
            address,
            turns,
            ends,
            abandon,
            flights,
            connections,
            server,
            watches,
            core: core_task,
            drain,
        })
    }

    /// Where clients connect.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// A line for each turn that ends from now on. A follower that falls far behind misses some and is told so.
    #[must_use]
    pub fn turns(&self) -> broadcast::Receiver<TurnLog> {
        self.turns.subscribe()
    }

    /// Stops: takes no new connections, lets requests under way end for a bounded time, tells the others.
    pub async fn shutdown(mut self) {
        self.ends.stop.cancel();
        self.flights.close();
        self.connections.close();
        let drained = async {
            self.flights.wait().await;
            self.connections.wait().await;
        };
        if tokio::time::timeout(self.drain, drained).await.is_err() {
            self.abandon.cancel();
            let ended = async {
                self.flights.wait().await;
                self.connections.wait().await;
            };
            if tokio::time::timeout(ABANDON_GRACE, ended).await.is_err() {
                self.sever().await;
            }
        }
        for watch in &self.watches {
            watch.abort();
        }
        // The last handles of the core go with the server's routes and the watches; then it ends by itself.
        self.server.abort();
        for watch in self.watches.drain(..) {
            drop(watch.await);
        }
        drop((&mut self.server).await);
        let core_ended = tokio::time::timeout(ABANDON_GRACE, &mut self.core).await.is_ok();
        let requests = self.flights.len();
        if !core_ended && requests > 0 {
            tracing::warn!(requests, "the core was stopped with requests under way");
        }
    }

    /// Closes what clients keep open by not taking what is theirs.
    async fn sever(&self) {
        let (requests, connections) = (self.flights.len(), self.connections.len());
        if requests + connections > 0 {
            tracing::warn!(requests, connections, "some clients did not take their last bytes");
        }
        self.ends.sever.cancel();
        if tokio::time::timeout(ABANDON_GRACE, self.connections.wait())
            .await
            .is_err()
        {
            tracing::debug!(connections = self.connections.len(), "some connections did not close");
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.ends.stop.cancel();
        self.ends.sever.cancel();
        self.abandon.cancel();
        self.server.abort();
        self.core.abort();
        for watch in &self.watches {
            watch.abort();
        }
    }
}

/// Where the core orders replays of each worker's KV events.
type WatchedWorkers = HashMap<WorkerId, Watched>;

/// What the tasks of a gateway have in common.
struct Parts {
    clock: Clock,
    fleet: Arc<Fleet>,
    upstream: Upstream,
    telemetry: Arc<Telemetry>,
    tokeniser: Arc<Tokeniser>,
}

impl Parts {
    fn new(config: &GatewayConfig, vocabulary: Option<Arc<Vocabulary>>) -> Self {
        let fleet = Arc::new(Fleet::new(&config.workers));
        let telemetry = Arc::new(Telemetry::new(Arc::clone(&fleet)));
        let upstream = Upstream::new();
        let (block_size, memory) = (config.router.block_size, config.limits.prompt_memory_bytes);
        let of_model = vocabulary.map(|vocabulary| Tokeniser::of_vocabulary(vocabulary, block_size, memory));
        let tokeniser = of_model
            .unwrap_or_default()
            .with_tails(config.router.limits.sessions)
            .with_engines(Arc::clone(&fleet), upstream.clone());
        Self {
            clock: Clock::start(),
            fleet,
            upstream,
            telemetry,
            tokeniser: Arc::new(tokeniser),
        }
    }

    /// Starts a watch for each worker.
    fn watch(&self, config: &GatewayConfig, core: &CoreHandle) -> (Vec<JoinHandle<()>>, WatchedWorkers) {
        let mut watches = Vec::new();
        let mut watched = WatchedWorkers::new();
        for member in self.fleet.members() {
            let doubt = Arc::new(Doubt::default());
            let watch = Watch {
                worker: member.id,
                fleet: Arc::clone(&self.fleet),
                upstream: self.upstream.clone(),
                core: core.clone(),
                telemetry: Arc::clone(&self.telemetry),
                clocks: config.clocks.clone(),
                block_size: config.router.block_size,
                doubt: Arc::clone(&doubt),
                tokeniser: Arc::clone(&self.tokeniser),
            };
            let (resyncs, orders) = mpsc::channel(RESYNCS);
            watched.insert(member.id, Watched { resyncs, doubt });
            watches.push(tokio::spawn(watch.run(orders)));
        }
        (watches, watched)
    }

    fn core(
        &self,
        config: &GatewayConfig,
        watched: WatchedWorkers,
        recorder: Option<Recorder>,
        orders: mpsc::Sender<Order>,
    ) -> CoreTask {
        CoreTask {
            orders,
            errands: HashMap::new(),
            router: Router::new(config.router.clone()),
            clock: self.clock,
            flights: HashMap::new(),
            watched,
            recorder,
            telemetry: Arc::clone(&self.telemetry),
            decisions: VecDeque::new(),
            decisions_max: config.limits.decisions,
        }
    }

    fn shell(self, config: &GatewayConfig, core: CoreHandle) -> Shell {
        let life = life();
        Shell {
            core,
            releases: Releases::new(self.upstream.clone(), Arc::clone(&self.fleet)),
            fleet: self.fleet,
            upstream: self.upstream,
            telemetry: self.telemetry,
            tokeniser: self.tokeniser,
            clock: self.clock,
            policy: config.router.policy.to_string(),
            block_size: config.router.block_size,
            default_output_tokens: config.limits.default_output_tokens.max(1),
            client_stall: config.clocks.client_stall,
            keep_alive: Some(config.clocks.keep_alive).filter(|every| !every.is_zero()),
            offer: config.clocks.offer,
            prefixes: PrefixWatch::of_sessions(config.router.limits.sessions),
            prompts: Prompts::new(config.router.policy.build().habits().errands.any()),
            canonical: config.canonicalise.then(|| Arc::new(Canonical::default())),
            open_sessions: OpenSessions::new(life, config.router.clocks.session_idle),
            turns: broadcast::channel(TURN_LOGS).0,
            abandon: CancellationToken::new(),
            flights: TaskTracker::new(),
            life,
            requests: AtomicU64::new(0),
        }
    }
}

/// Opens the vocabulary on the blocking pool: a model may have to be fetched.
async fn open_tokenizer(config: &GatewayConfig) -> Result<Option<Arc<Vocabulary>>, GatewayError> {
    let Some(name) = config.tokenizer.clone() else {
        return Ok(None);
    };
    let opened = tokio::task::spawn_blocking(move || {
        let spec: ModelSpec = name.parse().map_err(|error: OpenError| error.to_string())?;
        open_vocabulary(&spec, &default_cache_dir()).map_err(|error| error.to_string())
    });
    let (vocabulary, warning) = opened
        .await
        .map_err(|error| error.to_string())
        .flatten()
        .map_err(|error| GatewayError::Config(format!("the tokenizer cannot be opened: {error}")))?;
    if let Some(warning) = warning {
        tracing::warn!(warning, "tokenizer");
    }
    Ok(Some(Arc::new(vocabulary)))
}

fn recorder(config: &GatewayConfig) -> Result<Option<Recorder>, GatewayError> {
    let Some(path) = &config.record else { return Ok(None) };
    let recorder = Recorder::create(path, &config.router);
    recorder.map(Some).map_err(|error| GatewayError::Record {
        path: path.clone(),
        error,
    })
}

impl GatewayConfig {
    /// Checks what the types do not: that a gateway could be started from it.
    ///
    /// # Errors
    /// A setting makes no sense ([`GatewayError::Config`]).
    pub fn check(&self) -> Result<(), GatewayError> {
        let wrong = |message: String| Err(GatewayError::Config(message));
        let block_size = self.router.block_size;
        if !(1..=BLOCK_SIZE_MAX).contains(&block_size) {
            return wrong(format!(
                "`block_size` is `{block_size}`, expected 1 to {BLOCK_SIZE_MAX} tokens"
            ));
        }
        let mut names = HashSet::new();
        for member in Fleet::new(&self.workers).members() {
            let WorkerSpec { url, .. } = &member.spec;
            let uri: Option<http::Uri> = url.parse().ok();
            if !uri.is_some_and(|uri| uri.scheme_str() == Some("http") && uri.host().is_some()) {
                return wrong(format!(
                    "the worker `{url}` has no address, expected such as `http://127.0.0.1:8000`"
                ));
            }
            let sources = (&member.spec.kv_events, &member.spec.kv_replay);
            if let Some(source) = sources
                .0
                .as_ref()
                .filter(|source| source.parse::<EventSource>().is_err())
            {
                return wrong(format!("`kv_events` is `{source}`, expected {EXPECTED_SOURCE}"));
            }
            if let Some(replay) = sources.1.as_ref().filter(|replay| !is_endpoint(replay)) {
                return wrong(format!(
                    "`kv_replay` is `{replay}`, expected `tcp://HOST:PORT` or `ipc://PATH`"
                ));
            }
            if let Some(at) = member.spec.bootstrap.as_ref().filter(|at| bootstrap_at(at).is_none()) {
                return wrong(format!("`bootstrap` is `{at}`, expected `HOST:PORT`"));
            }
            if !is_worker_name(&member.name) {
                return wrong(format!(
                    "a worker is called `{}`, expected {EXPECTED_WORKER_NAME}",
                    member.name
                ));
            }
            if !names.insert(member.name.clone()) {
                return wrong(format!(
                    "two workers are called `{}`, expected each name once",
                    member.name
                ));
            }
        }
        Ok(())
    }
}

/// Differs between two lives of the gateway, as far as 32 bits of the clock can.
fn life() -> u32 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // Only the low bits change from start to start.
    u32::try_from((now.as_micros() >> 8) & u128::from(u32::MAX)).unwrap_or_default()
}
