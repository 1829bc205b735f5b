//! Chat messages and tools as translators of other dialects write them.
//!
//! Arguments and schemas are the client's own JSON texts: a number or an order of keys that changed on the way would be
//! another prompt.

use serde::Serialize;
use serde_json::value::RawValue;

/// A message.
#[derive(Debug, Default, Serialize)]
pub(crate) struct FormMessage {
    pub(crate) role: &'static str,
    pub(crate) content: FormContent,
    /// What the model thought before it answered; engines and templates know it by either name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<FormCall>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tool_call_id: Option<String>,
}

/// What a message says.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(crate) enum FormContent {
    /// `null`: an assistant that only calls tools.
    #[default]
    Nothing,
    /// One text.
    Text(String),
    /// Several, which the template joins.
    Parts(Vec<FormText>),
}

/// A part of a message.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct FormText {
    #[serde(rename = "type")]
    kind: &'static str,
    text: String,
}

/// A call of a tool.
#[derive(Debug, Serialize)]
pub(crate) struct FormCall {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: FormCalled,
}

#[derive(Debug, Serialize)]
struct FormCalled {
    name: String,
    arguments: String,
}

/// A tool.
#[derive(Debug, Serialize)]
pub(crate) struct FormTool {
    #[serde(rename = "type")]
    kind: &'static str,
    function: FormFunction,
}

/// What a tool does and takes.
#[derive(Debug, Default, Serialize)]
pub(crate) struct FormFunction {
    pub(crate) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) description: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) parameters: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) strict: Option<bool>,
}

impl FormMessage {
    pub(crate) fn new(role: &'static str, content: FormContent) -> Self {
        Self {
            role,
            content,
            ..Self::default()
        }
    }

    /// A tool's result.
    pub(crate) fn result(call: String, content: String) -> Self {
        Self {
            tool_call_id: Some(call),
            ..Self::new("tool", FormContent::Text(content))
        }
    }

    /// Adds what was thought; nothing where there is nothing.
    pub(crate) fn think(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        let mut whole = self.reasoning.take().unwrap_or_default();
        whole.push_str(text);
        self.reasoning_content = Some(whole.clone());
        self.reasoning = Some(whole);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.content == FormContent::Nothing && self.tool_calls.is_empty() && self.reasoning.is_none()
    }
}

impl FormContent {
    /// One text as such, several as parts.
    pub(crate) fn of_texts(mut texts: Vec<String>) -> Self {
        match texts.len() {
            0 => Self::Nothing,
            1 => Self::Text(texts.remove(0)),
            _ => Self::Parts(texts.into_iter().map(FormText::new).collect()),
        }
    }
}

impl FormText {
    fn new(text: String) -> Self {
        Self { kind: "text", text }
    }
}

impl FormCall {
    pub(crate) fn new(id: String, name: String, arguments: String) -> Self {
        Self {
            id,
            kind: "function",
            function: FormCalled { name, arguments },
        }
    }
}

impl From<FormFunction> for FormTool {
    fn from(function: FormFunction) -> Self {
        Self {
            kind: "function",
            function,
        }
    }
}
