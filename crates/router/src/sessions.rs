//! Which session a turn belongs to.
//!
//! A client that names its session is believed. For the others the prompt speaks: the deepest block that one family
//! alone owns says whose history it repeats. Blocks of an answer are never used, because a replayed answer rarely
//! equals the generated tokens; all that counts is the prompts themselves.
//!
//! Two prompts that share only boilerplate must not become one session. At first nothing tells boilerplate from
//! history, since one family alone has shown it; but whoever continues a session repeats its whole last prompt, or
//! more than its first prompt. So a match counts only if it reaches that far. Where a first message is shorter than a
//! block this can still take one stranger for a continuation; the next stranger is told apart again.
//!
//! A driver that compares tokens says which earlier prompt a turn continues (`Compared`). Then that decides wherever a match
//! does not reach beyond a first prompt, and no stranger is taken for a continuation.
//!
//! Branches, forks, retries and rewritten history make a family: sessions under one root that own their blocks
//! together. State per session is its last prompt and a few counters; count, blocks and idle time are bounded.

mod audit;
mod away;
mod homed;
mod service;

use away::Away;
pub(crate) use homed::Homed;
pub(crate) use service::Service;

use crate::action::Path;
use crate::event::{ClientKind, Compared, PromptId, SessionHint, Turn};
use crate::learning::Clients;
use crate::sharing::{shared_blocks, shared_tokens};
use homing_kv::{Prompt, ResidencyIndex};
use homing_units::{Duration, Instant, RequestId, SessionId, WorkerId};
use std::collections::{BTreeMap, BTreeSet};

/// All sessions that are remembered.
#[derive(Debug)]
pub(crate) struct Sessions {
    limits: SessionLimits,
    sessions: BTreeMap<SessionId, Session>,
    families: BTreeMap<u64, Family>,
    by_key: BTreeMap<u128, SessionId>,
    /// Whose last prompt it is; of several the latest.
    by_prompt: BTreeMap<PromptId, SessionId>,
    /// Sessions without a turn in flight, longest idle first.
    idle: BTreeSet<(Instant, SessionId)>,
    /// When what is expected of each of them changes next.
    changing: BTreeSet<(Instant, SessionId)>,
    /// Blocks of all last prompts.
    blocks: usize,
    homed: BTreeMap<WorkerId, Homed>,
    clients: Clients,
    next: u64,
}

/// Bounds of what is remembered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionLimits {
    pub(crate) sessions: usize,
    pub(crate) family_sessions: usize,
    pub(crate) blocks: usize,
    pub(crate) idle: Duration,
    /// Idle for so long, a session's tokens are no live demand any more, whatever was learnt of its kind.
    pub(crate) live: Duration,
}

/// A session.
#[derive(Clone, Debug)]
pub(crate) struct Session {
    pub(crate) id: SessionId,
    pub(crate) family: u64,
    pub(crate) key: Option<u128>,
    pub(crate) last: Prompt,
    /// Tokens at its beginning that other families show too.
    shared_tokens: u32,
    /// Whole blocks at its beginning that the session's prompt before it had too: its history.
    pub(crate) history_blocks: u32,
    /// What the driver calls that prompt, if it does.
    last_id: Option<PromptId>,
    /// Turns that have begun.
    pub(crate) turns: u32,
    pub(crate) in_flight: u32,
    pub(crate) last_used: Instant,
    /// It was used so lately that it will want its KV again: its tokens count at its home.
    pub(crate) live: bool,
    /// What its client is.
    pub(crate) kind: ClientKind,
    away: Away,
    /// The decode worker of its last plan, as long as that one lives.
    pub(crate) home: Option<WorkerId>,
    /// Its KV was on some decode worker once: bringing it back is a reseed.
    pub(crate) was_resident: bool,
    /// Plans by path, in the order of [`PATHS`].
    pub(crate) paths: [u32; PATHS.len()],
    /// What its turns have had of workers.
    pub(crate) service: Service,
    /// Its latest turn.
    pub(crate) last_request: Option<RequestId>,
    /// Its KV was carried to its home since its last plan.
    pub(crate) carried: bool,
}

/// The order in which plans are counted.
pub(crate) const PATHS: [Path; 5] = [Path::Append, Path::Seed, Path::Reseed, Path::Migrate, Path::Local];

