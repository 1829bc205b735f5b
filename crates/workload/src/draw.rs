//! Random draws whose bytes are the same on every machine: from the generator's bits, through `libm` alone.
//!
//! Quantile functions instead of a library's samplers, so that a sample can also be stratified: spread evenly over a
//! distribution and then shuffled, which gives a small trace the figures that a large one has by luck.

use homing_units::Rng;
use rand::Rng as _;

/// A random number of [0, 1).
pub(crate) fn unit(rng: &mut Rng) -> f64 {
    const UNIT: f64 = 1.0 / (1_u64 << 53) as f64;
    (rng.next_u64() >> 11) as f64 * UNIT
}

/// Fisher and Yates' shuffle.
pub(crate) fn shuffle<T>(items: &mut [T], rng: &mut Rng) {
    for last in (1..items.len()).rev() {
        let other = (unit(rng) * (last + 1) as f64) as usize;
        items.swap(last, other);
    }
}

/// The exponential distribution's quantile: a wait of a Poisson process with `rate` events a second.
pub(crate) fn exponential(share: f64, rate: f64) -> f64 {
    -libm::log(1.0 - share) / rate
}

/// A distribution by its quantile function.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Distribution {
    /// Known quantiles (share, value), from share 0 to share 1, with the logarithm of the value linear between them.
    Quantiles(&'static [(f64, f64)]),
    /// A log-normal distribution.
    LogNormal {
        /// Its median.
        median: f64,
        /// The standard deviation of its logarithm.
        sigma: f64,
    },
}

impl Distribution {
    /// The value that the `share` of all values lies below. `share` lies in [0, 1].
    pub(crate) fn at(self, share: f64) -> f64 {
        match self {
            Self::Quantiles(points) => {
                let above = points.partition_point(|&(at, _)| at < share).clamp(1, points.len() - 1);
                let ((low, from), (high, to)) = (points[above - 1], points[above]);
                from * libm::exp((share - low) / (high - low) * libm::log(to / from))
            }
            Self::LogNormal { median, sigma } => median * libm::exp(sigma * normal_quantile(share)),
        }
    }

    /// One value.
    pub(crate) fn draw(self, rng: &mut Rng) -> f64 {
        self.at(unit(rng))
    }

    /// `count` values that are spread evenly over the distribution, in random order.
    pub(crate) fn spread(self, count: usize, rng: &mut Rng) -> Vec<f64> {
        let mut values: Vec<f64> = (0..count)
            .map(|index| self.at((index as f64 + 0.5) / count as f64))
            .collect();
        shuffle(&mut values, rng);
        values
    }
}

/// Where the standard normal distribution reaches `share`, by bisection; exact enough to round to any token.
fn normal_quantile(share: f64) -> f64 {
    const STEPS: u32 = 52;
    let (mut low, mut high) = (-8.0, 8.0);
    for _ in 0..STEPS {
        let middle = f64::midpoint(low, high);
        if libm::erfc(-middle * std::f64::consts::FRAC_1_SQRT_2) < 2.0 * share {
            low = middle;
        } else {
            high = middle;
        }
    }
    f64::midpoint(low, high)
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_units::rng_for;

    fn check(distribution: Distribution, share: f64, expected: f64) {
        let value = distribution.at(share);
        assert!(
            (value / expected - 1.0).abs() < 1e-3,
            "{distribution:?} at {share} is {value}, not {expected}"
        );
    }

    #[test]
    fn quantiles_are_those_of_the_distribution() {
        let table = Distribution::Quantiles(&[(0.0, 1.0), (0.5, 10.0), (1.0, 1000.0)]);
        check(table, 0.0, 1.0);
        check(table, 0.5, 10.0);
        check(table, 0.75, 100.0);
        check(table, 1.0, 1000.0);
        let normal = Distribution::LogNormal {
            median: 42.0,
            sigma: 1.4,
        };
        check(normal, 0.5, 42.0);
        check(normal, 0.841_344_746, 42.0 * libm::exp(1.4));
        check(normal, 0.022_750_132, 42.0 * libm::exp(-2.8));
        assert!((exponential(0.5, 2.0) - 0.346_573_6).abs() < 1e-6);
    }

    #[test]
    fn a_shuffle_keeps_all_items_and_favours_none() {
        let mut counts = [[0_u32; 4]; 4];
        let mut rng = rng_for(1, "shuffle");
        for _ in 0..4000 {
            let mut items = [0, 1, 2, 3];
            shuffle(&mut items, &mut rng);
            for (place, item) in items.into_iter().enumerate() {
                counts[place][item] += 1;
            }
        }
        assert!(
            counts.iter().flatten().all(|count| (900..1100).contains(count)),
            "{counts:?}"
        );
    }
}
