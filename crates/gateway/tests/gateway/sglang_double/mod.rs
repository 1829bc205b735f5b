//! A protocol double of an SGLang server, over loopback: what it says and how it fails, written from SGLang's own source
//! (release 0.5.23, files under `python/sglang/srt/`) by someone who had not seen the router's adapter for it.
//!
//! SGLang does not start without a GPU, so this stands in for it. It computes nothing: tokens are bytes and the next one
//! follows from all before it (`next_token`), so an answer shows which prompt its KV was made from. What it mirrors:
//!
//! | what | where in SGLang |
//! | --- | --- |
//! | roles, and what is refused in each | `arg_groups/fields/disagg.py`, `managers/scheduler.py` (`_handle_generate_request`) |
//! | both legs must meet in a room; who waits for whom, for how long, with which words | `disaggregation/{prefill,decode}.py`, `common/conn.py` |
//! | D's first token is P's, D's cached tokens begin with P's | `disaggregation/decode.py` (`_commit_transfer_to_req`) |
//! | data-parallel ranks: `room % dp_size` at P, round robin at D, `routed_dp_rank` | `managers/data_parallel_controller.py`, `common/conn.py` |
//! | errors before the first token are 200 with an error event in a stream, else their status | `entrypoints/openai/serving_{chat,completions}.py` |
//! | a stream of chat cannot say its tokens (`return_token_ids` is a 400), one of completions can | `serving_chat.py` (`_convert_to_internal_request`) |
//! | `/abort_request` ends all requests whose id *begins* with the given one, with `finish_reason: "abort"` and 200 | `managers/scheduler.py` (`abort_request`) |
//! | a client that hangs up is noticed seconds later | `managers/tokenizer_manager.py` (`create_abort_task`, 2 s; `SGLANG_REQUEST_STATE_WAIT_TIMEOUT`, 4 s) |
//! | a decode server has no radix cache unless it was asked for | `arg_groups/pd_disaggregation_hook.py` |
//! | KV events, one publisher a rank | `disaggregation/kv_events.py`, `mem_cache/events.py` |
//! | `/server_info` and its `kv_events` | `utils/common.py` (`build_server_info`), `runtime_context.py` (`describe_kv_events_publisher`) |
//! | metrics, absent without `--enable-metrics` | `observability/metrics_collector.py` |
//! | local prefill on decode: `do_local_prefill` | pull request 34773, a draft; no release has it |
//!
//! Where SGLang's behaviour is undefined (a room used twice under the default policy, legs of different page counts, a
//! decode request without a host: the scheduler dies or mixes up memory), the double refuses and writes a *fault* down;
//! tests assert that there are none. Some waits are shortened in [`Waits`]. Left out: speculative decoding, LoRA,
//! images, hierarchical caches, retraction, tensor and pipeline parallelism, the default of no limit to a chat's output.

mod cache;
mod fabric;
mod http;
mod jobs;
mod publisher;
mod shapes;
mod tests;

pub use self::cache::{Change, EventForm};
pub use self::fabric::Fabric;
pub use self::jobs::Act;

use self::cache::Cache;
use self::fabric::Bootstrap;
use self::jobs::Job;
use self::publisher::{Publisher, Publishers};
use crate::support::until;
use homing_model::Vocabulary;
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// `--disaggregation-mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Null,
    Prefill,
    Decode,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// What the command line of a server said.
#[derive(Clone, Debug)]
pub struct Spec {
    pub mode: Mode,
    /// `--served-model-name`.
    pub model: String,
    pub context_len: u32,
    pub page_size: u32,
    pub dp_size: u32,
    pub max_total_num_tokens: u32,
    /// Neither `--disable-radix-cache` nor a decode server without `--disaggregation-decode-enable-radix-cache`.
    pub radix: bool,
    /// `--kv-events-config` with the publisher `zmq`, in this form.
    pub events: Option<EventForm>,
    /// `replay_endpoint` of that configuration.
    pub replays: bool,
    /// `--enable-cache-report`: usage says the cached tokens.
    pub cache_report: bool,
    /// `--enable-metrics`.
    pub metrics: bool,
    /// `--disaggregation-decode-enable-conditional-agg` of the draft.
    pub local_prefill: bool,
    /// `--enable-session-radix-cache`.
    pub session_radix: bool,
    pub waits: Waits,
}

