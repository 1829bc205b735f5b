//! Requests that wait: in which order they are looked at, whose turn it is first of all, and whom to look at when something is
//! freed.
//!
//! The order is by priority, which the client asks for; then, as the policy wants it ([`Order`](crate::policies::Order)), by the
//! service that the session has had and the work that the turn still is; then by deadline. Whoever is overdue, having waited longer
//! than a bound, comes before all who are not, whatever their rank; among themselves the overdue go by deadline. So nobody starves,
//! however low they rank.
//!
//! Who has waited longest is another question than who goes next: the senior, for whom room is kept. It is the first by deadline of
//! the overdue or, as long as nobody is, of the best class, which is priority and service: a large prompt is not passed over
//! by small ones of its equals, and by those who may go before it for a bounded time only.
//!
//! To plan a long prompt costs a millisecond or two, so a release must not wake everybody: it wakes the first few of those that
//! wait for just this worker, or for any. Who waits for another worker sleeps on. Each has a timer of its own besides.

use homing_units::{Instant, RequestId, SessionId, WorkerId};
use std::collections::{BTreeMap, BTreeSet};

/// The queue.
#[derive(Debug, Default)]
pub(crate) struct WaitQueue {
    places: BTreeMap<RequestId, Place>,
    /// In the order in which they are looked at, as long as nobody is overdue.
    ranked: BTreeSet<(Rank, Instant, RequestId)>,
    /// By class and deadline.
    seniors: BTreeSet<(Class, Instant, RequestId)>,
    /// By deadline, whatever their rank.
    deadlines: BTreeSet<(Instant, RequestId)>,
    sessions: BTreeSet<(SessionId, RequestId)>,
    freed: Freed,
}

/// Where a request stands in the order: lower is earlier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    /// What the client asks for.
    pub(crate) priority: i32,
    /// How much service its session has had, as far as the policy cares.
    pub(crate) service: i32,
    /// How much is to be computed for it, as far as the policy cares.
    pub(crate) work: u32,
}

/// Those of a class are equals but for their work, and none of them overtakes another that has waited long.
pub(crate) type Class = (i32, i32);

impl Rank {
    /// Priority and service.
    pub(crate) const fn class(self) -> Class {
        (self.priority, self.service)
    }
}

/// One that waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) session: SessionId,
    pub(crate) rank: Rank,
    /// It waits until then at most.
    pub(crate) deadline: Instant,
    /// From then on it comes before all who are not overdue.
    pub(crate) overdue: Instant,
    /// Not to be looked at before this.
    pub(crate) not_before: Instant,
    /// The one worker that it waits for; `None` where any will do.
    pub(crate) waits_for: Option<WorkerId>,
}

/// The one for whom room is kept, if for anybody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Senior {
    pub(crate) id: RequestId,
    /// Those of better classes may go before it; `None` where nobody may, as it has waited longer than anybody should.
    pub(crate) class: Option<Class>,
}

impl Senior {
    /// Whether one that ranks so has to let it go first.
    pub(crate) fn precedes(&self, rank: Rank) -> bool {
        self.class.is_none_or(|class| class <= rank.class())
    }
}

/// What was freed since the queue was looked at.
#[derive(Debug, Default)]
struct Freed {
    workers: BTreeSet<WorkerId>,
    /// The fleet has changed: everybody may look again.
    all: bool,
}

impl WaitQueue {
    pub(crate) fn insert(&mut self, id: RequestId, place: Place) {
        self.remove(id);
        self.ranked.insert((place.rank, place.deadline, id));
        self.seniors.insert((place.rank.class(), place.deadline, id));
        self.deadlines.insert((place.deadline, id));
        self.sessions.insert((place.session, id));
        self.places.insert(id, place);
    }

    pub(crate) fn remove(&mut self, id: RequestId) {
        if let Some(place) = self.places.remove(&id) {
            self.ranked.remove(&(place.rank, place.deadline, id));
            self.seniors.remove(&(place.rank.class(), place.deadline, id));
            self.deadlines.remove(&(place.deadline, id));
            self.sessions.remove(&(place.session, id));
        }
    }

    /// It was looked at in vain: it waits for this worker, or for any, and is known to be so much work.
    pub(crate) fn waits_for(&mut self, id: RequestId, worker: Option<WorkerId>, work: u32) {
        if let Some(place) = self.places.get_mut(&id) {
            place.waits_for = worker;
            let rank = Rank { work, ..place.rank };
            self.rerank(id, rank);
        }
    }

