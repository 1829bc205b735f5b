//! The command line of `homing trace`.

use clap::{Args, Subcommand, ValueEnum};
use homing_workload::OutputFormat;
use std::path::PathBuf;

/// `homing trace`
#[derive(Args, Debug)]
pub struct TraceArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: TraceCommand,
}

/// What to do with a trace.
#[derive(Subcommand, Debug)]
pub enum TraceCommand {
    /// Show a trace in figures.
    Stats(Stats),
    /// Write a trace in another format.
    Convert(Convert),
    /// Write a generator's trace.
    Generate(Generate),
}

/// How a trace is read.
#[derive(Args, Debug, Clone)]
pub struct Reading {
    /// Varies a generator's content; never a recorded trace.
    #[arg(long, default_value_t = 1, value_name = "SEED")]
    pub seed: u64,
    /// Tokens in a block of a Mooncake trace whose rows do not say it.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub block_size: Option<u32>,
    /// Do not share tools and system prompt between coding-agent sessions that have equal lengths of them.
    #[arg(long)]
    pub separate_boilerplate: bool,
}

/// `homing trace stats`
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct Stats {
    /// A trace file or a generator.
    #[arg(value_name = "TRACE")]
    pub trace: String,
    #[command(flatten)]
    pub reading: Reading,
    /// Print exactly one JSON document on stdout.
    #[arg(long)]
    pub json: bool,
}

/// `homing trace convert`
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct Convert {
    /// A trace file or a generator.
    #[arg(value_name = "TRACE")]
    pub trace: String,
    #[command(flatten)]
    pub target: Target,
    #[command(flatten)]
    pub reading: Reading,
}

/// `homing trace generate`
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct Generate {
    /// A generator such as `gen:agent:sessions=60`.
    #[arg(value_name = "GENERATOR")]
    pub generator: String,
    #[command(flatten)]
    pub target: Target,
    /// Varies the content, where the generator's name has no `seed=`.
    #[arg(long, default_value_t = 1, value_name = "SEED")]
    pub seed: u64,
}

/// Where a trace is written, and how.
#[derive(Args, Debug, Clone)]
pub struct Target {
    /// Where to write; packed where it ends in .zst or .gz.
    #[arg(value_name = "OUT")]
    pub out: PathBuf,
    /// The format to write.
    #[arg(long, default_value = "agentic-mooncake", value_name = "FORMAT")]
    pub to: Format,
    /// Write what the format can carry where it cannot carry all, and say what is lost.
    #[arg(long)]
    pub lossy: bool,
}

/// A format that can be written.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Requests that name what they wait for.
    AgenticMooncake,
    /// Requests with times of arrival.
    Mooncake,
}

impl From<Format> for OutputFormat {
    fn from(format: Format) -> Self {
        match format {
            Format::AgenticMooncake => Self::AgenticMooncake,
            Format::Mooncake => Self::Mooncake,
        }
    }
}
