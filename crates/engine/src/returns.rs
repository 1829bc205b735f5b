//! What the engine learns of the sessions that it serves: whether and when they come back, to it. What it evicts goes by that.
//!
//! It sees for itself, and is told no more than whose a request is: so what it knows holds of its own cache, under any router and
//! any policy. A session that goes on elsewhere does not come back here, and its KV is worth accordingly.
//!
//! Learnt is a life table ([`homing_kv::returns`]) for each class of sessions: the kind of client, and whether the session has never come
//! back yet, once, or more often. Whoever came back comes back: much of what a coding agent sends besides its main thread (titles,
//! summaries, sub-agents) is asked once. A kind counts as all do, and a class as its kind does, until it has shown itself.
//!
//! It also keeps what each session's last context was. One that does not go on with that (it has rewritten its history, or left out what
//! it had thought) has superseded the rest of it.
//!
//! It knows no block and no cost; the cache does.

use crate::api::Owner;
use homing_kv::returns::{BINS, Hazards, LifeTable, bin_end, bin_of};
use homing_kv::{BlockHash, CLASSES, Densities, UNKNOWN};
use homing_units::{Instant, SessionId};
use std::collections::{BTreeMap, BTreeSet};

/// Kinds of clients that are told apart.
const KINDS: usize = CLASSES / STAGES;

/// The first class of the first kind.
const FIRST_CLASS: usize = UNKNOWN as usize + 1;

/// Never came back, once, more often.
const STAGES: usize = 3;

/// Sessions that are remembered while they are away; the one that is away for longest is forgotten first.
const SESSIONS: usize = 4_096;

/// What is taken to be so before anything was seen counts like so many sessions.
const BEFORE: f64 = 8.0;

/// What all kinds do counts like so many sessions of each kind, and what a kind does like so many of each of its classes.
const LIKE_ALL: f64 = 16.0;

/// After so many fates what follows from them is worked out again.
const STALE: u32 = 64;

/// What is learnt of returns.
#[derive(Debug)]
pub(crate) struct Returns {
    all: LifeTable,
    kinds: [LifeTable; KINDS],
    classes: [LifeTable; CLASSES],
    sessions: BTreeMap<SessionId, Session>,
    /// Those that are away, by when they left.
    away: BTreeSet<(Instant, SessionId)>,
    /// When one has been away for longer than its bin.
    changing: BTreeSet<(Instant, SessionId)>,
    /// Whose context is kept, the oldest first.
    contexts: BTreeMap<u64, SessionId>,
    next_context: u64,
    context_blocks: usize,
    context_blocks_max: usize,
    /// Fates since the densities were worked out.
    news: u32,
}

/// A session that had a request here.
#[derive(Clone, Debug, Default)]
struct Session {
    class: u8,
    /// Times that it came back.
    returns: u32,
    /// Requests of it that are here.
    here: u32,
    left: Instant,
    bin: usize,
    /// The blocks of its last request's prompt and answer.
    context: Vec<BlockHash>,
    /// Its place among the contexts.
    context_number: u64,
}

impl Returns {
    /// Contexts of up to so many blocks together are kept.
    pub(crate) fn new(context_blocks_max: usize) -> Self {
        Self {
            all: LifeTable::default(),
            kinds: std::array::from_fn(|_| LifeTable::default()),
            classes: std::array::from_fn(|_| LifeTable::default()),
            sessions: BTreeMap::new(),
            away: BTreeSet::new(),
            changing: BTreeSet::new(),
            contexts: BTreeMap::new(),
            next_context: 0,
            context_blocks: 0,
            context_blocks_max,
            news: 0,
        }
    }

    /// A request of a session has come.
    pub(crate) fn arrives(&mut self, now: Instant, owner: Owner) {
        let session = self.sessions.entry(owner.session).or_default();
        session.here += 1;
        let (class, left) = (session.class, session.left);
        if self.away.remove(&(left, owner.session)) {
            self.passes_until(owner.session, now);
            let session = self.sessions.get_mut(&owner.session).expect("it is here");
            session.returns = session.returns.saturating_add(1);
            let bin = session.bin;
            self.each(class, |table| table.returns(bin));
            self.news += 1;
        }
        let session = self.sessions.get_mut(&owner.session).expect("it is here");
        let kind = Some(usize::from(owner.kind)).filter(|kind| *kind < KINDS).unwrap_or(0);
        let stage = (session.returns as usize).min(STAGES - 1);
        session.class = u8::try_from(FIRST_CLASS + kind * STAGES + stage).expect("there are few classes");
    }

    /// A request of a session has gone, with this as its context, if it was answered. Returns a context that is superseded by it.
    pub(crate) fn leaves(&mut self, now: Instant, id: SessionId, context: Option<Vec<BlockHash>>) -> Vec<BlockHash> {
        let session = self.sessions.get_mut(&id).expect("it came before it goes");
        session.here -= 1;
        if session.here > 0 {
            return Vec::new();
        }
        (session.left, session.bin) = (now, 0);
        let class = session.class;
        self.each(class, LifeTable::leaves);
        self.away.insert((now, id));
        self.plans_next_bin(id);
        let superseded = context.map_or_else(Vec::new, |context| self.replace_context(id, context));
        self.forget_the_longest_away();
        superseded
    }

    /// Of which class a session is, if it is remembered.
    pub(crate) fn class(&self, session: SessionId) -> Option<u8> {
        self.sessions.get(&session).map(|session| session.class)
    }

