//! Pausing sessions at the boundaries of their tool calls, so that those that run find their KV in place.
//!
//! An LRU pool that is wanted more than once over keeps next to nothing: whoever comes back evicts whoever comes next, and each
//! of them prefills its history again, beside the decoding of all others. Where that history cannot come back from host
//! memory either, it is better that a few sessions wait a while than that all are slow. So a turn whose history is nowhere is
//! held back while no pool has room for it beside the sessions that are expected back. It is held back for a bounded time:
//! after that it is placed where it costs least, whatever it displaces.
//!
//! Turns whose history lies somewhere are never held back, so a session that has begun runs on; and while nobody else wants a
//! pool, whoever comes has it, however long its prompt.

use super::HomingConfig;
use super::plans::Priced;
use crate::admission::Denied;
use crate::policies::{Board, TurnView};

/// Denies the plans that end in a pool without room, unless the turn has waited enough. Whether all are denied so.
pub(super) fn hold_back(config: &HomingConfig, board: &Board, turn: &TurnView, plans: &mut [Priced]) -> bool {
    if turn.waited.as_secs_f64() >= config.pace_s {
        return false;
    }
    let mut open = false;
    for priced in plans.iter_mut() {
        let considered = &mut priced.considered;
        let Some(worker) = board.worker(considered.plan.decode) else {
            continue;
        };
        let wanted = worker.live_own_tokens + u64::from(turn.prompt_tokens) + u64::from(turn.expected_output_tokens);
        let room = wanted as f64 <= worker.kv_tokens as f64 * config.fill;
        if !worker.spills && worker.live_sessions > 0 && !room {
            considered.denied = considered.denied.or(Some(Denied::Crowded));
        } else {
            open = true;
        }
    }
    !open
}
