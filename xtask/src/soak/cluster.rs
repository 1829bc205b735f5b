//! The processes of a soak: three workers, the router, and those that send traffic. All end with it.

use crate::processes::{self, Process, http};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fmt;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

const WORKERS: usize = 3;
/// Requests at one worker at most, and sessions that the router remembers: few enough that a warm-up reaches all bounds. What a
/// process holds at its bounds is what is judged; below them its memory follows the traffic. This traffic would have three to six at each
/// worker; what is more waits in the router.
const REQUESTS_PER_WORKER: usize = 3;
const SESSIONS: usize = 96;
/// Bytes of prompts that the router remembers, and blocks of its index: the defaults, 256 MB and two millions, would be reached after
/// hours of this traffic, and until then what is remembered is a matter of who happens to be there.
const PROMPT_MEMORY_BYTES: usize = 8 << 20;
const INDEX_BLOCKS: usize = 32_768;
/// Bytes of KV events that a worker keeps for a replay. The default, vLLM's 10,000 batches, takes some 10 MB after ten minutes of this traffic
/// and would be reached after the run.
const REPLAY_BYTES: &str = "1000000";
/// What the allocator is asked for, beside what it has built in: no thread keeps what it has freed for its next use. That is up to a megabyte
/// a thread, now here and now there, and would hide what the program itself holds.
const ALLOCATOR: (&str, &str) = (
    "_RJEM_MALLOC_CONF",
    "narenas:1,tcache:false,dirty_decay_ms:500,muzzy_decay_ms:0",
);
/// How long the router may take to find its workers.
const READY_PATIENCE: Duration = Duration::from_secs(60);
/// Between two clients that begin a stream and hang up.
const HANG_UP_EVERY: Duration = Duration::from_millis(500);
const HTTP_TIMEOUT: Duration = Duration::from_secs(10);

/// The router and its workers.
pub struct Cluster {
    /// With their names, the router first.
    processes: Vec<(String, Process)>,
    address: SocketAddr,
}

impl Cluster {
    /// Starts all and waits until the router is ready.
    pub fn start(homing: &Path, step_model: &str, session_idle: Duration, out: &Path) -> Result<Self> {
        let (mut processes, mut config) = (Vec::new(), String::new());
        for number in 0..WORKERS {
            let name = format!("w{number}");
            let log = File::create(out.join(format!("{name}.log")))?;
            let arguments = [
                "--role",
                "both",
                "--listen",
                "127.0.0.1:0",
                "--kv-replay-bytes",
                REPLAY_BYTES,
                "--step-model",
                step_model,
            ];
            let mut command = processes::worker_command(homing, &name, &arguments);
            command.env(ALLOCATOR.0, ALLOCATOR.1).stderr(log);
            let (process, http) = processes::worker(&mut command)?;
            config += &format!("[[workers]]\nurl = \"http://{http}\"\nkind = \"homing\"\nname = \"{name}\"\n");
            processes.push((name, process));
        }
        let address = processes::free_address()?;
        let (seconds, nanoseconds) = (session_idle.as_secs(), session_idle.subsec_nanos());
        let head = format!(
            "listen = \"{address}\"\ntokenizer = \"tiny\"\n[router.clocks]\nsession_idle = {{ secs = {seconds}, nanos = {nanoseconds} }}\n\
            [router.limits]\nrequests_per_worker = {REQUESTS_PER_WORKER}\nsessions = {SESSIONS}\nindex_blocks = {INDEX_BLOCKS}\n\
            [limits]\nprompt_memory_bytes = {PROMPT_MEMORY_BYTES}\n"
        );
        let file = out.join("serve.toml");
        std::fs::write(&file, head + &config)?;
        let mut command = Command::new(homing);
        command
            .arg("serve")
            .arg("--config")
            .arg(&file)
            .env(ALLOCATOR.0, ALLOCATOR.1)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(out.join("router.log"))?);
        let router = Process::start(&mut command, "the router")?;
        processes.insert(0, ("router".to_owned(), router));
        processes::until("the router knows its workers (see the logs)", READY_PATIENCE, || {
            processes::is_ready(address, WORKERS)
        })?;
        Ok(Self { processes, address })
    }

    /// The router first, then the workers.
    pub fn processes(&self) -> impl Iterator<Item = (&str, &Process)> {
        self.processes.iter().map(|(name, process)| (name.as_str(), process))
    }

    /// Sessions that the router remembers.
    pub fn sessions(&self) -> Result<usize> {
        let page = http::json(self.address, "/admin/sessions")?;
        let data = page["data"].as_array().context("expected a list of sessions")?;
        Ok(data.len())
    }

    /// What came of the requests so far.
    pub fn tally(&self) -> Result<Tally> {
        let mut tally = Tally::default();
        let (_, page) = http::get(self.address, "/metrics")?;
        page.lines().for_each(|line| tally.add(line));
        Ok(tally)
    }
}

