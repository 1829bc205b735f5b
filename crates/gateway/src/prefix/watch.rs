//! What is remembered of each session: who it is of, whom it belongs to, its last prompts, and where they broke.
//!
//! Memory is bounded twice, by sessions and by the blocks of their prompts; what was not used for longest is forgotten,
//! and its next turn is the first of its session again. So is the next turn of a session that was idle for long (`idle`).

use super::breaks::{Break, compare};
use super::outline::{Fresh, Outline, Seen};
use homing_kv::Prompt;
use homing_units::SessionId;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};

/// Sessions that are remembered.
const SESSIONS: usize = 16_384;
/// Blocks of all remembered prompts together; a hash takes 16 bytes, so this is 64 MiB.
const BLOCKS: usize = 4 << 20;
/// Prompts that are remembered of a session: a client that does not tell its helpers from itself runs a few
/// conversations under one name.
const BRANCHES: usize = 4;

/// Who a turn is of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Origin {
    /// The kind of client.
    pub(crate) client: &'static str,
    /// Its session's name, hashed. Several sessions may have one: what an agent asks beside its conversation.
    pub(crate) name: Option<u128>,
    /// The name of the session that it works for.
    pub(crate) parent: Option<u128>,
}

/// A turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turned<'a> {
    pub(crate) origin: Origin,
    pub(crate) fresh: &'a Fresh,
    pub(crate) prompt: &'a Prompt,
    /// Tokens of a block.
    pub(crate) block_size: u32,
}

/// What is shown of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Note {
    /// The kind of client.
    pub(crate) client: &'static str,
    /// The session that this one works for, as a sub-agent.
    pub(crate) parent: Option<SessionId>,
    /// Turns that did not repeat the one before.
    pub(crate) prefix_breaks: u32,
    /// Prompt tokens that were computed again because of them.
    pub(crate) prefix_lost_tokens: u64,
    /// The last of them.
    pub(crate) last_break: Option<Break>,
}

/// The memory.
#[derive(Debug)]
pub(crate) struct Watch(Mutex<Memory>);

#[derive(Debug)]
struct Memory {
    sessions_max: usize,
    blocks_max: usize,
    blocks: usize,
    next: u64,
    sessions: HashMap<SessionId, Remembered>,
    /// Of each name the session with most tools: the others work for it.
    by_name: HashMap<u128, SessionId>,
    /// Longest unused first.
    by_use: BTreeMap<u64, SessionId>,
}

#[derive(Debug)]
struct Remembered {
    used: u64,
    name: Option<u128>,
    /// Latest first.
    branches: VecDeque<Seen>,
    note: Note,
}

impl Default for Watch {
    fn default() -> Self {
        Self::new(SESSIONS, BLOCKS)
    }
}

impl Watch {
    /// One that remembers so many sessions, as the core does, up to its own bound.
    pub(crate) fn of_sessions(sessions: usize) -> Self {
        Self::new(sessions.clamp(1, SESSIONS), BLOCKS)
    }

    fn new(sessions_max: usize, blocks_max: usize) -> Self {
        Self(Mutex::new(Memory {
            sessions_max,
            blocks_max,
            blocks: 0,
            next: 0,
            sessions: HashMap::new(),
            by_name: HashMap::new(),
            by_use: BTreeMap::new(),
        }))
    }

    /// A turn of a session; says where it broke the prefix of the one before it.
    pub(crate) fn turn(&self, session: SessionId, turn: &Turned<'_>) -> Option<Break> {
        self.memory().turn(session, turn)
    }

    /// What is known of a session.
    pub(crate) fn note(&self, session: SessionId) -> Option<Note> {
        self.memory()
            .sessions
            .get(&session)
            .map(|remembered| remembered.note.clone())
    }

    /// Sessions that are remembered.
    pub(crate) fn len(&self) -> usize {
        self.memory().sessions.len()
    }

    /// Now, in the order of uses.
    pub(crate) fn mark(&self) -> u64 {
        self.memory().next
    }

    /// Forgets sessions that took no turn since.
    pub(crate) fn forget_unused_since(&self, mark: u64) {
        let mut memory = self.memory();
        while let Some((used, session)) = memory.by_use.first_key_value()
            && *used < mark
        {
            let session = *session;
            drop(memory.take(session));
        }
    }

