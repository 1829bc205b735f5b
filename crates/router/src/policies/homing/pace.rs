//! Pausing sessions at the boundaries of their tool calls, so that those that run find their KV in place.
//!
//! An LRU pool that is wanted more than once over keeps next to nothing: whoever comes back evicts whoever comes next, and each
//! of them prefills its history again, beside the decoding of all others. Where that history cannot come back from host
//! memory either, it is better that a few sessions wait a while than that all are slow. So a turn whose history is nowhere is
//! held back while no pool has room for it beside the sessions that are expected back. It is held back for a bounded time:
//! after that it is placed where it costs least, whatever it displaces.
//!
//! To be slow together is no harm where there is time for it: sessions that pause for long leave a worker idle between their turns, and
//! a prefill of the whole history in each of them costs less than the wait for another session's end. So nobody is held back from a
//! place that can afford it: whose live sessions come back so seldom that prefilling all of it each time keeps it busy for less than
//! a share of its time (`afford`).
//!
//! Turns whose history lies somewhere are never held back, so a session that has begun runs on; and while nobody else wants a
//! pool, whoever comes has it, however long its prompt.

use super::estimate::{Estimate, Place};
use super::plans::Priced;
use crate::admission::Denied;

/// Denies the plans that end in a pool without room, unless the turn has waited enough. Whether all are denied so.
pub(super) fn hold_back(estimate: &Estimate<'_>, plans: &mut [Priced]) -> bool {
    if estimate.turn.waited.as_secs_f64() >= estimate.config.pace_s {
        return false;
    }
    let mut open = false;
    for priced in plans.iter_mut() {
        let considered = &mut priced.considered;
        let Some(place) = estimate.place(considered.plan.decode) else {
            continue;
        };
        if is_crowded(estimate, place) {
            considered.denied = considered.denied.or(Some(Denied::Crowded));
        } else {
            open = true;
        }
    }
    !open
}

/// Whether the place has no room for the turn beside the sessions that are expected back, and no time either to bring back for each
/// of them what the others displaced.
fn is_crowded(estimate: &Estimate<'_>, place: &Place<'_>) -> bool {
    let worker = place.worker;
    if worker.spills || worker.live_sessions == 0 || place.demand <= estimate.config.fill {
        return false;
    }
    let prompt = estimate.turn.prompt_tokens;
    let turns_s = estimate.arrivals * f64::from(worker.live_sessions + 1);
    turns_s * place.prefill_s(prompt, prompt) > estimate.config.afford
}
