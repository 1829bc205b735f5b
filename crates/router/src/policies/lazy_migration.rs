//! `lazy-migration`: `contention`, and before it four conditions that together move a session off an overloaded instance.
//! The paper's approach A+B.
//!
//! Source: the migration paper, "Approach B: Session-Level Lazy Migration [UNDER TUNING]" (TTFT p90 8.291 s; at factor 1.5 it
//! reports no migration at all), and its "Next steps" for the variants of the first condition.
//!
//! ```text
//! the session moves to the instance with the fewest requests if
//!   1. its instance is busy: num_requests > avg * factor                           trigger=factor (default)
//!                            num_requests > avg + plus                             trigger=average_plus
//!                            recent time to first token there > ttft seconds       trigger=recent_ttft
//!   2. cached tokens there / prompt tokens > cache_ratio
//!   3. prompt tokens >= heavy_threshold
//!   4. target num_requests < its instance's num_requests - margin
//! else the least cost of `contention` wins, among the instances that its gate lets through
//! ```
//!
//! | parameter | default | from |
//! | --- | --- | --- |
//! | `trigger` | `factor` | the paper; the other two from its "Next steps" |
//! | `factor` | 1.5 | the paper (`migration_request_factor`); it proposes 1.2 or 1.3 |
//! | `plus` | 3 | the paper, "Next steps" ("> avg + 3") |
//! | `ttft` | 5 s | assumed: the paper counts a TTFT above 5 s as a queuing victim |
//! | `cache_ratio` | 0.5 | the paper |
//! | `heavy_threshold` | 32,768 tokens | assumed: the lower bound of the class `heavy`; the paper names no value |
//! | `margin` | 2 | the paper |
//! | those of `contention`, its gate among them | | there |
//!
//! Assumed:
//! - `avg` is over all instances, the session's own included, and counts requests in flight before this one.
//! - The session's instance is where its last turn was sent; a first turn has none and cannot trigger.
//! - The target is the instance with the fewest requests; of equals the one with the least cost of `contention`.
//! - Recent time to first token is the router's running mean (the newest counts one eighth) of what decoded there.
//! - A target out of reach is no target.
//!
//! What the family shares is said in `elastic`.

use super::contention::ContentionConfig;
use super::elastic::{self, consider, least, mean_requests, session_instance};
use super::spec::Parameters;
use super::{Board, Choice, Habits, Policy, PolicyError, TurnView, WorkerView};

/// When an instance counts as busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// It has more than `factor` times the average number of requests.
    Factor,
    /// It has more than `plus` requests above the average.
    AveragePlus,
    /// Its recent time to first token is above `ttft_s`.
    RecentTtft,
}

/// Parameters of the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LazyMigrationConfig {
    /// The costs where nothing triggers.
    pub contention: ContentionConfig,
    /// When an instance counts as busy.
    pub trigger: Trigger,
    /// Times the average number of requests.
    pub factor: f64,
    /// Requests above the average.
    pub plus: f64,
    /// Time to first token, in seconds.
    pub ttft_s: f64,
    /// The share of the prompt that must be cached at the session's instance.
    pub cache_ratio: f64,
    /// The shortest prompt that triggers, in tokens.
    pub heavy_threshold: u32,
    /// The target must have fewer requests than the session's instance by more than so many.
    pub margin: u32,
}

impl Default for LazyMigrationConfig {
    fn default() -> Self {
        Self {
            contention: ContentionConfig::default(),
            trigger: Trigger::Factor,
            factor: 1.5,
            plus: 3.0,
            ttft_s: 5.0,
            cache_ratio: 0.5,
            heavy_threshold: 32_768,
            margin: 2,
        }
    }
}

