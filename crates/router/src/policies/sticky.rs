//! `sticky`: a session stays with the worker that served its first turn; new sessions go to the least loaded.
//!
//! Source: the policies that the papers' prototype tried keep a session where it was by a `sticky_bonus` (taxonomy,
//! `FAILURE_MODES_ZH` §2.4); this is that bonus alone, without overlap: session affinity as load balancers know it.
//!
//! ```text
//! score = requests in flight - sticky_bonus [the session lives there]       the least wins
//! ```
//!
//! Of equal scores the worker with fewer sessions wins, then the first.
//!
//! | parameter | default | from |
//! | --- | --- | --- |
//! | `sticky_bonus` | 1,000 requests | assumed: more than are ever in flight at a worker, so for good |
//!
//! Assumed:
//! - The bonus is in requests: so many more may be in flight at the session's worker than at the least loaded before the
//!   session leaves. The papers name it and give neither unit nor value.
//! - A session lives where its last turn was sent, as long as that worker is alive; a session that left lives at the new one.
//! - A worker that holds the session's history appends; one that does both serves alone in any case; a decode-only worker
//!   without the history is seeded by the prefill worker with the shortest queue.
//! - It sends at once; failures are retried as the router does.

use super::least_loaded::seeded_by_least_queue;
use super::spec::Parameters;
use super::{Admission, Board, Choice, Considered, Habits, Policy, PolicyError, TurnView, WorkerView};
use crate::action::Path;
use crate::event::Role;

/// Parameters of the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StickyConfig {
    /// Requests by which a session's worker may exceed the least loaded before the session leaves it.
    pub sticky_bonus: f64,
}

impl Default for StickyConfig {
    fn default() -> Self {
        Self { sticky_bonus: 1_000.0 }
    }
}

impl StickyConfig {
    pub(super) fn parse(parameters: &mut Parameters<'_>) -> Result<Self, PolicyError> {
        Ok(Self {
            sticky_bonus: parameters.number("sticky_bonus", Self::default().sticky_bonus)?,
        })
    }
}

/// The policy.
#[derive(Debug)]
pub struct Sticky {
    config: StickyConfig,
}

impl Sticky {
    /// A policy with these parameters.
    #[must_use]
    pub const fn new(config: StickyConfig) -> Self {
        Self { config }
    }

    fn consider(&self, board: &Board, decode: &WorkerView, turn: &TurnView) -> Considered {
        let bonus = if turn.home == Some(decode.id) {
            self.config.sticky_bonus
        } else {
            0.0
        };
        let alone = decode.alone(turn);
        let seeds = decode.role == Role::Decode && alone.path != Path::Append && turn.may_transfer;
        let seeded = seeds.then(|| seeded_by_least_queue(board, decode, turn)).flatten();
        let (plan, denied) = seeded.unwrap_or((alone, decode.denies_alone));
        Considered {
            plan,
            resident_tokens: decode.resident_tokens,
            score: f64::from(decode.account.requests) - bonus,
            denied,
        }
    }
}

impl Policy for Sticky {
    fn choose(&mut self, board: &Board, turn: &TurnView) -> Choice {
        let mut workers: Vec<_> = board.decoders().collect();
        workers.sort_by_key(|worker| (worker.homed_sessions, worker.id));
        let mut plans: Vec<_> = workers
            .into_iter()
            .map(|decode| self.consider(board, decode, turn))
            .collect();
        plans.sort_by(|left, right| left.score.total_cmp(&right.score));
        let stays = plans.first().is_some_and(|best| turn.home == Some(best.plan.decode));
        if stays {
            let best = plans.remove(0);
            // Also one that cannot be reached for a moment is waited for.
            return Choice::only(best, plans, "its session lives there");
        }
        Choice::least(plans, "fewest requests in flight")
    }

