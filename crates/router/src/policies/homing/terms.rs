//! The terms of a plan's cost, one a file: each in seconds, with its derivation.

mod behind;
mod evict;
pub(super) mod first;
mod future;
mod others;
mod own;

use super::cost::Cost;
use super::estimate::{Estimate, Place};
use super::plans::Source;
use std::cell::LazyCell;

/// The terms that hang on the place alone, whatever comes to it from elsewhere: worked out once for all plans that end there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Here {
    own_s: f64,
    slower_s: f64,
    evict_s: f64,
    future_s: f64,
}

/// The prefill of a part of the prompt, and what those lose who are where it runs: worked out once for each place that may do it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prefill {
    /// How long it takes, once it begins.
    prefill_s: f64,
    stalled_s: f64,
    behind_s: f64,
}

/// `0.0` for a term that does not count.
fn counted(counts: bool, seconds: impl FnOnce() -> f64) -> f64 {
    if counts { seconds() } else { 0.0 }
}

impl Here {
    pub(super) fn new(estimate: &Estimate<'_>, place: &Place<'_>) -> Self {
        let counts = estimate.config.terms;
        let refill_s = LazyCell::new(|| evict::refill_s(estimate, place));
        Self {
            own_s: counted(counts.own, || own::seconds(estimate, place)),
            slower_s: counted(counts.others, || others::slower_s(estimate, place)),
            evict_s: counted(counts.evict, || evict::seconds(estimate, place, || *refill_s)),
            future_s: counted(counts.future, || future::seconds(estimate, place, || *refill_s)),
        }
    }
}

impl Prefill {
    /// Of so many tokens at the prompt's end.
    pub(super) fn new(estimate: &Estimate<'_>, place: &Place<'_>, tokens: u32) -> Self {
        let counts = estimate.config.terms;
        let prefill_s = place.prefill_s(tokens, estimate.turn.prompt_tokens);
        Self {
            prefill_s,
            stalled_s: counted(counts.others, || others::stalled_s(estimate, place, tokens)),
            behind_s: counted(counts.behind, || behind::seconds(place, prefill_s)),
        }
    }
}

/// All terms of a turn at `place` that finds so much there that `work` is left to be done: its KV was carried there before.
pub(super) fn carried(place: &Place<'_>, here: &Here, work: &Prefill) -> Cost {
    Cost {
        first_s: place.speed.front_s + place.queue_s + work.prefill_s,
        own_s: here.own_s,
        others_s: here.slower_s + work.stalled_s,
        behind_s: work.behind_s,
        evict_s: here.evict_s,
        future_s: here.future_s,
    }
}

/// All terms of the plan that ends at `place`, with its KV from `source` where there is one.
pub(super) fn all(estimate: &Estimate<'_>, place: &Place<'_>, here: &Here, source: Option<&Source<'_, '_>>) -> Cost {
    let alone = || Prefill::new(estimate, place, estimate.lacks(place));
    let work = source.map_or_else(alone, |source| source.work);
    Cost {
        first_s: first::seconds(estimate, place, &work, source),
        own_s: here.own_s,
        others_s: here.slower_s + work.stalled_s,
        behind_s: work.behind_s,
        evict_s: here.evict_s,
        future_s: here.future_s,
    }
}
