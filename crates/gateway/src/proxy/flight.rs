//! One request on its way: a task that does what the core says about it, and says what came of it.
//!
//! It is one loop over a closed set of news: a command of the core, the client's end, the prefill leg, the decode leg.
//! It owns both legs, so that whatever ends the request ends them. It decides nothing: whether a failed leg is tried
//! again, where, and whether the client is told is the core's answer to [`Event::LegFailed`].

mod chunks;
mod sglang;
mod told;

use super::client::{Client, Flow, Head};
use super::exactness::Blocker;
use super::intake::TurnRequest;
use super::leg::{DecodeLeg, DecodeNews, LegRequest, PrefillAnswer, PrefillLeg};
use super::legs::LegPrompt;
use super::native::{Native, native_body};
use super::pair::{Pair, PairNews};
use super::transcript::Transcript;
use super::voice::Voice;
use crate::core_task::Command;
use crate::error::Rejection;
use crate::expectation::Expectation;
use crate::prefix::breaks::Break;
use crate::shell::Shell;
use crate::turn_log::TurnLog;
use crate::upstream::{Answer, LegError};
use bytes::{Bytes, BytesMut};
use homing_router::action::{Decision, Dispatch, KvUse, RouteError};
use homing_router::event::{Event, FailureCause, Leg, LegFailure, LegId, LegUsage, Resume};
use homing_units::{Instant, RequestId};
use sglang::pair_news;
use std::sync::Arc;
use tokio::sync::mpsc;

/// A request on its way.
pub(crate) struct Flight {
    shell: Arc<Shell>,
    request: Arc<TurnRequest>,
    commands: mpsc::Receiver<Command>,
    client: Client,
    decision: Option<Box<Decision>>,
    attempt: Attempt,
    transcript: Transcript,
    /// The form in which the client is answered.
    voice: Voice,
    /// The last refusal of an engine, to be passed on where the core ends the request with it.
    refusal: Option<Answer>,
    first_token: Option<Instant>,
    /// What was expected of the decode worker's cache.
    expectation: Option<Expectation>,
    reported_cached_tokens: Option<u32>,
    output_tokens: u32,
    /// Where the prompt broke its session's prefix, if it did.
    prefix_break: Option<Break>,
    /// How the request ended; it goes on until the client has taken what is pending.
    ending: Option<Ending>,
}

/// One plan's legs.
struct Attempt {
    number: u32,
    prompt: LegPrompt,
    /// Whether it continues an answer that the client has a part of.
    continues: bool,
    /// The prefill leg's parameters: taken by the decode leg of the same attempt, once.
    params: Option<Bytes>,
    prefill: Option<PrefillLeg>,
    decode: Option<DecodeLeg>,
    /// The legs of a handoff between SGLang servers, which are sent together.
    pair: Option<Pair>,
    /// What is known of an answer in the client's own dialect.
    native: Option<Native>,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Ending {
    /// The error's code, `None` where all went well.
    error: Option<String>,
}

/// What a flight waits for.
enum News {
    Command(Option<Command>),
    Flow(Flow),
    Prefill(Result<PrefillAnswer, LegError>),
    Decode(DecodeNews),
    Pair(PairNews),
    /// The gateway does not wait for it any longer.
    Abandoned,
}

impl Flight {
    pub(crate) fn new(
        shell: Arc<Shell>,
        request: Arc<TurnRequest>,
        commands: mpsc::Receiver<Command>,
        client: Client,
    ) -> Self {
        let endpoint = request.dialect.endpoint();
        let prompt = LegPrompt::original(endpoint, Arc::clone(&request.body));
        let attempt = Attempt {
            number: 0,
            prompt,
            continues: false,
            params: None,
            prefill: None,
            decode: None,
            pair: None,
            native: None,
        };
        let transcript = Transcript::new(endpoint, request.edit, &request.model, request.blocker);
        Self {
            voice: Voice::new(&request),
            shell,
            request,
            commands,
            client,
            decision: None,
            attempt,
            transcript,
            refusal: None,
            first_token: None,
            expectation: None,
            reported_cached_tokens: None,
            output_tokens: 0,
            prefix_break: None,
            ending: None,
        }
    }

    /// Runs the request to its end. When it returns the core knows the end and no leg is left.
    pub(crate) async fn run(mut self) -> TurnLog {
        loop {
            if self.ending.is_some() && !self.client.is_blocked() {
                break;
            }
            match self.news().await {
                News::Command(Some(command)) => self.obey(command).await,
                News::Command(None) => self.reject(&Rejection::internal()),
                News::Flow(Flow::Taken) => {}
                News::Flow(Flow::Gone) => {
                    self.client_gone().await;
                    break;
                }
                News::Prefill(answer) => self.prefill_answered(answer).await,
                News::Decode(news) => self.decode_said(news).await,
                News::Pair(news) => self.pair_said(news).await,
                News::Abandoned => {
                    self.tell(Event::ClientGone(self.request.id)).await;
                    self.reject(&Rejection::shutting_down());
                }
            }
        }
        self.client.end();
        self.log()
    }

