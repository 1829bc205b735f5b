//! What those lose who decode beside the turn.
//!
//! ```text
//! slower  batch * output / 2 * (step(batch + 1, context + prompt) - step(batch, context))
//! stall   batch * stall(prefill), where the prefill runs
//! ```
//!
//! One more request makes each step of the batch longer. It does so for as many tokens as both it and the other still have to
//! come: of two answers whose remaining lengths are alike and memoryless, half the mean. The prefill makes the steps longer
//! in which it takes part, and each of the batch waits for them: `Speed::stall_s`.

use crate::policies::homing::estimate::{Estimate, Place};

/// Seconds that those who decode at the place lose together by one more beside them.
pub(super) fn slower_s(estimate: &Estimate<'_>, place: &Place<'_>) -> f64 {
    let growth_s = place.joined_s - place.beside.step_s(&place.speed);
    place.batch * estimate.output() / 2.0 * growth_s
}

/// Seconds that those lose together who decode where so many tokens are prefilled.
pub(super) fn stalled_s(estimate: &Estimate<'_>, place: &Place<'_>, tokens: u32) -> f64 {
    place.batch * place.stall_s(tokens, estimate.turn.prompt_tokens)
}
