//! What a message is in the end: its blocks, why it stopped, what it took. Written as the public reference has it.

use crate::openai::Usage;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

/// Token counts of a message. Anthropic counts cached tokens beside the input's, not among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MessageUsage {
    /// Prompt tokens that were computed.
    pub input_tokens: u32,
    /// Always 0: nothing is billed for what is cached.
    pub cache_creation_input_tokens: u32,
    /// Prompt tokens that were found in the cache.
    pub cache_read_input_tokens: u32,
    /// Tokens generated.
    pub output_tokens: u32,
}

impl MessageUsage {
    /// Of so many prompt tokens, `cached` of them found in the cache.
    #[must_use]
    pub const fn new(prompt: u32, cached: u32, output: u32) -> Self {
        Self {
            input_tokens: prompt.saturating_sub(cached),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: cached,
            output_tokens: output,
        }
    }

    pub(super) fn of_chat(usage: &Usage) -> Self {
        let cached = usage.cached_tokens().unwrap_or_default().min(usage.prompt_tokens);
        Self::new(usage.prompt_tokens, cached, usage.completion_tokens)
    }
}

/// A block of the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AnswerBlock {
    Thinking(String),
    Text(String),
    ToolUse {
        /// Which of the chat answer's calls.
        call: usize,
        id: String,
        name: String,
        arguments: String,
    },
}

impl AnswerBlock {
    /// As `content_block_start` announces it.
    pub(super) fn opening(&self) -> Value {
        match self {
            Self::Thinking(_) => json!({ "type": "thinking", "thinking": "", "signature": "" }),
            Self::Text(_) => json!({ "type": "text", "text": "" }),
            Self::ToolUse { id, name, .. } => json!({ "type": "tool_use", "id": id, "name": name, "input": {} }),
        }
    }

    /// As a whole.
    pub(super) fn whole(&self) -> WholeBlock<'_> {
        match self {
            Self::Thinking(thinking) => WholeBlock::Thinking {
                thinking,
                signature: "",
            },
            Self::Text(text) => WholeBlock::Text { text },
            Self::ToolUse {
                id, name, arguments, ..
            } => WholeBlock::ToolUse {
                id,
                name,
                input: input(arguments),
            },
        }
    }

    /// The delta that adds a piece to it.
    pub(super) fn delta(&self, piece: &str) -> Value {
        match self {
            Self::Thinking(_) => json!({ "type": "thinking_delta", "thinking": piece }),
            Self::Text(_) => json!({ "type": "text_delta", "text": piece }),
            Self::ToolUse { .. } => json!({ "type": "input_json_delta", "partial_json": piece }),
        }
    }

    pub(super) fn push(&mut self, piece: &str) {
        match self {
            Self::Thinking(text) | Self::Text(text) | Self::ToolUse { arguments: text, .. } => text.push_str(piece),
        }
    }
}

/// A message as a whole.
#[derive(Serialize)]
pub(super) struct WholeMessage<'a> {
    pub(super) id: &'a str,
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    pub(super) role: &'static str,
    pub(super) model: &'a str,
    pub(super) content: Vec<WholeBlock<'a>>,
    pub(super) stop_reason: Option<&'static str>,
    pub(super) stop_sequence: Option<&'a str>,
    pub(super) usage: MessageUsage,
}

/// A block as a whole. A tool's input stays the model's own text, with its order of keys.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum WholeBlock<'a> {
    Thinking {
        thinking: &'a str,
        signature: &'static str,
    },
    Text {
        text: &'a str,
    },
    ToolUse {
        id: &'a str,
        name: &'a str,
        input: Box<RawValue>,
    },
}

/// A tool's input is an object. A model may have written none: then its text is kept under the name that Anthropic's own
/// reference suggests for it, rather than lost.
fn input(arguments: &str) -> Box<RawValue> {
    let is_object = serde_json::from_str::<Map<String, Value>>(arguments).is_ok();
    let text = match arguments.trim() {
        "" => "{}".to_owned(),
        object if is_object => object.to_owned(),
        other => json!({ "INVALID_JSON": other }).to_string(),
    };
    RawValue::from_string(text).expect("each arm is JSON")
}

/// Anthropic's name for why an answer ended.
pub(super) fn stop_reason(finish: Option<&str>, by_stop_string: bool, has_calls: bool) -> &'static str {
    match finish {
        Some("length") => "max_tokens",
        Some("content_filter") => "refusal",
        Some("tool_calls" | "function_call") => "tool_use",
        // A tool that was chosen by name ends with `stop` on some engines.
        _ if has_calls => "tool_use",
        _ if by_stop_string => "stop_sequence",
        _ => "end_turn",
    }
}
