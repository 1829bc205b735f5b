//! A router and its workers as processes. Each worker is reached through a forwarder that can cut all its connections;
//! a killed worker is started again at the same address.

use crate::processes::{self, Process, http, until};
use anyhow::{Context, Result, bail};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long a process may take to serve.
const STARTUP: Duration = Duration::from_secs(120);

/// What the workers' steps take the time of.
const STEP_MODEL: &str = "h200-qwen3-30b";

/// A router with its workers. Dropped, all of it is gone.
pub struct Cluster {
    binary: PathBuf,
    pub router: SocketAddr,
    router_process: Process,
    workers: Vec<Worker>,
}

struct Worker {
    name: String,
    role: &'static str,
    address: SocketAddr,
    process: Process,
    forwarder: Forwarder,
}

impl Cluster {
    /// Starts `p0`, `d0` and `d1` and a router with these arguments more, and waits until it is ready.
    pub fn start(binary: &Path, more: &[&str]) -> Result<Self> {
        let mut workers = Vec::new();
        for (name, role) in [("p0", "prefill"), ("d0", "decode"), ("d1", "decode")] {
            let address = processes::free_address()?;
            let process = start_worker(binary, name, role, address)?;
            let forwarder = Forwarder::start(address)?;
            workers.push(Worker {
                name: name.to_owned(),
                role,
                address,
                process,
                forwarder,
            });
        }
        let router = processes::free_address()?;
        let router_process = start_router(binary, router, &workers, more)?;
        let cluster = Self {
            binary: binary.to_owned(),
            router,
            router_process,
            workers,
        };
        until("the router knows its workers", STARTUP, || {
            processes::is_ready(router, cluster.workers.len())
        })?;
        Ok(cluster)
    }

    /// The name of the model.
    pub fn model(&self) -> Result<String> {
        let models = http::json(self.router, "/v1/models")?;
        let name = models["data"][0]["id"].as_str();
        name.map(str::to_owned).context("the router lists no model")
    }

    /// Kills a worker with SIGKILL and starts it again after a while.
    pub fn kill(&mut self, name: &str, down: Duration) -> Result<()> {
        let binary = self.binary.clone();
        let worker = self.worker(name)?;
        worker.process.kill()?;
        std::thread::sleep(down);
        worker.process = start_worker(&binary, &worker.name, worker.role, worker.address)?;
        Ok(())
    }

    /// Sends a worker a signal.
    pub fn signal(&mut self, name: &str, signal: &str) -> Result<()> {
        let pid = self.worker(name)?.process.id();
        let status = Command::new("kill")
            .args([format!("-{signal}"), pid.to_string()])
            .status()?;
        if !status.success() {
            bail!("no process {pid}");
        }
        Ok(())
    }

    /// Cuts all connections between the router and a worker.
    pub fn cut(&mut self, name: &str) -> Result<usize> {
        Ok(self.worker(name)?.forwarder.cut())
    }

    fn worker(&mut self, name: &str) -> Result<&mut Worker> {
        let worker = self.workers.iter_mut().find(|worker| worker.name == name);
        worker.with_context(|| format!("no worker `{name}`"))
    }

    /// Where a worker serves.
    pub fn address(&self, name: &str) -> Option<SocketAddr> {
        self.workers
            .iter()
            .find(|worker| worker.name == name)
            .map(|worker| worker.address)
    }

    /// What the router thinks of a worker; empty if it does not say.
    pub fn state(&self, name: &str) -> String {
        let workers = http::json(self.router, "/admin/workers").unwrap_or_default();
        let of = workers["data"].as_array().into_iter().flatten();
        let state = of
            .into_iter()
            .find(|worker| worker["name"] == name)
            .and_then(|worker| worker["state"].as_str());
        state.unwrap_or_default().to_owned()
    }

    /// What the router has booked, over all workers: requests, tokens, seeds and exports.
    pub fn booked(&self) -> Result<u64> {
        let workers = http::json(self.router, "/admin/workers")?;
        let of = |worker: &serde_json::Value| -> u64 {
            let account = worker["in_flight"].as_object().into_iter().flatten();
            account.filter_map(|(_, value)| value.as_u64()).sum()
        };
        Ok(workers["data"].as_array().into_iter().flatten().map(of).sum())
    }

