//! Generating the answer in the company that the turn joins: `output * step(batch + 1, context + prompt)`.
//!
//! The batch is that of now and of those who come before it; who leaves and who joins while it decodes is taken to cancel out.

use crate::policies::homing::estimate::{Estimate, Place};

/// Seconds from the first token to the last.
pub(super) fn seconds(estimate: &Estimate<'_>, place: &Place<'_>) -> f64 {
    estimate.output() * place.joined_s
}