    fn memory(&self) -> std::sync::MutexGuard<'_, Memory> {
        // Nothing that is done under the lock can fail half-way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Memory {
    fn turn(&mut self, session: SessionId, turn: &Turned<'_>) -> Option<Break> {
        let Turned {
            origin,
            fresh,
            prompt,
            block_size,
        } = *turn;
        let parent = self.parent(session, origin, fresh);
        let mut remembered = self.take(session);
        remembered.note.client = origin.client;
        remembered.note.parent = parent.or(remembered.note.parent);
        remembered.name = origin.name.or(remembered.name);
        let branch = nearest(&remembered.branches, &fresh.outline);
        let found = branch.and_then(|index| compare(&remembered.branches[index], fresh, prompt, block_size));
        if let Some(index) = branch {
            remembered.branches.remove(index);
        }
        remembered.branches.push_front(Seen {
            outline: fresh.outline.clone(),
            prompt: prompt.clone(),
        });
        remembered.branches.truncate(BRANCHES);
        if let Some(found) = found {
            remembered.note.prefix_breaks += 1;
            remembered.note.prefix_lost_tokens += u64::from(found.lost_tokens);
            remembered.note.last_break = Some(found);
        }
        self.put(session, remembered);
        while self.sessions.len() > self.sessions_max || (self.blocks > self.blocks_max && self.sessions.len() > 1) {
            let oldest = self.by_use.values().next().copied();
            let Some(oldest) = oldest else { break };
            drop(self.take(oldest));
        }
        found
    }

    /// The session that this one works for: the one that its client names, else the main one of its own name.
    fn parent(&self, session: SessionId, origin: Origin, fresh: &Fresh) -> Option<SessionId> {
        let of_name = |name: Option<u128>| self.by_name.get(&name?).copied().filter(|main| *main != session);
        of_name(origin.parent).or_else(|| {
            let main = of_name(origin.name)?;
            (self.sessions.get(&main)?.tools() > fresh.outline.tools.len()).then_some(main)
        })
    }

    /// Takes a session out, or makes one.
    fn take(&mut self, session: SessionId) -> Remembered {
        let Some(remembered) = self.sessions.remove(&session) else {
            return Remembered {
                used: 0,
                name: None,
                branches: VecDeque::new(),
                note: Note::default(),
            };
        };
        self.by_use.remove(&remembered.used);
        self.blocks -= remembered.blocks();
        if let Some(name) = remembered.name
            && self.by_name.get(&name) == Some(&session)
        {
            self.by_name.remove(&name);
        }
        remembered
    }

    fn put(&mut self, session: SessionId, mut remembered: Remembered) {
        remembered.used = self.next;
        self.next += 1;
        self.blocks += remembered.blocks();
        self.by_use.insert(remembered.used, session);
        if let Some(name) = remembered.name {
            let main = self.by_name.get(&name).and_then(|main| self.sessions.get(main));
            if main.is_none_or(|main| main.tools() <= remembered.tools()) {
                self.by_name.insert(name, session);
            }
        }
        self.sessions.insert(session, remembered);
    }
}

impl Remembered {
    fn tools(&self) -> usize {
        self.branches.front().map_or(0, |latest| latest.outline.tools.len())
    }

    fn blocks(&self) -> usize {
        self.branches.iter().map(|branch| branch.prompt.blocks.len()).sum()
    }
}

/// The remembered conversation that a request belongs to: one that has its first message of a user, else a longer one of
/// its system prompt and tools, of which it may be the summary. `None`: it is another conversation under the same name,
/// which broke nothing.
fn nearest(branches: &VecDeque<Seen>, now: &Outline) -> Option<usize> {
    let opening = |outline: &Outline| outline.messages.get(usize::from(!is_without_system(outline))).copied();
    let by_opening = branches
        .iter()
        .position(|branch| opening(&branch.outline).is_some_and(|first| Some(first) == opening(now)));
    let is_summed_up = |branch: &Outline| {
        let same = branch.tools == now.tools && branch.system == now.system;
        same && !now.tools.is_empty() && now.messages.len() < branch.messages.len()
    };
    by_opening.or_else(|| branches.iter().position(|branch| is_summed_up(&branch.outline)))
}

