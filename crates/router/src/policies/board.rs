//! What a policy sees, and what it answers. All of it is computed before the policy is asked; nothing of it is live.

use crate::action::{Candidate, Fetch, Path};
use crate::admission::{Account, Denied};
use crate::event::{Leg, Role};
use crate::speed::Speed;
use homing_kv::BlockHash;
use homing_units::{Duration, RequestId, SessionId, WorkerId};
use std::collections::BTreeMap;

/// The fleet, as far as one turn is concerned.
#[derive(Clone, Debug, Default)]
pub struct Board {
    /// All workers, by id.
    pub workers: Vec<WorkerView>,
    /// What is known of links that have transfers on them or that failed lately, from prefill to decode worker.
    pub links: BTreeMap<(WorkerId, WorkerId), LinkView>,
}

/// A link between two workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkView {
    /// Transfers that are on their way or will be.
    pub transfers: u32,
    /// Failures in a row, the last of them lately.
    pub failures: u32,
    /// No transfer has come through since its last failure, however long that is ago.
    pub on_trial: bool,
}

impl LinkView {
    /// Whether to leave it alone while another will do: it failed lately, or is being tried by another transfer.
    #[must_use]
    pub const fn is_doubtful(&self) -> bool {
        self.failures > 0 || (self.on_trial && self.transfers > 0)
    }
}

/// A worker, as far as one turn is concerned.
#[derive(Clone, Debug)]
pub struct WorkerView {
    /// Its id.
    pub id: WorkerId,
    /// What it may do.
    pub role: Role,
    /// Whether it can give and take KV.
    pub transfers: bool,
    /// Size of its pool in tokens.
    pub kv_tokens: u64,
    /// What the router has in flight there.
    pub account: Account,
    /// Requests that it says are in its batch; 0 where it says nothing.
    pub running: u32,
    /// Requests that it says wait for a place in its batch; 0 where it says nothing.
    pub waiting: u32,
    /// Requests that it says wait for KV from another worker; 0 where it says nothing.
    pub transfer_queue: u32,
    /// Requests that it says lost their blocks and wait to run again; 0 where it says nothing.
    pub retracted: u32,
    /// Tokens of its pool that it says requests (or pinned sessions) hold; 0 where it says nothing.
    pub kv_tokens_used: u64,
    /// Decode legs that it was ever given.
    pub assigned_requests: u64,
    /// Running mean of the time to first token of requests that it decoded, in seconds; `None` before the first.
    pub recent_ttft_s: Option<f64>,
    /// Sessions that live there.
    pub homed_sessions: u32,
    /// Tokens of the last prompts of those that were used lately.
    pub live_tokens: u64,
    /// Tokens that these are expected to want of its pool, what others show too left out: all of those with a turn in flight,
    /// and of the others the share that comes back as a rule; without this turn's own session.
    pub live_own_tokens: u64,
    /// Sessions that live there and were used lately; without this turn's own.
    pub live_sessions: u32,
    /// Tokens of its pool that its events say are cached; 0 where it says nothing.
    pub cached_tokens: u64,
    /// Whether it is known to keep in its host's memory what its pool evicts.
    pub spills: bool,
    /// Seconds that it has been at work on the first of the prefill that is pending there; nothing where none is.
    pub prefilling_s: f64,
    /// How fast it is.
    pub speed: Speed,
    /// Tokens of this prompt in its accelerator's memory.
    pub resident_tokens: u32,
    /// More of them in its host's memory.
    pub host_tokens: u32,
    /// Those of them that are the session family's own, shared ones in part; 0 for a new family.
    pub exclusive_tokens: u32,
    /// Why it cannot decode this turn with a prefill of its own (`append`, `local`).
    pub denies_alone: Option<Denied>,
    /// Why it cannot decode this turn with KV from elsewhere.
    pub denies_seed: Option<Denied>,
    /// Why it cannot prefill this turn for another.
    pub denies_prefill: Option<Denied>,
    /// Why it cannot lend another what it holds of this prompt.
    pub denies_lend: Option<Denied>,
    /// Why it cannot hand over what it holds of this turn, whatever its role; it computes what it lacks itself.
    pub denies_export: Option<Denied>,
}

