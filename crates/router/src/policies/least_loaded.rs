//! `least-loaded`: each turn to the worker with the fewest requests in flight, whatever it holds.
//!
//! Source: none of the papers describes it; it stands for the plain load balancer that a user would put before engines, beside
//! `round-robin`. Its measure of load is the one that `dp-cache-aware` falls back to.
//!
//! ```text
//! decode worker:  least (requests in flight, sessions that live there, id)
//! prefill worker: least (prompt tokens queued for prefill, requests in flight, id)
//! ```
//!
//! No parameters.
//!
//! Assumed:
//! - Load is the router's own count of requests in flight; of equals, fewer sessions.
//! - A worker that does both serves alone. A decode-only worker is seeded by the prefill worker with the shortest queue; where
//!   no prefill worker is left it prefills alone.
//! - It sends at once, as a balancer without a queue does; failures are retried as the router does.

use super::{Admission, Board, Choice, Considered, Habits, Plan, Policy, TurnView, WorkerView};
use crate::admission::Denied;
use crate::event::Role;

/// The policy.
#[derive(Debug, Default)]
pub struct LeastLoaded;

impl Policy for LeastLoaded {
    fn choose(&mut self, board: &Board, turn: &TurnView) -> Choice {
        let mut workers: Vec<_> = board.decoders().collect();
        workers.sort_by_key(|worker| (worker.account.requests, worker.homed_sessions, worker.id));
        let considered = workers.into_iter().map(|decode| {
            let seeds = decode.role == Role::Decode && turn.may_transfer;
            let seeded = seeds.then(|| seeded_by_least_queue(board, decode, turn)).flatten();
            let (plan, denied) = seeded.unwrap_or((decode.alone(turn), decode.denies_alone));
            Considered {
                plan,
                resident_tokens: decode.resident_tokens,
                score: f64::from(decode.account.requests),
                denied,
            }
        });
        Choice::least(considered.collect(), "fewest requests in flight")
    }

    fn habits(&self) -> Habits {
        Habits {
            admission: Admission::AtOnce,
            ..Habits::default()
        }
    }
}

/// The plan in which the prefill worker with the shortest queue seeds `decode`, one that can be reached first, and what
/// denies it; `None` where there is none.
pub(super) fn seeded_by_least_queue(
    board: &Board,
    decode: &WorkerView,
    turn: &TurnView,
) -> Option<(Plan, Option<Denied>)> {
    let prefill = board.prefillers(decode).min_by_key(|worker| {
        let account = &worker.account;
        (
            worker.denies_prefill.is_some(),
            account.prefill_tokens,
            account.requests,
            worker.id,
        )
    })?;
    Some((
        decode.seeded_by(prefill.id, turn),
        decode.denies_seed.or(prefill.denies_prefill),
    ))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{board, turn};
    use super::*;
    use crate::action::Path;

    const DP: [Role; 3] = [Role::Both; 3];
    const PD: [Role; 4] = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];

    #[track_caller]
    fn check<const N: usize>(
        roles: [Role; N],
        set: impl FnOnce(&mut Board),
        expected: Option<(Path, Option<u32>, u32)>,
    ) {
        let mut board = board(roles);
        set(&mut board);
        let plan = LeastLoaded.choose(&board, &turn()).plan;
        let plan = plan.map(|plan| (plan.path, plan.prefill.map(|id| id.0), plan.decode.0));
        assert_eq!(plan, expected, "{board:?}");
    }

    #[test]
    fn the_fewest_requests_win_whatever_lies_where() {
        let alone = |decode| Some((Path::Local, None, decode));
        check(DP, |_| {}, alone(0));
        let load = |requests: [u32; 3], sessions: [u32; 3]| {
            move |board: &mut Board| {
                for (worker, (requests, sessions)) in board.workers.iter_mut().zip(requests.into_iter().zip(sessions)) {
                    (worker.account.requests, worker.homed_sessions) = (requests, sessions);
                }
                board.workers[0].resident_tokens = 20_000;
            }
        };
        check(DP, load([2, 1, 1], [0, 5, 4]), alone(2));
        check(DP, load([2, 1, 3], [0, 9, 0]), alone(1));
        check(
            DP,
            |board| board.workers[0].denies_alone = Some(Denied::Suspect),
            alone(1),
        );
    }

    #[test]
    fn a_decode_worker_is_seeded_by_the_shortest_queue() {
        check(PD, |_| {}, Some((Path::Seed, Some(0), 2)));
        check(
            PD,
            |board| board.workers[2].account.requests = 1,
            Some((Path::Seed, Some(0), 3)),
        );
        check(
            PD,
            |board| board.workers[0].account.prefill_tokens = 1,
            Some((Path::Seed, Some(1), 2)),
        );
        check(
            PD,
            |board| board.workers[0].denies_prefill = Some(Denied::Suspect),
            Some((Path::Seed, Some(1), 2)),
        );
        let dead = |board: &mut Board| {
            for worker in &mut board.workers[..2] {
                worker.denies_prefill = Some(Denied::Dead);
            }
        };
        check(PD, dead, Some((Path::Local, None, 2)));
    }
}