/// Sessions under one root.
#[derive(Clone, Debug)]
struct Family {
    /// Whole blocks of the first prompt of all: what is shared beyond them is history for sure.
    root_blocks: usize,
    members: Vec<SessionId>,
}

impl Session {
    /// Tokens at the beginning of its last prompt that other families showed too.
    pub(crate) const fn shared_tokens(&self) -> u32 {
        self.shared_tokens
    }

    /// Tokens of its last prompt that no other family shows.
    pub(crate) fn own_tokens(&self) -> u64 {
        u64::from(self.last.tokens - self.shared_tokens)
    }
}

impl Sessions {
    pub(crate) fn new(limits: SessionLimits) -> Self {
        Self {
            limits,
            sessions: BTreeMap::new(),
            families: BTreeMap::new(),
            by_key: BTreeMap::new(),
            by_prompt: BTreeMap::new(),
            idle: BTreeSet::new(),
            changing: BTreeSet::new(),
            blocks: 0,
            homed: BTreeMap::new(),
            clients: Clients::new(limits.live),
            next: 0,
        }
    }

    /// A turn begins: finds or makes its session, and takes the prompt as its last.
    pub(crate) fn begin(&mut self, now: Instant, turn: &Turn, index: &mut ResidencyIndex) -> SessionId {
        let (hint, prompt, compared) = (turn.session, &turn.prompt, turn.compared);
        let id = self
            .find(hint, prompt, compared, index)
            .unwrap_or_else(|kin| self.create(hint, prompt, kin));
        self.comes_back(id, now);
        self.set_live(id, true);
        self.replace_prompt(id, prompt, index);
        self.rename_prompt(id, compared.map(|compared| compared.prompt));
        self.change(id, |session| {
            session.kind = turn.kind;
            session.turns += 1;
            session.in_flight += 1;
            session.last_used = now;
        });
        self.forget_surplus(index);
        id
    }

    /// A turn of it has ended, however it did.
    pub(crate) fn end(&mut self, now: Instant, id: SessionId, index: &mut ResidencyIndex) {
        self.change(id, |session| {
            session.in_flight -= 1;
            session.last_used = now;
            session.live = true;
        });
        if self.sessions[&id].in_flight == 0 {
            self.leaves(id, now);
            self.forget_surplus(index);
        }
    }

    /// A turn of it was planned onto this decode worker.
    pub(crate) fn settle(&mut self, id: SessionId, home: WorkerId, path: Path) {
        self.unhome(id);
        self.set_live(id, true);
        let session = self
            .sessions
            .get_mut(&id)
            .expect("a session with a turn in flight is remembered");
        session.home = Some(home);
        session.carried = false;
        let column = PATHS
            .iter()
            .position(|known| *known == path)
            .expect("all paths are listed");
        session.paths[column] += 1;
        self.homed.entry(home).or_default().add(session);
    }

