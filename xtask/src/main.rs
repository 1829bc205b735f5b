//! The project's own chores. `cargo xtask ci` is what CI runs and what a contributor runs before a commit.

mod chaos;
mod ci;
mod determinism;
mod e2e;
mod live;
mod live_chaos;
mod mutations;
mod processes;
mod reproduce;
mod results;
mod shell;
mod soak;
mod tidy;
mod traces;

use clap::{Parser, Subcommand};
use std::path::PathBuf;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The project's own chores")]
struct Cli {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Everything that must hold: formatting, clippy, docs, dependencies, tidy, tests, determinism.
    Ci,
    /// Rules that clippy does not know: headers, file length, forbidden words.
    Tidy,
    /// The same seed twice gives the same bytes.
    Determinism,
    /// Experiments in which everything goes wrong that their seeds say.
    Chaos(chaos::Args),
    /// A router and workers as processes, killed, stopped, cut off and abused: minutes.
    LiveChaos(live_chaos::Args),
    /// The same trace live and on paper: the same order of policies, the same time to first token? Minutes a policy.
    Live(live::Args),
    /// Whether the checks bite: what each mutation breaks must be noticed.
    Mutations(mutations::Args),
    /// The checks on recorded traces.
    Traces {
        /// The folder that holds them.
        folder: PathBuf,
    },
    /// The end-to-end test against a real vLLM on this machine's CPUs.
    E2e(e2e::Args),
    /// Minutes of agents' traffic before three step-model workers: memory must stay flat, sessions must expire.
    Soak(soak::Args),
    /// Writes `docs/reproduction.md` from fresh simulations: minutes on two cores.
    Reproduce(reproduce::Args),
    /// Writes `docs/results.md`, the planner against all other policies, from fresh simulations.
    Results(results::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().chore {
        Chore::Ci => ci::run(),
        Chore::Tidy => tidy::run(),
        Chore::Determinism => determinism::run(),
        Chore::Chaos(args) => chaos::run(&args),
        Chore::LiveChaos(args) => live_chaos::run(&args),
        Chore::Live(args) => live::run(&args),
        Chore::Mutations(args) => mutations::run(&args),
        Chore::Traces { folder } => traces::run(&folder),
        Chore::E2e(args) => e2e::run(&args),
        Chore::Soak(args) => soak::run(&args),
        Chore::Reproduce(args) => reproduce::run(&args),
        Chore::Results(args) => results::run(&args),
    }
}
