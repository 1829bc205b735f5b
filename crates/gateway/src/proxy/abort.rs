//! A leg's end by name: an SGLang server that is not told takes seconds to notice that nobody listens any more.

use crate::upstream::Upstream;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, header};
use http_body_util::Full;
use std::time::Duration;

/// How long telling may take; the connection was closed as well.
const ABORT_TIMEOUT: Duration = Duration::from_secs(2);

/// Tells a server that a request is not wanted any more, when it is dropped before the request has ended.
pub(crate) struct Abort {
    upstream: Upstream,
    /// Taken where there is nothing to abort any more.
    request: Option<Request<Full<Bytes>>>,
}

impl Abort {
    /// `uri` is the server's `/abort_request`, `headers` are the leg's own: a server with an API key wants it here, too.
    pub(crate) fn new(upstream: Upstream, uri: &str, headers: &HeaderMap, rid: &str) -> Self {
        let body = serde_json::json!({ "rid": rid }).to_string();
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(uri)
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(key) = headers.get(header::AUTHORIZATION) {
            request = request.header(header::AUTHORIZATION, key);
        }
        Self {
            upstream,
            request: request.body(Full::from(body)).ok(),
        }
    }

    /// The request has ended by itself.
    pub(crate) fn ended(&mut self) {
        self.request = None;
    }
}

impl Drop for Abort {
    fn drop(&mut self) {
        let (Some(request), Ok(runtime)) = (self.request.take(), tokio::runtime::Handle::try_current()) else {
            return;
        };
        let upstream = self.upstream.clone();
        runtime.spawn(async move {
            // A server that cannot be told notices the closed connection.
            if let Err(error) = upstream.exchange(request, ABORT_TIMEOUT).await {
                tracing::debug!(error, "a request could not be aborted by name");
            }
        });
    }
}