/// How long things take.
#[derive(Clone, Debug)]
pub struct Waits {
    /// A prefill server waits for its decode server (`SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`: 300 s).
    pub bootstrap: Duration,
    /// A decode server waits for the KV (`SGLANG_DISAGGREGATION_WAITING_TIMEOUT`: 300 s).
    pub waiting: Duration,
    /// A decode server asks for an unknown bootstrap server (15 times, 1 s apart).
    pub resolve: Duration,
    /// A decode server notices that its prefill server is gone (twice 5 s).
    pub heartbeat: Duration,
    /// A server notices that its client is gone (2 to 4 s).
    pub disconnect: Duration,
    /// `/health` sleeps a second before it looks whether the engine answered.
    pub health: Duration,
}

impl Default for Waits {
    fn default() -> Self {
        Self {
            // As long as there: a leg that the router does not end makes its test fail.
            bootstrap: Duration::from_secs(300),
            waiting: Duration::from_secs(300),
            disconnect: Duration::from_secs(30),
            resolve: Duration::from_millis(100),
            heartbeat: Duration::from_millis(100),
            health: Duration::ZERO,
        }
    }
}

impl Spec {
    pub fn new(mode: Mode) -> Self {
        Self {
            mode,
            model: crate::support::engine::MODEL.to_owned(),
            context_len: crate::support::engine::CONTEXT,
            page_size: 16,
            dp_size: 1,
            max_total_num_tokens: 65_536,
            radix: true,
            events: Some(EventForm::Map),
            replays: true,
            cache_report: true,
            metrics: true,
            local_prefill: false,
            session_radix: false,
            waits: Waits::default(),
        }
    }
}

/// A request as it arrived.
#[derive(Clone, Debug)]
pub struct Seen {
    pub path: String,
    pub body: Value,
    pub headers: ::http::HeaderMap,
    /// The data-parallel rank that took it.
    pub rank: u32,
}

impl Seen {
    pub fn room(&self) -> Option<u64> {
        self.body["bootstrap_room"].as_u64()
    }
}

/// One life of a server.
struct Server {
    spec: Spec,
    fabric: Arc<Fabric>,
    bootstrap: Option<Arc<Bootstrap>>,
    bootstrap_port: u16,
    address: SocketAddr,
    caches: Vec<Mutex<Cache>>,
    publishers: Vec<Publisher>,
    event_ports: Option<(u16, Option<u16>)>,
    vocabulary: Vocabulary,
    /// `random_seed`: drawn anew in each life unless it was given.
    seed: u64,
    life: CancellationToken,
    log: Arc<Log>,
    running: Mutex<BTreeMap<String, Arc<Job>>>,
    next_rank: AtomicUsize,
    /// A permit for each token that may be generated, and for each transfer that may happen.
    tokens: Semaphore,
    transfers: Semaphore,
}

/// What outlives a life.
#[derive(Default)]
pub struct Log {
    seen: Mutex<Vec<Seen>>,
    acts: Mutex<VecDeque<Act>>,
    faults: Mutex<Vec<String>>,
    sick: AtomicBool,
    lose_events: AtomicBool,
    lives: AtomicU64,
    rids: AtomicU64,
    /// Times that `/server_info` was asked for, under either name.
    described: AtomicUsize,
    /// Requests that were ended by `/abort_request`, and by a client that hung up.
    aborted: AtomicUsize,
    hung_up: AtomicUsize,
    changed: Notify,
}

