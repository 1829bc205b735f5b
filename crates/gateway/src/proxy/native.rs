//! An answer by an engine that speaks the client's own dialect: passed on event by event.
//!
//! Only what the core must hear of is read: the first token, the usage, the end, an error. The router does not know the
//! answer's tokens, so such an answer cannot go on elsewhere, and it is taken only where a worker is configured so.

use super::dialect::Dialect;
use super::transcript::Fault;
use bytes::{Bytes, BytesMut};
use homing_wire::openai::{ApiError, Body};
use homing_wire::sse::SseEvent;
use serde::Deserialize;
use serde_json::{Value, json};

/// The names of events after which nothing comes, but for a mark of the end on some engines.
const LAST: [&str; 5] = [
    "message_stop",
    "response.completed",
    "response.incomplete",
    "response.failed",
    "error",
];

/// Whether an event is an answer's last.
pub(crate) fn is_last(event: &SseEvent) -> bool {
    event.event.as_deref().is_some_and(|name| LAST.contains(&name))
}

/// The client's own request, as its engine gets it.
pub(crate) fn native_body(original: &Body) -> Bytes {
    let mut body = original.clone();
    // A client has no business with another request's KV.
    body.remove("kv_transfer_params");
    body.to_bytes()
}

/// An answer under way.
#[derive(Debug, Default)]
pub(crate) struct Native {
    events: u64,
    /// Events before the first output: the answer may still begin anew elsewhere, so its client sees none of it.
    held: BytesMut,
    has_output: bool,
    cached_tokens: Option<u32>,
    output_tokens: u32,
}

/// What one event means.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NativePiece {
    pub(crate) for_client: Bytes,
    pub(crate) is_first_output: bool,
}

#[derive(Deserialize)]
struct View {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    usage: Option<UsageView>,
    #[serde(default)]
    message: Option<Inner>,
    #[serde(default)]
    response: Option<Inner>,
    #[serde(default)]
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Inner {
    #[serde(default)]
    usage: Option<UsageView>,
    #[serde(default)]
    error: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct UsageView {
    output_tokens: Option<u32>,
    cache_read_input_tokens: Option<u32>,
    input_tokens_details: Option<Details>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Details {
    cached_tokens: Option<u32>,
}

impl Native {
    /// Takes an event's data.
    ///
    /// # Errors
    /// It says that the engine failed, or is no event of a known dialect.
    pub(crate) fn take(&mut self, data: &Bytes) -> Result<NativePiece, Fault> {
        let Ok(view) = serde_json::from_slice::<View>(data) else {
            let start = String::from_utf8_lossy(&data[..data.len().min(80)]).into_owned();
            return Err(Fault {
                code: None,
                detail: format!("expected an event, found `{start}`"),
            });
        };
        let inner = view.message.or(view.response);
        let (usage, inner_error) = inner.map_or((None, None), |inner| (inner.usage, inner.error));
        if matches!(view.kind.as_str(), "error" | "response.failed") {
            let error = view.error.or(inner_error).unwrap_or_default();
            let error = ApiError::parse(500, json!({ "error": error }).to_string().as_bytes());
            return Err(Fault {
                code: error.code,
                detail: error.message,
            });
        }
        self.note(&view.usage.or(usage).unwrap_or_default());
        self.events += 1;
        let output = view.kind.starts_with("content_block_") || view.kind == "response.output_item.added";
        let is_first_output = output && !self.has_output;
        self.has_output |= output;
        let event = SseEvent {
            event: Some(view.kind),
            data: data.clone(),
        };
        self.held.extend_from_slice(&event.encode());
        let for_client = if self.has_output || is_last(&event) {
            self.held.split().freeze()
        } else {
            Bytes::new()
        };
        Ok(NativePiece {
            for_client,
            is_first_output,
        })
    }

    fn note(&mut self, usage: &UsageView) {
        let details = usage.input_tokens_details.as_ref();
        let cached = usage
            .cache_read_input_tokens
            .or(details.and_then(|details| details.cached_tokens));
        self.cached_tokens = cached.or(self.cached_tokens);
        self.output_tokens = usage.output_tokens.unwrap_or_default().max(self.output_tokens);
    }

    /// Prompt tokens that the engine found in its cache, and tokens that it generated, as far as it said them.
    pub(crate) const fn usage(&self) -> (Option<u32>, u32) {
        (self.cached_tokens, self.output_tokens)
    }

    /// The event that ends such a stream with an error of the router's.
    pub(crate) fn error_event(&self, dialect: Dialect, error: &ApiError, request: &str) -> Bytes {
        if dialect == Dialect::Messages {
            return homing_wire::anthropic::error_event(error, request);
        }
        let data = json!({
            "type": "error", "sequence_number": self.events, "code": error.code, "message": error.message, "param": error.param,
        });
        let event = SseEvent {
            event: Some("error".to_owned()),
            data: data.to_string().into(),
        };
        event.encode()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_core_must_hear_of_is_read() {
        let check = |events: &[Value], first: usize, usage: (Option<u32>, u32)| {
            let mut native = Native::default();
            let mut text = String::new();
            for (index, event) in events.iter().enumerate() {
                let piece = native.take(&event.to_string().into()).unwrap();
                assert_eq!(piece.is_first_output, index == first, "{event}");
                assert_eq!(piece.for_client.is_empty(), index < first, "held until there is output");
                text.push_str(str::from_utf8(&piece.for_client).unwrap());
            }
            let event = |event: &Value| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap());
            assert_eq!(text, events.iter().map(event).collect::<String>(), "word for word");
            assert_eq!(native.usage(), usage);
        };
        check(
            &[
                json!({"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 0}}}),
                json!({"type": "content_block_start", "index": 0}),
                json!({"type": "content_block_delta", "index": 0}),
                json!({"type": "message_delta", "usage": {"output_tokens": 7, "cache_read_input_tokens": 4}}),
                json!({"type": "message_stop"}),
            ],
            1,
            (Some(4), 7),
        );
        check(
            &[
                json!({"type": "response.created", "response": {"usage": null}}),
                json!({"type": "response.output_item.added"}),
                json!({"type": "response.completed", "response":
                    {"usage": {"output_tokens": 7, "input_tokens_details": {"cached_tokens": 4}}}}),
            ],
            1,
            (Some(4), 7),
        );
    }

    #[test]
    fn failures_are_seen() {
        for (event, code, detail) in [
            (
                json!({"type": "error", "error": {"type": "api_error", "message": "m"}}),
                None,
                "m",
            ),
            (
                json!({"type": "response.failed", "response": {"error": {"code": "server_error", "message": "m"}}}),
                Some("server_error"),
                "m",
            ),
            (
                json!({"id": "chunk"}),
                None,
                "expected an event, found `{\"id\":\"chunk\"}`",
            ),
        ] {
            let fault = Native::default().take(&event.to_string().into()).unwrap_err();
            assert_eq!(
                (fault.code.as_deref(), fault.detail.as_str()),
                (code, detail),
                "{event}"
            );
        }
    }
}
