//! Means, spreads, quantiles and bootstrap intervals.
//!
//! Small and written out, because every figure of a report has to be the same bytes on every machine, and because which
//! quantile is meant has to be said somewhere: nearest rank, the smallest value that at least the given share of all
//! values does not exceed. It is always a value that was measured.

use homing_units::{Rng, rng_for};
use rand::Rng as _;

/// Resamples of a bootstrap: enough for the bounds of a 95% interval to settle to about a percent of its width.
const RESAMPLES: usize = 4000;

/// The mean; `None` of nothing.
#[must_use]
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The standard deviation of a sample (divided by n - 1); `None` below two values.
#[must_use]
pub fn stdev(values: &[f64]) -> Option<f64> {
    if values.len() < 2 {
        return None;
    }
    let mean = mean(values)?;
    let squares: f64 = values.iter().map(|value| (value - mean) * (value - mean)).sum();
    Some((squares / (values.len() - 1) as f64).sqrt())
}

/// The quantile of `sorted` at `per_mille` thousandths, by nearest rank; `None` of nothing.
///
/// # Panics
/// If `per_mille` is above 1000.
#[must_use]
pub fn quantile(sorted: &[f64], per_mille: usize) -> Option<f64> {
    assert!(per_mille <= 1000, "a quantile lies between 0 and 1000 thousandths");
    let rank = (sorted.len() * per_mille).div_ceil(1000).max(1);
    sorted.get(rank - 1).copied()
}

/// The values in ascending order.
#[must_use]
pub fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

/// The 95% percentile-bootstrap interval of the mean; `None` below two values. `name` and `values` alone decide the
/// resamples, so that a report does not depend on what else is in it.
#[must_use]
pub fn bootstrap_95(values: &[f64], name: &str) -> Option<[f64; 2]> {
    if values.len() < 2 {
        return None;
    }
    let mut rng = rng_for(0, name);
    let resampled = (0..RESAMPLES).map(|_| mean_of_resample(values, &mut rng)).collect();
    let means = sorted(resampled);
    Some([quantile(&means, 25)?, quantile(&means, 975)?])
}

fn mean_of_resample(values: &[f64], rng: &mut Rng) -> f64 {
    let draw = |rng: &mut Rng| {
        // The high half of the product: uniform over the indices, without a division.
        let index = ((u128::from(rng.next_u64()) * values.len() as u128) >> 64) as usize;
        values[index]
    };
    values.iter().map(|_| draw(rng)).sum::<f64>() / values.len() as f64
}

/// A figure as reports write it: with six decimals, which is a microsecond.
#[must_use]
pub fn rounded(value: f64) -> f64 {
    const DECIMALS: f64 = 1e6;
    let scaled = (value * DECIMALS).round() / DECIMALS;
    // A small negative figure must not become "-0.0".
    if scaled == 0.0 { 0.0 } else { scaled }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn values() -> impl Strategy<Value = Vec<f64>> {
        proptest::collection::vec(-1e6..1e6, 1..60)
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-6 * (1.0 + a.abs().max(b.abs()))
    }

    proptest! {
        #[test]
        fn a_quantile_is_the_smallest_value_that_enough_do_not_exceed(values in values(), per_mille in 0_usize..=1000) {
            let enough = |candidate: f64| {
                let count = values.iter().filter(|&&value| value <= candidate).count();
                count * 1000 >= values.len() * per_mille
            };
            let naive = values.iter().copied().filter(|&value| enough(value)).min_by(f64::total_cmp);
            prop_assert_eq!(quantile(&sorted(values.clone()), per_mille), naive);
        }

        #[test]
        fn the_spread_is_that_of_all_pairs(values in values()) {
            // The sample variance is half the mean squared difference of all ordered pairs of different values.
            let n = values.len() as f64;
            let pairs: f64 = values.iter().flat_map(|a| values.iter().map(move |b| (a - b) * (a - b))).sum();
            match stdev(&values) {
                Some(stdev) => prop_assert!(close(stdev * stdev, pairs / (2.0 * n * (n - 1.0)))),
                None => prop_assert_eq!(values.len(), 1),
            }
        }

        #[test]
        fn an_interval_lies_within_the_values(values in values()) {
            let sorted = sorted(values.clone());
            match bootstrap_95(&values, "test") {
                Some([low, high]) => {
                    prop_assert!(low <= high);
                    prop_assert!(sorted[0] - 1e-6 <= low && high <= sorted[sorted.len() - 1] + 1e-6);
                    prop_assert_eq!(bootstrap_95(&values, "test"), Some([low, high]));
                }
                None => prop_assert_eq!(values.len(), 1),
            }
        }

        #[test]
        fn an_interval_of_many_values_is_that_of_the_central_limit(seed in 0_u64..20) {
            let mut rng = rng_for(seed, "values");
            let values: Vec<f64> = (0..400).map(|_| (rng.next_u64() >> 40) as f64).collect();
            let [low, high] = bootstrap_95(&values, "test").expect("there are many");
            let half = 1.96 * stdev(&values).expect("there are many") / 20.0;
            let mean = mean(&values).expect("there are many");
            prop_assert!((high - low - 2.0 * half).abs() < 0.4 * half, "{} against {}", high - low, 2.0 * half);
            prop_assert!((low + half - mean).abs() < 0.3 * half && (high - half - mean).abs() < 0.3 * half);
        }
    }

    #[test]
    fn nothing_has_no_figures() {
        assert_eq!(
            (mean(&[]), stdev(&[]), quantile(&[], 500), bootstrap_95(&[], "")),
            (None, None, None, None)
        );
    }

    #[test]
    fn figures_are_rounded_to_six_decimals() {
        let check = |value: f64, expected: &str| assert_eq!(format!("{:?}", rounded(value)), expected);
        check(0.1 + 0.2, "0.3");
        check(-1e-9, "0.0");
        check(2.000_000_5, "2.000001");
        check(123_456_789.123_456_7, "123456789.123457");
    }
}