/// What came of the requests, as the router counts them.
#[derive(Default)]
pub struct Tally {
    pub completed: u64,
    pub failed: u64,
    hung_up: u64,
}

impl Tally {
    /// Adds a line of the metrics page, if it counts turns that ended.
    fn add(&mut self, line: &str) {
        let Some((labels, count)) = line
            .strip_prefix("homing_requests_total{")
            .and_then(|rest| rest.rsplit_once(' '))
        else {
            return;
        };
        let count = count.parse().unwrap_or(0);
        if labels.contains("outcome=\"ok\"") {
            self.completed += count;
        } else if labels.contains("outcome=\"client_gone\"") {
            self.hung_up += count;
        } else {
            self.failed += count;
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            completed,
            failed,
            hung_up,
        } = self;
        write!(
            f,
            "{completed} requests completed, {failed} failed, {hung_up} clients hung up"
        )
    }
}

/// Those that send traffic, until they are stopped.
pub struct Traffic {
    stop: Arc<AtomicBool>,
    senders: Vec<JoinHandle<Result<()>>>,
}

impl Traffic {
    pub fn start(homing: &Path, cluster: &Cluster, time_scale: f64, out: &Path) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut senders = Vec::new();
        for form in ["ids", "chat"] {
            let replays = Replays {
                homing: homing.to_owned(),
                address: cluster.address,
                form,
                time_scale,
                log: out.join(format!("replay-{form}.log")),
            };
            let stop = Arc::clone(&stop);
            senders.push(std::thread::spawn(move || replays.run(&stop)));
        }
        let (address, stopped) = (cluster.address, Arc::clone(&stop));
        senders.push(std::thread::spawn(move || hang_up_until(address, &stopped)));
        Self { stop, senders }
    }

    /// Stops it: replays under way are broken off, as clients that hang up.
    pub fn stop(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        for sender in self.senders {
            sender
                .join()
                .map_err(|_| anyhow::anyhow!("a sender of traffic broke"))??;
        }
        Ok(())
    }
}

/// One replay after the other, each with the next seed: sessions start as others end, so that all ages are there at once.
struct Replays {
    homing: PathBuf,
    address: SocketAddr,
    form: &'static str,
    time_scale: f64,
    log: PathBuf,
}

impl Replays {
    fn run(&self, stop: &AtomicBool) -> Result<()> {
        let mut seed = 1;
        while !stop.load(Ordering::Relaxed) {
            self.once(seed, stop)?;
            seed += 1;
        }
        Ok(())
    }

    /// One replay, to its end or until it is broken off.
    fn once(&self, seed: u64, stop: &AtomicBool) -> Result<()> {
        let log = File::options().create(true).append(true).open(&self.log)?;
        let mut command = Command::new(&self.homing);
        command
            .args([
                "replay",
                "--trace",
                "gen:agent:sessions=2000:turns=12",
                "--concurrency",
                "12",
                "--json",
            ])
            .args(["--max-context", "24000", "--shrink", "2", "--as", self.form])
            .args([
                "--seed",
                &seed.to_string(),
                "--time-scale",
                &self.time_scale.to_string(),
            ])
            .args(["--url", &format!("http://{}", self.address)])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let mut process = Process::start(&mut command, "a replay")?;
        while !stop.load(Ordering::Relaxed) {
            if let Some(status) = process.ended()? {
                ensure!(status.success(), "it ended with {status}: see `{}`", self.log.display());
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }
}

/// Clients that begin a stream, read its first bytes and are gone.
fn hang_up_until(address: SocketAddr, stop: &AtomicBool) -> Result<()> {
    let models = http::json(address, "/v1/models")?;
    let model = &models["data"][0]["id"];
    for number in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        // Whoever got no stream is no loss; what is wrong with the router shows in its own count.
        drop(hang_up(address, model, number));
        std::thread::sleep(HANG_UP_EVERY);
    }
    Ok(())
}

fn hang_up(address: SocketAddr, model: &Value, number: u64) -> std::io::Result<()> {
    let text = format!("Client {number} asks for a long story. ").repeat(60);
    let messages = serde_json::json!([{"role": "user", "content": text}]);
    let body =
        serde_json::json!({"model": model, "messages": messages, "max_tokens": 2_000, "stream": true}).to_string();
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(HTTP_TIMEOUT))?;
    let length = body.len();
    write!(
        stream,
        "POST /v1/chat/completions HTTP/1.1\r\nhost: soak\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )?;
    stream.read_exact(&mut [0; 600])
}
