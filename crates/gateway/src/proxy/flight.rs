//! One request on its way: a task that does what the core says about it, and says what came of it.
//!
//! It is one loop over a closed set of news: a command of the core, the client's end, a leg of which the client does not
//! hear, the decode leg, KV that is held for it and is gone, and the time to show the client that its request lives. It owns
//! its legs, so that whatever ends the request ends them. It decides nothing: whether a failed leg is tried again, where, and
//! whether the client is told is the core's answer to [`Event::LegFailed`].

mod attempt;
mod chunks;
mod outcome;
mod sglang;
mod told;

use super::client::{Client, Flow};
use super::intake::TurnRequest;
use super::leg::{DecodeLeg, DecodeNews, SilentAnswer, SilentLeg};
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
use attempt::{Attempt, gone_of};
use homing_router::action::Decision;
use homing_router::event::{Event, Leg};
use homing_units::{Duration, Instant, RequestId};
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
    /// When the client is shown that its request lives, as long as it has nothing of its answer.
    quiet_until: Option<tokio::time::Instant>,
    /// The last refusal of an engine, to be passed on where the core ends the request with it.
    refusal: Option<Answer>,
    first_token: Option<Instant>,
    /// What was expected of the decode worker's cache.
    expectation: Option<Expectation>,
    /// When it was planned first, and how long that plan was expected to take to the first token.
    forecast: Option<(Instant, Duration)>,
    reported_cached_tokens: Option<u32>,
    output_tokens: u32,
    /// Where the prompt broke its session's prefix, if it did.
    prefix_break: Option<Break>,
    /// How the request ended; it goes on until the client has taken what is pending.
    ending: Option<Ending>,
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
    Silent(Result<SilentAnswer, LegError>),
    Decode(DecodeNews),
    Pair(PairNews),
    /// What this leg held for another is held no more.
    Gone(Leg),
    /// The client of a stream has got nothing for a while.
    Quiet,
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
        let attempt = Attempt::new(0, request.prompt_as_sent(), false);
        let keep_alive = shell.keep_alive.filter(|_| request.stream);
        let transcript = Transcript::new(
            request.dialect.endpoint(),
            request.edit,
            &request.model,
            request.blocker,
        );
        Self {
            voice: Voice::new(&request),
            quiet_until: keep_alive.map(|every| tokio::time::Instant::now() + every),
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
            forecast: None,
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
                News::Silent(answer) => self.silent_answered(answer).await,
                News::Decode(news) => self.decode_said(news).await,
                News::Pair(news) => self.pair_said(news).await,
                News::Gone(leg) => self.held_is_gone(leg).await,
                News::Quiet => self.show_life(),
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
            silent,
            decode,
            pair,
            holds,
            ..
        } = &mut self.attempt;
        let blocked = self.client.is_blocked();
        let quiet_until = self.quiet_until.filter(|_| !ended && !self.client.has_part());
        tokio::select! {
            biased;
            flow = self.client.flow() => News::Flow(flow),
            command = self.commands.recv(), if !ended => News::Command(command),
            () = self.shell.abandon.cancelled(), if !ended => News::Abandoned,
            news = pair_news(pair), if pair.as_ref().is_some_and(Pair::is_active) => News::Pair(news),
            answer = answer_of(silent), if silent.is_some() => News::Silent(answer),
            news = news_of(decode), if decode.is_some() && !blocked => News::Decode(news),
            leg = gone_of(holds), if !ended && holds.iter().any(|(_, held)| held.is_renewed()) => News::Gone(leg),
            () = until(quiet_until), if quiet_until.is_some() && !blocked => News::Quiet,
        }
    }

    async fn obey(&mut self, command: Command) {
        match command {
            Command::Decided(decision) => {
                self.voice.expect(decision.expected_cached_tokens);
                self.watch_prefix(&decision);
                self.expect(&decision);
                self.remember_prompt(&decision);
                self.decision = Some(decision);
            }
            Command::Dispatch(dispatch) => self.dispatch(dispatch).await,
            Command::Cancel(leg) => self.cancel(leg).await,
            Command::Reject(error) => self.end_with(error),
        }
    }

    /// An errand may carry this prompt's KV later.
    fn remember_prompt(&self, decision: &Decision) {
        let prompts = &self.shell.prompts;
        if let Some(prompt) = prompts.are_wanted().then(|| self.request.remembered()).flatten() {
            prompts.remember(decision.session, self.request.id, prompt);
        }
    }

    /// Shows the client that its request lives, though nothing of its answer is there.
    fn show_life(&mut self) {
        let headers = self.route_headers();
        self.client.begin_stream(|| headers);
        self.client.ping(self.voice.sign_of_life());
        let every = self.shell.keep_alive;
        self.quiet_until = every.map(|every| tokio::time::Instant::now() + every);
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

async fn until(instant: Option<tokio::time::Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => std::future::pending().await,
    }
}

async fn answer_of(silent: &mut Option<SilentLeg>) -> Result<SilentAnswer, LegError> {
    match silent {
        Some(silent) => silent.answer().await,
        None => std::future::pending().await,
    }
}

async fn news_of(decode: &mut Option<DecodeLeg>) -> DecodeNews {
    match decode {
        Some(decode) => decode.news().await,
        None => std::future::pending().await,
    }
}
