//! What a client is told when its request is not served: OpenAI's error object, as a body or as an event of a stream.
//!
//! One type for both, so that no failure can be answered 200 in silence. It does not decide what failed.

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use homing_router::action::{Path, RouteError};
use homing_units::Duration;
use homing_wire::openai::{ApiError, ErrorKind};
use homing_wire::sse;
use http::{HeaderValue, StatusCode, header};

/// An error for a client, and when it may come again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rejection {
    pub(crate) error: ApiError,
    pub(crate) retry_after: Option<Duration>,
}

impl From<ApiError> for Rejection {
    fn from(error: ApiError) -> Self {
        Self {
            error,
            retry_after: None,
        }
    }
}

impl Rejection {
    pub(crate) fn new(kind: ErrorKind, code: &str, message: impl Into<String>) -> Self {
        ApiError::new(kind, message).with_code(code).into()
    }

    /// Something in the router broke (500): said plainly, with nothing of its inside.
    pub(crate) fn internal() -> Self {
        Self::new(
            ErrorKind::Internal,
            "internal_error",
            "the router failed to handle this request",
        )
    }

    /// The router is going down (503).
    pub(crate) fn shutting_down() -> Self {
        Self::new(ErrorKind::Unavailable, "shutting_down", "the router is shutting down")
    }

    /// What the core's verdict means to a client. Of `Refused` the caller passes on the engine's own answer where it
    /// has one.
    pub(crate) fn of_route(verdict: RouteError, prompt_tokens: u32, output_tokens: u32) -> Self {
        let (kind, message) = match verdict {
            RouteError::Overloaded { retry_after } => {
                let message = "the router's queue is full, try again later";
                let rejection = Self::new(ErrorKind::RateLimit, verdict.kind(), message);
                return Self {
                    retry_after: Some(retry_after),
                    ..rejection
                };
            }
            // OpenAI's own code and not the core's name for it: agents compact their history on it.
            RouteError::ContextTooLong { limit } => {
                let (prompt, output) = (u64::from(prompt_tokens), u64::from(output_tokens));
                return ApiError::context_too_long(prompt, output, u64::from(limit)).into();
            }
            RouteError::QueueTimeout => (ErrorKind::Unavailable, "no worker had room for this request in time"),
            RouteError::NoWorker => (
                ErrorKind::Unavailable,
                "no worker that could serve this request is alive",
            ),
            RouteError::TransferFailed => (ErrorKind::Upstream, "the kv cache did not reach the decode worker"),
            RouteError::WorkerLost => (
                ErrorKind::Upstream,
                "the worker was lost and the answer could not be continued exactly",
            ),
            RouteError::EngineFailed => (ErrorKind::Upstream, "the worker answered with an error of its own"),
            RouteError::Refused => (ErrorKind::Upstream, "the worker refused this request"),
        };
        Self::new(kind, verdict.kind(), message)
    }

    /// The error as an event of a stream that has begun.
    pub(crate) fn event(&self) -> Bytes {
        sse::encode_data(&self.error.to_body())
    }

    /// The code, for logs and metrics.
    pub(crate) fn code(&self) -> &str {
        self.error.code.as_deref().unwrap_or(&self.error.kind)
    }
}

impl IntoResponse for Rejection {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let json = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
        let mut response = (status, json, self.error.to_body()).into_response();
        // For the paths on which errors have another form.
        response.extensions_mut().insert(self.error);
        if let Some(after) = self.retry_after {
            // The header counts whole seconds; rounding down would invite the client back too early.
            let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        response
    }
}

/// The name of a request's path in metrics and logs, also before it has one.
pub(crate) fn path_name(path: Option<Path>) -> &'static str {
    path.map_or("none", Path::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(verdict: RouteError, status: u16, code: &str, retry_after: Option<&str>) {
        let rejection = Rejection::of_route(verdict, 10, 1);
        let body: serde_json::Value = serde_json::from_slice(&rejection.error.to_body()).unwrap();
        assert_eq!(body["error"]["code"], code, "{verdict:?}");
        for field in ["message", "type", "param", "code"] {
            assert!(body["error"].get(field).is_some(), "{verdict:?} lacks `{field}`");
        }
        let response = rejection.into_response();
        assert_eq!(response.status().as_u16(), status, "{verdict:?}");
        let header = response
            .headers()
            .get("retry-after")
            .map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(header.as_deref(), retry_after, "{verdict:?}");
    }

    #[test]
    fn each_verdict_has_its_status() {
        let retry_after = Duration::from_millis(1_200);
        check(RouteError::Overloaded { retry_after }, 429, "overloaded", Some("2"));
        check(
            RouteError::Overloaded {
                retry_after: Duration::ZERO,
            },
            429,
            "overloaded",
            Some("1"),
        );
        check(
            RouteError::ContextTooLong { limit: 8 },
            400,
            "context_length_exceeded",
            None,
        );
        check(RouteError::NoWorker, 503, "no_worker", None);
        check(RouteError::QueueTimeout, 503, "queue_timeout", None);
        check(RouteError::TransferFailed, 502, "transfer_failed", None);
        check(RouteError::WorkerLost, 502, "worker_lost", None);
        check(RouteError::EngineFailed, 502, "engine_failed", None);
        check(RouteError::Refused, 502, "refused", None);
    }
}
