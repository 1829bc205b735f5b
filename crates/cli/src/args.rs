//! The command line: names that scripts and users rely on. What each command does lies in `commands`.

use crate::failure::Usage;
use crate::trace_args::TraceArgs;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;

/// A router for agentic LLM serving: every turn finds home, to the worker that holds its KV cache.
#[derive(Parser, Debug)]
#[command(name = "homing", version, max_term_width = 110)]
pub struct Cli {
    /// More log lines on stderr: -v for what is done, -vv for everything.
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub verbose: u8,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Start a whole cluster on this machine: workers and the router.
    Up(Up),
    /// Start the router before existing workers.
    Serve(Serve),
    /// Start one embedded engine.
    Worker(Worker),
    /// Run a trace on a cluster on paper.
    Sim(Sim),
    /// Run a trace against a live endpoint.
    Replay(Replay),
    /// Look at, translate and make traces.
    Trace(TraceArgs),
    /// Set runs side by side, with intervals, and say which differences stand.
    Compare(crate::compare_args::Compare),
    /// Say what went wrong in a run, in five fields, with evidence.
    Doctor(crate::doctor_args::Doctor),
    /// Show a failure mode with its fix off, and its absence with the fix on.
    Drill(crate::doctor_args::Drill),
}

/// `homing up`
#[derive(Args, Debug)]
pub struct Up {
    /// How many workers: `1p2d` (prefill and decode workers) or `3x` (workers that do both).
    #[arg(long, default_value = "1p2d")]
    pub workers: crate::shape::Shape,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Port of the router, on this machine only.
    #[arg(long, default_value_t = 8080)]
    pub port: u16,
    #[command(flatten)]
    pub router: RouterArgs,
}

/// `homing serve`
#[derive(Args, Debug)]
pub struct Serve {
    /// A configuration file; the other options win over it.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// A worker: `URL[,role=prefill|decode|both][,kind=homing|vllm|sglang][,name=NAME][,kv_events=tcp://..][,kv_replay=tcp://..][,data_parallel_rank=N][,bootstrap=HOST:PORT]`.
    #[arg(long = "worker", value_name = "WORKER")]
    pub workers: Vec<String>,
    /// Where to listen.
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<SocketAddr>,
    /// Model whose tokenizer and chat template the router uses; without it, it asks a worker's `/tokenize`.
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// How turns are placed.
    #[arg(long, value_name = "POLICY")]
    pub policy: Option<String>,
    /// Record the core's events to FILE, or `events.bin` in it if it is a folder.
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
}

/// What `up` and `serve` share of the router.
#[derive(Args, Debug, Clone)]
pub struct RouterArgs {
    /// How turns are placed: `homing`, `dp-cache-aware` or another policy, with parameters as `NAME:KEY=VALUE`.
    #[arg(long, default_value = "homing")]
    pub policy: String,
    /// Record the core's events to FILE, or `events.bin` in it if it is a folder.
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
}

/// What `up` and `worker` share of an engine.
#[derive(Args, Debug, Clone)]
pub struct EngineArgs {
    /// The model: `auto` (smollm2, else tiny), `tiny`, `smollm2`, a folder, or a .gguf file.
    #[arg(long, default_value = "auto", conflicts_with = "step_model")]
    pub model: String,
    /// No forward pass: steps take the time that they take on this hardware. A profile, or a TOML file.
    #[arg(long, value_name = "PROFILE")]
    pub step_model: Option<String>,
    /// Size of a worker's KV pool in tokens. Default: 32768 for a model, the
    /// profile's own for a step model.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub kv_tokens: Option<u32>,
    /// Tokens in a KV block.
    #[arg(long, default_value_t = 16, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub block_size: u32,
    /// What a worker evicts first of what no request uses.
    #[arg(long, default_value = "lru")]
    pub eviction: EvictionArg,
}

/// What a worker evicts first.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionArg {
    /// The least recently used.
    Lru,
    /// What is worth least to keep, by the returns of sessions that it has seen.
    Expected,
}

/// `homing worker`
#[derive(Args, Debug)]
pub struct Worker {
    /// What it may do.
    #[arg(long, default_value = "both")]
    pub role: RoleArg,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Where to listen for HTTP; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:8000")]
    pub listen: SocketAddr,
    /// Its name in logs and in the topic of its KV events.
    #[arg(long, default_value = "w0")]
    pub name: String,
    /// Batches of KV events to keep for a replay.
    #[arg(long, default_value_t = 10_000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub kv_replay_batches: u32,
    /// Bytes of these batches at most; the newest is always kept.
    #[arg(long, default_value_t = 256 << 20, value_name = "N")]
    pub kv_replay_bytes: u32,
    /// Stop when standard input ends: set by `up`, so that no worker outlives it.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
}

/// What a worker may do.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoleArg {
    /// Prefill only.
    Prefill,
    /// Decode and the prefill of tails.
    Decode,
    /// Anything.
    Both,
}

