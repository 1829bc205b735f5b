//! Whose KV is in the cache: for each session that had a request here, the blocks of its last context, and how many of them, from
//! the first on, are cached still.
//!
//! It is kept where somebody may ask for sketches ([`homing_kv::Sketch`]) and nowhere else: an engine that was not told to remember sessions
//! remembers none. To note a request's end costs a copy of its block hashes; to look costs a bisection for each session, and no
//! eviction costs anything here.
//!
//! A session with a request here is left out of what is told: its blocks come and go. So is one whose context is longer than a sketch may be.
//!
//! It does not decide what is evicted; `returns.rs`, which does, has contexts of its own, because it is bounded otherwise.

use crate::cache::Cache;
use homing_kv::{BlockHash, SKETCH_BLOCKS_MAX, Sketch};
use homing_units::SessionId;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What is remembered of sessions for those who ask what is resident.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResidentLimits {
    /// Sessions; the one that had no request for the longest time is forgotten first.
    pub sessions: usize,
    /// Blocks of all their contexts together, 16 bytes each.
    pub blocks: usize,
}

impl ResidentLimits {
    /// Those of a worker with a pool of so many blocks: as many sessions as a router takes sketches of, and contexts of twice the pool,
    /// since what sessions share is in the context of each.
    #[must_use]
    pub const fn of_pool(blocks: u32) -> Self {
        Self {
            sessions: 1_024,
            blocks: 2 * blocks as usize,
        }
    }
}

/// What is cached of a session's last context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resident {
    /// Whose.
    pub session: SessionId,
    /// The blocks of its last prompt and answer.
    pub context: Arc<[BlockHash]>,
    /// How many of them are of the prompt.
    pub prompt_blocks: u32,
    /// How many of them, from the first on, are cached.
    pub cached_blocks: u32,
}

impl Resident {
    /// What is cached of it, to be told.
    ///
    /// # Panics
    /// Never: a longer context than a sketch may have is not remembered.
    #[must_use]
    pub fn sketch(&self) -> Sketch {
        Sketch::of(&self.context[..self.cached_blocks as usize]).expect("a context is no longer than a sketch")
    }

    /// How many blocks of its last prompt are cached, and the last of these as [`BlockHash::wire`] has it (0 where there is none): by it a
    /// session is known that has no name.
    #[must_use]
    pub fn tip(&self) -> (u32, u64) {
        let blocks = self.cached_blocks.min(self.prompt_blocks);
        let last = blocks.checked_sub(1).map(|last| self.context[last as usize]);
        (blocks, last.map_or(0, BlockHash::wire))
    }
}

/// The sessions that had a request here.
#[derive(Debug)]
pub(crate) struct Residents {
    limits: ResidentLimits,
    sessions: BTreeMap<SessionId, Session>,
    /// Those with a context, the one without a request for the longest time first.
    by_age: BTreeMap<u64, SessionId>,
    blocks: usize,
    next_age: u64,
    /// Changes with each arrival and each end.
    version: u64,
}

#[derive(Debug, Default)]
struct Session {
    /// Requests of it that are here.
    here: u32,
    context: Option<Context>,
}

#[derive(Debug)]
struct Context {
    blocks: Arc<[BlockHash]>,
    prompt_blocks: u32,
    age: u64,
}

impl Residents {
    pub(crate) const fn new(limits: ResidentLimits) -> Self {
        Self {
            limits,
            sessions: BTreeMap::new(),
            by_age: BTreeMap::new(),
            blocks: 0,
            next_age: 0,
            version: 0,
        }
    }

    /// A request of this session has come.
    pub(crate) fn arrives(&mut self, session: SessionId) {
        self.sessions.entry(session).or_default().here += 1;
        self.version += 1;
    }

    /// A request of this session has gone, with so much of its tokens as its context.
    pub(crate) fn leaves(&mut self, id: SessionId, context: &[BlockHash], prompt_blocks: usize) {
        self.version += 1;
        // One that came before anybody asked to remember sessions is new here.
        let session = self.sessions.entry(id).or_default();
        session.here = session.here.saturating_sub(1);
        self.drop_context(id);
        if context.len() <= SKETCH_BLOCKS_MAX as usize {
            self.keep(id, context, prompt_blocks);
        }
        self.forget_idle(id);
        while (self.by_age.len() > self.limits.sessions || self.blocks > self.limits.blocks)
            && let Some(oldest) = self.by_age.first_key_value().map(|(_, id)| *id)
        {
            self.drop_context(oldest);
            self.forget_idle(oldest);
        }
    }

    /// What is cached of each session without a request here, the latest first.
    pub(crate) fn look(&self, cache: &Cache) -> Vec<Resident> {
        let resident = |id: &SessionId| {
            let session = &self.sessions[id];
            let context = session.context.as_ref().filter(|_| session.here == 0)?;
            let cached = cache.pool().match_prefix(&context.blocks);
            Some(Resident {
                session: *id,
                context: Arc::clone(&context.blocks),
                prompt_blocks: context.prompt_blocks,
                cached_blocks: u32::try_from(cached).expect("a context is no longer than a sketch"),
            })
        };
        self.by_age.values().rev().filter_map(resident).collect()
    }

    pub(crate) const fn version(&self) -> u64 {
        self.version
    }

    fn keep(&mut self, id: SessionId, context: &[BlockHash], prompt_blocks: usize) {
        let age = self.next_age;
        self.next_age += 1;
        self.blocks += context.len();
        self.by_age.insert(age, id);
        let session = self.sessions.get_mut(&id).expect("whose context is kept is remembered");
        session.context = Some(Context {
            blocks: context.into(),
            prompt_blocks: u32::try_from(prompt_blocks.min(context.len()))
                .expect("a context is no longer than a sketch"),
            age,
        });
    }

    fn drop_context(&mut self, id: SessionId) {
        let dropped = self.sessions.get_mut(&id).and_then(|session| session.context.take());
        if let Some(context) = dropped {
            self.by_age.remove(&context.age);
            self.blocks -= context.blocks.len();
        }
    }

    fn forget_idle(&mut self, id: SessionId) {
        let idle = |session: &Session| session.here == 0 && session.context.is_none();
        if self.sessions.get(&id).is_some_and(idle) {
            self.sessions.remove(&id);
        }
    }

    /// Checks what must hold between two calls.
    ///
    /// # Panics
    /// If something does not hold, which is a bug here.
    pub(crate) fn check_invariants(&self) {
        let kept = || {
            self.sessions
                .iter()
                .filter_map(|(id, session)| Some((*id, session.context.as_ref()?)))
        };
        let by_age: BTreeMap<u64, SessionId> = kept().map(|(id, context)| (context.age, id)).collect();
        assert_eq!(self.by_age, by_age, "each context has an age");
        assert_eq!(
            self.blocks,
            kept().map(|(_, context)| context.blocks.len()).sum::<usize>(),
            "the contexts' blocks add up"
        );
        assert!(
            self.by_age.len() <= self.limits.sessions && self.blocks <= self.limits.blocks,
            "what is remembered is bounded"
        );
        let idle = self.sessions.values().filter(|session| session.here == 0);
        assert_eq!(
            idle.filter(|session| session.context.is_none()).count(),
            0,
            "nobody is remembered for nothing"
        );
    }
}
