//! Which request, live or held for a puller, goes by which name of its client's.
//!
//! Whoever asked for an export may give it up before its answer has told it what the export is called here: all that it knows
//! is what it called its own request. Two requests of one name are the client's mistake; the later one is meant then.
//!
//! The two come over different connections, so the release may be here first, while the request waits in a socket for a busy
//! machine: it is remembered for a while, and the request that comes late is given up as it begins. Without that it would be
//! computed for nobody and held until its lease ends.
//!
//! Likewise whoever renews a lease must be able to tell KV that was pulled from KV that is gone, and may ask in the moment after
//! the pull: names of what was pulled are remembered for a while, too.

use homing_units::{Duration, Instant, RequestId};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// How long a release waits for its request: whoever asked has given up, and nothing waits in a socket for longer.
const EARLY_FOR: Duration = Duration::from_secs(30);
/// Releases that wait for their requests; above, the oldest goes.
const EARLY_MAX: usize = 1_024;

/// How long it is remembered that an export was pulled: renewals are a third of a lease apart, and one may be on its way.
const PULLED_FOR: Duration = Duration::from_secs(60);
/// Exports of which it is remembered that they were pulled; above, the oldest is forgotten.
const PULLED_MAX: usize = 8_192;

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Named {
    /// A request that lives, or for which KV is held.
    Request(RequestId),
    /// An export that its puller has acknowledged.
    Pulled,
}

/// The names of requests that ask for an export. Bounded by the live requests, the exports that the pool has room for,
/// [`EARLY_MAX`] and [`PULLED_MAX`].
#[derive(Debug, Default)]
pub(super) struct ExportNames {
    ids: HashMap<Arc<str>, RequestId>,
    names: HashMap<RequestId, Arc<str>>,
    /// What was released before it was here, with the time until which that counts, oldest first.
    early: VecDeque<(Instant, Box<str>)>,
    /// Until when it is remembered of a name that it was pulled.
    pulled: HashMap<Arc<str>, Instant>,
    /// The same times, oldest first; one that does not stand above any more is passed over.
    pulled_order: VecDeque<(Instant, Arc<str>)>,
}

impl ExportNames {
    /// A request goes by this name from now on.
    pub(super) fn insert(&mut self, id: RequestId, name: String) {
        let name: Arc<str> = name.into();
        self.pulled.remove(&name);
        self.ids.insert(name.clone(), id);
        self.names.insert(id, name);
    }

    /// What goes by this name, if anything does.
    pub(super) fn find(&mut self, now: Instant, name: &str) -> Option<Named> {
        self.forget_pulled(now, PULLED_MAX);
        let id = self.ids.get(name).copied();
        let pulled = || self.pulled.contains_key(name).then_some(Named::Pulled);
        id.map(Named::Request).or_else(pulled)
    }

    /// The request that goes by this name, which is not wanted any more. Where there is none, it is remembered for the one that
    /// may come.
    pub(super) fn release(&mut self, now: Instant, name: String) -> Option<RequestId> {
        let found = self.ids.get(name.as_str()).copied();
        if found.is_none() {
            if self.early.len() == EARLY_MAX {
                self.early.pop_front();
            }
            self.early.push_back((now + EARLY_FOR, name.into()));
        }
        found
    }

    /// Whether a request of this name was released before it was here. Says so once.
    pub(super) fn was_released(&mut self, now: Instant, name: &str) -> bool {
        while self.early.front().is_some_and(|(until, _)| *until <= now) {
            self.early.pop_front();
        }
        let at = self.early.iter().position(|(_, early)| **early == *name);
        at.is_some_and(|at| self.early.remove(at).is_some())
    }

    /// What was held for a request has been pulled.
    pub(super) fn pulled(&mut self, now: Instant, id: RequestId) {
        if let Some(name) = self.names.get(&id).map(Arc::clone) {
            self.forget_pulled(now, PULLED_MAX - 1);
            self.pulled_order.push_back((now + PULLED_FOR, Arc::clone(&name)));
            self.pulled.insert(name, now + PULLED_FOR);
        }
        self.remove(id);
    }

