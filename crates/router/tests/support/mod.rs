//! A driver for tests: virtual time, clients and legs, and what every driver may rely on, asserted after each event.

#![expect(dead_code, reason = "each test program uses a part of it")]

use homing_kv::{BlockHash, Prompt};
use homing_router::action::{Action, Decision, Dispatch, Errand, ErrandOutcome, KvUse, RouteError, WorkerState};
use homing_router::event::{
    Abilities, ClientKind, Compared, Event, FailureCause, Leg, LegFailure, LegId, LegUsage, Resume, Role, SessionHint,
    Turn, WorkerInfo,
};
use homing_router::recording::{ActionDigest, Recorder};
use homing_router::{Router, RouterConfig};
use homing_units::{BootEpoch, Duration, Instant, RequestId, WorkerId};
use std::collections::BTreeMap;

pub const BLOCK: u32 = 16;

/// A router, and the world around it.
pub struct Driver {
    pub router: Router,
    pub now: Instant,
    pub recorder: Recorder,
    pub bytes: Vec<u8>,
    pub digest: ActionDigest,
    /// Requests that live, with what the client was sent already.
    pub live: BTreeMap<RequestId, Client>,
    /// How each request ended: exactly once.
    pub ended: BTreeMap<RequestId, &'static str>,
    /// Legs that were sent and have not ended.
    pub legs: BTreeMap<LegId, Dispatch>,
    /// Legs that were given up, whose late answers may still come.
    pub late: Vec<LegId>,
    /// Cancelled decode legs that are to say where to resume.
    pub cancelled: Vec<LegId>,
    pub prefilled: Vec<LegId>,
    pub decisions: Vec<Decision>,
    /// Errands under way, and how those that are over ended.
    pub errands: BTreeMap<RequestId, Errand>,
    pub errands_ended: Vec<(Errand, ErrandOutcome)>,
    pub resyncs: Vec<(WorkerId, u64)>,
    pub identified: Vec<WorkerId>,
    pub states: BTreeMap<WorkerId, WorkerState>,
    next_request: u64,
}

/// A client.
pub struct Client {
    pub prompt: Prompt,
    pub max_output_tokens: u32,
    pub sent_blocks: u32,
    pub sent: bool,
}

impl Driver {
    pub fn new(config: RouterConfig) -> Self {
        Self {
            recorder: Recorder::new(&config),
            router: Router::new(config),
            now: Instant::ZERO,
            bytes: Vec::new(),
            digest: ActionDigest::default(),
            live: BTreeMap::new(),
            ended: BTreeMap::new(),
            legs: BTreeMap::new(),
            late: Vec::new(),
            cancelled: Vec::new(),
            prefilled: Vec::new(),
            decisions: Vec::new(),
            errands: BTreeMap::new(),
            errands_ended: Vec::new(),
            resyncs: Vec::new(),
            identified: Vec::new(),
            states: BTreeMap::new(),
            next_request: 0,
        }
    }

    /// A router with these workers, each in life 1.
    pub fn with_workers(policy: &str, workers: &[WorkerInfo]) -> Self {
        Self::with_config(policy, RouterConfig::default(), workers)
    }

    pub fn with_config(policy: &str, config: RouterConfig, workers: &[WorkerInfo]) -> Self {
        let mut driver = Self::new(RouterConfig {
            policy: policy.parse().expect("a policy of a test"),
            ..config
        });
        for worker in workers {
            driver.tell(Event::WorkerJoined(worker.clone()));
        }
        driver
    }

    /// Tells the router something, and carries out what it asks for.
    pub fn tell(&mut self, event: Event) {
        if let Event::WorkerLeft(worker) = &event {
            self.states.remove(worker);
        }
        self.recorder.event(self.now, &event);
        self.router.handle(self.now, event);
        self.router.check_invariants();
        while let Some(action) = self.router.poll_action() {
            self.recorder.action(&action);
            self.digest.add(&action);
            self.carry_out(action);
        }
        self.bytes.extend(self.recorder.take_bytes());
    }

    pub fn at(&mut self, seconds: f64) {
        self.now = self.now.max(Instant::ZERO + Duration::from_secs_f64(seconds));
    }

