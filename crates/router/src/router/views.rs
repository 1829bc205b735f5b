//! What operators see: workers, sessions, and why a request went where it did. Plain data to serialise; nothing here
//! changes anything. The last requests are remembered, a bounded number of them.

use super::Router;
use crate::action::{Decision, Path, WorkerState};
use crate::admission::Account;
use crate::event::{Abilities, ClientKind, Role};
use crate::handoff::{Failure, Request};
use crate::sessions::{PATHS, Session};
use homing_kv::{BlockHash, Tier};
use homing_units::{BootEpoch, Duration, Instant, RequestId, SessionId, WorkerId};
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};

/// A worker.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerStatus {
    /// Its id.
    pub id: WorkerId,
    /// Its name.
    pub name: String,
    /// What it may do.
    pub role: Role,
    /// What it can do beyond that.
    pub abilities: Abilities,
    /// Its present life.
    pub epoch: BootEpoch,
    /// What the router thinks of it.
    pub state: WorkerState,
    /// Since when.
    pub state_since: Instant,
    /// Size of its pool in tokens.
    pub kv_tokens: u64,
    /// What the router has in flight there.
    pub in_flight: Account,
    /// Requests in its batch, as it says.
    pub running: Option<u32>,
    /// Requests that wait for a place in its batch, as it says.
    pub waiting: Option<u32>,
    /// Pool tokens in use by requests, as it says.
    pub kv_tokens_used: Option<u64>,
    /// Blocks that its events say it holds in the accelerator's memory.
    pub indexed_gpu_blocks: u32,
    /// Blocks that its events say it holds in the host's memory.
    pub indexed_host_blocks: u32,
    /// Sessions of which it has told what is resident, where its events do not say it.
    pub sketched_sessions: usize,
    /// Sessions whose KV is predicted to be there.
    pub predicted_sessions: usize,
    /// Sessions that live there.
    pub homed_sessions: u32,
    /// Tokens of their last prompts.
    pub homed_tokens: u64,
    /// Those of sessions that were used lately: the live demand on its pool.
    pub live_tokens: u64,
    /// Stretches of requests that its speed was learnt from.
    pub speed_observations: u32,
    /// The usual relative error of their predicted durations.
    pub speed_error: f64,
    /// Legs that reported cached tokens.
    pub cache_reports: u64,
    /// Cached prompt tokens that were expected of them.
    pub cache_predicted_tokens: u64,
    /// Cached prompt tokens that they reported.
    pub cache_reported_tokens: u64,
    /// Sum of the differences, whichever way.
    pub cache_error_tokens: u64,
    /// Decode legs that were placed there on what its sketches said and reported cached tokens.
    pub sketch_legs: u64,
    /// Those of which they said more than events and predictions did.
    pub sketch_raised: u64,
    /// Those of which they said less.
    pub sketch_lowered: u64,
    /// Sum of the differences between the cached tokens that they said and those that were reported, whichever way.
    pub sketch_error_tokens: u64,
    /// The same of what events and predictions alone said.
    pub sketch_error_tokens_without: u64,
}

/// A session.
#[derive(Clone, Debug, Serialize)]
pub struct SessionView {
    /// Its id.
    pub id: SessionId,
    /// The family that it belongs to: the id of its first session.
    pub family: SessionId,
    /// Whether the client names it.
    pub named: bool,
    /// Turns that have begun.
    pub turns: u32,
    /// Turns in flight.
    pub in_flight: u32,
    /// Length of its last prompt.
    pub prompt_tokens: u32,
    /// The decode worker where it lives.
    pub home: Option<WorkerId>,
    /// When it was last used.
    pub last_used: Instant,
    /// Plans by path.
    pub paths: BTreeMap<Path, u32>,
}

/// What was learnt of a kind of client.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ClientView {
    /// The kind; names are the driver's.
    pub kind: ClientKind,
    /// Turns of it that have ended.
    pub turns: u64,
    /// Its sessions that have no turn in flight now.
    pub away: u32,
    /// The share of its sessions that come back after a turn.
    pub return_share: f64,
    /// Turns that a session has after one of its turns.
    pub further_turns: f64,
    /// Seconds between turns, of sessions that come back as long as they count as live; `None` where none does.
    pub gap_s: Option<f64>,
    /// Tokens of its answers.
    pub output_tokens: f64,
}

