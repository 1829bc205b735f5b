//! A request of `/v1/responses` as one of `/v1/chat/completions`, and what of it the answer repeats.

use super::input::translate_input;
use super::tools::{Spaced, Tools, translate_choice};
use crate::openai::node::raw_value;
use crate::openai::{ApiError, Body, Node};
use bytes::Bytes;
use serde_json::{Value, json};

/// Members that both dialects have, and those that only have another name in chat.
const SAME: [(&str, &str); 7] = [
    ("model", "model"),
    ("stream", "stream"),
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("parallel_tool_calls", "parallel_tool_calls"),
    ("prompt_cache_key", "prompt_cache_key"),
    ("max_output_tokens", "max_completion_tokens"),
];
/// Members that are translated.
const TRANSLATED: [&str; 6] = ["input", "instructions", "tools", "tool_choice", "reasoning", "text"];
/// Members that mean nothing to an engine.
const DROPPED: [&str; 9] = [
    "store",
    "include",
    "metadata",
    "client_metadata",
    "service_tier",
    "stream_options",
    "truncation",
    "max_tool_calls",
    "safety_identifier",
];
/// Members that ask for what only OpenAI's servers do, and what is expected instead.
const REFUSED: [(&str, &str); 5] = [
    (
        "previous_response_id",
        "responses are not stored here, expected the whole history in `input`",
    ),
    (
        "conversation",
        "conversations are not stored here, expected the whole history in `input`",
    ),
    (
        "prompt",
        "prompts are not stored here, expected the whole prompt in `input`",
    ),
    ("background", "answers are not stored here, expected `false`"),
    ("top_logprobs", "they cannot be translated, expected it to be absent"),
];

/// Members of the request that the answer repeats, with what is said of them where they are absent.
const REPEATED: [(&str, &str); 10] = [
    ("instructions", "null"),
    ("max_output_tokens", "null"),
    ("metadata", "{}"),
    ("parallel_tool_calls", "true"),
    ("prompt_cache_key", "null"),
    ("reasoning", r#"{"effort":null,"summary":null}"#),
    ("temperature", "1.0"),
    ("text", r#"{"format":{"type":"text"}}"#),
    ("tool_choice", r#""auto""#),
    ("top_p", "1.0"),
];

/// What the answer needs of the request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Echo {
    /// Members that it repeats, as JSON texts.
    pub(super) members: Vec<(&'static str, Bytes)>,
    /// Tools of free text: calls of them come back in another form.
    pub(super) custom_tools: Vec<String>,
    /// Tools in namespaces: calls of them come back under both their names.
    pub(super) spaced_tools: Vec<Spaced>,
}

/// Translates a request.
///
/// # Errors
/// A member is missing or wrong, or cannot be translated; the error names its path.
pub fn to_chat(body: &Body) -> Result<(Body, Echo), ApiError> {
    let root = Node::root(body);
    refuse_stored(&root)?;
    let tools = Tools::translate(&root)?;
    let mut chat = Body::default();
    chat.set("messages", &translate_input(&root)?);
    if !tools.functions.is_empty() {
        chat.set("tools", &tools.functions);
        translate_choice(&root, &tools, &mut chat)?;
    }
    for (name, in_chat) in SAME {
        if let Some(value) = root
            .raw(name)
            .filter(|_| name != "parallel_tool_calls" || !tools.functions.is_empty())
        {
            chat.set_raw(in_chat, value.clone());
        }
    }
    output(&root, &mut chat)?;
    for (name, value) in root.members() {
        let same = SAME.iter().any(|(same, _)| *same == name);
        let refused = REFUSED.iter().any(|(refused, _)| *refused == name);
        if !same && !refused && !TRANSLATED.contains(&name) && !DROPPED.contains(&name) {
            chat.set_raw(name, value.clone());
        }
    }
    let echo = Echo {
        members: repeated(&root, tools.kept),
        custom_tools: tools.custom,
        spaced_tools: tools.spaced,
    };
    Ok((chat, echo))
}

fn refuse_stored(root: &Node) -> Result<(), ApiError> {
    for (name, why) in REFUSED {
        let asked = root
            .raw(name)
            .is_some_and(|value| !matches!(value.as_ref(), b"false" | b"0"));
        if asked {
            return Err(root
                .refuse(name, &format!("is given: {why}"))
                .with_code("unsupported_parameter"));
        }
    }
    let truncation = root.read::<String>("truncation", "`disabled`")?;
    if let Some(truncation) = truncation.filter(|truncation| truncation != "disabled") {
        return Err(root.refuse("truncation", &format!("is `{truncation}`, expected `disabled`")));
    }
    for include in root
        .read::<Vec<String>>("include", "a list of strings")?
        .unwrap_or_default()
    {
        if include != "reasoning.encrypted_content" {
            let problem = format!("has `{include}`, which is not there, expected `reasoning.encrypted_content` only");
            return Err(root.refuse("include", &problem));
        }
    }
    Ok(())
}

/// How the output is to look, and how much is to be thought about it.
fn output(root: &Node, chat: &mut Body) -> Result<(), ApiError> {
    if let Some(reasoning) = root.raw("reasoning") {
        let reasoning = Node::parse("reasoning", reasoning)?;
        if let Some(effort) = reasoning.raw("effort") {
            chat.set_raw("reasoning_effort", effort.clone());
        }
    }
    let Some(text) = root.raw("text") else { return Ok(()) };
    let text = Node::parse("text", text)?;
    if let Some(verbosity) = text.raw("verbosity") {
        chat.set_raw("verbosity", verbosity.clone());
    }
    let Some(format) = text.raw("format") else {
        return Ok(());
    };
    let format = Node::parse("text.format", format)?;
    match format
        .need::<String>("type", "`text`, `json_object` or `json_schema`")?
        .as_str()
    {
        "text" => {}
        "json_object" => chat.set("response_format", &json!({ "type": "json_object" })),
        "json_schema" => {
            let missing = || format.refuse("schema", "is missing, expected a JSON schema");
            let mut schema = Body::default();
            schema.set("name", &format.need::<String>("name", "a string")?);
            schema.set_raw("schema", format.raw("schema").ok_or_else(missing)?.clone());
            if let Some(strict) = format.raw("strict") {
                schema.set_raw("strict", strict.clone());
            }
            let mut named = Body::default();
            named.set("type", "json_schema");
            named.set_raw("json_schema", schema.to_bytes());
            chat.set("response_format", &raw_value(&named.to_bytes()));
        }
        other => {
            let problem = format!("is `{other}`, expected `text`, `json_object` or `json_schema`");
            return Err(format.refuse("type", &problem));
        }
    }
    Ok(())
}

fn repeated(root: &Node, tools: Vec<Value>) -> Vec<(&'static str, Bytes)> {
    let member = |(name, absent): (&'static str, &'static str)| {
        let given = root.raw(name).map(one_line);
        (name, given.unwrap_or(Bytes::from_static(absent.as_bytes())))
    };
    let mut members: Vec<_> = REPEATED.into_iter().map(member).collect();
    members.push(("tools", Value::Array(tools).to_string().into()));
    members
}

/// Without the line ends that a client may have between its members: what is repeated becomes part of an event. Inside
/// of strings they are escaped.
fn one_line(json: &Bytes) -> Bytes {
    let blank = |byte: &u8| if matches!(byte, b'\r' | b'\n') { b' ' } else { *byte };
    if json.iter().any(|byte| matches!(byte, b'\r' | b'\n')) {
        json.iter().map(blank).collect::<Vec<u8>>().into()
    } else {
        json.clone()
    }
}
