//! An answer collected from its stream, for clients that asked for one without.
//!
//! Legs are always streamed: the core hears of the first token when it comes, and an answer that breaks off can be
//! begun anew without the client noticing, because it has seen nothing. The merge is by OpenAI's rules for deltas and
//! knows no field by name beyond those that are replaced instead of joined, so that fields of an engine's own survive.

use super::legs::Endpoint;
use bytes::Bytes;
use serde_json::{Map, Value, json};

/// Members that name or classify: the last one counts. All other strings are parts of a whole.
const REPLACED: [&str; 7] = ["id", "type", "role", "index", "object", "finish_reason", "stop_reason"];
/// Choices of one answer, and elements of its lists that are merged by their index; more are dropped.
const INDEX_MAX: u64 = 4_096;

/// An answer under collection.
#[derive(Debug)]
pub(crate) struct Whole {
    endpoint: Endpoint,
    top: Map<String, Value>,
    choices: Vec<Value>,
}

impl Whole {
    pub(crate) fn new(endpoint: Endpoint) -> Self {
        Self {
            endpoint,
            top: Map::new(),
            choices: Vec::new(),
        }
    }

    /// Takes a chunk's JSON text; what is no object is passed over (the transcript has refused it before).
    pub(crate) fn take(&mut self, chunk: &Bytes) {
        let Ok(Value::Object(chunk)) = serde_json::from_slice(chunk) else {
            return;
        };
        for (name, value) in chunk {
            match (name.as_str(), value) {
                ("choices", Value::Array(choices)) => merge_indexed(&mut self.choices, choices),
                (_, Value::Null) => {}
                (_, value) => drop(self.top.insert(name, value)),
            }
        }
    }

    /// The answer.
    pub(crate) fn finish(mut self) -> Bytes {
        let choices: Vec<Value> = self
            .choices
            .into_iter()
            .map(|choice| finished(self.endpoint, choice))
            .collect();
        if self.endpoint == Endpoint::Chat {
            self.top.insert("object".to_owned(), json!("chat.completion"));
        }
        self.top.insert("choices".to_owned(), Value::Array(choices));
        Value::Object(self.top).to_string().into()
    }
}

fn finished(endpoint: Endpoint, mut choice: Value) -> Value {
    let Some(members) = choice.as_object_mut() else {
        return choice;
    };
    if endpoint == Endpoint::Completions {
        members.entry("text").or_insert_with(|| json!(""));
        return choice;
    }
    let mut message = members.remove("delta").unwrap_or_else(|| json!({}));
    if let Some(message) = message.as_object_mut() {
        message.entry("role").or_insert_with(|| json!("assistant"));
        message.entry("content").or_insert(Value::Null);
        // The index says where a delta belongs; in a whole message the place says it.
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        for call in calls.into_iter().flatten().filter_map(Value::as_object_mut) {
            call.remove("index");
        }
    }
    members.insert("message".to_owned(), message);
    choice
}

fn merge(into: &mut Value, from: Value, name: &str) {
    match (into, from) {
        (_, Value::Null) => {}
        (Value::String(whole), Value::String(part)) if !REPLACED.contains(&name) => whole.push_str(&part),
        (Value::Array(whole), Value::Array(parts)) => {
            if parts.iter().all(|part| part.get("index").is_some()) {
                merge_indexed(whole, parts);
            } else {
                whole.extend(parts);
            }
        }
        (Value::Object(whole), Value::Object(part)) => {
            for (name, value) in part {
                match whole.get_mut(&name) {
                    Some(into) => merge(into, value, &name),
                    None => drop(whole.insert(name, value)),
                }
            }
        }
        (into, from) => *into = from,
    }
}

fn merge_indexed(whole: &mut Vec<Value>, parts: Vec<Value>) {
    for part in parts {
        let index = part.get("index").and_then(Value::as_u64).unwrap_or_default();
        let known = whole
            .iter_mut()
            .find(|element| element.get("index").and_then(Value::as_u64) == Some(index));
        match known {
            Some(element) => merge(element, part, ""),
            None if index < INDEX_MAX => whole.push(part),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(endpoint: Endpoint, chunks: &[&str], expected: &Value) {
        let mut whole = Whole::new(endpoint);
        for chunk in chunks {
            whole.take(&Bytes::copy_from_slice(chunk.as_bytes()));
        }
        let found: Value = serde_json::from_slice(&whole.finish()).unwrap();
        assert_eq!(&found, expected);
    }

    #[test]
    fn chunks_of_a_chat_make_a_message() {
        check(
            Endpoint::Chat,
            &[
                r#"{"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#,
                r#"{"id":"c","choices":[{"index":0,"delta":{"content":"he"},"logprobs":{"content":[{"token":"he"}]}}]}"#,
                r#"{"id":"c","choices":[{"index":0,"delta":{"content":"y"},"logprobs":{"content":[{"token":"y"}]},"finish_reason":"stop"}]}"#,
                r#"{"id":"c","choices":[],"usage":{"prompt_tokens":1}}"#,
            ],
            &json!({"id":"c","object":"chat.completion","usage":{"prompt_tokens":1},"choices":[{
                "index":0,"finish_reason":"stop","message":{"role":"assistant","content":"hey"},
                "logprobs":{"content":[{"token":"he"},{"token":"y"}]}}]}),
        );
    }

    #[test]
    fn tool_calls_are_put_together_by_index() {
        check(
            Endpoint::Chat,
            &[
                r#"{"choices":[{"index":0,"delta":{"role":"assistant","tool_calls":[{"index":0,"id":"a","type":"function","function":{"name":"f","arguments":"{\"x\""}}]}}]}"#,
                r#"{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":":1}"}}]}}]}"#,
                r#"{"choices":[{"index":0,"delta":{"tool_calls":[{"index":1,"id":"b","type":"function","function":{"name":"g","arguments":"{}"}}]},"finish_reason":"tool_calls"}]}"#,
            ],
            &json!({"object":"chat.completion","choices":[{"index":0,"finish_reason":"tool_calls","message":{
                "role":"assistant","content":null,"tool_calls":[
                    {"id":"a","type":"function","function":{"name":"f","arguments":"{\"x\":1}"}},
                    {"id":"b","type":"function","function":{"name":"g","arguments":"{}"}}]}}]}),
        );
    }

    #[test]
    fn chunks_of_a_completion_make_a_text() {
        check(
            Endpoint::Completions,
            &[
                r#"{"object":"text_completion","choices":[{"index":0,"text":"a","token_ids":[1]}]}"#,
                r#"{"object":"text_completion","choices":[{"index":0,"text":"b","token_ids":[2],"finish_reason":"length"}]}"#,
            ],
            &json!({"object":"text_completion","choices":[{"index":0,"text":"ab","token_ids":[1,2],"finish_reason":"length"}]}),
        );
    }
}
