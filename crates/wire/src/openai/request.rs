//! Requests of `/v1/completions` and `/v1/chat/completions`, validated.
//!
//! Members are read one by one from a [`Body`], so that each error names its member and says what was expected, and so
//! that members which nobody here knows stay in the body for the engine. Whether the model exists and whether the
//! prompt fits is for those who know the model.

use super::conversation::{
    EXPECTED_TOOLS, check_messages, check_tools, no_tool, read_messages, without_content, without_role, wrong_content,
};
use super::{ApiError, Body};
use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Stop strings in one request; more are refused.
pub const MAX_STOP_STRINGS: usize = 64;
/// Tokens in one output; more are refused.
const MAX_OUTPUT_TOKENS: i64 = 1 << 24;
/// Alternatives that `logprobs` may ask for.
const MAX_LOGPROBS: i64 = 20;

/// What both endpoints share.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationParams {
    /// The model's name, where the request names one.
    pub model: Option<String>,
    /// Tokens to generate at most: `max_completion_tokens`, else `max_tokens`, where given. At least 1.
    pub max_tokens: Option<u32>,
    /// Tokens before which no end-of-sequence or stop string ends the output.
    pub min_tokens: u32,
    /// 0 is greedy; 1 where not given.
    pub temperature: f64,
    /// Probability mass that is sampled from, above 0 and at most 1.
    pub top_p: f64,
    /// Makes sampling repeatable.
    pub seed: Option<i64>,
    /// Strings that end the output.
    pub stop: Vec<String>,
    /// Answer as server-sent events.
    pub stream: bool,
    /// `stream_options.include_usage`: end the stream with a chunk that has the usage.
    pub include_usage: bool,
    /// `stream_options.continuous_usage_stats` next to it: each chunk has the usage so far.
    pub continuous_usage: bool,
    /// Go on after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Answer with the ids of prompt and output tokens too.
    pub return_token_ids: bool,
    /// Alternatives to report with each token, where log-probabilities are asked for.
    pub logprobs: Option<u32>,
    /// `kv_transfer_params`, word for word.
    pub kv_transfer_params: Option<Bytes>,
    /// OpenAI's end-user id.
    pub user: Option<String>,
    /// When it is its turn among requests that wait: lower is earlier; 0 where not given.
    pub priority: i32,
    /// OpenAI's name for prompts that share a prefix.
    pub prompt_cache_key: Option<String>,
}

/// A request of `/v1/completions`.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionRequest {
    /// What both endpoints share.
    pub params: GenerationParams,
    /// The prompt.
    pub prompt: PromptInput,
    /// Answer with prompt and output instead of the output alone.
    pub echo: bool,
    /// Whether a text prompt gets the tokens that the tokenizer puts around every text; so where not given.
    pub add_special_tokens: bool,
}

/// A completion's prompt: one, as text or as token ids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum PromptInput {
    /// Text.
    Text(String),
    /// Token ids.
    Ids(Vec<u32>),
}

/// A request of `/v1/chat/completions`.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRequest {
    /// What both endpoints share.
    pub params: GenerationParams,
    /// The conversation; never empty.
    pub messages: Vec<ChatMessage>,
    /// Tool definitions for the chat template, as they came.
    pub tools: Option<Vec<Value>>,
    /// Whether the assistant's turn is opened at the end of the prompt; so where not given.
    pub add_generation_prompt: bool,
}

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, `tool`, or what else the template knows.
    pub role: String,
    /// What it says; `None` for an assistant's message that only calls tools.
    pub content: Option<Content>,
    /// The whole message as it came, for the chat template.
    pub value: Value,
}

/// What a message says.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// Text.
    Text(String),
    /// Parts.
    Parts(Vec<ContentPart>),
}

/// A part of a message.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct ContentPart {
    /// `text`, `image_url` and so on.
    #[serde(rename = "type")]
    pub kind: String,
    /// The text of a text part.
    #[serde(default)]
    pub text: Option<String>,
}

impl CompletionRequest {
    /// Reads a request from bytes.
    ///
    /// # Errors
    /// If it is no JSON object, or a member is missing or wrong.
    pub fn parse(bytes: &Bytes) -> Result<Self, ApiError> {
        Self::from_body(&Body::parse(bytes)?)
    }

