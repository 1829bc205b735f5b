//! The Messages API of Anthropic, translated to chat completions and back.
//!
//! A request becomes a chat request ([`to_chat`]); the chunks of the answer become the events of a message
//! ([`MessageStream`]), which is also what a client without a stream gets put together. Shapes are those of the public
//! reference of the Messages API (versions 2023-06-01 and later).
//!
//! | of a request | becomes |
//! | --- | --- |
//! | `system` (text or text blocks) | the first message; blocks are joined by nothing, as vLLM's own `/v1/messages` does, so that a session renders the same whichever of the two translates it |
//! | `text` blocks | content; several are parts, which templates join |
//! | `tool_use`, `tool_result` | `tool_calls` and messages of role `tool`, results before the text beside them; `is_error` has no counterpart and the text says it |
//! | `thinking` | `reasoning` and `reasoning_content` of the message: the template decides what of it is repeated. `redacted_thinking` is opaque and left out |
//! | `image`, `document` and all other blocks | refused by their path |
//! | `tools`, `tool_choice`, `disable_parallel_tool_use` | function tools, `tool_choice`, `parallel_tool_calls`; tools that Anthropic's servers run are refused |
//! | `stop_sequences`, `max_tokens`, `temperature`, `top_p`, `top_k`, `stream` | the same under chat's names |
//! | `output_config.effort`, `output_config.format`, `output_format` | `reasoning_effort`, `response_format` |
//! | `metadata`, `service_tier`, `thinking`, `context_management`, `cache_control`, `betas`, ... | nothing: they speak of accounts, caches and edits that an engine does by itself or not at all (a history is always sent whole) |
//! | `container`, `mcp_servers` | refused |
//! | all else | passed on as it is: engines have fields of their own |
//!
//! Answers: reasoning comes back as `thinking` blocks with an empty signature, `cache_read_input_tokens` is what the
//! engine found in its cache, and `input_tokens` is the rest, as Anthropic counts. `cache_creation_input_tokens` is 0:
//! everything is cached and nothing is billed for it.

mod blocks;
mod error;
mod message;
mod request;
mod stream;
mod tools;

pub use error::{error_body, error_event};
pub use message::MessageUsage;
pub use request::{count_to_chat, to_chat};
pub use stream::MessageStream;

use bytes::Bytes;

/// The event that says nothing but that a stream lives; the API sends it whenever it likes.
pub const PING: Bytes = Bytes::from_static(b"event: ping\ndata: {\"type\": \"ping\"}\n\n");