    /// This is its latest turn.
    pub(crate) fn asked_by(&mut self, id: SessionId, request: RequestId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.last_request = Some(request);
        }
    }

    /// Its KV was carried to this decode worker between two turns: it lives there now.
    pub(crate) fn carried(&mut self, id: SessionId, home: WorkerId) {
        if !self.sessions.contains_key(&id) {
            return;
        }
        self.unhome(id);
        let session = self.sessions.get_mut(&id).expect("it was looked up");
        session.home = Some(home);
        session.carried = true;
        self.homed.entry(home).or_default().add(session);
    }

    /// A turn of it had a place at workers for so long, up to now.
    pub(crate) fn serve(&mut self, now: Instant, id: SessionId, served: Duration, half_life: Duration) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.service.add(now, served, half_life);
        }
    }

    /// Its turn waits until there is room for its KV: until then it asks nothing of the place where it lived.
    pub(crate) fn pause(&mut self, id: SessionId) {
        self.set_live(id, false);
    }

    /// Its KV is on its decode worker now.
    pub(crate) fn resident(&mut self, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.was_resident = true;
        }
    }

    /// Nothing lives at this worker any more.
    pub(crate) fn evacuate(&mut self, worker: WorkerId) {
        self.homed.remove(&worker);
        for session in self.sessions.values_mut() {
            if session.home == Some(worker) {
                session.home = None;
            }
        }
    }

    /// Forgets sessions that were idle for too long.
    pub(crate) fn expire(&mut self, now: Instant, index: &mut ResidencyIndex) {
        while let Some((used, id)) = self.idle.first().copied()
            && now.saturating_since(used) >= self.limits.idle
        {
            self.forget(id, index);
        }
    }

    pub(crate) fn get(&self, id: SessionId) -> Option<&Session> {
        self.sessions.get(&id)
    }

    /// The sessions of its family, itself among them.
    pub(crate) fn kin(&self, id: SessionId) -> &[SessionId] {
        self.sessions
            .get(&id)
            .and_then(|session| self.families.get(&session.family))
            .map_or(&[], |family| &family.members)
    }

    /// What lives at a worker.
    pub(crate) fn homed(&self, worker: WorkerId) -> Homed {
        self.homed.get(&worker).copied().unwrap_or_default()
    }

    /// What is learnt of clients.
    pub(crate) const fn clients(&self) -> &Clients {
        &self.clients
    }

    /// A turn of a client of this kind was answered with so many tokens.
    pub(crate) fn answered(&mut self, kind: ClientKind, output_tokens: u32) {
        self.clients.answers(kind, output_tokens);
    }

    /// What lives at a worker beside this session.
    pub(crate) fn homed_without(&self, worker: WorkerId, session: SessionId) -> Homed {
        let mut homed = self.homed(worker);
        if let Some(session) = self
            .sessions
            .get(&session)
            .filter(|session| session.home == Some(worker))
        {
            homed.remove(session);
        }
        homed
    }

    /// All sessions, by id.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &Session> {
        self.sessions.values()
    }

    pub(crate) fn len(&self) -> usize {
        self.sessions.len()
    }

    /// The session that a turn continues, or else the family that it branches from, if any.
    fn find(
        &self,
        hint: SessionHint,
        prompt: &Prompt,
        compared: Option<Compared>,
        index: &ResidencyIndex,
    ) -> Result<SessionId, Option<u64>> {
        if let SessionHint::Explicit(key) = hint
            && let Some(known) = self.by_key.get(&key)
        {
            return Ok(*known);
        }
        let exact = compared.and_then(|compared| self.continued(compared));
        let (family, nearest) = exact
            .or_else(|| self.recognise(prompt, compared.is_none(), index))
            .ok_or(None)?;
        let nearest = &self.sessions[&nearest];
        // A named session is continued by its name only, and one whose turn is in flight by a retry of that turn only.
        let continues = hint == SessionHint::Recognise
            && nearest.key.is_none()
            && (nearest.in_flight == 0 || nearest.last == *prompt);
        if continues { Ok(nearest.id) } else { Err(Some(family)) }
    }

    /// The session whose last prompt it is or continues, to the token.
    fn continued(&self, compared: Compared) -> Option<(u64, SessionId)> {
        let session = |prompt: PromptId| self.by_prompt.get(&prompt);
        let id = session(compared.prompt).or_else(|| session(compared.continues?))?;
        Some((self.sessions[id].family, *id))
    }

    /// The family whose history the prompt repeats, and the session of it that shares most. `by_length`: repeating all
    /// whole blocks of a last prompt counts, since nobody knows the tokens after them.
    fn recognise(&self, prompt: &Prompt, by_length: bool, index: &ResidencyIndex) -> Option<(u64, SessionId)> {
        let (id, depth) = index.deepest_exclusive(&prompt.blocks)?;
        let family = self.families.get(&id)?;
        let shared = |member: &SessionId| shared_blocks(&self.sessions[member].last.blocks, &prompt.blocks);
        let nearest = *family
            .members
            .iter()
            .max_by_key(|member| (shared(member), std::cmp::Reverse(**member)))?;
        let last = &self.sessions[&nearest].last;
        let repeats_last = by_length && shared(&nearest) == last.blocks.len() && prompt.tokens >= last.tokens;
        (depth > family.root_blocks || repeats_last).then_some((id, nearest))
    }

    /// Makes a session, in `family` if that one lives and has room.
    fn create(&mut self, hint: SessionHint, prompt: &Prompt, family: Option<u64>) -> SessionId {
        let id = SessionId(self.next);
        self.next += 1;
        let room = |family: &u64| self.families[family].members.len() < self.limits.family_sessions;
        let family = family.filter(room).unwrap_or(id.0);
        let root_blocks = prompt.blocks.len();
        self.families
            .entry(family)
            .or_insert(Family {
                root_blocks,
                members: Vec::new(),
            })
            .members
            .push(id);
        let key = match hint {
            SessionHint::Explicit(key) => Some(key),
            SessionHint::Recognise => None,
        };
        if let Some(key) = key {
            self.by_key.insert(key, id);
        }
        let last = Prompt {
            blocks: [].into(),
            tokens: 0,
        };
        let session = Session {
            id,
            family,
            key,
            last,
            shared_tokens: 0,
            history_blocks: 0,
            last_id: None,
            turns: 0,
            in_flight: 0,
            last_used: Instant::ZERO,
            live: true,
            kind: ClientKind::default(),
            away: Away::default(),
            home: None,
            was_resident: false,
            paths: [0; PATHS.len()],
            service: Service::default(),
            last_request: None,
            carried: false,
        };
        self.sessions.insert(id, session);
        id
    }

    fn replace_prompt(&mut self, id: SessionId, prompt: &Prompt, index: &mut ResidencyIndex) {
        let family = self.sessions[&id].family;
        let shared_tokens = shared_tokens(family, prompt, index);
        let history = shared_blocks(&self.sessions[&id].last.blocks, &prompt.blocks);
        let mut last = prompt.clone();
        self.change(id, |session| {
            std::mem::swap(&mut session.last, &mut last);
            session.shared_tokens = shared_tokens;
            session.history_blocks = u32::try_from(history).unwrap_or(u32::MAX);
        });
        let old = last;
        self.blocks = self.blocks + prompt.blocks.len() - old.blocks.len();
        if history == old.blocks.len() {
            index.own(family, &prompt.blocks);
        } else {
            self.own_again(family, index);
        }
    }

    fn rename_prompt(&mut self, id: SessionId, prompt: Option<PromptId>) {
        let session = self
            .sessions
            .get_mut(&id)
            .expect("only sessions that are remembered have prompts");
        let old = std::mem::replace(&mut session.last_id, prompt);
        if let Some(old) = old
            && self.by_prompt.get(&old) == Some(&id)
        {
            self.by_prompt.remove(&old);
        }
        if let Some(prompt) = prompt {
            self.by_prompt.insert(prompt, id);
        }
    }

    /// A family owns the last prompts of its members, nothing else.
    fn own_again(&self, family: u64, index: &mut ResidencyIndex) {
        index.disown(family);
        for member in self.families.get(&family).map_or(&[][..], |family| &family.members) {
            index.own(family, &self.sessions[member].last.blocks);
        }
    }

    fn forget_surplus(&mut self, index: &mut ResidencyIndex) {
        while self.sessions.len() > self.limits.sessions || self.blocks > self.limits.blocks {
            // Sessions with a turn in flight stay: they are bounded by the requests that may live.
            let Some((_, id)) = self.idle.first().copied() else {
                return;
            };
            self.forget(id, index);
        }
    }

    fn forget(&mut self, id: SessionId, index: &mut ResidencyIndex) {
        self.unhome(id);
        self.rename_prompt(id, None);
        let session = self.sessions.remove(&id).expect("an idle session is remembered");
        self.idle.remove(&(session.last_used, id));
        self.changing.remove(&(session.away.changes, id));
        self.clients.is_forgotten(session.kind, session.away.bin);
        self.blocks -= session.last.blocks.len();
        if let Some(key) = session.key {
            self.by_key.remove(&key);
        }
        let family = self.families.get_mut(&session.family).expect("a session has a family");
        family.members.retain(|member| *member != id);
        if family.members.is_empty() {
            self.families.remove(&session.family);
            index.disown(session.family);
        } else {
            self.own_again(session.family, index);
        }
    }

    fn set_live(&mut self, id: SessionId, live: bool) {
        self.change(id, |session| session.live = live);
    }

    /// Changes a session, and what its home is told of it.
    fn change(&mut self, id: SessionId, change: impl FnOnce(&mut Session)) {
        let session = self
            .sessions
            .get_mut(&id)
            .expect("only sessions that are remembered change");
        let mut homed = session.home.and_then(|home| self.homed.get_mut(&home));
        if let Some(homed) = &mut homed {
            homed.remove(session);
        }
        change(session);
        if let Some(homed) = homed {
            homed.add(session);
        }
    }

    fn unhome(&mut self, id: SessionId) {
        let session = self
            .sessions
            .get_mut(&id)
            .expect("only sessions that are remembered have a home");
        if let Some(home) = session.home.take()
            && let Some(homed) = self.homed.get_mut(&home)
        {
            homed.remove(session);
        }
    }
}
