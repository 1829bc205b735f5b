//! Messages and their content blocks as chat messages.

use crate::openai::chat_form::{FormCall, FormContent, FormMessage};
use crate::openai::node::is_string;
use crate::openai::{ApiError, Node};

/// The system prompt; `None` where there is none.
pub(super) fn system_text(root: &Node) -> Result<Option<String>, ApiError> {
    let text = texts(root, "system")?.concat();
    Ok((!text.is_empty()).then_some(text))
}

/// Adds the messages.
pub(super) fn translate_messages(nodes: &[Node], messages: &mut Vec<FormMessage>) -> Result<(), ApiError> {
    for node in nodes {
        let role: String = node.need("role", "`user` or `assistant`")?;
        if node.raw("content").is_none() {
            return Err(node.refuse("content", "is missing, expected a string or a list of blocks"));
        }
        match role.as_str() {
            // Claude Code's newer releases have names of their own for what a user's message carries.
            "user" | "ctx" | "msg" => user(node, messages)?,
            "assistant" => assistant(node, messages)?,
            // Not in the reference, but sent by Claude Code in the middle of a history.
            "system" => messages.push(FormMessage::new(
                "system",
                FormContent::Text(texts(node, "content")?.concat()),
            )),
            other => {
                let problem = format!("is `{other}`, expected `user` or `assistant`");
                return Err(node.refuse("role", &problem));
            }
        }
    }
    if messages.iter().all(|message| message.role == "system") {
        return Err(ApiError::invalid("`messages` is empty, expected a message or more").with_param("messages"));
    }
    Ok(())
}

/// Results of tools are messages of their own, before what the user says beside them.
fn user(node: &Node, messages: &mut Vec<FormMessage>) -> Result<(), ApiError> {
    let mut said = Vec::new();
    let mut has_results = false;
    for block in blocks(node)? {
        match block {
            Block::Text(text) => said.push(text),
            Block::Other(block) => {
                let kind: String = block.need("type", "the type of a content block")?;
                if kind != "tool_result" {
                    return Err(untranslatable(&block, &kind, "`text` or `tool_result`"));
                }
                let call = block.need("tool_use_id", "the id of a `tool_use` block")?;
                messages.push(FormMessage::result(call, texts(&block, "content")?.join("\n")));
                has_results = true;
            }
        }
    }
    if !said.is_empty() || !has_results {
        let content = match FormContent::of_texts(said) {
            FormContent::Nothing => FormContent::Text(String::new()),
            content => content,
        };
        messages.push(FormMessage::new("user", content));
    }
    Ok(())
}

fn assistant(node: &Node, messages: &mut Vec<FormMessage>) -> Result<(), ApiError> {
    let mut message = FormMessage::new("assistant", FormContent::Nothing);
    let mut said = Vec::new();
    for block in blocks(node)? {
        let block = match block {
            Block::Text(text) => {
                said.push(text);
                continue;
            }
            Block::Other(block) => block,
        };
        let kind: String = block.need("type", "the type of a content block")?;
        match kind.as_str() {
            "tool_use" => message.tool_calls.push(tool_use(&block)?),
            "thinking" => message.think(&block.need::<String>("thinking", "a string")?),
            "redacted_thinking" => {}
            other => return Err(untranslatable(&block, other, "`text`, `thinking` or `tool_use`")),
        }
    }
    message.content = FormContent::of_texts(said);
    if message.is_empty() {
        message.content = FormContent::Text(String::new());
    }
    messages.push(message);
    Ok(())
}

fn tool_use(block: &Node) -> Result<FormCall, ApiError> {
    let input = match block.raw("input") {
        None => "{}".to_owned(),
        Some(input) if input.starts_with(b"{") => String::from_utf8_lossy(input).into_owned(),
        Some(_) => return Err(block.refuse("input", "is no object, expected the tool's arguments")),
    };
    Ok(FormCall::new(
        block.need("id", "a string")?,
        block.need("name", "a string")?,
        input,
    ))
}

/// A block; text is most of them.
enum Block {
    Text(String),
    Other(Node),
}

/// The content of a message: a text counts as one block. Empty texts say nothing.
fn blocks(node: &Node) -> Result<Vec<Block>, ApiError> {
    let Some(content) = node.raw("content") else {
        return Ok(Vec::new());
    };
    if is_string(content) {
        let text: String = node.need("content", "a string")?;
        return Ok(vec![Block::Text(text)]);
    }
    let mut found = Vec::new();
    for block in Node::list(&node.path_of("content"), content)? {
        if block.need::<String>("type", "the type of a content block")? != "text" {
            found.push(Block::Other(block));
            continue;
        }
        let text: String = block.need("text", "a string")?;
        if !text.is_empty() {
            found.push(Block::Text(text));
        }
    }
    Ok(found)
}

/// The texts of a member that holds text only: a string, or text blocks.
fn texts(node: &Node, name: &str) -> Result<Vec<String>, ApiError> {
    let Some(content) = node.raw(name) else {
        return Ok(Vec::new());
    };
    if is_string(content) {
        return Ok(vec![node.need(name, "a string")?]);
    }
    let text = |block: Node| {
        let kind: String = block.need("type", "the type of a content block")?;
        if kind == "text" {
            block.need("text", "a string")
        } else {
            Err(untranslatable(&block, &kind, "`text`"))
        }
    };
    Node::list(&node.path_of(name), content)?
        .into_iter()
        .map(text)
        .collect()
}

fn untranslatable(block: &Node, kind: &str, expected: &str) -> ApiError {
    let problem = format!("is `{kind}`, which cannot be translated for this engine, expected {expected}");
    block.refuse("type", &problem)
}
