//! A router and its workers as processes. Each worker is reached through a forwarder that can cut all its connections;
//! a killed worker is started again at the same address.

use super::http;
use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a process may take to serve.
const STARTUP: Duration = Duration::from_secs(120);

/// What the workers' steps take the time of.
const STEP_MODEL: &str = "h200-qwen3-30b";

/// A router with its workers. Dropped, all of it is gone.
pub struct Cluster {
    binary: String,
    pub router: SocketAddr,
    router_process: Child,
    workers: Vec<Worker>,
}

struct Worker {
    name: String,
    role: &'static str,
    address: SocketAddr,
    process: Child,
    forwarder: Forwarder,
}

impl Cluster {
    /// Starts `p0`, `d0` and `d1` and a router with these arguments more, and waits until it is ready.
    pub fn start(binary: &str, more: &[&str]) -> Result<Self> {
        let mut workers = Vec::new();
        for (name, role) in [("p0", "prefill"), ("d0", "decode"), ("d1", "decode")] {
            let address = free_address()?;
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
        let router = free_address()?;
        let router_process = start_router(binary, router, &workers, more)?;
        let cluster = Self {
            binary: binary.to_owned(),
            router,
            router_process,
            workers,
        };
        until("the router is ready", STARTUP, || {
            http::get(router, "/ready").is_ok_and(|(status, _)| status == 200)
        })?;
        for name in ["p0", "d0", "d1"] {
            until("every worker is known exactly", STARTUP, || {
                cluster.state(name) == "exact"
            })?;
        }
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
        worker.process.wait()?;
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
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.router_process.id())).unwrap_or_default();
        let kib = status.lines().find_map(|line| {
            line.strip_prefix("VmRSS:")?
                .trim()
                .strip_suffix(" kB")?
                .trim()
                .parse::<f64>()
                .ok()
        });
        kib.unwrap_or_default() / 1024.0
    }

    /// Whether the router's process is there.
    pub fn router_lives(&mut self) -> bool {
        matches!(self.router_process.try_wait(), Ok(None))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // They are gone already where these fail.
        let processes = self.workers.iter_mut().map(|worker| &mut worker.process);
        for process in processes.chain([&mut self.router_process]) {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

fn start_worker(binary: &str, name: &str, role: &str, address: SocketAddr) -> Result<Child> {
    let mut process = Command::new(binary)
        .args(["worker", "--name", name, "--role", role, "--step-model", STEP_MODEL])
        .args(["--listen", &address.to_string(), "--exit-with-stdin"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("`{binary}` could not be started"))?;
    let mut first = String::new();
    let stdout = process.stdout.take().context("its output is a pipe")?;
    BufReader::new(stdout).read_line(&mut first)?;
    if first.is_empty() {
        bail!("worker `{name}` ended before it served");
    }
    Ok(process)
}

fn start_router(binary: &str, listen: SocketAddr, workers: &[Worker], more: &[&str]) -> Result<Child> {
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
    command
        .spawn()
        .with_context(|| format!("`{binary}` could not be started"))
}

fn free_address() -> Result<SocketAddr> {
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
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(since.elapsed())
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
