//! What sessions come to at the worker that they live at: added and taken off session by session, so that a look costs
//! nothing. It does not know which sessions those are.

use super::Session;

/// Sessions that live at a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Homed {
    pub(crate) sessions: u32,
    /// Tokens of their last prompts.
    pub(crate) tokens: u64,
    /// Those of sessions that were used lately.
    pub(crate) live_tokens: u64,
    /// Sessions that were used lately.
    pub(crate) live_sessions: u32,
    /// What no other family shows of those with a turn in flight.
    pub(crate) busy_own_tokens: u64,
    /// The same of those that are away, as far as they are expected back.
    pub(crate) expected_own_tokens: u64,
}

impl Homed {
    pub(super) fn add(&mut self, session: &Session) {
        self.sessions += 1;
        self.tokens += u64::from(session.last.tokens);
        if session.live {
            self.live_tokens += u64::from(session.last.tokens);
            self.live_sessions += 1;
            self.busy_own_tokens += busy_own_tokens(session);
            self.expected_own_tokens += expected_own_tokens(session);
        }
    }

    pub(super) fn remove(&mut self, session: &Session) {
        self.sessions -= 1;
        self.tokens -= u64::from(session.last.tokens);
        if session.live {
            self.live_tokens -= u64::from(session.last.tokens);
            self.live_sessions -= 1;
            self.busy_own_tokens -= busy_own_tokens(session);
            self.expected_own_tokens -= expected_own_tokens(session);
        }
    }
}

fn busy_own_tokens(session: &Session) -> u64 {
    if session.in_flight > 0 { session.own_tokens() } else { 0 }
}

fn expected_own_tokens(session: &Session) -> u64 {
    if session.in_flight > 0 {
        0
    } else {
        session.expected_tokens()
    }
}
