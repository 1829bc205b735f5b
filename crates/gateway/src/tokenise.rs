//! A prompt's tokens: from the model's own vocabulary where the router has it, else from an engine's `/tokenize`.
//!
//! The two are compared when an engine joins, and where they differ the engines' count (`engine/agreement`). The same where the
//! model's template cannot be rendered here.
//!
//! A conversation is rendered whole at each turn, because a template may look back; tokenised and hashed is only what is
//! new to it (`PromptMemory`), whoever sent the rest. That takes about 1.3 MB for an idle session of 128K tokens, less
//! what it shares with others, and `limits.prompt_memory_bytes` for all together, and is forgotten
//! about when its session is (`idle`).
//!
//! Rendering and encoding a long prompt takes milliseconds of a core: it runs on the blocking pool, and no more prompts
//! at a time than there are cores, so that it never starves the streams. A turn that goes on from what is remembered is done
//! where it arrives: to hand it over to a thread and back takes longer than it takes itself.

use crate::error::Rejection;
use crate::fleet::Fleet;
use crate::tails::Tails;
use crate::upstream::{Answer, Upstream};
use bytes::Bytes;
use homing_model::{ChatInput, ChatValue, EncodedPrompt, Opening, PromptMemory, TemplateError, Vocabulary};
use homing_wire::openai::{ApiError, Body, ErrorKind, TokenizeResponse};
use http::{Method, Request, header};
use http_body_util::Full;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::Semaphore;

/// How long an engine may take to tokenise a prompt.
const TOKENISE_TIMEOUT: Duration = Duration::from_secs(10);

/// Engines that are asked to tokenise one prompt, one after the other.
const TOKENISE_TRIES: usize = 3;

/// Members of a chat request that say how its prompt is rendered, all of which `/tokenize` takes.
const RENDERING: [&str; 8] = [
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
];

/// What is to be tokenised.
#[derive(Clone, Debug)]
pub(crate) enum Text {
    /// Tokens already.
    Tokens(Vec<u32>),
    /// A completion's prompt.
    Prompt { text: String, add_special_tokens: bool },
    /// A conversation: the request's body.
    Chat(Body),
}

/// Where tokens come from.
pub(crate) struct Tokeniser {
    /// The router's own vocabulary, if it has the model's.
    words: Option<Arc<Words>>,
    /// An engine was seen to tokenise otherwise: it is asked instead.
    is_distrusted: AtomicBool,
    /// Who is asked where the router has no tokens of its own.
    engines: Option<(Arc<Fleet>, Upstream)>,
    /// One permit for each core.
    permits: Arc<Semaphore>,
    /// What the last prompts were, to the token.
    pub(crate) tails: Arc<Tails>,
}

/// A model's vocabulary, and the prompts that it gave tokens to.
pub(crate) struct Words {
    pub(crate) vocabulary: Arc<Vocabulary>,
    pub(crate) memory: PromptMemory,
    /// It was said that the template cannot be rendered.
    has_complained: AtomicBool,
}

/// What becomes of a prompt here.
pub(crate) enum Encoding {
    /// Its tokens and blocks.
    Done(EncodedPrompt),
    /// More of it is new than was asked for.
    TooNew,
    /// The model's template cannot be rendered here, which is said once: an engine has to be asked.
    Unknown,
}

impl Tokeniser {
    /// One that has the model's vocabulary, and remembers so many bytes of prompts.
    pub(crate) fn of_vocabulary(vocabulary: Arc<Vocabulary>, block_size: u32, memory_bytes: usize) -> Self {
        let memory = PromptMemory::new(vocabulary.tokenizer.clone(), block_size, memory_bytes);
        if let Some(reason) = memory.why_cold() {
            tracing::warn!(%reason, "each prompt is tokenised from its beginning");
        }
        let words = Words {
            vocabulary,
            memory,
            has_complained: AtomicBool::new(false),
        };
        Self {
            words: Some(Arc::new(words)),
            ..Self::default()
        }
    }

    /// The same that knows the ends of so many earlier prompts.
    pub(crate) fn with_tails(self, prompts: usize) -> Self {
        Self {
            tails: Arc::new(Tails::new(prompts)),
            ..self
        }
    }

    /// The same with engines to ask where it has no tokens of its own.
    pub(crate) fn with_engines(self, fleet: Arc<Fleet>, upstream: Upstream) -> Self {
        Self {
            engines: Some((fleet, upstream)),
            ..self
        }
    }

    /// The model's vocabulary, where the router has it.
    pub(crate) fn vocabulary(&self) -> Option<Arc<Vocabulary>> {
        self.words().map(|words| Arc::clone(&words.vocabulary))
    }

    /// The same with what was tokenised before.
    pub(crate) fn words(&self) -> Option<Arc<Words>> {
        let trusted = !self.is_distrusted.load(Ordering::Relaxed);
        self.words.as_ref().filter(|_| trusted).map(Arc::clone)
    }