impl LazyMigrationConfig {
    pub(super) fn parse(parameters: &mut Parameters<'_>) -> Result<Self, PolicyError> {
        let default = Self::default();
        let triggers = ["factor", "average_plus", "recent_ttft"];
        let expected = "`factor`, `average_plus` or `recent_ttft`";
        Ok(Self {
            trigger: match parameters.choice("trigger", expected, &triggers)? {
                "average_plus" => Trigger::AveragePlus,
                "recent_ttft" => Trigger::RecentTtft,
                _ => Trigger::Factor,
            },
            factor: parameters.positive("factor", default.factor)?,
            plus: parameters.number("plus", default.plus)?,
            ttft_s: parameters.number("ttft", default.ttft_s)?,
            cache_ratio: parameters.number("cache_ratio", default.cache_ratio)?,
            heavy_threshold: parameters.whole("heavy_threshold", default.heavy_threshold)?,
            margin: parameters.whole("margin", default.margin)?,
            contention: ContentionConfig::parse(parameters)?,
        })
    }
}

/// The policy.
#[derive(Debug)]
pub struct LazyMigration {
    config: LazyMigrationConfig,
}

impl LazyMigration {
    /// A policy with these parameters.
    #[must_use]
    pub const fn new(config: LazyMigrationConfig) -> Self {
        Self { config }
    }

    fn is_busy(&self, source: &WorkerView, average: f64) -> bool {
        let requests = f64::from(source.account.requests);
        match self.config.trigger {
            Trigger::Factor => requests > average * self.config.factor,
            Trigger::AveragePlus => requests > average + self.config.plus,
            Trigger::RecentTtft => source.recent_ttft_s.is_some_and(|ttft_s| ttft_s > self.config.ttft_s),
        }
    }

    /// Where the session is to move, if all four conditions hold.
    fn target<'b>(&self, instances: &[&'b WorkerView], source: &WorkerView, turn: &TurnView) -> Option<&'b WorkerView> {
        let prompt = f64::from(turn.prompt_tokens);
        let cached = f64::from(source.held_tokens());
        let triggers = self.is_busy(source, mean_requests(instances))
            && cached > self.config.cache_ratio * prompt
            && turn.prompt_tokens >= self.config.heavy_threshold;
        let cost = |worker: &WorkerView| self.config.contention.cost_s(worker, Some(source), turn);
        let others = instances
            .iter()
            .copied()
            .filter(|worker| triggers && worker.id != source.id && worker.denies_alone.is_none());
        let target = others.min_by(|left, right| {
            let requests = left.account.requests.cmp(&right.account.requests);
            requests.then(cost(left).total_cmp(&cost(right)))
        })?;
        let less_loaded = target.account.requests.saturating_add(self.config.margin) < source.account.requests;
        less_loaded.then_some(target)
    }
}

impl Policy for LazyMigration {
    fn choose(&mut self, board: &Board, turn: &TurnView) -> Choice {
        let ContentionConfig { gate, ties, .. } = self.config.contention;
        let instances = ties.instances(board);
        let source = session_instance(&instances, turn);
        let cost = |worker: &WorkerView| self.config.contention.cost_s(worker, source, turn);
        let Some(target) = source.and_then(|source| self.target(&instances, source, turn)) else {
            return least(gate.open(instances), turn, cost, "least prefill, queue and contention");
        };
        let others = instances.into_iter().filter(|worker| worker.id != target.id);
        let others = others.map(|worker| consider(worker, turn, cost(worker))).collect();
        let moved = consider(target, turn, cost(target));
        Choice::only(moved, others, "its session moves off a busy instance")
    }

