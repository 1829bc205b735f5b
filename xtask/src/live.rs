//! The same trace and the same four workers twice: as processes behind a live router, and on paper. Do the policies come in the same
//! order, and is the time to first token the one that was foretold?
//!
//! `homing up` runs real workers whose steps take the time that they take on an H200, and `homing replay` sends them the trace; `homing
//! sim` runs it on a cluster of the same workers. What a live run takes on top is this machine's: it should have nothing else to
//! do. Minutes for each policy, so it is no part of CI.

use crate::processes::{self, Process};
use crate::shell;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const WORKERS: usize = 4;
const STEP_MODEL: &str = "h200-qwen3-30b";
/// How long the cluster may take to come up.
const READY_PATIENCE: Duration = Duration::from_secs(60);
/// The planner's median time to first token may differ by this share between the two.
const TTFT_WITHIN: f64 = 0.2;
/// Two policies whose mean latencies differ by less than this share on paper have no order.
const APART: f64 = 0.1;
/// Sessions, turns and prompts are cut so that a policy takes some five minutes.
const CUT: [&str; 10] = [
    "--sessions",
    "16",
    "--max-turns",
    "10",
    "--max-context",
    "120000",
    "--time-scale",
    "100",
    "--concurrency",
    "16",
];

/// What to run.
#[derive(clap::Args)]
pub struct Args {
    /// The trace, a file or a generator.
    #[arg(long, default_value = "gen:agent:sessions=16")]
    trace: String,
    /// The policies; the first is the planner.
    #[arg(long, value_delimiter = ',', default_values_t = ["homing", "dp-cache-aware", "least-loaded", "round-robin"].map(str::to_owned))]
    policies: Vec<String>,
    /// A `homing` that is built already, instead of a release build.
    #[arg(long)]
    homing: Option<PathBuf>,
}

/// What came of one run.
struct Outcome {
    requests: u64,
    errors: u64,
    latency_s: f64,
    ttft_s: [f64; 3],
}

/// Runs all policies both ways, prints the table, and judges.
pub fn run(args: &Args) -> Result<()> {
    let homing = processes::homing(args.homing.as_deref())?;
    let out = shell::root().join("target").join("live");
    std::fs::create_dir_all(&out)?;
    let mut outcomes = Vec::new();
    println!("| policy | where | requests | errors | latency, mean | TTFT, mean | TTFT, p50 | TTFT, p90 |");
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    for policy in &args.policies {
        let paper = on_paper(&homing, args, policy, &out)?;
        paper.print(policy, "simulated");
        let live = live(&homing, args, policy, &out)?;
        live.print(policy, "live");
        outcomes.push((policy.as_str(), paper, live));
    }
    judge(&outcomes)
}

fn judge(outcomes: &[(&str, Outcome, Outcome)]) -> Result<()> {
    for (policy, paper, live) in outcomes {
        ensure!(live.errors == 0, "`{}` requests failed under `{policy}`", live.errors);
        ensure!(
            live.requests == paper.requests,
            "`{policy}`: {} requests, expected {}",
            live.requests,
            paper.requests
        );
    }
    for (policy, paper, live) in outcomes {
        for (other, other_paper, other_live) in outcomes {
            let apart = paper.latency_s * (1.0 + APART) < other_paper.latency_s;
            ensure!(
                !apart || live.latency_s < other_live.latency_s,
                "`{policy}` is faster than `{other}` on paper and not live"
            );
        }
    }
    let Some((policy, paper, live)) = outcomes.first() else {
        return Ok(());
    };
    let off = live.ttft_s[1] / paper.ttft_s[1] - 1.0;
    println!("\n`{policy}`: TTFT p50 live by that simulated: {:+.1}%", off * 100.0);
    ensure!(off.abs() <= TTFT_WITHIN, "expected at most {:.0}%", TTFT_WITHIN * 100.0);
    Ok(())
}

fn on_paper(homing: &Path, args: &Args, policy: &str, out: &Path) -> Result<Outcome> {
    let cluster = out.join("cluster.toml");
    let text = format!("step_model = \"{STEP_MODEL}\"\n[[workers]]\nrole = \"both\"\ncount = {WORKERS}\n");
    std::fs::write(&cluster, text)?;
    let mut command = Command::new(homing);
    command.args(["sim", "--trace", &args.trace, "--policy", policy, "--cluster"]);
    report(command.arg(&cluster))
}

fn live(homing: &Path, args: &Args, policy: &str, out: &Path) -> Result<Outcome> {
    let address = processes::free_address()?;
    let log = std::fs::File::create(out.join(format!("up-{}.log", policy.replace(':', "-"))))?;
    let mut command = Command::new(homing);
    command
        .args(["up", "--step-model", STEP_MODEL, "--policy", policy])
        .args([
            "--workers",
            &format!("{WORKERS}x"),
            "--port",
            &address.port().to_string(),
        ])
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    let _up = Process::start(&mut command, "`homing up`")?;
    processes::until("the cluster is up (see its log)", READY_PATIENCE, || {
        processes::is_ready(address, WORKERS)
    })?;
    let mut command = Command::new(homing);
    report(command.args(["replay", "--trace", &args.trace, "--url", &format!("http://{address}")]))
}

/// Runs a command that prints a report, and reads it.
fn report(command: &mut Command) -> Result<Outcome> {
    let output = command.args(CUT).arg("--json").stderr(Stdio::piped()).output()?;
    ensure!(
        output.status.success(),
        "{command:?} failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let report: Value = serde_json::from_slice(&output.stdout).context("expected a report")?;
    let run = &report["runs"][0];
    let figure = |name: &str, statistic: &str| {
        run[name][statistic]
            .as_f64()
            .with_context(|| format!("no `{name}.{statistic}`"))
    };
    Ok(Outcome {
        requests: run["requests"].as_u64().context("no `requests`")?,
        errors: run["errors"]["total"].as_u64().context("no `errors`")?,
        latency_s: figure("latency_s", "mean")?,
        ttft_s: [
            figure("ttft_s", "mean")?,
            figure("ttft_s", "p50")?,
            figure("ttft_s", "p90")?,
        ],
    })
}

impl Outcome {
    fn print(&self, policy: &str, place: &str) {
        let Self {
            requests,
            errors,
            latency_s,
            ttft_s: [mean, p50, p90],
        } = self;
        println!(
            "| `{policy}` | {place} | {requests} | {errors} | {latency_s:.2} s | {mean:.3} s | {p50:.3} s | {p90:.3} s |"
        );
    }
}
