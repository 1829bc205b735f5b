//! The filter `tojson` as chat templates know it: Python's `json.dumps`, to the byte.
//!
//! The Hugging Face tooling replaces Jinja's own filter by `json.dumps(x, ensure_ascii, indent, separators, sort_keys)` with
//! `ensure_ascii=False` (`transformers`, `chat_template_utils.py`), so that members keep their order and nothing is escaped for
//! HTML. A difference of one byte here is another prompt than the engine's, and a cache that is never hit.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use std::fmt::Write as _;

/// Levels of nesting; more are refused, before the stack is at its end.
const DEPTH_MAX: usize = 128;

/// The filter. Options come by name, or in the order of Python's signature; `sort_keys` by name only.
pub(crate) fn to_json(
    value: &Value,
    ensure_ascii: Option<Value>,
    indent: Option<Value>,
    separators: Option<Value>,
    named: Kwargs,
) -> Result<Value, Error> {
    let option = |place: Option<Value>, name: &str| match place {
        Some(value) => Ok(value),
        None => named.get::<Option<Value>>(name).map(|value| value.unwrap_or_default()),
    };
    let ensure_ascii = option(ensure_ascii, "ensure_ascii")?.is_true();
    let indent = indent_of(&option(indent, "indent")?)?;
    let separators = separators_of(&option(separators, "separators")?, indent.is_some())?;
    let sort_keys = option(None, "sort_keys")?.is_true();
    named.assert_all_used()?;
    let mut writer = Writer {
        text: String::new(),
        ensure_ascii,
        indent,
        separators,
        sort_keys,
        depth: 0,
    };
    writer.write(value)?;
    Ok(Value::from_safe_string(writer.text))
}

/// What one level is indented by; `None` where all is one line.
fn indent_of(option: &Value) -> Result<Option<String>, Error> {
    if option.is_none() || option.is_undefined() {
        return Ok(None);
    }
    if let Some(text) = option.as_str() {
        return Ok(Some(text.to_owned()));
    }
    let spaces = i64::try_from(option.clone())?;
    // As Python has it, less than none is none.
    Ok(Some(" ".repeat(usize::try_from(spaces).unwrap_or(0).min(DEPTH_MAX))))
}

/// What stands between items, and after a key.
fn separators_of(option: &Value, is_indented: bool) -> Result<(String, String), Error> {
    if option.is_none() || option.is_undefined() {
        let between = if is_indented { "," } else { ", " };
        return Ok((between.to_owned(), ": ".to_owned()));
    }
    let parts: Vec<Value> = option.try_iter()?.collect();
    match parts.as_slice() {
        [between, after_key] if between.as_str().is_some() && after_key.as_str().is_some() => {
            Ok((between.to_string(), after_key.to_string()))
        }
        _ => Err(invalid("`separators` is no pair of strings")),
    }
}

fn invalid(problem: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {problem}"))
}

struct Writer {
    text: String,
    ensure_ascii: bool,
    indent: Option<String>,
    separators: (String, String),
    sort_keys: bool,
    depth: usize,
}

impl Writer {
    fn write(&mut self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.text.push_str(&number(value)?),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.items(("[", "]"), &items, |writer, item| writer.write(item))?;
            }
            ValueKind::Map => {
                let keys: Vec<Value> = value.try_iter()?.collect();
                let mut members = keys
                    .into_iter()
                    .map(|key| Ok((key_of(&key)?, value.get_item(&key)?)))
                    .collect::<Result<Vec<_>, Error>>()?;
                if self.sort_keys {
                    members.sort_by(|(left, _), (right, _)| left.cmp(right));
                }
                self.items(("{", "}"), &members, |writer, (key, item)| {
                    writer.string(key);
                    let after_key = writer.separators.1.clone();
                    writer.text.push_str(&after_key);
                    writer.write(item)
                })?;
            }
            kind => return Err(invalid(&format!("a value of kind `{kind}` is not JSON"))),
        }
        Ok(())
    }

    fn string(&mut self, text: &str) {
        self.text.push('"');
        for character in text.chars() {
            match character {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{c}' => self.text.push_str("\\f"),
                '\u{8}' => self.text.push_str("\\b"),
                '\0'..='\u{1f}' => self.escape(character),
                ' '..='~' => self.text.push(character),
                _ if self.ensure_ascii => self.escape(character),
                _ => self.text.push(character),
            }
        }
        self.text.push('"');
    }

    fn escape(&mut self, character: char) {
        for unit in character.encode_utf16(&mut [0; 2]) {
            write!(self.text, "\\u{unit:04x}").expect("a string takes whatever is written");
        }
    }

    fn items<T>(
        &mut self,
        (open, close): (&str, &str),
        items: &[T],
        write: impl Fn(&mut Self, &T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.text.push_str(open);
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(invalid("a value is nested too deeply"));
        }
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                let between = self.separators.0.clone();
                self.text.push_str(&between);
            }
            self.new_line();
            write(self, item)?;
        }
        self.depth -= 1;
        if !items.is_empty() {
            self.new_line();
        }
        self.text.push_str(close);
        Ok(())
    }

    fn new_line(&mut self) {
        if let Some(indent) = &self.indent {
            self.text.push('\n');
            self.text.push_str(&indent.repeat(self.depth));
        }
    }
}

