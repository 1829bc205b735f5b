//! The soft cap: which sessions have a place at which decode worker. Time is counted in turns, since a policy has no clock.

use homing_units::{SessionId, WorkerId};
use std::collections::BTreeMap;

/// A session that had no turn in so many turns of its worker, for each place there, is taken to have ended.
const TURNS_A_PLACE: u64 = 16;

/// Workers whose places are remembered; above, those of the one with the lowest id, the first to have joined, are forgotten.
const MAX_WORKERS: usize = 4_096;

/// The places of all decode workers.
#[derive(Debug)]
pub(super) struct Places {
    /// Places at a worker; 0 for any number, which are not counted then.
    cap: u32,
    workers: BTreeMap<WorkerId, Worker>,
}

/// The places of one worker.
#[derive(Debug, Default)]
struct Worker {
    /// Turns that it was given.
    turns: u64,
    /// When each session with a place had its last turn, in turns; at most as many as there are places.
    sessions: BTreeMap<SessionId, u64>,
}

impl Places {
    pub(super) const fn new(cap: u32) -> Self {
        Self {
            cap,
            workers: BTreeMap::new(),
        }
    }

    /// A turn of the session is sent to this worker: whether it has a place there, or gets one. One that is `admitted` to append
    /// has one whatever the count says.
    pub(super) fn take(&mut self, worker: WorkerId, session: SessionId, admitted: bool) -> bool {
        if self.cap == 0 {
            return true;
        }
        for (_, other) in self.workers.iter_mut().filter(|(id, _)| **id != worker) {
            other.sessions.remove(&session);
        }
        let (cap, worker) = (self.cap as usize, self.workers.entry(worker).or_default());
        worker.turns += 1;
        let (turns, patience) = (worker.turns, u64::from(self.cap) * TURNS_A_PLACE);
        worker.sessions.retain(|_, last| turns - *last <= patience);
        let has_room = worker.sessions.contains_key(&session) || worker.sessions.len() < cap;
        if has_room {
            worker.sessions.insert(session, turns);
        }
        if self.workers.len() > MAX_WORKERS {
            self.workers.pop_first();
        }
        has_room || admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_sessions_as_there_are_places_and_ended_ones_make_room() {
        let mut places = Places::new(2);
        let mut take = |worker, session| places.take(WorkerId(worker), SessionId(session), false);
        assert_eq!(
            [take(0, 1), take(0, 2), take(0, 3), take(1, 3)],
            [true, true, false, true]
        );
        assert!(take(0, 1), "it has its place still");
        // Session 2 had its last turn in turn 2 of worker 0, which has had 4. Two places have a patience of 32 turns.
        for _ in 5..=33 {
            assert!(take(0, 1));
        }
        assert!(!take(0, 3), "turn 34 is 32 after turn 2");
        assert!(take(0, 3), "turn 35 is 33 after it: that session has ended");
        assert!(!take(0, 2), "and has no place any more");
    }

    #[test]
    fn workers_that_come_and_go_are_not_remembered_for_ever() {
        let mut places = Places::new(1);
        for id in 0..5_000 {
            assert!(places.take(WorkerId(id), SessionId(0), false));
        }
        assert_eq!(places.workers.len(), MAX_WORKERS);
        assert!(places.workers.contains_key(&WorkerId(4_999)));
    }

    #[test]
    fn without_a_cap_everybody_has_a_place_and_nothing_is_remembered() {
        let mut places = Places::new(0);
        assert!((0..100).all(|session| places.take(WorkerId(0), SessionId(session), false)));
        assert!(places.workers.is_empty());
    }
}
