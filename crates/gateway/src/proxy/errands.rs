//! Errands: KV that the core has carried while no client waits for it. Each is a task of its own, with one leg at a time of which
//! nobody hears, made from the prompt of an earlier turn (`prompts` remembers them). Its legs are those that move a history:
//! completions of the prompt's first tokens, with `max_tokens` 1. Nothing of it is in any client's answer, log or usage.
//!
//! What cannot be done is said to the core at once: the prompt is not remembered any more, the engine had its own rendering of it,
//! or a worker is an SGLang server, whose decode side hands nothing over.

pub(crate) mod prompts;

use super::leg::{LegRequest, SilentAnswer, SilentLeg};
use super::legs::LegPrompt;
use super::release::Hold;
use crate::core_task::Command;
use crate::shell::Shell;
use crate::upstream::LegError;
use bytes::Bytes;
use homing_router::action::{Dispatch, Errand, KvUse};
use homing_router::event::{Event, FailureCause, Leg, LegFailure, LegId, Resume};
use homing_wire::transfer_offer::{Doubt, Offer, Terms};
use http::HeaderValue;
use prompts::Remembered;
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Errands that the core has begun and that nobody has taken up yet; it bounds those under way itself.
pub(crate) const ORDERS: usize = 64;

/// An errand that the core has begun, and where its commands come.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) errand: Errand,
    pub(crate) commands: mpsc::Receiver<Command>,
}

/// Runs errands for as long as there is a core. Dropped, it gives all of them up.
pub(crate) async fn run_errands(shell: Arc<Shell>, mut orders: mpsc::Receiver<Order>) {
    let mut under_way = JoinSet::new();
    loop {
        tokio::select! {
            order = orders.recv() => match order {
                Some(order) => drop(under_way.spawn(Runner::new(Arc::clone(&shell), order).run())),
                None => break,
            },
            Some(ended) = under_way.join_next() => {
                if let Err(error) = ended {
                    // The core's clock ends it there.
                    tracing::error!(%error, "the task of an errand broke");
                }
            }
        }
    }
}

/// One errand under way.
struct Runner {
    shell: Arc<Shell>,
    errand: Errand,
    commands: mpsc::Receiver<Command>,
    /// `None` where it is not remembered.
    remembered: Option<Arc<Remembered>>,
    silent: Option<SilentLeg>,
    /// KV that its first leg holds for its second.
    offer: Option<Offer>,
    /// How its lender learns that nobody will pull it: dropped before it was pulled, it is given up.
    hold: Option<Hold>,
}

impl Runner {
    fn new(shell: Arc<Shell>, order: Order) -> Self {
        Self {
            remembered: shell.prompts.get(order.errand.of),
            shell,
            errand: order.errand,
            commands: order.commands,
            silent: None,
            offer: None,
            hold: None,
        }
    }

    /// Until the core says no more of it.
    async fn run(mut self) {
        loop {
            tokio::select! {
                biased;
                command = self.commands.recv() => match command {
                    Some(Command::Dispatch(dispatch)) => self.dispatch(dispatch).await,
                    Some(Command::Cancel(leg)) => self.cancel(leg),
                    // Those are for clients.
                    Some(Command::Decided(_) | Command::Reject(_)) => {}
                    None => return,
                },
                answer = answer_of(&mut self.silent), if self.silent.is_some() => self.answered(answer).await,
            }
        }
    }

    async fn dispatch(&mut self, dispatch: Dispatch) {
        match self.send(dispatch) {
            Ok(silent) => self.silent = Some(silent),
            Err(error) => self.failed(dispatch.leg, &error).await,
        }
    }

    fn send(&mut self, dispatch: Dispatch) -> Result<SilentLeg, LegError> {
        let cannot = |why: &str| LegError::new(FailureCause::Invalid, why);
        let remembered = self.remembered.clone();
        let remembered = remembered.ok_or_else(|| cannot("the prompt is not remembered"))?;
        if self.shell.fleet.sglang(dispatch.worker).is_some() {
            return Err(cannot("an sglang server takes no part in errands"));
        }
        let prompt = remembered
            .history(self.errand.tokens)
            .ok_or_else(|| cannot("the prompt is shorter than what is to be carried"))?;
        let body = self.body(&dispatch, &prompt)?;
        let request = self.leg_request(&dispatch, &remembered, &prompt, body);
        let exports = dispatch.kv == KvUse::Export;
        if exports {
            let name = self.leg_name(dispatch.leg);
            self.hold = self.shell.releases.hold(dispatch.worker, &request.headers, &name);
        }
        let terms = self.terms(&prompt).filter(|_| exports);
        Ok(SilentLeg::send(self.shell.upstream.clone(), request, terms))
    }

