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

/// A tool of a namespace. Chat has no namespaces: there the tool has both names in one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Spaced {
    /// Its name in chat.
    pub(super) in_chat: String,
    pub(super) namespace: String,
    pub(super) name: String,
}

impl Spaced {
    pub(super) fn new(namespace: &str, name: &str) -> Self {
        Self {
            in_chat: format!("{namespace}__{name}"),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        }
    }
}

/// The tools of a request.
#[derive(Default)]
pub(super) struct Tools {
    pub(super) functions: Vec<FormTool>,
    /// Names in chat of those of free text.
    pub(super) custom: Vec<String>,
    /// Those that lie in a namespace.
    pub(super) spaced: Vec<Spaced>,
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
        let kind: String = node.need("type", "`function`, `custom` or `namespace`")?;
        match kind.as_str() {
            "namespace" => {
                let namespace: String = node.need("name", "a string")?;
                let missing = || node.refuse("tools", "is missing, expected a list of tools");
                let list = node.raw("tools").ok_or_else(missing)?;
                for tool in Node::list(&node.path_of("tools"), list)? {
                    let kind: String = tool.need("type", "`function` or `custom`")?;
                    self.function(&tool, &kind, Some(&namespace))?;
                }
            }
            offered if OFFERED.contains(&offered) => {
                self.left_out.push(kind);
                return Ok(());
            }
            kind => self.function(node, kind, None)?,
        }
        let members = node.members().map(|(name, value)| (name.to_owned(), raw(value)));
        self.kept.push(Value::Object(members.collect()));
        Ok(())
    }

    fn function(&mut self, node: &Node, kind: &str, namespace: Option<&str>) -> Result<(), ApiError> {
        if !matches!(kind, "function" | "custom") {
            let problem = format!("is `{kind}`, a tool that this engine does not run, expected `function` or `custom`");
            return Err(node.refuse("type", &problem));
        }
        let mut name: String = node.need("name", "a string")?;
        if let Some(namespace) = namespace {
            let spaced = Spaced::new(namespace, &name);
            name.clone_from(&spaced.in_chat);
            self.spaced.push(spaced);
        }
        let function = if kind == "custom" {
            self.custom.push(name.clone());
            FormFunction {
                name,
                description: described(node)?,
                parameters: Some(raw_value(&Bytes::from_static(FREE_TEXT))),
                strict: None,
            }
        } else {
            FormFunction {
                name,
                description: node.read("description", "a string")?,
                parameters: node.raw("parameters").map(raw_value),
                strict: node.read("strict", "true or false")?,
            }
        };
        self.functions.push(FormTool::from(function));
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