    pub fn wait(&mut self, duration: Duration) {
        self.now += duration;
    }

    /// Goes to the router's next timeout, if there is one, and hands it in.
    pub fn time_out(&mut self) -> bool {
        let Some(at) = self.router.poll_timeout() else {
            return false;
        };
        self.now = self.now.max(at);
        self.tell(Event::Timeout);
        assert!(
            self.router.poll_timeout().is_none_or(|next| next > self.now),
            "a timeout was left undone"
        );
        true
    }

    /// A client asks for a turn.
    pub fn turn(&mut self, session: SessionHint, prompt: Prompt, max_output_tokens: u32) -> RequestId {
        self.compared_turn(session, prompt, None, max_output_tokens)
    }

    /// A client asks for a turn whose tokens were compared with those of earlier prompts.
    pub fn compared_turn(
        &mut self,
        session: SessionHint,
        prompt: Prompt,
        compared: Option<Compared>,
        max_output_tokens: u32,
    ) -> RequestId {
        self.ranked_turn(session, prompt, compared, (max_output_tokens, 0))
    }

    /// A client asks for a turn of so many tokens at most, with this priority.
    pub fn ranked_turn(
        &mut self,
        session: SessionHint,
        prompt: Prompt,
        compared: Option<Compared>,
        (max_output_tokens, priority): (u32, i32),
    ) -> RequestId {
        let request = RequestId(self.next_request);
        self.next_request += 1;
        let client = Client {
            prompt: prompt.clone(),
            max_output_tokens,
            sent_blocks: 0,
            sent: false,
        };
        self.live.insert(request, client);
        self.tell(Event::Turn(Turn {
            request,
            session,
            prompt,
            max_output_tokens,
            priority,
            compared,
            kind: ClientKind::default(),
        }));
        request
    }

    pub fn client_gone(&mut self, request: RequestId) {
        self.end(request, "client_gone");
        self.tell(Event::ClientGone(request));
        self.assert_no_legs(request);
    }

    pub fn prefill_done(&mut self, leg: LegId) {
        assert_eq!(leg.leg, Leg::Prefill);
        self.leg_done(leg);
    }

    /// A leg that answers no client has ended well.
    pub fn leg_done(&mut self, leg: LegId) {
        let kv = self.legs.remove(&leg).map(|dispatch| dispatch.kv);
        match leg.leg {
            Leg::Lend | Leg::Prefill => {
                assert_eq!(kv, Some(KvUse::Export), "{leg:?}");
                self.prefilled.push(leg);
            }
            Leg::Fetch => {
                let computes = leg.request >= Errand::FIRST_ID && kv == Some(KvUse::Local);
                assert!(computes || matches!(kv, Some(KvUse::Import { .. })), "{leg:?}");
            }
            Leg::Decode => panic!("a decode leg ends with its answer: {leg:?}"),
        }
        self.tell(Event::PrefillDone {
            leg,
            cached_tokens: None,
        });
    }

    pub fn first_token(&mut self, leg: LegId) {
        let client = self
            .live
            .get_mut(&leg.request)
            .expect("only a live request gets tokens");
        client.sent = true;
        self.tell(Event::FirstToken { leg });
    }

    pub fn finished(&mut self, leg: LegId, cached_tokens: Option<u32>) {
        assert!(self.legs.remove(&leg).is_some(), "{leg:?}");
        self.end(leg.request, "finished");
        self.tell(Event::Finished {
            leg,
            usage: LegUsage {
                cached_tokens,
                output_tokens: 20,
            },
        });
        self.assert_no_legs(leg.request);
    }

    pub fn failed(&mut self, leg: LegId, cause: FailureCause, resume: Resume) {
        self.legs.remove(&leg);
        self.tell(Event::LegFailed(LegFailure { leg, cause, resume }));
    }