    /// Reads a request.
    ///
    /// # Errors
    /// If a member is missing or wrong.
    pub fn from_body(body: &Body) -> Result<Self, ApiError> {
        let logprobs = ranged(body, "logprobs", 0, MAX_LOGPROBS)?;
        Ok(Self {
            params: GenerationParams::from_body(body, logprobs)?,
            prompt: prompt(body)?,
            echo: flag(body, "echo")?,
            add_special_tokens: body.read("add_special_tokens", "true or false")?.unwrap_or(true),
        })
    }
}

impl ChatRequest {
    /// Reads a request from bytes.
    ///
    /// # Errors
    /// If it is no JSON object, or a member is missing or wrong.
    pub fn parse(bytes: &Bytes) -> Result<Self, ApiError> {
        Self::from_body(&Body::parse(bytes)?)
    }

    /// Reads a request.
    ///
    /// # Errors
    /// If a member is missing or wrong.
    pub fn from_body(body: &Body) -> Result<Self, ApiError> {
        Ok(Self {
            params: Self::params(body)?,
            messages: messages(body)?,
            tools: tools(body)?,
            add_generation_prompt: body.read("add_generation_prompt", "true or false")?.unwrap_or(true),
        })
    }

    /// The parameters of a request in form, and its messages as slices of it. The conversation is looked at where it lies and
    /// not copied, for a router that does not render it.
    ///
    /// # Errors
    /// Those of [`from_body`](Self::from_body).
    pub fn check(body: &Body) -> Result<(GenerationParams, Vec<Bytes>), ApiError> {
        let params = Self::params(body)?;
        let messages = check_messages(body)?;
        Self::check_rest(body)?;
        Ok((params, messages))
    }

    /// The same with the messages as values, for a router that renders them, in one walk over the conversation. `is_plain` says
    /// of a value that it is an object with a role that is not empty, and with a text as its content (or none, in an
    /// assistant's); what is not plain is looked at once more.
    ///
    /// # Errors
    /// Those of [`from_body`](Self::from_body), and a message that is no such value.
    pub fn read<T: DeserializeOwned>(
        body: &Body,
        is_plain: impl Fn(&T) -> bool,
    ) -> Result<(GenerationParams, Vec<Bytes>, Vec<T>), ApiError> {
        let params = Self::params(body)?;
        let (messages, values) = read_messages(body, is_plain)?;
        Self::check_rest(body)?;
        Ok((params, messages, values))
    }

    fn check_rest(body: &Body) -> Result<(), ApiError> {
        check_tools(body)?;
        body.read::<bool>("add_generation_prompt", "true or false").map(|_| ())
    }

    fn params(body: &Body) -> Result<GenerationParams, ApiError> {
        let wanted = flag(body, "logprobs")?;
        let alternatives = ranged(body, "top_logprobs", 0, MAX_LOGPROBS)?;
        if alternatives.is_some() && !wanted {
            return Err(invalid(
                "top_logprobs",
                "`top_logprobs` is given, expected `logprobs` to be true with it",
            ));
        }
        GenerationParams::from_body(body, wanted.then(|| alternatives.unwrap_or(0)))
    }
}

impl ChatMessage {
    /// Reads one message; `index` is its place, for errors.
    ///
    /// # Errors
    /// If it is no object with a role, or its content is neither text, parts nor null.
    pub fn from_value(value: Value, index: usize) -> Result<Self, ApiError> {
        let role = value
            .get("role")
            .and_then(Value::as_str)
            .filter(|role| !role.is_empty())
            .ok_or_else(|| without_role(index))?;
        let content = match value.get("content") {
            None | Some(Value::Null) => None,
            Some(content) => Some(Content::deserialize(content).map_err(|_| wrong_content(index))?),
        };
        if content.is_none() && role != "assistant" {
            return Err(without_content(index, role));
        }
        Ok(Self {
            role: role.to_owned(),
            content,
            value,
        })
    }
}

impl Content {
    /// The text, parts joined by nothing.
    ///
    /// # Errors
    /// If a part is no text: this model sees text only.
    pub fn text(&self) -> Result<String, ApiError> {
        match self {
            Self::Text(text) => Ok(text.clone()),
            Self::Parts(parts) => parts.iter().map(ContentPart::as_text).collect(),
        }
    }
}

