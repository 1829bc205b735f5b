//! An answer in chat's chunks as the events of a response, and as a whole response.
//!
//! Items come one after the other: `response.output_item.added`, for text `response.content_part.added`, deltas, `done`
//! of the text, of the part and of the item. The response is told whole at the beginning and at the end.

use super::item::{Item, ItemKind};
use super::request::Echo;
use crate::openai::{AnswerParts, ApiError, Body, CallPart, Usage};
use crate::sse::SseEvent;
use bytes::{Bytes, BytesMut};
use serde_json::{Value, json};

/// A response under way.
#[derive(Debug)]
pub struct ResponseStream {
    /// Without a prefix: items' ids are made of it.
    name: String,
    model: String,
    /// Seconds since 1970.
    created: u64,
    echo: Echo,
    sequence: u64,
    has_started: bool,
    items: Vec<Item>,
    usage: Option<Usage>,
    finish_reason: Option<String>,
}

impl ResponseStream {
    /// The response `resp_{name}`, from the model that the client asked for; `created` in seconds since 1970.
    #[must_use]
    pub fn new(name: &str, model: &str, created: u64, echo: Echo) -> Self {
        Self {
            name: name.to_owned(),
            model: model.to_owned(),
            created,
            echo,
            sequence: 0,
            has_started: false,
            items: Vec::new(),
            usage: None,
            finish_reason: None,
        }
    }

    /// Takes a chunk and gives the events that it makes.
    ///
    /// # Errors
    /// The engine's chunk makes no sense: a call without a name, or one that goes on after the next began.
    pub fn take(&mut self, chunk: &AnswerParts) -> Result<Bytes, String> {
        let mut events = BytesMut::new();
        self.start(&mut events);
        if !chunk.reasoning.is_empty() {
            self.add(ItemKind::Reasoning, &chunk.reasoning, &mut events);
        }
        if !chunk.text.is_empty() {
            self.add(ItemKind::Message, &chunk.text, &mut events);
        }
        for call in &chunk.calls {
            self.call(call, &mut events)?;
        }
        self.finish_reason = chunk.finish_reason.clone().or(self.finish_reason.take());
        self.usage = chunk.usage.or(self.usage);
        Ok(events.freeze())
    }

    /// The events that end the response.
    #[must_use]
    pub fn finish(&mut self) -> Bytes {
        let mut events = BytesMut::new();
        self.start(&mut events);
        self.close(self.is_cut(), &mut events);
        let (kind, response) = if self.is_cut() {
            ("response.incomplete", self.response("incomplete", None))
        } else {
            ("response.completed", self.response("completed", None))
        };
        self.put_response(&mut events, kind, &response);
        events.freeze()
    }

    /// The event that ends the response with an error.
    #[must_use]
    pub fn fail(&mut self, error: &ApiError) -> Bytes {
        let mut events = BytesMut::new();
        self.start(&mut events);
        let response = self.response("failed", Some(error));
        self.put_response(&mut events, "response.failed", &response);
        events.freeze()
    }

    /// The whole response, for a client without a stream.
    #[must_use]
    pub fn whole(&self) -> Bytes {
        self.response(if self.is_cut() { "incomplete" } else { "completed" }, None)
    }

    fn start(&mut self, events: &mut BytesMut) {
        if std::mem::replace(&mut self.has_started, true) {
            return;
        }
        let response = self.response("in_progress", None);
        self.put_response(events, "response.created", &response);
        self.put_response(events, "response.in_progress", &response);
    }

    fn call(&mut self, part: &CallPart, events: &mut BytesMut) -> Result<(), String> {
        let of_call = |item: &Item| matches!(item.kind, ItemKind::Call { call, .. } if call == part.index);
        if self.items.last().is_some_and(of_call) {
            self.extend(&part.arguments, events);
            return Ok(());
        }
        if self.items.iter().any(of_call) {
            return Err(format!(
                "the tool call `{}` goes on after another item began",
                part.index
            ));
        }
        let named = part.name.clone().filter(|name| !name.is_empty());
        let name = named.ok_or_else(|| format!("the tool call `{}` begins without a name", part.index))?;
        let call_id = part
            .id
            .clone()
            .unwrap_or_else(|| format!("call_{}_{}", self.name, part.index));
        let is_custom = self.echo.custom_tools.contains(&name);
        let spaced = self.echo.spaced_tools.iter().find(|tool| tool.in_chat == name);
        let kind = ItemKind::Call {
            call: part.index,
            call_id,
            namespace: spaced.map(|tool| tool.namespace.clone()),
            name: spaced.map_or(name, |tool| tool.name.clone()),
            is_custom,
        };
        self.open(kind, events);
        self.extend(&part.arguments, events);
        Ok(())
    }

    /// Adds a piece to the open item if it is of this kind, else to a fresh one.
    fn add(&mut self, kind: ItemKind, piece: &str, events: &mut BytesMut) {
        if self.items.last().is_none_or(|item| item.kind != kind) {
            self.open(kind, events);
        }
        self.extend(piece, events);
    }

    fn open(&mut self, kind: ItemKind, events: &mut BytesMut) {
        self.close(false, events);
        let index = self.items.len();
        let prefix = match kind {
            ItemKind::Reasoning => "rs",
            ItemKind::Message => "msg",
            ItemKind::Call { is_custom: false, .. } => "fc",
            ItemKind::Call { .. } => "ctc",
        };
        let item = Item {
            id: format!("{prefix}_{}_{index}", self.name),
            kind,
            text: String::new(),
        };
        self.put(
            events,
            "response.output_item.added",
            json!({ "output_index": index, "item": item.opening() }),
        );
        if item.has_parts() {
            let data = json!({ "item_id": item.id, "output_index": index, "content_index": 0, "part": item.part() });
            self.put(events, "response.content_part.added", data);
        }
        self.items.push(item);
    }

