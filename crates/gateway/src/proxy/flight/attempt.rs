//! One plan's legs: sent, given up, and what comes of those of which no client hears.
//!
//! KV that one leg holds for another is an [`Offer`]: made from the answer of the leg that holds it, under the terms that
//! held when that leg was sent, and used up by the leg that pulls it, if the terms hold still. Until then its lease is renewed, and
//! what nobody will pull any more is given up at its worker at once, where the worker can be told.

use super::Flight;
use crate::proxy::leg::{DecodeLeg, LegRequest, SilentAnswer, SilentLeg};
use crate::proxy::legs::LegPrompt;
use crate::proxy::native::{Native, native_body};
use crate::proxy::pair::Pair;
use crate::proxy::release::Hold;
use crate::upstream::LegError;
use bytes::Bytes;
use futures::FutureExt;
use futures::future::select_all;
use homing_router::action::{Dispatch, KvUse};
use homing_router::event::{Event, FailureCause, Leg, LegId};
use homing_wire::owner;
use homing_wire::transfer_offer::{Doubt, Offer, Terms};
use http::{HeaderName, HeaderValue};

/// One plan's legs.
pub(super) struct Attempt {
    pub(super) number: u32,
    pub(super) prompt: LegPrompt,
    /// Whether it continues an answer that the client has a part of.
    pub(super) continues: bool,
    /// KV that a leg of this attempt holds for the next one.
    offer: Option<Offer>,
    /// What legs of this attempt hold, or will, until somebody has pulled it: dropped before that, it is given up.
    pub(super) holds: Vec<(Leg, Hold)>,
    /// The leg under way of which no client hears; one at a time.
    pub(super) silent: Option<SilentLeg>,
    pub(super) decode: Option<DecodeLeg>,
    /// The legs of a handoff between SGLang servers, which are sent together.
    pub(super) pair: Option<Pair>,
    /// What is known of an answer in the client's own dialect.
    pub(super) native: Option<Native>,
}

impl Attempt {
    pub(super) const fn new(number: u32, prompt: LegPrompt, continues: bool) -> Self {
        Self {
            number,
            prompt,
            continues,
            offer: None,
            holds: Vec::new(),
            silent: None,
            decode: None,
            pair: None,
            native: None,
        }
    }

    /// Gives up all that is under way.
    pub(super) fn drop_legs(&mut self) {
        self.silent = None;
        self.decode = None;
        self.pair = None;
        self.give_up_held();
    }

    /// Nobody will pull what legs of this attempt hold.
    pub(super) fn give_up_held(&mut self) {
        self.offer = None;
        self.holds.clear();
    }

    /// A leg has pulled what was held for it, which frees it there.
    pub(super) fn pulled(&mut self) {
        self.holds.drain(..).for_each(|(_, mut held)| held.ended());
    }

    /// This leg was answered: what it was asked to hold is held.
    fn begins_to_hold(&mut self, leg: Leg) {
        for (_, held) in self.holds.iter_mut().filter(|(of, _)| *of == leg) {
            held.begins();
        }
    }

    /// This leg was answered with an error, or its worker has let go: it holds nothing.
    fn holds_nothing(&mut self, leg: Leg) {
        for (_, held) in self.holds.iter_mut().filter(|(of, _)| *of == leg) {
            held.ended();
        }
    }
}

/// The leg whose KV is held no more. Renews the leases of what is held for as long as it is polled.
pub(super) async fn gone_of(holds: &mut [(Leg, Hold)]) -> Leg {
    let gone = holds.iter_mut().map(|(leg, held)| {
        async move {
            held.gone().await;
            *leg
        }
        .boxed()
    });
    match gone.collect::<Vec<_>>() {
        none if none.is_empty() => std::future::pending().await,
        waited_for => select_all(waited_for).await.0,
    }
}

