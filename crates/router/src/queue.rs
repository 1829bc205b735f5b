//! Requests that wait, by deadline, and who of them to look at when something is freed.
//!
//! To plan a long prompt costs a millisecond or two, so a release must not wake everybody: it wakes the first few of those that
//! wait for just this worker, or for any. Who waits for another worker sleeps on. Each has a timer of its own besides.

use homing_units::{Instant, RequestId, WorkerId};
use std::collections::{BTreeMap, BTreeSet};

/// The queue.
#[derive(Debug, Default)]
pub(crate) struct WaitQueue {
    places: BTreeMap<(Instant, RequestId), Place>,
    freed: Freed,
}

/// One that waits.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// The one worker that it waits for; `None` where any will do.
    waits_for: Option<WorkerId>,
    /// Not to be looked at before this.
    not_before: Instant,
}

/// What was freed since the queue was looked at.
#[derive(Debug, Default)]
struct Freed {
    workers: BTreeSet<WorkerId>,
    /// The fleet has changed: everybody may look again.
    all: bool,
}

impl WaitQueue {
    pub(crate) fn insert(&mut self, deadline: Instant, id: RequestId, not_before: Instant) {
        self.places.insert(
            (deadline, id),
            Place {
                waits_for: None,
                not_before,
            },
        );
    }

    pub(crate) fn remove(&mut self, deadline: Instant, id: RequestId) {
        self.places.remove(&(deadline, id));
    }

    /// It was looked at in vain, and waits for this worker, or for any.
    pub(crate) fn waits_for(&mut self, deadline: Instant, id: RequestId, worker: Option<WorkerId>) {
        if let Some(place) = self.places.get_mut(&(deadline, id)) {
            place.waits_for = worker;
        }
    }

    /// It is not to be looked at before this, whatever is freed.
    pub(crate) fn sleeps(&mut self, deadline: Instant, id: RequestId, not_before: Instant) {
        if let Some(place) = self.places.get_mut(&(deadline, id)) {
            place.not_before = not_before;
        }
    }

    /// Something was freed at this worker.
    pub(crate) fn free(&mut self, worker: WorkerId) {
        self.freed.workers.insert(worker);
    }

    /// The fleet has changed.
    pub(crate) fn free_all(&mut self) {
        self.freed.all = true;
    }

    /// Whether anything was freed since [`WaitQueue::take_ready`].
    pub(crate) fn is_freed(&self) -> bool {
        self.freed.all || !self.freed.workers.is_empty()
    }

    /// The first few that what was freed may help, in order.
    pub(crate) fn take_ready(&mut self, now: Instant, limit: usize) -> Vec<RequestId> {
        let freed = std::mem::take(&mut self.freed);
        let helps = |place: &Place| {
            place.not_before <= now
                && (freed.all || place.waits_for.is_none_or(|worker| freed.workers.contains(&worker)))
        };
        let ready = self.places.iter().filter(|(_, place)| helps(place));
        ready.map(|((_, id), _)| *id).take(limit).collect()
    }

    /// The first of all.
    pub(crate) fn first(&self) -> Option<RequestId> {
        self.places.first_key_value().map(|((_, id), _)| *id)
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// All that wait, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Instant, RequestId)> + '_ {
        self.places.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_wakes_the_first_few_that_it_may_help() {
        let at = Instant::from_nanos;
        let mut queue = WaitQueue::default();
        for id in 0..6 {
            queue.insert(at(100 - id), RequestId(id), at(if id == 5 { 50 } else { 0 }));
        }
        let waits = [Some(7), Some(8), None, Some(7), Some(8), Some(7)];
        for (id, worker) in (0..).zip(waits) {
            queue.waits_for(at(100 - id), RequestId(id), worker.map(WorkerId));
        }
        let ready = |queue: &mut WaitQueue, now, limit| -> Vec<u64> {
            queue.take_ready(at(now), limit).into_iter().map(|id| id.0).collect()
        };
        queue.free(WorkerId(7));
        assert!(queue.is_freed());
        assert_eq!(ready(&mut queue, 10, 9), [3, 2, 0]);
        assert!(!queue.is_freed());
        queue.free(WorkerId(7));
        assert_eq!(ready(&mut queue, 60, 2), [5, 3]);
        queue.free_all();
        assert_eq!(ready(&mut queue, 10, 3), [4, 3, 2]);
        assert_eq!((queue.len(), queue.first()), (6, Some(RequestId(5))));
    }
}