/// Why a request went where it did.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// The request.
    pub request: RequestId,
    /// Its session.
    pub session: SessionId,
    /// Turns of the session before this one.
    pub turn_index: u32,
    /// When it came.
    pub arrived: Instant,
    /// Where it is: a phase, or how it ended.
    pub state: &'static str,
    /// When its client had the first token.
    pub first_token: Option<Instant>,
    /// When it ended.
    pub ended: Option<Instant>,
    /// Prompt tokens that whoever prefilled it last found in its cache, as that worker says.
    pub cached_tokens: Option<u32>,
    /// Tokens of its last attempt's answer, as the decode worker says.
    pub output_tokens: Option<u32>,
    /// Times that it was planned and had to wait.
    pub waits: u32,
    /// Why it had to wait the last time.
    pub waited_for: Option<String>,
    /// Its attempts; of many the first and the last few.
    pub attempts: Vec<AttemptView>,
}

/// One plan of a request, and what became of it.
#[derive(Clone, Debug, Serialize)]
pub struct AttemptView {
    /// When it was decided.
    pub at: Instant,
    /// What was decided.
    pub decision: Decision,
    /// How it failed, if it did: `leg: reason`.
    pub failed: Option<String>,
    /// How long it took until then.
    pub failed_after: Option<Duration>,
}

/// Attempts that an explanation keeps.
const ATTEMPTS: usize = 8;

/// The last requests.
#[derive(Debug)]
pub(super) struct History {
    limit: usize,
    by_request: BTreeMap<RequestId, Explanation>,
    /// Oldest first.
    order: VecDeque<RequestId>,
}

impl History {
    pub(super) const fn new(limit: usize) -> Self {
        Self {
            limit,
            by_request: BTreeMap::new(),
            order: VecDeque::new(),
        }
    }

    pub(super) fn begin(&mut self, now: Instant, request: &Request) {
        let explanation = Explanation {
            request: request.id,
            session: request.session,
            turn_index: request.turn_index,
            arrived: now,
            state: "waiting",
            first_token: None,
            ended: None,
            cached_tokens: None,
            output_tokens: None,
            waits: 0,
            waited_for: None,
            attempts: Vec::new(),
        };
        if self.by_request.insert(request.id, explanation).is_none() {
            self.order.push_back(request.id);
        }
        while self.order.len() > self.limit {
            let oldest = self.order.pop_front();
            self.by_request
                .remove(&oldest.expect("what is over the bound is not empty"));
        }
    }

    pub(super) fn waits(&mut self, id: RequestId, reason: &str) {
        if let Some(explanation) = self.by_request.get_mut(&id) {
            explanation.waits += 1;
            explanation.waited_for = Some(reason.to_owned());
        }
    }

    pub(super) fn decided(&mut self, now: Instant, decision: &Decision) {
        if let Some(explanation) = self.by_request.get_mut(&decision.request) {
            if explanation.attempts.len() == ATTEMPTS {
                explanation.attempts.remove(ATTEMPTS / 2);
            }
            let decision = decision.clone();
            explanation.attempts.push(AttemptView {
                at: now,
                decision,
                failed: None,
                failed_after: None,
            });
        }
    }

    pub(super) fn failed(&mut self, now: Instant, id: RequestId, failure: Failure) {
        if let Some(last) = self
            .by_request
            .get_mut(&id)
            .and_then(|explanation| explanation.attempts.last_mut())
        {
            last.failed = Some(failure.describe());
            last.failed_after = Some(now.saturating_since(last.at));
        }
    }

    pub(super) fn answers(&mut self, now: Instant, id: RequestId) {
        if let Some(explanation) = self.by_request.get_mut(&id) {
            explanation.first_token.get_or_insert(now);
        }
    }

    /// Whoever prefilled the request has found so much of its prompt.
    pub(super) fn found(&mut self, id: RequestId, cached_tokens: Option<u32>) {
        if let Some(explanation) = self.by_request.get_mut(&id) {
            explanation.cached_tokens = cached_tokens;
        }
    }

    pub(super) fn generated(&mut self, id: RequestId, output_tokens: u32) {
        if let Some(explanation) = self.by_request.get_mut(&id) {
            explanation.output_tokens = Some(output_tokens);
        }
    }

