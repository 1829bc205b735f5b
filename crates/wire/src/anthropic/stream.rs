//! An answer in chat's chunks as the events of a message, and as a whole message.
//!
//! The order of events is the reference's: `message_start`, for each block `content_block_start`, deltas and
//! `content_block_stop`, then `message_delta` with the reason of the end and the usage, then `message_stop`. Blocks come
//! one after the other; a `ping` follows the beginning of the first.

use super::message::{AnswerBlock, MessageUsage, WholeMessage, stop_reason};
use crate::openai::{AnswerParts, CallPart};
use crate::sse::SseEvent;
use bytes::{Bytes, BytesMut};
use serde_json::{Value, json};

/// A message under way.
#[derive(Debug)]
pub struct MessageStream {
    id: String,
    model: String,
    /// What is known of the usage before the engine says it.
    estimate: MessageUsage,
    usage: Option<MessageUsage>,
    has_started: bool,
    blocks: Vec<AnswerBlock>,
    finish_reason: Option<String>,
    stop_string: Option<String>,
}

impl MessageStream {
    /// The message `id`, from the model that the client asked for.
    #[must_use]
    pub fn new(id: &str, model: &str) -> Self {
        Self {
            id: id.to_owned(),
            model: model.to_owned(),
            estimate: MessageUsage::default(),
            usage: None,
            has_started: false,
            blocks: Vec::new(),
            finish_reason: None,
            stop_string: None,
        }
    }

    /// What `message_start` says of the prompt, which comes before the engine's own count: of so many tokens, `cached`
    /// are expected in the cache.
    pub fn expect(&mut self, prompt: u32, cached: u32) {
        self.estimate = MessageUsage::new(prompt, cached.min(prompt), 0);
    }

    /// Takes a chunk and gives the events that it makes.
    ///
    /// # Errors
    /// The engine's chunk makes no sense: a call without a name, or one that goes on after the next began.
    pub fn take(&mut self, chunk: &AnswerParts) -> Result<Bytes, String> {
        let mut events = BytesMut::new();
        self.start(&mut events);
        if !chunk.reasoning.is_empty() {
            let same = matches!(self.blocks.last(), Some(AnswerBlock::Thinking(_)));
            self.add(
                same,
                AnswerBlock::Thinking(String::new()),
                &chunk.reasoning,
                &mut events,
            );
        }
        if !chunk.text.is_empty() {
            let same = matches!(self.blocks.last(), Some(AnswerBlock::Text(_)));
            self.add(same, AnswerBlock::Text(String::new()), &chunk.text, &mut events);
        }
        for call in &chunk.calls {
            self.call(call, &mut events)?;
        }
        self.finish_reason = chunk.finish_reason.clone().or(self.finish_reason.take());
        self.stop_string = chunk.stop_string.clone().or(self.stop_string.take());
        self.usage = chunk.usage.as_ref().map(MessageUsage::of_chat).or(self.usage);
        Ok(events.freeze())
    }

    /// The events that end the message.
    #[must_use]
    pub fn finish(&mut self) -> Bytes {
        let mut events = BytesMut::new();
        self.start(&mut events);
        self.close(&mut events);
        let delta = json!({ "stop_reason": self.stop_reason(), "stop_sequence": self.stop_sequence() });
        put(
            &mut events,
            "message_delta",
            json!({ "delta": delta, "usage": self.last_usage() }),
        );
        put(&mut events, "message_stop", json!({}));
        events.freeze()
    }

    /// The whole message, for a client without a stream.
    #[must_use]
    pub fn whole(&self) -> Bytes {
        Bytes::from(serde_json::to_vec(&self.message()).expect("a message serialises"))
    }

    fn call(&mut self, part: &CallPart, events: &mut BytesMut) -> Result<(), String> {
        let of_call = |block: &AnswerBlock| matches!(block, AnswerBlock::ToolUse { call, .. } if *call == part.index);
        let is_open = self.blocks.last().is_some_and(of_call);
        if !is_open && self.blocks.iter().any(of_call) {
            return Err(format!(
                "the tool call `{}` goes on after another block began",
                part.index
            ));
        }
        let fresh = if is_open {
            AnswerBlock::Text(String::new())
        } else {
            let named = part.name.clone().filter(|name| !name.is_empty());
            let name = named.ok_or_else(|| format!("the tool call `{}` begins without a name", part.index))?;
            let id = part
                .id
                .clone()
                .unwrap_or_else(|| format!("toolu_{}_{}", self.id, part.index));
            let (call, arguments) = (part.index, String::new());
            AnswerBlock::ToolUse {
                call,
                id,
                name,
                arguments,
            }
        };
        self.add(is_open, fresh, &part.arguments, events);
        Ok(())
    }

    /// Adds a piece to the open block, or to a fresh one.
    fn add(&mut self, to_open: bool, fresh: AnswerBlock, piece: &str, events: &mut BytesMut) {
        if !to_open {
            self.close(events);
            let start = json!({ "index": self.blocks.len(), "content_block": fresh.opening() });
            put(events, "content_block_start", start);
            if self.blocks.is_empty() {
                put(events, "ping", json!({}));
            }
            self.blocks.push(fresh);
        }
        let index = self.blocks.len().saturating_sub(1);
        let Some(block) = self.blocks.last_mut() else { return };
        if !piece.is_empty() {
            block.push(piece);
            put(
                events,
                "content_block_delta",
                json!({ "index": index, "delta": block.delta(piece) }),
            );
        }
    }

    /// Ends the open block.
    fn close(&self, events: &mut BytesMut) {
        if let Some(index) = self.blocks.len().checked_sub(1) {
            put(events, "content_block_stop", json!({ "index": index }));
        }
    }

    fn start(&mut self, events: &mut BytesMut) {
        if std::mem::replace(&mut self.has_started, true) {
            return;
        }
        let message = WholeMessage {
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage: self.estimate,
            ..self.message()
        };
        put(events, "message_start", json!({ "message": message }));
    }

    fn message(&self) -> WholeMessage<'_> {
        WholeMessage {
            id: &self.id,
            kind: "message",
            role: "assistant",
            model: &self.model,
            content: self.blocks.iter().map(AnswerBlock::whole).collect(),
            stop_reason: Some(self.stop_reason()),
            stop_sequence: self.stop_sequence(),
            usage: self.last_usage(),
        }
    }

    fn has_calls(&self) -> bool {
        self.blocks
            .iter()
            .any(|block| matches!(block, AnswerBlock::ToolUse { .. }))
    }

    fn stop_reason(&self) -> &'static str {
        stop_reason(
            self.finish_reason.as_deref(),
            self.stop_string.is_some(),
            self.has_calls(),
        )
    }

    fn stop_sequence(&self) -> Option<&str> {
        self.stop_string
            .as_deref()
            .filter(|_| self.stop_reason() == "stop_sequence")
    }

    fn last_usage(&self) -> MessageUsage {
        self.usage.unwrap_or(self.estimate)
    }
}

fn put(events: &mut BytesMut, kind: &str, mut data: Value) {
    data["type"] = json!(kind);
    let event = SseEvent {
        event: Some(kind.to_owned()),
        data: data.to_string().into(),
    };
    events.extend_from_slice(&event.encode());
}
