//! Until the first token: the prefill that is queued ahead, what comes back from host memory or from another worker, and the
//! prefill of what is lacking.
//!
//! ```text
//! alone        queue + host tokens * reloaded + prefill(lacks)
//! fetch        fetch_s + setup + tokens that it pulls * moved * (transfers ahead + 1), where the source pulls the history first
//! with source  queue there + fetch + prefill there(lacks there) + front + setup + tokens lacking here * moved * (transfers ahead + 1)
//! ```
//!
//! An engine prefills in order of arrival, so the queue is all that is pending at the place. The prefill of n tokens behind p
//! others takes its chunks' steps, in which whoever decodes there decodes on: `Speed::prefill_s`. A transfer shares both NICs
//! with those ordered before it, which is what waiting for them costs. A failure of the link lately is charged like
//! the retry that it may cause.

use crate::policies::homing::estimate::{Estimate, Place};
use crate::policies::homing::plans::Source;
use homing_units::WorkerId;

/// Seconds until the first token.
pub(in crate::policies::homing) fn seconds(
    estimate: &Estimate<'_>,
    place: &Place<'_>,
    source: Option<&Source<'_, '_>>,
) -> f64 {
    match source {
        None => alone_s(estimate, place),
        Some(source) => {
            let lacks = estimate.lacks(place);
            source.prefilled_s + place.speed.front_s + moved_s(estimate, place, source.place.worker.id, lacks)
        }
    }
}

fn alone_s(estimate: &Estimate<'_>, place: &Place<'_>) -> f64 {
    place.queue_s
        + f64::from(place.worker.host_tokens) * place.speed.reloaded_token_s
        + place.prefill_s(estimate.lacks(place), estimate.turn.prompt_tokens)
}

/// Seconds until this source has the whole prompt's KV.
pub(in crate::policies::homing) fn prefilled_s(estimate: &Estimate<'_>, source: &Source<'_, '_>) -> f64 {
    let (turn, place) = (estimate.turn, source.place);
    let fetch_s = source.fetch.map_or(0.0, |fetch| {
        let tokens = fetch.tokens.saturating_sub(place.worker.held_tokens());
        estimate.config.fetch_s + moved_s(estimate, place, fetch.from, tokens)
    });
    place.queue_s
        + fetch_s
        + f64::from(place.worker.host_tokens) * place.speed.reloaded_token_s
        + place.prefill_s(source.lacks(turn), turn.prompt_tokens)
}

/// Seconds that the KV of so many tokens takes to the place.
fn moved_s(estimate: &Estimate<'_>, place: &Place<'_>, from: WorkerId, tokens: u32) -> f64 {
    let link = estimate.board.link(from, place.worker.id);
    place.speed.setup_s
        + f64::from(tokens) * place.speed.moved_token_s * f64::from(link.transfers + 1)
        + f64::from(link.failures) * estimate.config.failure_s
}
