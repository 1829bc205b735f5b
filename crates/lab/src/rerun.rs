//! What is the same in every run of the same sessions: the question that one run cannot answer.
//!
//! The papers ran one trace three times and asked which sessions starved in all three. The same is asked here of any
//! number of runs; it makes sense only where the sessions are the same ones, which [`crate::Setup::keep_order`] with a
//! generator of fixed seed gives.

use crate::observe::Observed;
use homing_report::Sessions;
use std::collections::BTreeMap;

/// Below this append rate a session starves, and from [`LUCKY_FROM`] on it does well; the outer fifths, as in the papers.
pub const STARVED_BELOW: f64 = 0.2;
/// See [`STARVED_BELOW`].
pub const LUCKY_FROM: f64 = 0.8;

/// What several runs of the same sessions have in common.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Common {
    /// Sessions that starved, in each run.
    pub starved_in_each: Vec<usize>,
    /// Sessions that starved in all of them.
    pub starved_in_all: usize,
    /// How many these would be if each run drew its starved sessions anew.
    pub starved_by_chance: f64,
    /// The longest prompts of sessions that starved in all runs, on average, in tokens.
    pub starved_peak_tokens: Option<f64>,
    /// The same of sessions that did well in all runs.
    pub lucky_peak_tokens: Option<f64>,
}

impl Common {
    /// What these runs have in common.
    #[must_use]
    pub fn of(runs: &[Observed]) -> Self {
        let sessions: Vec<&Sessions> = runs.iter().map(|run| &run.run.sessions).collect();
        Self::of_sessions(&sessions)
    }

    fn of_sessions(runs: &[&Sessions]) -> Self {
        let in_each: Vec<BTreeMap<&str, u32>> = runs.iter().map(|run| peaks(run, starves)).collect();
        let starved = in_all(&in_each);
        let lucky = in_all(&runs.iter().map(|run| peaks(run, does_well)).collect::<Vec<_>>());
        let all = runs.first().map_or(0, |run| run.append_rates.len()) as f64;
        let chance: f64 = in_each
            .iter()
            .map(|starved| starved.len() as f64 / all.max(1.0))
            .product();
        Self {
            starved_in_each: in_each.iter().map(BTreeMap::len).collect(),
            starved_in_all: starved.len(),
            starved_by_chance: if runs.is_empty() { 0.0 } else { all * chance },
            starved_peak_tokens: mean(&starved),
            lucky_peak_tokens: mean(&lucky),
        }
    }

    /// How much longer the prompts of those that starved in all runs get.
    #[must_use]
    pub fn peak_ratio(&self) -> Option<f64> {
        Some(self.starved_peak_tokens? / self.lucky_peak_tokens?)
    }
}

fn starves(append_rate: f64) -> bool {
    append_rate < STARVED_BELOW
}

fn does_well(append_rate: f64) -> bool {
    append_rate >= LUCKY_FROM
}

/// The longest prompts of the sessions with such an append rate.
fn peaks(run: &Sessions, such: fn(f64) -> bool) -> BTreeMap<&str, u32> {
    let sessions = run.append_rates.iter().filter(|session| such(session.append_rate));
    sessions
        .map(|session| (session.session.as_str(), session.peak_tokens))
        .collect()
}

/// The longest prompts of those that are in every run.
fn in_all(runs: &[BTreeMap<&str, u32>]) -> Vec<u32> {
    let Some((first, others)) = runs.split_first() else {
        return Vec::new();
    };
    let everywhere = |name: &&str| others.iter().all(|run| run.contains_key(name));
    first
        .iter()
        .filter(|(name, _)| everywhere(name))
        .map(|(_, peak)| *peak)
        .collect()
}

fn mean(peaks: &[u32]) -> Option<f64> {
    let sum: f64 = peaks.iter().map(|peak| f64::from(*peak)).sum();
    (!peaks.is_empty()).then(|| sum / peaks.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_report::AppendRate;

    /// A run in which sessions `0`, `1`, .. had these append rates; session `n` has a peak of `1000 * (n + 1)`.
    fn run(rates: &[f64]) -> Sessions {
        let rate = |(index, rate): (usize, &f64)| AppendRate {
            session: index.to_string(),
            later_turns: 10,
            append_rate: *rate,
            peak_tokens: 1000 * (index as u32 + 1),
        };
        Sessions {
            append_rates: rates.iter().enumerate().map(rate).collect(),
            ..Sessions::default()
        }
    }

    fn common(runs: &[&[f64]]) -> Common {
        let runs: Vec<Sessions> = runs.iter().map(|rates| run(rates)).collect();
        Common::of_sessions(&runs.iter().collect::<Vec<_>>())
    }

    #[test]
    fn what_three_runs_have_in_common() {
        // By hand: 0 and 3 starve in both first runs, 0 alone in the third too; 2 does well in all, 1 in two.
        let found = common(&[&[0.0, 0.9, 0.8, 0.19], &[0.1, 0.8, 1.0, 0.1], &[0.19, 0.79, 0.8, 0.2]]);
        let expected = Common {
            starved_in_each: vec![2, 2, 1],
            starved_in_all: 1,
            starved_by_chance: 4.0 * 0.5 * 0.5 * 0.25,
            starved_peak_tokens: Some(1000.0),
            lucky_peak_tokens: Some(3000.0),
        };
        assert_eq!(found, expected);
        assert_eq!(found.peak_ratio(), Some(1.0 / 3.0));
    }

    #[test]
    fn nothing_in_common_has_no_peak() {
        let found = common(&[&[0.1, 0.9], &[0.9, 0.1]]);
        assert_eq!((found.starved_in_all, found.starved_peak_tokens), (0, None));
        assert_eq!((found.peak_ratio(), found.starved_by_chance), (None, 0.5));
        assert_eq!(common(&[]), Common::default());
    }

    #[test]
    fn the_outer_fifths_are_those_of_the_histogram() {
        let mut rates = vec![0.2, 0.8, 0.799_999, 0.199_999];
        rates.extend([0.0, 1.0]);
        assert_eq!(rates.iter().filter(|rate| starves(**rate)).count(), 2);
        assert_eq!(rates.iter().filter(|rate| does_well(**rate)).count(), 2);
    }
}
