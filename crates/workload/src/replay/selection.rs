//! Which sessions of a trace are replayed, how much of each, and what that leaves out.

use super::ReplayConfig;
use crate::trace::{Session, Trace};

/// What a replay's limits left out of its trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct LeftOut {
    /// Sessions that begin with a prompt above the largest context: nothing of them is replayed.
    pub sessions: u32,
    /// Sessions that were ended before their first prompt above the largest context.
    pub sessions_shortened: u32,
    /// Turns of these two kinds of sessions that are not replayed for that reason.
    pub turns: u64,
    /// Turns that are not replayed because of the limit on a session's turns.
    pub turns_over_limit: u64,
    /// Sessions that are not replayed because of the limit on sessions.
    pub sessions_over_limit: u32,
}

/// The part of a session that is replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Selected {
    /// Index of the session in the trace.
    pub session: u32,
    /// Its first turns, so many. What they wait for is among them, because turns wait for earlier ones only.
    pub turns: usize,
}

/// The sessions to replay, in the trace's order.
pub(super) fn select(trace: &Trace, config: &ReplayConfig) -> (Vec<Selected>, LeftOut) {
    let most = config.sessions.map_or(usize::MAX, |sessions| sessions as usize);
    let mut left_out = LeftOut::default();
    let mut selected = Vec::new();
    for (index, session) in trace.sessions.iter().enumerate() {
        if selected.len() == most {
            left_out.sessions_over_limit += 1;
            continue;
        }
        let wanted = within_turns(session, config.max_turns);
        let turns = within_context(session, config.max_context).min(wanted);
        left_out.turns_over_limit += (session.turns.len() - wanted) as u64;
        left_out.turns += (wanted - turns) as u64;
        if turns > 0 {
            left_out.sessions_shortened += u32::from(turns < wanted);
            selected.push(Selected {
                session: index as u32,
                turns,
            });
        } else {
            left_out.sessions += u32::from(wanted > 0);
        }
    }
    (selected, left_out)
}

/// How many turns come before the session's first root turn that is one too many.
fn within_turns(session: &Session, max_turns: Option<u32>) -> usize {
    let most = max_turns.map_or(usize::MAX, |turns| turns as usize);
    let mut roots = session.turns.iter().enumerate().filter(|(_, turn)| turn.agent == 0);
    roots.nth(most).map_or(session.turns.len(), |(index, _)| index)
}

/// How many turns come before the session's first prompt that is too long.
fn within_context(session: &Session, max_context: Option<u32>) -> usize {
    let most = max_context.unwrap_or(u32::MAX);
    session
        .turns
        .iter()
        .position(|turn| turn.prompt_tokens > most)
        .unwrap_or(session.turns.len())
}
