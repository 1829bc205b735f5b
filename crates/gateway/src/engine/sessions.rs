//! Sessions by the names that SGLang servers know them by, where a server's cache tells sessions apart
//! (`--enable-session-radix-cache`): it evicts what no open session refers to before what one does.
//!
//! A server opens a session with its first request and keeps it until it is told otherwise, so those that are idle, or too
//! many, are closed from here. A closed name is never used again: a server ignores it.
//!
//! Source: SGLang 0.5.23, `mem_cache/unified_cache/session_ref_tracker.py`, `managers/scheduler.py` (`close_session`).

use homing_units::{Duration, Instant, SessionId, WorkerId};
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};

/// Sessions that are open, over all servers.
const OPEN_MAX: usize = 16_384;

/// What is open where.
pub(crate) struct OpenSessions {
    idle: Duration,
    /// Tells the names of one life of the router from those of another.
    life: u32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    open: HashMap<(WorkerId, SessionId), Open>,
    /// Uses in their order; those that were followed by another are stale.
    uses: VecDeque<((WorkerId, SessionId), u64)>,
    counter: u64,
}

struct Open {
    name: String,
    used: Instant,
    /// The number of its last use.
    number: u64,
}

/// A session that is over at a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Closed {
    pub(crate) worker: WorkerId,
    pub(crate) name: String,
}

impl OpenSessions {
    /// `idle` is how long a session stays open that nobody uses.
    pub(crate) fn new(life: u32, idle: Duration) -> Self {
        Self {
            idle,
            life,
            state: Mutex::default(),
        }
    }

    /// The name of a session at a server that it is used at now, and what is to be closed.
    pub(crate) fn used(&self, now: Instant, worker: WorkerId, session: SessionId) -> (String, Vec<Closed>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.counter += 1;
        let (number, life) = (state.counter, self.life);
        let open = state.open.entry((worker, session)).or_insert_with(|| Open {
            name: format!("{life:08x}-s{number}"),
            used: now,
            number,
        });
        (open.used, open.number) = (now, number);
        let name = open.name.clone();
        state.uses.push_back(((worker, session), number));
        (name, state.close(now, self.idle))
    }
}

impl State {
    fn close(&mut self, now: Instant, idle: Duration) -> Vec<Closed> {
        let mut closed = Vec::new();
        while let Some((key, number)) = self.uses.front().copied() {
            let last = self.open.get(&key).filter(|open| open.number == number);
            let over = last.map(|open| now.saturating_since(open.used) > idle || self.open.len() > OPEN_MAX);
            match over {
                Some(false) => break,
                Some(true) => closed.extend(self.open.remove(&key).map(|open| Closed {
                    worker: key.0,
                    name: open.name,
                })),
                None => {}
            }
            self.uses.pop_front();
        }
        if self.uses.len() > 2 * OPEN_MAX {
            let Self { open, uses, .. } = self;
            uses.retain(|(key, number)| open.get(key).is_some_and(|open| open.number == *number));
        }
        closed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Duration = Duration::from_secs(60);

    fn at(seconds: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(seconds)
    }

    #[test]
    fn a_session_has_one_name_at_a_server_until_it_is_idle() {
        let sessions = OpenSessions::new(7, IDLE);
        let used = |seconds, worker, session| sessions.used(at(seconds), WorkerId(worker), SessionId(session));
        let (name, closed) = used(0, 0, 5);
        assert_eq!((name.as_str(), closed.len()), ("00000007-s1", 0));
        assert_eq!(used(50, 0, 5).0, name);
        assert_ne!(used(50, 1, 5).0, name, "another server has its own");
        let (_, closed) = used(111, 1, 6);
        let over = [(0, "00000007-s1"), (1, "00000007-s3")].map(|(worker, name)| Closed {
            worker: WorkerId(worker),
            name: name.to_owned(),
        });
        assert_eq!(closed, over);
        assert_ne!(used(112, 0, 5).0, name, "a closed name is not used again");
    }

    #[test]
    fn the_longest_unused_are_closed_where_there_are_too_many() {
        let sessions = OpenSessions::new(0, IDLE);
        let mut closed = Vec::new();
        for round in 0..3 {
            // The first is in use all the time.
            for session in 0..OPEN_MAX as u64 {
                let session = if session == 0 {
                    0
                } else {
                    round * OPEN_MAX as u64 + session
                };
                closed.extend(sessions.used(at(round), WorkerId(0), SessionId(session)).1);
            }
        }
        let state = sessions.state.lock().unwrap();
        assert!(state.open.len() <= OPEN_MAX && state.uses.len() <= 2 * OPEN_MAX + 1);
        assert_eq!(state.open.len() + closed.len(), 3 * (OPEN_MAX - 1) + 1);
        assert!(state.open.contains_key(&(WorkerId(0), SessionId(0))));
    }
}
