//! Answers in vLLM 0.32's form of OpenAI's: whole ones and the chunks of a stream.
//!
//! Built by the worker; tests and clients read them back. Members that are `null` in vLLM's answers are `null` here, so
//! that clients which index them without asking work; members of chunks that are rarely set are left out.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

/// Token counts of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Usage {
    /// The prompt's tokens.
    pub prompt_tokens: u32,
    /// Both together.
    pub total_tokens: u32,
    /// The output's tokens.
    pub completion_tokens: u32,
    /// More about the prompt.
    pub prompt_tokens_details: Option<PromptTokensDetails>,
}

/// More about a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PromptTokensDetails {
    /// Prompt tokens that were found in the cache.
    pub cached_tokens: Option<u32>,
}

impl Usage {
    /// The usage of a request; `cached_tokens` of its prompt tokens came from the cache.
    #[must_use]
    pub fn new(prompt_tokens: u32, cached_tokens: u32, completion_tokens: u32) -> Self {
        Self {
            prompt_tokens,
            total_tokens: prompt_tokens.saturating_add(completion_tokens),
            completion_tokens,
            prompt_tokens_details: Some(PromptTokensDetails {
                cached_tokens: Some(cached_tokens),
            }),
        }
    }

    /// Prompt tokens that were found in the cache, where the engine says so.
    #[must_use]
    pub fn cached_tokens(&self) -> Option<u32> {
        self.prompt_tokens_details.and_then(|details| details.cached_tokens)
    }
}

/// A completion, or one chunk of a streamed one (the object is `text_completion` for both).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CompletionResponse {
    /// The request's id, `cmpl-...`.
    pub id: String,
    /// `text_completion`.
    pub object: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model that answered.
    pub model: String,
    /// The answer; empty in the chunk that only has the usage.
    pub choices: Vec<CompletionChoice>,
    /// Absent in most chunks.
    #[serde(default)]
    pub usage: Option<Usage>,
    /// For the router: where the decode leg finds the KV.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_transfer_params: Option<Box<RawValue>>,
}

/// One answer of a completion.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CompletionChoice {
    /// 0.
    pub index: u32,
    /// The text, or what a chunk adds to it.
    pub text: String,
    /// Log-probabilities, if asked for.
    pub logprobs: Option<Value>,
    /// `stop`, `length`, ... at the end.
    pub finish_reason: Option<String>,
    /// The stop string or token that ended it.
    pub stop_reason: Option<Value>,
    /// The output's token ids, or those that a chunk adds, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// The prompt's token ids, if asked for; in a stream with the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// A chat completion.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChatResponse {
    /// The request's id, `chatcmpl-...`.
    pub id: String,
    /// `chat.completion`.
    pub object: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model that answered.
    pub model: String,
    /// The answer.
    pub choices: Vec<ChatChoice>,
    /// Token counts.
    #[serde(default)]
    pub usage: Option<Usage>,
    /// The prompt's token ids, if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// For the router: where the decode leg finds the KV.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_transfer_params: Option<Box<RawValue>>,
}

/// One answer of a chat completion.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ChatChoice {
    /// 0.
    pub index: u32,
    /// The message.
    pub message: AssistantMessage,
    /// Log-probabilities, if asked for.
    pub logprobs: Option<Value>,
    /// `stop`, `length`, `tool_calls`, ...
    pub finish_reason: Option<String>,
    /// The stop string or token that ended it.
    pub stop_reason: Option<Value>,
    /// The output's token ids, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// The message of an assistant.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AssistantMessage {
    /// `assistant`.
    pub role: String,
    /// What it says.
    pub content: Option<String>,
    /// Tools it calls.
    pub tool_calls: Vec<Value>,
}

/// A chunk of a streamed chat completion.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatChunk {
    /// The request's id, `chatcmpl-...`.
    pub id: String,
    /// `chat.completion.chunk`.
    pub object: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model that answers.
    pub model: String,
    /// What it adds; empty in the chunk that only has the usage.
    pub choices: Vec<ChatChunkChoice>,
    /// The usage, in the last chunk, if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// The prompt's token ids, in the first chunk, if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// What a chunk adds to an answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ChatChunkChoice {
    /// 0.
    pub index: u32,
    /// What is new.
    pub delta: ChatDelta,
    /// Log-probabilities, if asked for.
    pub logprobs: Option<Value>,
    /// `stop`, `length`, ... in the last chunk of the answer.
    pub finish_reason: Option<String>,
    /// The token ids that it adds, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// What is new in a message.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ChatDelta {
    /// `assistant`, in the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// More text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
}

