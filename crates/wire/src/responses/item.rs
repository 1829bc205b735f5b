//! The items of a response's output, while they grow and when they are done.

use serde_json::{Value, json};

/// An item of the output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) id: String,
    pub(super) kind: ItemKind,
    /// Its text, or its arguments.
    pub(super) text: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ItemKind {
    Reasoning,
    Message,
    Call {
        /// Which of the chat answer's calls.
        call: usize,
        call_id: String,
        name: String,
        /// The namespace that the tool lies in.
        namespace: Option<String>,
        /// Whether the tool takes free text.
        is_custom: bool,
    },
}

impl Item {
    /// The item with this status and text.
    fn with(&self, status: &str, text: Option<&str>) -> Value {
        let mut item = self.without_namespace(status, text);
        if let ItemKind::Call {
            namespace: Some(namespace),
            ..
        } = &self.kind
        {
            item["namespace"] = json!(namespace);
        }
        item
    }

    fn without_namespace(&self, status: &str, text: Option<&str>) -> Value {
        let id = &self.id;
        match &self.kind {
            ItemKind::Reasoning => {
                let content: Vec<Value> = text.iter().map(|_| self.part()).collect();
                json!({ "id": id, "type": "reasoning", "summary": [], "content": content, "encrypted_content": null, "status": status })
            }
            ItemKind::Message => {
                let content: Vec<Value> = text.iter().map(|_| self.part()).collect();
                json!({ "id": id, "type": "message", "role": "assistant", "status": status, "content": content })
            }
            ItemKind::Call {
                call_id,
                name,
                is_custom: false,
                ..
            } => {
                let arguments = text.unwrap_or_default();
                json!({ "id": id, "type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, "status": status })
            }
            ItemKind::Call { call_id, name, .. } => {
                let input = text.map(|_| self.free_text()).unwrap_or_default();
                json!({ "id": id, "type": "custom_tool_call", "call_id": call_id, "name": name, "input": input, "status": status })
            }
        }
    }

    /// As it begins.
    pub(super) fn opening(&self) -> Value {
        self.with("in_progress", None)
    }

    /// As it is in the end; `is_cut` where the limit of tokens ended it.
    pub(super) fn whole(&self, is_cut: bool) -> Value {
        self.with(if is_cut { "incomplete" } else { "completed" }, Some(&self.text))
    }

    /// Its one part, where it has parts.
    pub(super) fn part(&self) -> Value {
        match self.kind {
            ItemKind::Reasoning => json!({ "type": "reasoning_text", "text": self.text }),
            ItemKind::Message | ItemKind::Call { .. } => {
                json!({ "type": "output_text", "text": self.text, "annotations": [], "logprobs": [] })
            }
        }
    }

    pub(super) const fn has_parts(&self) -> bool {
        !matches!(self.kind, ItemKind::Call { .. })
    }

    /// What the model wrote for a tool of free text: its argument `input`, or all of it where it made none.
    pub(super) fn free_text(&self) -> String {
        let arguments: Option<Value> = serde_json::from_str(&self.text).ok();
        let input = arguments
            .as_ref()
            .and_then(|arguments| arguments.get("input")?.as_str());
        input.unwrap_or(&self.text).to_owned()
    }

    pub(super) const fn is_custom(&self) -> bool {
        matches!(self.kind, ItemKind::Call { is_custom: true, .. })
    }
}