impl Flight {
    pub(super) async fn dispatch(&mut self, dispatch: Dispatch) {
        if dispatch.leg.attempt != self.attempt.number {
            self.begin_attempt(dispatch.leg.attempt);
        }
        if self.dispatch_to_sglang(dispatch).await {
            return;
        }
        let prompt = match dispatch.prefix_tokens {
            Some(tokens) => self.attempt.prompt.history(tokens),
            None => self.attempt.prompt.clone(),
        };
        let terms = self.terms(&dispatch, &prompt);
        let params = match dispatch.kv {
            KvUse::Local | KvUse::Export => None,
            KvUse::Import { .. } => match self.redeem(terms) {
                Ok(params) => Some(params),
                Err(doubt) => {
                    let error = LegError::new(FailureCause::Transfer, doubt.to_string());
                    return self.leg_failed(dispatch.leg, &error).await;
                }
            },
        };
        match dispatch.leg.leg {
            Leg::Lend | Leg::Fetch | Leg::Prefill => {
                let terms = terms.filter(|_| dispatch.kv == KvUse::Export);
                let body = params.map_or_else(|| prompt.held_body(), |params| prompt.pulled_body(params));
                let request = self.leg_request(dispatch, &prompt, body);
                self.attempt.holds.extend(self.hold(&dispatch, &request));
                self.attempt.silent = Some(SilentLeg::send(self.shell.upstream.clone(), request, terms));
            }
            Leg::Decode => self.send_decode(dispatch, &prompt, params),
        }
    }

    fn send_decode(&mut self, dispatch: Dispatch, prompt: &LegPrompt, params: Option<Bytes>) {
        let request = match self.native_request(dispatch) {
            Some(native) => native,
            None => self.leg_request(dispatch, prompt, prompt.decode_body(params)),
        };
        self.transcript.begin_leg(self.attempt.continues);
        self.attempt.decode = Some(DecodeLeg::send(self.shell.upstream.clone(), request));
    }

    /// How the worker of a leg that is to hold its KV learns that nobody will pull it.
    fn hold(&self, dispatch: &Dispatch, request: &LegRequest) -> Option<(Leg, Hold)> {
        let worker = Some(dispatch.worker).filter(|_| dispatch.kv == KvUse::Export)?;
        let name = self.request.leg_name(dispatch.leg);
        let hold = self.shell.releases.hold(worker, &request.headers, &name)?;
        Some((dispatch.leg.leg, hold))
    }

    /// What a leg's KV is for, as things are now: which prompt, and which lives of who holds it and who pulls it.
    fn terms(&self, dispatch: &Dispatch, prompt: &LegPrompt) -> Option<Terms> {
        let decision = self.decision.as_ref()?;
        let (source, target) = match (dispatch.kv, dispatch.leg.leg) {
            (KvUse::Local, _) => return None,
            (KvUse::Export, Leg::Lend) => (dispatch.worker, decision.prefill?),
            (KvUse::Export, Leg::Fetch | Leg::Prefill | Leg::Decode) => (dispatch.worker, decision.decode),
            (KvUse::Import { from }, _) => (from, dispatch.worker),
        };
        Some(Terms {
            prompt: prompt.hash(),
            source: self.shell.fleet.life(source),
            target: self.shell.fleet.life(target),
        })
    }

    /// Uses the offer of this attempt up.
    fn redeem(&mut self, terms: Option<Terms>) -> Result<Bytes, Doubt> {
        let offer = self.attempt.offer.take().ok_or(Doubt::Missing)?;
        offer.redeem(&terms.ok_or(Doubt::Missing)?, self.shell.clock.now())
    }

    /// A new plan: what the earlier one had under way is dropped, and so is the KV that it was offered.
    fn begin_attempt(&mut self, number: u32) {
        let continues = self.client.has_part();
        let prompt = if continues {
            LegPrompt::continued(&self.request.body, &self.tokens_so_far(), self.tokens_left())
        } else {
            self.voice.begin_anew();
            self.request.prompt_as_sent()
        };
        self.attempt = Attempt::new(number, prompt, continues);
    }

