//! The arguments of `homing compare`.

use clap::Args;
use std::path::PathBuf;

/// `homing compare`
#[derive(Args, Debug)]
pub struct Compare {
    /// Runs to compare: folders that `--out` wrote, or their `summary.json`. One is enough for --html.
    #[arg(value_name = "DIR|FILE", required = true)]
    pub runs: Vec<PathBuf>,
    /// Write one self-contained page into FILE; an older one is replaced.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Print exactly one JSON document on stdout.
    #[arg(long)]
    pub json: bool,
}
