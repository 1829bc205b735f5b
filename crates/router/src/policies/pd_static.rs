//! `pd-static`: prefill and decode strictly apart, and no idea of sessions. Each turn is prefilled whole by the next prefill
//! worker and pulled by the next decode worker.
//!
//! Source: the report (`STRUCTURAL_VALIDATION_REPORT_ZH`) §5: the prototype's `pd_router.py` has a bare round robin in
//! `_select_decode_index`, and its prefill workers got 2,225 and 2,224 requests, which is one too. It is what SGLang's own load
//! balancer for disaggregated engines does by default.
//!
//! ```text
//! prefill worker: the next in turn
//! decode worker:  the next in turn; with decode=least-loaded the one with the fewest requests in flight, then the first
//! ```
//!
//! | parameter | default | from |
//! | --- | --- | --- |
//! | `decode` | `round-robin` | the report §5 (`_select_decode_index`); `least-loaded` is the obvious alternative |
//!
//! Assumed:
//! - A worker that does both is a decode worker where there are prefill-only workers to seed it, and the only kind that counts
//!   where there are not: on a cluster of workers that all do both nothing can be apart, so each serves alone, in turn (round
//!   robin), which is said in the reason. A decode-only worker without any prefill worker prefills alone, too.
//! - A worker that cannot be reached is passed over; where none can, the turn waits for the fleet.
//! - It sends at once, and a failure is the client's error: the prototype has no retry.

use super::round_robin::in_turn;
use super::spec::Parameters;
use super::{Admission, Board, Choice, Considered, Habits, Plan, Policy, PolicyError, TurnView, WorkerView};
use crate::admission::Denied;
use crate::event::Role;
use homing_units::WorkerId;

/// Parameters of the policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PdStaticConfig {
    /// Decode workers are chosen by their requests in flight, and not in turn.
    pub least_loaded: bool,
}

impl PdStaticConfig {
    pub(super) fn parse(parameters: &mut Parameters<'_>) -> Result<Self, PolicyError> {
        let words = ["round-robin", "least-loaded"];
        let decode = parameters.choice("decode", "`round-robin` or `least-loaded`", &words)?;
        Ok(Self {
            least_loaded: decode == "least-loaded",
        })
    }
}

/// The policy.
#[derive(Debug, Default)]
pub struct PdStatic {
    config: PdStaticConfig,
    last_decode: Option<WorkerId>,
    last_prefill: Option<WorkerId>,
}

impl PdStatic {
    /// A policy with these parameters.
    #[must_use]
    pub fn new(config: PdStaticConfig) -> Self {
        Self {
            config,
            ..Self::default()
        }
    }

    /// The plan with the next prefill worker that can be reached, or with the next at all; alone where there are none.
    fn plan(&self, prefillers: &[WorkerView], decode: &WorkerView, turn: &TurnView) -> (Plan, Option<Denied>) {
        let next = in_turn(prefillers, self.last_prefill);
        let prefill = next
            .iter()
            .find(|worker| worker.denies_prefill.is_none())
            .or(next.first());
        match prefill.filter(|_| decode.transfers && turn.may_transfer) {
            Some(prefill) => (
                decode.seeded_by(prefill.id, turn),
                decode.denies_seed.or(prefill.denies_prefill),
            ),
            None => (decode.alone(turn), decode.denies_alone),
        }
    }
}

impl Policy for PdStatic {
    fn choose(&mut self, board: &Board, turn: &TurnView) -> Choice {
        let is_prefiller = |worker: &&WorkerView| {
            worker.role == Role::Prefill && !worker.denies_prefill.is_some_and(Denied::is_lasting)
        };
        let prefillers: Vec<_> = board.workers.iter().filter(is_prefiller).cloned().collect();
        let able: Vec<_> = board.decoders().cloned().collect();
        let mut decoders = in_turn(&able, self.last_decode);
        if self.config.least_loaded {
            decoders.sort_by_key(|worker| (worker.account.requests, worker.id));
        }
        let considered = decoders.into_iter().zip(0_u32..).map(|(decode, place)| {
            let (plan, denied) = self.plan(&prefillers, decode, turn);
            let score = if self.config.least_loaded {
                decode.account.requests
            } else {
                place
            };
            Considered {
                plan,
                resident_tokens: decode.resident_tokens,
                score: f64::from(score),
                denied,
            }
        });
        let reason = if prefillers.is_empty() {
            "its turn; no prefill-only worker, so nothing is apart"
        } else {
            "its turn"
        };
        let choice = Choice::least(considered.collect(), reason);
        if let Some(plan) = choice.plan {
            self.last_decode = Some(plan.decode);
            self.last_prefill = plan.prefill.or(self.last_prefill);
        }
        choice
    }

    fn habits(&self) -> Habits {
        Habits {
            admission: Admission::AtOnce,
            attempts: Some(1),
            ..Habits::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{board, turn, with_parameters};
    use super::*;
    use crate::action::Path;

    /// Where three turns in a row go: path, prefill and decode worker.
    #[track_caller]
    fn check<const N: usize>(
        text: &str,
        roles: [Role; N],
        set: impl FnOnce(&mut Board),
        expected: [(Path, Option<u32>, u32); 3],
    ) {
        let mut board = board(roles);
        set(&mut board);
        let mut policy = with_parameters(text, |parameters| PdStaticConfig::parse(parameters).map(PdStatic::new));
        let sent = [(); 3].map(|()| {
            let plan = policy.choose(&board, &turn()).plan.unwrap();
            (plan.path, plan.prefill.map(|id| id.0), plan.decode.0)
        });
        assert_eq!(sent, expected, "{text} {board:?}");
    }

    #[test]
    fn both_sides_take_turns() {
        let (p, d, both) = (Role::Prefill, Role::Decode, Role::Both);
        let seed = |prefill, decode| (Path::Seed, Some(prefill), decode);
        let local = |decode| (Path::Local, None, decode);
        check("", [p, p, d, d, d], |_| {}, [seed(0, 2), seed(1, 3), seed(0, 4)]);
        // What lies where does not matter, and neither does load, unless it is asked for.
        let loaded = |board: &mut Board| {
            board.workers[2].resident_tokens = 20_000;
            board.workers[2].account.requests = 9;
            board.workers[3].account.requests = 2;
        };
        check("", [p, p, d, d], loaded, [seed(0, 2), seed(1, 3), seed(0, 2)]);
        check(
            "decode=least-loaded",
            [p, p, d, d],
            loaded,
            [seed(0, 3), seed(1, 3), seed(0, 3)],
        );
        // One that cannot be reached is passed over.
        let away = |board: &mut Board| {
            board.workers[0].denies_prefill = Some(Denied::Suspect);
            board.workers[2].denies_seed = Some(Denied::Suspect);
        };
        check("", [p, p, d, d], away, [seed(1, 3), seed(1, 3), seed(1, 3)]);
        // Workers that do both are decode workers beside prefill-only ones, else they serve alone in turn.
        check("", [p, both, both], |_| {}, [seed(0, 1), seed(0, 2), seed(0, 1)]);
        check("", [both, both], |_| {}, [local(0), local(1), local(0)]);
        check("", [d, d], |_| {}, [local(0), local(1), local(0)]);
        // So do those to which no KV can be moved.
        let immovable = |board: &mut Board| board.workers[1].transfers = false;
        check("", [p, d, d], immovable, [local(1), seed(0, 2), local(1)]);
    }
}
