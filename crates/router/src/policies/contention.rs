//! `contention`: a cost in seconds that counts the requests beside which a turn would run. The paper's approach A.
//!
//! Source: the migration paper, "Approach A: Contention-Aware Cost Model [ADOPTED]" (TTFT p90 7.638 s, the best).
//!
//! ```text
//! cost     = uncached tokens / throughput + queue - discount
//! queue    = num_requests * decode_iteration_s + pending prefill tokens / throughput
//! discount = min(turns before this one, migration_discount_cap) * migration_discount * extra
//! extra    = the seconds of prefill that the move costs: max(0, uncached here - uncached at the session's instance) / throughput
//! ```
//!
//! | parameter | default | from |
//! | --- | --- | --- |
//! | `decode_iteration_s` | 0.05 s | the paper, "Parameters" ("per-request decode iteration cost on H20") |
//! | `migration_discount_cap` | 5 turns | the paper, "Parameters" ("max turns to discount") |
//! | `migration_discount` | 0.1 a turn | assumed |
//! | `throughput` | 14,000 tokens/s | assumed: 8K tokens in 583 ms on an H20 |
//!
//! Assumed, since the paper gives the discount a cap and neither unit nor size:
//! - "A migration discount for sessions with accumulated cache (turn >= 2)": each turn before this one takes a tenth off
//!   the extra prefill of the move, which is what the accumulated cache makes a move cost; at the cap it is half. So the
//!   discount only ever makes a move cheaper, never cheaper than free.
//! - "Migrating a session off a loaded instance": only instances with fewer requests than the session's own get it.
//! - Turns count from 1 in the paper: turn 2 has one before it.
//!
//! What the family shares is said in `elastic`.

use super::elastic::{self, THROUGHPUT, instances, least, pending_prefill, session_instance, uncached_s};
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
}

impl Default for ContentionConfig {
    fn default() -> Self {
        Self {
            throughput: THROUGHPUT,
            decode_iteration_s: 0.05,
            migration_discount: 0.1,
            migration_discount_cap: 5,
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
        let instances = instances(board);
        let source = session_instance(&instances, turn);
        let cost = |worker: &WorkerView| self.config.cost_s(worker, source, turn);
        least(instances, turn, cost, "least prefill, queue and contention")
    }

    fn habits(&self) -> Habits {
        elastic::habits()
    }
}
