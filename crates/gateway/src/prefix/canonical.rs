//! Undoes the known ways in which clients break their own prefixes. Off by default, because it changes prompts.
//!
//! - Claude Code's billing line, which differs at each request and means nothing to a model, is taken out.
//! - Tools are put in the order of their names.
//! - A line with a date or a time, in the system prompt or the first message after it, stays as it was at the
//!   conversation's first turn. The model is told a time that has passed: that is the price, and why it is a choice.
//!
//! A conversation is known by these two messages without such lines. Which lines it began with is remembered for a
//! bounded number of conversations.

use super::breaks::is_date_line;
use super::outline::elements;
use bytes::Bytes;
use homing_wire::openai::Body;
use serde_json::Value;
use serde_json::value::RawValue;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

/// How Claude Code's billing line begins.
pub(super) const BILLING_LINE: &str = "x-anthropic-billing-header:";
/// The part of it that differs; the line ends with it, and the next block of the prompt may follow at once.
const BILLING_END: &str = "cch=";
/// Conversations whose lines are remembered.
const CONVERSATIONS: usize = 16_384;
/// Messages that are looked at: the system's and the first after it.
const MESSAGES: usize = 2;

/// What conversations began with.
#[derive(Debug, Default)]
pub(crate) struct Canonical(Mutex<Pins>);

#[derive(Debug, Default)]
struct Pins {
    next: u64,
    by_conversation: HashMap<[u8; 16], (u64, Vec<String>)>,
    /// Longest unused first.
    by_use: BTreeMap<u64, [u8; 16]>,
}

impl Canonical {
    /// Changes a request to `/v1/chat/completions` where it has one of the known cases; all else stays word for word.
    pub(crate) fn apply(&self, body: &mut Body) {
        if let Some(tools) = sorted_tools(body) {
            body.set_raw("tools", tools);
        }
        let mut messages = elements(body.get("messages"));
        let mut heads: Vec<Value> = messages
            .iter()
            .take(MESSAGES)
            .map(|message| serde_json::from_slice(message).unwrap_or_default())
            .collect();
        let before = heads.clone();
        if heads.first().is_some_and(|first| first["role"] == "system") {
            each_text(&mut heads[..1], &mut |text| *text = without_billing(text));
        }
        self.pin(&mut heads);
        if heads == before {
            return;
        }
        for ((message, head), before) in messages.iter_mut().zip(heads).zip(before) {
            if head != before {
                *message = head.to_string().into();
            }
        }
        body.set_raw("messages", list(&messages));
    }

    /// Puts the lines in that the conversation began with.
    fn pin(&self, heads: &mut [Value]) {
        let mut lines = Vec::new();
        let mut hasher = blake3::Hasher::new();
        each_text(heads, &mut |text| {
            for line in text.split('\n') {
                if is_date_line(line) {
                    lines.push(line.to_owned());
                } else {
                    hasher.update(line.as_bytes());
                }
                hasher.update(b"\n");
            }
        });
        if lines.is_empty() {
            return;
        }
        let mut key = [0; 16];
        key.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        let pinned = self.0.lock().unwrap_or_else(PoisonError::into_inner).pinned(key, lines);
        let mut pinned = pinned.iter();
        each_text(heads, &mut |text| {
            let line = |line: &str| match is_date_line(line).then(|| pinned.next()).flatten() {
                Some(pinned) => pinned.clone(),
                None => line.to_owned(),
            };
            *text = text.split('\n').map(line).collect::<Vec<_>>().join("\n");
        });
    }
}

impl Pins {
    /// The lines of a conversation: those that it began with, else these.
    fn pinned(&mut self, key: [u8; 16], lines: Vec<String>) -> Vec<String> {
        let used = self.next;
        self.next += 1;
        let (last, kept) = self.by_conversation.entry(key).or_insert((used, lines));
        self.by_use.remove(last);
        *last = used;
        self.by_use.insert(used, key);
        let kept = kept.clone();
        if self.by_conversation.len() > CONVERSATIONS
            && let Some((_, oldest)) = self.by_use.pop_first()
        {
            self.by_conversation.remove(&oldest);
        }
        kept
    }
}

/// The tools in the order of their names; `None` where they are.
fn sorted_tools(body: &Body) -> Option<Bytes> {
    let tools = elements(body.get("tools"));
    let name = |tool: &Bytes| {
        let tool: Value = serde_json::from_slice(tool).unwrap_or_default();
        tool["function"]["name"].as_str().unwrap_or_default().to_owned()
    };
    let mut named: Vec<(String, Bytes)> = tools.into_iter().map(|tool| (name(&tool), tool)).collect();
    if named.is_sorted_by(|one, other| one.0 <= other.0) {
        return None;
    }
    named.sort_by(|one, other| one.0.cmp(&other.0));
    Some(list(&named.into_iter().map(|(_, tool)| tool).collect::<Vec<_>>()))
}

