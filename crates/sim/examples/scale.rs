//! How time and memory grow: `cargo run --release -p homing-sim --example scale -- SESSIONS [CLUSTER] [POLICY] [GENERATOR]`.
//!
//! So many sessions of `gen:agent` or another generator, four live ones a worker. Prints requests, seconds on the clock and
//! on the processor and the peak of resident memory where the system tells them, and the sum of the latencies, by which two
//! versions of the simulator are compared. It is a measurement and no test: its figures depend on the machine.

#![expect(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "it measures real time and memory"
)]

use homing_report::RequestRecord;
use homing_sim::{Cluster, SimConfig, simulate};
use homing_workload::{Start, generate};
use std::error::Error;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let sessions: u32 = arguments.next().ok_or("expected a number of sessions")?.parse()?;
    let cluster = arguments.next().unwrap_or_else(|| "h200x64-dp".to_owned());
    let policy = arguments.next().unwrap_or_else(|| "dp-cache-aware".to_owned());
    let generator = arguments.next().unwrap_or_else(|| "gen:agent".to_owned());

    let cluster = Cluster::preset(&cluster)?;
    let trace = generate(&format!("{generator}:sessions={sessions}"), 1)?;
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
    let latency = |request: &RequestRecord| (request.end - request.arrival).as_secs_f64();
    let unknown = || "unknown".to_owned();
    println!(
        "{} requests, {errors} errors, {:.1} s, {} on the processor, {} peak, latencies {:.6} s in all",
        outcome.run.requests.len(),
        began.elapsed().as_secs_f64(),
        processor().unwrap_or_else(unknown),
        peak().unwrap_or_else(unknown),
        outcome.run.requests.iter().map(latency).sum::<f64>()
    );
    Ok(())
}

/// Processor time of all of it, the trace's generation included, as Linux counts it in hundredths.
fn processor() -> Option<String> {
    let status = std::fs::read_to_string("/proc/self/stat").ok()?;
    let (_, after_name) = status.rsplit_once(')')?;
    let ticks: u64 = after_name.split_whitespace().nth(11)?.parse().ok()?;
    Some(format!("{:.1} s", ticks as f64 / 100.0))
}

/// Linux's own figure.
fn peak() -> Option<String> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().to_owned())
}
