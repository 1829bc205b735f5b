//! `unified-v2`: one cost in seconds, with a queue that sees pending prefill only. The version that the paper calls a bug.
//!
//! Source: the migration paper, "Evolution of Results", row "v2 (bug): unified, queue=prefill only" (TTFT p90 23.339 s, tokens
//! max/min 10.3x), and its "Problem Statement", which describes the unified model that v3 repaired.
//!
//! ```text
//! cost  = uncached tokens / throughput + queue
//! queue = pending prefill tokens / throughput
//! ```
//!
//! | parameter | default | from |
//! | --- | --- | --- |
//! | `throughput` | 14,000 tokens/s | assumed: 8K tokens in 583 ms on an H20 |
//! | `ties` | first | assumed: see `elastic` |
//!
//! Assumed:
//! - The first term is the time to prefill what is not cached ("the cost model combines cache benefit and queuing into a
//!   single scalar").
//! - There is no gate: v3 is what "+hard gate" was added in.
//! - An instance that only decodes therefore looks idle, however many it decodes. That is the bug, and it is kept.
//!
//! What the family shares is said in `elastic`.

use super::elastic::{self, THROUGHPUT, Ties, least, pending_prefill, uncached_s};
use super::spec::Parameters;
use super::{Board, Choice, Habits, Policy, PolicyError, TurnView, WorkerView};

/// Parameters of the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UnifiedV2Config {
    /// Prompt tokens that an instance prefills in a second.
    pub throughput: f64,
    /// Which of equals is taken.
    pub ties: Ties,
}

impl Default for UnifiedV2Config {
    fn default() -> Self {
        Self {
            throughput: THROUGHPUT,
            ties: Ties::First,
        }
    }
}

impl UnifiedV2Config {
    pub(super) fn parse(parameters: &mut Parameters<'_>) -> Result<Self, PolicyError> {
        Ok(Self {
            throughput: parameters.positive("throughput", Self::default().throughput)?,
            ties: Ties::parse(parameters)?,
        })
    }
}

/// The policy.
#[derive(Debug)]
pub struct UnifiedV2 {
    config: UnifiedV2Config,
}

impl UnifiedV2 {
    /// A policy with these parameters.
    #[must_use]
    pub const fn new(config: UnifiedV2Config) -> Self {
        Self { config }
    }
}

impl Policy for UnifiedV2 {
    fn choose(&mut self, board: &Board, turn: &TurnView) -> Choice {
        let throughput = self.config.throughput;
        let cost = |worker: &WorkerView| uncached_s(worker, turn, throughput) + pending_prefill(worker) / throughput;
        let instances = self.config.ties.instances(board);
        least(instances, turn, cost, "least uncached and pending prefill")
    }

    fn habits(&self) -> Habits {
        elastic::habits()
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::check_elastic;
    use super::*;
    use crate::policies::Board;

    #[track_caller]
    fn check(text: &str, set: impl FnOnce(&mut Board), expected: [f64; 3]) {
        let make = |parameters: &mut Parameters<'_>| UnifiedV2Config::parse(parameters).map(UnifiedV2::new);
        check_elastic(text, make, set, &expected);
    }

    #[test]
    fn the_queue_is_pending_prefill_and_nothing_else() {
        // 40,000 tokens at 10,000 a second are 4 s.
        let text = "throughput=10000";
        check(text, |_| {}, [4.0, 4.0, 4.0]);
        // (40,000 - 35,000) / 10,000 = 0.5, and 20,000 + 5,000 pending are 2.5 more.
        let pending = |board: &mut Board| {
            board.workers[0].resident_tokens = 35_000;
            board.workers[0].account.append_tokens = 20_000;
            board.workers[0].account.prefill_tokens = 5_000;
        };
        check(text, pending, [3.0, 4.0, 4.0]);
        // Hundreds that decode do not count: the bug.
        let decoding = |board: &mut Board| {
            board.workers[0].resident_tokens = 35_000;
            board.workers[0].account.requests = 200;
            board.workers[0].account.decode_tokens = 4_000_000;
        };
        check(text, decoding, [0.5, 4.0, 4.0]);
        // The default: 35,000 / 14,000 = 2.5.
        check(
            "",
            |board| {
                board
                    .workers
                    .iter_mut()
                    .for_each(|worker| worker.resident_tokens = 5_000)
            },
            [2.5; 3],
        );
    }
}
