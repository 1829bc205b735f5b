//! The two legs of a handoff between SGLang servers. They are sent together, because neither gets anywhere without the
//! other: the decode server asks the prefill server where to receive, the prefill server computes and pushes, and its answer
//! comes when the KV has arrived. The core knows two steps, prefill and then decode, and need not know better: until it
//! asks for the decode leg, what that leg says is kept here.
//!
//! Whatever ends one leg ends the other within the same turn of the loop: this pair is dropped, and what is dropped is
//! aborted by name. SGLang by itself would notice a closed connection after seconds, and a missing partner after minutes.

use super::leg::{DecodeLeg, DecodeNews};
use crate::upstream::{LegError, cause_of, status_in_stream};
use bytes::Bytes;
use homing_router::action::KvUse;
use homing_router::event::{FailureCause, Leg, LegId};
use homing_wire::openai::{AnswerView, Usage};
use homing_wire::sglang::speaks_of_transfer;
use std::time::Duration;

/// How long the prefill leg may take to end once the answer is whole.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// The two legs.
pub(crate) struct Pair {
    /// Until it has ended.
    prefill: Option<DecodeLeg>,
    /// Until the core has asked for it.
    decode: Option<DecodeLeg>,
    /// What the decode leg said first; nothing more is read until the core has asked for it.
    early: Option<DecodeNews>,
    /// The core was told that the KV has arrived.
    arrived: bool,
    /// Prompt tokens that the prefill server found in its cache, once it has said so.
    cached_tokens: Option<u32>,
}

/// What a pair has to say.
#[derive(Debug)]
pub(crate) enum PairNews {
    /// The KV has arrived at the decode server: the prefill server said so, or the decode server has a token.
    Arrived {
        leg: LegId,
        /// Prompt tokens that the prefill server found in its cache, where it has said so.
        cached_tokens: Option<u32>,
    },
    /// A leg failed; the other is of no use.
    Failed(LegId, LegError),
}

impl Pair {
    /// Two legs that were sent.
    pub(crate) const fn new(decode: DecodeLeg, prefill: DecodeLeg) -> Self {
        Self {
            prefill: Some(prefill),
            decode: Some(decode),
            early: None,
            arrived: false,
            cached_tokens: None,
        }
    }

    /// Whether anything is to come.
    pub(crate) const fn is_active(&self) -> bool {
        self.prefill.is_some() || (self.decode.is_some() && self.early.is_none())
    }

    /// The decode leg, which the core has asked for, with what it has said.
    pub(crate) fn adopt(&mut self) -> Option<DecodeLeg> {
        let mut decode = self.decode.take()?;
        if let Some(news) = self.early.take() {
            decode.say_again(news);
        }
        Some(decode)
    }

    /// What comes next. Loses nothing when dropped before.
    pub(crate) async fn news(&mut self) -> PairNews {
        loop {
            let waits = self.early.is_none();
            let (prefill, decode) = (&mut self.prefill, &mut self.decode);
            let news = tokio::select! {
                biased;
                // The first look at a leg sends it.
                news = said(decode), if waits && decode.is_some() => self.decode_said(news),
                news = said(prefill), if prefill.is_some() => self.prefill_said(news),
                else => std::future::pending().await,
            };
            if let Some(news) = news {
                return news;
            }
        }
    }

    fn prefill_said(&mut self, news: DecodeNews) -> Option<PairNews> {
        let leg = self.prefill.as_ref()?.leg;
        let (data, done) = match news {
            DecodeNews::Events { data, done } => (data, done),
            DecodeNews::Failed(error) => return self.prefill_failed(leg, error),
        };
        for data in &data {
            match look(data, KvUse::Export) {
                Ok(cached_tokens) => self.cached_tokens = cached_tokens.or(self.cached_tokens),
                Err(error) => return self.prefill_failed(leg, error),
            }
        }
        if !done {
            return None;
        }
        if let Some(prefill) = self.prefill.take() {
            prefill.finish();
        }
        self.arrived(leg)
    }

    /// Once the decode server has tokens, nothing that happens to the prefill leg matters.
    fn prefill_failed(&mut self, leg: LegId, error: LegError) -> Option<PairNews> {
        self.prefill = None;
        if self.arrived {
            tracing::debug!(
                ?leg,
                detail = error.detail,
                "a prefill leg failed after its kv had arrived"
            );
            return None;
        }
        let cause = match error.cause {
            FailureCause::Engine if speaks_of_transfer(&error.detail) => FailureCause::Transfer,
            cause => cause,
        };
        Some(PairNews::Failed(leg, LegError { cause, ..error }))
    }

