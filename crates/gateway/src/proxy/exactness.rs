//! Whether an answer that broke off could be continued by another worker so that the client cannot tell.
//!
//! Continuing sends the prompt and the tokens sent so far as a new prompt. That is the same computation only where
//! nothing but those tokens decides the next one, so the request's fields are checked against a list of those that are
//! known to be harmless: a field that nobody here has heard of makes continuing inexact.

use homing_wire::openai::Body;

/// Why an answer cannot be continued, in a few words.
pub(crate) type Blocker = &'static str;

/// Fields that change nothing about the tokens, or act on each token by itself.
const HARMLESS: [&str; 26] = [
    "model",
    "messages",
    "prompt",
    "stream",
    "max_tokens",
    "max_completion_tokens",
    "top_p",
    "top_k",
    "min_p",
    "logit_bias",
    "ignore_eos",
    "stop_token_ids",
    "skip_special_tokens",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "return_token_ids",
    "parallel_tool_calls",
    "cache_salt",
    "priority",
    "request_id",
    "verbosity",
];

/// Fields that say how an engine renders a conversation. The router's own rendering does not know them, so its tokens
/// are the engine's only where the engine says so.
const RENDERING: [&str; 7] = [
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "reasoning_effort",
];

/// Fields that carry over to the request that continues an answer.
pub(crate) const CARRIED: [&str; 13] = [
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "logit_bias",
    "ignore_eos",
    "stop_token_ids",
    "skip_special_tokens",
    "user",
    "cache_salt",
    "priority",
];

/// The first thing in a request that makes its continuation inexact, whatever was sent so far. `parses_output` says
/// that engines of this fleet turn the model's text into tool calls and reasoning: a continuation is raw text.
pub(crate) fn blocker(body: &Body, parses_output: bool) -> Option<Blocker> {
    body.members()
        .filter(|(name, _)| !HARMLESS.contains(name) && !RENDERING.contains(name))
        .find_map(|(name, value)| {
            // Member texts come out of a JSON parser, which takes UTF-8 only.
            let text = str::from_utf8(value).ok()?;
            if text == "null" {
                None
            } else {
                of_field(name, text, body, parses_output)
            }
        })
}

/// Whether a request is rendered in a way of its own.
pub(crate) fn renders_specially(body: &Body) -> bool {
    RENDERING
        .iter()
        .any(|name| body.get(name).is_some_and(|value| value.as_ref() != b"null"))
}

fn of_field(name: &str, text: &str, body: &Body, parses_output: bool) -> Option<Blocker> {
    let number = text.parse::<f64>().ok();
    let (harmless, blocker) = match name {
        "temperature" => (true, ""),
        // Without a temperature the draws are the seed's; greedy draws nothing.
        "seed" => (is_greedy(body), "seeded sampling"),
        "n" | "best_of" => (number == Some(1.0), "n > 1"),
        "presence_penalty" | "frequency_penalty" => (number == Some(0.0), "penalties"),
        "repetition_penalty" => (number == Some(1.0), "penalties"),
        "min_tokens" => (number == Some(0.0), "min_tokens"),
        "logprobs" => (text == "false", "logprobs"),
        "top_logprobs" => (number == Some(0.0), "logprobs"),
        "stream_options" => (
            !compact(text).contains(r#""continuous_usage_stats":true"#),
            "usage in every chunk",
        ),
        "echo" => (text == "false", "echo"),
        "stop" => (
            matches!(compact(text).as_str(), "[]" | "\"\""),
            "a stop string may lie across the cut",
        ),
        "response_format" => (compact(text) == r#"{"type":"text"}"#, "guided decoding"),
        "tools" => (
            !parses_output || compact(text) == "[]" || tools_are_off(body),
            "tool calls",
        ),
        "tool_choice" => (
            !parses_output && !text.contains("required") || matches!(text, "\"none\"" | "\"auto\""),
            "tool calls",
        ),
        _ => (false, "a field of unknown effect"),
    };
    (!harmless).then_some(blocker)
}

fn is_greedy(body: &Body) -> bool {
    body.read::<f64>("temperature", "a number")
        .is_ok_and(|temperature| temperature == Some(0.0))
}

fn tools_are_off(body: &Body) -> bool {
    body.get("tool_choice")
        .is_some_and(|choice| choice.as_ref() == b"\"none\"")
}

fn compact(json: &str) -> String {
    json.chars()
        .filter(|character| !character.is_ascii_whitespace())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(members: &str, parses_output: bool, expected: Option<Blocker>) {
        let body = Body::parse(&format!(r#"{{"model":"m","messages":[]{members}}}"#).into()).unwrap();
        assert_eq!(
            blocker(&body, parses_output),
            expected,
            "{members} parses_output={parses_output}"
        );
    }

    #[test]
    fn only_what_is_known_to_be_harmless_is_continued() {
        check("", true, None);
        check(r#","temperature":0,"max_tokens":9,"top_p":0.9"#, true, None);
        check(r#","temperature":0.7"#, true, None);
        check(r#","temperature":0.0,"seed":3"#, true, None);
        check(r#","temperature":0.7,"seed":3"#, true, Some("seeded sampling"));
        check(r#","seed":3"#, true, Some("seeded sampling"));
        check(
            r#","n":1,"logprobs":false,"stop":[],"min_tokens":0,"presence_penalty":0.0"#,
            true,
            None,
        );
        check(r#","n":2"#, true, Some("n > 1"));
        check(r#","stop":["x"]"#, true, Some("a stop string may lie across the cut"));
        check(r#","stop":null"#, true, None);
        check(r#","response_format":{ "type": "text" }"#, true, None);
        check(
            r#","response_format":{"type":"json_object"}"#,
            true,
            Some("guided decoding"),
        );
        check(r#","guided_regex":"a+""#, true, Some("a field of unknown effect"));
        check(r#","stream_options":{"include_usage":true}"#, true, None);
        check(
            r#","stream_options":{"continuous_usage_stats": true}"#,
            true,
            Some("usage in every chunk"),
        );
        check(r#","repetition_penalty":1.1"#, true, Some("penalties"));
        check(r#","logprobs":true"#, true, Some("logprobs"));
        check(r#","tools":[{"type":"function"}]"#, true, Some("tool calls"));
        check(r#","tools":[{"type":"function"}],"tool_choice":"none""#, true, None);
        check(r#","tools":[{"type":"function"}],"tool_choice":"auto""#, false, None);
        check(
            r#","tools":[{"type":"function"}],"tool_choice":"required""#,
            false,
            Some("tool calls"),
        );
    }
}
