//! The intake without sockets and tasks, for `benches/turn.rs`: what a request's bytes go through before the core hears of
//! them, and nothing else. No part of the crate's interface.

use crate::proxy::dialect::Dialect;
use crate::proxy::intake::{Comparison, Parsed, Source};
use crate::tokenise::Tokeniser;
use bytes::Bytes;
use homing_model::{PROMPT_MEMORY_BYTES, Vocabulary};
use homing_router::event::Turn;
use homing_units::RequestId;
use homing_wire::openai::ApiError;
use http::HeaderMap;
use std::sync::Arc;

/// A router's intake of chat requests, with its memory of earlier prompts.
pub struct Intake {
    tokeniser: Tokeniser,
    comparison: Comparison,
}

impl Intake {
    /// An intake that remembers nothing yet.
    #[must_use]
    pub fn new(vocabulary: Vocabulary, block_size: u32) -> Self {
        let tokeniser = Tokeniser::of_vocabulary(Arc::new(vocabulary), block_size, PROMPT_MEMORY_BYTES);
        let comparison = Comparison::new(Dialect::Chat.endpoint(), block_size, tokeniser.tails());
        Self { tokeniser, comparison }
    }

    /// A request of `/v1/chat/completions` as the core hears of it.
    ///
    /// # Errors
    /// The request is malformed.
    ///
    /// # Panics
    /// Never: the vocabulary is there.
    pub fn turn(&self, request: RequestId, headers: &HeaderMap, body: &Bytes) -> Result<Turn, ApiError> {
        let source = Source {
            dialect: Dialect::Chat,
            headers,
            canonical: None,
        };
        let parsed = Parsed::of_bytes(&source, body, self.tokeniser.words().as_deref(), &self.comparison)?;
        Ok(parsed.turn(request).expect("a router with a vocabulary has the tokens"))
    }
}
