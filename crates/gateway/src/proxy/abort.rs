//! What an SGLang server is told beside its requests: that one is not wanted any more, that a session is over.
//!
//! One that is not told of a request's end takes seconds to notice that nobody listens any more. vLLM cannot be told
//! anything of the kind; what embedded workers are told is in `release`.

use crate::upstream::Upstream;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, header};
use http_body_util::Full;
use serde_json::{Value, json};
use std::time::Duration;

/// How long telling may take.
const TELL_TIMEOUT: Duration = Duration::from_secs(2);

/// Tells a server that what it was asked for is not wanted any more, when it is dropped before that has ended.
pub(crate) struct Abort {
    upstream: Upstream,
    /// Taken where there is nothing to abort any more.
    request: Option<Request<Full<Bytes>>>,
}

impl Abort {
    /// `uri` is the server's `/abort_request`, `headers` are the leg's own.
    pub(crate) fn of_request(upstream: Upstream, uri: &str, headers: &HeaderMap, rid: &str) -> Self {
        Self {
            upstream,
            request: command(uri, headers, &json!({ "rid": rid })),
        }
    }

    /// It has ended by itself.
    pub(crate) fn ended(&mut self) {
        self.request = None;
    }
}

impl Drop for Abort {
    fn drop(&mut self) {
        tell_server(self.upstream.clone(), self.request.take());
    }
}

/// A command. A server with an API key wants it here, too.
pub(crate) fn command(uri: &str, headers: &HeaderMap, body: &Value) -> Option<Request<Full<Bytes>>> {
    let mut request = Request::builder()
        .method(Method::POST)
        .uri(uri)
        .header(header::CONTENT_TYPE, "application/json");
    if let Some(key) = headers.get(header::AUTHORIZATION) {
        request = request.header(header::AUTHORIZATION, key);
    }
    request.body(Full::from(body.to_string())).ok()
}

/// Sends a command without waiting for it. One that does not get through costs what it would have saved: a server frees an
/// aborted request once it notices the closed connection, and a session once it needs the room.
pub(crate) fn tell_server(upstream: Upstream, command: Option<Request<Full<Bytes>>>) {
    let (Some(command), Ok(runtime)) = (command, tokio::runtime::Handle::try_current()) else {
        return;
    };
    runtime.spawn(async move {
        if let Err(error) = upstream.exchange(command, TELL_TIMEOUT).await {
            tracing::debug!(error, "an engine could not be told");
        }
    });
}
