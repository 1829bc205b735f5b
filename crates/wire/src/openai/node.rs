//! A JSON object somewhere inside a request, with the path by which errors name it.
//!
//! Translators walk requests of other dialects with it: what they pass on stays the client's bytes, and what they cannot
//! translate is refused by its full path, such as `messages[3].content[1].type`.

use super::{ApiError, Body};
use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

/// An object and where it is.
#[derive(Clone, Debug)]
pub struct Node {
    path: String,
    body: Body,
}

impl Node {
    /// The request itself, whose members have no prefix.
    #[must_use]
    pub fn root(body: &Body) -> Self {
        Self {
            path: String::new(),
            body: body.clone(),
        }
    }

    /// The object at `path`.
    ///
    /// # Errors
    /// It is none; the error names the path.
    pub fn parse(path: impl Into<String>, json: &Bytes) -> Result<Self, ApiError> {
        let path = path.into();
        match Body::parse(json) {
            Ok(body) => Ok(Self { path, body }),
            Err(_) => Err(refuse(&path, "is no object, expected one")),
        }
    }

    /// The objects of the list at `path`.
    ///
    /// # Errors
    /// It is no list, or an element is no object.
    pub fn list(path: &str, json: &Bytes) -> Result<Vec<Self>, ApiError> {
        let elements: Vec<&RawValue> =
            serde_json::from_slice(json).map_err(|_| refuse(path, "is wrong, expected a list"))?;
        let element = |(index, element): (usize, &RawValue)| {
            Self::parse(format!("{path}[{index}]"), &json.slice_ref(element.get().as_bytes()))
        };
        elements.into_iter().enumerate().map(element).collect()
    }

    /// The full path of a member.
    #[must_use]
    pub fn path_of(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        }
    }

    /// Where it is itself.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The members in order.
    pub fn members(&self) -> impl Iterator<Item = (&str, &Bytes)> {
        self.body.members()
    }

    /// A member's JSON text. `null` counts as absent.
    #[must_use]
    pub fn raw(&self, name: &str) -> Option<&Bytes> {
        self.body.get(name).filter(|json| json.as_ref() != b"null")
    }

    /// A member as a value. `null` counts as absent.
    ///
    /// # Errors
    /// It has another type.
    pub fn read<T: DeserializeOwned>(&self, name: &str, expected: &str) -> Result<Option<T>, ApiError> {
        self.body.read(name, expected).map_err(|error| {
            let path = self.path_of(name);
            let message = error.message.replacen(&format!("`{name}`"), &format!("`{path}`"), 1);
            ApiError::invalid(message).with_param(path)
        })
    }

    /// A member that must be there.
    ///
    /// # Errors
    /// It is absent, or has another type.
    pub fn need<T: DeserializeOwned>(&self, name: &str, expected: &str) -> Result<T, ApiError> {
        let missing = || self.refuse(name, &format!("is missing, expected {expected}"));
        self.read(name, expected)?.ok_or_else(missing)
    }

    /// The error that says what is wrong with a member: "`path` problem".
    #[must_use]
    pub fn refuse(&self, name: &str, problem: &str) -> ApiError {
        refuse(&self.path_of(name), problem)
    }
}

/// The error that says what is wrong with a part of a request.
pub(crate) fn refuse(path: &str, problem: &str) -> ApiError {
    ApiError::invalid(format!("`{path}` {problem}")).with_param(path)
}

/// Whether a JSON text starts as a string.
pub(crate) fn is_string(json: &[u8]) -> bool {
    json.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'"')
}

/// A JSON text as a value that serialises word for word.
pub(crate) fn raw_value(json: &Bytes) -> Box<RawValue> {
    let text = String::from_utf8_lossy(json).into_owned();
    RawValue::from_string(text).expect("it was cut out of a text that parsed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_full_path() {
        let check = |json: &'static str, expected: &str| {
            let list = Node::list("messages", &Bytes::from_static(json.as_bytes()));
            let read = |nodes: Vec<Node>| {
                nodes
                    .iter()
                    .try_for_each(|node| node.need::<u32>("n", "a number").map(drop))
            };
            let error = list.and_then(read).expect_err(json);
            assert_eq!(error.message, expected, "{json}");
            assert!(expected.starts_with(&format!("`{}`", error.param.unwrap_or_default())));
        };
        check("7", "`messages` is wrong, expected a list");
        check(r#"[{"n":1},7]"#, "`messages[1]` is no object, expected one");
        check(r#"[{"n":1},{}]"#, "`messages[1].n` is missing, expected a number");
        check(r#"[{"n":"x"}]"#, r#"`messages[0].n` is `"x"`, expected a number"#);
    }
}
