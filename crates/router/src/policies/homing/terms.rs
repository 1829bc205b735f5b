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

/// All terms of the plan that ends at `place`, with its KV from `source` where there is one.
pub(super) fn all(estimate: &Estimate<'_>, place: &Place<'_>, source: Option<&Source<'_, '_>>) -> Cost {
    let counts = estimate.config.terms;
    let term = |counts: bool, seconds: f64| if counts { seconds } else { 0.0 };
    Cost {
        first_s: first::seconds(estimate, place, source),
        own_s: term(counts.own, own::seconds(estimate, place)),
        others_s: term(counts.others, others::seconds(estimate, place, source)),
        behind_s: term(counts.behind, behind::seconds(estimate, place, source)),
        evict_s: term(counts.evict, evict::seconds(estimate, place)),
        future_s: term(counts.future, future::seconds(estimate, place)),
    }
}
