//! Errors in OpenAI's form, `{"error":{"message","type","param","code"}}`, with the HTTP status they travel under.
//!
//! One type for what we say to clients and for what engines say to us. It knows nothing of HTTP beyond the number.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The classes of errors that we report ourselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request is wrong: 400.
    InvalidRequest,
    /// What it names does not exist: 404.
    NotFound,
    /// The body is over the limit: 413.
    TooLarge,
    /// Too much at once: 429.
    RateLimit,
    /// Something here failed: 500.
    Internal,
    /// A worker failed: 502.
    Upstream,
    /// Nobody can serve it now: 503.
    Unavailable,
}

impl ErrorKind {
    /// The HTTP status.
    #[must_use]
    pub const fn status(self) -> u16 {
        match self {
            Self::InvalidRequest => 400,
            Self::NotFound => 404,
            Self::TooLarge => 413,
            Self::RateLimit => 429,
            Self::Internal => 500,
            Self::Upstream => 502,
            Self::Unavailable => 503,
        }
    }

    /// OpenAI's `type` of the error.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest | Self::TooLarge => "invalid_request_error",
            Self::NotFound => "not_found_error",
            Self::RateLimit => "rate_limit_error",
            Self::Internal => "internal_server_error",
            Self::Upstream => "upstream_error",
            Self::Unavailable => "service_unavailable_error",
        }
    }
}

/// An error as a client sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The HTTP status; an error event inside a stream has it in its log line only.
    pub status: u16,
    /// What happened and what was expected.
    pub message: String,
    /// OpenAI's `type`.
    pub kind: String,
    /// The member of the request that is wrong, if one is.
    pub param: Option<String>,
    /// A short machine-readable code, such as `model_not_found`.
    pub code: Option<String>,
}

impl ApiError {
    /// An error of this class.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            status: kind.status(),
            message: message.into(),
            kind: kind.as_str().to_owned(),
            param: None,
            code: None,
        }
    }

    /// A wrong request (400).
    #[must_use]
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidRequest, message)
    }

    /// The same, naming the member that is wrong.
    #[must_use]
    pub fn with_param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// The same with a machine-readable code.
    #[must_use]
    pub fn with_code(mut self, code: impl Into<String>) -> Self {
        self.code = Some(code.into());
        self
    }

    /// The model that the request names is not served here (404).
    #[must_use]
    pub fn unknown_model(model: &str, served: &str) -> Self {
        Self::new(
            ErrorKind::NotFound,
            format!("the model `{model}` does not exist, expected `{served}`"),
        )
        .with_param("model")
        .with_code("model_not_found")
    }

    /// The body is no JSON object (400).
    #[must_use]
    pub fn invalid_json(problem: impl fmt::Display) -> Self {
        Self::invalid(format!("the body is no valid JSON object: {problem}")).with_code("invalid_json")
    }

    /// The body is longer than `limit` bytes (413).
    #[must_use]
    pub fn body_too_large(limit: usize) -> Self {
        Self::new(
            ErrorKind::TooLarge,
            format!("the body is longer than `{limit}` bytes, which is the most that is taken"),
        )
        .with_code("body_too_large")
    }

    /// The body did not arrive whole (400).
    #[must_use]
    pub fn unreadable_body(problem: impl fmt::Display) -> Self {
        Self::invalid(format!("the body could not be read: {problem}")).with_code("unreadable_body")
    }

    /// There is no such path (404).
    #[must_use]
    pub fn unknown_path(path: &str) -> Self {
        Self::new(ErrorKind::NotFound, format!("there is no path `{path}`")).with_code("unknown_path")
    }

    /// The path exists and the method is not meant for it (405).
    #[must_use]
    pub fn method_not_allowed(path: &str, method: &str) -> Self {
        let message = format!("the path `{path}` does not take `{method}`");
        Self {
            status: 405,
            ..Self::invalid(message).with_code("method_not_allowed")
        }
    }

    /// Prompt and output are longer than the context (400).
    #[must_use]
    pub fn context_too_long(prompt_tokens: u64, output_tokens: u64, limit: u64) -> Self {
        Self::invalid(format!(
            "the prompt of `{prompt_tokens}` tokens and `{output_tokens}` output tokens are more than this model's \
             context of `{limit}` tokens"
        ))
        .with_code("context_length_exceeded")
    }

    /// The JSON body.
    #[must_use]
    pub fn to_body(&self) -> Bytes {
        Bytes::from(serde_json::to_vec(&Envelope::from(self)).expect("strings always serialise"))
    }

    /// Reads an engine's error answer, in OpenAI's form, vLLM's older flat form, or none at all (then the text is the
    /// message).
    #[must_use]
    pub fn parse(status: u16, body: &[u8]) -> Self {
        let detail = serde_json::from_slice::<Envelope>(body)
            .map(|envelope| envelope.error)
            .or_else(|_| serde_json::from_slice::<Detail>(body))
            .unwrap_or_else(|_| Detail {
                message: String::from_utf8_lossy(&body[..body.len().min(MAX_TEXT_BYTES)]).into_owned(),
                ..Detail::default()
            });
        Self {
            status,
            message: detail.message,
            kind: detail.kind.unwrap_or_else(|| ErrorKind::Upstream.as_str().to_owned()),
            param: detail.param,
            code: detail.code.and_then(|code| match code {
                serde_json::Value::String(text) => Some(text),
                serde_json::Value::Null => None,
                other => Some(other.to_string()),
            }),
        }
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.kind, self.status, self.message)
    }
}

impl std::error::Error for ApiError {}

/// How much of an answer that is no JSON becomes the message.
const MAX_TEXT_BYTES: usize = 1024;

#[derive(Serialize, Deserialize)]
struct Envelope {
    error: Detail,
}

#[derive(Default, Serialize, Deserialize)]
struct Detail {
    message: String,
    #[serde(rename = "type", default)]
    kind: Option<String>,
    #[serde(default)]
    param: Option<String>,
    #[serde(default)]
    code: Option<serde_json::Value>,
}

impl From<&ApiError> for Envelope {
    fn from(error: &ApiError) -> Self {
        Self {
            error: Detail {
                message: error.message.clone(),
                kind: Some(error.kind.clone()),
                param: error.param.clone(),
                code: error.code.clone().map(serde_json::Value::String),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_have_openai_form() {
        let error = ApiError::unknown_model("a", "b");
        assert_eq!(
            error.to_body(),
            r#"{"error":{"message":"the model `a` does not exist, expected `b`","type":"not_found_error","param":"model","code":"model_not_found"}}"#
        );
        assert_eq!(
            ApiError::parse(404, &error.to_body()),
            error,
            "what we write we read back"
        );
    }

    #[test]
    fn engines_errors_are_read_whatever_their_form() {
        let check = |body: &str, message: &str, kind: &str, code: Option<&str>| {
            let error = ApiError::parse(500, body.as_bytes());
            assert_eq!((error.message.as_str(), error.kind.as_str()), (message, kind), "{body}");
            assert_eq!(error.code.as_deref(), code, "{body}");
        };
        check(
            r#"{"error":{"message":"m","type":"t","param":null,"code":400}}"#,
            "m",
            "t",
            Some("400"),
        );
        check(
            r#"{"object":"error","message":"m","type":"t","code":"c"}"#,
            "m",
            "t",
            Some("c"),
        );
        check("Internal Server Error", "Internal Server Error", "upstream_error", None);
        check(r#"{"detail":"x"}"#, r#"{"detail":"x"}"#, "upstream_error", None);
    }
}
