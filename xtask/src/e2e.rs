//! The end-to-end test against a real vLLM: `homing serve` before one prefill and two decode instances on this machine's CPUs.
//!
//! The work is done by the scripts in `e2e/`, because vLLM is a Python package and its client is one, too. This file installs
//! (once; later runs find it), builds, runs, and says what came of it. A machine that cannot have vLLM (another platform, an
//! index without it, too little room) is told so in large letters and fails nothing; once it is installed, a failure is one.

use crate::shell;
use anyhow::{Context, Result, bail, ensure};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Instant;

/// What `install.sh` answers where vLLM cannot be had.
const UNAVAILABLE: i32 = 3;
/// Memory that three engines and the router take, in KiB.
const MEMORY_KIB: u64 = 11 << 20;

/// What can be chosen.
#[derive(clap::Args)]
pub struct Args {
    /// Only these checks, with commas between their names.
    #[arg(long)]
    only: Option<String>,
    /// A `homing` that is built already, instead of a release build.
    #[arg(long)]
    homing: Option<PathBuf>,
}

/// Installs, starts, checks, stops.
pub fn run(args: &Args) -> Result<()> {
    let started = Instant::now();
    let home = home()?;
    if let Err(why) = available_memory() {
        skipped(&why);
        return Ok(());
    }
    if !install(&home)? {
        return Ok(());
    }
    install_agents(&home)?;
    let python = home.join("venv").join("bin").join("python");
    make_model(&python, &home.join("model"))?;
    let homing = match &args.homing {
        Some(homing) => homing
            .canonicalize()
            .with_context(|| format!("no file `{}`", homing.display()))?,
        None => PathBuf::from(shell::release_binary()?),
    };
    let out = shell::root().join("target").join("e2e");
    std::fs::create_dir_all(&out)?;
    let mut command = script(&python, "run.py");
    command
        .arg("--home")
        .arg(&home)
        .arg("--out")
        .arg(&out)
        .arg("--homing")
        .arg(homing);
    if let Some(only) = &args.only {
        command.arg("--only").arg(only);
    }
    println!("\n==> e2e: logs and the summary go to {}", out.display());
    let status = command.status().context("the end-to-end test could not be started")?;
    println!("    done in {} s", started.elapsed().as_secs());
    ensure!(status.success(), "the end-to-end test against vLLM failed: {status}");
    println!("e2e: all green");
    Ok(())
}

/// Where the environment is kept between runs and clones: `HOMING_E2E_HOME`, or a folder of the user's cache.
fn home() -> Result<PathBuf> {
    let variable = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let cache = || variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")));
    let home = variable("HOMING_E2E_HOME").or_else(|| cache().map(|cache| cache.join("homing").join("e2e")));
    home.context("neither `HOMING_E2E_HOME` nor `HOME` is set")
}

/// Whether vLLM is there now; says so loudly where it cannot be.
fn install(home: &Path) -> Result<bool> {
    let status = bash("install.sh", home)?;
    match status.code() {
        Some(0) => Ok(true),
        Some(UNAVAILABLE) => {
            skipped("the reason is above");
            Ok(false)
        }
        _ => bail!("`e2e/install.sh` failed: {status}"),
    }
}

/// Installs the agents, as far as they can be had; the script says which cannot, and their checks say it again.
fn install_agents(home: &Path) -> Result<()> {
    let status = bash("install_agents.sh", home)?;
    ensure!(status.success(), "`e2e/install_agents.sh` failed: {status}");
    Ok(())
}

/// Runs a script of `e2e/` on the folder of the environment.
fn bash(name: &str, home: &Path) -> Result<ExitStatus> {
    println!("\n==> e2e/{name} {}", home.display());
    Command::new("bash")
        .arg(shell::root().join("e2e").join(name))
        .arg(home)
        .stdin(Stdio::null())
        .status()
        .context("`bash` could not be started")
}

fn make_model(python: &Path, model: &Path) -> Result<()> {
    let status = script(python, "tiny_model.py").arg(model).status()?;
    ensure!(status.success(), "the tiny model could not be made: {status}");
    Ok(())
}

fn script(python: &Path, name: &str) -> Command {
    let mut command = Command::new(python);
    command
        .arg(shell::root().join("e2e").join(name))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stdin(Stdio::null());
    command
}

/// Whether the machine has the memory now; where it does not say, it is tried.
fn available_memory() -> Result<(), String> {
    let page = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available = page.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = available.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    match kib {
        Some(kib) if kib < MEMORY_KIB => Err(format!(
            "three engines take {} GiB of memory, {} GiB are free",
            MEMORY_KIB >> 20,
            kib >> 20
        )),
        _ => Ok(()),
    }
}

fn skipped(why: &str) {
    let line = "*".repeat(78);
    println!(
        "\n{line}\n* THE END-TO-END TEST AGAINST vLLM IS LEFT OUT: {why}\n* Nothing was proved about real engines.\n{line}\n"
    );
}