    pub(super) fn ended(&mut self, now: Instant, id: RequestId, outcome: &'static str) {
        if let Some(explanation) = self.by_request.get_mut(&id) {
            explanation.state = outcome;
            explanation.ended = Some(now);
        }
    }
}

impl Router {
    /// All workers, by id.
    #[must_use]
    pub fn view_workers(&self) -> Vec<WorkerStatus> {
        self.fleet.iter().map(|worker| self.worker_status(worker)).collect()
    }

    /// Sessions, the latest first, at most `limit` of them.
    #[must_use]
    pub fn view_sessions(&self, limit: usize) -> Vec<SessionView> {
        let mut sessions: Vec<_> = self.sessions.iter().collect();
        sessions.sort_by_key(|session| std::cmp::Reverse((session.last_used, session.id)));
        sessions.into_iter().take(limit).map(SessionView::from).collect()
    }

    /// What was learnt of each kind of client of which a turn has ended.
    #[must_use]
    pub fn view_clients(&self) -> Vec<ClientView> {
        self.sessions.clients().view().collect()
    }

    /// Sessions that are remembered.
    #[must_use]
    pub fn session_count(&self) -> usize {
        self.sessions.len()
    }

    /// Requests that wait in the queue.
    #[must_use]
    pub fn queue_length(&self) -> usize {
        self.queue.len()
    }

    /// Whether events say that this worker holds this block in this tier; for checks.
    #[must_use]
    pub fn indexes(&self, worker: WorkerId, block: BlockHash, tier: Tier) -> bool {
        self.residency.index.holds(worker, block, tier)
    }

    /// Why a request went where it did; `None` where it is not remembered any more.
    #[must_use]
    pub fn explain(&self, id: RequestId) -> Option<Explanation> {
        let mut explanation = self.history.by_request.get(&id)?.clone();
        if let Some(request) = self.requests.get(&id) {
            explanation.state = request.phase.as_str();
        }
        Some(explanation)
    }

    /// All requests that are remembered, the oldest first: a bounded number of them.
    #[must_use]
    pub fn view_requests(&self) -> Vec<Explanation> {
        self.history.order.iter().filter_map(|id| self.explain(*id)).collect()
    }

    fn worker_status(&self, worker: &crate::fleet::Worker) -> WorkerStatus {
        let id = worker.info.id;
        let load = worker.load.map(|(_, load)| load);
        let indexed = self.residency.index.worker_blocks(id);
        let homed = self.sessions.homed(id);
        WorkerStatus {
            id,
            abilities: worker.info.abilities,
            name: worker.info.name.clone(),
            role: worker.info.role,
            epoch: worker.info.epoch,
            state: worker.state(),
            state_since: worker.announced_at,
            kv_tokens: worker.info.kv_tokens,
            in_flight: self.ledger.account(id),
            running: load.map(|load| load.running),
            waiting: load.map(|load| load.waiting),
            kv_tokens_used: load.map(|load| load.kv_tokens_used),
            indexed_gpu_blocks: indexed.gpu,
            indexed_host_blocks: indexed.host,
            sketched_sessions: self.residency.sketches.sessions(id),
            predicted_sessions: self.residency.predicted_sessions(id),
            homed_sessions: homed.sessions,
            homed_tokens: homed.tokens,
            live_tokens: homed.live_tokens,
            speed_observations: worker.steps.seen(),
            speed_error: worker.steps.usual_error(),
            cache_reports: worker.cache.legs,
            cache_predicted_tokens: worker.cache.predicted_tokens,
            cache_reported_tokens: worker.cache.reported_tokens,
            cache_error_tokens: worker.cache.error_tokens,
            sketch_legs: worker.sketched.legs,
            sketch_raised: worker.sketched.raised,
            sketch_lowered: worker.sketched.lowered,
            sketch_error_tokens: worker.sketched.error_tokens,
            sketch_error_tokens_without: worker.sketched.error_tokens_without,
        }
    }
}

impl From<&Session> for SessionView {
    fn from(session: &Session) -> Self {
        let paths = PATHS.into_iter().zip(session.paths).filter(|(_, count)| *count > 0);
        Self {
            id: session.id,
            family: SessionId(session.family),
            named: session.key.is_some(),
            turns: session.turns,
            in_flight: session.in_flight,
            prompt_tokens: session.last.tokens,
            home: session.home,
            last_used: session.last_used,
            paths: paths.collect(),
        }
    }
}
