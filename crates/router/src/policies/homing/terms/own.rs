//! Generating the answer in the company that the turn joins: `output * step(batch + 1, context + prompt)`.
//!
//! The batch is that of now and of those who come before it; who leaves and who joins while it decodes is taken to cancel out.

use crate::policies::homing::estimate::{Estimate, Place};

/// Seconds from the first token to the last.
pub(super) fn seconds(estimate: &Estimate<'_>, place: &Place<'_>) -> f64 {
    let context = place.context + f64::from(estimate.turn.prompt_tokens);
    estimate.output() * place.speed.decode_s(place.batch + 1.0, context)
}
