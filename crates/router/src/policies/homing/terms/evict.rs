//! Bringing back what the turn displaces.
//!
//! ```text
//! displaced = tokens that are new there, beyond what is free
//! wanted    = the share of them that a live session wants again: (demand - 1) * pool / new tokens, 0 to 1
//! evict     = displaced * wanted * the cheaper of reload and recompute a token
//! ```
//!
//! An LRU pool gives up first what was not used for longest. As long as live sessions fit (`demand` up to 1) that is KV of ended
//! ones, which nobody misses. Beyond, each further token displaces one that is wanted again. Computed again it stalls the
//! place's batch too. The prompt of whoever is displaced is taken to be as long as this one.

use crate::policies::homing::estimate::{Estimate, Place};

/// Seconds for which others will wait, together, where it takes so many to bring a prompt like this one back.
pub(super) fn seconds(estimate: &Estimate<'_>, place: &Place<'_>, refill_s: impl FnOnce() -> f64) -> f64 {
    let (turn, worker) = (estimate.turn, place.worker);
    let new = f64::from(turn.prompt_tokens - worker.resident_tokens.min(turn.prompt_tokens)) + estimate.output();
    let free = worker.kv_tokens.saturating_sub(worker.cached_tokens) as f64;
    let displaced = (new - free).max(0.0);
    let over = (place.demand - 1.0).max(0.0) * worker.kv_tokens as f64;
    let missed = displaced.min(over);
    if missed > 0.0 {
        missed * refill_s() / f64::from(turn.prompt_tokens.max(1))
    } else {
        0.0
    }
}

/// What it costs to bring a prompt like this one back, for itself and for those who decode meanwhile.
pub(super) fn refill_s(estimate: &Estimate<'_>, place: &Place<'_>) -> f64 {
    let tokens = estimate.turn.prompt_tokens;
    if place.worker.spills {
        return f64::from(tokens) * place.speed.reloaded_token_s;
    }
    place.prefill_s(tokens, tokens) + place.company * place.stall_s(tokens, tokens)
}
