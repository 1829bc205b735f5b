//! What is served: a model, or a model of its time, with the words to talk to it.

use homing_engine::StepModel;
use homing_model::{ChatInput, ChatValue, Model, TemplateError, Vocabulary};
use homing_wire::openai::{ApiError, Body, ErrorKind};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Prompt and output at most where a step model is served, in tokens: it has no context of its own.
const STEP_MODEL_CONTEXT_TOKENS: u32 = 1 << 20;

/// What is served.
#[derive(Clone)]
pub struct Served {
    /// The model's name in requests.
    pub name: String,
    /// Tokenizer and chat template.
    pub words: Vocabulary,
    /// Prompt and output at most, in tokens.
    pub context_tokens: u32,
    /// What computes.
    pub engine: ServedEngine,
}

/// What computes.
#[derive(Clone)]
pub enum ServedEngine {
    /// A forward pass.
    Model(Arc<Model>),
    /// A model of its time. Its text is bytes, its token ids may be any.
    Steps(Box<StepModel>),
}

impl Served {
    /// A model with a forward pass.
    #[must_use]
    pub fn model(words: Vocabulary, model: Arc<Model>) -> Self {
        let context_tokens = u32::try_from(words.context_tokens).unwrap_or(u32::MAX);
        Self {
            name: words.name.clone(),
            words,
            context_tokens,
            engine: ServedEngine::Model(model),
        }
    }

    /// A model of an accelerator's time, with the words of `tiny`.
    #[must_use]
    pub fn steps(model: StepModel) -> Self {
        let words = Vocabulary::tiny();
        let name = model.model.clone();
        Self {
            name,
            words,
            context_tokens: STEP_MODEL_CONTEXT_TOKENS,
            engine: ServedEngine::Steps(Box::new(model)),
        }
    }

    /// After how many others a prompt's token takes twice as long to compute; `None` where that was not measured.
    pub(crate) fn cost_doubles_after_tokens(&self) -> Option<u32> {
        match &self.engine {
            ServedEngine::Model(_) => None,
            ServedEngine::Steps(model) => model.cost_doubles_after_tokens(),
        }
    }

    /// Refuses a request for another model. One that names none means this one.
    ///
    /// # Errors
    /// A 404 that names the served model.
    pub fn check_model(&self, asked: Option<&str>) -> Result<(), ApiError> {
        match asked {
            Some(name) if name != self.name => Err(ApiError::unknown_model(name, &self.name)),
            Some(_) | None => Ok(()),
        }
    }

    /// Refuses token ids that the model does not have; `param` is where they came from.
    ///
    /// # Errors
    /// A 400 that names the first wrong one.
    pub fn check_tokens(&self, tokens: &[u32], param: &str) -> Result<(), ApiError> {
        let vocabulary = match &self.engine {
            ServedEngine::Model(_) => self.words.tokenizer.vocab(),
            ServedEngine::Steps(_) => return Ok(()),
        };
        match tokens.iter().find(|token| **token as usize >= vocabulary) {
            None => Ok(()),
            Some(token) => {
                let message = format!("`{param}` has the token id `{token}`, expected less than {vocabulary}");
                Err(ApiError::invalid(message).with_param(param))
            }
        }
    }

    /// The tokens of a chat request's conversation. It is read from the bytes once more, because members of tools and arguments
    /// are printed in the order in which the client wrote them.
    ///
    /// # Errors
    /// A 400 when the messages are not what the chat template takes, a 500 when the template fails.
    pub fn chat_tokens(&self, body: &Body, add_generation_prompt: bool) -> Result<Vec<u32>, ApiError> {
        let messages: ChatValue = body.read("messages", "a list of messages")?.unwrap_or_default();
        let tools: Option<ChatValue> = body.read("tools", "a list of tool definitions")?;
        let input = ChatInput {
            messages: &messages,
            tools: tools.as_ref(),
            add_generation_prompt,
            unix_seconds: unix_seconds(),
        };
        self.words.encode_chat(&input).map_err(|error| match error {
            TemplateError::Messages(_) | TemplateError::Refused(_) => {
                ApiError::invalid(error.to_string()).with_param("messages")
            }
            _ => ApiError::new(ErrorKind::Internal, error.to_string()),
        })
    }
}

/// The wall clock, in seconds since 1970.
#[must_use]
pub fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_secs())
}