    fn decode_said(&mut self, news: DecodeNews) -> Option<PairNews> {
        let decode = self.decode.as_ref()?;
        let (leg, kv) = (decode.leg, decode.kv);
        let data = match news {
            DecodeNews::Events { data, done } => {
                self.early = Some(DecodeNews::Events {
                    data: data.clone(),
                    done,
                });
                data
            }
            DecodeNews::Failed(error) => return Some(PairNews::Failed(leg, error)),
        };
        match data.iter().find_map(|data| look(data, kv).err()) {
            Some(error) => Some(PairNews::Failed(leg, error)),
            None => self.arrived(LegId {
                leg: Leg::Prefill,
                ..leg
            }),
        }
    }

    fn arrived(&mut self, leg: LegId) -> Option<PairNews> {
        (!std::mem::replace(&mut self.arrived, true)).then_some(PairNews::Arrived {
            leg,
            cached_tokens: self.cached_tokens,
        })
    }

    /// The answer is whole: a prefill leg that has not ended may, without being aborted.
    pub(crate) fn finish(self) {
        let Some(mut prefill) = self.prefill else { return };
        let end = async move {
            while let DecodeNews::Events { done, .. } = prefill.news().await {
                if done {
                    return prefill.finish();
                }
            }
        };
        tokio::spawn(tokio::time::timeout(END_TIMEOUT, end));
    }
}

async fn said(leg: &mut Option<DecodeLeg>) -> DecodeNews {
    match leg {
        Some(leg) => leg.news().await,
        None => std::future::pending().await,
    }
}

/// The cached tokens that an event tells of.
///
/// # Errors
/// It tells of a failure, with whatever status its stream began. A request that was ended for it (`abort`) has left nothing to
/// decode from either.
fn look(data: &Bytes, kv: KvUse) -> Result<Option<u32>, LegError> {
    let Some(view) = AnswerView::parse(data) else {
        return Err(LegError::new(FailureCause::Engine, "expected a chunk of an answer"));
    };
    if let Some(error) = view.error {
        let status = status_in_stream(error.code.as_deref());
        let cause = match cause_of(status, error.code.as_deref(), kv) {
            FailureCause::Engine if speaks_of_transfer(&error.message) => FailureCause::Transfer,
            cause => cause,
        };
        return Err(LegError::in_stream(cause, status, error.message, data));
    }
    if view.finish_reason.as_deref() == Some("abort") {
        let detail = "the engine ended the request";
        return Err(LegError::new(FailureCause::Transfer, detail));
    }
    Ok(view.usage.as_ref().and_then(Usage::cached_tokens))
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_units::WorkerId;

    #[test]
    fn what_a_stream_says_of_a_failure() {
        let import = KvUse::Import { from: WorkerId(0) };
        let check = |data: &str, kv, expected: Result<Option<u32>, FailureCause>| {
            let found = look(&Bytes::from(data.to_owned()), kv).map_err(|error| error.cause);
            assert_eq!(found, expected, "{data} {kv:?}");
        };
        let error = |message: &str, code: u16| {
            format!(r#"{{"error":{{"object":"error","message":"{message}","type":"X","param":null,"code":{code}}}}}"#)
        };
        check(r#"{"choices":[{"index":0,"text":"a"}]}"#, KvUse::Export, Ok(None));
        let usage = r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10,"prompt_tokens_details":{"cached_tokens":4}}}"#;
        check(usage, KvUse::Export, Ok(Some(4)));
        let aborted = r#"{"choices":[{"index":0,"text":"","finish_reason":"abort"}]}"#;
        check(aborted, KvUse::Export, Err(FailureCause::Transfer));
        let failed = error("Prefill transfer failed for request rank=0", 500);
        check(&failed, KvUse::Export, Err(FailureCause::Transfer));
        check(&error("CUDA error", 500), KvUse::Export, Err(FailureCause::Engine));
        check(
            &error("Decode transfer failed", 500),
            import,
            Err(FailureCause::Transfer),
        );
        check(
            &error("The request queue is full.", 503),
            import,
            Err(FailureCause::Busy),
        );
        check(&error("too long", 400), import, Err(FailureCause::Invalid));
        check("no json", KvUse::Export, Err(FailureCause::Engine));
    }
}
