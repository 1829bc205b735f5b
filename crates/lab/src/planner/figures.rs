//! The figures of a cell, and who is best in it.

use super::outcome::{Outcome, Outcomes};
use super::{Cell, others};
use crate::sample::Sample;

/// A figure of one run.
type Get = fn(&Outcome) -> Option<f64>;

/// The figures of the tables, less being better: name, unit, and what it is.
pub(super) const FIGURES: [(&str, &str, Get); 7] = [
    ("latency mean", "s", |run| run.latency_mean_s),
    ("TTFT mean", "s", |run| run.ttft_mean_s),
    ("TTFT p90", "s", |run| run.ttft_p90_s),
    ("TPOT p90", "s", |run| run.tpot_p90_s),
    ("busy max/min", "x", |run| run.busy_max_min),
    ("requests max/min", "x", |run| run.requests_max_min),
    ("errors", "", |run| Some(run.errors)),
];

/// Places of figures.
pub(super) const LATENCY: usize = 0;
pub(super) const TTFT_MEAN: usize = 1;
pub(super) const TTFT_P90: usize = 2;
pub(super) const TPOT_P90: usize = 3;
pub(super) const BUSY: usize = 4;

/// A figure of a policy in a cell, over all seeds that it was run with.
pub(super) fn sample(outcomes: &Outcomes, cell: &Cell, policy: &str, figure: usize) -> Sample {
    let get = FIGURES[figure].2;
    Sample::of(outcomes.all(&cell.setup(policy, 1)).iter().map(get))
}

/// The other policies of a cell, the least mean latency first, those without errors before those with some, and before these the
/// ones that were run with most seeds: one seed is too few to be called best by.
pub(super) fn ranked(outcomes: &Outcomes, cell: &Cell) -> Vec<&'static str> {
    let rank = |policy: &&'static str| {
        let runs = outcomes.all(&cell.setup(policy, 1));
        let errors = runs.iter().any(|run| run.errors > 0.0);
        let latency = sample(outcomes, cell, policy, LATENCY).mean().unwrap_or(f64::INFINITY);
        (std::cmp::Reverse(runs.len()), errors, latency)
    };
    let mut policies: Vec<_> = others().map(|policy| (rank(&policy), policy)).collect();
    policies.sort_by(|(left, _), (right, _)| {
        (left.0, left.1)
            .cmp(&(right.0, right.1))
            .then(left.2.total_cmp(&right.2))
    });
    policies.into_iter().map(|(_, policy)| policy).collect()
}

/// The best other policy of a cell.
pub(super) fn best_other(outcomes: &Outcomes, cell: &Cell) -> &'static str {
    ranked(outcomes, cell)[0]
}

/// The planner's figure by that of the best other policy of the cell, less one: 0.1 is 10% worse, -0.2 is 20% better.
pub(super) fn against_best(outcomes: &Outcomes, cell: &Cell, figure: usize) -> Option<f64> {
    above(
        &sample(outcomes, cell, "homing", figure),
        &sample(outcomes, cell, best_other(outcomes, cell), figure),
    )
}

/// By how much one mean is above another, over the seeds that both have.
pub(super) fn above(ours: &Sample, theirs: &Sample) -> Option<f64> {
    let both = ours.values.len().min(theirs.values.len());
    let mean = |sample: &Sample| (both > 0).then(|| sample.values[..both].iter().sum::<f64>() / both as f64);
    let (ours, theirs) = (mean(ours)?, mean(theirs)?);
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
        let of = |values: &[f64]| Sample::of(values.iter().copied().map(Some));
        assert_eq!(above(&of(&[3.0]), &of(&[2.0])), Some(0.5));
        assert_eq!(above(&of(&[3.0]), &of(&[0.0])), None);
        assert_eq!(above(&of(&[]), &of(&[2.0])), None);
        // Only the seeds that both were run with are compared.
        assert_eq!(above(&of(&[3.0, 100.0]), &of(&[2.0])), Some(0.5));
    }
}
