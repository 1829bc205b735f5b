//! The worker processes of `homing up`: started together, started again after a crash, stopped with their parent.
//!
//! Each worker is a process of its own, as in production: KV crosses a process boundary, and one can be killed. A worker
//! lives as long as its standard input is open, so none outlives a parent that was killed.

use crate::args::RoleArg;
use crate::output::say;
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// How long a worker may take to load its model and to listen.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// How long a worker may take to stop before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause before a crashed worker is started again: doubled with each crash in a row, up to the second figure.
const RESTART_PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));
/// A worker that ran for this long has recovered: its next crash counts as the first.
const STABLE_AFTER: Duration = Duration::from_secs(30);

/// How to start one worker.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Its name.
    pub name: String,
    /// What it may do.
    pub role: RoleArg,
    /// The arguments that all workers share.
    pub engine: Vec<String>,
}

/// What a worker says on its first line: where it listens.
#[derive(Deserialize)]
struct Started {
    http: SocketAddr,
}

/// The running workers.
pub struct Fleet {
    /// Where each listens, in the order of the recipes.
    pub addresses: Vec<SocketAddr>,
    supervisors: JoinSet<()>,
    stop: CancellationToken,
}

impl Fleet {
    /// Starts all workers side by side and waits until each listens. If one fails, the others are stopped.
    pub async fn start(recipes: &[Recipe]) -> Result<Self> {
        let mut starting = JoinSet::new();
        for (index, recipe) in recipes.iter().cloned().enumerate() {
            starting.spawn(async move { (index, start(&recipe, None).await) });
        }
        let mut started = Vec::new();
        while let Some(joined) = starting.join_next().await {
            let (index, outcome) = joined.context("a task that starts a worker panicked")?;
            started.push((
                index,
                outcome.with_context(|| format!("worker `{}` did not start", recipes[index].name))?,
            ));
        }
        started.sort_by_key(|(index, _)| *index);
        let (stop, mut supervisors, mut addresses) = (CancellationToken::new(), JoinSet::new(), Vec::new());
        for ((_, (child, address)), recipe) in started.into_iter().zip(recipes) {
            addresses.push(address);
            supervisors.spawn(supervise(recipe.clone(), child, address, stop.clone()));
        }
        Ok(Self {
            addresses,
            supervisors,
            stop,
        })
    }

    /// Stops all workers and waits for them.
    pub async fn stop(mut self) {
        self.stop.cancel();
        while self.supervisors.join_next().await.is_some() {}
    }
}

/// Starts a worker and waits for the line that says where it listens.
async fn start(recipe: &Recipe, address: Option<SocketAddr>) -> Result<(Child, SocketAddr)> {
    let listen = address.map_or_else(|| "127.0.0.1:0".to_owned(), |address| address.to_string());
    let program = std::env::current_exe().context("the path of this program is unknown")?;
    let mut child = Command::new(program)
        .args([
            "worker",
            "--exit-with-stdin",
            "--name",
            &recipe.name,
            "--role",
            recipe.role.as_str(),
            "--listen",
            &listen,
        ])
        .args(&recipe.engine)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        // Its own process group: Ctrl-C reaches the parent only, which stops the workers in order.
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .context("the process could not be started")?;
    let stdout = child.stdout.take().context("the process has no standard output")?;
    let mut lines = BufReader::new(stdout).lines();
    let line = match tokio::time::timeout(START_TIMEOUT, lines.next_line()).await {
        Err(_) => bail!("it did not listen within {} s", START_TIMEOUT.as_secs()),
        Ok(line) => line.context("its output could not be read")?,
    };
    let Some(line) = line else {
        let status = child.wait().await.context("it could not be waited for")?;
        bail!("it ended at once: {status}");
    };
    let started: Started =
        serde_json::from_str(&line).with_context(|| format!("expected its addresses, found `{line}`"))?;
    ensure!(
        address.is_none_or(|address| address == started.http),
        "it listens on another address than before"
    );
    Ok((child, started.http))
}

/// Waits for a worker; starts it again at the same address when it crashes; stops it when told to.
async fn supervise(recipe: Recipe, mut child: Child, address: SocketAddr, stop: CancellationToken) {
    let mut pause = RESTART_PAUSE.0;
    loop {
        let since = tokio::time::Instant::now();
        // Held apart: waiting for a child closes its standard input, which is what tells a worker to stop.
        let stdin = child.stdin.take();
        tokio::select! {
            () = stop.cancelled() => {
                drop(stdin);
                return end(child).await;
            }
            status = child.wait() => match status {
                Ok(status) => say(format_args!("worker {} ended ({status}): starting it again", recipe.name)),
                Err(error) => say(format_args!("worker {} is lost ({error}): starting it again", recipe.name)),
            },
        }
        if since.elapsed() >= STABLE_AFTER {
            pause = RESTART_PAUSE.0;
        }
        child = loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            pause = (pause * 2).min(RESTART_PAUSE.1);
            match start(&recipe, Some(address)).await {
                Ok((child, _)) => break child,
                Err(error) => say(format_args!("worker {} did not start: {error:#}", recipe.name)),
            }
        };
    }
}

/// Waits for a worker that was told to stop, and kills it if it does not.
async fn end(mut child: Child) {
    if tokio::time::timeout(STOP_TIMEOUT, child.wait()).await.is_err() {
        // It is gone already where this fails.
        let _ = child.kill().await;
    }
}
