//! A request's bytes read: in the engine's dialect, checked, and, where the router has the model's vocabulary, tokenised and compared with
//! what came before. No task, no shell: what takes long is done on another thread by whoever calls.

use crate::prefix::canonical::Canonical;
use crate::prefix::outline::{Fresh, SYSTEM_ROLES};
use crate::proxy::dialect::Dialect;
use crate::proxy::legs::Endpoint;
use crate::proxy::session::{SessionName, session_of};
use crate::tails::{OPENING_TOKENS, Tails};
use crate::tokenise::{Encoding, Text, Words};
use bytes::Bytes;
use homing_kv::Prompt;
use homing_model::{ChatValue, EncodedPrompt, PromptTokens};
use homing_router::event::{Compared, Turn};
use homing_units::RequestId;
use homing_wire::openai::{ApiError, Body, ChatRequest, CompletionRequest, GenerationParams, PromptInput};
use homing_wire::responses::Echo;
use http::HeaderMap;
use std::sync::Arc;

/// Tokens of a completion that does not say how many, as OpenAI has it and engines do.
pub(super) const COMPLETION_TOKENS: u32 = 16;

/// Where a request's bytes come from, and what is done to them.
pub(crate) struct Source<'a> {
    pub(crate) dialect: Dialect,
    pub(crate) headers: &'a HeaderMap,
    pub(crate) canonical: Option<&'a Canonical>,
}

/// What is known of a request before its tokens are.
pub(crate) struct Parsed {
    pub(super) body: Body,
    pub(super) original: Option<Body>,
    pub(super) fresh: Fresh,
    pub(super) echo: Echo,
    pub(super) session: SessionName,
    pub(super) params: GenerationParams,
    pub(super) text: Text,
    /// Where the router has the model's vocabulary, or the client sent tokens.
    pub(super) tokenised: Option<Tokenised>,
}

/// A prompt's tokens, and its blocks.
pub(super) struct Tokenised {
    pub(super) tokens: PromptTokens,
    pub(super) prompt: Prompt,
    pub(super) compared: Compared,
}

/// What turns tokens into a prompt.
#[derive(Clone)]
pub(crate) struct Comparison {
    pub(crate) block_size: u32,
    pub(crate) tails: Arc<Tails>,
    /// Tokens at a prompt's end that only open the answer, at most.
    pub(crate) opening: usize,
}

impl Comparison {
    pub(crate) const fn new(endpoint: Endpoint, block_size: u32, tails: Arc<Tails>) -> Self {
        Self {
            block_size,
            tails,
            opening: match endpoint {
                Endpoint::Chat => OPENING_TOKENS,
                Endpoint::Completions => 0,
            },
        }
    }
}

impl Parsed {
    /// All that is done to a request's bytes before the core hears of it, where the router has the model's vocabulary.
    ///
    /// # Errors
    /// The request is malformed, or cannot be rendered.
    pub(crate) fn of_bytes(
        source: &Source<'_>,
        bytes: &Bytes,
        words: Option<&Words>,
        comparison: &Comparison,
    ) -> Result<Self, ApiError> {
        let parsed = Self::of_near_bytes(source, bytes, words, comparison, usize::MAX)?;
        Ok(parsed.expect("no text is longer than the largest number"))
    }

    /// The same, unless more than so many bytes of its text are new.
    pub(super) fn of_near_bytes(
        source: &Source<'_>,
        bytes: &Bytes,
        words: Option<&Words>,
        comparison: &Comparison,
        new_bytes_max: usize,
    ) -> Result<Option<Self>, ApiError> {
        let received = read_body(source, bytes)?;
        parse(source.dialect, received, words, comparison, new_bytes_max)
    }

    /// The turn as the core sees it; `None` where an engine has to tokenise it first.
    pub(crate) fn turn(&self, request: RequestId) -> Option<Turn> {
        let tokenised = self.tokenised.as_ref()?;
        Some(Turn {
            request,
            session: self.session.hint,
            prompt: tokenised.prompt.clone(),
            compared: Some(tokenised.compared),
            max_output_tokens: self.params.max_tokens.unwrap_or(COMPLETION_TOKENS),
            priority: self.params.priority,
            kind: self.session.kind(),
        })
    }
}

