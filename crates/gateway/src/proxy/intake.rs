//! From a client's bytes to a turn: validated, tokenised, hashed; everything that can be wrong with it found before the
//! core hears of it.

mod parsed;

use parsed::{COMPLETION_TOKENS, Tokenised};
pub(crate) use parsed::{Comparison, Parsed, Source};

use super::dialect::Dialect;
use super::errands::prompts::Remembered;
use super::exactness::{Blocker, blocker, renders_specially};
use super::legs::{Endpoint, LegPrompt};
use super::session::SessionName;
use crate::error::Rejection;
use crate::prefix::canonical::Canonical;
use crate::prefix::outline::Fresh;
use crate::shell::Shell;
use crate::tokenise::{Text, Words, encode, unix_seconds};
use bytes::Bytes;
use homing_kv::Prompt;
use homing_model::{EncodedPrompt, PromptTokens};
use homing_router::event::{Compared, Leg, LegId, Turn};
use homing_units::{Instant, RequestId};
use homing_wire::anthropic;
use homing_wire::openai::{AnswerEdit, ApiError, Body, GenerationParams};
use homing_wire::responses::Echo;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use std::sync::Arc;

/// Headers of the client that its legs carry on: who it is, and the trace it belongs to.
const FORWARDED: [HeaderName; 3] = [
    header::AUTHORIZATION,
    HeaderName::from_static("traceparent"),
    HeaderName::from_static("tracestate"),
];
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// A client's request, ready to be planned.
#[derive(Debug)]
pub(crate) struct TurnRequest {
    pub(crate) id: RequestId,
    /// Its name, in headers and logs.
    pub(crate) name: String,
    pub(crate) received: Instant,
    pub(crate) dialect: Dialect,
    pub(crate) body: Arc<Body>,
    /// The client's own request, where an engine that speaks its dialect may have it: for a stream, of which the core
    /// hears, and unchanged.
    pub(crate) original: Option<Body>,
    /// What of the client's own request its answer repeats.
    pub(crate) echo: Echo,
    /// When it came, in seconds since 1970.
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) session: SessionName,
    /// What of it is remembered, to tell where the next one differs.
    pub(crate) fresh: Fresh,
    pub(crate) tokens: PromptTokens,
    pub(crate) prompt: Prompt,
    compared: Compared,
    block_size: u32,
    /// Tokens to generate at most, as the core books them.
    pub(crate) output_tokens: u32,
    /// Tokens to generate at most, as the engine stops.
    pub(crate) output_limit: u32,
    /// When it is its turn among requests that wait in the router: lower is earlier.
    priority: i32,
    pub(crate) stream: bool,
    /// What the router asks engines for and the client did not.
    pub(crate) edit: AnswerEdit,
    /// Why a broken answer to it cannot go on elsewhere, whatever was sent.
    pub(crate) blocker: Option<Blocker>,
    /// Whether the engine may have rendered the prompt otherwise than the router.
    pub(crate) renders_specially: bool,
    headers: HeaderMap,
}

/// Bodies up to this size are read where they arrive: that takes three tenths of a millisecond at most.
const INLINE_BODY_BYTES: usize = 128 << 10;
/// So much of their text is tokenised there, which takes a millisecond; where more is new all is done elsewhere.
const INLINE_NEW_BYTES: usize = 4 << 10;

/// A request that has come in, with all that it takes to read it.
struct Arrived {
    dialect: Dialect,
    headers: HeaderMap,
    bytes: Bytes,
    words: Option<Arc<Words>>,
    comparison: Comparison,
    canonical: Option<Arc<Canonical>>,
}

impl Arrived {
    fn source(&self) -> Source<'_> {
        Source {
            dialect: self.dialect,
            headers: &self.headers,
            canonical: self.canonical.as_deref(),
        }
    }

    fn parse(&self) -> Result<Parsed, ApiError> {
        Parsed::of_bytes(&self.source(), &self.bytes, self.words.as_deref(), &self.comparison)
    }

    /// What does not take long; `None` where it would.
    fn parse_at_once(&self) -> Result<Option<Parsed>, ApiError> {
        if self.bytes.len() > INLINE_BODY_BYTES {
            return Ok(None);
        }
        let (words, comparison) = (self.words.as_deref(), &self.comparison);
        Parsed::of_near_bytes(&self.source(), &self.bytes, words, comparison, INLINE_NEW_BYTES)
    }
}

impl TurnRequest {
    /// Reads and tokenises a request.
    ///
    /// # Errors
    /// It is malformed, names a model that is not served, or cannot be tokenised.
    pub(crate) async fn read(
        shell: &Shell,
        dialect: Dialect,
        headers: HeaderMap,
        bytes: Bytes,
    ) -> Result<Self, Rejection> {
        let endpoint = dialect.endpoint();
        let received = shell.clock.now();
        let (tokeniser, block_size) = (&shell.tokeniser, shell.block_size);
        let comparison = Comparison::new(endpoint, block_size, tokeniser.tails());
        let legs = forwarded(&headers);
        let arrived = Arrived {
            dialect,
            headers,
            bytes,
            words: tokeniser.words(),
            comparison: comparison.clone(),
            canonical: shell.canonical.clone(),
        };
        let Parsed {
            body,
            original,
            fresh,
            echo,
            session,
            params,
            text,
            tokenised,
        } = match arrived.parse_at_once()? {
            Some(parsed) => parsed,
            None => tokeniser.heavy(move || arrived.parse()).await?,
        };
        let model = shell.fleet.served_model(params.model.as_deref())?;
        let Tokenised {
            tokens,
            prompt,
            compared,
        } = match tokenised {
            Some(tokenised) => tokenised,
            None => {
                let tokens = tokeniser.ask(&text).await?;
                let hash = move || Tokenised::new(EncodedPrompt::of_tokens(tokens, comparison.block_size), &comparison);
                tokeniser.heavy(hash).await?
            }
        };
        let output_limit = output_limit(shell, endpoint, &params, prompt.tokens);
        let id = shell.next_request();
        Ok(Self {
            id,
            name: shell.request_name(id),
            received,
            dialect,
            blocker: blocker(&body, shell.fleet.parses_output()),
            renders_specially: renders_specially(&body),
            body: Arc::new(body),
            original,
            echo,
            created: unix_seconds(),
            model,
            session,
            fresh,
            prompt,
            compared,
            tokens,
            block_size,
            // A client without a limit means the context; booking all of it would keep everybody else out.
            output_tokens: output_limit.min(params.max_tokens.unwrap_or(shell.default_output_tokens)),
            output_limit,
            priority: params.priority,
            stream: params.stream,
            edit: edit(dialect, &params),
            headers: legs,
        })
    }

