//! What legs took, for the fit of their worker's speed. Two stretches of a request are clear: from its leg's dispatch to the
//! end of its prefill, where nothing was queued ahead of it, and from its first token to its last.
//!
//! What was prefilled beside a decoding request is counted by what was sent to the worker meanwhile, so that an answer that
//! was stalled by others does not make the worker's decoding look slow.

use super::Router;
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
    /// Of a prefill: what it is.
    prefill: Option<Prefilled>,
    /// Of an answer: what the worker had been sent before.
    before: Prefilled,
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
        request.watch = alone.then_some(Watch {
            worker,
            since: self.now,
            batch: f64::from(account.decodes),
            context: account.decode_tokens as f64,
            prefill: Some(work),
            before: Prefilled::default(),
        });
    }

    /// The request's prefill is done there: learns from it, if it was watched.
    pub(super) fn learn_prefill(&mut self, id: RequestId, worker: WorkerId) {
        let Some((watch, seconds)) = self.watched(id, worker) else {
            return;
        };
        let (Some(work), Some(record)) = (watch.prefill, self.fleet.get_mut(worker)) else {
            return;
        };
        let built_in = record.steps.speed();
        let work = Work::prefill(&built_in, work.tokens, work.pairs, watch.batch, watch.context);
        record.steps.learn(&work, seconds);
    }

    /// The request's first token is out.
    pub(super) fn watch_answer(&mut self, id: RequestId, worker: WorkerId) {
        let account = self.ledger.account(worker);
        let Some(record) = self.fleet.get(worker) else { return };
        let watch = Watch {
            worker,
            since: self.now,
            batch: f64::from(account.decodes),
            context: account.decode_tokens as f64,
            prefill: None,
            before: record.prefilled,
        };
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
        let Some(record) = self
            .fleet
            .get_mut(worker)
            .filter(|_| watch.prefill.is_none() && output_tokens > 1)
        else {
            return;
        };
        let beside = record.prefilled.minus(watch.before);
        let mean = |first: f64, last: f64| f64::midpoint(first, last).max(1.0);
        let batch = mean(watch.batch, f64::from(account.decodes));
        let context = mean(watch.context, account.decode_tokens as f64);
        let speed = record.steps.speed();
        let work = Work::decode(&speed, f64::from(output_tokens - 1), batch, context).beside(
            &speed,
            beside.tokens,
            beside.pairs,
            beside.legs,
        );
        record.steps.learn(&work, seconds);
    }

    /// What was timed of this request at this worker, and how long it took.
    fn watched(&mut self, id: RequestId, worker: WorkerId) -> Option<(Watch, f64)> {
        let watch = self.requests.get_mut(&id)?.watch.take()?;
        let seconds = self.now.saturating_since(watch.since).as_secs_f64();
        (watch.worker == worker).then_some((watch, seconds))
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
