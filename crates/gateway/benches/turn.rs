//! From request bytes to routing decision, for a turn with 700 new tokens after 2K, 16K and 128K tokens of history, next to
//! the same by a router that remembers nothing of it: `cargo bench -p homing-gateway --bench turn`.
//!
//! What is measured is the intake itself (`homing_gateway::bench`): the body is read and checked, the conversation rendered,
//! outlined, tokenised and hashed, and compared with earlier prompts; then the core decides. A turn goes on from the one before
//! it, of which its session, the caches and the index know: that one, the same history each time, is told in between and not
//! measured. SmolLM2's vocabulary where it is in the cache, else bytes. To be met: 128K tokens cost at most 1/20 of a cold
//! computation, and 2 ms more than 16K. On a machine with other work criterion's estimates are of both; the fastest tenth of the
//! turns is said, too.

use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use homing_gateway::bench::Intake;
use homing_kv::{Prompt, Tier};
use homing_model::{ModelSpec, Vocabulary, cached, default_cache_dir, open_vocabulary};
use homing_router::event::{Abilities, Event, KvBatch, KvUpdate, Leg, LegId, LegUsage, Role, Turn, WorkerInfo};
use homing_router::{Router, RouterConfig};
use homing_units::{BootEpoch, Instant, RequestId, WorkerId};
use http::{HeaderMap, HeaderValue};
use std::fmt::Write as _;
use std::hint::black_box;
use std::time::Duration;

/// The allocator of the binary.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

const BLOCK_SIZE: u32 = 16;
const WORKERS: u32 = 4;
const NEW_TOKENS: usize = 700;
const HISTORIES: [(&str, usize); 3] = [("2K", 2 << 10), ("16K", 16 << 10), ("128K", 128 << 10)];

/// Whether the intake has seen the session's last turn.
#[derive(Clone, Copy)]
enum Way {
    Remembered,
    Cold,
}

/// A conversation at its last turn but one, and a router that knows its home.
struct Bench {
    vocabulary: Vocabulary,
    intake: Intake,
    headers: HeaderMap,
    router: Router,
    /// The messages of the history as JSON, without the closing bracket.
    history: String,
    /// Half of the new tokens: an answer, and the question after it.
    half: String,
    now: Instant,
    turns: u64,
    /// What each remembered turn took.
    remembered: Vec<Duration>,
}

/// Prose and code of so many tokens.
fn text_of(vocabulary: &Vocabulary, tokens: usize, seed: usize) -> String {
    let mut text = String::new();
    let mut line = 0;
    while vocabulary.tokenizer.encode(&text).len() < tokens {
        for _ in 0..8 {
            line += 1;
            let number = (seed * 31 + line * 7919) % 10_007;
            let _ = writeln!(
                text,
                "    let value_{number} = \"the router sends turn {line} to worker {}\"; // it's kept {number} blocks",
                number % 7
            );
        }
    }
    text
}