    /// Adds a piece to the open item.
    fn extend(&mut self, piece: &str, events: &mut BytesMut) {
        let index = self.items.len().saturating_sub(1);
        let Some(item) = self.items.last_mut().filter(|_| !piece.is_empty()) else {
            return;
        };
        item.text.push_str(piece);
        let id = item.id.clone();
        let (kind, data) = match &item.kind {
            ItemKind::Reasoning => (
                "response.reasoning_text.delta",
                json!({ "item_id": id, "output_index": index, "content_index": 0, "delta": piece }),
            ),
            ItemKind::Message => (
                "response.output_text.delta",
                json!({ "item_id": id, "output_index": index, "content_index": 0, "delta": piece, "logprobs": [] }),
            ),
            ItemKind::Call { is_custom: false, .. } => (
                "response.function_call_arguments.delta",
                json!({ "item_id": id, "output_index": index, "delta": piece }),
            ),
            // Its text is inside a string of JSON and known when that is whole.
            ItemKind::Call { .. } => return,
        };
        self.put(events, kind, data);
    }

    /// Ends the open item.
    fn close(&mut self, is_cut: bool, events: &mut BytesMut) {
        let Some(item) = self.items.last().cloned() else { return };
        let index = self.items.len() - 1;
        let base = json!({ "item_id": item.id, "output_index": index });
        let with = |members: Value| {
            let mut data = base.clone();
            if let (Value::Object(data), Value::Object(members)) = (&mut data, members) {
                data.extend(members);
            }
            data
        };
        match &item.kind {
            ItemKind::Reasoning => {
                let data = with(json!({ "content_index": 0, "text": item.text }));
                self.put(events, "response.reasoning_text.done", data);
            }
            ItemKind::Message => {
                let data = with(json!({ "content_index": 0, "text": item.text, "logprobs": [] }));
                self.put(events, "response.output_text.done", data);
            }
            ItemKind::Call { name, .. } if !item.is_custom() => {
                let data = with(json!({ "name": name, "arguments": item.text }));
                self.put(events, "response.function_call_arguments.done", data);
            }
            ItemKind::Call { .. } => {
                let input = item.free_text();
                self.put(
                    events,
                    "response.custom_tool_call_input.delta",
                    with(json!({ "delta": input })),
                );
                self.put(
                    events,
                    "response.custom_tool_call_input.done",
                    with(json!({ "input": input })),
                );
            }
        }
        if item.has_parts() {
            let data = with(json!({ "content_index": 0, "part": item.part() }));
            self.put(events, "response.content_part.done", data);
        }
        let data = json!({ "output_index": index, "item": item.whole(is_cut) });
        self.put(events, "response.output_item.done", data);
    }

    fn is_cut(&self) -> bool {
        matches!(self.finish_reason.as_deref(), Some("length" | "content_filter"))
    }

    fn response(&self, status: &str, error: Option<&ApiError>) -> Bytes {
        let mut body = Body::default();
        body.set("id", &format!("resp_{}", self.name));
        body.set("object", "response");
        body.set("created_at", &self.created);
        body.set("status", status);
        body.set("background", &false);
        let code = |error: &ApiError| error.code.clone().unwrap_or_else(|| "server_error".to_owned());
        body.set(
            "error",
            &error.map(|error| json!({ "code": code(error), "message": error.message })),
        );
        let reason = match self.finish_reason.as_deref() {
            Some("content_filter") => "content_filter",
            _ => "max_output_tokens",
        };
        let cut = (status == "incomplete").then(|| json!({ "reason": reason }));
        body.set("incomplete_details", &cut);
        body.set("model", &self.model);
        let last = self.items.len().saturating_sub(1);
        let output = self.items.iter().enumerate();
        let output: Vec<Value> = output
            .map(|(index, item)| item.whole(cut.is_some() && index == last))
            .collect();
        body.set("output", &output);
        body.set("previous_response_id", &Value::Null);
        body.set("store", &false);
        body.set("truncation", "disabled");
        for (name, value) in &self.echo.members {
            body.set_raw(name, value.clone());
        }
        body.set("usage", &self.usage.filter(|_| status != "in_progress").map(usage));
        body.to_bytes()
    }

    fn put(&mut self, events: &mut BytesMut, kind: &str, mut data: Value) {
        data["type"] = json!(kind);
        data["sequence_number"] = json!(self.sequence);
        self.send(events, kind, data.to_string().into());
    }

    /// The response goes in as it is: parts of it are the client's own texts.
    fn put_response(&mut self, events: &mut BytesMut, kind: &str, response: &Bytes) {
        let mut data = Body::default();
        data.set("type", kind);
        data.set("sequence_number", &self.sequence);
        data.set_raw("response", response.clone());
        self.send(events, kind, data.to_bytes());
    }

    fn send(&mut self, events: &mut BytesMut, kind: &str, data: Bytes) {
        self.sequence += 1;
        let event = SseEvent {
            event: Some(kind.to_owned()),
            data,
        };
        events.extend_from_slice(&event.encode());
    }
}

/// Token counts as this dialect has them.
fn usage(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": { "cached_tokens": usage.cached_tokens().unwrap_or_default() },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "reasoning_tokens": 0 },
        "total_tokens": usage.total_tokens,
    })
}
