//! The dialects that clients speak, and which of them engines speak.
//!
//! A request of another dialect than chat completions is translated before it is planned, and its answer on the way back,
//! chunk by chunk. Engines that have the other API themselves are asked in it only where their configuration says so
//! (`native_apis`), one worker serves the whole turn, and the client wants a stream: there they do not say the tokens that
//! they make, and an answer whose tokens nobody knows cannot go on elsewhere when its worker is lost.

use super::legs::Endpoint;
use crate::config::EngineKind;
use homing_wire::openai::{ApiError, Body};
use homing_wire::responses::Echo;
use homing_wire::{anthropic, responses};

/// What a client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// Anthropic's `/v1/messages`
    Messages,
    /// OpenAI's `/v1/responses`
    Responses,
}

impl Dialect {
    /// Where its requests go.
    pub(crate) const fn endpoint(self) -> Endpoint {
        match self {
            Self::Chat | Self::Messages | Self::Responses => Endpoint::Chat,
            Self::Completions => Endpoint::Completions,
        }
    }

    /// Its name in logs.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Messages => "messages",
            Self::Responses => "responses",
        }
    }

    /// Whether its answers are not the engine's own.
    pub(crate) const fn is_translated(self) -> bool {
        match self {
            Self::Chat | Self::Completions => false,
            Self::Messages | Self::Responses => true,
        }
    }

    /// Its path at an engine that speaks it.
    pub(crate) const fn path(self) -> &'static str {
        match self {
            Self::Chat | Self::Completions => self.endpoint().path(),
            Self::Messages => "/v1/messages",
            Self::Responses => "/v1/responses",
        }
    }

    /// Whether engines of a kind speak it.
    pub(crate) const fn is_spoken_by(self, kind: EngineKind) -> bool {
        !self.is_translated() || matches!(kind, EngineKind::Vllm)
    }

    /// A request in the engine's dialect, and what of it the answer repeats.
    ///
    /// # Errors
    /// A member is wrong or cannot be translated.
    pub(crate) fn to_engine(self, body: Body) -> Result<(Body, Echo), ApiError> {
        match self {
            Self::Chat | Self::Completions => Ok((body, Echo::default())),
            Self::Messages => Ok((anthropic::to_chat(&body)?, Echo::default())),
            Self::Responses => responses::to_chat(&body),
        }
    }
}
