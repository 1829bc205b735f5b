//! Workers to test, and a client for them.

use bytes::Bytes;
use homing_engine::StepModel;
use homing_engine::api::Snapshot;
use homing_model::{Model, TINY_SEED, Vocabulary};
use homing_wire::metrics_text::Metrics;
use homing_wire::sse::SseDecoder;
use homing_worker::{Compute, Limits, Probe, Served, Worker, WorkerConfig};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};
use hyper_util::client::legacy::Client as HyperClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

pub(crate) const COMPLETIONS: &str = "/v1/completions";
pub(crate) const CHAT: &str = "/v1/chat/completions";

/// The longest that anything here may take, on the busiest machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// One model for all tests.
static TINY: LazyLock<Arc<Model>> = LazyLock::new(|| Arc::new(Model::tiny(TINY_SEED)));

/// The settings of a worker with the tiny model and a pool of `blocks` blocks.
pub fn tiny(name: &str, blocks: u32) -> WorkerConfig {
    WorkerConfig {
        name: name.to_owned(),
        compute: Compute::Loaded(Served::model(Vocabulary::tiny(), TINY.clone())),
        kv_tokens: Some(blocks * 16),
        limits: Limits {
            max_batch_tokens: Some(64),
            // No test that looks at what is held waits for it: a hundred pulls of one export take a busy machine long.
            export_lease: 10 * PATIENCE,
            import_timeout: 10 * PATIENCE,
            ..Limits::default()
        },
        ..WorkerConfig::default()
    }
}

/// The settings of a worker that models an accelerator's time.
pub fn steps(name: &str) -> WorkerConfig {
    let model = StepModel::profile("h200-qwen3-30b").expect("a built-in profile");
    WorkerConfig {
        name: name.to_owned(),
        compute: Compute::Steps(Box::new(model)),
        ..WorkerConfig::default()
    }
}

pub async fn start(config: WorkerConfig) -> Worker {
    Worker::start(config).await.expect("a worker on free ports starts")
}

/// A client of one worker.
#[derive(Clone)]
pub struct Client {
    address: SocketAddr,
    http: HyperClient<HttpConnector, Full<Bytes>>,
}

/// An answer, read to its end.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: hyper::HeaderMap,
    pub body: Bytes,
}

impl Client {
    pub fn of(worker: &Worker) -> Self {
        Self {
            address: worker.endpoints().http,
            http: HyperClient::builder(TokioExecutor::new()).build_http(),
        }
    }

    pub async fn open(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Bytes) -> Response<Incoming> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("http://{}{path}", self.address));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body)).expect("a valid request");
        let sent = tokio::time::timeout(PATIENCE, self.http.request(request)).await;
        sent.expect("the worker answers in time").expect("the worker answers")
    }

    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Bytes) -> Answer {
        let response = self.open(method, path, headers, body).await;
        let (status, headers) = (response.status(), response.headers().clone());
        let read = tokio::time::timeout(PATIENCE, response.into_body().collect()).await;
        let body = read
            .expect("the answer ends in time")
            .expect("the answer is whole")
            .to_bytes();
        Answer { status, headers, body }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[], Bytes::new()).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send("POST", path, &[], body.to_string().into()).await
    }

    pub async fn complete(&self, body: &Value) -> Answer {
        self.post("/v1/completions", body).await
    }

    /// A greedy completion that must succeed.
    pub async fn greedy(&self, prompt: &[u32], tokens: u32, params: Value) -> Value {
        let answer = self.complete(&greedy(prompt, tokens, params)).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    }

    /// What the prefill leg answers.
    pub async fn export(&self, prompt: &[u32]) -> Value {
        let answer = self
            .greedy(prompt, 1, json!({"do_remote_decode": true, "do_remote_prefill": false}))
            .await;
        assert_eq!(answer["kv_transfer_params"]["do_remote_prefill"], true, "{answer}");
        answer
    }

    pub async fn metrics(&self) -> Metrics {
        let answer = self.get("/metrics").await;
        Metrics::parse(std::str::from_utf8(&answer.body).expect("the page is text"))
    }

    pub async fn probe(&self) -> Probe {
        serde_json::from_slice(&self.get("/homing/probe").await.body).expect("a probe's answer")
    }

    /// Waits until `done` holds of the load. Each look is a round trip, so that this is no busy loop.
    pub async fn until(&self, what: &str, done: impl Fn(&Probe) -> bool) -> Probe {
        let looking = async {
            loop {
                let probe = self.probe().await;
                if done(&probe) {
                    return probe;
                }
            }
        };
        tokio::time::timeout(PATIENCE, looking)
            .await
            .unwrap_or_else(|_| panic!("waited for: {what}"))
    }

    /// Waits until nothing is in use; the load then.
    pub async fn until_idle(&self) -> Snapshot {
        let idle = |probe: &Probe| {
            let load = &probe.load;
            let requests = load.running + load.waiting + load.importing + load.exporting;
            requests == 0 && load.blocks_free + load.blocks_evictable == load.blocks_total
        };
        self.until("nothing in use", idle).await.load
    }
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The error, which must be one in OpenAI's form.
    pub fn error(&self) -> Value {
        let error = self.json()["error"].clone();
        assert!(
            error["message"].as_str().is_some_and(|message| !message.is_empty()),
            "{self:?}"
        );
        assert!(error["type"].is_string(), "{self:?}");
        error
    }

    /// The data of a stream's events.
    pub fn events(&self) -> Vec<String> {
        let mut decoder = SseDecoder::new(1 << 20);
        decoder.push(&self.body);
        let mut events = Vec::new();
        while let Some(event) = decoder.poll().expect("a well-formed stream") {
            events.push(String::from_utf8(event.data.to_vec()).expect("events are text"));
        }
        events
    }
}

/// The body of a greedy completion.
pub fn greedy(prompt: &[u32], tokens: u32, params: Value) -> Value {
    json!({
        "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true, "return_token_ids": true,
        "kv_transfer_params": params,
    })
}

/// A prompt that no other number gives.
pub fn prompt(number: u32, length: usize) -> Vec<u32> {
    use rand::RngExt as _;
    let mut rng = homing_units::rng_for(u64::from(number), "prompt");
    (0..length).map(|_| rng.random_range(0..256)).collect()
}

pub fn token_ids(answer: &Value) -> Vec<u32> {
    serde_json::from_value(answer["choices"][0]["token_ids"].clone()).unwrap_or_else(|_| panic!("no ids: {answer}"))
}

/// A small body of an endpoint with one member more.
pub(crate) fn with_member(path: &str, name: &str, value: &Value) -> String {
    let mut body = match path {
        CHAT => json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        _ => json!({"prompt": "a", "max_tokens": 2}),
    };
    body[name] = value.clone();
    body.to_string()
}
