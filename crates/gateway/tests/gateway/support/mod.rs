//! A gateway before fake engines, and a client that reads it piece by piece.

pub mod engine;
pub mod front;

use self::engine::{Fake, PATIENCE};
use bytes::Bytes;
use homing_gateway::{EngineKind, Gateway, GatewayClocks, GatewayConfig, TurnLog, WorkerSpec};
use homing_model::{ChatInput, Vocabulary};
use homing_router::event::Role;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::{Notify, broadcast};

/// A gateway and its engines.
pub struct Cluster {
    pub gateway: Gateway,
    pub engines: Vec<Fake>,
    pub turns: broadcast::Receiver<TurnLog>,
    pub client: Caller,
}

pub fn quick() -> GatewayClocks {
    GatewayClocks {
        probe_every: Duration::from_millis(20),
        // Generous: what is dead here refuses connections at once, and the machine may be busy.
        probe_timeout: Duration::from_secs(5),
        poll_every: Duration::from_millis(20),
        retry_cap: Duration::from_millis(50),
        drain: Duration::from_millis(500),
        ..GatewayClocks::default()
    }
}

pub fn config(engines: &[Fake], roles: &[Role]) -> GatewayConfig {
    let worker = |(engine, role): (&Fake, &Role)| WorkerSpec {
        role: Some(*role),
        transfers: Some(true),
        ..WorkerSpec::new(engine.url(), EngineKind::Vllm)
    };
    let mut config = GatewayConfig {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        workers: engines.iter().zip(roles).map(worker).collect(),
        tokenizer: Some("tiny".to_owned()),
        clocks: quick(),
        ..GatewayConfig::default()
    };
    // Prompts of tests are short; let them go through a prefill worker all the same.
    config.router.policy = "homing:local_tokens=8".parse().unwrap();
    config.router.clocks.backoff_base = Duration::from_millis(1);
    config.router.clocks.backoff_cap = Duration::from_millis(20);
    config
}

impl Cluster {
    /// Starts and waits until the fleet is ready.
    pub async fn start(roles: &[Role]) -> Self {
        Self::start_with(roles, |_| {}).await
    }

    pub async fn start_with(roles: &[Role], change: impl FnOnce(&mut GatewayConfig)) -> Self {
        let mut engines = Vec::new();
        for _ in roles {
            engines.push(Fake::start().await);
        }
        let mut config = config(&engines, roles);
        change(&mut config);
        let gateway = Gateway::start(config).await.unwrap();
        let (turns, client) = (gateway.turns(), Caller::new(gateway.local_addr()));
        let cluster = Self {
            gateway,
            engines,
            turns,
            client,
        };
        let alive = |workers: &Value| {
            let workers = workers["data"].as_array().unwrap();
            workers.len() == roles.len() && workers.iter().all(|worker| worker["state"] == "degraded")
        };
        cluster
            .client
            .until("/admin/workers", "all workers joined", alive)
            .await;
        cluster
    }

    /// The next turn that ended.
    pub async fn turn(&mut self) -> TurnLog {
        tokio::time::timeout(PATIENCE, self.turns.recv())
            .await
            .expect("a turn ends")
            .unwrap()
    }

    /// Waits until nothing is in flight and nothing booked.
    pub async fn until_idle(&self) {
        let idle = |page: &Value| {
            let empty = |worker: &Value| {
                worker["in_flight"]
                    .as_object()
                    .unwrap()
                    .values()
                    .all(|value| value == 0)
            };
            page["in_flight_requests"] == 0
                && page["queued_requests"] == 0
                && page["data"].as_array().unwrap().iter().all(empty)
        };
        self.client.until("/admin/workers", "nothing in flight", idle).await;
    }
}

/// An HTTP client of one address.
#[derive(Clone)]
pub struct Caller {
    base: String,
    client: Client<HttpConnector, Full<Bytes>>,
}

/// A whole answer.
pub struct Whole {
    pub status: StatusCode,
    pub headers: http::HeaderMap,
    pub text: String,
}

impl Whole {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{}: {error}", self.text))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }
}

impl Caller {
    pub fn new(address: SocketAddr) -> Self {
        Self {
            base: format!("http://{address}"),
            client: Client::builder(TokioExecutor::new()).build_http(),
        }
    }

