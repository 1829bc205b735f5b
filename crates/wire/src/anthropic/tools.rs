//! Tools, and which of them is to be called.

use crate::openai::chat_form::{FormFunction, FormTool};
use crate::openai::node::raw_value;
use crate::openai::{ApiError, Body, Node};
use serde_json::json;

/// The tools; `None` where there are none.
pub(super) fn translate_tools(root: &Node) -> Result<Option<Vec<FormTool>>, ApiError> {
    let Some(tools) = root.raw("tools") else {
        return Ok(None);
    };
    let tools = Node::list("tools", tools)?;
    let tools: Vec<FormTool> = tools.iter().map(tool).collect::<Result<_, _>>()?;
    Ok((!tools.is_empty()).then_some(tools))
}

fn tool(node: &Node) -> Result<FormTool, ApiError> {
    let kind = node.read::<String>("type", "`custom`")?;
    if let Some(kind) = kind.filter(|kind| kind != "custom") {
        let problem = format!("is `{kind}`, a tool that this engine does not run, expected `custom` or none");
        return Err(node.refuse("type", &problem));
    }
    let schema = node
        .raw("input_schema")
        .ok_or_else(|| node.refuse("input_schema", "is missing, expected a JSON schema"))?;
    Ok(FormTool::from(FormFunction {
        name: node.need("name", "a string")?,
        description: node.read("description", "a string")?,
        parameters: Some(raw_value(schema)),
        strict: node.read("strict", "true or false")?,
    }))
}

/// `tool_choice`, and whether several tools may be called at once.
pub(super) fn translate_choice(root: &Node, chat: &mut Body) -> Result<(), ApiError> {
    let Some(choice) = root.raw("tool_choice") else {
        return Ok(());
    };
    let choice = Node::parse("tool_choice", choice)?;
    let expected = "`auto`, `any`, `tool` or `none`";
    match choice.need::<String>("type", expected)?.as_str() {
        "auto" => chat.set("tool_choice", "auto"),
        "any" => chat.set("tool_choice", "required"),
        "none" => chat.set("tool_choice", "none"),
        "tool" => {
            let name: String = choice.need("name", "a tool's name")?;
            let named = json!({ "type": "function", "function": { "name": name } });
            chat.set("tool_choice", &named);
        }
        other => return Err(choice.refuse("type", &format!("is `{other}`, expected {expected}"))),
    }
    if choice.read("disable_parallel_tool_use", "true or false")? == Some(true) {
        chat.set("parallel_tool_calls", &false);
    }
    Ok(())
}