    /// Where a cut answer goes on: from the start, or after a block more than the last time.
    pub fn resume(&mut self, request: RequestId) -> Resume {
        let Some(client) = self.live.get_mut(&request).filter(|client| client.sent) else {
            return Resume::Start;
        };
        client.sent_blocks += 1;
        client.max_output_tokens = client.max_output_tokens.saturating_sub(BLOCK).max(1);
        let sent =
            (0..client.sent_blocks).map(|index| BlockHash(u128::from(request.0) << 96 | u128::from(index) | 1 << 80));
        let blocks: Vec<_> = client.prompt.blocks.iter().copied().chain(sent).collect();
        let prompt = Prompt::new(blocks, client.prompt.tokens + client.sent_blocks * BLOCK, BLOCK);
        Resume::After {
            prompt,
            max_output_tokens: client.max_output_tokens,
        }
    }

    /// The only leg of a request that is out.
    pub fn leg(&self, request: RequestId) -> LegId {
        let mut legs = self.legs.keys().filter(|leg| leg.request == request);
        let leg = *legs
            .next()
            .unwrap_or_else(|| panic!("{request} has no leg out: {:?}", self.ended.get(&request)));
        assert_eq!(legs.next(), None, "{request} has two legs out");
        leg
    }

    /// Answers a request's legs until it has ended.
    pub fn serve(&mut self, request: RequestId) {
        let mut leg = self.leg(request);
        while leg.leg != Leg::Decode {
            self.leg_done(leg);
            leg = self.leg(request);
        }
        self.first_token(leg);
        self.finished(leg, None);
    }

