//! Agents for minutes before a router with three embedded step-model workers: does its memory stay flat, do sessions expire?
//!
//! Two replays of `gen:agent` run at once, one that sends token ids and one that chats, both with their gaps divided by
//! `--time-scale`; an idle session is forgotten after an hour divided by it. Beside them clients begin streams and hang up. Each
//! process is judged by the median of its resident memory in each minute after the warm-up: the highest may be 5% above
//! the lowest. A median, because a prompt's body in flight is memory, too, and comes and goes with the traffic. Requests at a worker,
//! sessions and batches kept for replays are bounded so that the warm-up reaches the bounds: below its bounds a process grows. For the same
//! reason the allocator's threads keep nothing for their next use here.

mod cluster;
mod minutes;

use crate::{processes, shell};
use anyhow::{Context, Result, ensure};
use cluster::{Cluster, Traffic};
use minutes::Minutes;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Between two looks at memory.
const SAMPLE_EVERY: Duration = Duration::from_secs(2);
/// Between two lines of the table.
const LINE_EVERY: Duration = Duration::from_secs(60);
/// What the minutes' medians of one process may differ by, in percent of the lowest.
const SPREAD_PERCENT_MAX: f64 = 5.0;
/// A session that is idle for so long is forgotten, before it is divided by the time scale.
const SESSION_IDLE: Duration = Duration::from_secs(3_600);
/// How much longer than its time a session may be remembered.
const EXPIRY_SLACK: Duration = Duration::from_secs(15);

/// What can be chosen.
#[derive(clap::Args)]
pub struct Args {
    /// How long the traffic lasts, the warm-up included.
    #[arg(long, default_value_t = 10)]
    minutes: u64,
    /// Minutes that are not judged: sessions, caches and pools fill.
    #[arg(long, default_value_t = 3)]
    warm_up: u64,
    /// Gaps between turns, and the time after which an idle session is forgotten, are divided by this.
    #[arg(long, default_value_t = 50.0)]
    time_scale: f64,
    /// How fast the workers seem to be.
    #[arg(long, default_value = "h100-qwen3-30b")]
    step_model: String,
    /// A `homing` that is built already, instead of a release build.
    #[arg(long)]
    homing: Option<PathBuf>,
}

/// Runs the traffic, watches, judges.
pub fn run(args: &Args) -> Result<()> {
    ensure!(
        args.warm_up < args.minutes,
        "expected more minutes than the warm-up has"
    );
    ensure!(args.time_scale >= 1.0, "expected a time scale of at least 1");
    let homing = processes::homing(args.homing.as_deref())?;
    let out = shell::root().join("target").join("soak");
    std::fs::create_dir_all(&out)?;
    let idle = SESSION_IDLE.div_f64(args.time_scale);
    let cluster = Cluster::start(&homing, &args.step_model, idle, &out)?;
    println!("\n==> soak: {} minutes; logs are in {}", args.minutes, out.display());
    let traffic = Traffic::start(&homing, &cluster, args.time_scale, &out);
    let watched = watch(args, &cluster)?;
    let tally = cluster.tally()?;
    traffic.stop()?;
    println!("\n{tally}");
    let expired = sessions_expire(&cluster, idle);
    let flat = judge(&watched, args.warm_up);
    drop(cluster);
    ensure!(tally.completed > 0, "no request was answered: see the logs");
    ensure!(tally.failed == 0, "`{}` requests failed: see the logs", tally.failed);
    ensure!(flat, "memory is not flat: see the table");
    expired?;
    println!("soak: memory is flat, and sessions expire");
    Ok(())
}

/// The memory of each process, minute by minute.
fn watch(args: &Args, cluster: &Cluster) -> Result<Vec<(String, Minutes)>> {
    let mut watched: Vec<(String, Minutes)> = Vec::new();
    for (name, _) in cluster.processes() {
        watched.push((name.to_owned(), Minutes::default()));
    }
    let names: String = watched.iter().map(|(name, _)| format!("{name:>12}")).collect();
    println!("  minute{names}  sessions   (resident KiB, median of the minute)");
    let (began, end) = (Instant::now(), Duration::from_secs(args.minutes * 60));
    let mut said = 0;
    while began.elapsed() < end {
        std::thread::sleep(SAMPLE_EVERY);
        let minute = began.elapsed().as_secs() / LINE_EVERY.as_secs();
        for ((name, process), (_, minutes)) in cluster.processes().zip(&mut watched) {
            let kib = process
                .resident_kib()
                .with_context(|| format!("`{name}` is gone: see its log"))?;
            // The look that ends the run would be a minute of its own.
            if minute < args.minutes {
                minutes.add(minute, kib);
            }
        }
        if minute > said {
            let cell = |minutes: &Minutes| format!("{:>12}", minutes.median(said).unwrap_or_default());
            let cells: String = watched.iter().map(|(_, minutes)| cell(minutes)).collect();
            let note = if minute <= args.warm_up { "  warm-up" } else { "" };
            println!("  {minute:>6}{cells}  {:>8}{note}", cluster.sessions()?);
            said = minute;
        }
    }
    Ok(watched)
}

/// Waits until the router remembers no session.
fn sessions_expire(cluster: &Cluster, idle: Duration) -> Result<()> {
    let (began, patience) = (Instant::now(), idle + EXPIRY_SLACK);
    let before = cluster.sessions()?;
    ensure!(before > 0, "the router remembers no session right after the traffic");
    while cluster.sessions()? > 0 {
        ensure!(
            began.elapsed() < patience,
            "`{}` of `{before}` sessions are remembered after {} s without traffic, expected none after {} s",
            cluster.sessions()?,
            began.elapsed().as_secs(),
            idle.as_secs()
        );
        std::thread::sleep(SAMPLE_EVERY);
    }
    println!(
        "{before} sessions, none of them {} s after the traffic",
        began.elapsed().as_secs()
    );
    Ok(())
}

/// Says how flat each process was; whether all were.
fn judge(watched: &[(String, Minutes)], warm_up: u64) -> bool {
    let mut flat = true;
    for (name, minutes) in watched {
        let spread = minutes.spread_percent(warm_up);
        let verdict = if spread <= SPREAD_PERCENT_MAX {
            "flat"
        } else {
            "NOT FLAT"
        };
        println!("  {name:<8} {spread:.1}% between its minutes (at most {SPREAD_PERCENT_MAX}%): {verdict}");
        flat &= spread <= SPREAD_PERCENT_MAX;
    }
    flat
}
