//! `/v1/completions` and `/v1/chat/completions`.
//!
//! A stream's status is sent only when its first event is known: a request that is not accepted, or whose KV does not
//! arrive, is an error with a status of its own and never a 200. The request's handle lives in the answer: when the
//! client hangs up, the server drops the answer, and with it goes the request.

use super::answer::{Form, Output, fault, usage};
use super::prepare::{Dialect, Prepared, prepare};
use super::{App, Payload, Shared, failure, json, named, request_id};
use crate::engine_thread::{RequestEvent, RequestStream, SubmitError};
use crate::executor::Ended;
use crate::serving::unix_seconds;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use futures::stream;
use homing_engine::api::{Owner, Reject};
use homing_wire::openai::{ApiError, ErrorKind};
use homing_wire::owner::{self, LegOwner, OWNER};
use homing_wire::sse::{DONE_EVENT, encode_data};
use http::{HeaderMap, HeaderValue, header};
use std::convert::Infallible;
use std::sync::Arc;

/// Bodies up to this size are read, tokenised and hashed where they arrive; longer ones elsewhere, so that they do not
/// hold up other connections.
const INLINE_BODY_BYTES: usize = 16 << 10;

pub(super) async fn completions(State(app): State<Shared>, headers: HeaderMap, Payload(body): Payload) -> Response {
    answer(app, Dialect::Completion, &headers, body).await
}

pub(super) async fn chat_completions(
    State(app): State<Shared>,
    headers: HeaderMap,
    Payload(body): Payload,
) -> Response {
    answer(app, Dialect::Chat, &headers, body).await
}

async fn answer(app: Shared, dialect: Dialect, headers: &HeaderMap, body: Result<Bytes, ApiError>) -> Response {
    let id = match request_id(headers, &app) {
        Ok(id) => id,
        Err(error) => return failure(&error),
    };
    let response = match body {
        Ok(bytes) => match owner(headers) {
            Ok(owner) => generate(app, dialect, (&id, owner), bytes).await,
            Err(error) => Err(error),
        },
        Err(error) => Err(error),
    };
    named(response.unwrap_or_else(|error| failure(&error)), &id)
}

/// Whose a request is, where a router says so.
fn owner(headers: &HeaderMap) -> Result<Option<Owner>, ApiError> {
    let Some(value) = headers.get(OWNER) else {
        return Ok(None);
    };
    let owner = owner::parse(value.to_str().unwrap_or_default());
    let LegOwner { session, kind } =
        owner.map_err(|error| ApiError::invalid(format!("`{OWNER}` is wrong: {error}")).with_param(OWNER))?;
    Ok(Some(Owner { session, kind }))
}

async fn generate(
    app: Shared,
    dialect: Dialect,
    (id, owner): (&str, Option<Owner>),
    bytes: Bytes,
) -> Result<Response, ApiError> {
    let mut prepared = prepare_anywhere(&app, dialect, bytes).await?;
    prepared.request.owner = owner;
    let prefix = match dialect {
        Dialect::Completion => "cmpl",
        Dialect::Chat => "chatcmpl",
    };
    let form = Form {
        dialect,
        id: format!("{prefix}-{id}"),
        created: unix_seconds(),
        model: app.served.name.clone(),
        return_token_ids: prepared.return_token_ids,
        prompt: prepared.request.tokens.clone(),
    };
    if !app.front_end.is_zero() {
        tokio::time::sleep(app.front_end).await;
    }
    let events = app
        .engine
        .submit(id.to_owned(), prepared.request, prepared.source)
        .map_err(|error| match error {
            SubmitError::Full { .. } => ApiError::new(ErrorKind::RateLimit, error.to_string()).with_code("queue_full"),
            SubmitError::Stopped(_) => stopped(),
        })?;
    match prepared.stream {
        true => {
            let said = match (prepared.include_usage, prepared.continuous_usage) {
                (_, true) => SaidUsage::InEachChunk,
                (true, false) => SaidUsage::AtTheEnd,
                (false, false) => SaidUsage::Never,
            };
            streamed(app, form, events, said).await
        }
        false => whole(&app, form, events).await,
    }
}