    /// The router's own tokens of a text; `None` where it has none.
    pub(crate) fn own(&self, text: &Text) -> Option<Vec<u32>> {
        encode(&self.words()?.vocabulary, text).ok()
    }

    /// A worker gives a text other tokens than the router: from now on engines are asked for those of every prompt.
    pub(crate) fn distrust(&self, worker: &str, own: &[u32], of_worker: &[u32]) {
        if self.is_distrusted.swap(true, Ordering::Relaxed) {
            return;
        }
        let at = own.iter().zip(of_worker).position(|(left, right)| left != right);
        let at = at.unwrap_or_else(|| own.len().min(of_worker.len()));
        tracing::warn!(
            worker,
            at,
            own = ?own.get(at),
            of_worker = ?of_worker.get(at),
            "a worker tokenises otherwise than the router's model: engines are asked for the tokens of every prompt"
        );
    }

    /// What prompts are compared with.
    pub(crate) fn tails(&self) -> Arc<Tails> {
        Arc::clone(&self.tails)
    }

    /// The text of an answer's tokens; `None` where only the engines know it.
    pub(crate) fn decode(&self, tokens: &[u32]) -> Option<String> {
        self.vocabulary().map(|vocabulary| vocabulary.tokenizer.decode(tokens))
    }

    /// Runs work that keeps a core busy.
    ///
    /// # Errors
    /// The work's own, or it broke (500).
    pub(crate) async fn heavy<T, F>(&self, work: F) -> Result<T, Rejection>
    where
        T: Send + 'static,
        F: FnOnce() -> Result<T, ApiError> + Send + 'static,
    {
        // The permit goes with the work: a client that hangs up does not make room that is not there.
        let permit = Arc::clone(&self.permits)
            .acquire_owned()
            .await
            .map_err(|_| Rejection::shutting_down())?;
        let task = tokio::task::spawn_blocking(move || {
            let result = work();
            drop(permit);
            result
        });
        Ok(task.await.map_err(|_| Rejection::internal())??)
    }

    /// The tokens of a prompt that only engines can tokenise.
    ///
    /// # Errors
    /// The engine refuses it (its own status), or none that tokenises is there (503).
    pub(crate) async fn ask(&self, text: &Text) -> Result<Vec<u32>, Rejection> {
        match (&self.engines, text) {
            (_, Text::Tokens(tokens)) => Ok(tokens.clone()),
            (Some((fleet, upstream)), _) => ask_engine(fleet, upstream, text).await,
            (None, _) => Err(nobody_tokenises()),
        }
    }
}

impl Default for Tokeniser {
    /// One that has neither a vocabulary nor engines.
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            words: None,
            is_distrusted: AtomicBool::new(false),
            engines: None,
            permits: Arc::new(Semaphore::new(cores)),
            tails: Arc::new(Tails::default()),
        }
    }
}

impl Words {
    /// The tokens and blocks of a prompt, of which only what is new is tokenised and hashed, unless that is more than so many
    /// bytes. `messages` are those of a conversation, where they are read already.
    ///
    /// # Errors
    /// The conversation is malformed, or the template refuses it.
    pub(crate) fn encode(
        &self,
        text: &Text,
        messages: Option<ChatValue>,
        new_bytes_max: usize,
    ) -> Result<Encoding, ApiError> {
        let near = |text: &str, opening: Opening| self.memory.encode_near(text, opening, new_bytes_max);
        let encoded = match text {
            Text::Tokens(tokens) => Some(self.memory.of_tokens(tokens.clone())),
            Text::Prompt {
                text,
                add_special_tokens,
            } => near(text, opening(*add_special_tokens)),
            Text::Chat(body) => match rendered(&self.vocabulary, body, messages)? {
                Ok(text) => near(&text, Opening::Text),
                Err(error) if is_of_template(&error) => {
                    if !self.has_complained.swap(true, Ordering::Relaxed) {
                        tracing::warn!(%error, "the chat template cannot be rendered here: engines are asked for tokens instead");
                    }
                    return Ok(Encoding::Unknown);
                }
                Err(error) => return Err(template_error(&error)),
            },
        };
        Ok(encoded.map_or(Encoding::TooNew, Encoding::Done))
    }
}

/// The tokens of a prompt, from a vocabulary. Nothing is remembered of it.
///
/// # Errors
/// The conversation is malformed, or the template refuses it or fails on it.
pub(crate) fn encode(vocabulary: &Vocabulary, text: &Text) -> Result<Vec<u32>, ApiError> {
    Ok(match text {
        Text::Tokens(tokens) => tokens.clone(),
        Text::Prompt {
            text,
            add_special_tokens,
        } => match opening(*add_special_tokens) {
            Opening::Bos => vocabulary.tokenizer.encode_prompt(text),
            Opening::Text => vocabulary.tokenizer.encode(text),
        },
        Text::Chat(body) => vocabulary.tokenizer.encode(&render(vocabulary, body)?),
    })
}