impl CompletionResponse {
    /// A completion or a chunk with one choice.
    #[must_use]
    pub fn new(id: &str, created: u64, model: &str, choice: CompletionChoice) -> Self {
        Self {
            choices: vec![choice],
            ..Self::usage_only(id, created, model, None)
        }
    }

    /// A chunk without a choice: the last of a stream, with the usage.
    #[must_use]
    pub fn usage_only(id: &str, created: u64, model: &str, usage: Option<Usage>) -> Self {
        Self {
            id: id.to_owned(),
            object: "text_completion".to_owned(),
            created,
            model: model.to_owned(),
            choices: Vec::new(),
            usage,
            kv_transfer_params: None,
        }
    }

    /// The JSON body.
    #[must_use]
    pub fn to_body(&self) -> Bytes {
        to_body(self)
    }
}

impl ChatResponse {
    /// A chat completion with one choice.
    #[must_use]
    pub fn new(id: &str, created: u64, model: &str, choice: ChatChoice, usage: Usage) -> Self {
        Self {
            id: id.to_owned(),
            object: "chat.completion".to_owned(),
            created,
            model: model.to_owned(),
            choices: vec![choice],
            usage: Some(usage),
            prompt_token_ids: None,
            kv_transfer_params: None,
        }
    }

    /// The JSON body.
    #[must_use]
    pub fn to_body(&self) -> Bytes {
        to_body(self)
    }
}

impl ChatChoice {
    /// An assistant's text.
    #[must_use]
    pub fn text(content: String, finish_reason: &str) -> Self {
        Self {
            message: AssistantMessage {
                role: "assistant".to_owned(),
                content: Some(content),
                tool_calls: Vec::new(),
            },
            finish_reason: Some(finish_reason.to_owned()),
            ..Self::default()
        }
    }
}

impl ChatChunk {
    /// A chunk with one choice.
    #[must_use]
    pub fn new(id: &str, created: u64, model: &str, choice: ChatChunkChoice) -> Self {
        Self {
            choices: vec![choice],
            ..Self::usage_only(id, created, model, None)
        }
    }

    /// A chunk without a choice: the last of a stream, with the usage.
    #[must_use]
    pub fn usage_only(id: &str, created: u64, model: &str, usage: Option<Usage>) -> Self {
        Self {
            id: id.to_owned(),
            object: "chat.completion.chunk".to_owned(),
            created,
            model: model.to_owned(),
            choices: Vec::new(),
            usage,
            prompt_token_ids: None,
        }
    }

    /// The JSON body.
    #[must_use]
    pub fn to_body(&self) -> Bytes {
        to_body(self)
    }
}

fn to_body<T: Serialize>(value: &T) -> Bytes {
    Bytes::from(serde_json::to_vec(value).expect("an answer serialises: its keys are strings"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_have_the_members_that_clients_index() {
        let choice = CompletionChoice {
            text: "a".into(),
            finish_reason: Some("length".into()),
            token_ids: Some(vec![5]),
            ..CompletionChoice::default()
        };
        let mut answer = CompletionResponse::new("cmpl-1", 7, "m", choice);
        answer.usage = Some(Usage::new(100, 96, 1));
        assert_eq!(
            answer.to_body(),
            r#"{"id":"cmpl-1","object":"text_completion","created":7,"model":"m","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":[5]}],"usage":{"prompt_tokens":100,"total_tokens":101,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":96}}}"#
        );
        let delta = ChatDelta {
            content: Some("b".into()),
            role: None,
        };
        let chunk = ChatChunk::new(
            "chatcmpl-1",
            7,
            "m",
            ChatChunkChoice {
                delta,
                ..ChatChunkChoice::default()
            },
        );
        assert_eq!(
            chunk.to_body(),
            r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,"delta":{"content":"b"},"logprobs":null,"finish_reason":null}]}"#
        );
    }
}