/// A key as Python writes it: what is no string becomes one.
fn key_of(key: &Value) -> Result<String, Error> {
    Ok(match key.kind() {
        ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_owned(),
        ValueKind::Number => number(key)?,
        kind => return Err(invalid(&format!("a key of kind `{kind}` is not JSON"))),
    })
}

fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() {
        return Ok(value.to_string());
    }
    f64::try_from(value.clone()).map(float)
}

/// A floating-point number as Python's `repr` writes it: the shortest digits that are read back as the same number, with an
/// exponent below 1e-4 and from 1e16 on.
fn float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if number != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.unsigned_abs());
    }
    let plain = number.to_string();
    if plain.contains('.') {
        plain
    } else {
        format!("{plain}.0")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ChatValue;
    use crate::chat_value::ChatSource as _;
    use minijinja::{Environment, context};

    /// What Python 3.11 printed for `json.dumps(json.loads(input), ...)` with the options of each filter.
    #[track_caller]
    fn check(filter: &str, input: &str, expected: &str) {
        let value: ChatValue = serde_json::from_str(input).unwrap();
        let mut environment = Environment::new();
        environment.add_filter("tojson", to_json);
        let source = format!("{{{{ value | {filter} }}}}");
        let rendered = environment.render_str(&source, context! { value => value.value() });
        assert_eq!(
            rendered.as_deref().ok(),
            Some(expected),
            "{filter} {input}: {rendered:?}"
        );
    }

    #[test]
    fn members_keep_their_order_and_nothing_is_escaped_for_html() {
        let tool = r#"{"type":"function","function":{"name":"f","description":"<a> & 'b'","parameters":{"z":1,"a":[true,null]}}}"#;
        check(
            "tojson",
            tool,
            r#"{"type": "function", "function": {"name": "f", "description": "<a> & 'b'", "parameters": {"z": 1, "a": [true, null]}}}"#,
        );
        check("tojson", r#"{"b":1,"a":2,"b":3}"#, r#"{"b": 3, "a": 2}"#);
        check(
            "tojson(sort_keys=true)",
            r#"{"b":1,"a":{"d":1,"c":2}}"#,
            r#"{"a": {"c": 2, "d": 1}, "b": 1}"#,
        );
        check("tojson", "[]", "[]");
        check("tojson", "{}", "{}");
    }

    #[test]
    fn indents_and_separators_are_pythons() {
        let input = r#"{"b":[1,[],{}],"a":{"c":"x"}}"#;
        check(
            "tojson(indent=2)",
            input,
            "{\n  \"b\": [\n    1,\n    [],\n    {}\n  ],\n  \"a\": {\n    \"c\": \"x\"\n  }\n}",
        );
        check("tojson(indent='\t')", "[1]", "[\n\t1\n]");
        check("tojson(indent=0)", "[1,2]", "[\n1,\n2\n]");
        check("tojson(indent=none)", "[1,2]", "[1, 2]");
        check(
            "tojson(separators=(',', ':'))",
            input,
            r#"{"b":[1,[],{}],"a":{"c":"x"}}"#,
        );
        check(
            "tojson(indent=1, separators=(';', '='))",
            r#"{"b":[1,2]}"#,
            "{\n \"b\"=[\n  1;\n  2\n ]\n}",
        );
        // By place: ensure_ascii, indent.
        check("tojson(true, 1)", "[\"\u{e9}\"]", "[\n \"\\u00e9\"\n]");
    }

    #[test]
    fn strings_are_escaped_as_python_does() {
        let input = "\"a\u{7f}\u{2028}\u{e9}\\u0001\\b\\f\\n\\r\\t/\\\\\\\"\u{1f600}\"";
        check(
            "tojson",
            input,
            "\"a\u{7f}\u{2028}\u{e9}\\u0001\\b\\f\\n\\r\\t/\\\\\\\"\u{1f600}\"",
        );
        check(
            "tojson(ensure_ascii=true)",
            input,
            r#""a\u007f\u2028\u00e9\u0001\b\f\n\r\t/\\\"\ud83d\ude00""#,
        );
        check("tojson(ensure_ascii=false)", "\"\u{e9}\"", "\"\u{e9}\"");
    }

    #[test]
    fn numbers_are_written_as_python_does() {
        for (input, expected) in [
            ("[0, -1, 18446744073709551615]", "[0, -1, 18446744073709551615]"),
            (
                "[1.0, 1e3, -0.0, 0.1, 12345.678]",
                "[1.0, 1000.0, -0.0, 0.1, 12345.678]",
            ),
            (
                "[1e15, 1e16, 1e22, 1.5e300]",
                "[1000000000000000.0, 1e+16, 1e+22, 1.5e+300]",
            ),
            ("[0.0001, 0.00001, 5e-324]", "[0.0001, 1e-05, 5e-324]"),
            ("[123456789012345680.0]", "[1.2345678901234568e+17]"),
        ] {
            check("tojson", input, expected);
        }
    }

    #[test]
    fn what_python_refuses_is_refused() {
        let mut environment = Environment::new();
        environment.add_filter("tojson", to_json);
        for source in [
            "{{ missing | tojson }}",
            "{{ [missing] | tojson }}",
            "{{ 1 | tojson(colour=1) }}",
            "{{ 1 | tojson(separators=(1, 2)) }}",
        ] {
            assert!(environment.render_str(source, ()).is_err(), "{source}");
        }
    }
}