    fn habits(&self) -> Habits {
        elastic::habits()
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{board, turn, with_parameters};
    use super::*;
    use crate::admission::Denied;
    use crate::event::Role;
    use crate::policies::Board;
    use homing_units::WorkerId;

    /// Four instances with 6, 2, 2 and 2 requests, 3 on average; a heavy session lives at the first, which holds 39,000 of its
    /// 40,000 tokens. Where its turn goes.
    #[track_caller]
    fn check(text: &str, set: impl FnOnce(&mut Board, &mut TurnView), expected: u32) {
        let mut board = board([Role::Both; 4]);
        for (worker, requests) in board.workers.iter_mut().zip([6, 2, 2, 2]) {
            worker.account.requests = requests;
        }
        board.workers[0].resident_tokens = 39_000;
        board.workers[0].exclusive_tokens = 30_000;
        let mut turn = TurnView {
            prompt_tokens: 40_000,
            turn_index: 3,
            new_family: false,
            home: Some(WorkerId(0)),
            ..turn()
        };
        set(&mut board, &mut turn);
        let make = |parameters: &mut Parameters<'_>| LazyMigrationConfig::parse(parameters).map(LazyMigration::new);
        let choice = with_parameters(text, make).choose(&board, &turn);
        assert_eq!(choice.plan.map(|plan| plan.decode.0), Some(expected), "{choice:?}");
        assert_eq!(
            choice.considered[0].plan.decode.0, expected,
            "the chosen one comes first"
        );
    }

    fn requests(requests: [u32; 4]) -> impl FnOnce(&mut Board, &mut TurnView) {
        move |board, _| {
            for (worker, requests) in board.workers.iter_mut().zip(requests) {
                worker.account.requests = requests;
            }
        }
    }

    #[test]
    fn all_four_conditions_together_move_a_session() {
        // 6 > 3 * 1.5, 39,000 > 20,000, 40,000 >= 32,768, and 2 < 6 - 2: to the first of those with 2.
        check("", |_, _| {}, 1);
        // 1: mean 3.5, and 5 is not above 5.25.
        check("", requests([5, 3, 3, 3]), 0);
        // 2: half of the prompt is not more than half.
        check("", |board, _| board.workers[0].resident_tokens = 20_001, 1);
        check("cache_ratio=0.98", |_, _| {}, 0);
        // 3.
        check("heavy_threshold=40000", |_, _| {}, 1);
        check("heavy_threshold=40001", |_, _| {}, 0);
        // 4: mean 2.5, 4 > 3.75, but 2 < 4 - 2 does not hold.
        check("", requests([4, 2, 2, 2]), 0);
        check("margin=1", requests([4, 2, 2, 2]), 1);
    }

    #[test]
    fn at_half_the_cache_the_cost_decides() {
        // Condition 2 fails at 20,000 of 40,000. Staying costs 20,000 / 14,000 + 0.3 = 1.73; moving
        // 40,000 / 14,000 + 0.1 - 0.3 * 20,000 / 14,000 = 2.53.
        check("", |board, _| board.workers[0].resident_tokens = 20_000, 0);
    }

    #[test]
    fn the_variants_of_the_first_condition() {
        // Mean 3.25; 4 is above 1.2 times that (3.9), not above 1.5 times (4.875).
        let four = || requests([4, 1, 4, 4]);
        check("", four(), 0);
        check("factor=1.2", four(), 1);
        // Mean 3 and 6 requests: not above 3 + 3. Mean 3.25 and 7: above 6.25.
        check("trigger=average_plus", |_, _| {}, 0);
        check("trigger=average_plus", requests([7, 2, 2, 2]), 1);
        check("trigger=average_plus:plus=2.5", |_, _| {}, 1);
        let ttft = |seconds| move |board: &mut Board, _: &mut TurnView| board.workers[0].recent_ttft_s = seconds;
        check("trigger=recent_ttft", ttft(None), 0);
        check("trigger=recent_ttft", ttft(Some(5.0)), 0);
        check("trigger=recent_ttft", ttft(Some(5.1)), 1);
        check("trigger=recent_ttft:ttft=8", ttft(Some(5.1)), 0);
    }

    #[test]
    fn the_target_has_the_fewest_requests_and_of_equals_the_least_cost() {
        check("", requests([6, 3, 1, 2]), 2);
        check("", |board, _| board.workers[3].resident_tokens = 20_000, 3);
        check("", |board, _| board.workers[1].denies_alone = Some(Denied::Suspect), 2);
        // Without a source nothing triggers: 40,000 tokens anywhere, and the first of the idlest.
        let first = |board: &mut Board, turn: &mut TurnView| {
            board.workers[0].resident_tokens = 0;
            (turn.home, turn.new_family, turn.turn_index) = (None, true, 0);
        };
        check("", first, 1);
    }
}
