//! What the elastic family shares: `linear`, `unified-v2`, `unified-v3`, `contention` and `lazy-migration`, the versions of the
//! migration paper ("Migration Policy Design: Improving Load Balance in Elastic KV", 850 requests on 8 H20).
//!
//! Each of them gives every instance a cost and takes the least; they differ in the cost, so that is what their files hold.
//!
//! Assumed for all of them, where the paper is silent:
//! - An instance is a worker that can serve a turn alone. The paper's eight do both phases; in a cluster of prefill and
//!   decode workers the decode workers are the instances, and prefill-only workers stay idle.
//! - `num_requests` is the router's own count of requests in flight, not what an instance last reported.
//! - Pending prefill is the prompt tokens, less cached ones, of requests sent there without a first token yet.
//! - Of equal costs the instance with the fewest requests wins, then the one where fewest sessions live, then the first.
//! - Turns are sent at once and wait in the engine (the paper has no router queue); failures are retried as the router does.
//! - A session moves without its KV: the new instance computes the prompt again. The paper's word for a turn that is not
//!   served at its session's instance is OFFLOAD.

use super::{Admission, Board, Choice, Considered, Habits, TurnView, WorkerView};
use std::cmp::Reverse;

/// Prompt tokens that an instance prefills in a second: 8,192 tokens in 583 ms (14,051 a second), measured on an H20 and used by
/// the step-time calibration, rounded. The paper names the parameter, not its value.
pub(super) const THROUGHPUT: f64 = 14_000.0;

/// The habits of the family.
pub(super) const fn habits() -> Habits {
    Habits {
        admission: Admission::AtOnce,
        attempts: None,
        request_timeout: None,
        probes: false,
    }
}

/// The instances, in the order in which equals are taken.
pub(super) fn instances(board: &Board) -> Vec<&WorkerView> {
    let mut instances: Vec<_> = board.decoders().collect();
    instances.sort_by_key(|worker| (worker.account.requests, worker.homed_sessions, worker.id));
    instances
}

/// The instance of these with the least cost.
pub(super) fn least<'b>(
    instances: impl IntoIterator<Item = &'b WorkerView>,
    turn: &TurnView,
    cost: impl Fn(&WorkerView) -> f64,
    reason: &str,
) -> Choice {
    let consider = |worker: &'b WorkerView| consider(worker, turn, cost(worker));
    Choice::least(instances.into_iter().map(consider).collect(), reason)
}

/// The plan in which an instance serves the turn alone, at this cost.
pub(super) fn consider(worker: &WorkerView, turn: &TurnView, score: f64) -> Considered {
    Considered {
        plan: worker.alone(turn),
        resident_tokens: worker.resident_tokens,
        score,
        denied: worker.denies_alone,
    }
}

/// The time to prefill what an instance lacks of the prompt, in seconds.
pub(super) fn uncached_s(worker: &WorkerView, turn: &TurnView, throughput: f64) -> f64 {
    f64::from(worker.lacks(turn)) / throughput
}

/// Prompt tokens that wait for prefill at an instance or are in it.
pub(super) fn pending_prefill(worker: &WorkerView) -> f64 {
    (worker.account.append_tokens + worker.account.prefill_tokens) as f64
}

/// The mean number of requests in flight of these instances; 0 of none.
pub(super) fn mean_requests(instances: &[&WorkerView]) -> f64 {
    let sum: f64 = instances.iter().map(|worker| f64::from(worker.account.requests)).sum();
    sum / (instances.len().max(1) as f64)
}

/// The instance where the session lives: where its last turn was sent, as long as that one can serve; else the one that
/// holds most of its history.
pub(super) fn session_instance<'b>(instances: &[&'b WorkerView], turn: &TurnView) -> Option<&'b WorkerView> {
    let lives = instances.iter().find(|worker| turn.home == Some(worker.id));
    let holds = |worker: &&&WorkerView| !turn.new_family && worker.exclusive_tokens > 0;
    let holder = || {
        let holders = instances.iter().filter(holds);
        holders.max_by_key(|worker| (worker.exclusive_tokens, Reverse(worker.id)))
    };
    lives.or_else(holder).copied()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{board, turn};
    use super::*;
    use crate::event::Role;
    use homing_units::WorkerId;

    /// Which of three instances wins at equal cost, by requests in flight and sessions that live there.
    #[track_caller]
    fn check(requests: [u32; 3], sessions: [u32; 3], expected: u32) {
        let mut board = board([Role::Both; 3]);
        for (worker, (requests, sessions)) in board.workers.iter_mut().zip(requests.into_iter().zip(sessions)) {
            (worker.account.requests, worker.homed_sessions) = (requests, sessions);
        }
        let plan = least(instances(&board), &turn(), |_| 1.0, "equal").plan;
        assert_eq!(
            plan.map(|plan| plan.decode.0),
            Some(expected),
            "{requests:?} {sessions:?}"
        );
    }

    #[test]
    fn of_equal_costs_the_idlest_wins() {
        check([0, 0, 0], [0, 0, 0], 0);
        check([1, 0, 0], [0, 3, 2], 2);
        check([2, 1, 3], [0, 9, 0], 1);
    }

    #[test]
    fn decode_workers_are_instances_and_prefill_workers_are_not() {
        let mut board = board([Role::Prefill, Role::Decode, Role::Both]);
        let ids: Vec<_> = instances(&board).into_iter().map(|worker| worker.id.0).collect();
        assert_eq!(ids, [1, 2]);
        // 3 and 6 requests.
        (board.workers[1].account.requests, board.workers[2].account.requests) = (3, 6);
        assert!((mean_requests(&instances(&board)) - 4.5).abs() < 1e-9);
        assert!(mean_requests(&[]).abs() < 1e-9);
    }

    #[test]
    fn a_session_lives_where_it_was_sent_last_else_where_its_history_is() {
        let check = |home: Option<u32>, own: [u32; 3], new_family: bool, expected: Option<u32>| {
            let mut board = board([Role::Both; 3]);
            for (worker, own) in board.workers.iter_mut().zip(own) {
                worker.exclusive_tokens = own;
            }
            let turn = TurnView {
                home: home.map(WorkerId),
                new_family,
                ..turn()
            };
            let found = session_instance(&instances(&board), &turn).map(|worker| worker.id.0);
            assert_eq!(found, expected, "{home:?} {own:?}");
        };
        check(Some(1), [9, 0, 0], false, Some(1));
        check(None, [1, 9, 9], false, Some(1));
        check(Some(7), [1, 0, 0], false, Some(0));
        check(None, [0, 0, 0], false, None);
        check(None, [1, 9, 9], true, None);
    }
}
