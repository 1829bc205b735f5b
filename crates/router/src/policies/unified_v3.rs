//! `unified-v3`: `unified-v2` with decode tokens in the queue, and a hard gate on overloaded instances.
//!
//! Source: the migration paper, "Problem Statement" (the formula of the queue) and "Evolution of Results", row "v3: +decode in
//! queue, +hard gate" (TTFT p90 10.121 s, tokens max/min 2.6x).
//!
//! ```text
//! cost  = uncached tokens / throughput + queue
//! queue = (pending prefill tokens + decode tokens) / throughput
//! gate: an instance is out if num_requests > mean * gate and num_requests > mean + gate_plus
//! ```
//!
//! | parameter | default | from |
//! | --- | --- | --- |
//! | `throughput` | 14,000 tokens/s | assumed: 8K tokens in 583 ms on an H20 |
//! | `gate` | 2 | assumed |
//! | `gate_plus` | 2 | assumed: the paper's own margin for "meaningfully less loaded" in its migration trigger |
//!
//! Assumed:
//! - Decode tokens are the context tokens of the requests that decode there: "a token-based proxy that misses real
//!   contention (batch size)" fits nothing that counts requests.
//! - The gate's measure is requests in flight against the mean over all instances; the paper names the gate and no more. Two
//!   conditions, so that an idle cluster (mean 0.5) does not gate an instance for its second request.
//! - The gate never leaves a turn without a place: where every instance without it is out of reach, none is gated.
//!
//! What the family shares is said in `elastic`.

use super::elastic::{self, THROUGHPUT, instances, least, mean_requests, pending_prefill, uncached_s};
use super::spec::Parameters;
use super::{Board, Choice, Habits, Policy, PolicyError, TurnView, WorkerView};

/// Parameters of the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UnifiedV3Config {
    /// Prompt tokens that an instance prefills in a second.
    pub throughput: f64,
    /// So many times the mean number of requests gate an instance...
    pub gate: f64,
    /// ...if it has so many more than the mean, too.
    pub gate_plus: f64,
}

impl Default for UnifiedV3Config {
    fn default() -> Self {
        Self {
            throughput: THROUGHPUT,
            gate: 2.0,
            gate_plus: 2.0,
        }
    }
}

impl UnifiedV3Config {
    pub(super) fn parse(parameters: &mut Parameters<'_>) -> Result<Self, PolicyError> {
        let default = Self::default();
        Ok(Self {
            throughput: parameters.positive("throughput", default.throughput)?,
            gate: parameters.number("gate", default.gate)?,
            gate_plus: parameters.number("gate_plus", default.gate_plus)?,
        })
    }
}

/// The policy.
#[derive(Debug)]
pub struct UnifiedV3 {
    config: UnifiedV3Config,
}

impl UnifiedV3 {
    /// A policy with these parameters.
    #[must_use]
    pub const fn new(config: UnifiedV3Config) -> Self {
        Self { config }
    }

    /// The instances that the gate lets through.
    fn open<'b>(&self, mut instances: Vec<&'b WorkerView>) -> Vec<&'b WorkerView> {
        let mean = mean_requests(&instances);
        let is_open = |worker: &WorkerView| {
            let requests = f64::from(worker.account.requests);
            requests <= mean * self.config.gate || requests <= mean + self.config.gate_plus
        };
        let reachable = |worker: &&WorkerView| is_open(worker) && worker.denies_alone.is_none();
        if instances.iter().copied().any(|worker| reachable(&worker)) {
            instances.retain(|worker| is_open(worker));
        }
        instances
    }
}

impl Policy for UnifiedV3 {
    fn choose(&mut self, board: &Board, turn: &TurnView) -> Choice {
        let throughput = self.config.throughput;
        let cost = |worker: &WorkerView| {
            let queue = pending_prefill(worker) + worker.account.decode_tokens as f64;
            uncached_s(worker, turn, throughput) + queue / throughput
        };
        let reason = "least uncached, pending prefill and decode tokens";
        least(self.open(instances(board)), turn, cost, reason)
    }

    fn habits(&self) -> Habits {
        elastic::habits()
    }
}
