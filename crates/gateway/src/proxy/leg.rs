//! The legs of an attempt as exchanges with engines. A leg that is dropped is cancelled: its connection closes.

use super::abort::Abort;
use super::native::is_last;
use crate::upstream::{LegError, Upstream, whole};
use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use homing_router::action::KvUse;
use homing_router::event::{FailureCause, LegId};
use homing_wire::openai::AnswerView;
use homing_wire::sse::SseDecoder;
use homing_wire::transfer_offer::{HeldAnswer, Terms};
use http::{HeaderMap, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use std::time::Duration;

/// How long the end of a body may take after its last event; then the connection is closed.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// Where a leg goes and as what.
#[derive(Clone, Debug)]
pub(crate) struct LegRequest {
    pub(crate) leg: LegId,
    pub(crate) kv: KvUse,
    pub(crate) uri: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// What a leg answers of which no client hears.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SilentAnswer {
    /// Where the KV is that it was asked to hold.
    pub(crate) held: HeldAnswer,
    /// Prompt tokens found in the cache, where the engine says so.
    pub(crate) cached_tokens: Option<u32>,
}

/// A leg under way of which no client hears: it computes KV, holds it, or pulls it.
pub(crate) struct SilentLeg {
    pub(crate) leg: LegId,
    /// What the KV that it holds is for; `None` where it holds none.
    pub(crate) terms: Option<Terms>,
    answer: BoxFuture<'static, Result<SilentAnswer, LegError>>,
}

impl SilentLeg {
    pub(crate) fn send(upstream: Upstream, request: LegRequest, terms: Option<Terms>) -> Self {
        let leg = request.leg;
        Self {
            leg,
            terms,
            answer: exchange(upstream, request).boxed(),
        }
    }

    /// The answer; to be asked for once. Loses nothing when dropped before.
    pub(crate) async fn answer(&mut self) -> Result<SilentAnswer, LegError> {
        (&mut self.answer).await
    }
}

async fn exchange(upstream: Upstream, request: LegRequest) -> Result<SilentAnswer, LegError> {
    let response = upstream
        .leg(request.uri, request.headers, request.body, request.kv)
        .await?;
    let answer = whole(response)
        .await
        .map_err(|error| LegError::new(FailureCause::Unreachable, error))?;
    let view = AnswerView::parse(&answer.body)
        .ok_or_else(|| LegError::new(FailureCause::Engine, "expected a completion as the leg's answer"))?;
    if let Some(error) = view.error {
        return Err(LegError::new(FailureCause::Engine, error.message));
    }
    let usage = view.usage.as_ref();
    Ok(SilentAnswer {
        held: HeldAnswer {
            params: view.kv_transfer_params,
            prompt_tokens: usage.map(|usage| usage.prompt_tokens),
        },
        cached_tokens: usage.and_then(homing_wire::openai::Usage::cached_tokens),
    })
}

/// What a decode leg has to say.
#[derive(Debug)]
pub(crate) enum DecodeNews {
    /// The data of events that came together; `done` where the stream's end is among them.
    Events { data: Vec<Bytes>, done: bool },
    /// It failed, or broke off without its end.
    Failed(LegError),
}

/// A decode leg under way.
pub(crate) struct DecodeLeg {
    pub(crate) leg: LegId,
    pub(crate) kv: KvUse,
    phase: Phase,
    decoder: SseDecoder,
    /// What it said already and says again.
    again: Option<DecodeNews>,
    /// How its engine learns that it is given up, beside the closed connection.
    abort: Option<Abort>,
}

enum Phase {
    Opening(BoxFuture<'static, Result<Response<Incoming>, LegError>>),
    Open(Incoming),
}

impl DecodeLeg {
    pub(crate) fn send(upstream: Upstream, request: LegRequest) -> Self {
        let LegRequest {
            leg,
            kv,
            uri,
            headers,
            body,
        } = request;
        let opening = async move { upstream.leg(uri, headers, body, kv).await };
        Self {
            leg,
            kv,
            phase: Phase::Opening(opening.boxed()),
            decoder: SseDecoder::default(),
            again: None,
            abort: None,
        }
    }

    /// The same leg, aborted by name where it is dropped before its end.
    pub(crate) fn aborted_by(mut self, abort: Abort) -> Self {
        self.abort = Some(abort);
        self
    }

    /// Takes back what it said.
    pub(crate) fn say_again(&mut self, news: DecodeNews) {
        self.again = Some(news);
    }

    /// What comes next. Loses nothing when dropped before.
    pub(crate) async fn news(&mut self) -> DecodeNews {
        if let Some(news) = self.again.take() {
            return news;
        }
        let news = self.next().await;
        let answered = match &news {
            DecodeNews::Events { done, .. } => *done,
            DecodeNews::Failed(error) => error.answer.is_some(),
        };
        if let Some(abort) = self.abort.as_mut().filter(|_| answered) {
            abort.ended();
        }
        news
    }

    async fn next(&mut self) -> DecodeNews {
        loop {
            match &mut self.phase {
                Phase::Opening(response) => match response.await {
                    Ok(response) => self.phase = Phase::Open(response.into_body()),
                    Err(error) => return DecodeNews::Failed(error),
                },
                Phase::Open(body) => {
                    let broke_off =
                        |detail: String| DecodeNews::Failed(LegError::new(FailureCause::Unreachable, detail));
                    let frame = match body.frame().await {
                        Some(Ok(frame)) => frame,
                        Some(Err(error)) => return broke_off(format!("the stream broke off: {error}")),
                        None => return broke_off("the stream ended without its last event".to_owned()),
                    };
                    let Some(bytes) = frame.data_ref() else { continue };
                    self.decoder.push(bytes);
                    if let Some(news) = self.decoded() {
                        return news;
                    }
                }
            }
        }
    }

    /// The answer is whole: its connection may serve another request once the body's end has come.
    pub(crate) fn finish(self) {
        let Phase::Open(mut body) = self.phase else { return };
        let end = async move { while let Some(Ok(_)) = body.frame().await {} };
        tokio::spawn(tokio::time::timeout(END_TIMEOUT, end));
    }

    fn decoded(&mut self) -> Option<DecodeNews> {
        let mut data = Vec::new();
        loop {
            match self.decoder.poll() {
                Ok(Some(event)) if is_last(&event) => {
                    data.push(event.data);
                    return Some(DecodeNews::Events { data, done: true });
                }
                Ok(Some(event)) if event.is_done() => return Some(DecodeNews::Events { data, done: true }),
                Ok(Some(event)) => data.push(event.data),
                Ok(None) if data.is_empty() => return None,
                Ok(None) => return Some(DecodeNews::Events { data, done: false }),
                Err(error) => {
                    return Some(DecodeNews::Failed(LegError::new(
                        FailureCause::Engine,
                        error.to_string(),
                    )));
                }
            }
        }
    }
}