    /// Requests that a worker runs or that wait there.
    pub fn busy(&self, name: &str) -> Result<f64> {
        let address = self.address(name).with_context(|| format!("no worker `{name}`"))?;
        let running = http::metric(address, "vllm:num_requests_running")?;
        Ok(running + http::metric(address, "vllm:num_requests_waiting")?)
    }

    /// Tokens that a worker has sampled.
    pub fn sampled(&self, name: &str) -> Result<f64> {
        let address = self.address(name).with_context(|| format!("no worker `{name}`"))?;
        http::metric(address, "vllm:generation_tokens_total")
    }

    /// The share of a worker's pool that requests hold.
    pub fn pinned(&self, name: &str) -> Result<f64> {
        let address = self.address(name).with_context(|| format!("no worker `{name}`"))?;
        http::metric(address, "vllm:kv_cache_usage_perc")
    }

    /// Resident memory of the router in MiB.
    pub fn router_memory(&self) -> f64 {
        self.router_process.resident_kib().unwrap_or_default() as f64 / 1024.0
    }

    /// Whether the router's process is there.
    pub fn router_lives(&mut self) -> bool {
        matches!(self.router_process.ended(), Ok(None))
    }
}

fn start_worker(binary: &Path, name: &str, role: &str, address: SocketAddr) -> Result<Process> {
    let listen = address.to_string();
    let arguments = ["--role", role, "--step-model", STEP_MODEL, "--listen", &listen];
    let (process, _) = processes::worker(&mut processes::worker_command(binary, name, &arguments))?;
    Ok(process)
}

fn start_router(binary: &Path, listen: SocketAddr, workers: &[Worker], more: &[&str]) -> Result<Process> {
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full");
    let mut command = Command::new(binary);
    command
        .args(["serve", "--listen", &listen.to_string()])
        .stdin(Stdio::null());
    for worker in workers {
        let address = worker.forwarder.address;
        command.args([
            "--worker",
            &format!("http://{address},kind=homing,name={}", worker.name),
        ]);
    }
    command.args(more);
    if more.contains(&"/dev/full") {
        command.stdout(full()?).stderr(full()?);
    } else {
        command.stdout(Stdio::null());
    }
    Process::start(&mut command, "the router")
}

/// A forwarder of connections that can cut them all.
struct Forwarder {
    address: SocketAddr,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Forwarder {
    fn start(target: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let open: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
        let known = Arc::clone(&open);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                // A worker that is down refuses: the client's connection breaks.
                if let Ok(worker) = TcpStream::connect(target) {
                    forward(client, worker, &known);
                }
            }
        });
        Ok(Self { address, open })
    }

    /// Cuts every connection that is open; says how many there were.
    fn cut(&self) -> usize {
        let mut open = self.open.lock().expect("no holder panics");
        let cut = open.drain(..).filter(|stream| stream.shutdown(Shutdown::Both).is_ok());
        cut.count()
    }
}

/// Copies both ways until one side ends.
fn forward(client: TcpStream, worker: TcpStream, open: &Arc<Mutex<Vec<TcpStream>>>) {
    let clones = (client.try_clone(), worker.try_clone(), worker.try_clone());
    let (Ok(back), Ok(from_worker), Ok(kept)) = clones else {
        return;
    };
    open.lock().expect("no holder panics").push(kept);
    let open = Arc::clone(open);
    std::thread::spawn(move || copy(client, worker));
    std::thread::spawn(move || {
        let peer = from_worker.peer_addr().and_then(|_| from_worker.local_addr());
        copy(from_worker, back);
        if let Ok(ended) = peer {
            let mut open = open.lock().expect("no holder panics");
            open.retain(|stream| stream.local_addr().is_ok_and(|address| address != ended));
        }
    });
}

fn copy(mut from: TcpStream, mut to: TcpStream) {
    // One side that cannot keep Nagle off is only slower.
    let _ = to.set_nodelay(true);
    let mut bytes = vec![0; 16 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
    let _ = from.shutdown(Shutdown::Read);
}