    /// What follows from what was learnt, if that is more than was known.
    pub(crate) fn densities(&mut self, now: Instant) -> Option<Densities> {
        while let Some((at, id)) = self.changing.first().copied()
            && at <= now
        {
            self.passes_until(id, now);
            self.plans_next_bin(id);
        }
        if self.news < STALE {
            return None;
        }
        self.news = 0;
        let of_all = self.all.hazards(&Hazards::before(), BEFORE);
        let mut densities: Densities = Box::new([[0.0; BINS]; CLASSES]);
        let (unknown, known) = densities.split_at_mut(FIRST_CLASS);
        unknown.fill(of_all.densities());
        for (kind, classes) in known.chunks_mut(STAGES).enumerate() {
            let of_kind = self.kinds[kind].hazards(&of_all, LIKE_ALL);
            for (stage, density) in classes.iter_mut().enumerate() {
                let table = &self.classes[FIRST_CLASS + kind * STAGES + stage];
                *density = table.hazards(&of_kind, LIKE_ALL).densities();
            }
        }
        Some(densities)
    }

    /// It has been away until now.
    fn passes_until(&mut self, id: SessionId, now: Instant) {
        let session = self.sessions.get_mut(&id).expect("whoever is away is remembered");
        let bin = bin_of(now.saturating_since(session.left));
        let (before, class) = (std::mem::replace(&mut session.bin, bin), session.class);
        if let Some(end) = bin_end(before) {
            self.changing.remove(&(session.left + end, id));
        }
        for passed in before..bin {
            self.each(class, |table| table.passes(passed));
            self.news += 1;
        }
    }

    fn plans_next_bin(&mut self, id: SessionId) {
        let session = &self.sessions[&id];
        if let Some(end) = bin_end(session.bin) {
            self.changing.insert((session.left + end, id));
        }
    }

    /// Keeps a session's context; returns the one before if this one begins like it and goes another way.
    fn replace_context(&mut self, id: SessionId, context: Vec<BlockHash>) -> Vec<BlockHash> {
        let session = self.sessions.get_mut(&id).expect("it has just left");
        self.context_blocks += context.len();
        let before = std::mem::replace(&mut session.context, context);
        self.context_blocks -= before.len();
        if self.contexts.get(&session.context_number) == Some(&id) {
            self.contexts.remove(&session.context_number);
        }
        session.context_number = self.next_context;
        self.contexts.insert(self.next_context, id);
        self.next_context += 1;
        let begins_alike = before
            .first()
            .is_some_and(|first| session.context.first() == Some(first));
        let shorter = before.len().min(session.context.len());
        let forks = begins_alike && before[..shorter].last() != session.context[..shorter].last();
        while self.context_blocks > self.context_blocks_max
            && let Some(oldest) = self.contexts.first_key_value().map(|(_, id)| *id)
        {
            self.drop_context(oldest);
        }
        if forks { before } else { Vec::new() }
    }

    fn drop_context(&mut self, id: SessionId) {
        let session = self.sessions.get_mut(&id).expect("whose context is kept is remembered");
        self.context_blocks -= std::mem::take(&mut session.context).len();
        if self.contexts.get(&session.context_number) == Some(&id) {
            self.contexts.remove(&session.context_number);
        }
    }

    fn forget_the_longest_away(&mut self) {
        while self.away.len() > SESSIONS
            && let Some((_, id)) = self.away.pop_first()
        {
            self.drop_context(id);
            let session = self.sessions.remove(&id).expect("whoever is away is remembered");
            if let Some(end) = bin_end(session.bin) {
                self.changing.remove(&(session.left + end, id));
            }
            self.each(session.class, |table| table.is_forgotten(session.bin));
            self.news += 1;
        }
    }

    /// Checks what must hold between two calls, given how many requests of each session are here.
    ///
    /// # Panics
    /// If something does not hold, which is a bug here.
    pub(crate) fn check_invariants(&self, here: &BTreeMap<SessionId, u32>) {
        let said: BTreeMap<SessionId, u32> = self.sessions.iter().map(|(id, session)| (*id, session.here)).collect();
        let away = self.sessions.iter().filter(|(_, session)| session.here == 0);
        let away: BTreeSet<_> = away.map(|(id, session)| (session.left, *id)).collect();
        assert_eq!(self.away, away, "a session is away while no request of it is here");
        let here_too: BTreeMap<_, _> = said.into_iter().filter(|(_, count)| *count > 0).collect();
        assert_eq!(&here_too, here, "each request of a session is counted");
        let changing = away
            .iter()
            .filter_map(|(left, id)| Some((*left + bin_end(self.sessions[id].bin)?, *id)));
        assert_eq!(self.changing, changing.collect(), "whoever is away is looked at again");
        assert_eq!(self.all.away() as usize, away.len(), "each that is away is in a table");
        let blocks: usize = self.sessions.values().map(|session| session.context.len()).sum();
        assert_eq!(self.context_blocks, blocks, "the contexts' blocks add up");
        assert!(
            blocks <= self.context_blocks_max && away.len() <= SESSIONS,
            "what is remembered is bounded"
        );
    }

    fn each(&mut self, class: u8, change: impl Fn(&mut LifeTable)) {
        change(&mut self.all);
        change(&mut self.kinds[(usize::from(class) - FIRST_CLASS) / STAGES]);
        change(&mut self.classes[usize::from(class)]);
    }
}
