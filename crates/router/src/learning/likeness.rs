//! Whether a worker is like its fellows. What was learnt of the whole fleet rests on many more observations than what was learnt of one
//! worker, so a worker's own figures count only where they have foretold what it took clearly better than the fleet's have.
//!
//! Without this, noise decides: of equal workers one is taken for a little slower, is sent fewer sessions, shows less, and stays so.

/// Observations below which a worker is like the others.
const ENOUGH: u32 = 16;

/// Squares of errors this many observations old count a third.
const MEMORY: f64 = 32.0;

/// The fleet's figures err so many times as much as its own, of a worker that is unlike the others.
const CLEARLY: f64 = 1.5;

/// An error of a share of what was measured is bounded to this: what was stalled by something unseen says little of either.
const ERROR_MAX: f64 = 1.0;

/// How well two sets of figures foretell what a worker takes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Likeness {
    /// The mean square of relative errors, by its own figures.
    own: f64,
    /// The same by those of the fleet.
    fellows: f64,
    seen: u32,
}

impl Likeness {
    /// Both have foretold what something took, with these relative errors.
    pub(crate) fn learn(&mut self, own: f64, fellows: f64) {
        self.seen = self.seen.saturating_add(1);
        let newest = 1.0 / f64::from(self.seen).min(MEMORY);
        for (mean, error) in [(&mut self.own, own), (&mut self.fellows, fellows)] {
            let error = error.clamp(-ERROR_MAX, ERROR_MAX);
            *mean += (error * error - *mean) * newest;
        }
    }

    /// Whether the worker has shown that it is not like the others.
    pub(crate) fn is_unlike(&self) -> bool {
        self.seen >= ENOUGH && self.fellows > self.own * CLEARLY * CLEARLY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_unlike_the_others_once_its_own_figures_are_clearly_better() {
        let check = |own: f64, fellows: f64, times: u32, expected: bool| {
            let mut likeness = Likeness::default();
            (0..times).for_each(|_| likeness.learn(own, fellows));
            assert_eq!(likeness.is_unlike(), expected, "{own} {fellows} {times}");
        };
        check(0.1, 0.3, 15, false);
        check(0.1, 0.3, 16, true);
        check(-0.1, 0.14, 1_000, false);
        check(0.2, 0.1, 1_000, false);
        check(0.0, 0.0, 1_000, false);
        check(1.0, 9.0, 1_000, false);
    }

    #[test]
    fn one_that_is_like_the_others_again_is_taken_for_that() {
        let mut likeness = Likeness::default();
        (0..100).for_each(|_| likeness.learn(0.1, 0.5));
        assert!(likeness.is_unlike());
        (0..100).for_each(|_| likeness.learn(0.1, 0.1));
        assert!(!likeness.is_unlike());
    }
}
