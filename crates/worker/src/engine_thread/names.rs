//! Which request, live or held for a puller, goes by which name of its client's.
//!
//! Whoever asked for an export may give it up before its answer has told it what the export is called here: all that it knows
//! is what it called its own request. Two requests of one name are the client's mistake; the later one is meant then.
//!
//! The two come over different connections, so the release may be here first, while the request waits in a socket for a busy
//! machine: it is remembered for a while, and the request that comes late is given up as it begins. Without that it would be
//! computed for nobody and held until its lease ends.

use homing_units::{Duration, Instant, RequestId};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// How long a release waits for its request: whoever asked has given up, and nothing waits in a socket for longer.
const EARLY_FOR: Duration = Duration::from_secs(30);
/// Releases that wait for their requests; above, the oldest goes.
const EARLY_MAX: usize = 1_024;

/// The names of requests that ask for an export. Bounded by the live requests, the exports that the pool has room for and
/// [`EARLY_MAX`].
#[derive(Debug, Default)]
pub(super) struct ExportNames {
    ids: HashMap<Arc<str>, RequestId>,
    names: HashMap<RequestId, Arc<str>>,
    /// What was released before it was here, with the time until which that counts, oldest first.
    early: VecDeque<(Instant, Box<str>)>,
}

impl ExportNames {
    /// A request goes by this name from now on.
    pub(super) fn insert(&mut self, id: RequestId, name: String) {
        let name: Arc<str> = name.into();
        self.ids.insert(name.clone(), id);
        self.names.insert(id, name);
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
