//! Whether a conversation is in form, in one walk over it, or without a copy of its texts.
//!
//! A long conversation is half a megabyte, and each walk over it takes a tenth of a millisecond or more. Who renders it
//! reads its messages as values; their form is seen on these. Who does not looks at roles and kinds of contents alone. Either way
//! each message is a slice of the request.

use super::request::invalid;
use super::{ApiError, Body, ContentPart};
use bytes::Bytes;
use serde::de::{Deserialize, DeserializeOwned, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;

const EXPECTED: &str = "a list of messages";

/// White space of JSON.
const BLANKS: [char; 4] = [' ', '\n', '\r', '\t'];

/// The messages of a conversation in form, as slices of it and as values. `is_plain` says of a value that it is in form;
/// where it does not know, the slices are looked at.
///
/// # Errors
/// What [`ChatRequest::from_body`](super::ChatRequest::from_body) says of the same conversation.
pub(super) fn read_messages<T: DeserializeOwned>(
    body: &Body,
    is_plain: impl Fn(&T) -> bool,
) -> Result<(Vec<Bytes>, Vec<T>), ApiError> {
    if let Some(plain) = body.get("messages").and_then(|list| plain_messages(list, is_plain)) {
        return Ok(plain);
    }
    let slices = check_messages(body)?;
    let values = body.read("messages", EXPECTED)?.unwrap_or_default();
    Ok((slices, values))
}

/// The messages, if each is an object that `is_plain`.
fn plain_messages<T: DeserializeOwned>(list: &Bytes, is_plain: impl Fn(&T) -> bool) -> Option<(Vec<Bytes>, Vec<T>)> {
    let (mut slices, mut values) = (Vec::new(), Vec::new());
    let mut rest = str::from_utf8(list).ok()?.trim_matches(BLANKS).strip_prefix('[')?;
    loop {
        rest = rest.trim_start_matches(BLANKS);
        let mut messages = serde_json::Deserializer::from_str(rest).into_iter::<T>();
        let value = messages.next()?.ok().filter(&is_plain)?;
        let (message, after) = rest.split_at(messages.byte_offset());
        slices.push(list.slice_ref(message.as_bytes()));
        values.push(value);
        rest = after.trim_start_matches(BLANKS);
        match rest.strip_prefix(',') {
            Some(next) => rest = next,
            None => return (rest == "]").then_some((slices, values)),
        }
    }
}

/// The messages of a conversation in form, as slices of it: each as far as a template needs it to be right.
///
/// # Errors
/// What [`ChatRequest::from_body`](super::ChatRequest::from_body) says of the same conversation.
pub(super) fn check_messages(body: &Body) -> Result<Vec<Bytes>, ApiError> {
    let missing = || invalid("messages", "`messages` is missing, expected a list of messages");
    let list = body.get("messages").filter(|list| list.as_ref() != b"null");
    let list = list.ok_or_else(missing)?;
    let Ok(messages) = serde_json::from_slice::<Vec<&RawValue>>(list) else {
        // Reading it says what is wrong with it.
        return body.read::<Vec<Value>>("messages", EXPECTED).map(|_| Vec::new());
    };
    if messages.is_empty() {
        return Err(invalid("messages", "`messages` is empty, expected a message or more"));
    }
    let slice = |(index, message): (usize, &RawValue)| {
        check_message(index, message)?;
        Ok(list.slice_ref(message.get().as_bytes()))
    };
    messages.into_iter().enumerate().map(slice).collect()
}

fn check_message(index: usize, message: &RawValue) -> Result<(), ApiError> {
    let Form { role, content } = serde_json::from_str(message.get()).map_err(|_| without_role(index))?;
    let role: String = role
        .and_then(|role| serde_json::from_str(role.get()).ok())
        .unwrap_or_default();
    if role.is_empty() {
        return Err(without_role(index));
    }
    let content = content.map_or("null", RawValue::get);
    match content.as_bytes() {
        b"null" if role != "assistant" => Err(without_content(index, &role)),
        b"null" | [b'"', ..] => Ok(()),
        [b'[', ..] => {
            let parts: Result<Vec<ContentPart>, _> = serde_json::from_str(content);
            parts.map(|_| ()).map_err(|_| wrong_content(index))
        }
        _ => Err(wrong_content(index)),
    }
}

/// What is looked at of a message. Of a name that occurs twice the last value counts.
struct Form<'a> {
    role: Option<&'a RawValue>,
    content: Option<&'a RawValue>,
}

impl<'de> Deserialize<'de> for Form<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Look;
        impl<'de> Visitor<'de> for Look {
            type Value = Form<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a message")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Form<'de>, A::Error> {
                let mut form = Form {
                    role: None,
                    content: None,
                };
                while let Some(name) = members.next_key::<Cow<'de, str>>()? {
                    match name.as_ref() {
                        "role" => form.role = Some(members.next_value()?),
                        "content" => form.content = Some(members.next_value()?),
                        _ => drop(members.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(form)
            }
        }
        deserializer.deserialize_map(Look)
    }
}

/// Tools are a list of objects; what is in these is for the template and the engine.
///
/// # Errors
/// What [`ChatRequest::from_body`](super::ChatRequest::from_body) says of the same tools.
pub(super) fn check_tools(body: &Body) -> Result<(), ApiError> {
    let Some(list) = body.get("tools").filter(|list| list.as_ref() != b"null") else {
        return Ok(());
    };
    let Ok(tools) = serde_json::from_slice::<Vec<&RawValue>>(list) else {
        // Reading it says what is wrong with it.
        return body.read::<Vec<Value>>("tools", EXPECTED_TOOLS).map(|_| ());
    };
    let wrong = tools.iter().position(|tool| !tool.get().starts_with('{'));
    wrong.map_or(Ok(()), |index| Err(no_tool(index)))
}

pub(super) const EXPECTED_TOOLS: &str = "a list of tool definitions";

pub(super) fn no_tool(index: usize) -> ApiError {
    invalid(
        "tools",
        format!("`tools[{index}]` is no object, expected a tool definition"),
    )
}

pub(super) fn without_role(index: usize) -> ApiError {
    let param = format!("messages[{index}]");
    invalid(
        &param,
        format!("`{param}` has no `role`, expected a string such as `user`"),
    )
}

pub(super) fn wrong_content(index: usize) -> ApiError {
    let param = format!("messages[{index}]");
    invalid(
        &param,
        format!("`{param}.content` is wrong, expected a string or a list of parts"),
    )
}

pub(super) fn without_content(index: usize, role: &str) -> ApiError {
    let param = format!("messages[{index}]");
    invalid(
        &param,
        format!("`{param}` of role `{role}` has no `content`, expected a string"),
    )
}
