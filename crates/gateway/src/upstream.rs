//! HTTP to engines: one pooled client for legs, probes and polls, and what a failed exchange says about its cause.
//!
//! Sockets have `TCP_NODELAY`: a token must not wait for the next one. There is no time limit on a leg here; how long
//! a phase may take is the core's business, and it ends a leg by cancelling it (the connection is closed).

use crate::server::READ_BYTES;
use bytes::Bytes;
use homing_router::action::KvUse;
use homing_router::event::FailureCause;
use homing_wire::openai::ApiError;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use std::time::Duration;

/// How long making a connection may take; engines are on the same network.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Idle connections are closed before common servers' own limit (uvicorn: 5 s), lest one dies as it is taken.
const POOL_IDLE: Duration = Duration::from_secs(4);
/// Idle connections kept for each engine.
const POOL_MAX_IDLE: usize = 64;
/// Longest whole answer that is taken from an engine.
pub(crate) const ANSWER_BYTES_MAX: usize = 64 << 20;

/// The client. Clones share its pool.
#[derive(Clone, Debug)]
pub(crate) struct Upstream {
    client: Client<HttpConnector, Full<Bytes>>,
}

/// An engine's answer, to be passed on where it refused the request.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) content_type: Option<HeaderValue>,
    pub(crate) body: Bytes,
}

/// A leg that failed.
#[derive(Clone, Debug)]
pub(crate) struct LegError {
    pub(crate) cause: FailureCause,
    /// For the log.
    pub(crate) detail: String,
    /// What the engine answered, if it did.
    pub(crate) answer: Option<Answer>,
}

impl LegError {
    pub(crate) fn new(cause: FailureCause, detail: impl Into<String>) -> Self {
        Self {
            cause,
            detail: detail.into(),
            answer: None,
        }
    }
}

impl LegError {
    /// An error that came as an event of a stream; `data` is the event's.
    pub(crate) fn in_stream(cause: FailureCause, status: StatusCode, detail: String, data: &Bytes) -> Self {
        Self {
            cause,
            detail,
            answer: Some(Answer {
                status,
                content_type: Some(HeaderValue::from_static("application/json")),
                body: data.clone(),
            }),
        }
    }
}

impl Upstream {
    pub(crate) fn new() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let client = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(POOL_IDLE)
            .pool_timer(hyper_util::rt::TokioTimer::new())
            .pool_max_idle_per_host(POOL_MAX_IDLE)
            .http1_max_buf_size(READ_BYTES)
            .build(connector);
        Self { client }
    }

    /// Sends a leg; the answer's body is still to come. An answer that is no success is an error with its body.
    pub(crate) async fn leg(
        &self,
        uri: String,
        headers: HeaderMap,
        body: Bytes,
        kv: KvUse,
    ) -> Result<Response<Incoming>, LegError> {
        let unreachable = |detail: String| LegError::new(FailureCause::Unreachable, detail);
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(&uri)
            .body(Full::new(body))
            .map_err(|error| {
                LegError::new(
                    FailureCause::Engine,
                    format!("expected `{uri}` to be an engine's address: {error}"),
                )
            })?;
        *request.headers_mut() = headers;
        request
            .headers_mut()
            .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let response = self
            .client
            .request(request)
            .await
            .map_err(|error| unreachable(chain(&error)))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let answer = whole(response).await.map_err(unreachable)?;
        let error = ApiError::parse(answer.status.as_u16(), &answer.body);
        let cause = cause_of(answer.status, error.code.as_deref(), kv);
        let detail = format!("answered `{}`: {}", answer.status, snippet(&answer.body));
        Err(LegError {
            cause,
            detail,
            answer: Some(answer),
        })
    }

    /// One short exchange: a probe, a poll, a passed-on question.
    pub(crate) async fn exchange(&self, request: Request<Full<Bytes>>, timeout: Duration) -> Result<Answer, String> {
        let exchange = async {
            let response = self.client.request(request).await.map_err(|error| chain(&error))?;
            whole(response).await
        };
        tokio::time::timeout(timeout, exchange)
            .await
            .map_err(|_| format!("no answer within {timeout:?}"))?
    }

    /// A short `GET`; an answer that is no success is an error.
    pub(crate) async fn get(&self, uri: &str, timeout: Duration) -> Result<Bytes, String> {
        let request = Request::builder()
            .uri(uri)
            .body(Full::default())
            .map_err(|error| error.to_string())?;
        let answer = self.exchange(request, timeout).await?;
        if answer.status.is_success() {
            Ok(answer.body)
        } else {
            Err(format!("answered `{}`", answer.status))
        }
    }
}

/// Reads an answer to its end.
pub(crate) async fn whole(response: Response<Incoming>) -> Result<Answer, String> {
    let status = response.status();
    let content_type = response.headers().get(header::CONTENT_TYPE).cloned();
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
    let body = body
        .map_err(|error| format!("the answer broke off: {error}"))?
        .to_bytes();
    Ok(Answer {
        status,
        content_type,
        body,
    })
}

/// What an engine's error says. The embedded worker names its errors. vLLM answers 500 where the KV to be imported could
/// not be loaded, so a 500 of an importing leg speaks of the link first: taking it for the engine's own would blame a
/// healthy worker.
pub(crate) fn cause_of(status: StatusCode, code: Option<&str>, kv: KvUse) -> FailureCause {
    match (code, status.as_u16(), kv) {
        (Some("kv_transfer_failed"), ..) => FailureCause::Transfer,
        (Some("engine_failed"), ..) => FailureCause::Engine,
        // It says itself that it is going.
        (Some("aborted"), ..) => FailureCause::Unreachable,
        (_, 429 | 503, _) => FailureCause::Busy,
        (_, 400..=499, _) => FailureCause::Invalid,
        (_, _, KvUse::Import { .. }) => FailureCause::Transfer,
        (_, _, KvUse::Local | KvUse::Export) => FailureCause::Engine,
    }
}

/// The status that an error means which comes in a stream that began with 200: its code, where that is one.
pub(crate) fn status_in_stream(code: Option<&str>) -> StatusCode {
    let status = code.and_then(|code| code.parse().ok());
    let status = status.and_then(|status| StatusCode::from_u16(status).ok());
    status
        .filter(|status| status.is_client_error() || status.is_server_error())
        .unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

/// An error and what lies under it: hyper's own message alone is only "client error (Connect)".
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    text
}

/// The first part of a body, for the log.
fn snippet(body: &[u8]) -> String {
    const LENGTH: usize = 200;
    String::from_utf8_lossy(&body[..body.len().min(LENGTH)]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_units::WorkerId;

    #[test]
    fn an_error_speaks_of_what_it_is_about() {
        let import = KvUse::Import { from: WorkerId(0) };
        let check = |status: u16, code: Option<&str>, kv, cause| {
            assert_eq!(
                cause_of(StatusCode::from_u16(status).unwrap(), code, kv),
                cause,
                "{status} {code:?} {kv:?}"
            );
        };
        check(500, None, KvUse::Local, FailureCause::Engine);
        check(500, None, KvUse::Export, FailureCause::Engine);
        check(500, Some("500"), import, FailureCause::Transfer);
        check(500, Some("engine_failed"), import, FailureCause::Engine);
        check(500, Some("kv_transfer_failed"), import, FailureCause::Transfer);
        check(503, None, import, FailureCause::Busy);
        check(503, Some("aborted"), KvUse::Local, FailureCause::Unreachable);
        check(429, None, KvUse::Local, FailureCause::Busy);
        check(422, None, import, FailureCause::Invalid);
        check(404, None, KvUse::Local, FailureCause::Invalid);
    }
}