    fn body(&mut self, dispatch: &Dispatch, prompt: &LegPrompt) -> Result<Bytes, LegError> {
        match dispatch.kv {
            KvUse::Local => Ok(prompt.computed_body()),
            KvUse::Export => Ok(prompt.held_body()),
            KvUse::Import { .. } => {
                let doubtful = |doubt: Doubt| LegError::new(FailureCause::Transfer, doubt.to_string());
                let offer = self.offer.take().ok_or_else(|| doubtful(Doubt::Missing))?;
                let terms = self.terms(prompt).ok_or_else(|| doubtful(Doubt::Missing))?;
                let params = offer.redeem(&terms, self.shell.clock.now()).map_err(doubtful)?;
                Ok(prompt.pulled_body(params))
            }
        }
    }

    /// What the KV is for, as things are now: which prompt, and which lives of who lends it and who fetches it.
    fn terms(&self, prompt: &LegPrompt) -> Option<Terms> {
        Some(Terms {
            prompt: prompt.hash(),
            source: self.shell.fleet.life(self.errand.from?),
            target: self.shell.fleet.life(self.errand.to),
        })
    }

    fn leg_request(&self, dispatch: &Dispatch, remembered: &Remembered, prompt: &LegPrompt, body: Bytes) -> LegRequest {
        let mut headers = remembered.headers.clone();
        if let Ok(name) = HeaderValue::try_from(self.leg_name(dispatch.leg)) {
            headers.insert(super::intake::REQUEST_ID, name);
        }
        headers.extend(self.shell.fleet.rank_header(dispatch.worker));
        LegRequest {
            leg: dispatch.leg,
            kv: dispatch.kv,
            uri: self.shell.fleet.uri(dispatch.worker, prompt.endpoint().path()),
            headers,
            body,
        }
    }

    /// A leg's name at its engine, as those of requests.
    fn leg_name(&self, leg: LegId) -> String {
        let name = self.shell.request_name(self.errand.errand);
        super::intake::leg_name(&name, leg)
    }

    /// Gives a leg up: its connection closes, and what it holds is let go of.
    fn cancel(&mut self, leg: LegId) {
        if self.silent.as_ref().is_some_and(|silent| silent.leg == leg) {
            self.silent = None;
        }
        if leg.leg == Leg::Lend {
            self.offer = None;
            self.hold = None;
        }
    }

    async fn answered(&mut self, answer: Result<SilentAnswer, LegError>) {
        let Some(SilentLeg { leg, terms, .. }) = self.silent.take() else {
            return;
        };
        // What was pulled is free at its lender; one that answered with an error holds nothing.
        let is_free = match &answer {
            Ok(_) => leg.leg == Leg::Fetch,
            Err(error) => leg.leg == Leg::Lend && error.answer.is_some(),
        };
        if let Some(hold) = self.hold.as_mut().filter(|_| is_free) {
            hold.ended();
        }
        let deadline = self.shell.clock.now() + self.shell.offer;
        let answer = answer.and_then(|SilentAnswer { held, cached_tokens }| {
            let offer = terms.map(|terms| Offer::of_answer(&held, terms, deadline)).transpose();
            let offer = offer.map_err(|doubt| LegError::new(FailureCause::Transfer, doubt.to_string()))?;
            Ok((offer, cached_tokens))
        });
        match answer {
            Ok((offer, cached_tokens)) => {
                self.offer = offer;
                self.tell(Event::PrefillDone { leg, cached_tokens }).await;
            }
            Err(error) => self.failed(leg, &error).await,
        }
    }

    fn failed(&self, leg: LegId, error: &LegError) -> impl Future<Output = ()> + use<> {
        tracing::debug!(errand = %self.errand.errand, ?leg, detail = error.detail, "an errand's leg failed");
        let failure = LegFailure {
            leg,
            cause: error.cause,
            resume: Resume::Start,
        };
        self.tell(Event::LegFailed(failure))
    }

    /// Tells the core. The future does not borrow the errand: its leg cannot be shared between threads.
    fn tell(&self, event: Event) -> impl Future<Output = ()> + use<> {
        let core = self.shell.core.clone();
        async move { core.tell(event).await }
    }
}

async fn answer_of(silent: &mut Option<SilentLeg>) -> Result<SilentAnswer, LegError> {
    match silent {
        Some(silent) => silent.answer().await,
        None => std::future::pending().await,
    }
}
