//! One timer for each key, and the earliest of all. Setting a key again replaces its time, so the size is bounded by
//! the keys that live. It does not call anybody: the router asks for what is due.

use homing_units::Instant;
use std::collections::{BTreeMap, BTreeSet};

/// Timers by key.
#[derive(Debug)]
pub(crate) struct Timers<K> {
    by_key: BTreeMap<K, Instant>,
    by_time: BTreeSet<(Instant, K)>,
}

impl<K: Ord + Copy> Timers<K> {
    pub(crate) const fn new() -> Self {
        Self {
            by_key: BTreeMap::new(),
            by_time: BTreeSet::new(),
        }
    }

    /// The key is due at `at`, and no longer when it was due before.
    pub(crate) fn set(&mut self, key: K, at: Instant) {
        self.clear(key);
        self.by_key.insert(key, at);
        self.by_time.insert((at, key));
    }

    /// The key is not due any more.
    pub(crate) fn clear(&mut self, key: K) {
        if let Some(at) = self.by_key.remove(&key) {
            self.by_time.remove(&(at, key));
        }
    }

    /// Whether the key is due at some time.
    pub(crate) fn is_set(&self, key: K) -> bool {
        self.by_key.contains_key(&key)
    }

    /// When the next key is due.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// Takes the earliest key that is due at `now`.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<K> {
        let (at, key) = *self.by_time.first()?;
        (at <= now).then(|| {
            self.clear(key);
            key
        })
    }

    pub(crate) fn check_invariants(&self) {
        assert_eq!(
            self.by_key.len(),
            self.by_time.len(),
            "each timer is known by key and by time"
        );
        for (key, at) in &self.by_key {
            assert!(
                self.by_time.contains(&(*at, *key)),
                "each timer is known by key and by time"
            );
        }
    }

    /// The keys that have a timer.
    pub(crate) fn keys(&self) -> impl Iterator<Item = K> + '_ {
        self.by_key.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_due_once_at_its_last_time() {
        let at = Instant::from_nanos;
        let mut timers = Timers::new();
        timers.set('a', at(5));
        timers.set('b', at(3));
        timers.set('a', at(4));
        timers.check_invariants();
        assert_eq!(timers.next(), Some(at(3)));
        assert_eq!(timers.pop_due(at(2)), None);
        assert_eq!(timers.pop_due(at(9)), Some('b'));
        assert_eq!(timers.pop_due(at(9)), Some('a'));
        assert_eq!(timers.pop_due(at(9)), None);
        assert_eq!(timers.next(), None);
    }
}
