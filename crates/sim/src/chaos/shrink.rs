//! Cutting a schedule down to the faults that a violation takes: delta debugging (Zeller and Hildebrandt, "Simplifying and
//! isolating failure-inducing input", 2002, `ddmin`), and then one fault after the other.
//!
//! A cut counts if the run still breaks in the same way; a cut that breaks in another way is another bug. Runs are bounded;
//! what is left then may not be minimal, but it breaks.

use super::{Scenario, Violation};
use crate::fault::schedule::Schedule;

/// Runs that cutting down may take.
const MAX_RUNS: u32 = 500;

/// Cuts the schedule of a scenario that breaks down to one of which every fault is needed.
#[must_use]
pub fn shrink(scenario: &Scenario, violation: &Violation) -> Schedule {
    let mut runs = 0;
    let breaks = |schedule: &Schedule| {
        runs += 1;
        runs <= MAX_RUNS && still_breaks(scenario, schedule, violation)
    };
    minimal(scenario.config.faults.clone(), breaks)
}

fn still_breaks(scenario: &Scenario, schedule: &Schedule, violation: &Violation) -> bool {
    let run = scenario.clone().with_schedule(schedule.clone()).run();
    run.err().is_some_and(|found| found.kind == violation.kind)
}

/// The smallest list that `breaks` that taking parts away leads to: no single entry can be taken away.
fn minimal<T: Clone>(whole: Vec<T>, mut breaks: impl FnMut(&Vec<T>) -> bool) -> Vec<T> {
    let mut left = whole;
    if breaks(&Vec::new()) {
        return Vec::new();
    }
    let mut parts = 2;
    while left.len() > 1 {
        let size = left.len().div_ceil(parts);
        let without = |part: usize| -> Vec<T> {
            let (from, to) = (part * size, ((part + 1) * size).min(left.len()));
            [&left[..from.min(left.len())], &left[to..]].concat()
        };
        let cut = (0..left.len().div_ceil(size)).map(without).find(|rest| breaks(rest));
        match cut {
            Some(rest) => {
                left = rest;
                parts = (parts - 1).max(2);
            }
            None if parts >= left.len() => break,
            None => parts = (parts * 2).min(left.len()),
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is left of 0 to 19 if these are needed.
    fn check(needed: &[u32]) {
        let mut runs = 0;
        let left = minimal((0..20).collect(), |list: &Vec<u32>| {
            runs += 1;
            needed.iter().all(|entry| list.contains(entry))
        });
        assert_eq!(left, needed);
        assert!(runs < 200, "`{runs}` runs");
    }

    #[test]
    fn only_what_it_takes_is_left() {
        check(&[]);
        check(&[7]);
        check(&[0, 19]);
        check(&[3, 4, 5, 18]);
        check(&(0..20).collect::<Vec<_>>());
    }

    #[test]
    fn a_list_that_breaks_only_in_pairs_keeps_a_pair() {
        let left = minimal(vec![1, 2, 2, 1, 3], |list: &Vec<u32>| {
            list.iter().filter(|entry| **entry == 2).count() >= 2
        });
        assert_eq!(left, [2, 2]);
    }
}