async fn prepare_anywhere(app: &Shared, dialect: Dialect, bytes: Bytes) -> Result<Prepared, ApiError> {
    if bytes.len() <= INLINE_BODY_BYTES {
        return prepare(app, dialect, &bytes);
    }
    // The permit goes with the work: a client that hangs up does not make room that is not there.
    let permit = Arc::clone(&app.readers).acquire_owned().await.map_err(|_| stopped())?;
    let app = app.clone();
    let task = tokio::task::spawn_blocking(move || {
        let prepared = prepare(&app, dialect, &bytes);
        drop(permit);
        prepared
    });
    let prepared = task.await;
    prepared.map_err(|error| ApiError::new(ErrorKind::Internal, format!("the request could not be read: {error}")))?
}

async fn whole(app: &App, form: Form, mut events: RequestStream) -> Result<Response, ApiError> {
    let mut output = Output::default();
    loop {
        match next(&mut events).await? {
            Next::Token(token) => output.push(token),
            Next::Ended(ended) => return Ok(json(form.whole(app, output, &ended))),
        }
    }
}

/// What comes next of a request that goes well.
enum Next {
    Token(crate::executor::TokenOut),
    Ended(Ended),
}

async fn next(events: &mut RequestStream) -> Result<Next, ApiError> {
    match events.next().await {
        Some(RequestEvent::Token(token)) => Ok(Next::Token(token)),
        Some(RequestEvent::Ended(ended)) => match fault(&ended.outcome) {
            None => Ok(Next::Ended(ended)),
            Some(error) => Err(error),
        },
        Some(RequestEvent::Rejected(reason)) => Err(rejected(reason)),
        None => Err(stopped()),
    }
}

fn rejected(reason: Reject) -> ApiError {
    match reason {
        Reject::QueueFull => {
            ApiError::new(ErrorKind::RateLimit, "the worker's queue is full, try again later").with_code("queue_full")
        }
        Reject::ContextTooLong | Reject::PoolTooSmall => {
            ApiError::invalid("prompt and output do not fit into this worker").with_code("context_length_exceeded")
        }
        Reject::Invalid => ApiError::new(ErrorKind::Internal, "the engine refused the request as invalid"),
    }
}

fn stopped() -> ApiError {
    ApiError::new(ErrorKind::Unavailable, "the engine has stopped").with_code("engine_stopped")
}

/// Where a stream has the usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SaidUsage {
    Never,
    AtTheEnd,
    /// At the end, too.
    InEachChunk,
}

/// A stream of server-sent events on its way.
struct Streaming {
    app: Shared,
    form: Form,
    events: RequestStream,
    usage: SaidUsage,
    /// The first event, which came before the status was sent.
    first: Option<Next>,
    /// Tokens sent.
    sent: u32,
    ended: bool,
}

async fn streamed(app: Shared, form: Form, mut events: RequestStream, usage: SaidUsage) -> Result<Response, ApiError> {
    let first = Some(next(&mut events).await?);
    let streaming = Streaming {
        app,
        form,
        events,
        usage,
        first,
        sent: 0,
        ended: false,
    };
    let chunks = stream::unfold(streaming, |mut streaming| async move {
        let bytes = streaming.chunk().await?;
        Some((Ok::<Bytes, Infallible>(bytes), streaming))
    });
    let headers = [
        (
            header::CONTENT_TYPE,
            HeaderValue::from_static("text/event-stream; charset=utf-8"),
        ),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    Ok((headers, Body::from_stream(chunks)).into_response())
}

impl Streaming {
    /// The next bytes; `None` when the stream is over.
    async fn chunk(&mut self) -> Option<Bytes> {
        if self.ended {
            return None;
        }
        let next = match self.first.take() {
            Some(first) => Ok(first),
            None => next(&mut self.events).await,
        };
        Some(match next {
            Ok(Next::Token(token)) => {
                self.sent += 1;
                let so_far = self.in_each_chunk().then(|| self.form.usage_so_far(self.sent));
                encode_data(&self.form.chunk(token, self.sent == 1, so_far))
            }
            Ok(Next::Ended(ended)) => self.end(&ended),
            Err(error) => {
                self.ended = true;
                [encode_data(&error.to_body()), DONE_EVENT].concat().into()
            }
        })
    }

    fn in_each_chunk(&self) -> bool {
        self.usage == SaidUsage::InEachChunk
    }

    fn end(&mut self, ended: &Ended) -> Bytes {
        self.ended = true;
        let total = self.in_each_chunk().then(|| usage(ended));
        let mut events = vec![encode_data(&self.form.last(&self.app, ended, total))];
        if self.usage != SaidUsage::Never {
            events.push(encode_data(&self.form.usage_chunk(usage(ended))));
        }
        events.push(DONE_EVENT);
        events.concat().into()
    }
}