    /// A session has had service, so that its level is this now: all of its turns that wait rank by that.
    pub(crate) fn served(&mut self, session: SessionId, service: i32) {
        let turns = (session, RequestId(0))..=(session, RequestId(u64::MAX));
        let turns: Vec<RequestId> = self.sessions.range(turns).map(|(_, id)| *id).collect();
        for id in turns {
            let rank = self.places[&id].rank;
            self.rerank(id, Rank { service, ..rank });
        }
    }

    /// One that waits ranks so from now on.
    fn rerank(&mut self, id: RequestId, rank: Rank) {
        let place = self.places.get_mut(&id).expect("only one that waits has a rank");
        if rank != place.rank {
            self.ranked.remove(&(place.rank, place.deadline, id));
            self.ranked.insert((rank, place.deadline, id));
            self.seniors.remove(&(place.rank.class(), place.deadline, id));
            self.seniors.insert((rank.class(), place.deadline, id));
            place.rank = rank;
        }
    }

    /// It is not to be looked at before this, whatever is freed.
    pub(crate) fn sleeps(&mut self, id: RequestId, not_before: Instant) {
        if let Some(place) = self.places.get_mut(&id) {
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

    /// The first few that what was freed may help, in order: the overdue by deadline, the others by rank.
    pub(crate) fn take_ready(&mut self, now: Instant, limit: usize) -> Vec<RequestId> {
        let freed = std::mem::take(&mut self.freed);
        let helps = |id: &RequestId| {
            let place = &self.places[id];
            place.not_before <= now
                && (freed.all || place.waits_for.is_none_or(|worker| freed.workers.contains(&worker)))
        };
        let is_overdue = |id: &RequestId| self.places[id].overdue <= now;
        let overdue = self.deadlines.iter().map(|(_, id)| *id).take_while(is_overdue);
        let ranked = self.ranked.iter().map(|(.., id)| *id);
        overdue
            .chain(ranked.filter(|id| !is_overdue(id)))
            .filter(helps)
            .take(limit)
            .collect()
    }

    /// Where one that waits stands; `None` where it does not wait.
    pub(crate) fn rank_of(&self, id: RequestId) -> Option<Rank> {
        self.places.get(&id).map(|place| place.rank)
    }

    /// The one that has waited longest: of the overdue if there are any, else of the best class.
    pub(crate) fn senior(&self, now: Instant) -> Option<Senior> {
        let (_, longest) = *self.deadlines.first()?;
        if self.places[&longest].overdue <= now {
            return Some(Senior {
                id: longest,
                class: None,
            });
        }
        let (class, _, id) = *self.seniors.first()?;
        Some(Senior { id, class: Some(class) })
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// All that wait, by id, with their deadlines.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (RequestId, Instant)> + '_ {
        self.places.iter().map(|(id, place)| (*id, place.deadline))
    }

    /// Checks that its orders are of the same requests.
    pub(crate) fn check_invariants(&self) {
        let ranked = self.places.iter().map(|(id, place)| (place.rank, place.deadline, *id));
        assert_eq!(self.ranked, ranked.collect(), "ranks are those of who waits");
        let seniors = self
            .places
            .iter()
            .map(|(id, place)| (place.rank.class(), place.deadline, *id));
        assert_eq!(self.seniors, seniors.collect(), "seniors are those who wait");
        let deadlines = self.places.iter().map(|(id, place)| (place.deadline, *id));
        assert_eq!(self.deadlines, deadlines.collect(), "deadlines are those of who waits");
        let sessions = self.places.iter().map(|(id, place)| (place.session, *id));
        assert_eq!(self.sessions, sessions.collect(), "sessions are those of who waits");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 100;
    const BOUND: u64 = 50;

    fn at(nanos: u64) -> Instant {
        Instant::from_nanos(nanos)
    }

    /// One that came at this time and ranks so.
    fn place(since: u64, rank: Rank) -> Place {
        Place {
            session: SessionId(since % 2),
            rank,
            deadline: at(since + LIMIT),
            overdue: at(since + BOUND),
            not_before: at(0),
            waits_for: None,
        }
    }

    fn rank(priority: i32, service: i32, work: u32) -> Rank {
        Rank {
            priority,
            service,
            work,
        }
    }

    fn ready(queue: &mut WaitQueue, now: u64, limit: usize) -> Vec<u64> {
        let ready = queue.take_ready(at(now), limit);
        queue.check_invariants();
        ready.into_iter().map(|id| id.0).collect()
    }

    #[test]
    fn a_release_wakes_the_first_few_that_it_may_help() {
        let mut queue = WaitQueue::default();
        for (id, worker) in (0..).zip([Some(7), Some(8), None, Some(7), Some(8), Some(7)]) {
            let place = Place {
                not_before: at(if id == 5 { 50 } else { 0 }),
                ..place(5 - id, Rank::default())
            };
            queue.insert(RequestId(id), place);
            queue.waits_for(RequestId(id), worker.map(WorkerId), 0);
        }
        queue.free(WorkerId(7));
        assert!(queue.is_freed());
        assert_eq!(ready(&mut queue, 10, 9), [3, 2, 0]);
        assert!(!queue.is_freed());
        queue.free(WorkerId(7));
        assert_eq!(ready(&mut queue, 60, 2), [5, 3]);
        queue.free_all();
        assert_eq!(ready(&mut queue, 10, 3), [4, 3, 2]);
        assert_eq!(queue.len(), 6);
    }

    #[track_caller]
    fn check(waiting: &[(u64, Rank)], now: u64, expected: &[u64], senior: u64) {
        let mut queue = WaitQueue::default();
        for (id, (since, rank)) in (0..).zip(waiting) {
            queue.insert(RequestId(id), place(*since, *rank));
        }
        queue.free_all();
        assert_eq!(ready(&mut queue, now, 99), expected, "{waiting:?} at {now}");
        assert_eq!(queue.senior(at(now)).map(|senior| senior.id.0), Some(senior));
        for id in 0..waiting.len() as u64 {
            queue.remove(RequestId(id));
            queue.check_invariants();
        }
        assert_eq!((queue.is_empty(), queue.senior(at(now))), (true, None));
    }

    #[test]
    fn priority_comes_before_service_service_before_work_and_work_before_age() {
        let waiting = [
            (0, rank(1, 0, 0)),
            (1, rank(0, 5, 1)),
            (2, rank(0, 2, 9)),
            (3, rank(0, 2, 3)),
            (4, rank(0, 2, 3)),
            (5, rank(-1, 9, 9)),
        ];
        check(&waiting, 10, &[5, 3, 4, 2, 1, 0], 5);
        check(&waiting[..5], 10, &[3, 4, 2, 1, 0], 2);
        check(&waiting[..1], 10, &[0], 0);
    }

    #[test]
    fn who_is_overdue_comes_first_whatever_its_rank() {
        let waiting = [
            (0, rank(9, 9, 9)),
            (1, rank(9, 9, 8)),
            (2, rank(-9, 0, 0)),
            (30, rank(0, 0, 0)),
        ];
        check(&waiting, BOUND - 1, &[2, 3, 1, 0], 2);
        check(&waiting, BOUND, &[0, 2, 3, 1], 0);
        check(&waiting, BOUND + 1, &[0, 1, 2, 3], 0);
        check(&waiting, LIMIT, &[0, 1, 2, 3], 0);
    }

    #[test]
    fn what_is_known_of_its_work_moves_one_in_the_order() {
        let mut queue = WaitQueue::default();
        for id in 0..3 {
            queue.insert(RequestId(id), place(id, Rank::default()));
        }
        queue.waits_for(RequestId(0), None, 700);
        queue.waits_for(RequestId(1), None, 20);
        queue.free_all();
        assert_eq!(ready(&mut queue, 10, 9), [2, 1, 0]);
        assert_eq!(
            queue.senior(at(10)).map(|senior| senior.id.0),
            Some(0),
            "room is kept for who has waited longest"
        );
    }

    #[test]
    fn service_that_a_session_has_moves_all_of_its_turns_that_wait() {
        let mut queue = WaitQueue::default();
        for id in 0..5 {
            queue.insert(RequestId(id), place(id, Rank::default()));
        }
        queue.served(SessionId(0), 1);
        queue.free_all();
        assert_eq!(ready(&mut queue, 10, 9), [1, 3, 0, 2, 4]);
        queue.served(SessionId(7), 9);
        queue.served(SessionId(1), 2);
        queue.free_all();
        assert_eq!(ready(&mut queue, 10, 9), [0, 2, 4, 1, 3]);
    }
}
