//! Chat templates: a model's Jinja source, rendered as the Hugging Face tooling does it.
//!
//! Blocks are trimmed, loops have `break` and `continue`, Python's methods on strings, lists and maps work, `tojson`
//! writes what `json.dumps` does, and `raise_exception` and `strftime_now` exist. The time is an argument, so that the
//! router and a worker render the same prompt.
//!
//! Messages come in OpenAI's form and are brought into the form that templates expect: text parts are joined, absent
//! content is empty, the arguments of tool calls become objects. Anything else is refused, not dropped. Function tools are
//! brought into the form in which vLLM hands them to a template: the members of its own schema in its order, an absent
//! description or absent parameters as null, and no others (0.32, `FunctionDefinition`).

use crate::chat_value::{ChatSource, ChatValue, with_item};
use crate::emits::{PRINT_PIECES, print_pieces, with_pieces};
use crate::strftime::strftime;
use crate::to_json::to_json;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use serde_json::Value as Json;
use std::sync::Arc;

const NAME: &str = "chat";

/// The same template with its printed sums as pieces ([`with_pieces`]).
const IN_PIECES: &str = "chat-in-pieces";

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

/// What a template is rendered with: JSON, or the [`ChatValue`](crate::ChatValue)s that are read with fewer copies.
#[derive(Debug)]
pub struct ChatInput<'a, V = Json> {
    /// OpenAI's `messages`: an array.
    pub messages: &'a V,
    /// OpenAI's `tools`: an array, or `None`.
    pub tools: Option<&'a V>,
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
        environment.add_function(PRINT_PIECES, print_pieces);
        environment.add_filter("tojson", to_json);
        if let Some(in_pieces) = with_pieces(source) {
            // Where the change makes no template of it, there is the one as it was.
            drop(environment.add_template_owned(IN_PIECES, in_pieces));
        }
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
    pub fn render<V: ChatSource>(&self, input: &ChatInput<'_, V>) -> Result<String, TemplateError> {
        let messages = messages(&input.messages.value())?;
        let tools = input
            .tools
            .map(ChatSource::value)
            .filter(|tools| tools.len() != Some(0))
            .map(|tools| function_tools(&tools));
        let seconds = input.unix_seconds;
        let now = Value::from_function(move |format: &str| {
            strftime(format, seconds).map_err(|error| Error::new(ErrorKind::InvalidOperation, error))
        });
        let variables = context! {
            messages => messages,
            tools => tools,
            add_generation_prompt => input.add_generation_prompt,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
            strftime_now => now,
        };
        if let Ok(in_pieces) = self.environment.get_template(IN_PIECES)
            && let Ok(text) = in_pieces.render(&variables)
        {
            return Ok(text);
        }
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
fn messages(messages: &Value) -> Result<Vec<Value>, TemplateError> {
    if messages.kind() != ValueKind::Seq {
        return Err(TemplateError::Messages("`messages` is no array".to_owned()));
    }
    if messages.len() == Some(0) {
        return Err(TemplateError::Messages(
            "`messages` is empty, expected at least one".to_owned(),
        ));
    }
    let list = messages.try_iter().expect("an array has items");
    list.enumerate().map(|(index, message)| tidy(index, message)).collect()
}

/// A message that is in form already stays the one that it is: a long conversation is not copied.
fn tidy(index: usize, message: Value) -> Result<Value, TemplateError> {
    let refuse = |problem: &str| TemplateError::Messages(format!("`messages[{index}]{problem}"));
    if message.kind() != ValueKind::Map {
        return Err(refuse("` is no object"));
    }
    if member(&message, "role").is_none_or(|role| role.as_str().is_none()) {
        return Err(refuse(".role` is missing, expected a string"));
    }
    let tidied = match content(index, member(&message, "content"))? {
        Some(text) => with_item(&message, "content", Value::from(text)),
        None => message,
    };
    let calls = member(&tidied, "tool_calls").filter(|calls| calls.kind() == ValueKind::Seq);
    Ok(match calls {
        Some(calls) => {
            let calls = calls.try_iter().expect("an array has items");
            with_item(
                &tidied,
                "tool_calls",
                calls.map(|call| parse_arguments(&call)).collect(),
            )
        }
        None => tidied,
    })
}

/// Tools as vLLM hands them to a template; what is no function tool stays what it is.
fn function_tools(tools: &Value) -> Value {
    let Ok(items) = tools.try_iter() else {
        return tools.clone();
    };
    items.map(|tool| function_tool(&tool).unwrap_or(tool)).collect()
}

fn function_tool(tool: &Value) -> Option<Value> {
    let function = member(tool, "function").filter(|function| function.kind() == ValueKind::Map)?;
    let given = |object: &Value, name: &str| member(object, name).filter(|value| !value.is_none());
    let deferred = given(tool, "defer_loading");
    let always = ["name", "description", "parameters"].map(|name| {
        let value = member(&function, name).unwrap_or_else(|| Value::from(()));
        (name, value)
    });
    let strict = given(&function, "strict").map(|value| ("strict", value));
    let defers = given(&function, "defer_loading").or_else(|| deferred.clone());
    let defers = defers.map(|value| ("defer_loading", value));
    let function = Value::from_pairs(always.into_iter().chain(strict).chain(defers));
    let kind = member(tool, "type").unwrap_or_else(|| Value::from("function"));
    let members = [("type", kind), ("function", function)];
    let deferred = deferred.map(|value| ("defer_loading", value));
    Some(Value::from_pairs(members.into_iter().chain(deferred)))
}

/// An object's member.
fn member(object: &Value, name: &str) -> Option<Value> {
    let value = object.get_attr(name).ok()?;
    (!value.is_undefined()).then_some(value)
}

/// The text of a message's content, where it is not a string already: text parts joined by newlines, or nothing.
fn content(index: usize, content: Option<Value>) -> Result<Option<String>, TemplateError> {
    let refuse = |problem: &str| {
        Err(TemplateError::Messages(format!(
            "`messages[{index}].content` {problem}"
        )))
    };
    let content = content.unwrap_or_default();
    match content.kind() {
        ValueKind::Undefined | ValueKind::None => return Ok(Some(String::new())),
        ValueKind::String => return Ok(None),
        ValueKind::Seq => {}
        _ => return refuse("is neither a string nor an array of parts"),
    }
    let mut texts = Vec::new();
    for part in content.try_iter().expect("an array has items") {
        let kind = member(&part, "type").and_then(|kind| kind.as_str().map(str::to_owned));
        let kind = kind.as_deref().unwrap_or("text");
        let text = if part.as_str().is_some() {
            Some(part)
        } else {
            member(&part, "text").filter(|text| text.as_str().is_some())
        };
        match (kind, text) {
            ("text" | "input_text" | "output_text", Some(text)) => texts.push(text),
            ("text" | "input_text" | "output_text", None) => return refuse("has a text part without `text`"),
            (kind, _) => return refuse(&format!("has a part of type `{kind}`, expected `text`")),
        }
    }
    let texts: Vec<&str> = texts.iter().filter_map(|text| text.as_str()).collect();
    Ok(Some(texts.join("\n")))
}

/// Templates want the arguments of a tool call as an object; clients send them as a string of JSON.
fn parse_arguments(call: &Value) -> Value {
    let parsed = || {
        let function = member(call, "function")?;
        let arguments = member(&function, "arguments")?;
        let parsed: ChatValue = serde_json::from_str(arguments.as_str()?).ok()?;
        let parsed = parsed.value();
        let function = (parsed.kind() == ValueKind::Map).then(|| with_item(&function, "arguments", parsed))?;
        Some(with_item(call, "function", function))
    };
    parsed().unwrap_or_else(|| call.clone())
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
            r#"{"b": [1, 2.5, null], "a": "é<'&"}"#,
        );
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

    /// What a template gives with its sums in pieces, and as it was.
    fn both(source: &str, messages: &Json) -> [Result<String, TemplateError>; 2] {
        // A comment that holds the function's name keeps a template as it was.
        let as_it_was = format!("{{# {PRINT_PIECES} #}}{source}");
        assert!(
            with_pieces(source).is_some() && with_pieces(&as_it_was).is_none(),
            "{source}"
        );
        [source, &as_it_was].map(|source| render(source, messages, None))
    }

    #[test]
    fn sums_in_pieces_print_what_sums_print() {
        let messages = json!([
            {"role": "system", "content": "Be <brief> & \u{e9}."},
            {"role": "user", "content": " two\nlines "},
            {"role": "assistant", "content": "", "n": 7, "list": [1], "tool_calls": []},
        ]);
        let check = |source: &str, is_rendered: bool| {
            let [in_pieces, as_it_was] = both(source, &messages);
            assert_eq!(in_pieces, as_it_was, "{source}");
            assert_eq!(in_pieces.is_ok(), is_rendered, "{source}: {in_pieces:?}");
        };
        check(CHATML, true);
        check(
            "{{ 'a' + 'b' | upper }}{{ 'a' | upper + 'b' }}{{- messages[0].role + ' ' -}} \n {{ 'x' + messages[1]['content'].strip() }}",
            true,
        );
        check(
            "{% for m in messages %}\n{%- if loop.first %}{{ bos_token + m.content }}{{ '' + m.role }}{% endif -%}\n{{ m['role'] + '\\n\\'' + m['content'] | trim + \"\\\"\" }}{% endfor %}",
            true,
        );
        check(
            "{% set text %}{{ 'a' + messages[0].content }}{% endset %}{{ text | length }}{{ text }}",
            true,
        );
        check(
            "{% macro say(m) %}{{ '[' + m.content + ']' }}{% endmacro %}{{ say(messages[1]) | upper }}",
            true,
        );
        check(
            "{{ 'a' + (messages[0].role + 'b') + messages | map(attribute='role') | join('+') }}",
            true,
        );
        // Whatever is no text is for the template as it was.
        check("{{ 'a' + messages[2].n }}", false);
        check("{{ 'a' + messages[0].missing }}", false);
        check("{{ 'a' + messages[2].list }}", false);
        check("{{ 'a' + raise_exception('no') }}", false);
    }

    /// What vLLM 0.32 handed to `tojson` for these tools.
    #[test]
    fn tools_have_the_members_that_vllm_gives_them_in_its_order() {
        let check = |tool: &str, expected: &str| {
            let tools: ChatValue = serde_json::from_str(&format!("[{tool}]")).unwrap();
            let messages: ChatValue = serde_json::from_str(r#"[{"role": "user", "content": "hi"}]"#).unwrap();
            let template = ChatTemplate::new("{{ tools[0] | tojson }}", "", "").unwrap();
            let input = ChatInput {
                messages: &messages,
                tools: Some(&tools),
                add_generation_prompt: true,
                unix_seconds: 0,
            };
            assert_eq!(template.render(&input).as_deref(), Ok(expected), "{tool}");
        };
        check(
            r#"{"function":{"parameters":{"z":{},"a":1},"name":"f","description":"d","strict":null},"type":"function"}"#,
            r#"{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"z": {}, "a": 1}}}"#,
        );
        check(
            r#"{"type":"function","cache_control":{},"function":{"name":"f","strict":true,"odd":1}}"#,
            r#"{"type": "function", "function": {"name": "f", "description": null, "parameters": null, "strict": true}}"#,
        );
        check(
            r#"{"type":"function","defer_loading":true,"function":{"name":"f"}}"#,
            r#"{"type": "function", "function": {"name": "f", "description": null, "parameters": null, "defer_loading": true}, "defer_loading": true}"#,
        );
        check(r#"{"name":"f","b":1,"a":2}"#, r#"{"name": "f", "b": 1, "a": 2}"#);
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
