//! The figures of a cell, and who is best in it.

use super::{Cell, others};
use crate::experiments::Get;
use crate::results::Results;
use crate::sample::Sample;

/// The figures of the tables, less being better. Seconds, but for the last two.
pub(super) const FIGURES: [(&str, &str, Get); 6] = [
    ("latency mean", "s", |run| run.run.latency_s.mean),
    ("TTFT mean", "s", |run| run.run.ttft_s.mean),
    ("TTFT p90", "s", |run| run.run.ttft_s.p90),
    ("TPOT p90", "s", |run| run.run.tpot_s.p90),
    ("busy max/min", "x", |run| run.run.balance.busy_max_min),
    ("errors", "", |run| Some(run.errors())),
];

/// Places of figures.
pub(super) const LATENCY: usize = 0;
pub(super) const TTFT_P90: usize = 2;
pub(super) const TPOT_P90: usize = 3;

/// A figure of a policy in a cell.
pub(super) fn sample(results: &Results, cell: &Cell, policy: &str, figure: usize, seeds: u64) -> Sample {
    let get = FIGURES[figure].2;
    Sample::of(results.of(&cell.setup(policy, seeds)).iter().map(get))
}

/// The other policy with the least mean latency among those without errors; among all where each has some.
pub(super) fn best_other(results: &Results, cell: &Cell, seeds: u64) -> &'static str {
    let rank = |policy: &&str| {
        let errors = results
            .of(&cell.setup(policy, seeds))
            .iter()
            .any(|run| run.errors() > 0.0);
        let latency = sample(results, cell, policy, LATENCY, seeds)
            .mean()
            .unwrap_or(f64::INFINITY);
        (errors, latency)
    };
    let ranked = others().min_by(|left, right| {
        let (left, right) = (rank(left), rank(right));
        left.0.cmp(&right.0).then(left.1.total_cmp(&right.1))
    });
    ranked.expect("there are other policies")
}

/// By how much one mean is above another: 0.1 is 10% above, -0.2 is 20% below.
pub(super) fn above(ours: &Sample, theirs: &Sample) -> Option<f64> {
    let (ours, theirs) = (ours.mean()?, theirs.mean()?);
    (theirs > 0.0).then(|| ours / theirs - 1.0)
}

/// The middle of these; of an even number the mean of both.
pub(super) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = *values.get(middle)?;
    if values.len() % 2 == 1 {
        return Some(upper);
    }
    Some(f64::midpoint(values[middle - 1], upper))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_shares() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0]), Some(2.5));
        assert_eq!(median(vec![]), None);
        let of = |value: f64| Sample::of([Some(value)]);
        assert_eq!(above(&of(3.0), &of(2.0)), Some(0.5));
        assert_eq!(above(&of(3.0), &of(0.0)), None);
    }
}
