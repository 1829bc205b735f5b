//! Values that are spread evenly over a distribution and handed out one by one, so that a small trace has a large one's
//! figures.

use crate::draw::Distribution;
use homing_units::Rng;

/// The values that are left.
#[derive(Debug)]
pub(super) struct Pool(Vec<f64>);

impl Pool {
    /// `count` values of `distribution` in random order.
    pub(super) fn spread(distribution: Distribution, count: usize, rng: &mut Rng) -> Self {
        Self(distribution.spread(count, rng))
    }

    /// The next value. The caller asks for no more than there are.
    pub(super) fn next(&mut self) -> f64 {
        self.0.pop().expect("no more values are asked for than were spread")
    }
}
