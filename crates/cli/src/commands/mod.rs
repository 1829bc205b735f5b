//! One file a command, and what they share of the process they run in.

mod chaos;
pub mod compare;
pub mod doctor;
pub mod drill;
mod events;
pub mod replay;
pub mod serve;
pub mod sim;
pub mod trace;
pub mod up;
pub mod worker;

use anyhow::{Context, Result};
use tokio::runtime::Runtime;

/// Threads for what blocks, beside one a core for prompts that are read and tokenised: those wait for stdin or for the end of another
/// thread. tokio's 512 would be as many arenas as glibc's allocator allows, each with the remains of its largest prompts.
const WAITING_THREADS: usize = 4;

/// The runtime of a command that does I/O.
fn runtime() -> Result<Runtime> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    tokio::runtime::Builder::new_multi_thread()
        .max_blocking_threads(cores + WAITING_THREADS)
        .enable_all()
        .build()
        .context("the runtime could not be started")
}

/// Waits for Ctrl-C, or for the signal by which service managers stop a process.
async fn shutdown_signal() -> Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate()).context("no handler for SIGTERM")?;
    tokio::select! {
        interrupt = tokio::signal::ctrl_c() => interrupt.context("no handler for Ctrl-C"),
        _ = terminate.recv() => Ok(()),
    }
}
