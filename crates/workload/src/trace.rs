//! A trace in memory, whatever format it came from: sessions of turns, each turn after those that it waits for.
//!
//! One form for all sources, so that the simulator, the live replay and the generators agree on what a turn is. It does
//! not say how turns are issued (`replay`) nor what their tokens are (`content`).

use crate::ids::ContentIds;
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
    pub content: ContentIds,
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

impl Trace {
    /// The turn that `turn` names.
    ///
    /// # Panics
    /// If the trace has no such turn.
    #[must_use]
    pub fn turn(&self, turn: TurnRef) -> &Turn {
        &self.session(turn).turns[turn.turn as usize]
    }

    /// The session of the turn that `turn` names.
    ///
    /// # Panics
    /// If the trace has no such session.
    #[must_use]
    pub fn session(&self, turn: TurnRef) -> &Session {
        &self.sessions[turn.session as usize]
    }

    /// Whether the turn's agent has sent nothing before it: no worker can hold the agent's history.
    ///
    /// # Panics
    /// If the trace has no such turn.
    #[must_use]
    pub fn is_first_of_agent(&self, turn: TurnRef) -> bool {
        let (before, rest) = self.session(turn).turns.split_at(turn.turn as usize);
        before.iter().all(|other| other.agent != rest[0].agent)
    }

    /// Turns of all sessions and agents.
    #[must_use]
    pub fn turn_count(&self) -> usize {
        self.sessions.iter().map(|session| session.turns.len()).sum()
    }

    /// Whether every session says when it starts.
    #[must_use]
    pub fn has_times(&self) -> bool {
        self.sessions.iter().all(|session| session.start.is_some())
    }

    /// Panics where the trace contradicts what its fields promise; readers and generators are tested with it.
    ///
    /// # Panics
    /// If a turn has no token or output, its content is not one id for each whole block, or it waits for a turn that
    /// does not come before it.
    pub fn check_invariants(&self) {
        assert!(self.block_size > 0, "a block holds at least one token");
        for session in &self.sessions {
            for (index, turn) in session.turns.iter().enumerate() {
                let place = format!("turn {index} of session `{}`", session.id);
                assert!(turn.prompt_tokens > 0, "{place} has no prompt");
                assert!(turn.output_tokens > 0, "{place} has no output");
                let blocks = (turn.prompt_tokens / self.block_size) as usize;
                assert_eq!(turn.content.len(), blocks, "{place}: one id for each whole block");
                assert!(
                    turn.after.iter().all(|&before| (before as usize) < index),
                    "{place} waits for a later turn"
                );
            }
        }
    }
}
