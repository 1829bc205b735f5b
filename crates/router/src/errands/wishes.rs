//! Sessions whose turn has ended, and for which nobody has found yet whether their KV should be carried elsewhere: longest ago first.
//! A wish is dropped when the session's next turn comes, when it was looked at, and when it is too old to be worth it.

use homing_units::{Duration, Instant, SessionId};
use std::collections::VecDeque;

/// Wishes that are kept; above, the oldest is dropped.
const WISHES: usize = 64;

/// A wish is kept for so long: whoever has not come back by then may not come at all, and the place that was good may not be.
const KEPT: Duration = Duration::from_secs(30);

/// The wishes.
#[derive(Debug, Default)]
pub(crate) struct Wishes {
    oldest_first: VecDeque<(Instant, SessionId)>,
}

impl Wishes {
    /// A session's turn has ended.
    pub(crate) fn add(&mut self, now: Instant, session: SessionId) {
        self.remove(session);
        if self.oldest_first.len() == WISHES {
            self.oldest_first.pop_front();
        }
        self.oldest_first.push_back((now, session));
    }

    /// It is of no interest any more.
    pub(crate) fn remove(&mut self, session: SessionId) {
        self.oldest_first.retain(|(_, other)| *other != session);
    }

    /// Drops those that are too old, and gives the others.
    pub(crate) fn open(&mut self, now: Instant) -> Vec<SessionId> {
        self.oldest_first
            .retain(|(since, _)| now.saturating_since(*since) <= KEPT);
        self.oldest_first.iter().map(|(_, session)| *session).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.oldest_first.is_empty()
    }

    pub(crate) fn check_invariants(&self) {
        assert!(self.oldest_first.len() <= WISHES, "wishes are bounded");
        let times = || self.oldest_first.iter().map(|(since, _)| *since);
        assert!(
            times().zip(times().skip(1)).all(|(left, right)| left <= right),
            "wishes are in order"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_wishes_are_kept_for_a_while() {
        let at = |seconds| Instant::ZERO + Duration::from_secs(seconds);
        let mut wishes = Wishes::default();
        for session in 0..70 {
            wishes.add(at(session / 10), SessionId(session));
        }
        wishes.check_invariants();
        assert_eq!(wishes.open(at(7)).first(), Some(&SessionId(6)), "the oldest give way");
        wishes.remove(SessionId(69));
        wishes.add(at(7), SessionId(8));
        wishes.check_invariants();
        let open = wishes.open(at(36));
        assert_eq!((open.first(), open.last()), (Some(&SessionId(60)), Some(&SessionId(8))));
        assert_eq!(wishes.open(at(37)), [SessionId(8)]);
        assert!(wishes.open(at(38)).is_empty() && wishes.is_empty());
    }
}
