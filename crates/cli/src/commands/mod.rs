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

/// The runtime of a command that does I/O.
fn runtime() -> Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
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
