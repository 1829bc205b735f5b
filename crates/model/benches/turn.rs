//! From request bytes to routing decision, for a turn with 700 new tokens after 2K, 16K and 128K tokens of history, next to
//! the same without memory: `cargo bench -p homing-model --bench turn`.
//!
//! The steps are the intake's: the body and its parameters are read, the conversation is rendered, its text tokenised and
//! hashed, and the core decides. Each turn is a new one after the same history. SmolLM2's vocabulary where it is in the
//! cache, else bytes. To be met: 128K tokens cost at most 1/20 of a cold computation, and 2 ms more than 16K.

use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use homing_kv::{Prompt, Tier};
use homing_model::{
    ChatInput, ChatValue, EncodedPrompt, ModelSpec, Opening, PROMPT_MEMORY_BYTES, PromptMemory, Vocabulary, cached,
    default_cache_dir, open_vocabulary,
};
use homing_router::event::Leg;
use homing_router::event::{Event, KvBatch, KvUpdate, LegId, LegUsage, Role, SessionHint, Turn, WorkerInfo};
use homing_router::{Router, RouterConfig};
use homing_units::{BootEpoch, Instant, RequestId, WorkerId};
use homing_wire::openai::{Body, ChatRequest};
use std::fmt::Write as _;
use std::hint::black_box;
use std::time::Duration;

const BLOCK_SIZE: u32 = 16;
const WORKERS: u32 = 4;
const NEW_TOKENS: usize = 700;
const HISTORIES: [(&str, usize); 3] = [("2K", 2 << 10), ("16K", 16 << 10), ("128K", 128 << 10)];

/// How a prompt's text becomes tokens.
#[derive(Clone, Copy)]
enum Way {
    Remembered,
    Cold,
}