    pub(super) fn leg_request(&self, dispatch: Dispatch, prompt: &LegPrompt, body: Bytes) -> LegRequest {
        let Dispatch { leg, worker, kv, .. } = dispatch;
        let uri = self.shell.fleet.uri(worker, prompt.endpoint().path());
        let mut headers = self.request.leg_headers(leg);
        headers.extend(self.shell.fleet.rank_header(worker));
        headers.extend(self.owner_header(dispatch));
        LegRequest {
            leg,
            kv,
            uri,
            headers,
            body,
        }
    }

    /// Whose a leg is, for a worker that learns who comes back. A session's history that is lent or fetched is no request of its own.
    fn owner_header(&self, dispatch: Dispatch) -> Option<(HeaderName, HeaderValue)> {
        let session = self.decision.as_ref()?.session;
        let tells =
            matches!(dispatch.leg.leg, Leg::Prefill | Leg::Decode) && self.shell.fleet.is_embedded(dispatch.worker);
        let value = owner::encode(self.shell.life, session, self.request.session.kind().0);
        let value = HeaderValue::try_from(value).expect("digits and dashes are a header value");
        tells.then(|| (HeaderName::from_static(owner::OWNER), value))
    }

    /// The client's own request, where its worker speaks the client's dialect and serves the turn alone.
    fn native_request(&mut self, dispatch: Dispatch) -> Option<LegRequest> {
        let dialect = self.request.dialect;
        let original = self.request.original.as_ref().filter(|_| !self.attempt.continues)?;
        if dispatch.kv != KvUse::Local || !self.shell.fleet.speaks(dispatch.worker, dialect) {
            return None;
        }
        let mut request = self.leg_request(dispatch, &self.attempt.prompt, native_body(original));
        request.uri = self.shell.fleet.uri(dispatch.worker, dialect.path());
        self.attempt.native = Some(Native::default());
        Some(request)
    }

    /// Gives a leg up. The core waits for a decode leg to say how much of its answer reached the client.
    pub(super) async fn cancel(&mut self, leg: LegId) {
        self.cancel_pair(leg);
        if self.attempt.silent.as_ref().is_some_and(|silent| silent.leg == leg) {
            self.attempt.silent = None;
        }
        if self.attempt.decode.as_ref().is_some_and(|decode| decode.leg == leg) {
            // Why it ended is the core's own doing; the cause here says nothing to it.
            self.leg_failed(leg, &LegError::new(FailureCause::Engine, "given up"))
                .await;
        }
    }

    /// What a leg of this attempt held is gone: whoever was to pull it need not wait to find out.
    pub(super) async fn held_is_gone(&mut self, leg: Leg) {
        self.attempt.holds_nothing(leg);
        let leg = LegId {
            request: self.request.id,
            attempt: self.attempt.number,
            leg,
        };
        let error = LegError::new(FailureCause::Transfer, "its worker does not hold its kv any more");
        self.leg_failed(leg, &error).await;
    }

    pub(super) async fn silent_answered(&mut self, answer: Result<SilentAnswer, LegError>) {
        let Some(SilentLeg { leg, terms, .. }) = self.attempt.silent.take() else {
            return;
        };
        match &answer {
            Ok(_) if leg.leg == Leg::Fetch => self.attempt.pulled(),
            Ok(_) => self.attempt.begins_to_hold(leg.leg),
            Err(error) if error.answer.is_some() => self.attempt.holds_nothing(leg.leg),
            Err(_) => {}
        }
        let answer = answer.and_then(|SilentAnswer { held, cached_tokens }| {
            let deadline = self.shell.clock.now() + self.shell.offer;
            let offer = terms.map(|terms| Offer::of_answer(&held, terms, deadline)).transpose();
            let offer = offer.map_err(|doubt| LegError::new(FailureCause::Transfer, doubt.to_string()))?;
            Ok((offer, cached_tokens))
        });
        match answer {
            Ok((offer, cached_tokens)) => {
                self.attempt.offer = offer;
                self.tell(Event::PrefillDone { leg, cached_tokens }).await;
            }
            Err(error) => self.leg_failed(leg, &error).await,
        }
    }
}
