//! The parts of a chat answer, or of a chunk of one, that a translator to another dialect needs.
//!
//! Beside `view`, which reads what a router needs of any answer: here are tool calls, reasoning and the reason of the end.

use super::Usage;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::Value;

/// What a chunk adds, or what an answer is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AnswerParts {
    /// Text.
    pub text: String,
    /// What the model thought.
    pub reasoning: String,
    /// Calls of tools, or pieces of them.
    pub calls: Vec<CallPart>,
    /// Why it ended, if it has.
    pub finish_reason: Option<String>,
    /// The stop string that ended it, if one did.
    pub stop_string: Option<String>,
    /// Token counts, where given.
    pub usage: Option<Usage>,
}

/// A piece of a call: the first one has the id and the name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallPart {
    /// Which of the answer's calls.
    pub index: usize,
    /// Its id.
    pub id: Option<String>,
    /// The tool's name.
    pub name: Option<String>,
    /// What it adds to the arguments.
    pub arguments: String,
}

impl AnswerParts {
    /// Reads an answer or a chunk, its first choice. `None` if the bytes are none.
    #[must_use]
    pub fn parse(bytes: &Bytes) -> Option<Self> {
        let answer: Answer = serde_json::from_slice(bytes).ok()?;
        let mut parts = Self {
            usage: answer.usage,
            ..Self::default()
        };
        let Some(choice) = answer.choices.into_iter().next() else {
            return Some(parts);
        };
        let message = choice.delta.or(choice.message).unwrap_or_default();
        parts.text = message.content.unwrap_or_default();
        parts.reasoning = message.reasoning.or(message.reasoning_content).unwrap_or_default();
        parts.finish_reason = choice.finish_reason;
        parts.stop_string = choice.stop_reason.as_ref().and_then(Value::as_str).map(str::to_owned);
        let calls = message.tool_calls.unwrap_or_default().into_iter().enumerate();
        parts.calls = calls.map(|(place, call)| call.part(place)).collect();
        Some(parts)
    }
}

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    delta: Option<Message>,
    #[serde(default)]
    message: Option<Message>,
    #[serde(default)]
    finish_reason: Option<String>,
    #[serde(default)]
    stop_reason: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Message {
    content: Option<String>,
    reasoning: Option<String>,
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<Call>>,
}

#[derive(Deserialize)]
struct Call {
    #[serde(default)]
    index: Option<usize>,
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    function: Function,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Function {
    name: Option<String>,
    arguments: Option<String>,
}

impl Call {
    fn part(self, place: usize) -> CallPart {
        CallPart {
            index: self.index.unwrap_or(place),
            id: self.id,
            name: self.function.name,
            arguments: self.function.arguments.unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_and_answers_are_read_alike() {
        let check = |json: &'static str| AnswerParts::parse(&Bytes::from_static(json.as_bytes())).expect(json);
        let chunk = check(
            r#"{"choices":[{"delta":{"content":"a","tool_calls":[{"index":2,"id":"c","function":{"name":"f","arguments":"{"}}]},"finish_reason":"stop","stop_reason":"END"}]}"#,
        );
        assert_eq!((chunk.text.as_str(), chunk.stop_string.as_deref()), ("a", Some("END")));
        assert_eq!(chunk.calls[0].index, 2);
        let whole = check(
            r#"{"choices":[{"message":{"content":null,"reasoning_content":"r","tool_calls":[{"id":"c","function":{"name":"f","arguments":"{}"}}]},"stop_reason":7}],"usage":{"prompt_tokens":3}}"#,
        );
        assert_eq!((whole.reasoning.as_str(), whole.stop_string), ("r", None));
        assert_eq!((whole.calls[0].index, whole.calls[0].arguments.as_str()), (0, "{}"));
        assert_eq!(check(r#"{"choices":[]}"#), AnswerParts::default());
        assert_eq!(AnswerParts::parse(&Bytes::from_static(b"7")), None);
    }
}