/// A conversation at its last turn but one, and a router that knows its home.
struct Bench {
    vocabulary: Vocabulary,
    memory: PromptMemory,
    router: Router,
    /// The messages of the history as JSON, without the closing bracket.
    history: String,
    /// A question of half the new tokens, and the answer before it of the other half.
    message: String,
    now: Instant,
    turns: u64,
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

fn json(text: &str) -> String {
    serde_json::to_string(text).expect("a string serialises")
}

fn message(role: &str, text: &str) -> String {
    format!(r#"{{"role":"{role}","content":{}}}"#, json(text))
}

impl Bench {
    fn new(vocabulary: Vocabulary, tokens: usize) -> Self {
        let half = text_of(&vocabulary, NEW_TOKENS / 2, 1);
        let mut history = format!("[{}", message("system", "You are a coding agent."));
        let mut bench = Self {
            memory: PromptMemory::new(vocabulary.tokenizer.clone(), BLOCK_SIZE, PROMPT_MEMORY_BYTES),
            vocabulary,
            router: router(),
            history: String::new(),
            message: half,
            now: Instant::ZERO,
            turns: 0,
        };
        for turn in 1..=tokens / NEW_TOKENS {
            for role in ["user", "assistant"] {
                let text = text_of(&bench.vocabulary, NEW_TOKENS / 2, turn);
                let _ = write!(history, ",{}", message(role, &text));
            }
        }
        bench.history = history;
        let body = bench.body();
        let prompt = bench.prompt(&body, Way::Remembered).prompt;
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
        bench.router.handle(bench.now, Event::Kv(batch));
        while bench.router.poll_action().is_some() {}
        bench
    }

    /// A request of a turn that nobody has seen.
    fn body(&mut self) -> Bytes {
        self.turns += 1;
        let (answer, question) = (&self.message, format!("{}{}", self.turns, self.message));
        let (answer, question) = (message("assistant", answer), message("user", &question));
        let messages = format!("{},{answer},{question}]", self.history);
        let body = format!(r#"{{"model":"m","messages":{messages},"stream":true,"max_tokens":100,"temperature":0}}"#);
        body.into()
    }

    fn text(&self, body: &Body) -> String {
        let messages: ChatValue = body.read("messages", "a list").ok().flatten().unwrap_or_default();
        let input = ChatInput {
            messages: &messages,
            tools: None,
            add_generation_prompt: true,
            unix_seconds: 0,
        };
        self.vocabulary.render(&input).expect("the conversation is in form")
    }

    fn prompt(&self, bytes: &Bytes, way: Way) -> EncodedPrompt {
        let body = Body::parse(bytes).expect("it is an object");
        black_box(ChatRequest::from_body(&body).expect("it is a request"));
        self.encode(&self.text(&body), way)
    }

    fn encode(&self, text: &str, way: Way) -> EncodedPrompt {
        match way {
            Way::Remembered => self.memory.encode(text, Opening::Text),
            Way::Cold => self.memory.encode_cold(text, Opening::Text),
        }
    }

    fn decide(&mut self, prompt: &Prompt) {
        let turn = Turn {
            request: RequestId(self.turns),
            session: SessionHint::Explicit(7),
            prompt: prompt.clone(),
            max_output_tokens: 100,
            compared: None,
        };
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
        let (prefill, decode) = (leg(Leg::Prefill), leg(Leg::Decode));
        let (now, usage) = (self.now, LegUsage::default());
        self.router.handle(
            now,
            Event::PrefillDone {
                leg: prefill,
                cached_tokens: None,
            },
        );
        self.router.handle(now, Event::Finished { leg: decode, usage });
        while self.router.poll_action().is_some() {}
        assert!(self.router.idle(), "the turn is over");
        self.now += Duration::from_millis(100);
    }

    /// How long so many turns take, without what is not theirs.
    fn turns(&mut self, count: u64, way: Way) -> Duration {
        let mut taken = Duration::ZERO;
        for _ in 0..count {
            let body = self.body();
            let start = std::time::Instant::now();
            let prompt = self.prompt(&body, way).prompt;
            self.decide(&prompt);
            taken += start.elapsed();
            self.finish();
        }
        taken
    }

    /// How long one step of so many turns takes.
    fn step(&mut self, count: u64, step: impl Fn(&Self, &Bytes) -> Duration) -> Duration {
        (0..count)
            .map(|_| {
                let body = self.body();
                step(self, &body)
            })
            .sum()
    }
}

fn timed<T>(work: impl FnOnce() -> T) -> Duration {
    let start = std::time::Instant::now();
    black_box(work());
    start.elapsed()
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
        for (way, remembered) in [(Way::Remembered, "remembered"), (Way::Cold, "cold")] {
            group.bench_function(BenchmarkId::new(remembered, name), |bencher| {
                bencher.iter_custom(|count| bench.turns(count, way));
            });
        }
        group.bench_function(BenchmarkId::new("of it: body", name), |bencher| {
            bencher.iter_custom(|count| bench.step(count, |_, bytes| timed(|| Body::parse(bytes))));
        });
        group.bench_function(BenchmarkId::new("of it: request", name), |bencher| {
            bencher.iter_custom(|count| {
                bench.step(count, |_, bytes| {
                    let body = Body::parse(bytes).expect("it is an object");
                    timed(|| ChatRequest::from_body(&body))
                })
            });
        });
        group.bench_function(BenchmarkId::new("of it: text", name), |bencher| {
            bencher.iter_custom(|count| {
                bench.step(count, |bench, bytes| {
                    let body = Body::parse(bytes).expect("it is an object");
                    timed(|| bench.text(&body))
                })
            });
        });
        group.bench_function(BenchmarkId::new("of it: tokens and hashes", name), |bencher| {
            bencher.iter_custom(|count| {
                bench.step(count, |bench, bytes| {
                    let text = bench.text(&Body::parse(bytes).expect("it is an object"));
                    timed(|| bench.encode(&text, Way::Remembered))
                })
            });
        });
    }
    group.finish();
}

criterion_group! { name = benches; config = Criterion::default().warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(3)); targets = turns }
criterion_main!(benches);