    pub fn decision(&self, request: RequestId) -> &Decision {
        self.decisions
            .iter()
            .rev()
            .find(|decision| decision.request == request)
            .expect("it was decided")
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Decided(decision) => {
                assert!(self.live.contains_key(&decision.request), "{decision:?}");
                self.decisions.push(*decision);
            }
            Action::Dispatch(dispatch) => self.dispatch(dispatch),
            Action::Cancel { leg, worker } => {
                let known = self.legs.remove(&leg).map(|dispatch| dispatch.worker);
                assert!(
                    known == Some(worker) || self.prefilled.contains(&leg),
                    "a leg that is not out: {leg:?}"
                );
                self.late.push(leg);
                if leg.leg == Leg::Decode && self.live.contains_key(&leg.request) {
                    self.cancelled.push(leg);
                }
            }
            Action::Reject { request, error } => {
                self.end(request, error.kind());
                self.assert_no_legs(request);
                if let RouteError::Overloaded { retry_after } = error {
                    assert!(retry_after > Duration::ZERO);
                }
            }
            Action::Resync { worker, from_sequence } => self.resyncs.push((worker, from_sequence)),
            Action::Identify { worker } => self.identified.push(worker),
            Action::Errand(errand) => {
                assert!(errand.errand >= Errand::FIRST_ID, "{errand:?}");
                let known = self.errands.insert(errand.errand, *errand);
                assert_eq!(known, None, "an errand begins once");
            }
            Action::ErrandEnded { errand, outcome } => {
                let ended = self.errands.remove(&errand).expect("only what has begun ends");
                self.assert_no_legs(errand);
                self.errands_ended.push((ended, outcome));
            }
            Action::WorkerState { worker, state } => {
                assert_ne!(self.states.insert(worker, state), Some(state), "{worker} is told twice");
            }
        }
    }

    fn dispatch_errand(&mut self, dispatch: Dispatch) {
        let errand = &self.errands[&dispatch.leg.request];
        assert_eq!(dispatch.leg.attempt, 0, "an errand has one attempt");
        assert_eq!(dispatch.prefix_tokens, Some(errand.tokens));
        match (dispatch.leg.leg, dispatch.kv) {
            (Leg::Lend, KvUse::Export) => assert_eq!(errand.from, Some(dispatch.worker)),
            (Leg::Fetch, KvUse::Import { from }) => {
                assert_eq!((errand.from, errand.to), (Some(from), dispatch.worker));
                let lent = dispatch.leg.sibling(Leg::Lend);
                assert!(self.prefilled.contains(&lent), "{dispatch:?} before its KV is ready");
            }
            (Leg::Fetch, KvUse::Local) => assert_eq!((errand.from, errand.to), (None, dispatch.worker)),
            _ => panic!("{dispatch:?} for {errand:?}"),
        }
        let known = self.legs.insert(dispatch.leg, dispatch);
        assert!(known.is_none(), "{dispatch:?} is sent twice");
    }

    fn dispatch(&mut self, dispatch: Dispatch) {
        let LegId { request, attempt, leg } = dispatch.leg;
        if request >= Errand::FIRST_ID {
            return self.dispatch_errand(dispatch);
        }
        assert!(
            self.live.contains_key(&request),
            "{dispatch:?} for a request that has ended"
        );
        assert!(
            self.legs.keys().all(|other| other.request != request),
            "{dispatch:?} beside another leg"
        );
        let decision = self.decision(request);
        assert_eq!(decision.attempt, attempt, "a leg without a decision");
        let fetch = decision.fetch;
        let history = matches!(leg, Leg::Lend | Leg::Fetch);
        assert_eq!(
            dispatch.prefix_tokens,
            fetch.filter(|_| history).map(|fetch| fetch.tokens)
        );
        match (leg, dispatch.kv) {
            (Leg::Lend, KvUse::Export) => assert_eq!(fetch.map(|fetch| fetch.from), Some(dispatch.worker)),
            (Leg::Fetch, KvUse::Import { from }) => {
                let ends = (fetch.map(|fetch| fetch.from), decision.prefill);
                assert_eq!(ends, (Some(from), Some(dispatch.worker)));
                let lent = dispatch.leg.sibling(Leg::Lend);
                assert!(self.prefilled.contains(&lent), "{dispatch:?} before its KV is ready");
            }
            (Leg::Prefill, KvUse::Export) => assert_eq!(decision.prefill, Some(dispatch.worker)),
            (Leg::Decode, KvUse::Local) => assert_eq!((decision.prefill, decision.decode), (None, dispatch.worker)),
            (Leg::Decode, KvUse::Import { from }) => {
                assert_eq!((decision.prefill, decision.decode), (Some(from), dispatch.worker));
                let prefill = dispatch.leg.sibling(Leg::Prefill);
                assert!(self.prefilled.contains(&prefill), "{dispatch:?} before its KV is ready");
            }
            (Leg::Lend | Leg::Prefill, KvUse::Local | KvUse::Import { .. })
            | (Leg::Fetch, KvUse::Local | KvUse::Export)
            | (Leg::Decode, KvUse::Export) => panic!("{dispatch:?}"),
        }
        assert!(
            self.legs.insert(dispatch.leg, dispatch).is_none(),
            "{dispatch:?} is sent twice"
        );
    }

    fn end(&mut self, request: RequestId, how: &'static str) {
        assert!(
            self.live.remove(&request).is_some(),
            "{request} ended as {:?}, then {how}",
            self.ended.get(&request)
        );
        self.ended.insert(request, how);
        self.cancelled.retain(|leg| leg.request != request);
    }

    fn assert_no_legs(&self, request: RequestId) {
        assert!(
            self.legs.keys().all(|leg| leg.request != request),
            "{request} has ended and has legs out"
        );
    }
}

pub fn worker(id: u32, role: Role) -> WorkerInfo {
    WorkerInfo {
        id: WorkerId(id),
        name: format!("w{id}"),
        role,
        epoch: BootEpoch(1),
        kv_tokens: 100_000,
        max_context_tokens: 50_000,
        transfers: true,
        kv_events: false,
        abilities: Abilities::default(),
    }
}

pub fn workers(roles: &[Role]) -> Vec<WorkerInfo> {
    (0..).zip(roles).map(|(id, role)| worker(id, *role)).collect()
}

/// A prompt of `shared` blocks of boilerplate and `own` blocks of a conversation.
pub fn prompt(conversation: u64, shared: u32, own: u32) -> Prompt {
    let boilerplate = (0..shared).map(|index| BlockHash(u128::from(index) | 1 << 100));
    let history = (0..own).map(|index| BlockHash(u128::from(conversation) << 32 | u128::from(index) | 1 << 101));
    let blocks: Vec<_> = boilerplate.chain(history).collect();
    Prompt::new(blocks, (shared + own) * BLOCK + 3, BLOCK)
}
