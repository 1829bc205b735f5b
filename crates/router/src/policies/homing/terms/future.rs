//! The session's coming turns, if it lives there.
//!
//! ```text
//! turns  = further turns that sessions have on average, as learnt, capped: it may move again
//! crowd  = output * (step(company + 1) + company * (step(company + 1) - step(company)))
//! lost   = (1 - 1 / demand) * refill, where more is wanted of the pool than it holds
//! future = the least of turns and `crowd_turns` * crowd + turns * lost
//! ```
//!
//! `company` is how many of the sessions that live there have a turn in flight on average. The crowd costs what a turn costs in
//! its decoding, itself and the others, as in `own` and `others`. It changes within a turn or two: charged for ten turns, as it was
//! once, it kept sessions where they were and new ones away from where the least was to do, and at 32 live recorded agents with host
//! memory that cost 3% of latency and a fifth of TTFT p90. Not charged at all, whoever comes while nobody is busy comes to one worker.
//!
//! Of a pool that is wanted `demand` times over, the share for which there is no room is taken to be gone when its turn comes.

use crate::policies::homing::estimate::{Estimate, Place};

/// Seconds over the coming turns, where it takes so many to bring the session's prompt back.
pub(super) fn seconds(estimate: &Estimate<'_>, place: &Place<'_>, refill_s: impl FnOnce() -> f64) -> f64 {
    let turns = |most: f64| estimate.turn.expected_turns.min(most);
    let crowd_s = turns(estimate.config.crowd_turns) * crowd_s(estimate, place);
    if place.demand <= 1.0 {
        return crowd_s;
    }
    let lost_s = (1.0 - 1.0 / place.demand) * refill_s();
    crowd_s + turns(estimate.config.future_turns) * lost_s
}

/// What one turn costs in the company that lives there.
fn crowd_s(estimate: &Estimate<'_>, place: &Place<'_>) -> f64 {
    let (company, prompt) = (place.company, f64::from(estimate.turn.prompt_tokens));
    let with = place.speed.decode_s(company + 1.0, (company + 1.0) * prompt);
    let without = place.speed.decode_s(company, company * prompt);
    estimate.output() * (with + company * (with - without))
}