fn without_billing(text: &str) -> String {
    let line_start = text
        .match_indices(BILLING_LINE)
        .map(|(start, _)| start)
        .find(|start| *start == 0 || text.as_bytes()[start - 1] == b'\n');
    let end = line_start.and_then(|start| {
        let line = text[start..].split('\n').next()?;
        let value = line.find(BILLING_END)?;
        // Without a mark of its end the value ends with the line.
        let after = line[value..]
            .find(';')
            .map_or(line.len(), |semicolon| value + semicolon + 1);
        Some((start, start + after))
    });
    match end {
        Some((start, end)) => format!("{}{}", &text[..start], &text[end..]),
        None => text.to_owned(),
    }
}

/// Calls `change` with each text of the messages.
fn each_text(messages: &mut [Value], change: &mut dyn FnMut(&mut String)) {
    for message in messages {
        match message.get_mut("content") {
            Some(Value::String(text)) => change(text),
            Some(Value::Array(parts)) => {
                for part in parts {
                    if let Some(Value::String(text)) = part.get_mut("text") {
                        change(text);
                    }
                }
            }
            _ => {}
        }
    }
}

/// A list of JSON texts.
fn list(elements: &[Bytes]) -> Bytes {
    let raw = |element: &Bytes| serde_json::from_slice::<Box<RawValue>>(element).ok();
    let elements: Vec<Box<RawValue>> = elements.iter().filter_map(raw).collect();
    Bytes::from(serde_json::to_vec(&elements).expect("what was parsed serialises"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn apply(canonical: &Canonical, body: &str) -> String {
        let mut body = Body::parse(&body.to_owned().into()).unwrap();
        canonical.apply(&mut body);
        String::from_utf8(body.to_bytes().to_vec()).unwrap()
    }

    #[test]
    fn what_is_not_known_stays_word_for_word() {
        for body in [
            r#"{"messages":[{"role":"system","content":"a \u00e9"},{ "role":"user","content":1.50}],"tools":[{"function":{"name":"a"}},{"function":{"name":"b"}}]}"#,
            r#"{"messages":[{"role":"user","content":"x-anthropic-billing-header: cch=1;"}]}"#,
            r#"{"prompt":"x"}"#,
            r#"{"messages":7,"tools":8}"#,
        ] {
            assert_eq!(apply(&Canonical::default(), body), body);
        }
    }

    #[test]
    fn the_billing_line_goes() {
        for (text, expected) in [
            (
                "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=4fbc1;You are",
                "You are",
            ),
            ("x-anthropic-billing-header: cch=4fbc1\nYou are", "\nYou are"),
            ("Hi\nx-anthropic-billing-header: cch=4; more\nYou", "Hi\n more\nYou"),
            (
                "x-anthropic-billing-header: cc_version=2.1;You",
                "x-anthropic-billing-header: cc_version=2.1;You",
            ),
            (
                "see x-anthropic-billing-header: cch=1;",
                "see x-anthropic-billing-header: cch=1;",
            ),
        ] {
            assert_eq!(without_billing(text), expected);
        }
    }

    #[test]
    fn tools_are_in_the_order_of_their_names() {
        let body = r#"{"tools":[{"function":{"name":"b","z":1.50,"a":2}},{"function":{"name":"a"}}]}"#;
        let expected = r#"{"tools":[{"function":{"name":"a"}},{"function":{"name":"b","z":1.50,"a":2}}]}"#;
        assert_eq!(apply(&Canonical::default(), body), expected);
    }

    #[test]
    fn a_conversation_keeps_the_date_that_it_began_with() {
        let canonical = Canonical::default();
        let talk = |date: &str, first: &str, more: usize| {
            let mut messages = vec![
                json!({"role": "system", "content": format!("You help.\nToday's date: {date}")}),
                json!({"role": "user", "content": [{"type": "text", "text": first}]}),
            ];
            messages.extend((0..more).map(|_| json!({"role": "user", "content": "more"})));
            json!({ "messages": messages }).to_string()
        };
        assert_eq!(
            apply(&canonical, &talk("2026-11-30", "a", 0)),
            talk("2026-11-30", "a", 0)
        );
        assert_eq!(
            apply(&canonical, &talk("2026-12-01", "a", 3)),
            talk("2026-11-30", "a", 3)
        );
        assert_eq!(
            apply(&canonical, &talk("2026-12-01", "b", 0)),
            talk("2026-12-01", "b", 0),
            "another conversation"
        );
        let pins = canonical.0.lock().unwrap();
        assert_eq!((pins.by_conversation.len(), pins.by_use.len()), (2, 2));
    }
}