impl RoleArg {
    /// Its name on the command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        }
    }
}

/// What `sim` and `replay` share: the workload and where the results go.
#[derive(Args, Debug, Clone)]
pub struct WorkloadArgs {
    /// A trace file (.jsonl, also .zst or .gz) or a generator such as `gen:agent:sessions=60`.
    #[arg(long, value_name = "TRACE")]
    pub trace: Option<String>,
    /// Divide the recorded gaps by this.
    #[arg(long, default_value_t = 1.0, value_name = "X", value_parser = positive)]
    pub time_scale: f64,
    /// Closed loop: at most N live sessions. Default 4 a worker, where the trace has no start times.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "rate")]
    pub concurrency: Option<u32>,
    /// Open loop: sessions start at this rate, in sessions per second.
    #[arg(long, value_name = "RATE", value_parser = positive)]
    pub rate: Option<f64>,
    /// At most N requests in flight.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_inflight: Option<u32>,
    /// Use the first N sessions.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub sessions: Option<u32>,
    /// Use a session's first N turns of its own; its sub-agents come along.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_turns: Option<u32>,
    /// End a session before its first prompt above N tokens.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_context: Option<u32>,
    /// Start the sessions in the trace's order, whatever the seed.
    #[arg(long)]
    pub keep_order: bool,
    /// Runs, over consecutive seeds.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,
    /// The first run's seed.
    #[arg(long, default_value_t = 1, value_name = "SEED")]
    pub seed: u64,
    /// Write the run format and the structural logs into this folder.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Print exactly one JSON document on stdout.
    #[arg(long)]
    pub json: bool,
}

impl WorkloadArgs {
    /// The trace's name.
    pub fn trace(&self) -> anyhow::Result<&str> {
        self.trace
            .as_deref()
            .ok_or_else(|| Usage::error("expected `--trace`: a file or a generator such as `gen:agent`"))
    }

    /// The seeds of the runs.
    pub fn seeds(&self) -> impl Iterator<Item = u64> + use<> {
        let first = self.seed;
        (0..u64::from(self.runs)).map(move |run| first.wrapping_add(run))
    }
}

/// What means nothing where a recording says it all.
const NOT_WITH_EVENTS: [&str; 17] = [
    "trace",
    "cluster",
    "policy",
    "record",
    "out",
    "runs",
    "seed",
    "time_scale",
    "concurrency",
    "rate",
    "max_inflight",
    "sessions",
    "max_turns",
    "max_context",
    "keep_order",
    "chaos",
    "faults",
];

/// `homing sim`
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct Sim {
    /// Feed a recording through the core instead, and compare its actions.
    #[arg(long, value_name = "FILE", conflicts_with_all = NOT_WITH_EVENTS)]
    pub events: Option<PathBuf>,
    #[command(flatten)]
    pub workload: WorkloadArgs,
    /// A preset such as `h200x8-2p6d`, with parameters as `h200x8-2p6d:kv=136000`, or a TOML file.
    #[arg(long, default_value = "h200x8-2p6d", value_name = "CLUSTER")]
    pub cluster: String,
    /// How turns are placed.
    #[arg(long, default_value = "homing", value_name = "POLICY")]
    pub policy: String,
    /// Write the core's events to `events.bin` in the folder given by --out.
    #[arg(long, requires = "out")]
    pub record: bool,
    /// Break things: faults drawn from the seed, with all checks on. Without --trace the seed draws the whole experiment, and
    /// only --runs, --seed, --faults and --json count.
    #[arg(long)]
    pub chaos: bool,
    /// Break just these things: `1200ms crash 0; 2s restart 0`, as a failure prints them.
    #[arg(long, value_name = "SCHEDULE")]
    pub faults: Option<String>,
}

/// `homing replay`
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct Replay {
    #[command(flatten)]
    pub workload: WorkloadArgs,
    /// The endpoint, such as `http://127.0.0.1:8080`.
    #[arg(long, value_name = "URL")]
    pub url: String,
    /// Divide all token counts by this.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub shrink: u32,
    /// What to send: token ids to `/v1/completions`, or synthetic text to `/v1/chat/completions`.
    #[arg(long = "as", default_value = "ids", value_name = "FORM")]
    pub form: Form,
    /// Token ids that are sent are below this.
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub vocabulary: u32,
    /// Model name to send. Default: the first that the endpoint lists.
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// A request that takes longer than this many seconds counts as failed.
    #[arg(long, default_value_t = 600, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub request_timeout: u64,
}

/// What a replay sends.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Token ids to `/v1/completions`.
    Ids,
    /// Synthetic text to `/v1/chat/completions`.
    Chat,
}

/// A rate or a scale that a run can end with.
fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if (0.000_001..=1_000_000.0).contains(&number) => Ok(number),
        _ => Err("expected a number from 0.000001 to 1000000".to_owned()),
    }
}
