//! Where each session lives, for ever: a bounded map from session to decode worker, the longest unused forgotten first.

use homing_units::{SessionId, WorkerId};
use std::collections::BTreeMap;

/// A session's decode worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pin {
    pub(super) worker: WorkerId,
    /// Length of the prompt that it was pinned with.
    pub(super) first_prompt_tokens: u32,
    /// Denied admissions in a row.
    pub(super) denied: u32,
}

/// All pins.
#[derive(Debug)]
pub(super) struct Pins {
    limit: usize,
    /// With the time it was last used, counted in uses.
    by_session: BTreeMap<SessionId, (u64, Pin)>,
    /// Longest unused first.
    by_use: BTreeMap<u64, SessionId>,
    uses: u64,
}

impl Pins {
    pub(super) const fn new(limit: usize) -> Self {
        Self {
            limit,
            by_session: BTreeMap::new(),
            by_use: BTreeMap::new(),
            uses: 0,
        }
    }

    pub(super) fn get(&self, session: SessionId) -> Option<Pin> {
        self.by_session.get(&session).map(|(_, pin)| *pin)
    }

    /// The session is pinned so, and was used just now.
    pub(super) fn set(&mut self, session: SessionId, pin: Pin) {
        self.uses += 1;
        if let Some((used, _)) = self.by_session.insert(session, (self.uses, pin)) {
            self.by_use.remove(&used);
        }
        self.by_use.insert(self.uses, session);
        while self.by_session.len() > self.limit {
            let (_, oldest) = self.by_use.pop_first().expect("each pin was used");
            self.by_session.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_unused_pin_is_forgotten_above_the_bound() {
        let pin = |worker| Pin {
            worker: WorkerId(worker),
            first_prompt_tokens: 1,
            denied: 0,
        };
        let mut pins = Pins::new(2);
        pins.set(SessionId(1), pin(7));
        pins.set(SessionId(2), pin(8));
        pins.set(SessionId(1), pin(9));
        pins.set(SessionId(3), pin(7));
        let left = [1, 2, 3].map(|session| pins.get(SessionId(session)).map(|pin| pin.worker.0));
        assert_eq!(left, [Some(9), None, Some(7)]);
        assert_eq!((pins.by_session.len(), pins.by_use.len()), (2, 2));
    }
}
