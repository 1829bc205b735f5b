//! How time and memory grow: `cargo run --release -p homing-sim --example scale -- SESSIONS [CLUSTER] [POLICY]`.
//!
//! Sessions of `gen:agent`, four live ones a worker. Prints requests, seconds, and the peak of resident memory where the
//! system tells it. It is a measurement and no test: its figures depend on the machine.

#![expect(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "it measures real time and memory"
)]

use homing_sim::{Cluster, SimConfig, simulate};
use homing_workload::{Start, generate};
use std::error::Error;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let sessions: u32 = arguments.next().ok_or("expected a number of sessions")?.parse()?;
    let cluster = arguments.next().unwrap_or_else(|| "h200x64-dp".to_owned());
    let policy = arguments.next().unwrap_or_else(|| "dp-cache-aware".to_owned());

    let cluster = Cluster::preset(&cluster)?;
    let trace = generate(&format!("gen:agent:sessions={sessions}"), 1)?;
    let workers = u32::try_from(cluster.workers.len())?;
    let mut config = SimConfig::new(&trace, cluster, policy.parse()?);
    config.replay.start = Start::Concurrency(4 * workers);
    let began = Instant::now();
    let outcome = simulate(&trace, &config)?;
    let errors = outcome
        .run
        .requests
        .iter()
        .filter(|request| request.error.is_some())
        .count();
    println!(
        "{} requests, {errors} errors, {:.1} s, {} peak",
        outcome.run.requests.len(),
        began.elapsed().as_secs_f64(),
        peak().unwrap_or_else(|| "unknown".to_owned())
    );
    Ok(())
}

/// Linux's own figure.
fn peak() -> Option<String> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().to_owned())
}