    pub async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Response<Incoming> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body.into())).unwrap();
        tokio::time::timeout(PATIENCE, self.client.request(request))
            .await
            .expect("an answer begins")
            .unwrap()
    }

    pub async fn get(&self, path: &str) -> Whole {
        whole(self.send(Method::GET, path, &[], "").await).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Whole {
        whole(self.send(Method::POST, path, &[], body.to_string()).await).await
    }

    /// Begins a stream.
    pub async fn stream(&self, path: &str, body: &Value) -> Events {
        Events::new(self.send(Method::POST, path, &[], body.to_string()).await)
    }

    /// Asks for a page again and again until it is as expected.
    pub async fn until(&self, path: &str, what: &str, holds: impl Fn(&Value) -> bool) {
        let wait = async {
            loop {
                let page = self.get(path).await.json();
                if holds(&page) {
                    return;
                }
                tokio::task::yield_now().await;
            }
        };
        if tokio::time::timeout(PATIENCE, wait).await.is_err() {
            panic!("waited in vain for: {what}; {path} says {}", self.get(path).await.text);
        }
    }
}

pub async fn whole(response: Response<Incoming>) -> Whole {
    let (head, body) = response.into_parts();
    let body = tokio::time::timeout(PATIENCE, body.collect())
        .await
        .expect("an answer ends")
        .unwrap()
        .to_bytes();
    Whole {
        status: head.status,
        headers: head.headers,
        text: String::from_utf8(body.to_vec()).unwrap(),
    }
}

/// A stream's events as they come.
pub struct Events {
    pub status: StatusCode,
    pub headers: http::HeaderMap,
    body: Incoming,
    decoder: homing_wire::sse::SseDecoder,
}

impl Events {
    pub fn new(response: Response<Incoming>) -> Self {
        let (head, body) = response.into_parts();
        Self {
            status: head.status,
            headers: head.headers,
            body,
            decoder: homing_wire::sse::SseDecoder::default(),
        }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// The next event's data; `None` at the end of the stream.
    pub async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(event) = self.decoder.poll().unwrap() {
                return Some(String::from_utf8(event.data.to_vec()).unwrap());
            }
            let frame = tokio::time::timeout(PATIENCE, self.body.frame())
                .await
                .expect("an event or the end comes")?;
            if let Some(bytes) = frame.expect("the stream is not cut").data_ref() {
                self.decoder.push(bytes);
            }
        }
    }

    /// All that is left: the JSON of the events, and whether the end was marked.
    pub async fn rest(&mut self) -> (Vec<Value>, bool) {
        let mut events = Vec::new();
        while let Some(data) = self.next().await {
            if data == "[DONE]" {
                assert_eq!(self.next().await, None, "nothing follows the end");
                return (events, true);
            }
            events.push(serde_json::from_str(&data).unwrap_or_else(|error| panic!("{data}: {error}")));
        }
        (events, false)
    }
}

/// The text of chunks of either kind.
pub fn text_of(events: &[Value]) -> String {
    let text = |event: &Value| {
        let choice = &event["choices"][0];
        choice["delta"]["content"]
            .as_str()
            .or(choice["text"].as_str())
            .unwrap_or_default()
            .to_owned()
    };
    events.iter().map(text).collect()
}

/// A conversation of some length.
pub fn messages(words: usize) -> Value {
    conversation("word", words)
}

/// A conversation that shares nothing with those about other words.
pub fn conversation(word: &str, words: usize) -> Value {
    json!([{"role": "user", "content": format!("{word} ").repeat(words)}])
}

/// Its tokens, as engines and router see them.
pub fn tokens_of(messages: &Value) -> Vec<u32> {
    let input = ChatInput {
        messages,
        tools: None,
        add_generation_prompt: true,
        unix_seconds: 0,
    };
    Vocabulary::tiny().encode_chat(&input).unwrap()
}

pub fn chat(messages: &Value, max_tokens: usize, stream: bool) -> Value {
    json!({"model": engine::MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": stream})
}

/// Waits until something that tells of its changes is in a state; says what was seen of it where it never is.
pub async fn until(changed: &Notify, what: &str, holds: impl Fn() -> bool, seen: impl Fn() -> String) {
    let wait = async {
        loop {
            // Listened for before the look, so that no change falls between the two.
            let change = changed.notified();
            tokio::pin!(change);
            change.as_mut().enable();
            if holds() {
                return;
            }
            change.await;
        }
    };
    if tokio::time::timeout(PATIENCE, wait).await.is_err() {
        panic!("waited in vain for: {what}; {}", seen());
    }
}
