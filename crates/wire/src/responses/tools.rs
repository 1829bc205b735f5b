//! Tools, and which of them is to be called.

use crate::openai::chat_form::{FormFunction, FormTool};
use crate::openai::node::{is_string, raw_value};
use crate::openai::{ApiError, Body, Node};
use bytes::Bytes;
use serde_json::{Value, json};

/// What a tool of free text takes, as a function.
const FREE_TEXT: &[u8] = br#"{"type":"object","properties":{"input":{"type":"string"}},"required":["input"]}"#;

/// Tools that OpenAI's servers run and that clients offer by default.
const OFFERED: [&str; 3] = ["web_search", "web_search_preview", "web_search_2025_08_26"];

/// The tools of a request.
#[derive(Default)]
pub(super) struct Tools {
    pub(super) functions: Vec<FormTool>,
    /// Names of those of free text.
    pub(super) custom: Vec<String>,
    /// Those that the model gets, as the client sent them.
    pub(super) kept: Vec<Value>,
    /// Types of those that were left out.
    left_out: Vec<String>,
}

impl Tools {
    pub(super) fn translate(root: &Node) -> Result<Self, ApiError> {
        let mut tools = Self::default();
        let Some(list) = root.raw("tools") else {
            return Ok(tools);
        };
        for node in Node::list("tools", list)? {
            tools.add(&node)?;
        }
        Ok(tools)
    }

    fn add(&mut self, node: &Node) -> Result<(), ApiError> {
        let kind: String = node.need("type", "`function` or `custom`")?;
        let function = match kind.as_str() {
            "function" => FormFunction {
                name: node.need("name", "a string")?,
                description: node.read("description", "a string")?,
                parameters: node.raw("parameters").map(raw_value),
                strict: node.read("strict", "true or false")?,
            },
            "custom" => {
                let name: String = node.need("name", "a string")?;
                self.custom.push(name.clone());
                FormFunction {
                    name,
                    description: described(node)?,
                    parameters: Some(raw_value(&Bytes::from_static(FREE_TEXT))),
                    strict: None,
                }
            }
            offered if OFFERED.contains(&offered) => {
                self.left_out.push(kind);
                return Ok(());
            }
            other => {
                let problem =
                    format!("is `{other}`, a tool that this engine does not run, expected `function` or `custom`");
                return Err(node.refuse("type", &problem));
            }
        };
        self.functions.push(FormTool::from(function));
        let members = node.members().map(|(name, value)| (name.to_owned(), raw(value)));
        self.kept.push(Value::Object(members.collect()));
        Ok(())
    }
}

/// The description, and the grammar of the text, which a function has no place for.
fn described(node: &Node) -> Result<Option<String>, ApiError> {
    let description: Option<String> = node.read("description", "a string")?;
    let Some(format) = node.raw("format") else {
        return Ok(description);
    };
    let format = Node::parse(node.path_of("format"), format)?;
    let Some(grammar) = format.read::<String>("definition", "a string")? else {
        return Ok(description);
    };
    let description = description.unwrap_or_default();
    Ok(Some(
        format!("{description}\n\n`input` follows this grammar:\n{grammar}")
            .trim()
            .to_owned(),
    ))
}

fn raw(json: &Bytes) -> Value {
    serde_json::from_slice(json).unwrap_or_default()
}

/// `tool_choice`.
pub(super) fn translate_choice(root: &Node, tools: &Tools, chat: &mut Body) -> Result<(), ApiError> {
    const EXPECTED: &str = "`auto`, `none`, `required` or a tool";
    let Some(choice) = root.raw("tool_choice") else {
        return Ok(());
    };
    if is_string(choice) {
        let word: String = root.need("tool_choice", EXPECTED)?;
        return match word.as_str() {
            "auto" | "none" | "required" => {
                chat.set("tool_choice", &word);
                Ok(())
            }
            other => Err(root.refuse("tool_choice", &format!("is `{other}`, expected {EXPECTED}"))),
        };
    }
    let choice = Node::parse("tool_choice", choice)?;
    match choice.need::<String>("type", EXPECTED)?.as_str() {
        "function" | "custom" => {
            let name: String = choice.need("name", "a tool's name")?;
            chat.set(
                "tool_choice",
                &json!({ "type": "function", "function": { "name": name } }),
            );
            Ok(())
        }
        other if tools.left_out.iter().any(|kind| kind == other) => {
            let problem = format!("is `{other}`, a tool that this engine does not run");
            Err(choice.refuse("type", &problem))
        }
        other => Err(choice.refuse("type", &format!("is `{other}`, expected `function` or `custom`"))),
    }
}
