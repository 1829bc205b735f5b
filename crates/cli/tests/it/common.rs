//! A cluster of the real binary for tests: started on free ports, spoken to over HTTP, stopped when dropped.

use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long anything may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Runs the binary to its end.
pub fn homing(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_homing"))
        .args(arguments)
        .env("NO_COLOR", "1")
        .output()
        .expect("the binary starts")
}

/// `homing up`, running.
pub struct Up {
    child: Child,
    pub url: String,
    /// Name and address of each worker.
    pub workers: Vec<(String, String)>,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Up {
    /// Starts it on a free port and waits until it serves.
    pub async fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_homing"))
            .args(["up", "--port", "0"])
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let mut stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        let (mut url, mut workers) = (None, Vec::new());
        loop {
            let mut line = String::new();
            assert!(
                stdout.read_line(&mut line).expect("its output is text") > 0,
                "`homing up` ended before it served"
            );
            let words: Vec<&str> = line.split_whitespace().collect();
            match words.as_slice() {
                ["homing", "is", "up", "at", address, ..] => url = Some((*address).to_owned()),
                [name, _, address] if address.starts_with("http://") => {
                    workers.push(((*name).to_owned(), (*address).to_owned()));
                }
                ["one", "line", "for", ..] => break,
                _ => {}
            }
        }
        let url = url.expect("it says its address");
        let up = Self {
            child,
            url,
            workers,
            lines: follow(stdout),
        };
        up.until("the workers are ready", async |up: &Self| {
            up.get("/ready").await.0 == 200
        })
        .await;
        up
    }

    /// Waits for something to become true.
    pub async fn until(&self, what: &str, mut holds: impl AsyncFnMut(&Self) -> bool) {
        let since = Instant::now();
        while !holds(self).await {
            assert!(since.elapsed() < PATIENCE, "it did not come true that {what}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Whether one of its live lines has all these words.
    pub fn said(&self, words: &[&str]) -> bool {
        let lines = self.lines.lock().expect("its reader does not panic");
        lines.iter().any(|line| words.iter().all(|word| line.contains(word)))
    }

    /// Status and body of a page.
    pub async fn get(&self, path: &str) -> (u16, Bytes) {
        get(&format!("{}{path}", self.url)).await
    }

    /// A page of JSON.
    pub async fn json(&self, path: &str) -> Value {
        serde_json::from_slice(&self.get(path).await.1).expect("JSON")
    }

    /// Posts a body and waits for the whole answer.
    pub async fn post(&self, path: &str, session: Option<&str>, body: &Value) -> Answer {
        post(&format!("{}{path}", self.url), session, body).await
    }

    /// The process id of the worker with this name, found by its command line.
    pub fn worker_pid(&self, name: &str) -> u32 {
        let own = self.child.id();
        let entries = std::fs::read_dir("/proc").expect("this test needs Linux");
        let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
        let is_worker = |pid: &u32| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            status.contains(&format!("PPid:\t{own}\n")) && command.contains(&format!("--name\0{name}\0"))
        };
        pids.into_iter().find(is_worker).expect("the worker runs")
    }

    /// Asks it to stop, as Ctrl-C does, and waits for it.
    pub fn stop(mut self) -> std::process::ExitStatus {
        signal(self.child.id(), "INT");
        self.child.wait().expect("it ends")
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        // It is gone already where these fail. The workers end with its standard output and their standard input.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Collects the lines of a program until it ends.
fn follow(stdout: BufReader<ChildStdout>) -> Arc<Mutex<Vec<String>>> {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let collected = Arc::clone(&lines);
    std::thread::spawn(move || {
        for line in stdout.lines().map_while(Result::ok) {
            collected.lock().expect("no reader panics").push(line);
        }
    });
    lines
}

/// Sends a signal to a process that this test started.
pub fn signal(pid: u32, name: &str) {
    let status = Command::new("kill")
        .args([format!("-{name}"), pid.to_string()])
        .status()
        .expect("kill starts");
    assert!(status.success(), "no process {pid}");
}

/// A whole answer.
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    /// A header's text; empty if there is none.
    pub fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
    }

    /// The JSON documents of a stream, without its end mark.
    pub fn events(&self) -> Vec<Value> {
        let text = std::str::from_utf8(&self.body).expect("a stream is text");
        let data = text
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .filter(|data| *data != "[DONE]");
        data.map(|data| serde_json::from_str(data).expect("JSON")).collect()
    }

    /// The text of a streamed chat answer.
    pub fn text(&self) -> String {
        let events = self.events();
        events
            .iter()
            .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
            .collect()
    }
}

/// A streamed chat request that goes on to its limit.
pub fn chat(messages: &Value, max_tokens: u32) -> Value {
    json!({
        "model": "tiny", "messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true,
        "stream": true, "stream_options": {"include_usage": true},
    })
}

/// Posts a body and waits for the whole answer.
pub async fn post(url: &str, session: Option<&str>, body: &Value) -> Answer {
    let mut request = Request::post(url).header("content-type", "application/json");
    if let Some(session) = session {
        request = request.header("x-homing-session", session);
    }
    let request = request
        .body(Full::new(Bytes::from(body.to_string())))
        .expect("a request");
    let response = client().request(request).await.expect("the server answers");
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    let body = response
        .into_body()
        .collect()
        .await
        .map(|body| body.to_bytes())
        .unwrap_or_default();
    Answer { status, headers, body }
}

/// Status and body of a page.
pub async fn get(url: &str) -> (u16, Bytes) {
    let request = Request::get(url).body(Full::default()).expect("a request");
    match client().request(request).await {
        Ok(response) => {
            let status = response.status().as_u16();
            (
                status,
                response
                    .into_body()
                    .collect()
                    .await
                    .map(|body| body.to_bytes())
                    .unwrap_or_default(),
            )
        }
        Err(_) => (0, Bytes::new()),
    }
}

fn client() -> Client<HttpConnector, Full<Bytes>> {
    Client::builder(TokioExecutor::new()).build_http()
}
