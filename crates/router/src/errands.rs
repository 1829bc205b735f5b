//! Errands: KV that is carried to a worker while no client waits for it.
//!
//! There are two reasons for one. A session's next turn had better be served elsewhere than where its KV lies: what is
//! carried in the gap before that turn costs the turn nothing (`gap`). And what many sessions begin with is to lie at every
//! decode worker, so that none has to be chosen for it (`base`). Both are the same deed: the first whole blocks of a prompt that some
//! turn had are lent by who holds them and fetched by who lacks them, or computed there.
//!
//! Here is what is remembered of them: those under way (`life`), sessions whose turn has ended and that nobody has looked at yet
//! (`wishes`), what counts as base content (`base`), and what is left alone for a while (`rests`), each bounded. What is worth carrying
//! is the policy's business, and whether there is room for it the router's (`router/errands.rs`).

mod base;
mod life;
mod rests;
mod wishes;

pub(crate) use base::{BaseContent, Beginning};
pub(crate) use life::{Next, Phase, Signal, step};
pub(crate) use rests::{Rests, Subject};
pub(crate) use wishes::Wishes;

use crate::action::{Errand, ErrandKind, ErrandOutcome};
use homing_kv::Prompt;
use homing_units::{Instant, RequestId, SessionId, WorkerId};
use serde::Serialize;
use std::collections::BTreeMap;

/// The weight of the newest turn in the running mean of what turns append is one over this.
const TAIL_MEMORY: u32 = 16;

/// Tokens that a turn is taken to append before any was seen: of coding-agent turns about half append less.
const FIRST_TAIL_TOKENS: u32 = 1_024;

/// All that is remembered of errands.
#[derive(Debug)]
pub(crate) struct Errands {
    under_way: BTreeMap<RequestId, UnderWay>,
    next: u64,
    pub(crate) wishes: Wishes,
    pub(crate) base: BaseContent,
    pub(crate) rests: Rests,
    /// A running mean of the tokens that turns append to their session's prompt.
    tail_tokens: u32,
    /// When a turn last came: nothing is carried for a fleet that nobody uses.
    pub(crate) last_turn: Option<Instant>,
    /// Something is to be looked at by the end of this event.
    pub(crate) due: bool,
    totals: BTreeMap<(ErrandKind, ErrandOutcome), Total>,
}

/// An errand under way.
#[derive(Clone, Debug)]
pub(crate) struct UnderWay {
    pub(crate) errand: Errand,
    pub(crate) phase: Phase,
    /// What is carried.
    pub(crate) prefix: Prompt,
    /// What is left alone for a while when it is over.
    pub(crate) subject: Subject,
}

/// Errands of one kind that ended one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Total {
    count: u64,
    tokens: u64,
}

/// Errands of one kind that ended one way, as operators see them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ErrandTotal {
    /// Why they were run.
    pub kind: ErrandKind,
    /// How they ended.
    pub outcome: ErrandOutcome,
    /// How many.
    pub count: u64,
    /// Tokens that they were to carry, or carried.
    pub tokens: u64,
}

impl Default for Errands {
    fn default() -> Self {
        Self {
            under_way: BTreeMap::new(),
            next: Errand::FIRST_ID.0,
            wishes: Wishes::default(),
            base: BaseContent::default(),
            rests: Rests::default(),
            tail_tokens: FIRST_TAIL_TOKENS,
            last_turn: None,
            due: false,
            totals: BTreeMap::new(),
        }
    }
}

impl Errands {
    /// The id of the next errand.
    pub(crate) const fn next_id(&self) -> RequestId {
        RequestId(self.next)
    }

    /// An errand with that id begins.
    pub(crate) fn begin(&mut self, under_way: UnderWay) {
        assert_eq!(under_way.errand.errand, self.next_id(), "an id is used once");
        self.next += 1;
        self.under_way.insert(under_way.errand.errand, under_way);
    }

    pub(crate) fn get(&self, id: RequestId) -> Option<&UnderWay> {
        self.under_way.get(&id)
    }

    /// An errand has come further.
    pub(crate) fn enter(&mut self, id: RequestId, phase: Phase) {
        if let Some(under_way) = self.under_way.get_mut(&id) {
            under_way.phase = phase;
        }
    }

    /// An errand is over.
    pub(crate) fn end(&mut self, id: RequestId, outcome: ErrandOutcome) -> Option<UnderWay> {
        let ended = self.under_way.remove(&id)?;
        let total = self.totals.entry((ended.errand.kind, outcome)).or_default();
        total.count += 1;
        total.tokens += u64::from(ended.errand.tokens);
        Some(ended)
    }

    /// Those under way, by id.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &UnderWay> {
        self.under_way.values()
    }

    pub(crate) fn len(&self) -> usize {
        self.under_way.len()
    }

    /// Whether this worker has part in one.
    pub(crate) fn involves(&self, worker: WorkerId) -> bool {
        self.iter().any(|under_way| under_way.involves(worker))
    }

    /// Those for a session's next turn.
    pub(crate) fn of_session(&self, session: SessionId) -> Vec<RequestId> {
        let of =
            |under_way: &&UnderWay| under_way.errand.kind == ErrandKind::Gap && under_way.errand.session == session;
        self.iter()
            .filter(of)
            .map(|under_way| under_way.errand.errand)
            .collect()
    }

    /// A turn has so many tokens after its session's history.
    pub(crate) fn learn_tail(&mut self, tokens: u32) {
        let (old, memory) = (u64::from(self.tail_tokens), u64::from(TAIL_MEMORY));
        let mean = (old * (memory - 1) + u64::from(tokens) + memory / 2) / memory;
        self.tail_tokens = u32::try_from(mean.max(1)).unwrap_or(u32::MAX);
    }

    /// Tokens that a turn appends, about.
    pub(crate) const fn tail_tokens(&self) -> u32 {
        self.tail_tokens
    }

    /// Nothing is known any more of what lies at a worker.
    pub(crate) fn forget_worker(&mut self, worker: WorkerId) {
        self.rests.forget_worker(worker);
    }

    /// How many ended how, by kind.
    pub(crate) fn totals(&self) -> Vec<ErrandTotal> {
        let total = |(&(kind, outcome), total): (&(ErrandKind, ErrandOutcome), &Total)| ErrandTotal {
            kind,
            outcome,
            count: total.count,
            tokens: total.tokens,
        };
        self.totals.iter().map(total).collect()
    }

    pub(crate) fn check_invariants(&self, most: usize) {
        assert!(self.under_way.len() <= most, "errands are bounded");
        for under_way in self.iter() {
            let others = self
                .iter()
                .filter(|other| other.errand.errand != under_way.errand.errand);
            let ends = [under_way.errand.from, Some(under_way.errand.to)];
            for other in others {
                let shares = ends.into_iter().flatten().any(|worker| other.involves(worker));
                assert!(!shares, "a worker has part in one errand: {under_way:?} {other:?}");
            }
            assert_ne!(
                under_way.errand.from,
                Some(under_way.errand.to),
                "nothing is carried in place"
            );
            let computes = under_way.errand.from.is_none();
            assert_eq!(computes, under_way.phase == Phase::Computing, "{under_way:?}");
        }
        self.wishes.check_invariants();
        self.base.check_invariants();
        self.rests.check_invariants();
    }
}

impl UnderWay {
    /// Whether a leg of it runs, or will run, at this worker.
    pub(crate) fn involves(&self, worker: WorkerId) -> bool {
        self.errand.to == worker || self.errand.from == Some(worker)
    }
}
