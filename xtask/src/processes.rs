//! Routers and workers as processes of their own, for chores that try them over real sockets: started, waited for, looked at, and
//! gone when whoever started them is.

pub mod http;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::shell;

/// Between two looks at something that is waited for.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A process that does not outlive its owner.
pub struct Process(Child);

impl Process {
    /// Starts it; `what` says in an error what could not be started.
    pub fn start(command: &mut Command, what: &str) -> Result<Self> {
        let child = command
            .spawn()
            .with_context(|| format!("{what} could not be started"))?;
        Ok(Self(child))
    }

    /// Its id.
    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.0.try_wait()?)
    }

    /// Ends it with SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }

    /// Its resident memory in KiB, where the system says it.
    pub fn resident_kib(&self) -> Option<u64> {
        resident_kib(self.id())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It has ended already, or it ends now.
        drop(self.kill());
    }
}

/// The `homing` to try: one that is built already, or else a release build.
pub fn homing(built: Option<&Path>) -> Result<PathBuf> {
    match built {
        Some(file) => file
            .canonicalize()
            .with_context(|| format!("no file `{}`", file.display())),
        None => Ok(PathBuf::from(shell::release_binary()?)),
    }
}

/// The command that starts a worker, which ends with its standard input.
pub fn worker_command(homing: &Path, name: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(homing);
    command
        .args(["worker", "--exit-with-stdin", "--name", name])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    command
}

/// Starts a worker and gives where it serves HTTP.
pub fn worker(command: &mut Command) -> Result<(Process, SocketAddr)> {
    let mut process = Process::start(command, "a worker")?;
    let output = process.0.stdout.take().context("its output is a pipe")?;
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line)?;
    ensure!(!line.is_empty(), "a worker ended before it served");
    let said: Value = serde_json::from_str(&line).with_context(|| format!("a worker said `{line}`"))?;
    let address = said["http"].as_str().context("a worker says where it listens")?;
    Ok((process, address.parse()?))
}

/// Whether a router serves and knows all of so many workers exactly.
pub fn is_ready(router: SocketAddr, workers: usize) -> bool {
    let known = |page: &Value| {
        let workers = page["data"].as_array().into_iter().flatten();
        workers.filter(|worker| worker["state"] == "exact").count()
    };
    http::get(router, "/ready").is_ok_and(|(status, _)| status == 200)
        && http::json(router, "/admin/workers").is_ok_and(|page| known(&page) == workers)
}

/// An address on loopback that nobody listens at.
pub fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?)
}

/// Waits for something to become true; says how long it took.
pub fn until(what: &str, at_most: Duration, mut holds: impl FnMut() -> bool) -> Result<Duration> {
    let since = Instant::now();
    while !holds() {
        if since.elapsed() > at_most {
            bail!("it did not come true within {at_most:?} that {what}");
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(since.elapsed())
}

/// The resident memory of a process in KiB, where the system says it.
fn resident_kib(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_memory() {
        assert!(resident_kib(std::process::id()).is_none_or(|kib| kib > 100));
        assert_eq!(resident_kib(u32::MAX), None);
    }

    #[test]
    fn what_does_not_come_true_is_said() {
        let error = until("pigs fly", Duration::ZERO, || false).unwrap_err();
        assert!(error.to_string().contains("pigs fly"), "{error}");
    }
}
