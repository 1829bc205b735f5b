//! How a request ends, or where it goes on: the end of its answer, a leg that failed, an error, a client that is gone.

use super::{Ending, Flight};
use crate::error::Rejection;
use crate::proxy::client::Head;
use crate::proxy::exactness::Blocker;
use crate::proxy::leg::{DecodeLeg, DecodeNews};
use crate::upstream::LegError;
use bytes::{Bytes, BytesMut};
use homing_router::action::{KvUse, RouteError};
use homing_router::event::{Event, FailureCause, Leg, LegFailure, LegId, LegUsage, Resume};
use std::borrow::Cow;

impl Flight {
    pub(super) async fn decode_said(&mut self, news: DecodeNews) {
        let Some((leg, kv)) = self.attempt.decode.as_ref().map(|decode| (decode.leg, decode.kv)) else {
            return;
        };
        match news {
            DecodeNews::Events { data, done } => {
                let mut piece = BytesMut::new();
                let mut fault = None;
                for data in &data {
                    if let Err(error) = self.take_chunk(leg, kv, data, &mut piece).await {
                        fault = Some(error);
                        break;
                    }
                }
                self.client.push(piece.freeze());
                match fault {
                    Some(error) => self.leg_failed(leg, &error).await,
                    None if done => self.finished(leg).await,
                    None => {}
                }
                self.attempt.pulled();
            }
            // All that was asked for is there; only the mark after it is missing.
            DecodeNews::Failed(_) if self.transcript.leg_has_ended() => self.finished(leg).await,
            DecodeNews::Failed(error) => self.leg_failed(leg, &error).await,
        }
    }

    async fn finished(&mut self, leg: LegId) {
        let (cached_tokens, output_tokens) = self.leg_usage();
        let imports = |decode: &DecodeLeg| matches!(decode.kv, KvUse::Import { .. });
        let imports = self.attempt.decode.as_ref().is_some_and(imports);
        let worker = self.decision.as_ref().map(|decision| decision.decode);
        let of_worker = worker.is_some_and(|worker| self.shell.fleet.reports_own_cache(worker, imports));
        let cached_tokens = cached_tokens.filter(|_| of_worker);
        self.reported_cached_tokens = cached_tokens;
        if let Some(decode) = self.attempt.decode.take() {
            decode.finish();
        }
        self.attempt.finish_pair();
        // The core hears of the end before the client does: the client's next turn must find this one ended.
        self.tell(Event::Finished {
            leg,
            usage: LegUsage {
                cached_tokens,
                output_tokens,
            },
        })
        .await;
        self.finish_answer();
    }

    /// Gives the client the end of its answer.
    fn finish_answer(&mut self) {
        let (_, of_leg) = self.leg_usage();
        self.output_tokens = of_leg + self.transcript.before();
        let headers = self.route_headers();
        // An engine that speaks the client's dialect has said its end.
        let end = match self.attempt.native {
            Some(_) => Bytes::new(),
            None => self.voice.finish(),
        };
        if self.voice.is_stream() {
            self.client.begin_stream(|| headers);
            self.client.push(end);
        } else {
            self.client.answer(Head::Whole(headers, end));
        }
        self.ending = Some(Ending { error: None });
    }

    pub(super) async fn leg_failed(&mut self, leg: LegId, error: &LegError) {
        tracing::debug!(request = %self.request.id, ?leg, cause = ?error.cause, detail = error.detail, "a leg failed");
        match leg.leg {
            Leg::Lend | Leg::Fetch | Leg::Prefill => self.attempt.silent = None,
            Leg::Decode => self.attempt.decode = None,
        }
        // Of two legs that need each other none goes on alone, and what one held for the other nobody pulls any more.
        self.attempt.pair = None;
        self.attempt.give_up_held();
        if leg.leg == Leg::Decode && self.lacks_only_its_end() {
            return self.end_in_place(leg).await;
        }
        // What a worker refuses of a history is the router's own request, not the client's.
        let of_client = matches!(leg.leg, Leg::Prefill | Leg::Decode);
        if error.cause == FailureCause::Invalid && of_client {
            self.refusal.clone_from(&error.answer);
        }
        let resume = self.resume();
        self.tell(Event::LegFailed(LegFailure {
            leg,
            cause: error.cause,
            resume,
        }))
        .await;
    }

