//! `round-robin`: each turn to the next worker, whatever it holds. The floor that others are compared with.
//!
//! Decode workers take turns; one that may not prefill whole prompts is seeded by the prefill workers, which take turns too.
//! A worker without room is passed over. It looks at neither load nor residency.

use super::{Board, Choice, Considered, Plan, Policy, TurnView, WorkerView};
use crate::admission::Denied;
use crate::event::Role;
use homing_units::WorkerId;

/// The policy.
#[derive(Debug, Default)]
pub struct RoundRobin {
    last_decode: Option<WorkerId>,
    last_prefill: Option<WorkerId>,
}

impl Policy for RoundRobin {
    fn choose(&mut self, board: &Board, turn: &TurnView) -> Choice {
        let mut considered = Vec::new();
        for decode in in_turn(&board.workers, self.last_decode) {
            let seeded = (decode.role == Role::Decode && turn.may_transfer).then(|| self.seed(board, decode, turn));
            let (plan, denied) = seeded.flatten().unwrap_or((decode.alone(turn), decode.denies_alone));
            let score = considered.len() as f64;
            considered.push(Considered {
                plan,
                resident_tokens: decode.resident_tokens,
                score,
                denied,
            });
            if denied.is_none() {
                break;
            }
        }
        let choice = Choice::least(considered, "its turn");
        if let Some(plan) = choice.plan {
            self.last_decode = Some(plan.decode);
            self.last_prefill = plan.prefill.or(self.last_prefill);
        }
        choice
    }
}

impl RoundRobin {
    /// The plan with the next prefill worker that has room, or with the next at all; `None` where there are none.
    fn seed(&self, board: &Board, decode: &WorkerView, turn: &TurnView) -> Option<(Plan, Option<Denied>)> {
        let able: Vec<_> = board.prefillers(decode).cloned().collect();
        let next = in_turn(&able, self.last_prefill);
        let prefill = next
            .iter()
            .find(|worker| worker.denies_prefill.is_none())
            .or(next.first())?;
        Some((
            decode.seeded_by(prefill.id, turn),
            decode.denies_seed.or(prefill.denies_prefill),
        ))
    }
}

/// The workers from the one after `last` on, around to it.
pub(super) fn in_turn(workers: &[WorkerView], last: Option<WorkerId>) -> Vec<&WorkerView> {
    let start = last.map_or(0, |last| workers.partition_point(|worker| worker.id <= last));
    workers[start..].iter().chain(&workers[..start]).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{board, turn, worker};
    use super::*;
    use crate::action::Path;

    #[test]
    fn decode_and_prefill_workers_take_turns() {
        let roles = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode, Role::Decode];
        let mut board = board(roles);
        let mut policy = RoundRobin::default();
        let mut next = |board: &Board| {
            let plan = policy.choose(board, &turn()).plan?;
            Some((plan.path, plan.prefill.map(|id| id.0), plan.decode.0))
        };
        assert_eq!(next(&board), Some((Path::Seed, Some(0), 2)));
        assert_eq!(next(&board), Some((Path::Seed, Some(1), 3)));
        board.workers[4].denies_seed = Some(Denied::Seeds);
        assert_eq!(
            next(&board),
            Some((Path::Seed, Some(0), 2)),
            "one without room is passed over"
        );
        board.workers[4].denies_seed = None;
        board.workers.retain(|worker| worker.id != WorkerId(3));
        assert_eq!(
            next(&board),
            Some((Path::Seed, Some(1), 4)),
            "one that left is not waited for"
        );
        for worker in &mut board.workers {
            worker.denies_prefill = Some(Denied::Dead);
        }
        assert_eq!(
            next(&board),
            Some((Path::Local, None, 2)),
            "without prefill workers it serves alone"
        );
    }

    #[test]
    fn nothing_has_room_so_it_waits() {
        let mut full = worker(0, Role::Both);
        full.denies_alone = Some(Denied::PoolFull);
        let board = Board {
            workers: vec![full],
            ..Board::default()
        };
        assert_eq!(RoundRobin::default().choose(&board, &turn()).plan, None);
    }
}