fn message(role: &str, text: &str) -> String {
    let text = serde_json::to_string(text).expect("a string serialises");
    format!(r#"{{"role":"{role}","content":{text}}}"#)
}

fn body(messages: &str) -> Bytes {
    format!(r#"{{"model":"m","messages":{messages}],"stream":true,"max_tokens":100,"temperature":0}}"#).into()
}

impl Bench {
    fn new(vocabulary: Vocabulary, tokens: usize) -> Self {
        let mut history = format!("[{}", message("system", "You are a coding agent."));
        for turn in 0..=tokens / NEW_TOKENS {
            for role in ["assistant", "user"].into_iter().skip(usize::from(turn == 0)) {
                let text = text_of(&vocabulary, NEW_TOKENS / 2, turn);
                let _ = write!(history, ",{}", message(role, &text));
            }
        }
        let mut headers = HeaderMap::new();
        headers.insert("x-homing-session", HeaderValue::from_static("bench"));
        let mut bench = Self {
            intake: Intake::new(vocabulary.clone(), BLOCK_SIZE),
            half: text_of(&vocabulary, NEW_TOKENS / 2, 1),
            vocabulary,
            headers,
            router: router(),
            history,
            now: Instant::ZERO,
            turns: 0,
            remembered: Vec::new(),
        };
        let home = bench.last_turn();
        bench.store(&home.prompt);
        bench
    }

    /// The worker that holds the session tells so.
    fn store(&mut self, prompt: &Prompt) {
        let update = KvUpdate::Stored {
            parent: None,
            hashes: prompt.blocks.to_vec(),
            tier: Tier::Gpu,
        };
        let batch = KvBatch {
            worker: WorkerId(1),
            epoch: BootEpoch(1),
            sequence: 0,
            updates: vec![update],
        };
        self.router.handle(self.now, Event::Kv(batch));
        while self.router.poll_action().is_some() {}
    }

    fn read(&self, body: &Bytes) -> Turn {
        let turn = self.intake.turn(RequestId(self.turns), &self.headers, body);
        turn.expect("it is a request")
    }

    /// The turn before those that are measured: it begins and ends.
    fn last_turn(&mut self) -> Turn {
        self.turns += 1;
        let turn = self.read(&body(&self.history));
        self.decide(turn.clone());
        self.finish();
        turn
    }

    /// A request of a turn that nobody has seen: an answer and a question more.
    fn next_body(&mut self) -> Bytes {
        self.turns += 1;
        let said = format!("{}{}", self.turns, self.half);
        let (answer, question) = (message("assistant", &said), message("user", &said));
        body(&format!("{},{answer},{question}", self.history))
    }

    fn decide(&mut self, turn: Turn) {
        self.router.handle(self.now, Event::Turn(turn));
        while let Some(action) = self.router.poll_action() {
            black_box(action);
        }
    }

    fn finish(&mut self) {
        let leg = |leg| LegId {
            request: RequestId(self.turns),
            attempt: 0,
            leg,
        };
        let done = Event::PrefillDone {
            leg: leg(Leg::Prefill),
            cached_tokens: None,
        };
        let finished = Event::Finished {
            leg: leg(Leg::Decode),
            usage: LegUsage::default(),
        };
        self.router.handle(self.now, done);
        self.router.handle(self.now, finished);
        while self.router.poll_action().is_some() {}
        assert!(self.router.idle(), "the turn is over");
        self.now += Duration::from_millis(100);
    }

    /// How long so many turns take, in the intake and in the core.
    fn turns(&mut self, count: u64, way: Way) -> (Duration, Duration) {
        let (mut read_all, mut decided_all) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..count {
            self.last_turn();
            if matches!(way, Way::Cold) {
                self.intake = Intake::new(self.vocabulary.clone(), BLOCK_SIZE);
            }
            let body = self.next_body();
            let start = std::time::Instant::now();
            let turn = self.read(&body);
            let read = start.elapsed();
            self.decide(turn);
            let whole = start.elapsed();
            self.finish();
            if matches!(way, Way::Remembered) {
                self.remembered.push(whole);
            }
            read_all += read;
            decided_all += whole - read;
        }
        (read_all, decided_all)
    }

    /// What the fastest tenth of the remembered turns took at most: those that nobody interrupted.
    fn uninterrupted(&mut self) -> Duration {
        self.remembered.sort_unstable();
        self.remembered
            .get(self.remembered.len() / 10)
            .copied()
            .unwrap_or_default()
    }
}

fn router() -> Router {
    let mut router = Router::new(RouterConfig {
        block_size: BLOCK_SIZE,
        ..RouterConfig::default()
    });
    for id in 0..WORKERS {
        let info = WorkerInfo {
            id: WorkerId(id),
            name: format!("w{id}"),
            role: if id == 0 { Role::Prefill } else { Role::Decode },
            epoch: BootEpoch(1),
            kv_tokens: 700_000,
            max_context_tokens: 262_144,
            transfers: true,
            kv_events: true,
            abilities: Abilities::default(),
        };
        router.handle(Instant::ZERO, Event::WorkerJoined(info));
    }
    while router.poll_action().is_some() {}
    router
}

fn vocabulary() -> Vocabulary {
    let (spec, cache) = (ModelSpec::SmolLm2, default_cache_dir());
    let known = cached(&spec, &cache).and_then(|_| open_vocabulary(&spec, &cache).ok());
    known.map_or_else(Vocabulary::tiny, |(vocabulary, _)| vocabulary)
}

fn turns(criterion: &mut Criterion) {
    let vocabulary = vocabulary();
    let mut group = criterion.benchmark_group(format!("request to decision, {}", vocabulary.name));
    group.sample_size(10);
    for (name, tokens) in HISTORIES {
        let mut bench = Bench::new(vocabulary.clone(), tokens);
        let mut measure = |what: &str, way: Way, part: fn((Duration, Duration)) -> Duration| {
            group.bench_function(BenchmarkId::new(what, name), |bencher| {
                bencher.iter_custom(|count| part(bench.turns(count, way)));
            });
        };
        measure("remembered", Way::Remembered, |(read, decided)| read + decided);
        measure("of it: decision", Way::Remembered, |(_, decided)| decided);
        measure("cold", Way::Cold, |(read, decided)| read + decided);
        println!(
            "remembered/{name}: the fastest tenth takes at most {:?}",
            bench.uninterrupted()
        );
    }
    group.finish();
}

criterion_group! { name = benches; config = Criterion::default().warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(3)); targets = turns }
criterion_main!(benches);
