//! The dialects that clients speak. Engines are always spoken to in chat completions or completions.
//!
//! A request of another dialect is translated before it is planned, and its answer on the way back, chunk by chunk. Engines
//! that have the other API themselves are not asked in it: their `/v1/messages` and `/v1/responses` neither hold KV for another worker
//! nor say the tokens that they make, without which a turn could not be moved, continued or accounted for.

use super::legs::Endpoint;
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