    /// What its legs are made from, as long as the client has nothing of the answer.
    pub(crate) fn prompt_as_sent(&self) -> LegPrompt {
        LegPrompt::original(self.dialect.endpoint(), Arc::clone(&self.body), self.tokens.clone())
    }

    /// The turn as the core sees it.
    pub(crate) fn turn(&self) -> Turn {
        Turn {
            request: self.id,
            session: self.session.hint,
            prompt: self.prompt.clone(),
            compared: Some(self.compared),
            max_output_tokens: self.output_tokens,
            priority: self.priority,
            kind: self.session.kind(),
        }
    }

    /// These tokens as the core sees them.
    pub(crate) fn prompt_of(&self, tokens: &[u32]) -> Prompt {
        Prompt::of_tokens(tokens, self.block_size)
    }

    /// A leg's name at its engine. None begins with another's.
    pub(crate) fn leg_name(&self, leg: LegId) -> String {
        leg_name(&self.name, leg)
    }

    /// What an errand needs of it later; `None` where the engine may have rendered its prompt otherwise.
    pub(crate) fn remembered(&self) -> Option<Remembered> {
        (!self.renders_specially).then(|| Remembered {
            prompt: self.prompt_as_sent().slim(),
            headers: self.headers.clone(),
        })
    }

    /// The headers of a leg. Its id differs from every other leg's: engines key their requests by it.
    pub(crate) fn leg_headers(&self, leg: LegId) -> HeaderMap {
        let mut headers = self.headers.clone();
        let id = HeaderValue::try_from(self.leg_name(leg));
        headers.insert(REQUEST_ID, id.expect("digits, letters and dashes are a header value"));
        headers
    }
}

/// The name at its engine of a leg of what is called `name`.
pub(super) fn leg_name(name: &str, leg: LegId) -> String {
    let kind = match leg.leg {
        Leg::Lend => 'l',
        Leg::Fetch => 'f',
        Leg::Prefill => 'p',
        Leg::Decode => 'd',
    };
    format!("{name}-{}{kind}", leg.attempt)
}

/// Tokens to generate at most: as many as the client says, else as the context leaves or the endpoint has by default.
fn output_limit(shell: &Shell, endpoint: Endpoint, params: &GenerationParams, prompt_tokens: u32) -> u32 {
    let context = shell.fleet.longest_context();
    let room = context.map_or(u32::MAX, |context| context.saturating_sub(prompt_tokens));
    let implied = match endpoint {
        Endpoint::Chat => room,
        Endpoint::Completions => room.min(COMPLETION_TOKENS),
    };
    params.max_tokens.unwrap_or(implied).max(1)
}

/// What the router asks engines for and this client did not.
fn edit(dialect: Dialect, params: &GenerationParams) -> AnswerEdit {
    AnswerEdit {
        drop_token_ids: dialect.is_translated() || !params.return_token_ids,
        // An answer without a stream always has its usage, and so has each in a dialect that is translated.
        drop_usage: params.stream && !params.include_usage && !dialect.is_translated(),
        drop_transfer_params: true,
    }
}

/// How many tokens the prompt of a request of `/v1/messages/count_tokens` has.
///
/// # Errors
/// It is malformed, names a model that is not served, or cannot be tokenised.
pub(crate) async fn count_message_tokens(shell: &Shell, bytes: Bytes) -> Result<usize, Rejection> {
    let vocabulary = shell.tokeniser.vocabulary();
    let translate = move || {
        let body = Body::parse(&bytes).map_err(|error| error.with_code("invalid_json"))?;
        let chat = anthropic::count_to_chat(&body)?;
        let model: Option<String> = chat.read("model", "a string")?;
        let text = Text::Chat(chat);
        let tokens = vocabulary.map(|vocabulary| encode(&vocabulary, &text)).transpose()?;
        Ok((model, text, tokens))
    };
    let (model, text, tokens) = shell.tokeniser.heavy(translate).await?;
    shell.fleet.served_model(model.as_deref())?;
    match tokens {
        Some(tokens) => Ok(tokens.len()),
        None => Ok(shell.tokeniser.ask(&text).await?.len()),
    }
}

fn forwarded(headers: &HeaderMap) -> HeaderMap {
    let mut kept = HeaderMap::new();
    for name in FORWARDED {
        if let Some(value) = headers.get(&name) {
            kept.insert(name, value.clone());
        }
    }
    // Anthropic's clients have a header of their own for what engines take as a bearer's token.
    let key = headers.get(API_KEY).and_then(|key| key.to_str().ok());
    if let Some(key) = key
        && !kept.contains_key(header::AUTHORIZATION)
        && let Ok(bearer) = HeaderValue::try_from(format!("Bearer {key}"))
    {
        kept.insert(header::AUTHORIZATION, bearer);
    }
    kept
}
