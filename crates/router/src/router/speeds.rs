//! What legs took, for the fit of their worker's speed. Three stretches of a request are clear: from its leg's dispatch to the
//! end of its prefill, where nothing was queued ahead of it; from its leg's dispatch to its first token, where all of its KV
//! was ready to be pulled and nobody else pulled; and from its first token to its last.
//!
//! What was prefilled beside a decoding request is counted by what was sent to the worker meanwhile, so that an answer that
//! was stalled by others does not make the worker's decoding look slow.

use super::Router;
use crate::admission::Account;
use crate::fleet::Worker;
use crate::learning::Work;
use crate::speed::pairs;
use homing_units::{Instant, RequestId, WorkerId};

/// A stretch of a request that is being timed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Watch {
    worker: WorkerId,
    since: Instant,
    batch: f64,
    context: f64,
    /// What the worker had been sent to prefill before.
    before: Prefilled,
    what: Watched,
}

/// What is being timed.
#[derive(Clone, Copy, Debug)]
enum Watched {
    /// This prefill.
    Prefill(Prefilled),
    /// The pull of the KV of so many tokens.
    Pull(f64),
    /// An answer.
    Answer,
}

/// Prefill that was sent to a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Prefilled {
    tokens: f64,
    pairs: f64,
    legs: f64,
}

impl Router {
    /// A leg that prefills so many tokens of the request's prompt is sent.
    pub(super) fn watch_prefill(&mut self, id: RequestId, worker: WorkerId, tokens: u32) {
        let account = self.ledger.account(worker);
        let (Some(request), Some(record)) = (self.requests.get_mut(&id), self.fleet.get_mut(worker)) else {
            return;
        };
        let work = Prefilled {
            tokens: f64::from(tokens),
            pairs: pairs(tokens, request.prompt.tokens),
            legs: 1.0,
        };
        record.prefilled = record.prefilled.plus(work);
        // Its own tokens are booked already; more than these is a queue.
        let alone = account.append_tokens + account.prefill_tokens <= u64::from(tokens);
        if alone {
            record.prefilling_since = self.now;
        }
        request.watch = alone.then(|| Watch::new(self.now, record, &account, Watched::Prefill(work)));
    }

    /// A prefill is done at the worker, and it is the next one's turn.
    pub(super) fn prefilled(&mut self, worker: WorkerId) {
        if let Some(record) = self.fleet.get_mut(worker) {
            record.prefilling_since = self.now;
        }
    }

    /// A leg that pulls the KV of so many tokens from a worker that has it is sent.
    pub(super) fn watch_pull(&mut self, id: RequestId, from: WorkerId, worker: WorkerId, tokens: u32) {
        let (source, account) = (self.ledger.account(from), self.ledger.account(worker));
        let (Some(request), Some(record)) = (self.requests.get_mut(&id), self.fleet.get(worker)) else {
            return;
        };
        // Itself alone, on both NICs, and no prefill that its first token would wait for.
        let alone = source.exports <= 1 && account.seeds <= 1 && account.append_tokens + account.prefill_tokens == 0;
        let what = Watched::Pull(f64::from(tokens));
        request.watch = alone.then(|| Watch::new(self.now, record, &account, what));
    }

    /// The request's prefill or pull is done there: learns from it, if it was watched.
    pub(super) fn learn_prefill(&mut self, id: RequestId, worker: WorkerId) {
        let Some((watch, seconds)) = self.watched(id, worker) else {
            return;
        };
        let Some(record) = self.fleet.get(worker) else { return };
        let speed = self.fleet.speed(record);
        let work = match watch.what {
            Watched::Prefill(work) => Work::prefill(&speed, work.tokens, work.pairs, watch.batch, watch.context),
            Watched::Pull(tokens) => {
                let beside = record.prefilled.minus(watch.before);
                Work::pull(&speed, tokens, watch.batch, watch.context).beside(
                    &speed,
                    beside.tokens,
                    beside.pairs,
                    beside.legs,
                )
            }
            Watched::Answer => return,
        };
        self.fleet.learn(worker, &work, seconds);
    }

    /// The request's first token is out.
    pub(super) fn watch_answer(&mut self, id: RequestId, worker: WorkerId) {
        let account = self.ledger.account(worker);
        let Some(record) = self.fleet.get(worker) else { return };
        let watch = Watch::new(self.now, record, &account, Watched::Answer);
        if let Some(request) = self.requests.get_mut(&id) {
            request.watch = Some(watch);
        }
    }

    /// The request's last token is out, of so many: learns from its answer.
    pub(super) fn learn_answer(&mut self, id: RequestId, worker: WorkerId, output_tokens: u32) {
        let account = self.ledger.account(worker);
        let Some((watch, seconds)) = self.watched(id, worker) else {
            return;
        };
        let answer = |_: &&Worker| matches!(watch.what, Watched::Answer) && output_tokens > 1;
        let Some(record) = self.fleet.get(worker).filter(answer) else {
            return;
        };
        let beside = record.prefilled.minus(watch.before);
        let mean = |first: f64, last: f64| f64::midpoint(first, last).max(1.0);
        let batch = mean(watch.batch, f64::from(account.decodes));
        let context = mean(watch.context, account.decode_tokens as f64);
        let speed = self.fleet.speed(record);
        let work = Work::decode(&speed, f64::from(output_tokens - 1), batch, context).beside(
            &speed,
            beside.tokens,
            beside.pairs,
            beside.legs,
        );
        self.fleet.learn(worker, &work, seconds);
    }

    /// What was timed of this request at this worker, and how long it took.
    fn watched(&mut self, id: RequestId, worker: WorkerId) -> Option<(Watch, f64)> {
        let watch = self.requests.get_mut(&id)?.watch.take()?;
        let seconds = self.now.saturating_since(watch.since).as_secs_f64();
        (watch.worker == worker).then_some((watch, seconds))
    }
}

impl Watch {
    fn new(now: Instant, worker: &Worker, account: &Account, what: Watched) -> Self {
        Self {
            worker: worker.info.id,
            since: now,
            batch: f64::from(account.decodes),
            context: account.decode_tokens as f64,
            before: worker.prefilled,
            what,
        }
    }
}

impl Prefilled {
    fn plus(self, other: Self) -> Self {
        Self {
            tokens: self.tokens + other.tokens,
            pairs: self.pairs + other.pairs,
            legs: self.legs + other.legs,
        }
    }

    fn minus(self, other: Self) -> Self {
        Self {
            tokens: (self.tokens - other.tokens).max(0.0),
            pairs: (self.pairs - other.pairs).max(0.0),
            legs: (self.legs - other.legs).max(0.0),
        }
    }
}
