//! The binary `homing`: reads the command line, hands over to a command, and turns its error into an exit code
//! (0 done, 1 it failed, 2 wrong usage or input). Data goes to stdout, logs and progress to stderr.

mod args;
mod commands;
mod compare_args;
mod doctor_args;
mod failure;
mod output;
mod results;
mod shape;
mod telemetry;
mod trace_args;
mod trace_file;

use args::{Cli, Command};
use clap::Parser;
use std::process::ExitCode;

/// Prompts of a hundred kilobytes come and go on many threads. glibc's allocator has an arena for each, keeps the remains of its largest
/// prompts there, and grew by half within minutes while what was used stayed the same; jemalloc gives pages back some time after
/// their last use (`.cargo/config.toml`), and a turn costs a fifth less.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return failure::usage_exit(&error),
    };
    telemetry::start(cli.verbose);
    let outcome = match cli.command {
        Command::Up(args) => commands::up::run(args),
        Command::Serve(args) => commands::serve::run(args),
        Command::Worker(args) => commands::worker::run(args),
        Command::Sim(args) => commands::sim::run(&args),
        Command::Replay(args) => commands::replay::run(args),
        Command::Trace(args) => commands::trace::run(&args),
        Command::Compare(args) => commands::compare::run(&args),
        Command::Doctor(args) => commands::doctor::run(&args),
        Command::Drill(args) => commands::drill::run(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<failure::ReaderGone>() => ExitCode::SUCCESS,
        Err(error) => {
            output::say(format_args!("error: {error:#}"));
            ExitCode::from(failure::exit_code(&error))
        }
    }
}
