//! `/v1/models` and vLLM's `/tokenize`: the two small endpoints beside generation.

use super::{ApiError, Body, ChatMessage};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The answer of `/v1/models`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelList {
    /// `list`.
    pub object: String,
    /// The models.
    pub data: Vec<ModelCard>,
}

/// A model that is served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelCard {
    /// Its name in requests.
    pub id: String,
    /// `model`.
    #[serde(default)]
    pub object: String,
    /// Seconds since 1970.
    #[serde(default)]
    pub created: u64,
    /// Who serves it.
    #[serde(default)]
    pub owned_by: String,
    /// Prompt and output of a request at most, in tokens (vLLM's extension).
    #[serde(default)]
    pub max_model_len: Option<u32>,
}

impl ModelCard {
    /// A model that is served here; `max_model_len` in tokens.
    #[must_use]
    pub fn new(id: &str, created: u64, max_model_len: u32) -> Self {
        Self {
            id: id.to_owned(),
            object: "model".to_owned(),
            created,
            owned_by: "homing".to_owned(),
            max_model_len: Some(max_model_len),
        }
    }
}

/// A request of `/tokenize`.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenizeRequest {
    /// The model's name, where the request names one.
    pub model: Option<String>,
    /// What to tokenise.
    pub input: TokenizeInput,
    /// Whether the answer is to have each token's text too.
    pub return_token_strs: bool,
}

/// What to tokenise.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenizeInput {
    /// A completion's prompt.
    Prompt {
        /// The text.
        text: String,
        /// Whether to add the tokens that the tokenizer puts around every text.
        add_special_tokens: bool,
    },
    /// A conversation, through the chat template.
    Chat {
        /// The conversation.
        messages: Vec<ChatMessage>,
        /// Whether the assistant's turn is opened at the end.
        add_generation_prompt: bool,
        /// Tool definitions for the chat template.
        tools: Option<Vec<Value>>,
    },
}

/// The answer of `/tokenize`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizeResponse {
    /// How many tokens.
    pub count: u32,
    /// The model's context in tokens.
    pub max_model_len: u32,
    /// The token ids.
    pub tokens: Vec<u32>,
    /// Each token's text, if asked for.
    #[serde(default)]
    pub token_strs: Option<Vec<String>>,
}

impl TokenizeRequest {
    /// Reads a request from bytes.
    ///
    /// # Errors
    /// If it is no JSON object with either a `prompt` or `messages`.
    pub fn parse(bytes: &Bytes) -> Result<Self, ApiError> {
        let body = Body::parse(bytes)?;
        let flag = |name: &str, default: bool| {
            body.read(name, "true or false")
                .map(|value: Option<bool>| value.unwrap_or(default))
        };
        let input = match body.read::<Vec<Value>>("messages", "a list of messages")? {
            Some(messages) => TokenizeInput::Chat {
                messages: messages
                    .into_iter()
                    .enumerate()
                    .map(|(index, value)| ChatMessage::from_value(value, index))
                    .collect::<Result<_, _>>()?,
                add_generation_prompt: flag("add_generation_prompt", true)?,
                tools: body.read("tools", "a list of tool definitions")?,
            },
            None => TokenizeInput::Prompt {
                text: body.read("prompt", "a string")?.ok_or_else(|| {
                    ApiError::invalid("`prompt` is missing, expected `prompt` or `messages`").with_param("prompt")
                })?,
                add_special_tokens: flag("add_special_tokens", true)?,
            },
        };
        Ok(Self {
            model: body.read("model", "a string")?,
            input,
            return_token_strs: flag("return_token_strs", false)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokenize_takes_a_prompt_or_a_conversation() {
        let parse = |text: &'static str| TokenizeRequest::parse(&Bytes::from_static(text.as_bytes()));
        let prompt = parse(r#"{"model":"m","prompt":"a"}"#).expect("a prompt");
        assert_eq!(
            prompt.input,
            TokenizeInput::Prompt {
                text: "a".into(),
                add_special_tokens: true
            }
        );
        let chat = parse(r#"{"messages":[{"role":"user","content":"a"}],"add_generation_prompt":false}"#);
        assert!(matches!(
            chat.expect("a conversation").input,
            TokenizeInput::Chat {
                add_generation_prompt: false,
                ..
            }
        ));
        for wrong in [
            "{}",
            r#"{"prompt":1}"#,
            r#"{"messages":[{}]}"#,
            r#"{"prompt":"a","add_special_tokens":1}"#,
        ] {
            assert_eq!(parse(wrong).expect_err(wrong).status, 400, "{wrong}");
        }
    }
}
