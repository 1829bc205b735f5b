//! Chat templates: a model's Jinja source, rendered as the Hugging Face tooling does it.
//!
//! Blocks are trimmed, loops have `break` and `continue`, Python's methods on strings, lists and maps work, `tojson`
//! writes what `json.dumps` does, and `raise_exception` and `strftime_now` exist. The time is an argument, so that the
//! router and a worker render the same prompt.
//!
//! Messages come in OpenAI's form and are brought into the form that templates expect: text parts are joined, absent
//! content is empty, the arguments of tool calls become objects. Anything else is refused, not dropped.

use crate::strftime::strftime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value, context};
use serde_json::Value as Json;
use std::sync::Arc;

const NAME: &str = "chat";

/// ChatML, for a model that declares its markers but no template.
pub const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// A chat template. Cloning shares it.
#[derive(Clone)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    bos: String,
    eos: String,
}

/// What a template is rendered with.
#[derive(Clone, Copy, Debug)]
pub struct ChatInput<'a> {
    /// OpenAI's `messages`: an array.
    pub messages: &'a Json,
    /// OpenAI's `tools`: an array, or `None`.
    pub tools: Option<&'a Json>,
    /// Whether the assistant's turn is opened at the end.
    pub add_generation_prompt: bool,
    /// What `strftime_now` says the time is, in seconds since 1970 (UTC).
    pub unix_seconds: u64,
}

/// Why a conversation was not rendered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The messages are not in OpenAI's form: the client's fault.
    #[error("{0}")]
    Messages(String),
    /// The template refused the conversation (`raise_exception`): the client's fault.
    #[error("the chat template refuses this conversation: {0}")]
    Refused(String),
    /// The template does not work on this conversation.
    #[error("the chat template failed: {0}")]
    Failed(String),
    /// The model has no template: the client has to send plain prompts.
    #[error("the model has no chat template, expected a prompt for `/v1/completions`")]
    Missing,
    /// The source is not a template.
    #[error("the chat template is not valid: {0}")]
    Source(String),
}

impl ChatTemplate {
    /// A template from its source; `bos` and `eos` are the texts that it may insert as `bos_token` and `eos_token`.
    ///
    /// # Errors
    /// [`TemplateError::Source`] if it does not parse.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.expect("the usual delimiters do not clash"));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter("tojson", to_json);
        let added = environment.add_template_owned(NAME, source.to_owned());
        added.map_err(|error| TemplateError::Source(one_line(&error)))?;
        Ok(Self {
            environment: Arc::new(environment),
            bos: bos.to_owned(),
            eos: eos.to_owned(),
        })
    }

    /// The prompt of a conversation.
    ///
    /// # Errors
    /// If the messages are malformed, or the template refuses or fails on them.
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String, TemplateError> {
        let messages = messages(input.messages)?;
        let seconds = input.unix_seconds;
        let now = Value::from_function(move |format: &str| {
            strftime(format, seconds).map_err(|error| Error::new(ErrorKind::InvalidOperation, error))
        });
        let variables = context! {
            messages => messages.iter().map(value_of).collect::<Vec<_>>(),
            tools => input.tools.filter(|tools| tools.as_array().is_none_or(|tools| !tools.is_empty())).map(value_of),
            add_generation_prompt => input.add_generation_prompt,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
            strftime_now => now,
        };
        let template = self
            .environment
            .get_template(NAME)
            .expect("it was added when the environment was made");
        template.render(variables).map_err(|error| failure(&error))
    }
}

/// Carries the message of `raise_exception` through the engine's own errors.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raised by the template").with_source(Raised(message)))
}

fn failure(error: &Error) -> TemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(Raised(message)) = error.downcast_ref() {
            return TemplateError::Refused(message.clone());
        }
        cause = error.source();
    }
    TemplateError::Failed(one_line(error))
}

