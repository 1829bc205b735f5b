//! Members of a request that would change the answer and are not done here, and the values under which they would not.
//!
//! A table and not a row of conditions: an answer that ignores such a member looks right and is wrong, so whoever looks
//! for what is refused should find it in one place. Members that change nothing about the answer are not in it.

use homing_wire::openai::{ApiError, Body};
use serde_json::Value as Json;

/// The values of a member that ask for what is done anyway. `null` always does.
#[derive(Clone, Copy, Debug)]
enum Neutral {
    /// `false`, or nothing in an empty string, list or object.
    Empty,
    /// Only `null`: what looks empty asks for something.
    Null,
    /// This number.
    Number(f64),
    /// One of these strings.
    Words(&'static [&'static str]),
    /// "All", which is both of these numbers.
    All,
    /// An object of the type `text`.
    PlainText,
}

const MEMBERS: [(&str, Neutral); 36] = [
    ("presence_penalty", Neutral::Number(0.0)),
    ("frequency_penalty", Neutral::Number(0.0)),
    ("repetition_penalty", Neutral::Number(1.0)),
    ("length_penalty", Neutral::Number(1.0)),
    ("min_p", Neutral::Number(0.0)),
    ("top_k", Neutral::All),
    ("best_of", Neutral::Number(1.0)),
    ("use_beam_search", Neutral::Empty),
    ("logit_bias", Neutral::Empty),
    ("logits_processors", Neutral::Empty),
    ("allowed_token_ids", Neutral::Empty),
    ("bad_words", Neutral::Empty),
    ("truncate_prompt_tokens", Neutral::Null),
    ("prompt_logprobs", Neutral::Empty),
    ("echo", Neutral::Empty),
    ("suffix", Neutral::Empty),
    ("prompt_embeds", Neutral::Empty),
    ("add_special_tokens", Neutral::Empty),
    ("continue_final_message", Neutral::Empty),
    ("chat_template", Neutral::Empty),
    ("chat_template_kwargs", Neutral::Empty),
    ("documents", Neutral::Empty),
    ("functions", Neutral::Empty),
    ("function_call", Neutral::Words(&["none", "auto"])),
    ("tool_choice", Neutral::Words(&["none", "auto"])),
    ("response_format", Neutral::PlainText),
    ("structured_outputs", Neutral::Empty),
    // The empty schema asks for JSON all the same.
    ("guided_json", Neutral::Null),
    ("guided_regex", Neutral::Empty),
    ("guided_choice", Neutral::Empty),
    ("guided_grammar", Neutral::Empty),
    ("guided_json_object", Neutral::Empty),
    ("structural_tag", Neutral::Empty),
    ("guided_decoding_backend", Neutral::Empty),
    ("guided_whitespace_pattern", Neutral::Empty),
    ("audio", Neutral::Empty),
];

/// Refuses what would change the answer and is not done here. `done` are members that this endpoint reads itself.
///
/// # Errors
/// A 400 that names the first such member and the value that is expected.
pub(super) fn refuse_unsupported(body: &Body, done: &[&str]) -> Result<(), ApiError> {
    for (name, neutral) in MEMBERS {
        if done.contains(&name) {
            continue;
        }
        if let Some(given) = body.read::<Json>(name, "JSON")?.filter(|given| !neutral.allows(given)) {
            return Err(unsupported(name, &given, neutral.expected()));
        }
    }
    Ok(())
}

/// A member that is not done here.
pub(super) fn unsupported(name: &str, given: &Json, expected: &str) -> ApiError {
    /// Characters of the value that the message shows.
    const SHOWN: usize = 60;
    let given: String = given.to_string().chars().take(SHOWN).collect();
    let message = format!("`{name}` is `{given}`, which is not supported by this worker, expected {expected}");
    ApiError::invalid(message).with_param(name)
}

impl Neutral {
    fn allows(self, given: &Json) -> bool {
        match self {
            Self::Empty => match given {
                Json::Null | Json::Bool(false) => true,
                Json::String(text) => text.is_empty(),
                Json::Array(list) => list.is_empty(),
                Json::Object(map) => map.is_empty(),
                Json::Bool(true) | Json::Number(_) => false,
            },
            Self::Null => given.is_null(),
            Self::Number(value) => given.as_f64() == Some(value),
            Self::Words(words) => given.as_str().is_some_and(|given| words.contains(&given)),
            Self::All => matches!(given.as_i64(), Some(-1 | 0)),
            Self::PlainText => given.get("type").and_then(Json::as_str) == Some("text"),
        }
    }

    const fn expected(self) -> &'static str {
        match self {
            Self::Empty | Self::Null => "it to be absent",
            Self::Number(0.0) => "0",
            Self::Number(_) => "1",
            Self::Words(_) => "`auto` or `none`",
            Self::All => "-1 or 0, all tokens",
            Self::PlainText => "the type `text`",
        }
    }
}
