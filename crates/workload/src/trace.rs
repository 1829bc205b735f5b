//! A trace in memory, whatever format it came from: sessions of turns, each turn after those that it waits for.

use homing_units::Duration;

/// A workload.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Where it came from: a file name or a generator with its parameters.
    pub name: String,
    /// Tokens in a block of [`Turn::content`].
    pub block_size: u32,
    /// Its sessions, in the order in which they start.
    pub sessions: Vec<Session>,
}

/// A session: a root agent's turns and those of its sub-agents.
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    /// Its name in the trace.
    pub id: String,
    /// When its first turn is sent, from the trace's start, where the trace has absolute times.
    pub start: Option<Duration>,
    /// Its turns. A turn waits only for turns before it in this order.
    pub turns: Vec<Turn>,
}

/// One request of a session.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// Which agent of the session sends it: 0 is the root, others are sub-agents. Each agent's prompts grow by its own
    /// turns; agents share no history.
    pub agent: u32,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Tokens that the answer has.
    pub output_tokens: u32,
    /// What the prompt's whole blocks contain: equal ids are equal content. Ids that two sessions share name the same
    /// content in both.
    pub content: Vec<u64>,
    /// Indices of the turns of this session that must have ended before this one is sent. Empty: it starts the session.
    pub after: Vec<u32>,
    /// How long after the last of them ended (for a first turn: after the session's start).
    pub gap: Duration,
}

/// One turn of one session of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TurnRef {
    /// Index of the session in the trace.
    pub session: u32,
    /// Index of the turn in the session.
    pub turn: u32,
}