/// A turn.
#[derive(Clone, Copy, Debug)]
pub struct TurnView {
    /// The request.
    pub request: RequestId,
    /// Its session.
    pub session: SessionId,
    /// Turns of its session before this one.
    pub turn_index: u32,
    /// Its prompt's length.
    pub prompt_tokens: u32,
    /// Tokens to generate at most.
    pub max_output_tokens: u32,
    /// Tokens that the router expects to be generated: a running mean, at most `max_output_tokens`.
    pub expected_output_tokens: u32,
    /// Further turns that a session has after one of its turns, on average, as learnt.
    pub expected_turns: f64,
    /// Seconds between the turns of sessions that come back soon, on average, as learnt.
    pub expected_gap_s: f64,
    /// The share of idle sessions that come back, as learnt.
    pub return_share: f64,
    /// Tokens of a block.
    pub block_size: u32,
    /// Tokens at the prompt's beginning that other families show too: boilerplate, as far as it is known.
    pub shared_tokens: u32,
    /// Tokens at the prompt's beginning that the session's prompt before it had too; 0 for its first.
    pub history_tokens: u32,
    /// The hash of the prompt's first block, and of the last block within its first 256 tokens; `None` where it has no
    /// whole block.
    pub prefix: Option<(BlockHash, BlockHash)>,
    /// Nothing of this family was seen before: whatever lies somewhere is boilerplate.
    pub new_family: bool,
    /// The session's KV was on a decode worker once.
    pub was_resident: bool,
    /// The decode worker of the session's last plan, as long as that one lives.
    pub home: Option<WorkerId>,
    /// Its KV was carried there since its last turn, as somebody had decided.
    pub carried: bool,
    /// How long the turn has waited.
    pub waited: Duration,
    /// Whether KV may be moved for it; not when that failed too often.
    pub may_transfer: bool,
    /// Whether its prefill worker may pull the history first; not where that is switched off, or has failed for this turn.
    pub may_fetch: bool,
}

/// Who does what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// How.
    pub path: Path,
    /// Where the prefill leg goes, if there is one.
    pub prefill: Option<WorkerId>,
    /// Where the decode leg goes.
    pub decode: WorkerId,
    /// What the prefill worker pulls before it prefills; only in a plan with a prefill leg (see [`Board::fetchable`]).
    pub fetch: Option<Fetch>,
}

impl Plan {
    /// Where a leg of it goes; `None` where it has no such leg.
    #[must_use]
    pub fn worker_of(&self, leg: Leg) -> Option<WorkerId> {
        match leg {
            Leg::Lend => self.fetch.map(|fetch| fetch.from),
            Leg::Fetch => self.prefill.filter(|_| self.fetch.is_some()),
            Leg::Prefill => self.prefill,
            Leg::Decode => Some(self.decode),
        }
    }

    /// The link that the KV of a leg takes, or the KV that it holds.
    pub(crate) fn link_of(&self, leg: Leg) -> Option<(WorkerId, WorkerId)> {
        let (from, to) = match leg {
            Leg::Lend | Leg::Fetch => (Leg::Lend, Leg::Fetch),
            Leg::Prefill | Leg::Decode => (Leg::Prefill, Leg::Decode),
        };
        self.worker_of(from).zip(self.worker_of(to))
    }

    /// The same plan, in which the prefill worker pulls this history first.
    ///
    /// # Panics
    /// If nobody prefills elsewhere, or the prefill worker would pull from itself.
    #[must_use]
    pub fn fetching(self, fetch: Fetch) -> Self {
        assert!(
            self.prefill.is_some_and(|prefill| prefill != fetch.from),
            "a history is pulled by a prefill worker, from another: {self:?} {fetch:?}"
        );
        Self {
            fetch: Some(fetch),
            ..self
        }
    }
}

/// What a policy answers.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The plan; `None` where the turn is to wait.
    pub plan: Option<Plan>,
    /// What was considered, best first; the router keeps a bounded number of them.
    pub considered: Vec<Considered>,
    /// Without a plan: the one worker that is waited for; `None` where any will do.
    pub waits_for: Option<WorkerId>,
    /// Without a plan: the turn is not looked at again before this is over, whatever is freed.
    pub pause: Option<Duration>,
    /// Whether the decode worker is to keep the session's KV for its next turn. `false` only where a policy serves a turn
    /// on purpose without giving its session a place; an engine without places of sessions does not care.
    pub keeps_kv: bool,
    /// How long the plan is expected to take from its first leg to the first token, where the policy reckons in seconds.
    pub expected_ttft: Option<Duration>,
    /// Why, in a few words.
    pub reason: String,
}

impl Choice {
    /// Whether waiting helps none of what was considered: no plan, no pause, and every denial is for good.
    #[must_use]
    pub fn is_stuck(&self) -> bool {
        let lasting = |plan: &Considered| plan.denied.is_some_and(Denied::is_lasting);
        self.plan.is_none() && self.pause.is_none() && self.considered.iter().all(lasting)
    }
}

/// A plan that was considered.
#[derive(Clone, Copy, Debug)]
pub struct Considered {
    /// The plan.
    pub plan: Plan,
    /// Tokens of the prompt that its decode worker holds.
    pub resident_tokens: u32,
    /// Lower is better.
    pub score: f64,
    /// Why it is out of the question.
    pub denied: Option<Denied>,
}

