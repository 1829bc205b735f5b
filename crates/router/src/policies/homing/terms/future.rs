//! The session's coming turns, if it lives there.
//!
//! ```text
//! turns  = further turns that sessions have on average, as learnt, capped: it may move again
//! crowd  = output * (step(company + 1) + company * (step(company + 1) - step(company)))
//! lost   = (1 - 1 / demand) * refill, where more is wanted of the pool than it holds
//! future = turns * (crowd + lost)
//! ```
//!
//! `company` is how many of the sessions that live there have a turn in flight on average. The crowd costs what a turn costs in
//! its decoding, itself and the others, as in `own` and `others`. Of a pool that is wanted `demand` times over, the share
//! for which there is no room is taken to be gone when its turn comes.

use super::evict::refill_s;
use crate::policies::homing::estimate::{Estimate, Place};

/// Seconds over the coming turns.
pub(super) fn seconds(estimate: &Estimate<'_>, place: &Place<'_>) -> f64 {
    let (company, prompt) = (place.company, f64::from(estimate.turn.prompt_tokens));
    let with = place.speed.decode_s(company + 1.0, (company + 1.0) * prompt);
    let without = place.speed.decode_s(company, company * prompt);
    let crowd_s = estimate.output() * (with + company * (with - without));
    let lost_s = if place.demand > 1.0 {
        (1.0 - 1.0 / place.demand) * refill_s(estimate, place)
    } else {
        0.0
    };
    let turns = estimate.turn.expected_turns.min(estimate.config.future_turns);
    turns * (crowd_s + lost_s)
}