impl ContentPart {
    fn as_text(&self) -> Result<&str, ApiError> {
        self.text.as_deref().filter(|_| self.kind == "text").ok_or_else(|| {
            let kind = &self.kind;
            invalid(
                "messages",
                format!("a content part has the type `{kind}`, expected `text` with a `text`"),
            )
        })
    }
}

impl GenerationParams {
    fn from_body(body: &Body, logprobs: Option<u32>) -> Result<Self, ApiError> {
        if let Some(choices) = ranged(body, "n", 1, i64::MAX)?.filter(|n| *n != 1) {
            return Err(invalid(
                "n",
                format!("`n` is `{choices}`, expected 1: one answer a request"),
            ));
        }
        let max_tokens = match ranged(body, "max_completion_tokens", 1, MAX_OUTPUT_TOKENS)? {
            Some(tokens) => Some(tokens),
            None => ranged(body, "max_tokens", 1, MAX_OUTPUT_TOKENS)?,
        };
        let min_tokens = ranged(body, "min_tokens", 0, MAX_OUTPUT_TOKENS)?.unwrap_or(0);
        if max_tokens.is_some_and(|max| min_tokens > max) {
            return Err(invalid(
                "min_tokens",
                format!("`min_tokens` is `{min_tokens}`, expected at most `max_tokens`"),
            ));
        }
        let kv_transfer_params = body
            .get("kv_transfer_params")
            .filter(|text| text.as_ref() != b"null")
            .cloned();
        if kv_transfer_params.as_ref().is_some_and(|text| !text.starts_with(b"{")) {
            return Err(invalid(
                "kv_transfer_params",
                "`kv_transfer_params` is wrong, expected an object",
            ));
        }
        let stream = flag(body, "stream")?;
        let options = StreamOptions::read(body, stream)?;
        Ok(Self {
            model: body.read("model", "a string")?,
            max_tokens,
            min_tokens,
            temperature: number(body, "temperature", 1.0, "a number of at least 0", |value| value >= 0.0)?,
            top_p: number(body, "top_p", 1.0, "a number above 0 and at most 1", |value| {
                value > 0.0 && value <= 1.0
            })?,
            seed: body.read("seed", "an integer of 64 bits")?,
            stop: stop_strings(body)?,
            stream,
            include_usage: options.include_usage,
            continuous_usage: options.include_usage && options.continuous_usage_stats,
            ignore_eos: flag(body, "ignore_eos")?,
            return_token_ids: flag(body, "return_token_ids")?,
            logprobs,
            kv_transfer_params,
            user: body.read("user", "a string")?,
            priority: body.read("priority", "an integer of 32 bits")?.unwrap_or(0),
            prompt_cache_key: body.read("prompt_cache_key", "a string")?,
        })
    }
}

pub(super) fn invalid(param: &str, message: impl Into<String>) -> ApiError {
    ApiError::invalid(message).with_param(param)
}

fn flag(body: &Body, name: &str) -> Result<bool, ApiError> {
    Ok(body.read(name, "true or false")?.unwrap_or(false))
}

fn ranged(body: &Body, name: &str, low: i64, high: i64) -> Result<Option<u32>, ApiError> {
    let expected = format!("an integer of at least {low}");
    let Some(value) = body.read::<i64>(name, &expected)? else {
        return Ok(None);
    };
    u32::try_from(value)
        .ok()
        .filter(|_| value >= low && value <= high)
        .map(Some)
        .ok_or_else(|| {
            let most = if high < i64::MAX {
                format!(" and at most {high}")
            } else {
                String::new()
            };
            invalid(name, format!("`{name}` is `{value}`, expected {expected}{most}"))
        })
}

fn number(body: &Body, name: &str, default: f64, expected: &str, fits: fn(f64) -> bool) -> Result<f64, ApiError> {
    let value = body.read::<f64>(name, expected)?.unwrap_or(default);
    match fits(value) {
        true => Ok(value),
        false => Err(invalid(name, format!("`{name}` is `{value}`, expected {expected}"))),
    }
}

/// `stream_options`.
#[derive(Default)]
struct StreamOptions {
    include_usage: bool,
    continuous_usage_stats: bool,
}