impl Choice {
    /// The same, expected to take so many seconds until the first token.
    #[must_use]
    pub fn expecting(self, seconds: f64) -> Self {
        let expected_ttft = seconds.is_finite().then(|| Duration::from_secs_f64(seconds.max(0.0)));
        Self { expected_ttft, ..self }
    }
}

impl Considered {
    /// What is not denied comes first, then what is cheaper.
    #[must_use]
    pub fn by_preference(left: &Self, right: &Self) -> std::cmp::Ordering {
        (left.denied.is_some().cmp(&right.denied.is_some())).then(left.score.total_cmp(&right.score))
    }
}

impl Board {
    /// A worker of the fleet.
    #[must_use]
    pub fn worker(&self, id: WorkerId) -> Option<&WorkerView> {
        let index = self.workers.binary_search_by_key(&id, |worker| worker.id).ok()?;
        self.workers.get(index)
    }

    /// The workers that could decode this turn, now or once they have room: with a prefill of their own or, those whose
    /// engine has none, with another's.
    pub fn decoders(&self) -> impl Iterator<Item = &WorkerView> {
        let lasting = |denied: Option<Denied>| denied.is_some_and(Denied::is_lasting);
        let needs_aid = |worker: &WorkerView| worker.role.decodes() && worker.denies_alone == Some(Denied::Unable);
        self.workers
            .iter()
            .filter(move |worker| !lasting(worker.denies_alone) || (needs_aid(worker) && !lasting(worker.denies_seed)))
    }

    /// A policy's choice, where what was to be done alone by a worker whose engine cannot is done with a prefill worker's
    /// help: the one that has it computed first, over a link that is not in doubt. Policies need not know of such engines.
    #[must_use]
    pub fn aided(&self, mut choice: Choice, turn: &TurnView) -> Choice {
        let Some(first) = choice.considered.first().map(|first| first.plan) else {
            return choice;
        };
        for considered in &mut choice.considered {
            if let Some(aided) = self.aid(considered, turn) {
                *considered = aided;
            }
        }
        let wanted = choice.considered[0];
        if choice.plan.is_none() && wanted.plan != first {
            choice.plan = wanted.denied.is_none().then_some(wanted.plan);
            choice.waits_for = None;
            choice.expected_ttft = None;
            choice.reason = match wanted.denied {
                None => format!("{} cannot prefill, another does", wanted.plan.decode),
                Some(denied) => format!(
                    "{} cannot prefill, and no other may now: {}",
                    wanted.plan.decode,
                    denied.as_str()
                ),
            };
        }
        choice
    }

    /// The same with a prefill worker, where a worker alone is out of the question.
    fn aid(&self, alone: &Considered, turn: &TurnView) -> Option<Considered> {
        let decode = self.worker(alone.plan.decode)?;
        let cannot = alone.plan.prefill.is_none() && decode.denies_alone == Some(Denied::Unable);
        let aided = self.prefillers(decode).filter(|_| cannot).map(|prefill| {
            let ahead = prefill.account.prefill_tokens + u64::from(prefill.lacks(turn));
            let plan = decode.seeded_by(prefill.id, turn);
            let denied = decode.denies_seed.or(prefill.denies_prefill);
            let doubtful = self.link(prefill.id, decode.id).is_doubtful();
            ((doubtful, ahead), Considered { plan, denied, ..*alone })
        });
        let best = aided.min_by_key(|(order, aided)| (aided.denied.is_some(), *order, aided.plan.prefill));
        best.map(|(_, aided)| aided)
    }

    /// The workers that could prefill this turn for `decode`, now or once they have room. A worker that could decode
    /// the turn itself is spared this, unless `decode` is not allowed to prefill all of it.
    pub fn prefillers<'a>(&'a self, decode: &'a WorkerView) -> impl Iterator<Item = &'a WorkerView> {
        let takes = decode.transfers && !decode.denies_seed.is_some_and(Denied::is_lasting);
        self.workers.iter().filter(move |worker| {
            takes
                && worker.id != decode.id
                && !worker.denies_prefill.is_some_and(Denied::is_lasting)
                && (worker.role == Role::Prefill || decode.role == Role::Decode)
        })
    }