    async fn news(&mut self) -> News {
        let ended = self.ending.is_some();
        let Attempt {
            prefill, decode, pair, ..
        } = &mut self.attempt;
        let blocked = self.client.is_blocked();
        tokio::select! {
            biased;
            flow = self.client.flow() => News::Flow(flow),
            command = self.commands.recv(), if !ended => News::Command(command),
            () = self.shell.abandon.cancelled(), if !ended => News::Abandoned,
            answer = answer_of(prefill), if prefill.is_some() => News::Prefill(answer),
            news = pair_news(pair), if pair.as_ref().is_some_and(Pair::is_active) => News::Pair(news),
            news = news_of(decode), if decode.is_some() && !blocked => News::Decode(news),
        }
    }

    async fn obey(&mut self, command: Command) {
        match command {
            Command::Decided(decision) => {
                self.voice.expect(decision.expected_cached_tokens);
                self.watch_prefix(&decision);
                self.expect_cached(&decision);
                self.decision = Some(decision);
            }
            Command::Dispatch(dispatch) => self.dispatch(dispatch).await,
            Command::Cancel(leg) => self.cancel(leg).await,
            Command::Reject(error) => self.end_with(error),
        }
    }

    async fn dispatch(&mut self, dispatch: Dispatch) {
        if dispatch.leg.attempt != self.attempt.number {
            self.begin_attempt(dispatch.leg.attempt);
        }
        if self.dispatch_to_sglang(dispatch).await {
            return;
        }
        match dispatch.leg.leg {
            Leg::Prefill => {
                let request = self.leg_request(dispatch, self.attempt.prompt.prefill_body());
                self.attempt.prefill = Some(PrefillLeg::send(self.shell.upstream.clone(), request));
            }
            Leg::Decode => {
                let params = self.attempt.params.take();
                if matches!(dispatch.kv, KvUse::Import { .. }) && params.is_none() {
                    let detail = "the prefill leg left no parameters";
                    return self
                        .leg_failed(dispatch.leg, &LegError::new(FailureCause::Transfer, detail))
                        .await;
                }
                let request = match self.native_request(dispatch) {
                    Some(native) => native,
                    None => self.leg_request(dispatch, self.attempt.prompt.decode_body(params)),
                };
                self.transcript.begin_leg(self.attempt.continues);
                self.attempt.decode = Some(DecodeLeg::send(self.shell.upstream.clone(), request));
            }
        }
    }

    /// A new plan: what the earlier one had under way is dropped, and so are its parameters.
    fn begin_attempt(&mut self, number: u32) {
        let continues = self.client.is_streaming();
        let prompt = if continues {
            LegPrompt::continued(&self.request.body, &self.tokens_so_far(), self.tokens_left())
        } else {
            self.voice.begin_anew();
            LegPrompt::original(self.request.dialect.endpoint(), Arc::clone(&self.request.body))
        };
        self.attempt = Attempt {
            number,
            prompt,
            continues,
            params: None,
            prefill: None,
            decode: None,
            pair: None,
            native: None,
        };
    }

    fn leg_request(&self, dispatch: Dispatch, body: Bytes) -> LegRequest {
        let Dispatch { leg, worker, kv } = dispatch;
        let uri = self.shell.fleet.uri(worker, self.attempt.prompt.endpoint().path());
        let mut headers = self.request.leg_headers(leg);
        headers.extend(self.shell.fleet.rank_header(worker));
        LegRequest {
            leg,
            kv,
            uri,
            headers,
            body,
        }
    }

    /// The client's own request, where its worker speaks the client's dialect and serves the turn alone.
    fn native_request(&mut self, dispatch: Dispatch) -> Option<LegRequest> {
        let dialect = self.request.dialect;
        let original = self.request.original.as_ref().filter(|_| !self.attempt.continues)?;
        if dispatch.kv != KvUse::Local || !self.shell.fleet.speaks(dispatch.worker, dialect) {
            return None;
        }
        let mut request = self.leg_request(dispatch, native_body(original));
        request.uri = self.shell.fleet.uri(dispatch.worker, dialect.path());
        self.attempt.native = Some(Native::default());
        Some(request)
    }

