//! Chaos: experiments drawn from seeds, with everything going wrong that a seed says and all checks on.
//!
//! The experiments are `homing_sim::chaos`; this builds them in release, runs them on all cores and says which commit they
//! were run on. `docs/chaos.md` has what came of a large number of them.

use crate::shell;
use anyhow::{Context, Result};

/// Seeds of a CI run.
pub const SEEDS_IN_CI: u64 = 200;

/// Which experiments.
#[derive(clap::Args)]
pub struct Args {
    /// How many seeds.
    #[arg(long, default_value_t = SEEDS_IN_CI, value_name = "N")]
    seeds: u64,
    /// The first one.
    #[arg(long, default_value_t = 1, value_name = "SEED")]
    first: u64,
}

/// Runs the experiments; an error if something did not hold.
pub fn run(args: &Args) -> Result<()> {
    run_seeds(args.first, args.seeds)
}

/// The same for `seeds` seeds from `first` on.
pub fn run_seeds(first: u64, seeds: u64) -> Result<()> {
    let commit = shell::output("git", &["rev-parse", "HEAD"]).unwrap_or_default();
    println!("\n==> chaos on commit {}", String::from_utf8_lossy(&commit).trim());
    let build = ["build", "--release", "--package", "homing-sim", "--bin", "homing-chaos"];
    shell::run("cargo", &build)?;
    let program = shell::release_path("homing-chaos");
    shell::run(&program, &[&seeds.to_string(), &first.to_string()])
        .context("a violation: its lines above say what replays it")
}