    /// The history that `prefill` could pull before it computes this turn for another: of the worker that holds most of the
    /// prompt in its accelerator's memory, beyond what `prefill` has itself. `None` where nobody can lend it more than it
    /// has, or where the link to it failed lately. What it is worth is the policy's business.
    #[must_use]
    pub fn fetchable(&self, prefill: &WorkerView, turn: &TurnView) -> Option<Fetch> {
        if !turn.may_fetch || !prefill.transfers {
            return None;
        }
        // The last token is always computed where the answer begins.
        let most = turn.prompt_tokens.saturating_sub(1);
        let lends = |worker: &&WorkerView| {
            worker.id != prefill.id && worker.denies_lend.is_none() && !self.link(worker.id, prefill.id).is_doubtful()
        };
        let lenders = self.workers.iter().filter(lends).map(|worker| {
            let held = worker.resident_tokens.min(most);
            (held - held % turn.block_size, worker.id)
        });
        let (tokens, from) =
            lenders.max_by_key(|(tokens, id)| (*tokens, turn.home == Some(*id), std::cmp::Reverse(*id)))?;
        (tokens > prefill.held_tokens()).then_some(Fetch { from, tokens })
    }

    /// What is known of a link.
    #[must_use]
    pub fn link(&self, from: WorkerId, to: WorkerId) -> LinkView {
        self.links.get(&(from, to)).copied().unwrap_or_default()
    }
}

impl WorkerView {
    /// Its next room is kept for another turn: whatever it would take, it does not now.
    pub(crate) fn keep(&mut self) {
        for denied in [&mut self.denies_alone, &mut self.denies_seed, &mut self.denies_prefill] {
            *denied = denied.or(Some(Denied::Kept));
        }
    }

    /// Tokens of the prompt that it holds in any tier.
    #[must_use]
    pub const fn held_tokens(&self) -> u32 {
        self.resident_tokens + self.host_tokens
    }

    /// Tokens of the turn's prompt that it lacks.
    #[must_use]
    pub const fn lacks(&self, turn: &TurnView) -> u32 {
        turn.prompt_tokens.saturating_sub(self.held_tokens())
    }

    /// The plan in which it serves the turn alone: `append` where it holds the session's own history.
    #[must_use]
    pub fn alone(&self, turn: &TurnView) -> Plan {
        let appends = !turn.new_family && self.exclusive_tokens > 0;
        Plan {
            path: if appends { Path::Append } else { Path::Local },
            prefill: None,
            decode: self.id,
            fetch: None,
        }
    }

    /// The plan in which `source`, which holds the session's history, hands it over.
    #[must_use]
    pub const fn moved_from(&self, source: WorkerId) -> Plan {
        Plan {
            path: Path::Migrate,
            prefill: Some(source),
            decode: self.id,
            fetch: None,
        }
    }

    /// The plan in which `prefill` computes the turn's prompt for it.
    #[must_use]
    pub const fn seeded_by(&self, prefill: WorkerId, turn: &TurnView) -> Plan {
        let path = if turn.was_resident { Path::Reseed } else { Path::Seed };
        Plan {
            path,
            prefill: Some(prefill),
            decode: self.id,
            fetch: None,
        }
    }
}

impl Considered {
    /// In the form of a decision.
    #[must_use]
    pub fn candidate(&self) -> Candidate {
        Candidate {
            path: self.plan.path,
            prefill: self.plan.prefill,
            decode: self.plan.decode,
            fetch: self.plan.fetch,
            resident_tokens: self.resident_tokens,
            score: self.score,
            forbidden: self.denied.map(|denied| denied.as_str().to_owned()),
        }
    }
}

impl Choice {
    /// The least of what is not denied; the turn waits where all is.
    #[must_use]
    pub fn least(mut considered: Vec<Considered>, reason: impl Into<String>) -> Self {
        considered.sort_by(Considered::by_preference);
        Self::best_of(considered, reason)
    }

    /// The first, which is the best; the turn waits where it is denied.
    #[must_use]
    pub fn best_of(considered: Vec<Considered>, reason: impl Into<String>) -> Self {
        let plan = considered
            .first()
            .filter(|best| best.denied.is_none())
            .map(|best| best.plan);
        let reason = if plan.is_some() {
            reason.into()
        } else {
            "waits: no worker has room".to_owned()
        };
        Self {
            plan,
            considered,
            waits_for: None,
            pause: None,
            keeps_kv: true,
            expected_ttft: None,
            reason,
        }
    }

    /// This plan or none: the turn waits while its worker denies it. What else was considered is for the record.
    #[must_use]
    pub fn only(wanted: Considered, mut others: Vec<Considered>, reason: impl Into<String>) -> Self {
        let decode = wanted.plan.decode;
        let (plan, waits_for, reason) = match wanted.denied {
            None => (Some(wanted.plan), None, reason.into()),
            // With a prefill leg it may be the prefill worker that has no room, and another may have.
            Some(denied) => {
                let waits_for = wanted.plan.prefill.is_none().then_some(decode);
                (None, waits_for, format!("waits for {decode}: {}", denied.as_str()))
            }
        };
        others.insert(0, wanted);
        Self {
            plan,
            considered: others,
            waits_for,
            pause: None,
            keeps_kv: true,
            expected_ttft: None,
            reason,
        }
    }
}
