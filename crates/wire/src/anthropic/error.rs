//! Errors in Anthropic's form, `{"type":"error","error":{"type","message"},"request_id"}`.

use crate::openai::ApiError;
use crate::sse::SseEvent;
use bytes::Bytes;
use serde::Serialize;

/// OpenAI's code of a prompt that does not fit.
const TOO_LONG: &str = "context_length_exceeded";

#[derive(Serialize)]
struct Envelope<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    error: Detail<'a>,
    request_id: &'a str,
}

#[derive(Serialize)]
struct Detail<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    message: &'a str,
}

/// The body of an error's answer.
#[must_use]
pub fn error_body(error: &ApiError, request_id: &str) -> Bytes {
    // Agents compact their history where they read Anthropic's own words for this.
    let too_long = (error.code.as_deref() == Some(TOO_LONG)).then(|| format!("prompt is too long: {}", error.message));
    let envelope = Envelope {
        kind: "error",
        error: Detail {
            kind: kind_of(error.status),
            message: too_long.as_deref().unwrap_or(&error.message),
        },
        request_id,
    };
    Bytes::from(serde_json::to_vec(&envelope).expect("strings always serialise"))
}

/// The event that ends a stream with an error.
#[must_use]
pub fn error_event(error: &ApiError, request_id: &str) -> Bytes {
    let event = SseEvent {
        event: Some("error".to_owned()),
        data: error_body(error, request_id),
    };
    event.encode()
}

/// Anthropic's type of an error with this status.
const fn kind_of(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        504 => "timeout_error",
        // No worker, or none with room: what Anthropic's clients try again after a pause.
        503 | 529 => "overloaded_error",
        400..=499 => "invalid_request_error",
        _ => "api_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::ErrorKind;

    #[test]
    fn errors_have_anthropics_form() {
        let check = |error: &ApiError, kind: &str, message: &str| {
            let body: serde_json::Value = serde_json::from_slice(&error_body(error, "r-1")).unwrap();
            let expected = serde_json::json!({
                "type": "error", "error": {"type": kind, "message": message}, "request_id": "r-1"});
            assert_eq!(body, expected);
        };
        check(&ApiError::invalid("bad"), "invalid_request_error", "bad");
        check(&ApiError::new(ErrorKind::NotFound, "m"), "not_found_error", "m");
        check(&ApiError::new(ErrorKind::TooLarge, "m"), "request_too_large", "m");
        check(&ApiError::new(ErrorKind::RateLimit, "m"), "rate_limit_error", "m");
        check(&ApiError::new(ErrorKind::Internal, "m"), "api_error", "m");
        check(&ApiError::new(ErrorKind::Upstream, "m"), "api_error", "m");
        check(&ApiError::new(ErrorKind::Unavailable, "m"), "overloaded_error", "m");
        let too_long = ApiError::context_too_long(9, 1, 8);
        let message = format!("prompt is too long: {}", too_long.message);
        check(&too_long, "invalid_request_error", &message);
        let event = error_event(&ApiError::invalid("bad"), "r");
        assert!(
            event.starts_with(b"event: error\ndata: {\"type\":\"error\""),
            "{event:?}"
        );
    }
}
