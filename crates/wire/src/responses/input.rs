//! The items of `input` as chat messages.
//!
//! What a model said and did in one turn is several items; it was one message, and is made one again, so that the prompt
//! repeats what the model has in its cache.

use super::tools::Spaced;
use crate::openai::chat_form::{FormCall, FormContent, FormMessage};
use crate::openai::node::is_string;
use crate::openai::{ApiError, Node};
use serde_json::json;

/// Parts that are text, whoever said it.
const TEXTS: [&str; 4] = ["input_text", "output_text", "text", "summary_text"];

/// All messages.
pub(super) fn translate_input(root: &Node) -> Result<Vec<FormMessage>, ApiError> {
    let mut history = History::default();
    history.instruct(root.read("instructions", "a string")?.unwrap_or_default());
    let missing = || root.refuse("input", "is missing, expected a string or a list of items");
    let input = root.raw("input").ok_or_else(missing)?;
    if is_string(input) {
        let text: String = root.need("input", "a string")?;
        history.push(FormMessage::new("user", FormContent::Text(text)));
    } else {
        for item in Node::list("input", input)? {
            history.take(&item)?;
        }
    }
    let messages = history.finish();
    if messages.iter().all(|message| message.role == "system") {
        return Err(ApiError::invalid("`input` is empty, expected an item or more").with_param("input"));
    }
    Ok(messages)
}

/// A history under way.
#[derive(Default)]
struct History {
    /// Texts before all else.
    instructions: Vec<String>,
    messages: Vec<FormMessage>,
    /// The model's present turn.
    turn: Option<Turn>,
}

/// What the model thought, said and did before somebody else spoke.
#[derive(Default)]
struct Turn {
    thoughts: String,
    texts: Vec<String>,
    calls: Vec<FormCall>,
}

impl History {
    fn instruct(&mut self, text: String) {
        if !text.is_empty() {
            self.instructions.push(text);
        }
    }

    fn take(&mut self, item: &Node) -> Result<(), ApiError> {
        let kind: Option<String> = item.read("type", "the type of an item")?;
        match kind.as_deref() {
            None | Some("message") => self.message(item)?,
            Some("function_call") => {
                let arguments = item.need("arguments", "a string of JSON")?;
                self.call(item, arguments)?;
            }
            Some("custom_tool_call") => {
                let input: String = item.need("input", "a string")?;
                self.call(item, json!({ "input": input }).to_string())?;
            }
            Some("function_call_output" | "custom_tool_call_output") => {
                let call = item.need("call_id", "the id of a call")?;
                self.push(FormMessage::result(call, texts(item, "output")?.join("\n")));
            }
            Some("reasoning") => {
                let thoughts = texts(item, "content")?.concat();
                self.turn().thoughts.push_str(&thoughts);
            }
            Some(other) => {
                let problem = format!(
                    "is `{other}`, which cannot be translated for this engine, expected `message`, `function_call`, \
                     `function_call_output`, `custom_tool_call`, `custom_tool_call_output` or `reasoning`"
                );
                return Err(item.refuse("type", &problem));
            }
        }
        Ok(())
    }

    fn message(&mut self, item: &Node) -> Result<(), ApiError> {
        let role: String = item.need("role", "`user`, `assistant`, `system` or `developer`")?;
        if item.raw("content").is_none() {
            return Err(item.refuse("content", "is missing, expected a string or a list of parts"));
        }
        let said = texts(item, "content")?;
        match role.as_str() {
            "assistant" => self.turn().texts.extend(said),
            "user" => self.push(FormMessage::new("user", content(said))),
            "system" | "developer" if self.messages.is_empty() && self.turn.is_none() => {
                self.instruct(said.join("\n"));
            }
            "system" | "developer" => self.push(FormMessage::new("system", content(said))),
            other => {
                let problem = format!("is `{other}`, expected `user`, `assistant`, `system` or `developer`");
                return Err(item.refuse("role", &problem));
            }
        }
        Ok(())
    }

    fn call(&mut self, item: &Node, arguments: String) -> Result<(), ApiError> {
        let name: String = item.need("name", "a string")?;
        let name = match item.read::<String>("namespace", "a string")? {
            Some(namespace) => Spaced::new(&namespace, &name).in_chat,
            None => name,
        };
        let call = FormCall::new(item.need("call_id", "a string")?, name, arguments);
        self.turn().calls.push(call);
        Ok(())
    }

    fn turn(&mut self) -> &mut Turn {
        self.turn.get_or_insert_default()
    }

    fn push(&mut self, message: FormMessage) {
        self.end_turn();
        self.messages.push(message);
    }

    fn end_turn(&mut self) {
        let Some(turn) = self.turn.take() else { return };
        let mut message = FormMessage::new("assistant", FormContent::of_texts(turn.texts));
        message.tool_calls = turn.calls;
        message.think(&turn.thoughts);
        // Thoughts that are encrypted leave nothing to repeat.
        if !message.is_empty() {
            self.messages.push(message);
        }
    }

    fn finish(mut self) -> Vec<FormMessage> {
        self.end_turn();
        if !self.instructions.is_empty() {
            let text = FormContent::Text(self.instructions.join("\n\n"));
            self.messages.insert(0, FormMessage::new("system", text));
        }
        self.messages
    }
}

fn content(said: Vec<String>) -> FormContent {
    match FormContent::of_texts(said) {
        FormContent::Nothing => FormContent::Text(String::new()),
        content => content,
    }
}

/// The texts of a member: a string, or a list of parts that are text.
fn texts(item: &Node, name: &str) -> Result<Vec<String>, ApiError> {
    let Some(content) = item.raw(name) else {
        return Ok(Vec::new());
    };
    if is_string(content) {
        return Ok(vec![item.need(name, "a string")?]);
    }
    let text = |part: Node| {
        let kind: String = part.need("type", "the type of a content part")?;
        match kind.as_str() {
            "reasoning_text" => part.need("text", "a string"),
            "refusal" => part.need("refusal", "a string"),
            kind if TEXTS.contains(&kind) => part.need("text", "a string"),
            other => {
                let problem = format!("is `{other}`, which cannot be translated for this engine, expected text");
                Err(part.refuse("type", &problem))
            }
        }
    };
    Node::list(&item.path_of(name), content)?
        .into_iter()
        .map(text)
        .collect()
}