fn one_line(error: &Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

/// Messages in the form that templates expect.
fn messages(messages: &Json) -> Result<Vec<Json>, TemplateError> {
    let list = messages
        .as_array()
        .ok_or_else(|| TemplateError::Messages("`messages` is no array".to_owned()))?;
    if list.is_empty() {
        return Err(TemplateError::Messages(
            "`messages` is empty, expected at least one".to_owned(),
        ));
    }
    list.iter()
        .enumerate()
        .map(|(index, message)| tidy(index, message))
        .collect()
}

fn tidy(index: usize, message: &Json) -> Result<Json, TemplateError> {
    let refuse = |problem: &str| TemplateError::Messages(format!("`messages[{index}]{problem}"));
    let mut fields = message.as_object().ok_or_else(|| refuse("` is no object"))?.clone();
    if !fields.get("role").is_some_and(Json::is_string) {
        return Err(refuse(".role` is missing, expected a string"));
    }
    let text = content(index, fields.get("content"))?;
    fields.insert("content".to_owned(), Json::String(text));
    if let Some(calls) = fields.get_mut("tool_calls").and_then(Json::as_array_mut) {
        calls.iter_mut().for_each(parse_arguments);
    }
    Ok(Json::Object(fields))
}

/// The text of a message's content: a string, text parts joined by newlines, or nothing.
fn content(index: usize, content: Option<&Json>) -> Result<String, TemplateError> {
    let refuse = |problem: &str| {
        Err(TemplateError::Messages(format!(
            "`messages[{index}].content` {problem}"
        )))
    };
    let parts = match content {
        None | Some(Json::Null) => return Ok(String::new()),
        Some(Json::String(text)) => return Ok(text.clone()),
        Some(Json::Array(parts)) => parts,
        Some(Json::Bool(_) | Json::Number(_) | Json::Object(_)) => {
            return refuse("is neither a string nor an array of parts");
        }
    };
    let mut texts = Vec::with_capacity(parts.len());
    for part in parts {
        let kind = part.get("type").and_then(Json::as_str).unwrap_or("text");
        match (kind, part.as_str().or_else(|| part.get("text").and_then(Json::as_str))) {
            ("text" | "input_text" | "output_text", Some(text)) => texts.push(text),
            ("text" | "input_text" | "output_text", None) => return refuse("has a text part without `text`"),
            (kind, _) => return refuse(&format!("has a part of type `{kind}`, expected `text`")),
        }
    }
    Ok(texts.join("\n"))
}

/// Templates want the arguments of a tool call as an object; clients send them as a string of JSON.
fn parse_arguments(call: &mut Json) {
    let Some(arguments) = call.pointer_mut("/function/arguments") else {
        return;
    };
    if let Some(parsed) = arguments
        .as_str()
        .and_then(|text| serde_json::from_str::<Json>(text).ok())
        && parsed.is_object()
    {
        *arguments = parsed;
    }
}

/// A template's value of a piece of JSON.
fn value_of(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(flag) => Value::from(*flag),
        Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(integer), _, _) => Value::from(integer),
            (None, Some(integer), _) => Value::from(integer),
            (None, None, float) => Value::from(float.unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(value_of).collect(),
        Json::Object(fields) => Value::from_pairs(fields.iter().map(|(key, item)| (key.as_str(), value_of(item)))),
    }
}

/// `json.dumps(value, ensure_ascii=False, indent=indent)`.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut writer = JsonWriter {
        text: String::new(),
        indent,
        depth: 0,
    };
    writer.write(value)?;
    Ok(Value::from_safe_string(writer.text))
}

struct JsonWriter {
    text: String,
    /// Spaces a level, or `None` for one line.
    indent: Option<usize>,
    depth: usize,
}

