//! A request of `/v1/messages` as one of `/v1/chat/completions`.

use super::blocks::{system_text, translate_messages};
use super::tools::{translate_choice, translate_tools};
use crate::openai::chat_form::{FormContent, FormMessage};
use crate::openai::node::raw_value;
use crate::openai::{ApiError, Body, Node};
use serde_json::json;

/// Members that both dialects have, under one name and with one meaning.
const SAME: [&str; 6] = ["model", "max_tokens", "stream", "temperature", "top_p", "top_k"];
/// Members that are translated.
const TRANSLATED: [&str; 7] = [
    "messages",
    "system",
    "stop_sequences",
    "tools",
    "tool_choice",
    "output_config",
    "output_format",
];
/// Members about accounts, caches and edits, which mean nothing to an engine (see the module).
const DROPPED: [&str; 9] = [
    "metadata",
    "service_tier",
    "thinking",
    "context_management",
    "cache_control",
    "inference_geo",
    "anthropic_version",
    "betas",
    "speed",
];
/// Members that ask for what only Anthropic's servers do.
const REFUSED: [&str; 2] = ["container", "mcp_servers"];

/// Translates a request.
///
/// # Errors
/// A member is missing or wrong, or cannot be translated; the error names its path.
pub fn to_chat(body: &Body) -> Result<Body, ApiError> {
    let root = Node::root(body);
    root.need::<u32>("max_tokens", "an integer of at least 1")?;
    let mut chat = prompt(&root)?;
    for name in SAME {
        if let Some(value) = root.raw(name) {
            chat.set_raw(name, value.clone());
        }
    }
    if let Some(stop) = root.read::<Vec<String>>("stop_sequences", "a list of strings")?
        && !stop.is_empty()
    {
        chat.set("stop", &stop);
    }
    translate_choice(&root, &mut chat)?;
    output(&root, &mut chat)?;
    for (name, value) in root.members() {
        let known = SAME.contains(&name) || TRANSLATED.contains(&name) || DROPPED.contains(&name);
        if !known && !REFUSED.contains(&name) {
            chat.set_raw(name, value.clone());
        }
    }
    Ok(chat)
}

/// Translates a request of `/v1/messages/count_tokens`: what of it is rendered.
///
/// # Errors
/// As [`to_chat`].
pub fn count_to_chat(body: &Body) -> Result<Body, ApiError> {
    let root = Node::root(body);
    let mut chat = prompt(&root)?;
    for name in ["model", "chat_template_kwargs"] {
        if let Some(value) = root.raw(name) {
            chat.set_raw(name, value.clone());
        }
    }
    Ok(chat)
}

/// Messages and tools.
fn prompt(root: &Node) -> Result<Body, ApiError> {
    for name in REFUSED {
        if root.raw(name).is_some_and(|value| value.as_ref() != b"[]") {
            return Err(root.refuse(name, "cannot be translated for this engine, expected it to be absent"));
        }
    }
    let mut messages = Vec::new();
    if let Some(text) = system_text(root)? {
        messages.push(FormMessage::new("system", FormContent::Text(text)));
    }
    let missing = || root.refuse("messages", "is missing, expected a list of messages");
    let list = root.raw("messages").ok_or_else(missing)?;
    translate_messages(&Node::list("messages", list)?, &mut messages)?;
    let mut chat = Body::default();
    chat.set("messages", &messages);
    if let Some(tools) = translate_tools(root)? {
        chat.set("tools", &tools);
    }
    Ok(chat)
}

/// How the output is to look, and how much is to be thought about it.
fn output(root: &Node, chat: &mut Body) -> Result<(), ApiError> {
    let config = root.raw("output_config");
    let config = config.map(|config| Node::parse("output_config", config)).transpose()?;
    if let Some(effort) = config
        .as_ref()
        .and_then(|config| config.read::<String>("effort", "a string").transpose())
        .transpose()?
    {
        // Engines know three of them.
        let effort = match effort.as_str() {
            "xhigh" | "max" => "high",
            other => other,
        };
        chat.set("reasoning_effort", effort);
    }
    let in_config = config
        .as_ref()
        .and_then(|config| Some((config.path_of("format"), config.raw("format")?.clone())));
    let at_top = root
        .raw("output_format")
        .map(|format| ("output_format".to_owned(), format.clone()));
    let Some((path, format)) = in_config.or(at_top) else {
        return Ok(());
    };
    let format = Node::parse(path, &format)?;
    match format.need::<String>("type", "`json_schema`")?.as_str() {
        "json_schema" => {
            let schema = format
                .raw("schema")
                .ok_or_else(|| format.refuse("schema", "is missing, expected a JSON schema"))?;
            let named =
                json!({ "type": "json_schema", "json_schema": { "name": "output", "schema": raw_value(schema) } });
            chat.set("response_format", &named);
            Ok(())
        }
        other => Err(format.refuse("type", &format!("is `{other}`, expected `json_schema`"))),
    }
}
