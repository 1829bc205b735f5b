//! One turn over HTTP: sends it, reads the stream as it comes, and takes the times that a client sees.

use bytes::Bytes;
use homing_units::Duration;
use homing_wire::openai::{AnswerView, ApiError};
use homing_wire::sse::{DEFAULT_MAX_EVENT_BYTES, SseDecoder};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::time::Instant;

/// Bytes of an answer that is no stream.
const MAX_BODY_BYTES: usize = 16 << 20;

/// How long the endpoint's workers may take to be ready.
const READY_WITHIN: Duration = Duration::from_secs(30);
/// Between two looks whether they are.
const READY_POLL: Duration = Duration::from_millis(50);

/// Where turns are sent.
#[derive(Clone)]
pub struct Endpoint {
    client: Client<HttpConnector, Full<Bytes>>,
    base: String,
}

/// A request as it goes out.
pub struct Outgoing {
    /// Path, such as `/v1/completions`.
    pub path: &'static str,
    /// Name of the session.
    pub session: String,
    /// JSON.
    pub body: Bytes,
    /// How long it may take.
    pub timeout: Duration,
}

/// What became of a turn; times from when it was sent.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// From when it was due to when it was sent: making the body.
    pub made_in: Duration,
    /// To the first token; `None` where there was none.
    pub first_token: Option<Duration>,
    /// To the end.
    pub end: Duration,
    /// The longest pause between two tokens.
    pub itl_max: Duration,
    /// Tokens of the prompt, as the endpoint counts them.
    pub prompt_tokens: Option<u32>,
    /// Tokens of the answer, as the endpoint counts them.
    pub output_tokens: u32,
    /// Tokens of the prompt that were in the cache, as the engine reports them.
    pub cached_tokens: Option<u32>,
    /// `x-homing-path`.
    pub path: Option<String>,
    /// `x-homing-worker`.
    pub worker: Option<String>,
    /// What kind of error it ended with.
    pub error: Option<String>,
}

impl Endpoint {
    /// An endpoint at `url`, such as `http://127.0.0.1:8080`, with or without `/v1`.
    pub fn new(url: &str) -> Result<Self, String> {
        let expected = || format!("expected a URL such as `http://127.0.0.1:8080`, found `{url}`");
        let parsed: http::Uri = url.parse().map_err(|_| expected())?;
        if parsed.scheme_str() != Some("http") || parsed.host().is_none() {
            return Err(expected());
        }
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new()).build(connector);
        let base = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        Ok(Self { client, base })
    }

    /// The status of a page, if it answers at all.
    pub async fn status(&self, path: &str) -> Option<u16> {
        let request = Request::get(format!("{}{path}", self.base))
            .body(Full::default())
            .ok()?;
        Some(self.client.request(request).await.ok()?.status().as_u16())
    }

    /// Waits for a router's workers, in bounded time; an endpoint without `/ready` is taken as it is.
    pub async fn until_ready(&self) {
        let until = Instant::now() + READY_WITHIN;
        while Instant::now() < until && self.status("/ready").await == Some(503) {
            tokio::time::sleep(READY_POLL).await;
        }
    }

    /// Waits until so many of a router's workers are alive, in bounded time.
    pub async fn until_workers(&self, count: usize) {
        let until = Instant::now() + READY_WITHIN;
        while Instant::now() < until && self.alive_workers().await < count {
            tokio::time::sleep(READY_POLL).await;
        }
    }

    async fn alive_workers(&self) -> usize {
        let page = self.get("/admin/workers").await.ok().flatten();
        let workers = page.as_ref().and_then(|page| page["data"].as_array());
        let alive = |worker: &&serde_json::Value| matches!(worker["state"].as_str(), Some("exact" | "degraded"));
        workers.map_or(0, |workers| workers.iter().filter(alive).count())
    }

    /// The JSON at `path`, or `None` where the endpoint has no such thing.
    pub async fn get(&self, path: &str) -> anyhow::Result<Option<serde_json::Value>> {
        let request = Request::get(format!("{}{path}", self.base)).body(Full::default())?;
        let response = self.client.request(request).await?;
        if !response.status().is_success() {
            return Ok(None);
        }
        let body = Limited::new(response.into_body(), MAX_BODY_BYTES)
            .collect()
            .await
            .map_err(anyhow::Error::from_boxed)?;
        Ok(serde_json::from_slice(&body.to_bytes()).ok())
    }

    /// Sends a turn and waits for its end.
    pub async fn send(&self, outgoing: Outgoing) -> Answer {
        let sent = Instant::now();
        let mut answer = Answer::default();
        let error = match tokio::time::timeout(outgoing.timeout, self.exchange(&outgoing, sent, &mut answer)).await {
            Err(_) => Some("timeout".to_owned()),
            Ok(outcome) => outcome.err(),
        };
        answer.error = error;
        answer.end = sent.elapsed();
        answer
    }

    async fn exchange(&self, outgoing: &Outgoing, sent: Instant, answer: &mut Answer) -> Result<(), String> {
        let request = Request::post(format!("{}{}", self.base, outgoing.path))
            .header("content-type", "application/json")
            .header("x-homing-session", &outgoing.session)
            .body(Full::new(outgoing.body.clone()))
            .map_err(|_| "invalid_request".to_owned())?;
        let response = self
            .client
            .request(request)
            .await
            .map_err(|_| "unreachable".to_owned())?;
        answer.path = header(response.headers(), "x-homing-path");
        answer.worker = header(response.headers(), "x-homing-worker");
        if response.status() == StatusCode::OK {
            stream(response, sent, answer).await
        } else {
            Err(refusal(response).await)
        }
    }
}

/// Reads a stream to its end.
async fn stream(response: Response<Incoming>, sent: Instant, answer: &mut Answer) -> Result<(), String> {
    let mut body = response.into_body();
    let mut decoder = SseDecoder::new(DEFAULT_MAX_EVENT_BYTES);
    let mut last_token: Option<Instant> = None;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| "stream_broken".to_owned())?;
        let Some(bytes) = frame.data_ref() else { continue };
        decoder.push(bytes);
        while let Some(event) = decoder.poll().map_err(|_| "stream_garbled".to_owned())? {
            if event.is_done() {
                return Ok(());
            }
            let view = AnswerView::parse(&event.data).ok_or_else(|| "stream_garbled".to_owned())?;
            if let Some(error) = view.error {
                return Err(kind(&error));
            }
            if view.has_output() {
                let now = Instant::now();
                answer.first_token.get_or_insert(now - sent);
                answer.itl_max = answer.itl_max.max(last_token.map_or(Duration::ZERO, |last| now - last));
                last_token = Some(now);
            }
            if let Some(usage) = view.usage {
                answer.prompt_tokens = Some(usage.prompt_tokens);
                answer.output_tokens = usage.completion_tokens;
                answer.cached_tokens = usage.cached_tokens();
            }
        }
    }
    Err("stream_broken".to_owned())
}

/// The kind of error that an answer with another status than 200 is.
async fn refusal(response: Response<Incoming>) -> String {
    let status = response.status();
    match Limited::new(response.into_body(), MAX_BODY_BYTES).collect().await {
        Ok(body) => kind(&ApiError::parse(status.as_u16(), &body.to_bytes())),
        Err(_) => format!("http_{}", status.as_u16()),
    }
}

/// An error's code, else its type.
fn kind(error: &ApiError) -> String {
    error.code.clone().unwrap_or_else(|| error.kind.clone())
}

fn header(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_owned)
}
