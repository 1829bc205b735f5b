//! Until the first token: the prefill that is queued ahead, what comes back from host memory or from another worker, and the
//! prefill of what is lacking.
//!
//! ```text
//! alone        front + queue + host tokens * reloaded + prefill(lacks)
//! fetch        fetch_s + setup + tokens that it pulls * moved * (transfers ahead + 1), where the source pulls the history first
//! arrives      front there + queue there + fetch + prefill there(lacks there) + setup + tokens lacking here * moved * (transfers ahead + 1)
//! with source  front + the later of queue and arrives
//! ```
//!
//! An engine prefills in order of arrival, so the queue is all that is pending at the place. The last token of a prompt whose KV
//! was pulled is computed there too, and waits for it. The prefill of n tokens behind p
//! others takes its chunks' steps, in which whoever decodes there decodes on: `Speed::prefill_s`. A transfer shares both NICs
//! with those ordered before it, which is what waiting for them costs. A failure of the link lately is charged like
//! the retry that it may cause.

use crate::action::Fetch;
use crate::policies::homing::estimate::{Estimate, Place};
use crate::policies::homing::plans::Source;
use crate::policies::homing::terms::Prefill;
use homing_units::WorkerId;

/// Seconds until the first token.
pub(super) fn seconds(
    estimate: &Estimate<'_>,
    place: &Place<'_>,
    work: &Prefill,
    source: Option<&Source<'_, '_>>,
) -> f64 {
    match source {
        None => begins_s(place, 0.0) + work.prefill_s,
        Some(source) => {
            let lacks = estimate.lacks(place);
            let arrives_s = source.prefilled_s + moved_s(estimate, place, source.place.worker.id, lacks);
            place.speed.front_s + arrives_s.max(place.queue_s)
        }
    }
}

/// Seconds until the prefill begins, after a history that is fetched in so many.
fn begins_s(place: &Place<'_>, fetch_s: f64) -> f64 {
    place.speed.front_s + place.queue_s + fetch_s + f64::from(place.worker.host_tokens) * place.speed.reloaded_token_s
}

/// Seconds until this source has the whole prompt's KV.
pub(in crate::policies::homing) fn prefilled_s(
    estimate: &Estimate<'_>,
    place: &Place<'_>,
    work: &Prefill,
    fetch: Option<Fetch>,
) -> f64 {
    let fetch_s = fetch.map_or(0.0, |fetch| {
        let tokens = fetch.tokens.saturating_sub(place.worker.held_tokens());
        estimate.config.fetch_s + moved_s(estimate, place, fetch.from, tokens)
    });
    begins_s(place, fetch_s) + work.prefill_s
}

/// Seconds that the KV of so many tokens takes to the place.
fn moved_s(estimate: &Estimate<'_>, place: &Place<'_>, from: WorkerId, tokens: u32) -> f64 {
    let link = estimate.board.link(from, place.worker.id);
    place.speed.setup_s
        + f64::from(tokens) * place.speed.moved_token_s * f64::from(link.transfers + 1)
        + f64::from(link.failures) * estimate.config.failure_s
}
