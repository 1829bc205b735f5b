//! Log lines on stderr. `HOMING_LOG` takes a filter such as `homing_gateway=debug`; NO_COLOR holds.

use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// Starts logging: warnings by default, more with each `-v`.
pub fn start(verbose: u8) {
    let level = match verbose {
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    let filter = EnvFilter::try_from_env("HOMING_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let color = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(color)
        // It would say so on stderr, and panic where that takes nothing: a full disk must not end what logs to it.
        .log_internal_errors(false)
        .init();
}
