//! Chaos over real sockets: a router and three embedded workers as processes, and what one would not do to them: workers
//! killed and stopped, clients that hang up, read slowly or never speak, connections cut, a full disk.
//!
//! The workers compute nothing: steps take the time of a step model, and a token is a hash of all before it, so that an
//! answer is known to be right to the letter wherever it went on. Figures depend on the machine and its load; what must hold
//! does not. Everything here is threads and plain sockets: the client is as simple as can be, and knows no code of ours.

mod abuse;
mod cluster;
mod hang_ups;
mod kills;
mod load;
mod report;
mod stops;

use crate::processes;
use anyhow::Result;
use report::Report;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long and how hard.
#[derive(clap::Args)]
pub struct Args {
    /// How long workers are killed, in seconds.
    #[arg(long, default_value_t = 180, value_name = "SECONDS")]
    seconds: u64,
    /// Between two kills, in seconds.
    #[arg(long, default_value_t = 20, value_name = "SECONDS")]
    every: u64,
    /// Sessions at one time.
    #[arg(long, default_value_t = 200, value_name = "N")]
    sessions: u32,
    /// Clients that hang up.
    #[arg(long, default_value_t = 1_000, value_name = "N")]
    hang_ups: u32,
    /// Connections that never say anything.
    #[arg(long, default_value_t = 3_000, value_name = "N")]
    idle: u32,
    /// Only these acts: `kills`, `stops`, `hang-ups`, `abuse`, `full-disk`.
    #[arg(long, value_name = "ACT")]
    only: Vec<String>,
    /// A binary that was built already, instead of a fresh release build.
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
}

/// One act: a cluster of its own, and what is done to it.
type Act = fn(&Path, &Args, &mut Report) -> Result<()>;

/// All acts, in order.
const ACTS: [(&str, Act); 5] = [
    ("kills", kills::run),
    ("stops", stops::run),
    ("hang-ups", hang_ups::run),
    ("abuse", abuse::run),
    ("full-disk", abuse::full_disk),
];

/// Plays all acts; an error if something did not hold.
pub fn run(args: &Args) -> Result<()> {
    let binary = processes::homing(args.binary.as_deref())?;
    let mut report = Report::default();
    for (name, act) in ACTS {
        if args.only.is_empty() || args.only.iter().any(|only| only == name) {
            report.begin(name);
            act(&binary, args, &mut report)?;
        }
    }
    report.verdict()
}

impl Args {
    fn killing(&self) -> Duration {
        Duration::from_secs(self.seconds)
    }

    fn every(&self) -> Duration {
        Duration::from_secs(self.every.max(1))
    }
}