impl StreamOptions {
    fn read(body: &Body, stream: bool) -> Result<Self, ApiError> {
        const NAME: &str = "stream_options";
        let expected = "an object such as {\"include_usage\":true}";
        let Some(options) = body.read::<serde_json::Map<String, Value>>(NAME, expected)? else {
            return Ok(Self::default());
        };
        if !stream && !options.is_empty() {
            return Err(invalid(
                NAME,
                "`stream_options` is given, expected `stream` to be true with it",
            ));
        }
        let option = |name: &str| match options.get(name) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(value)) => Ok(*value),
            Some(other) => Err(invalid(
                NAME,
                format!("`{NAME}.{name}` is `{other}`, expected true or false"),
            )),
        };
        Ok(Self {
            include_usage: option("include_usage")?,
            continuous_usage_stats: option("continuous_usage_stats")?,
        })
    }
}

fn tools(body: &Body) -> Result<Option<Vec<Value>>, ApiError> {
    let tools: Option<Vec<Value>> = body.read("tools", EXPECTED_TOOLS)?;
    let wrong = tools.iter().flatten().position(|tool| !tool.is_object());
    wrong.map_or(Ok(tools), |index| Err(no_tool(index)))
}

fn stop_strings(body: &Body) -> Result<Vec<String>, ApiError> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Stop {
        One(String),
        Many(Vec<String>),
    }
    let stop = match body.read("stop", "a string or a list of strings")? {
        None => Vec::new(),
        Some(Stop::One(text)) => vec![text],
        Some(Stop::Many(texts)) => texts,
    };
    if stop.len() > MAX_STOP_STRINGS {
        let count = stop.len();
        return Err(invalid(
            "stop",
            format!("`stop` has `{count}` strings, expected at most {MAX_STOP_STRINGS}"),
        ));
    }
    match stop.iter().any(String::is_empty) {
        true => Err(invalid(
            "stop",
            "`stop` has an empty string, expected strings of at least one character",
        )),
        false => Ok(stop),
    }
}

fn prompt(body: &Body) -> Result<PromptInput, ApiError> {
    let prompt = match plain_prompt(body) {
        Some(prompt) => prompt,
        None => prompt_of_any_shape(body)?,
    };
    match &prompt {
        PromptInput::Text(text) if text.is_empty() => {
            Err(invalid("prompt", "`prompt` is empty, expected a token or more"))
        }
        PromptInput::Ids(ids) if ids.is_empty() => {
            Err(invalid("prompt", "`prompt` is empty, expected a token or more"))
        }
        PromptInput::Text(_) | PromptInput::Ids(_) => Ok(prompt),
    }
}

/// A prompt that is a text or a list of token ids, as nearly all are, read straight into what it is: who tries one shape after the
/// other keeps 32 bytes for each number meanwhile, twice.
fn plain_prompt(body: &Body) -> Option<PromptInput> {
    let text = body.get("prompt")?;
    match text.first()? {
        b'"' => serde_json::from_slice(text).ok().map(PromptInput::Text),
        b'[' => serde_json::from_slice(text).ok().map(PromptInput::Ids),
        _ => None,
    }
}

fn prompt_of_any_shape(body: &Body) -> Result<PromptInput, ApiError> {
    const EXPECTED: &str = "a string, a list of token ids, or a list of one of these";
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Shape {
        One(PromptInput),
        Many(Vec<PromptInput>),
    }
    let shape = body
        .read::<Shape>("prompt", EXPECTED)?
        .ok_or_else(|| invalid("prompt", format!("`prompt` is missing, expected {EXPECTED}")))?;
    match shape {
        Shape::One(prompt) => Ok(prompt),
        Shape::Many(mut prompts) if prompts.len() == 1 => Ok(prompts.remove(0)),
        Shape::Many(prompts) => {
            let count = prompts.len();
            let message = format!("`prompt` is a list of `{count}` prompts, expected one a request");
            Err(invalid("prompt", message))
        }
    }
}

fn messages(body: &Body) -> Result<Vec<ChatMessage>, ApiError> {
    let messages: Vec<Value> = body
        .read("messages", "a list of messages")?
        .ok_or_else(|| invalid("messages", "`messages` is missing, expected a list of messages"))?;
    if messages.is_empty() {
        return Err(invalid("messages", "`messages` is empty, expected a message or more"));
    }
    messages
        .into_iter()
        .enumerate()
        .map(|(index, value)| ChatMessage::from_value(value, index))
        .collect()
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