    /// Forgets what was pulled long ago, and what is more than so many.
    fn forget_pulled(&mut self, now: Instant, keep: usize) {
        while let Some((until, name)) = self.pulled_order.front() {
            if now < *until && self.pulled_order.len() <= keep {
                return;
            }
            if self.pulled.get(name) == Some(until) {
                self.pulled.remove(name);
            }
            self.pulled_order.pop_front();
        }
    }

    /// A request has ended, and nothing is held for it.
    pub(super) fn remove(&mut self, id: RequestId) {
        let Some(name) = self.names.remove(&id) else { return };
        if self.ids.get(&name) == Some(&id) {
            self.ids.remove(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_later_of_two_requests_of_one_name_is_meant() {
        let mut names = ExportNames::default();
        names.insert(RequestId(1), "a".to_owned());
        names.insert(RequestId(2), "a".to_owned());
        names.insert(RequestId(3), "b".to_owned());
        let release = |names: &mut ExportNames, name: &str| names.release(Instant::ZERO, name.to_owned());
        assert_eq!(release(&mut names, "a"), Some(RequestId(2)));
        names.remove(RequestId(1));
        assert_eq!(
            release(&mut names, "a"),
            Some(RequestId(2)),
            "the earlier one's end says nothing of it"
        );
        names.remove(RequestId(2));
        names.remove(RequestId(2));
        assert_eq!(
            (release(&mut names, "a"), release(&mut names, "b")),
            (None, Some(RequestId(3)))
        );
        names.remove(RequestId(3));
        assert!(names.ids.is_empty() && names.names.is_empty());
    }

    #[test]
    fn what_was_pulled_is_told_from_what_is_gone() {
        let mut names = ExportNames::default();
        let (start, late) = (Instant::ZERO, Instant::ZERO + PULLED_FOR);
        for (id, name) in [(1, "pulled"), (2, "gone"), (3, "held")] {
            names.insert(RequestId(id), name.to_owned());
        }
        names.pulled(start, RequestId(1));
        names.remove(RequestId(2));
        let check = |names: &mut ExportNames, now, name: &str, expected: Option<Named>| {
            assert_eq!(names.find(now, name), expected, "{name} at {now}");
        };
        check(&mut names, start, "pulled", Some(Named::Pulled));
        check(&mut names, start, "gone", None);
        check(&mut names, start, "held", Some(Named::Request(RequestId(3))));
        check(&mut names, late, "pulled", None);
        names.insert(RequestId(4), "held".to_owned());
        names.pulled(late, RequestId(3));
        check(&mut names, late, "held", Some(Named::Request(RequestId(4))));
        names.pulled(late, RequestId(4));
        names.insert(RequestId(5), "held".to_owned());
        names.remove(RequestId(5));
        check(&mut names, late, "held", None);
        for id in 10..=10 + PULLED_MAX as u64 {
            names.insert(RequestId(id), id.to_string());
            names.pulled(late, RequestId(id));
        }
        assert_eq!((names.pulled.len(), names.pulled_order.len()), (PULLED_MAX, PULLED_MAX));
        check(&mut names, late, "10", None);
        check(&mut names, late, "11", Some(Named::Pulled));
    }

    #[test]
    fn a_release_that_comes_first_waits_for_its_request() {
        let mut names = ExportNames::default();
        let (start, late) = (Instant::ZERO, Instant::ZERO + EARLY_FOR);
        assert_eq!(names.release(start, "a".to_owned()), None);
        assert_eq!(names.release(start, "b".to_owned()), None);
        assert!(!names.was_released(start, "c"));
        assert!(names.was_released(start, "a"));
        assert!(!names.was_released(start, "a"), "it counts once");
        assert!(!names.was_released(late, "b"), "it counts for a while");
        for number in 0..=EARLY_MAX {
            names.release(start, number.to_string());
        }
        assert_eq!(names.early.len(), EARLY_MAX);
        assert!(
            !names.was_released(start, "0") && names.was_released(start, "1"),
            "the oldest went"
        );
    }
}
