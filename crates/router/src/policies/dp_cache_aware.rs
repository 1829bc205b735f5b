//! `dp-cache-aware`: sticky data-parallel routing, that is, prefix affinity within balance thresholds. The baseline of the
//! source documents, which beat everything that they tried.
//!
//! Formula (after the cache-aware policy of SGLang's model gateway, in its form that gates each candidate): the worker
//! with the longest cached prefix takes the turn if that prefix is more than `cache_threshold` of the prompt, unless it is
//! overloaded: `load > mean + abs` and `load > mean * rel`, load being its requests in flight. All other turns go to
//! the worker with the least load, of equals to the one where fewer sessions live (there: the smallest tree).
//!
//! Assumed, since the documents name neither router nor thresholds: the prefix of a session's first turn does not count
//! (`overlap=own`). It is boilerplate that all sessions share, and where it counts (`overlap=all`, as in the gateway of
//! today, which is `peer-sglang`) new sessions herd to the worker that saw it first: simulated so, latency is more than
//! twice what the documents measured. A baseline is to be as strong as the one that they had.
//!
//! Any worker that decodes serves alone; prefill-only workers stay idle.

use super::spec::Parameters;
use super::{Board, Choice, Considered, Policy, PolicyError, TurnView, WorkerView};
use crate::admission::Denied;

/// Parameters of the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DpCacheAwareConfig {
    /// The share of the prompt that must be cached for affinity to count, 0 to 1.
    pub cache_threshold: f64,
    /// Whether a first turn's prefix counts, though it can be nothing but boilerplate.
    pub boilerplate: bool,
    /// Requests above the mean that count as overload...
    pub abs: u32,
    /// ...if they are above so many times the mean, too.
    pub rel: f64,
}

impl Default for DpCacheAwareConfig {
    fn default() -> Self {
        Self {
            cache_threshold: 0.5,
            boilerplate: false,
            abs: 32,
            rel: 1.1,
        }
    }
}

impl DpCacheAwareConfig {
    pub(super) fn parse(parameters: &mut Parameters<'_>) -> Result<Self, PolicyError> {
        let default = Self::default();
        Ok(Self {
            cache_threshold: parameters.number("cache_threshold", default.cache_threshold)?,
            boilerplate: parameters.choice("overlap", "`own` or `all`", &["own", "all"])? == "all",
            abs: parameters.whole("abs", default.abs)?,
            rel: parameters.number("rel", default.rel)?,
        })
    }
}

/// The policy.
#[derive(Debug)]
pub struct DpCacheAware {
    config: DpCacheAwareConfig,
}

impl DpCacheAware {
    /// A policy with these parameters.
    #[must_use]
    pub const fn new(config: DpCacheAwareConfig) -> Self {
        Self { config }
    }

    /// The worker with the longest prefix, if that is long enough and the worker not overloaded.
    fn affine<'b>(&self, board: &'b Board, turn: &TurnView) -> Option<&'b WorkerView> {
        if turn.new_family && !self.config.boilerplate {
            return None;
        }
        let able = board
            .decoders()
            .filter(|worker| worker.denies_alone != Some(Denied::Suspect));
        let best = able.max_by_key(|worker| (worker.held_tokens(), std::cmp::Reverse(load(worker))))?;
        let matched = f64::from(best.held_tokens()) > self.config.cache_threshold * f64::from(turn.prompt_tokens);
        (matched && !is_overloaded(board, best, self.config.abs, self.config.rel)).then_some(best)
    }
}

impl Policy for DpCacheAware {
    fn choose(&mut self, board: &Board, turn: &TurnView) -> Choice {
        let consider = |worker: &WorkerView, score: f64| Considered {
            plan: worker.alone(turn),
            resident_tokens: worker.resident_tokens,
            score,
            denied: worker.denies_alone,
        };
        if let Some(worker) = self.affine(board, turn) {
            // Affinity waits for room, as the model's requests wait in the worker's own queue.
            return Choice::only(
                consider(worker, f64::from(load(worker))),
                Vec::new(),
                "longest cached prefix",
            );
        }
        let mut idle_first: Vec<_> = board.decoders().collect();
        idle_first.sort_by_key(|worker| (load(worker), worker.homed_sessions, worker.id));
        let considered = idle_first
            .into_iter()
            .map(|worker| consider(worker, f64::from(load(worker))))
            .collect();
        Choice::least(considered, "least load")
    }
}

fn load(worker: &WorkerView) -> u32 {
    worker.account.requests
}

/// Whether a worker has more than `mean + abs` and more than `mean * rel` requests in flight, the mean being that of all
/// workers that could serve the turn.
pub(super) fn is_overloaded(board: &Board, worker: &WorkerView, abs: u32, rel: f64) -> bool {
    let (count, sum) = board.decoders().fold((0.0, 0.0), |(count, sum), worker| {
        (count + 1.0, sum + f64::from(load(worker)))
    });
    let mean = if count > 0.0 { sum / count } else { 0.0 };
    let load = f64::from(load(worker));
    load > mean + f64::from(abs) && load > mean * rel
}

#[cfg(test)]
mod tests {
    use super::super::testing::{board, turn};
    use super::*;
    use crate::event::Role;

    /// A later turn of a session.
    fn check(edit: impl FnOnce(&mut Board), expected: Option<u32>) {
        let later = TurnView {
            new_family: false,
            ..turn()
        };
        check_turn(DpCacheAwareConfig::default(), later, edit, expected);
    }

    fn check_turn(config: DpCacheAwareConfig, turn: TurnView, edit: impl FnOnce(&mut Board), expected: Option<u32>) {
        let mut board = board([Role::Prefill, Role::Both, Role::Both, Role::Decode]);
        edit(&mut board);
        let plan = DpCacheAware::new(config).choose(&board, &turn).plan;
        assert_eq!(
            plan.map(|plan| (plan.prefill, plan.decode.0)),
            expected.map(|decode| (None, decode)),
            "{board:?}"
        );
    }

    #[test]
    fn affinity_within_balance() {
        check(|_| {}, Some(1));
        check(|board| board.workers[1].account.requests = 1, Some(2));
        check(|board| board.workers[1].homed_sessions = 1, Some(2));
        check(|board| board.workers[3].resident_tokens = 10_001, Some(3));
        check(|board| board.workers[3].resident_tokens = 10_000, Some(1));
        check(|board| board.workers[0].resident_tokens = 20_000, Some(1));
        // Overloaded: 50 > 50 / 3 + 32.
        let loaded = |requests| {
            move |board: &mut Board| {
                board.workers[3].resident_tokens = 20_000;
                board.workers[3].account.requests = requests;
            }
        };
        check(loaded(48), Some(3));
        check(loaded(50), Some(1));
        // Full: waits; dead: goes elsewhere.
        let denied = |denied| {
            move |board: &mut Board| {
                board.workers[3].resident_tokens = 20_000;
                board.workers[3].denies_alone = Some(denied);
            }
        };
        check(denied(Denied::PoolFull), None);
        check(denied(Denied::Dead), Some(1));
        check(denied(Denied::Suspect), Some(1));
    }

    #[test]
    fn boilerplate_draws_new_sessions_only_where_it_is_asked_for() {
        let boilerplate = |board: &mut Board| board.workers[3].resident_tokens = 18_000;
        let herding = DpCacheAwareConfig {
            boilerplate: true,
            ..DpCacheAwareConfig::default()
        };
        check_turn(DpCacheAwareConfig::default(), turn(), boilerplate, Some(1));
        check_turn(herding, turn(), boilerplate, Some(3));
    }
}