impl JsonWriter {
    fn write(&mut self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::Undefined | ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.text.push_str(&value.to_string()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.items(("[", "]"), &items, |writer, item| writer.write(item))?;
            }
            ValueKind::Map => {
                let keys: Vec<Value> = value.try_iter()?.collect();
                self.items(("{", "}"), &keys, |writer, key| {
                    writer.string(&key.to_string());
                    writer.text.push_str(": ");
                    writer.write(&value.get_item(key)?)
                })?;
            }
            _ => self.string(&value.to_string()),
        }
        Ok(())
    }

    fn string(&mut self, text: &str) {
        self.text.push_str(&Json::from(text).to_string());
    }

    fn items(
        &mut self,
        (open, close): (&str, &str),
        items: &[Value],
        write: impl Fn(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.text.push_str(open);
        self.depth += 1;
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                self.text.push_str(if self.indent.is_some() { "," } else { ", " });
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
        if let Some(indent) = self.indent {
            self.text.push('\n');
            self.text.extend(std::iter::repeat_n(' ', indent * self.depth));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, messages: &Json, tools: Option<&Json>) -> Result<String, TemplateError> {
        let template = ChatTemplate::new(source, "<s>", "</s>")?;
        template.render(&ChatInput {
            messages,
            tools,
            add_generation_prompt: true,
            unix_seconds: 1_700_000_000,
        })
    }

    fn user(content: Json) -> Json {
        json!([{"role": "user", "content": content}])
    }

    #[test]
    fn a_conversation_becomes_chat_ml() {
        let messages = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": null, "tool_calls": []},
            {"role": "tool", "content": "3"},
        ]);
        let expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n\
            <|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(render(CHATML, &messages, None).as_deref(), Ok(expected));
    }

    #[test]
    fn templates_have_what_the_hugging_face_tooling_gives_them() {
        let check = |source: &str, expected: &str| {
            let messages = json!([{"role": "user", "content": " Hi <b> ", "tool_calls": [
                {"function": {"name": "f", "arguments": "{\"b\": [1, 2.5, null], \"a\": \"\u{e9}<'&\"}"}}]}]);
            let tools = json!([{"type": "function"}]);
            assert_eq!(
                render(source, &messages, Some(&tools)).as_deref(),
                Ok(expected),
                "{source}"
            );
        };
        check(
            "{{ bos_token }}{{ messages[0]['content'].strip() | upper }}{{ eos_token }}",
            "<s>HI <B></s>",
        );
        check(
            "{{ messages[0].tool_calls[0].function.arguments | tojson }}",
            r#"{"a": "é<'&", "b": [1, 2.5, null]}"#,
        );
        check("{{ [1, {}, []] | tojson(indent=2) }}", "[\n  1,\n  {},\n  []\n]");
        check("{{ messages[0].tool_calls[0].function.arguments['b'] | length }}", "3");
        check("{{ tools | length }}{{ strftime_now('%d %b %Y') }}", "114 Nov 2023");
        check(
            "{% for i in range(9) %}\n{% if i == 2 %}{% break %}{% endif %}\n  {% set x = i %}\n{{ i }}\n{% endfor %}",
            "0\n1\n",
        );
        check(
            "{% if messages[0].role.startswith('us') %}yes{% endif %}{{ undefined_name }}",
            "yes",
        );
        check("{{ messages[0].content }}\n", " Hi <b> ");
    }

    #[test]
    fn what_is_wrong_is_said() {
        let check = |source: &str, messages: Json, expected: TemplateError| {
            assert_eq!(render(source, &messages, None), Err(expected), "{source}");
        };
        let messages = |problem: &str| TemplateError::Messages(problem.to_owned());
        check(CHATML, json!("hi"), messages("`messages` is no array"));
        check(
            CHATML,
            json!([]),
            messages("`messages` is empty, expected at least one"),
        );
        check(CHATML, json!([1]), messages("`messages[0]` is no object"));
        check(
            CHATML,
            json!([{"content": "hi"}]),
            messages("`messages[0].role` is missing, expected a string"),
        );
        check(
            CHATML,
            user(json!(3)),
            messages("`messages[0].content` is neither a string nor an array of parts"),
        );
        check(
            CHATML,
            user(json!([{"type": "text"}])),
            messages("`messages[0].content` has a text part without `text`"),
        );
        check(
            CHATML,
            user(json!([{"type": "image_url", "image_url": {}}])),
            messages("`messages[0].content` has a part of type `image_url`, expected `text`"),
        );
        let raising = "{{ raise_exception('roles must alternate') }}";
        check(
            raising,
            user(json!("hi")),
            TemplateError::Refused("roles must alternate".to_owned()),
        );
        let failed = render("{{ messages | no_such_filter }}", &user(json!("hi")), None);
        assert!(
            matches!(failed, Err(TemplateError::Failed(_) | TemplateError::Source(_))),
            "{failed:?}"
        );
        let broken = render("{% if %}", &user(json!("hi")), None);
        assert!(matches!(broken, Err(TemplateError::Source(_))), "{broken:?}");
        let format = render("{{ strftime_now('%Q') }}", &user(json!("hi")), None);
        assert!(matches!(format, Err(TemplateError::Failed(_))), "{format:?}");
    }
}
