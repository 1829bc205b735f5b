//! What a router reads in an engine's answer, whole or chunk, completion or chat: leniently, because engines differ.
//!
//! It is a view and never written back; the bytes themselves go on to the client (see `edit`).

use super::{ApiError, Usage};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// What a router reads in an answer or in a chunk of one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AnswerView {
    /// The engine's id of the request.
    pub id: Option<String>,
    /// Seconds since 1970.
    pub created: Option<u64>,
    /// Text of the first choice: of the answer, or what the chunk adds.
    pub text: String,
    /// Output token ids of the first choice, if asked for.
    pub token_ids: Option<Vec<u32>>,
    /// Prompt token ids, if asked for.
    pub prompt_token_ids: Option<Vec<u32>>,
    /// Why the first choice ended, if it has.
    pub finish_reason: Option<String>,
    /// Whether it has parts that a continuation elsewhere could not go on from exactly: tool calls or reasoning.
    pub structured: bool,
    /// Whether there is no choice at all, as in the chunk that only has the usage.
    pub no_choices: bool,
    /// Token counts, where given.
    pub usage: Option<Usage>,
    /// Where the decode leg finds the KV, word for word.
    pub kv_transfer_params: Option<Bytes>,
    /// The error that the body is instead of an answer.
    pub error: Option<ApiError>,
}

impl AnswerView {
    /// Reads an answer or a chunk. `None` if the bytes are no JSON object of that kind.
    #[must_use]
    pub fn parse(bytes: &Bytes) -> Option<Self> {
        // Without this a list would be read as the members in order.
        if bytes.iter().find(|byte| !byte.is_ascii_whitespace()) != Some(&b'{') {
            return None;
        }
        let answer: Answer<'_> = serde_json::from_slice(bytes).ok()?;
        let choices = answer.choices.unwrap_or_default();
        let mut view = Self {
            id: answer.id,
            created: answer.created,
            prompt_token_ids: answer.prompt_token_ids,
            usage: answer.usage,
            no_choices: choices.is_empty(),
            kv_transfer_params: answer
                .kv_transfer_params
                .filter(|params| params.get() != "null")
                .map(|params| bytes.slice_ref(params.get().as_bytes())),
            error: answer
                .error
                .is_some_and(|error| !error.is_null())
                .then(|| ApiError::parse(500, bytes)),
            ..Self::default()
        };
        if let Some(choice) = choices.into_iter().next() {
            view.take_choice(choice);
        }
        Some(view)
    }

    /// Whether it shows that the engine has sampled a token.
    #[must_use]
    pub fn has_output(&self) -> bool {
        !self.text.is_empty()
            || self.structured
            || self.finish_reason.is_some()
            || self.token_ids.as_ref().is_some_and(|ids| !ids.is_empty())
    }

    fn take_choice(&mut self, choice: Choice) {
        let message = choice.message.or(choice.delta).unwrap_or_default();
        self.structured = message.tool_calls.is_some_and(|calls| !calls.is_empty())
            || [message.reasoning, message.reasoning_content]
                .into_iter()
                .flatten()
                .any(|text| !text.is_empty());
        self.text = choice.text.or(message.content).unwrap_or_default();
        self.finish_reason = choice.finish_reason;
        self.token_ids = choice.token_ids;
        self.prompt_token_ids = choice.prompt_token_ids.or(self.prompt_token_ids.take());
    }
}

#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    created: Option<u64>,
    #[serde(default)]
    choices: Option<Vec<Choice>>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(default)]
    prompt_token_ids: Option<Vec<u32>>,
    #[serde(default, borrow)]
    kv_transfer_params: Option<&'a RawValue>,
    #[serde(default)]
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    message: Option<Message>,
    #[serde(default)]
    delta: Option<Message>,
    #[serde(default)]
    finish_reason: Option<String>,
    #[serde(default)]
    token_ids: Option<Vec<u32>>,
    #[serde(default)]
    prompt_token_ids: Option<Vec<u32>>,
}

#[derive(Default, Deserialize)]
struct Message {
    #[serde(default)]
    content: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<Value>>,
    #[serde(default)]
    reasoning: Option<String>,
    #[serde(default)]
    reasoning_content: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(text: &str) -> AnswerView {
        AnswerView::parse(&Bytes::copy_from_slice(text.as_bytes())).expect(text)
    }

    #[test]
    fn answers_of_vllm_are_read() {
        let answer = include_str!("../../tests/fixtures/vllm-0.32-prefill-answer.json");
        let view = view(answer);
        assert_eq!(
            (view.text.as_str(), view.finish_reason.as_deref()),
            (" results", Some("length"))
        );
        assert_eq!(
            view.usage.map(|usage| (usage.prompt_tokens, usage.cached_tokens())),
            Some((100, Some(0)))
        );
        let params = view.kv_transfer_params.expect("P answers with parameters");
        assert!(
            answer.as_bytes().windows(params.len()).any(|part| part == params),
            "word for word"
        );
        assert!(view.error.is_none() && !view.structured);
    }

    #[test]
    fn chunks_are_read() {
        let check = |text: &str, expected: (&str, bool, bool, bool)| {
            let view = view(text);
            let found = (view.text.as_str(), view.has_output(), view.structured, view.no_choices);
            assert_eq!(found, expected, "{text}");
        };
        check(
            r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
            ("", false, false, false),
        );
        check(
            r#"{"choices":[{"delta":{"content":"hi"},"finish_reason":null}]}"#,
            ("hi", true, false, false),
        );
        check(
            r#"{"choices":[{"text":"hi","token_ids":[3]}]}"#,
            ("hi", true, false, false),
        );
        check(r#"{"choices":[{"text":"","token_ids":[3]}]}"#, ("", true, false, false));
        check(
            r#"{"choices":[{"delta":{"tool_calls":[{}]}}]}"#,
            ("", true, true, false),
        );
        check(
            r#"{"choices":[{"delta":{"reasoning_content":"r"}}]}"#,
            ("", true, true, false),
        );
        check(
            r#"{"choices":[],"usage":{"prompt_tokens":3}}"#,
            ("", false, false, true),
        );
        check(
            r#"{"choices":[{"delta":{},"finish_reason":"stop"}],"new":1}"#,
            ("", true, false, false),
        );
    }

    #[test]
    fn errors_and_garbage_are_told_apart() {
        let error = view(r#"{"error":{"message":"m","type":"t","code":500}}"#)
            .error
            .expect("an error");
        assert_eq!(error.message, "m");
        for text in ["", "[DONE]", "{", "[]"] {
            assert_eq!(
                AnswerView::parse(&Bytes::copy_from_slice(text.as_bytes())),
                None,
                "{text}"
            );
        }
    }
}
