//! A JSON object whose members can be set and removed while all others stay word for word.
//!
//! Parsing to a value and writing it again would change numbers, the order of keys and escapes that the engine's own
//! parser should see as the client wrote them, and would copy a prompt of a megabyte several times. Here each member is
//! a slice of the received bytes. White space between top-level members is not kept.

use super::ApiError;
use bytes::{BufMut, Bytes, BytesMut};
use serde::de::{DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::fmt;

/// A JSON object in the order of its members. Of a name that occurs twice the last value counts, as in most parsers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Body {
    members: Vec<(String, Bytes)>,
}

impl Body {
    /// Reads an object.
    ///
    /// # Errors
    /// If the bytes are no JSON or no object; the message says where.
    pub fn parse(bytes: &Bytes) -> Result<Self, ApiError> {
        let members: Members<'_> = serde_json::from_slice(bytes).map_err(ApiError::invalid_json)?;
        let mut body = Self {
            members: Vec::with_capacity(members.0.len()),
        };
        for (name, value) in members.0 {
            body.set_raw(&name, bytes.slice_ref(value.get().as_bytes()));
        }
        Ok(body)
    }

    /// A member's JSON text.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Bytes> {
        self.members
            .iter()
            .find(|(member, _)| member == name)
            .map(|(_, value)| value)
    }

    /// A member as a value. `null` counts as absent.
    ///
    /// # Errors
    /// If it has another type; the error names the member and `expected`.
    pub fn read<T: DeserializeOwned>(&self, name: &str, expected: &str) -> Result<Option<T>, ApiError> {
        let Some(text) = self.get(name).filter(|text| text.as_ref() != b"null") else {
            return Ok(None);
        };
        serde_json::from_slice(text).map(Some).map_err(|_| {
            let shown = abbreviate(text);
            ApiError::invalid(format!("`{name}` is `{shown}`, expected {expected}")).with_param(name)
        })
    }

    /// The members in order: name and JSON text.
    pub fn members(&self) -> impl Iterator<Item = (&str, &Bytes)> {
        self.members.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// Sets a member to a value, in place where it exists, else at the end.
    ///
    /// # Panics
    /// If the value does not serialise (a map with keys that are no strings).
    pub fn set<T: Serialize + ?Sized>(&mut self, name: &str, value: &T) {
        self.set_raw(
            name,
            Bytes::from(serde_json::to_vec(value).expect("the value serialises to JSON")),
        );
    }

    /// Sets a member to a JSON text, which is taken word for word.
    pub fn set_raw(&mut self, name: &str, json: Bytes) {
        match self.members.iter_mut().find(|(member, _)| member == name) {
            Some((_, value)) => *value = json,
            None => self.members.push((name.to_owned(), json)),
        }
    }

    /// Removes a member and gives its JSON text.
    pub fn remove(&mut self, name: &str) -> Option<Bytes> {
        let index = self.members.iter().position(|(member, _)| member == name)?;
        Some(self.members.remove(index).1)
    }

    /// The object as JSON.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        let size: usize = self
            .members
            .iter()
            .map(|(name, value)| name.len() + value.len() + 8)
            .sum();
        let mut out = BytesMut::with_capacity(size + 2);
        out.put_u8(b'{');
        for (index, (name, value)) in self.members.iter().enumerate() {
            if index > 0 {
                out.put_u8(b',');
            }
            out.put_slice(&serde_json::to_vec(name).expect("a string serialises"));
            out.put_u8(b':');
            out.put_slice(value);
        }
        out.put_u8(b'}');
        out.freeze()
    }
}

/// The start of a JSON text, for messages.
fn abbreviate(text: &[u8]) -> String {
    const SHOWN: usize = 60;
    let text = String::from_utf8_lossy(text);
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.into_owned(),
    }
}

struct Members<'a>(Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(text: &str) -> Body {
        Body::parse(&Bytes::copy_from_slice(text.as_bytes())).expect(text)
    }

    #[test]
    fn members_stay_word_for_word() {
        let check = |text: &str, edit: fn(&mut Body), expected: &str| {
            let mut edited = body(text);
            edit(&mut edited);
            assert_eq!(edited.to_bytes(), expected, "{text}");
        };
        check("{}", |_| (), "{}");
        check("{}", |b| b.set("stream", &true), r#"{"stream":true}"#);
        check(r#"{"a": 1.50e3 , "b":[ 1,2 ]}"#, |_| (), r#"{"a":1.50e3,"b":[ 1,2 ]}"#);
        check(
            r#"{"z":"\u00e9","max_tokens":5,"a":0}"#,
            |b| b.set("max_tokens", &1),
            r#"{"z":"\u00e9","max_tokens":1,"a":0}"#,
        );
        check(
            r#"{"a":1,"b":2,"c":3}"#,
            |b| assert!(b.remove("b").is_some()),
            r#"{"a":1,"c":3}"#,
        );
        check(r#"{"a":1,"b":2,"a":3}"#, |_| (), r#"{"a":3,"b":2}"#);
        check(r#"{"q\"":1}"#, |_| (), r#"{"q\"":1}"#);
        check(
            r#"{"n":18446744073709551617}"#,
            |b| assert_eq!(b.remove("x"), None),
            r#"{"n":18446744073709551617}"#,
        );
    }

    #[test]
    fn what_is_no_object_is_an_error_that_says_where() {
        for text in [
            "",
            "[]",
            "1",
            "{",
            r#"{"a"}"#,
            r#"{"a":1,}"#,
            "{} x",
            "{\"a\":\u{1}}",
            "nul",
        ] {
            let error = Body::parse(&Bytes::copy_from_slice(text.as_bytes())).expect_err(text);
            assert_eq!((error.status, error.code.as_deref()), (400, Some("invalid_json")));
            assert!(error.message.contains("line 1"), "{text}: {}", error.message);
        }
        assert!(
            Body::parse(&Bytes::from_static(b"{\"a\":\"\xff\"}")).is_err(),
            "not UTF-8"
        );
    }

    #[test]
    fn a_member_of_another_type_is_named() {
        let error = body(r#"{"n":"x"}"#)
            .read::<u32>("n", "an integer")
            .expect_err("a string is no integer");
        assert_eq!(error.message, r#"`n` is `"x"`, expected an integer"#);
        assert_eq!(error.param.as_deref(), Some("n"));
        assert_eq!(body(r#"{"n":null}"#).read::<u32>("n", "an integer"), Ok(None));
    }
}