/// A server that runs.
pub struct Sglang {
    pub address: SocketAddr,
    pub bootstrap_port: u16,
    server: Arc<Server>,
    tasks: Vec<JoinHandle<()>>,
    /// Keeps the bootstrap server's port.
    _bootstrap: Arc<std::net::TcpListener>,
}

impl Sglang {
    pub async fn start(spec: Spec, fabric: &Arc<Fabric>) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let http = SocketAddr::from(([127, 0, 0, 1], 0));
        Self::live(spec, fabric, http, Arc::new(listener), None, Arc::default()).await
    }

    async fn live(
        spec: Spec,
        fabric: &Arc<Fabric>,
        address: SocketAddr,
        bootstrap: Arc<std::net::TcpListener>,
        event_ports: Option<(u16, Option<u16>)>,
        log: Arc<Log>,
    ) -> Self {
        let listener = TcpListener::bind(address).await.expect("the address is free");
        let address = listener.local_addr().unwrap();
        let bootstrap_port = bootstrap.local_addr().unwrap().port();
        let life = CancellationToken::new();
        let published = match spec.events {
            Some(_) => Some(Publishers::bind(spec.dp_size, event_ports, spec.replays, &life).await),
            None => None,
        };
        let meeting = (spec.mode == Mode::Prefill).then(|| {
            let server = Arc::new(Bootstrap::new(spec.page_size, spec.dp_size, Arc::clone(&log)));
            fabric.register(&format!("127.0.0.1:{bootstrap_port}"), Arc::clone(&server));
            server
        });
        let seed = 0x5EED + log.lives.fetch_add(1, Ordering::SeqCst);
        let server = Arc::new(Server {
            caches: (0..spec.dp_size)
                .map(|_| Mutex::new(Cache::new(spec.page_size)))
                .collect(),
            event_ports: published.as_ref().map(|sockets| (sockets.port, sockets.replay_port)),
            publishers: published
                .as_ref()
                .map(|sockets| sockets.ranks.clone())
                .unwrap_or_default(),
            spec,
            fabric: Arc::clone(fabric),
            bootstrap: meeting,
            bootstrap_port,
            address,
            vocabulary: Vocabulary::tiny(),
            seed,
            life,
            log,
            running: Mutex::default(),
            next_rank: AtomicUsize::new(0),
            tokens: Semaphore::new(Semaphore::MAX_PERMITS / 2),
            transfers: Semaphore::new(Semaphore::MAX_PERMITS / 2),
        });
        let mut tasks = published.map(|sockets| sockets.tasks).unwrap_or_default();
        tasks.push(tokio::spawn(http::serve(listener, Arc::clone(&server))));
        Self {
            address,
            bootstrap_port,
            server,
            tasks,
            _bootstrap: bootstrap,
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn spec(&self) -> &Spec {
        &self.server.spec
    }

    /// Ends it as a crash does: connections break, nobody is told anything.
    pub async fn kill(&mut self) {
        self.server.life.cancel();
        if let Some(bootstrap) = &self.server.bootstrap {
            bootstrap.dead.cancel();
        }
        for task in self.tasks.drain(..) {
            drop(task.await);
        }
        self.server.log.changed.notify_waiters();
    }

    /// Starts it again at the same addresses, as another life.
    pub async fn revive(&mut self) {
        self.kill().await;
        let server = Arc::clone(&self.server);
        *self = Self::live(
            server.spec.clone(),
            &server.fabric,
            self.address,
            Arc::clone(&self._bootstrap),
            server.event_ports,
            Arc::clone(&server.log),
        )
        .await;
    }

    /// What happens to its next request.
    pub fn on_next(&self, act: Act) {
        self.server.log.acts.lock().unwrap().push_back(act);
    }

    /// Lets tokens out only one by one.
    pub fn hold_tokens(&self) {
        self.server.tokens.forget_permits(usize::MAX);
    }

    pub fn release_tokens(&self, count: usize) {
        self.server.tokens.add_permits(count);
    }

    /// A prefill server that has met its peer sends no KV until it is told to.
    pub fn hold_transfers(&self) {
        self.server.transfers.forget_permits(usize::MAX);
    }

    pub fn release_transfers(&self, count: usize) {
        self.server.transfers.add_permits(count);
    }

    /// Whether it answers its probes.
    pub fn set_sick(&self, sick: bool) {
        self.server.log.sick.store(sick, Ordering::SeqCst);
    }

    /// From now on events get numbers but reach nobody.
    pub fn lose_events(&self, lose: bool) {
        self.server.log.lose_events.store(lose, Ordering::SeqCst);
    }

    /// Evicts the pages of a prompt from page `from` on, on whichever ranks have them.
    pub fn evict(&self, prompt: &[u32], from: usize) {
        for rank in 0..self.server.spec.dp_size {
            let changes = self.server.caches[rank as usize].lock().unwrap().evict(prompt, from);
            self.server.announce(rank, &changes);
        }
    }

    /// How many tokens of a prompt each rank has.
    pub fn cached(&self, prompt: &[u32]) -> Vec<usize> {
        let matched = |cache: &Mutex<Cache>| cache.lock().unwrap().matched(prompt).len();
        self.server.caches.iter().map(matched).collect()
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.server.log.seen.lock().unwrap().clone()
    }

    /// What SGLang would have died of, or answered with wrong tokens.
    pub fn faults(&self) -> Vec<String> {
        self.server.log.faults.lock().unwrap().clone()
    }

    /// Requests that it is at work on.
    pub fn open(&self) -> usize {
        self.server.running.lock().unwrap().len()
    }

    /// Rooms of a prefill server in which somebody waits.
    pub fn open_rooms(&self) -> usize {
        self.server
            .bootstrap
            .as_ref()
            .map_or(0, |bootstrap| bootstrap.open_rooms())
    }

    /// Decode servers that wait at a prefill server.
    pub fn receivers(&self) -> usize {
        self.server
            .bootstrap
            .as_ref()
            .map_or(0, |bootstrap| bootstrap.receivers())
    }

    /// How often it was asked about itself.
    pub fn times_described(&self) -> usize {
        self.server.log.described.load(Ordering::SeqCst)
    }

    /// Requests that were ended by `/abort_request`.
    pub fn aborted(&self) -> usize {
        self.server.log.aborted.load(Ordering::SeqCst)
    }

    /// Requests whose client hung up before their end.
    pub fn hung_up(&self) -> usize {
        self.server.log.hung_up.load(Ordering::SeqCst)
    }

    /// Waits until the server is in a state.
    pub async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let seen = || {
            format!(
                "seen {} requests, {} open, {} rooms, faults {:?}",
                self.seen().len(),
                self.open(),
                self.open_rooms(),
                self.faults()
            )
        };
        until(&self.server.log.changed, what, || holds(self), seen).await;
    }
}

impl Drop for Sglang {
    fn drop(&mut self) {
        self.server.life.cancel();
    }
}

impl Server {
    fn fault(&self, what: impl Into<String>) {
        self.log.faults.lock().unwrap().push(what.into());
        self.log.changed.notify_waiters();
    }

    /// An id for a request that brings none: 32 hexadecimal digits there.
    fn next_rid(&self) -> u64 {
        self.log.rids.fetch_add(1, Ordering::SeqCst)
    }

    fn announce(&self, rank: u32, changes: &[Change]) {
        let (Some(publisher), Some(form)) = (self.publishers.get(rank as usize), self.spec.events) else {
            return;
        };
        if changes.is_empty() || !self.spec.radix {
            return;
        }
        let payload = cache::encode(changes, rank, self.spec.page_size, form);
        match self.log.lose_events.load(Ordering::SeqCst) {
            true => publisher.lose(payload),
            false => publisher.publish(payload),
        }
    }
}