    /// Gives a leg up. The core waits for a decode leg to say how much of its answer reached the client.
    async fn cancel(&mut self, leg: LegId) {
        self.cancel_pair(leg);
        if self.attempt.prefill.as_ref().is_some_and(|prefill| prefill.leg == leg) {
            self.attempt.prefill = None;
        }
        if self.attempt.decode.as_ref().is_some_and(|decode| decode.leg == leg) {
            // Why it ended is the core's own doing; the cause here says nothing to it.
            self.leg_failed(leg, &LegError::new(FailureCause::Engine, "given up"))
                .await;
        }
    }

    async fn prefill_answered(&mut self, answer: Result<PrefillAnswer, LegError>) {
        let Some(PrefillLeg { leg, .. }) = self.attempt.prefill.take() else {
            return;
        };
        match answer {
            Ok(PrefillAnswer { params, cached_tokens }) => {
                self.attempt.params = Some(params);
                self.tell(Event::PrefillDone { leg, cached_tokens }).await;
            }
            Err(error) => self.leg_failed(leg, &error).await,
        }
    }

    async fn decode_said(&mut self, news: DecodeNews) {
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

    async fn leg_failed(&mut self, leg: LegId, error: &LegError) {
        tracing::debug!(request = %self.request.id, ?leg, cause = ?error.cause, detail = error.detail, "a leg failed");
        match leg.leg {
            Leg::Prefill => self.attempt.prefill = None,
            Leg::Decode => self.attempt.decode = None,
        }
        // Of two legs that need each other none goes on alone.
        self.attempt.pair = None;
        if leg.leg == Leg::Decode && self.lacks_only_its_end() {
            return self.end_in_place(leg).await;
        }
        if error.cause == FailureCause::Invalid {
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
        self.client.is_streaming() && self.tokens_left() == 0 && self.blocker().is_none()
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
    fn tokens_so_far(&self) -> Vec<u32> {
        let prompt = self.transcript.prompt().unwrap_or(&self.request.tokens);
        [prompt, self.transcript.sent()].concat()
    }

    fn tokens_left(&self) -> u32 {
        let sent = u32::try_from(self.transcript.sent().len()).unwrap_or(u32::MAX);
        self.request.output_limit.saturating_sub(sent)
    }

    fn resume(&self) -> Resume {
        if !self.client.is_streaming() {
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
    fn end_with(&mut self, verdict: RouteError) {
        let refusal = self
            .refusal
            .take()
            .filter(|_| verdict == RouteError::Refused && !self.client.is_streaming());
        let Some(answer) = refusal else {
            let (prompt, output) = (self.request.prompt.tokens, self.request.output_tokens);
            return self.reject(&Rejection::of_route(verdict, prompt, output));
        };
        self.drop_legs();
        self.client.answer(Head::Refused(self.route_headers(), answer));
        self.ending = Some(Ending {
            error: Some(verdict.kind().to_owned()),
        });
    }

    /// Tells the client of an error: as the answer, or as the last event of its stream.
    fn reject(&mut self, rejection: &Rejection) {
        self.drop_legs();
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

    async fn client_gone(&mut self) {
        self.drop_legs();
        if self.ending.is_none() {
            self.tell(Event::ClientGone(self.request.id)).await;
            self.ending = Some(Ending {
                error: Some("client_gone".to_owned()),
            });
        }
    }

    fn drop_legs(&mut self) {
        self.attempt.prefill = None;
        self.attempt.decode = None;
        self.attempt.pair = None;
        self.attempt.params = None;
    }

    /// Tells the core. The future does not borrow the flight: its legs cannot be shared between threads.
    fn tell(&self, event: Event) -> impl Future<Output = ()> + use<> {
        let core = self.shell.core.clone();
        async move { core.tell(event).await }
    }
}

/// Runs a flight to its end, also where its task breaks.
pub(crate) async fn supervised(shell: Arc<Shell>, id: RequestId, flight: Flight) {
    // A broken assertion fails this request: the core must still learn that it is over.
    let task = tokio::spawn(flight.run());
    match task.await {
        Ok(log) => shell.publish(log),
        Err(error) => {
            tracing::error!(request = %id, %error, "the task of a request broke");
            shell.core.tell(Event::ClientGone(id)).await;
        }
    }
}

async fn answer_of(prefill: &mut Option<PrefillLeg>) -> Result<PrefillAnswer, LegError> {
    match prefill {
        Some(prefill) => prefill.answer().await,
        None => std::future::pending().await,
    }
}

async fn news_of(decode: &mut Option<DecodeLeg>) -> DecodeNews {
    match decode {
        Some(decode) => decode.news().await,
        None => std::future::pending().await,
    }
}
