//! What is remembered of a request to tell where the next one differs: a digest of each tool, of each line of the system
//! prompt and of each message. No text is kept.

use bytes::Bytes;
use homing_kv::Prompt;
use homing_wire::openai::Body;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::borrow::Cow;

/// Lines of a system prompt that are told apart; what follows counts as one.
const LINES_MAX: usize = 4_096;

/// Who speaks for the system.
pub(crate) const SYSTEM_ROLES: [&str; 2] = ["system", "developer"];

/// A request in digests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outline {
    pub(super) tools: Vec<u64>,
    /// Lines of the first message, where it is the system's.
    pub(super) system: Vec<u64>,
    /// All messages, the system's among them.
    pub(super) messages: Vec<u64>,
}

/// A request that was seen before.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) outline: Outline,
    pub(super) prompt: Prompt,
}

/// A request that has just come: its outline, and the text of its system prompt.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fresh {
    pub(super) outline: Outline,
    pub(super) system_text: String,
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    role: Cow<'a, str>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Part {
    #[serde(default)]
    text: String,
}

impl Fresh {
    /// Of a request to `/v1/chat/completions` with these messages; of any other without. `system_text` is that of the first
    /// message, empty where it is not the system's, if somebody has read it already.
    pub(crate) fn of_chat(body: &Body, messages: &[Bytes], system_text: Option<String>) -> Self {
        let read = || messages.first().and_then(text_of_system).unwrap_or_default();
        let system_text = system_text.unwrap_or_else(read);
        let outline = Outline {
            tools: elements(body.get("tools")).iter().map(|tool| digest(tool)).collect(),
            system: system_text
                .splitn(LINES_MAX, '\n')
                .map(|line| digest(line.as_bytes()))
                .collect(),
            messages: messages.iter().map(|message| digest(message)).collect(),
        };
        Self { outline, system_text }
    }
}

/// The elements of a list, each as its JSON text.
pub(super) fn elements(list: Option<&Bytes>) -> Vec<Bytes> {
    let Some(list) = list else { return Vec::new() };
    let elements: Vec<&RawValue> = serde_json::from_slice(list).unwrap_or_default();
    elements
        .into_iter()
        .map(|element| list.slice_ref(element.get().as_bytes()))
        .collect()
}

/// The text of a message of the system.
fn text_of_system(message: &Bytes) -> Option<String> {
    let message: Message<'_> = serde_json::from_slice(message).ok()?;
    if !SYSTEM_ROLES.contains(&message.role.as_ref()) {
        return None;
    }
    let content = message.content?.get();
    if content.starts_with('"') {
        return serde_json::from_str(content).ok();
    }
    let parts: Vec<Part> = serde_json::from_str(content).ok()?;
    Some(parts.into_iter().map(|part| part.text).collect::<Vec<_>>().join("\n"))
}

/// Enough to tell texts of one session apart, and fast: every turn's whole history goes through it. A client that makes two
/// texts collide deceives its own page only.
pub(super) fn digest(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}
