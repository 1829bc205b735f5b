//! `linear`: the elastic family's baseline. Each instance gets a weighted sum of two shares; the least wins.
//!
//! Source: the migration paper, "Evolution of Results", row "Baseline: linear routing" (TTFT p90 16.058 s), against which all
//! its versions are measured.
//!
//! ```text
//! score = w_cache * uncached tokens / prompt tokens
//!       + w_load  * num_requests / the largest num_requests of any instance
//! ```
//!
//! | parameter | default | from |
//! | --- | --- | --- |
//! | `w_cache` | 1 | assumed |
//! | `w_load` | 1 | assumed |
//! | `ties` | first | assumed: see `elastic` |
//!
//! Assumed, since the paper says "linear routing" and no more:
//! - Linear means a weighted sum of a cache term and a load term, each scaled to 0..1, as the scorers of AIBrix
//!   (`(100 - match%) * 0.1 + requests / max`) and llm-d (a weighted sum of normalised scores) do.
//! - Both weights are 1: neither term can outvote the other by its scale. With that, an idle instance never wins over one
//!   that holds the whole prompt, unless the holder is the busiest of all.
//! - Load is the number of requests in flight, as in AIBrix. An idle cluster has no load term.
//!
//! What the family shares is said in `elastic`.

use super::elastic::{self, Ties, least};
use super::spec::Parameters;
use super::{Board, Choice, Habits, Policy, PolicyError, TurnView, WorkerView};

/// Parameters of the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearConfig {
    /// The weight of the share of the prompt that is not cached.
    pub w_cache: f64,
    /// The weight of the requests in flight, as a share of the largest number of any instance.
    pub w_load: f64,
    /// Which of equals is taken.
    pub ties: Ties,
}

impl Default for LinearConfig {
    fn default() -> Self {
        Self {
            w_cache: 1.0,
            w_load: 1.0,
            ties: Ties::First,
        }
    }
}

impl LinearConfig {
    pub(super) fn parse(parameters: &mut Parameters<'_>) -> Result<Self, PolicyError> {
        let default = Self::default();
        Ok(Self {
            w_cache: parameters.number("w_cache", default.w_cache)?,
            w_load: parameters.number("w_load", default.w_load)?,
            ties: Ties::parse(parameters)?,
        })
    }
}

/// The policy.
#[derive(Debug)]
pub struct Linear {
    config: LinearConfig,
}

impl Linear {
    /// A policy with these parameters.
    #[must_use]
    pub const fn new(config: LinearConfig) -> Self {
        Self { config }
    }
}

impl Policy for Linear {
    fn choose(&mut self, board: &Board, turn: &TurnView) -> Choice {
        let instances = self.config.ties.instances(board);
        let most = instances.iter().map(|worker| worker.account.requests).max();
        let most = f64::from(most.unwrap_or(0).max(1));
        let LinearConfig { w_cache, w_load, .. } = self.config;
        let score = |worker: &WorkerView| {
            let uncached = f64::from(worker.lacks(turn)) / f64::from(turn.prompt_tokens.max(1));
            let load = f64::from(worker.account.requests) / most;
            w_cache * uncached + w_load * load
        };
        least(
            instances,
            turn,
            score,
            "least weighted sum of uncached share and load share",
        )
    }

    fn habits(&self) -> Habits {
        elastic::habits()
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::check_elastic;
    use super::*;

    #[track_caller]
    fn check(text: &str, cached: [u32; 3], requests: [u32; 3], expected: [f64; 3]) {
        check_elastic(
            text,
            |parameters| LinearConfig::parse(parameters).map(Linear::new),
            |board| {
                for (worker, (cached, requests)) in board.workers.iter_mut().zip(cached.into_iter().zip(requests)) {
                    worker.resident_tokens = cached;
                    worker.account.requests = requests;
                }
            },
            &expected,
        );
    }

    #[test]
    fn the_least_weighted_sum_wins() {
        // Of 40,000 tokens. Idle: 1 each, the first of equals.
        check("", [0; 3], [0; 3], [1.0, 1.0, 1.0]);
        // 10,000 / 40,000 uncached = 0.25, and 2 of 4 requests = 0.5; the busiest has the whole load term.
        check("", [30_000, 0, 0], [2, 4, 1], [0.75, 2.0, 1.25]);
        // The holder is the busiest: 0.25 + 1 against 1 + 0.
        check("", [30_000, 0, 0], [4, 0, 2], [1.25, 1.0, 1.5]);
        check("w_cache=2", [30_000, 0, 0], [4, 0, 2], [1.5, 2.0, 2.5]);
        check("w_load=0", [30_000, 0, 0], [4, 0, 2], [0.25, 1.0, 1.0]);
    }
}
