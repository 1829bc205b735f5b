//! How an answer is said to its client: in which dialect, and piece by piece or as a whole.
//!
//! It takes the chunks of the transcript one by one, which are chat's or a completion's whatever the client speaks.

use super::dialect::Dialect;
use super::intake::TurnRequest;
use super::whole::Whole;
use crate::error::Rejection;
use bytes::Bytes;
use homing_wire::anthropic::{self, MessageStream};
use homing_wire::openai::AnswerParts;
use homing_wire::responses::{Echo, ResponseStream};
use homing_wire::sse;

/// The form of one answer.
#[derive(Debug)]
pub(crate) struct Voice {
    dialect: Dialect,
    stream: bool,
    /// The request's name, of which ids are made.
    name: String,
    model: String,
    prompt_tokens: u32,
    /// When the request came, in seconds since 1970.
    created: u64,
    echo: Echo,
    /// Tokens of the prompt that are expected in the cache.
    cached_tokens: u32,
    answer: Answer,
}

/// What has been said.
#[derive(Debug)]
enum Answer {
    /// Each chunk goes on as it is.
    Chunks,
    /// Chunks are put together.
    Whole(Whole),
    Message(Box<MessageStream>),
    Response(Box<ResponseStream>),
}

impl Voice {
    pub(crate) fn new(request: &TurnRequest) -> Self {
        let mut voice = Self {
            dialect: request.dialect,
            stream: request.stream,
            name: request.name.clone(),
            model: request.model.clone(),
            prompt_tokens: request.prompt.tokens,
            created: request.created,
            echo: request.echo.clone(),
            cached_tokens: 0,
            answer: Answer::Chunks,
        };
        voice.begin_anew();
        voice
    }

    /// The answer is begun anew; its client has seen nothing of it.
    pub(crate) fn begin_anew(&mut self) {
        self.answer = match self.dialect {
            Dialect::Chat | Dialect::Completions if self.stream => Answer::Chunks,
            Dialect::Chat | Dialect::Completions => Answer::Whole(Whole::new(self.dialect.endpoint())),
            Dialect::Messages => {
                let id = format!("msg_{}", self.name.replace('-', "_"));
                let mut message = MessageStream::new(&id, &self.model);
                message.expect(self.prompt_tokens, self.cached_tokens);
                Answer::Message(Box::new(message))
            }
            Dialect::Responses => {
                let name = self.name.replace('-', "_");
                let response = ResponseStream::new(&name, &self.model, self.created, self.echo.clone());
                Answer::Response(Box::new(response))
            }
        };
    }

    /// So many tokens of the prompt are expected in the cache, for dialects that say so at the beginning.
    pub(crate) fn expect(&mut self, cached_tokens: u32) {
        self.cached_tokens = cached_tokens;
        if let Answer::Message(message) = &mut self.answer {
            message.expect(self.prompt_tokens, cached_tokens);
        }
    }

    /// Whether the client is answered piece by piece.
    pub(crate) const fn is_stream(&self) -> bool {
        self.stream
    }

    /// Takes a chunk; gives what it makes for the client of a stream.
    ///
    /// # Errors
    /// The chunk makes no sense.
    pub(crate) fn take(&mut self, chunk: &Bytes) -> Result<Bytes, String> {
        let said = match &mut self.answer {
            Answer::Chunks => sse::encode_data(chunk),
            Answer::Whole(whole) => {
                whole.take(chunk);
                Bytes::new()
            }
            Answer::Message(message) => message.take(&parts(chunk)?)?,
            Answer::Response(response) => response.take(&parts(chunk)?)?,
        };
        Ok(if self.stream { said } else { Bytes::new() })
    }

    /// The last piece of a stream, or the whole answer.
    pub(crate) fn finish(&mut self) -> Bytes {
        match &mut self.answer {
            Answer::Chunks => sse::DONE_EVENT,
            Answer::Whole(whole) => std::mem::replace(whole, Whole::new(self.dialect.endpoint())).finish(),
            Answer::Message(message) if self.stream => message.finish(),
            Answer::Message(message) => message.whole(),
            Answer::Response(response) if self.stream => response.finish(),
            Answer::Response(response) => response.whole(),
        }
    }

    /// What tells a client whose answer has not begun that its request lives: all clients pass it over.
    pub(crate) fn sign_of_life(&self) -> Bytes {
        match &self.answer {
            Answer::Message(_) => anthropic::PING,
            Answer::Chunks | Answer::Whole(_) | Answer::Response(_) => sse::COMMENT,
        }
    }

    /// The event that ends a stream with an error.
    pub(crate) fn error_event(&mut self, rejection: &Rejection) -> Bytes {
        match &mut self.answer {
            Answer::Chunks | Answer::Whole(_) => rejection.event(),
            Answer::Message(_) => anthropic::error_event(&rejection.error, &self.name),
            Answer::Response(response) => response.fail(&rejection.error),
        }
    }
}

fn parts(chunk: &Bytes) -> Result<AnswerParts, String> {
    AnswerParts::parse(chunk).ok_or_else(|| "expected a chunk of a chat completion".to_owned())
}
