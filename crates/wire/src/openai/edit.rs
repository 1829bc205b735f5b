//! Takes out of an engine's answer what the router asked for and the client did not.
//!
//! The router needs token ids and usage to continue a stream elsewhere and to know what was cached, so it asks for them
//! in every request; a client that did not must not see them. Everything else passes word for word.

use super::Body;
use bytes::Bytes;
use serde_json::value::RawValue;

/// What to take out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerEdit {
    /// `token_ids` and `prompt_token_ids`.
    pub drop_token_ids: bool,
    /// `usage` of chunks.
    pub drop_usage: bool,
    /// `kv_transfer_params`: they are between router and workers.
    pub drop_transfer_params: bool,
}

/// The edited answer or chunk. `None`: nothing is left that the client asked for (the chunk that only has the usage).
/// What is no JSON object passes as it is.
#[must_use]
pub fn edit_answer(bytes: &Bytes, edit: AnswerEdit) -> Option<Bytes> {
    let Ok(mut body) = Body::parse(bytes) else {
        return Some(bytes.clone());
    };
    let mut changed = false;
    if edit.drop_usage {
        changed |= body.remove("usage").is_some();
        let no_choices = body.get("choices").is_some_and(|choices| is_empty_list(choices));
        if changed && no_choices {
            return None;
        }
    }
    if edit.drop_transfer_params {
        changed |= body.remove("kv_transfer_params").is_some();
    }
    if edit.drop_token_ids {
        changed |= body.remove("prompt_token_ids").is_some();
        if let Some(choices) = body.get("choices").and_then(without_token_ids) {
            body.set_raw("choices", choices);
            changed = true;
        }
    }
    Some(if changed { body.to_bytes() } else { bytes.clone() })
}

fn is_empty_list(json: &[u8]) -> bool {
    json.iter().filter(|byte| !byte.is_ascii_whitespace()).eq(b"[]")
}

/// The list of choices without token ids; `None` if none has any.
fn without_token_ids(choices: &Bytes) -> Option<Bytes> {
    let list: Vec<&RawValue> = serde_json::from_slice(choices).ok()?;
    let mut changed = false;
    let mut out = Vec::with_capacity(choices.len());
    out.push(b'[');
    for (index, choice) in list.into_iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        let raw = choices.slice_ref(choice.get().as_bytes());
        match Body::parse(&raw) {
            Ok(mut body) => {
                changed |= body.remove("token_ids").is_some();
                changed |= body.remove("prompt_token_ids").is_some();
                out.extend_from_slice(&body.to_bytes());
            }
            Err(_) => out.extend_from_slice(&raw),
        }
    }
    out.push(b']');
    changed.then(|| Bytes::from(out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_not_asked_for_goes() {
        let all = AnswerEdit {
            drop_token_ids: true,
            drop_usage: true,
            drop_transfer_params: true,
        };
        let check = |text: &'static str, edit: AnswerEdit, expected: Option<&'static str>| {
            let found = edit_answer(&Bytes::from_static(text.as_bytes()), edit);
            assert_eq!(
                found,
                expected.map(|text| Bytes::from_static(text.as_bytes())),
                "{text}"
            );
        };
        let chunk = r#"{"id":"1", "choices":[{"index": 0,"text":"a","token_ids":[1]}],"usage":{"x":1}}"#;
        check(chunk, AnswerEdit::default(), Some(chunk));
        check(chunk, all, Some(r#"{"id":"1","choices":[{"index":0,"text":"a"}]}"#));
        let usage = AnswerEdit {
            drop_usage: true,
            ..AnswerEdit::default()
        };
        check(
            chunk,
            usage,
            Some(r#"{"id":"1","choices":[{"index": 0,"text":"a","token_ids":[1]}]}"#),
        );
        check(r#"{"choices":[ ],"usage":{"prompt_tokens":1}}"#, all, None);
        check(r#"{"choices":[],"other":1}"#, all, Some(r#"{"choices":[],"other":1}"#));
        check(
            r#"{"kv_transfer_params":null,"prompt_token_ids":[1],"a":1}"#,
            all,
            Some(r#"{"a":1}"#),
        );
        check("[DONE]", all, Some("[DONE]"));
    }
}