/// Whether the first message is not the system's: its text has no line then, but an empty one.
fn is_without_system(outline: &Outline) -> bool {
    outline.system.as_slice() == [super::outline::digest(b"")]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefix::outline::elements;
    use homing_wire::openai::Body;
    use serde_json::{Value, json};

    fn fresh(messages: &Value) -> (Fresh, Prompt) {
        let body = json!({"messages": messages, "tools": [{"name": "t"}]}).to_string();
        let body = Body::parse(&body.into()).unwrap();
        let fresh = Fresh::of_chat(&body, &elements(body.get("messages")), None);
        let rendered = messages.to_string();
        let tokens: Vec<u32> = rendered.trim_end_matches(']').chars().map(u32::from).collect();
        (fresh, Prompt::of_tokens(&tokens, 4))
    }

    fn talk(texts: &[&str]) -> (Fresh, Prompt) {
        let messages = texts.iter().map(|text| json!({"role": "user", "content": text}));
        fresh(&Value::Array(messages.collect()))
    }

    fn take(watch: &Watch, session: u64, origin: Origin, (fresh, prompt): &(Fresh, Prompt)) -> Option<Break> {
        let turn = Turned {
            origin,
            fresh,
            prompt,
            block_size: 4,
        };
        watch.turn(SessionId(session), &turn)
    }

    fn origin(name: u128, parent: Option<u128>) -> Origin {
        Origin {
            client: "test",
            name: Some(name),
            parent,
        }
    }

    #[test]
    fn breaks_are_counted_for_each_session_and_conversation() {
        let watch = Watch::default();
        let turn =
            |session: u64, texts: &[&str]| take(&watch, session, origin(u128::from(session), None), &talk(texts));
        assert_eq!(turn(1, &["hello", "first answer"]), None);
        assert_eq!(turn(1, &["hello", "first answer", "more"]), None);
        assert_eq!(turn(2, &["hello", "another answer"]), None, "another session");
        assert!(turn(1, &["hello", "edited answer", "more", "and more"]).is_some());
        assert_eq!(
            turn(1, &["hello", "edited answer", "more", "and more"]),
            None,
            "a retry"
        );
        let note = watch.note(SessionId(1)).unwrap();
        assert_eq!((note.prefix_breaks, note.client), (1, "test"));
        assert_eq!(note.last_break.unwrap().message, Some(1));
        assert!(note.prefix_lost_tokens > 50, "{note:?}");
        assert_eq!(watch.note(SessionId(2)).unwrap().prefix_breaks, 0);
        assert_eq!(watch.note(SessionId(3)), None);
    }

    #[test]
    fn a_sub_agent_is_shown_under_its_parent() {
        let watch = Watch::default();
        take(&watch, 7, origin(70, None), &talk(&["main"]));
        take(&watch, 8, origin(80, Some(70)), &talk(&["sub"]));
        take(&watch, 9, origin(90, Some(1)), &talk(&["orphan"]));
        assert_eq!(watch.note(SessionId(8)).unwrap().parent, Some(SessionId(7)));
        assert_eq!(watch.note(SessionId(9)).unwrap().parent, None);
        assert_eq!(watch.note(SessionId(7)).unwrap().parent, None);
        // What is asked under the same name without tools works for who has them.
        let mut title = talk(&["title, please"]);
        title.0.outline.tools.clear();
        take(&watch, 10, origin(70, None), &title);
        take(&watch, 7, origin(70, None), &talk(&["main", "more"]));
        assert_eq!(watch.note(SessionId(10)).unwrap().parent, Some(SessionId(7)));
        assert_eq!(watch.note(SessionId(7)).unwrap().parent, None);
    }

    #[test]
    fn memory_is_bounded() {
        let check = |watch: &Watch| {
            let memory = watch.0.lock().unwrap();
            let blocks: usize = memory.sessions.values().map(Remembered::blocks).sum();
            assert_eq!((blocks, memory.sessions.len()), (memory.blocks, memory.by_use.len()));
            assert!(memory.by_name.len() <= memory.sessions.len());
            assert!(memory.sessions.len() <= memory.sessions_max);
            assert!(memory.blocks <= memory.blocks_max || memory.sessions.len() == 1);
        };
        let watch = Watch::new(4, 100);
        for round in 0..40_u64 {
            let text = "x".repeat(20 + usize::try_from(round).unwrap() * 7);
            take(&watch, round % 9, origin(u128::from(round % 9), None), &talk(&[&text]));
            check(&watch);
        }
        assert!(watch.note(SessionId(39 % 9)).is_some(), "the last is remembered");
    }
}
