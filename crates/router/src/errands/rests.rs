//! What is left alone for a while. After each errand its subject rests, and after each that failed for twice as long as the last
//! time: a worker that refuses, or a link that is down, is not asked again and again for something that nobody waits for.

use homing_kv::BlockHash;
use homing_units::{Duration, Instant, SessionId, WorkerId};
use std::collections::BTreeMap;

/// Rests that are kept; above, the one that ends first is dropped.
const RESTS: usize = 1_024;

/// What an errand was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Subject {
    /// A session's next turn.
    Session(SessionId),
    /// Base content, by its last block, at a worker.
    Place(BlockHash, WorkerId),
}

/// Who rests, and until when.
#[derive(Debug, Default)]
pub(crate) struct Rests {
    by_subject: BTreeMap<Subject, Rest>,
}

#[derive(Clone, Copy, Debug)]
struct Rest {
    until: Instant,
    lasts: Duration,
}

impl Rests {
    /// Whether nothing is to be tried for it now.
    pub(crate) fn rests(&self, now: Instant, subject: Subject) -> bool {
        self.by_subject.get(&subject).is_some_and(|rest| now < rest.until)
    }

    /// It is left alone for so long.
    pub(crate) fn rest(&mut self, now: Instant, subject: Subject, lasts: Duration) {
        let until = now + lasts;
        self.by_subject.insert(subject, Rest { until, lasts });
        if self.by_subject.len() > RESTS {
            let first = self
                .by_subject
                .iter()
                .min_by_key(|(subject, rest)| (rest.until, **subject));
            let first = *first.expect("what is over the bound is not empty").0;
            self.by_subject.remove(&first);
        }
    }

    /// It failed: it is left alone for twice as long as the last time, between these bounds.
    pub(crate) fn rest_longer(&mut self, now: Instant, subject: Subject, least: Duration, most: Duration) {
        let last = self.by_subject.get(&subject).map_or(Duration::ZERO, |rest| rest.lasts);
        self.rest(now, subject, (last * 2).clamp(least.min(most), most));
    }

    /// A worker lives another life, or none.
    pub(crate) fn forget_worker(&mut self, worker: WorkerId) {
        self.by_subject
            .retain(|subject, _| !matches!(subject, Subject::Place(_, place) if *place == worker));
    }

    pub(crate) fn check_invariants(&self) {
        assert!(self.by_subject.len() <= RESTS, "rests are bounded");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_again_rests_longer_each_time() {
        let at = |seconds| Instant::ZERO + Duration::from_secs(seconds);
        let (least, most) = (Duration::from_secs(30), Duration::from_secs(100));
        let subject = Subject::Place(BlockHash(1), WorkerId(2));
        let mut rests = Rests::default();
        let mut now = 0;
        for lasts in [30, 60, 100, 100] {
            assert!(!rests.rests(at(now), subject), "after {now} s");
            rests.rest_longer(at(now), subject, least, most);
            assert!(rests.rests(at(now + lasts - 1), subject), "{lasts} s from {now} s on");
            now += lasts;
        }
        rests.rest(at(now), subject, least);
        rests.forget_worker(WorkerId(3));
        assert!(rests.rests(at(now), subject));
        rests.forget_worker(WorkerId(2));
        assert!(!rests.rests(at(now), subject), "it lives another life");
    }

    #[test]
    fn rests_are_bounded() {
        let mut rests = Rests::default();
        for session in 0..2_000 {
            let lasts = Duration::from_secs(10_000 - session);
            rests.rest(Instant::ZERO, Subject::Session(SessionId(session)), lasts);
        }
        rests.check_invariants();
        assert!(rests.rests(Instant::ZERO, Subject::Session(SessionId(0))));
    }
}
