//! JSON as a template sees it, read straight from the bytes of a request: one copy of each string, not four.
//!
//! Members keep the order in which the client wrote them, as in Python's dictionaries, because templates print them
//! (`tojson`); of a name that occurs twice the last value counts, at the place of the first. Numbers beyond 64 bits are floating-point
//! ones. JSON that comes by way of `serde_json::Value` has its members sorted by name: whoever needs a prompt to the token reads
//! a [`ChatValue`] straight from the bytes.

use minijinja::Value;
use minijinja::value::ValueKind;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value as Json;
use std::fmt;

/// A piece of JSON for a template. Cloning shares it.
#[derive(Clone, Debug)]
pub struct ChatValue(Value);

impl ChatValue {
    /// A list of these.
    #[must_use]
    pub fn list(items: Vec<Self>) -> Self {
        Self(items.into_iter().map(|Self(item)| item).collect::<Vec<_>>().into())
    }

    /// The text of a message of one of these roles, where its content is a text.
    #[must_use]
    pub fn text_of(&self, roles: &[&str]) -> Option<String> {
        let role = self.0.get_attr("role").ok()?;
        let content = self.0.get_attr("content").ok()?;
        let is_theirs = role.as_str().is_some_and(|role| roles.contains(&role));
        content.as_str().filter(|_| is_theirs).map(str::to_owned)
    }

    /// Whether it is a message in OpenAI's form as most are: an object with a role, and with a text as its content, or without
    /// content where it is an assistant's.
    #[must_use]
    pub fn is_plain_message(&self) -> bool {
        let member = |name: &str| self.0.get_attr(name).unwrap_or_default();
        if self.0.kind() != ValueKind::Map {
            return false;
        }
        let (role, content) = (member("role"), member("content"));
        let is_silent = role.as_str() == Some("assistant") && (content.is_none() || content.is_undefined());
        role.as_str().is_some_and(|role| !role.is_empty()) && (content.as_str().is_some() || is_silent)
    }
}

/// What a template's input is made from: [`ChatValue`], or JSON that is there already.
pub trait ChatSource: sealed::Sealed {
    /// As the template sees it.
    #[doc(hidden)]
    fn value(&self) -> Value;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::ChatValue {}
    impl Sealed for serde_json::Value {}
}

impl ChatSource for ChatValue {
    fn value(&self) -> Value {
        self.0.clone()
    }
}

impl ChatSource for Json {
    fn value(&self) -> Value {
        match self {
            Self::Null => Value::from(()),
            Self::Bool(flag) => Value::from(*flag),
            Self::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
                (Some(integer), _, _) => Value::from(integer),
                (None, Some(integer), _) => Value::from(integer),
                (None, None, float) => Value::from(float.unwrap_or(f64::NAN)),
            },
            Self::String(text) => Value::from(text.as_str()),
            Self::Array(items) => items.iter().map(Self::value).collect(),
            Self::Object(fields) => Value::from_pairs(fields.iter().map(|(key, item)| (key.as_str(), item.value()))),
        }
    }
}

impl Default for ChatValue {
    /// `null`.
    fn default() -> Self {
        Self(Value::from(()))
    }
}

impl<'de> Deserialize<'de> for ChatValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Reader).map(Self)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::from(()))
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Value, E> {
        Ok(Value::from(flag))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(Value::from(number))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        // As small as it fits, as numbers that come by way of `serde_json::Value`.
        Ok(i64::try_from(number).map_or_else(|_| Value::from(number), Value::from))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Value, E> {
        Ok(Value::from(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(Value::from(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(ChatValue(item)) = items.next_element()? {
            values.push(item);
        }
        Ok(Value::from(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let mut pairs: Vec<(Value, Value)> = Vec::new();
        while let Some((ChatValue(name), ChatValue(item))) = members.next_entry()? {
            pairs.push((name, item));
        }
        Ok(Value::from_pairs(pairs))
    }
}

/// An object with one member set.
pub(crate) fn with_item(object: &Value, name: &str, item: Value) -> Value {
    debug_assert_eq!(object.kind(), ValueKind::Map, "only objects have members");
    let names = object.try_iter().into_iter().flatten();
    let kept = names.map(|name| {
        let item = object.get_item(&name).unwrap_or_default();
        (name, item)
    });
    Value::from_pairs(kept.chain([(Value::from(name), item)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_to_a_value_are_one() {
        let check = |text: &str| {
            let json: Json = serde_json::from_str(text).unwrap();
            let read: ChatValue = serde_json::from_str(text).unwrap();
            assert_eq!(read.0, json.value(), "{text}");
            assert_eq!(read.0.to_string(), json.value().to_string(), "{text}");
        };
        check("null");
        check("[true, 1, -1, 0, 2.5, 1e30, 18446744073709551615, 18446744073709551616]");
        check(r#"{"a": {"c": "\u00e9\n\ud83d\ude42", "c": 2}, "b": [], "b": {}}"#);
        check(r#"["", "\u0000", "a long text, longer than what is kept in place"]"#);
    }

    #[test]
    fn most_messages_are_plain() {
        let check = |text: &str, expected: bool| {
            let message: ChatValue = serde_json::from_str(text).unwrap();
            assert_eq!(message.is_plain_message(), expected, "{text}");
        };
        check(r#"{"role": "user", "content": "hi"}"#, true);
        check(r#"{"role": "user", "content": ""}"#, true);
        check(r#"{"role": "assistant", "content": null}"#, true);
        check(r#"{"role": "assistant", "tool_calls": []}"#, true);
        check(r#"{"role": "user", "content": null}"#, false);
        check(
            r#"{"role": "user", "content": [{"type": "text", "text": "hi"}]}"#,
            false,
        );
        check(r#"{"role": "assistant", "content": 7}"#, false);
        check(r#"{"role": "", "content": "hi"}"#, false);
        check(r#"{"role": 7, "content": "hi"}"#, false);
        check(r#"{"content": "hi"}"#, false);
        check(r#"["role", "content"]"#, false);
        check("null", false);
    }

    #[test]
    fn the_text_of_a_role() {
        let check = |text: &str, expected: Option<&str>| {
            let message: ChatValue = serde_json::from_str(text).unwrap();
            assert_eq!(message.text_of(&["system", "developer"]).as_deref(), expected, "{text}");
        };
        check(r#"{"role": "system", "content": "be\nbrief"}"#, Some("be\nbrief"));
        check(r#"{"role": "developer", "content": ""}"#, Some(""));
        check(r#"{"role": "user", "content": "hi"}"#, None);
        check(
            r#"{"role": "system", "content": [{"type": "text", "text": "hi"}]}"#,
            None,
        );
        check(r#"{"content": "hi"}"#, None);
        check("null", None);
    }

    #[test]
    fn an_object_with_one_member_set() {
        let object = serde_json::json!({"a": 1, "b": 2}).value();
        assert_eq!(
            with_item(&object, "b", Value::from(3)),
            serde_json::json!({"a": 1, "b": 3}).value()
        );
        assert_eq!(
            with_item(&object, "c", Value::from(3)),
            serde_json::json!({"a": 1, "b": 2, "c": 3}).value()
        );
    }
}
