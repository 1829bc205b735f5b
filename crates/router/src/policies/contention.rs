//! `contention`: a cost in seconds that counts the requests beside which a turn would run. The paper's approach A.
//!
//! Source: the migration paper, "Approach A: Contention-Aware Cost Model [ADOPTED]" (TTFT p90 7.638 s, the best).
//!
//! ```text
//! cost     = uncached tokens / throughput + queue - discount
//! queue    = num_requests * decode_iteration_s + pending prefill tokens / throughput
//! discount = min(turns before this one, migration_discount_cap) * migration_discount * extra
//! extra    = the seconds of prefill that the move costs: max(0, uncached here - uncached at the session's instance) / throughput
//! gate: that of `unified-v3`
//! ```
//!
//! | parameter | default | from |
//! | --- | --- | --- |
//! | `decode_iteration_s` | 0.05 s | the paper, "Parameters" ("per-request decode iteration cost on H20") |
//! | `migration_discount_cap` | 5 turns | the paper, "Parameters" ("max turns to discount") |
//! | `migration_discount` | 0.1 a turn | assumed |
//! | `throughput` | 14,000 tokens/s | assumed: 8K tokens in 583 ms on an H20 |
//! | `gate`, `gate_plus` | 2, 2 | that of `unified-v3`: approach A replaces its queue and nothing else |
//! | `ties` | first | assumed: see `elastic` |
//!
//! Assumed, since the paper gives the discount a cap and neither unit nor size:
//! - "A migration discount for sessions with accumulated cache (turn >= 2)": each turn before this one takes a tenth off
//!   the extra prefill of the move, which is what the accumulated cache makes a move cost; at the cap it is half. So the
//!   discount only ever makes a move cheaper, never cheaper than free.
//! - "Migrating a session off a loaded instance": only instances with fewer requests than the session's own get it.
//! - Turns count from 1 in the paper: turn 2 has one before it.
//!
//! What the family shares is said in `elastic`.

use super::elastic::{self, Gate, THROUGHPUT, Ties, least, pending_prefill, session_instance, uncached_s};
use super::spec::Parameters;
use super::{Board, Choice, Habits, Policy, PolicyError, TurnView, WorkerView};

/// Parameters of the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ContentionConfig {
    /// Prompt tokens that an instance prefills in a second.
    pub throughput: f64,
    /// What each request in flight costs a turn that joins it, in seconds.
    pub decode_iteration_s: f64,
    /// The share of a move's extra prefill that each turn of the session takes off it.
    pub migration_discount: f64,
    /// Turns that count for it at most.
    pub migration_discount_cap: u32,
    /// Which instances are out of the question.
    pub gate: Gate,
    /// Which of equals is taken.
    pub ties: Ties,
}

impl Default for ContentionConfig {
    fn default() -> Self {
        Self {
            throughput: THROUGHPUT,
            decode_iteration_s: 0.05,
            migration_discount: 0.1,
            migration_discount_cap: 5,
            gate: Gate::default(),
            ties: Ties::First,
        }
    }
}

impl ContentionConfig {
    pub(super) fn parse(parameters: &mut Parameters<'_>) -> Result<Self, PolicyError> {
        let default = Self::default();
        Ok(Self {
            throughput: parameters.positive("throughput", default.throughput)?,
            decode_iteration_s: parameters.number("decode_iteration_s", default.decode_iteration_s)?,
            migration_discount: parameters.number("migration_discount", default.migration_discount)?,
            migration_discount_cap: parameters.whole("migration_discount_cap", default.migration_discount_cap)?,
            gate: Gate::parse(parameters)?,
            ties: Ties::parse(parameters)?,
        })
    }

    /// What a turn costs at an instance, in seconds. `source` is its session's own instance, if there is one.
    pub(super) fn cost_s(&self, worker: &WorkerView, source: Option<&WorkerView>, turn: &TurnView) -> f64 {
        let queue_s =
            f64::from(worker.account.requests) * self.decode_iteration_s + pending_prefill(worker) / self.throughput;
        let discount_s = source.map_or(0.0, |source| self.discount_s(worker, source, turn));
        uncached_s(worker, turn, self.throughput) + queue_s - discount_s
    }

    fn discount_s(&self, target: &WorkerView, source: &WorkerView, turn: &TurnView) -> f64 {
        if target.account.requests >= source.account.requests {
            return 0.0;
        }
        let turns = f64::from(turn.turn_index.min(self.migration_discount_cap));
        let extra_s = uncached_s(target, turn, self.throughput) - uncached_s(source, turn, self.throughput);
        (turns * self.migration_discount).min(1.0) * extra_s.max(0.0)
    }
}

/// The policy.
#[derive(Debug)]
pub struct Contention {
    config: ContentionConfig,
}

impl Contention {
    /// A policy with these parameters.
    #[must_use]
    pub const fn new(config: ContentionConfig) -> Self {
        Self { config }
    }
}