    /// Whether the client has every token it asked for, so that a new leg would have nothing to generate.
    fn lacks_only_its_end(&self) -> bool {
        self.client.has_part() && self.tokens_left() == 0 && self.blocker().is_none()
    }

    async fn end_in_place(&mut self, leg: LegId) {
        for chunk in self.transcript.closing_chunks(self.request.prompt.tokens) {
            // Chunks that are made here make sense.
            let said = self.voice.take(&chunk).unwrap_or_default();
            self.client.push(said);
        }
        self.finished(leg).await;
    }

    /// The prompt as the engine had it, and what the client has of the answer.
    pub(super) fn tokens_so_far(&self) -> Vec<u32> {
        let own = || self.request.tokens.whole();
        let prompt = self.transcript.prompt().map_or_else(own, Cow::Borrowed);
        [&prompt, self.transcript.sent()].concat()
    }

    pub(super) fn tokens_left(&self) -> u32 {
        let sent = u32::try_from(self.transcript.sent().len()).unwrap_or(u32::MAX);
        self.request.output_limit.saturating_sub(sent)
    }

    fn resume(&self) -> Resume {
        if !self.client.has_part() {
            return Resume::Start;
        }
        if let Some(blocker) = self.blocker() {
            tracing::info!(request = %self.request.id, blocker, "a broken answer cannot be continued exactly");
            return Resume::Impossible;
        }
        let max_output_tokens = self.tokens_left();
        Resume::After {
            prompt: self.request.prompt_of(&self.tokens_so_far()),
            max_output_tokens,
        }
    }

    /// Why the answer cannot go on elsewhere from where the client has it.
    fn blocker(&self) -> Option<Blocker> {
        if self.attempt.native.is_some() {
            return Some("the engine answers in the client's own dialect");
        }
        // A token's last bytes may be part of a character that the engine held back: a new leg would not know of them.
        let cut = || {
            let text = self.shell.tokeniser.decode(self.transcript.sent())?;
            (text != self.transcript.text()).then_some("the cut is inside a character")
        };
        let uncertain = || {
            let uncertain = self.request.renders_specially && self.transcript.prompt().is_none();
            uncertain.then_some("the engine does not say how it rendered the prompt")
        };
        self.transcript.blocker().or_else(uncertain).or_else(cut)
    }

    /// The core ends the request.
    pub(super) fn end_with(&mut self, verdict: RouteError) {
        let refusal = self
            .refusal
            .take()
            .filter(|_| verdict == RouteError::Refused && !self.client.is_streaming());
        let Some(answer) = refusal else {
            let (prompt, output) = (self.request.prompt.tokens, self.request.output_tokens);
            return self.reject(&Rejection::of_route(verdict, prompt, output));
        };
        self.attempt.drop_legs();
        self.client.answer(Head::Refused(self.route_headers(), answer));
        self.ending = Some(Ending {
            error: Some(verdict.kind().to_owned()),
        });
    }

    /// Tells the client of an error: as the answer, or as the last event of its stream.
    pub(super) fn reject(&mut self, rejection: &Rejection) {
        self.attempt.drop_legs();
        if self.client.is_streaming() {
            let event = match &self.attempt.native {
                Some(native) => native.error_event(self.request.dialect, &rejection.error, &self.request.name),
                None => self.voice.error_event(rejection),
            };
            self.client.push(event);
        } else {
            self.client
                .answer(Head::Rejected(self.route_headers(), rejection.clone()));
        }
        self.ending = Some(Ending {
            error: Some(rejection.code().to_owned()),
        });
    }

    pub(super) async fn client_gone(&mut self) {
        self.attempt.drop_legs();
        if self.ending.is_none() {
            self.tell(Event::ClientGone(self.request.id)).await;
            self.ending = Some(Ending {
                error: Some("client_gone".to_owned()),
            });
        }
    }
}