    fn habits(&self) -> Habits {
        Habits {
            admission: Admission::AtOnce,
            ..Habits::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{board, turn, with_parameters};
    use super::*;
    use crate::admission::Denied;
    use homing_units::WorkerId;

    const PD: [Role; 4] = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];

    /// Where a later turn of a session goes that lives at the last worker, which holds its history.
    #[track_caller]
    fn check<const N: usize>(
        text: &str,
        roles: [Role; N],
        set: impl FnOnce(&mut Board, &mut TurnView),
        expected: Option<(Path, Option<u32>, u32)>,
    ) {
        let mut board = board(roles);
        let last = board.workers.last_mut().unwrap();
        (last.resident_tokens, last.exclusive_tokens) = (19_000, 9_000);
        let mut turn = TurnView {
            new_family: false,
            was_resident: true,
            home: Some(last.id),
            ..turn()
        };
        set(&mut board, &mut turn);
        let make = |parameters: &mut Parameters<'_>| StickyConfig::parse(parameters).map(Sticky::new);
        let choice = with_parameters(text, make).choose(&board, &turn);
        let plan = choice
            .plan
            .map(|plan| (plan.path, plan.prefill.map(|id| id.0), plan.decode.0));
        assert_eq!(plan, expected, "{choice:?}");
    }

    #[test]
    fn a_session_stays_unless_its_worker_exceeds_the_others_by_the_bonus() {
        let dp = [Role::Both; 3];
        let load =
            |requests: u32| move |board: &mut Board, _: &mut TurnView| board.workers[2].account.requests = requests;
        check("", dp, load(0), Some((Path::Append, None, 2)));
        check("", dp, load(999), Some((Path::Append, None, 2)));
        // 9 - 10 = -1 is below 0, 11 - 10 = 1 is not.
        check("sticky_bonus=10", dp, load(9), Some((Path::Append, None, 2)));
        check("sticky_bonus=10", dp, load(11), Some((Path::Local, None, 0)));
        check("sticky_bonus=0", dp, load(1), Some((Path::Local, None, 0)));
        let cold = |board: &mut Board, _: &mut TurnView| {
            (board.workers[2].resident_tokens, board.workers[2].exclusive_tokens) = (0, 0);
        };
        check("", dp, cold, Some((Path::Local, None, 2)));
    }

    #[test]
    fn new_sessions_go_to_the_least_loaded() {
        let new = |requests: [u32; 3], sessions: [u32; 3]| {
            move |board: &mut Board, turn: &mut TurnView| {
                (turn.home, turn.new_family, turn.was_resident) = (None, true, false);
                for (worker, (requests, sessions)) in board.workers.iter_mut().zip(requests.into_iter().zip(sessions)) {
                    (worker.account.requests, worker.homed_sessions) = (requests, sessions);
                }
            }
        };
        let dp = [Role::Both; 3];
        check("", dp, new([1, 1, 2], [4, 3, 0]), Some((Path::Local, None, 1)));
        check("", dp, new([1, 2, 0], [0, 0, 9]), Some((Path::Local, None, 2)));
    }

    #[test]
    fn decode_workers_append_what_they_hold_and_are_seeded_else() {
        check("", PD, |_, _| {}, Some((Path::Append, None, 3)));
        let evicted = |board: &mut Board, _: &mut TurnView| {
            board.workers[3].exclusive_tokens = 0;
            board.workers[0].account.prefill_tokens = 5;
        };
        check("", PD, evicted, Some((Path::Reseed, Some(1), 3)));
        // A worker that cannot be reached for a moment is waited for; one that died is left.
        let suspect = |board: &mut Board, _: &mut TurnView| board.workers[3].denies_alone = Some(Denied::Suspect);
        check("", PD, suspect, None);
        let dead = |board: &mut Board, turn: &mut TurnView| {
            board.workers[3].denies_alone = Some(Denied::Dead);
            turn.home = None;
        };
        check("", PD, dead, Some((Path::Reseed, Some(0), 2)));
        let gone = |board: &mut Board, turn: &mut TurnView| {
            board.workers.pop();
            turn.home = Some(WorkerId(3));
        };
        check("", PD, gone, Some((Path::Reseed, Some(0), 2)));
    }
}