impl Policy for Contention {
    fn choose(&mut self, board: &Board, turn: &TurnView) -> Choice {
        let ContentionConfig { gate, ties, .. } = self.config;
        let instances = ties.instances(board);
        let source = session_instance(&instances, turn);
        let cost = |worker: &WorkerView| self.config.cost_s(worker, source, turn);
        least(gate.open(instances), turn, cost, "least prefill, queue and contention")
    }

    fn habits(&self) -> Habits {
        elastic::habits()
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{board, check_elastic, turn};
    use super::*;
    use crate::event::Role;
    use crate::policies::Board;
    use homing_units::WorkerId;

    #[track_caller]
    fn check(text: &str, set: impl FnOnce(&mut Board), expected: [f64; 3]) {
        let make = |parameters: &mut Parameters<'_>| ContentionConfig::parse(parameters).map(Contention::new);
        check_elastic(text, make, set, &expected);
    }

    #[test]
    fn requests_count_by_the_iteration_and_pending_prefill_by_the_token() {
        // 5,000 / 10,000 = 0.5; 12 requests * 0.05 = 0.6; 4,000 pending = 0.4. What decodes does not count by its tokens.
        let busy = |board: &mut Board| {
            board.workers[0].resident_tokens = 35_000;
            board.workers[0].account.requests = 12;
            board.workers[0].account.append_tokens = 4_000;
            board.workers[0].account.decode_tokens = 900_000;
            board.workers[2].account.requests = 2;
        };
        check("throughput=10000:gate=1000", busy, [1.5, 4.0, 4.1]);
        check(
            "throughput=10000:gate=1000:decode_iteration_s=0.25",
            busy,
            [3.9, 4.0, 4.5],
        );
        // Mean 14 / 3: 12 is above 9.33 and above 6.67.
        check("throughput=10000", busy, [f64::NAN, 4.0, 4.1]);
    }

    /// The cost of instance 1 for a session that lives at instance 0, in its turn `turn_index`, counted from 0.
    #[track_caller]
    fn check_move(text: &str, turn_index: u32, requests: [u32; 2], expected: f64) {
        let mut board = board([Role::Both; 2]);
        // At 10,000 a second: 0.5 s uncached at the source, 3 s at the target: a move costs 2.5 s of prefill.
        board.workers[0].resident_tokens = 35_000;
        board.workers[0].exclusive_tokens = 35_000;
        board.workers[1].resident_tokens = 10_000;
        board.workers[0].account.requests = requests[0];
        board.workers[1].account.requests = requests[1];
        let turn = TurnView {
            prompt_tokens: 40_000,
            turn_index,
            new_family: false,
            home: Some(WorkerId(0)),
            ..turn()
        };
        let make = |parameters: &mut Parameters<'_>| ContentionConfig::parse(parameters).map(Contention::new);
        let text = format!("throughput=10000{text}");
        let choice = super::super::testing::with_parameters(&text, make).choose(&board, &turn);
        let target = choice.considered.iter().find(|plan| plan.plan.decode == WorkerId(1));
        let cost = target.map(|plan| plan.score);
        assert!(
            cost.is_some_and(|cost| (cost - expected).abs() < 1e-9),
            "{cost:?}, expected {expected}"
        );
    }

    #[test]
    fn each_turn_takes_a_tenth_off_the_move_until_the_cap() {
        // Turn 1 has no discount: 3 + 4 * 0.05.
        check_move("", 0, [10, 4], 3.2);
        // Turn 2: a tenth of 2.5 s; turn 4: three tenths; turn 6 and later: half.
        check_move("", 1, [10, 4], 2.95);
        check_move("", 3, [10, 4], 2.45);
        check_move("", 5, [10, 4], 1.95);
        check_move("", 40, [10, 4], 1.95);
        check_move(":migration_discount_cap=20", 8, [10, 4], 1.2);
        // Never more than all of it: 3.2 - 2.5.
        check_move(":migration_discount=0.5", 5, [10, 4], 0.7);
        // Only off an instance with more requests.
        check_move("", 5, [4, 4], 3.2);
    }

    #[test]
    fn a_session_leaves_when_contention_outweighs_the_discounted_move() {
        let decides = |requests: u32| {
            let mut board = board([Role::Both; 2]);
            board.workers[0].resident_tokens = 39_000;
            board.workers[0].account.requests = requests;
            let turn = TurnView {
                prompt_tokens: 40_000,
                turn_index: 5,
                new_family: false,
                home: Some(WorkerId(0)),
                ..turn()
            };
            let config = ContentionConfig {
                throughput: 10_000.0,
                ..ContentionConfig::default()
            };
            Contention::new(config)
                .choose(&board, &turn)
                .plan
                .map(|plan| plan.decode.0)
        };
        // Staying: 0.1 + 0.05 a request. Moving: 4 - 0.5 * 3.9 = 2.05. Even at 39 requests.
        assert_eq!([decides(38), decides(40)], [Some(0), Some(1)]);
    }
}