impl Tokenised {
    pub(super) fn new(encoded: EncodedPrompt, comparison: &Comparison) -> Result<Self, ApiError> {
        let EncodedPrompt { tokens, prompt, .. } = encoded;
        if tokens.is_empty() {
            return Err(ApiError::invalid("the prompt has no tokens, expected one or more"));
        }
        let compared = comparison
            .tails
            .compare(&tokens, &prompt, comparison.block_size, comparison.opening);
        Ok(Self {
            tokens,
            prompt,
            compared,
        })
    }
}

/// A request in the engine's dialect, and what the client's own says beyond it.
struct Received {
    body: Body,
    original: Option<Body>,
    echo: Echo,
    session: SessionName,
}

fn read_body(source: &Source<'_>, bytes: &Bytes) -> Result<Received, ApiError> {
    let Source {
        dialect,
        headers,
        canonical,
    } = *source;
    let body = Body::parse(bytes).map_err(|error| error.with_code("invalid_json"))?;
    let session = session_of(headers, &body)?;
    let original = (dialect.is_translated() && canonical.is_none()).then(|| body.clone());
    let (mut body, echo) = dialect.to_engine(body)?;
    if let Some(canonical) = canonical {
        canonical.apply(&mut body);
    }
    Ok(Received {
        body,
        original,
        echo,
        session,
    })
}

fn parse(
    dialect: Dialect,
    received: Received,
    words: Option<&Words>,
    comparison: &Comparison,
    new_bytes_max: usize,
) -> Result<Option<Parsed>, ApiError> {
    let Received {
        body,
        original,
        echo,
        session,
    } = received;
    let Asked {
        params,
        text,
        messages,
        system_text,
        values,
    } = asked(dialect.endpoint(), &body, words.is_some())?;
    let encoded = match (&text, words) {
        (Text::Tokens(tokens), _) => Some(EncodedPrompt::of_tokens(tokens.clone(), comparison.block_size)),
        (_, Some(words)) => match words.encode(&text, values, new_bytes_max)? {
            Encoding::Done(encoded) => Some(encoded),
            Encoding::TooNew => return Ok(None),
            Encoding::Unknown => None,
        },
        (_, None) => None,
    };
    let tokenised = encoded.map(|encoded| Tokenised::new(encoded, comparison)).transpose()?;
    Ok(Some(Parsed {
        fresh: Fresh::of_chat(&body, &messages, system_text),
        original: original.filter(|_| params.stream),
        body,
        echo,
        session,
        params,
        text,
        tokenised,
    }))
}

/// What a request asks for.
struct Asked {
    params: GenerationParams,
    text: Text,
    /// The messages of a conversation, as slices of it.
    messages: Vec<Bytes>,
    /// The text of the first of them, empty where it is not the system's; `None` where that has not been read.
    system_text: Option<String>,
    /// The same as a template sees them, where it is rendered here.
    values: Option<ChatValue>,
}

fn asked(endpoint: Endpoint, body: &Body, is_rendered: bool) -> Result<Asked, ApiError> {
    match endpoint {
        Endpoint::Chat => {
            let (params, messages, system_text, values) = if is_rendered {
                let (params, messages, values) = ChatRequest::read(body, ChatValue::is_plain_message)?;
                let first = values.first().filter(|first| first.is_plain_message());
                let system_text = first.map(|first| first.text_of(&SYSTEM_ROLES).unwrap_or_default());
                (params, messages, system_text, Some(ChatValue::list(values)))
            } else {
                let (params, messages) = ChatRequest::check(body)?;
                (params, messages, None, None)
            };
            Ok(Asked {
                params,
                text: Text::Chat(body.clone()),
                messages,
                system_text,
                values,
            })
        }
        Endpoint::Completions => {
            let request = CompletionRequest::from_body(body)?;
            let text = match request.prompt {
                PromptInput::Ids(tokens) => Text::Tokens(tokens),
                PromptInput::Text(text) => Text::Prompt {
                    text,
                    add_special_tokens: flag_or(body, "add_special_tokens", true)?,
                },
            };
            Ok(Asked {
                params: request.params,
                text,
                messages: Vec::new(),
                system_text: None,
                values: None,
            })
        }
    }
}

fn flag_or(body: &Body, name: &str, default: bool) -> Result<bool, ApiError> {
    Ok(body.read(name, "true or false")?.unwrap_or(default))
}