const fn opening(add_special_tokens: bool) -> Opening {
    if add_special_tokens {
        Opening::Bos
    } else {
        Opening::Text
    }
}

/// The text of a conversation.
fn render(vocabulary: &Vocabulary, body: &Body) -> Result<String, ApiError> {
    rendered(vocabulary, body, None)?.map_err(|error| template_error(&error))
}

/// The text of a conversation, or why the template makes none of it.
fn rendered(
    vocabulary: &Vocabulary,
    body: &Body,
    messages: Option<ChatValue>,
) -> Result<Result<String, TemplateError>, ApiError> {
    let messages = match messages {
        Some(messages) => messages,
        None => body.read("messages", "a list of messages")?.unwrap_or_default(),
    };
    let tools: Option<ChatValue> = body.read("tools", "a list of tool definitions")?;
    let opened: Option<bool> = body.read("add_generation_prompt", "true or false")?;
    let input = ChatInput {
        messages: &messages,
        tools: tools.as_ref(),
        add_generation_prompt: opened.unwrap_or(true),
        unix_seconds: unix_seconds(),
    };
    Ok(vocabulary.render(&input))
}

/// Whether the fault is the template's own, or the router's way of rendering it, and not the conversation's.
const fn is_of_template(error: &TemplateError) -> bool {
    match error {
        TemplateError::Messages(_) | TemplateError::Refused(_) => false,
        TemplateError::Missing | TemplateError::Failed(_) | TemplateError::Source(_) => true,
    }
}

fn template_error(error: &TemplateError) -> ApiError {
    let kind = match error {
        TemplateError::Messages(_) | TemplateError::Refused(_) | TemplateError::Missing => ErrorKind::InvalidRequest,
        TemplateError::Failed(_) | TemplateError::Source(_) => ErrorKind::Internal,
    };
    ApiError::new(kind, error.to_string()).with_param("messages")
}

/// Seconds since 1970, which a template may print.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

async fn ask_engine(fleet: &Fleet, upstream: &Upstream, text: &Text) -> Result<Vec<u32>, Rejection> {
    let answer = pass_tokenize(fleet, upstream, question(text).to_bytes()).await?;
    if !answer.status.is_success() {
        // What an engine cannot tokenise it could not serve either: its reason is the client's answer.
        return Err(ApiError::parse(answer.status.as_u16(), &answer.body).into());
    }
    let response: TokenizeResponse = serde_json::from_slice(&answer.body).map_err(|error| {
        Rejection::new(
            ErrorKind::Upstream,
            "engine_failed",
            format!("expected tokens from `/tokenize`: {error}"),
        )
    })?;
    Ok(response.tokens)
}

fn question(text: &Text) -> Body {
    let mut question = Body::default();
    match text {
        Text::Tokens(tokens) => question.set("prompt", tokens),
        Text::Prompt {
            text,
            add_special_tokens,
        } => {
            question.set("prompt", text);
            question.set("add_special_tokens", add_special_tokens);
        }
        Text::Chat(body) => {
            for name in RENDERING {
                if let Some(value) = body.get(name) {
                    question.set_raw(name, value.clone());
                }
            }
        }
    }
    question
}

/// Asks the first engine of the fleet that answers, of a few.
///
/// # Errors
/// None answered (503).
pub(crate) async fn pass_tokenize(fleet: &Fleet, upstream: &Upstream, body: Bytes) -> Result<Answer, Rejection> {
    for worker in fleet.reachable().into_iter().take(TOKENISE_TRIES) {
        let request = Request::builder()
            .method(Method::POST)
            .uri(fleet.uri(worker, "/tokenize"))
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body.clone()));
        let Ok(request) = request else { continue };
        if let Ok(answer) = upstream.exchange(request, TOKENISE_TIMEOUT).await {
            return Ok(answer);
        }
    }
    Err(nobody_tokenises())
}

fn nobody_tokenises() -> Rejection {
    Rejection::new(
        ErrorKind::Unavailable,
        "no_worker",
        "no worker that could tokenise this request is alive",
    )
}

/// The tokens that one engine gives a text, at the address of its `/tokenize`.
///
/// # Errors
/// It does not say, in words.
pub(crate) async fn ask_at(uri: &str, upstream: &Upstream, text: &Text, timeout: Duration) -> Result<Vec<u32>, String> {
    let request = Request::builder()
        .method(Method::POST)
        .uri(uri)
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(question(text).to_bytes()))
        .map_err(|error| error.to_string())?;
    let answer = upstream.exchange(request, timeout).await?;
    if !answer.status.is_success() {
        return Err(format!("`/tokenize` answers {}", answer.status));
    }
    let response: TokenizeResponse = serde_json::from_slice(&answer.body).map_err(|error| error.to_string())?;
    Ok(response.tokens)
}
