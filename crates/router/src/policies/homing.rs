//! `homing`: every turn to the worker that holds its session's KV, when that is the cheapest plan.
//!
//! The first version of the planner, by rules over rough costs in seconds:
//! 1. A worker that holds the session's own history and lacks at most half of the prompt is its home. The home serves the
//!    turn: `append` while the tail is small (`append_tokens`) or a prefill worker would have to compute at least `heavy` times
//!    as much; otherwise a prefill worker computes the prompt and the home pulls what it lacks.
//! 2. A home without room is waited for as long as computing the prompt elsewhere would take (rent or buy: at most twice the
//!    cost of the better choice in hindsight). An overloaded home (`load > mean + abs` and `load > mean * rel`, as in
//!    `dp-cache-aware`) is left only if another plan is estimated to be cheaper, so that on a data-parallel cluster this
//!    policy is sticky wherever that one is.
//! 3. Without a home the least estimate wins: `seed` or `reseed` through a prefill worker; `local` where a worker does both,
//!    where nobody can prefill for it, where next to nothing is to be computed (`local_tokens`), or where the prefill workers
//!    are so far behind that they would take `overflow` times as long, the wait for a place in their queue included.
//!
//! ```text
//! prefill  = (prefill tokens queued there + tokens that it lacks) / prefill_tps
//! transfer = (transfers ahead on the link + 1) * tokens to move / transfer_tps + recent failures of the link * failure_s
//! fetched  = what the worker that holds the history saves `prefill` if it lends it: prefill - transfer - fetch_s, if above 0
//! place    = requests there * request_s + fullness * pool_s
//! demand   = (tokens of the sessions that live there and were used lately + prompt) / pool
//! fullness = demand up to 1; above it, 1 and the share of that demand for which the pool has no room: 2 at most
//! ```
//!
//! What the prefill worker lacks is counted with all overlap, boilerplate too: that is what it saves. For the decode
//! worker only the family's own blocks count, and nothing for a new family: boilerplate never decides where a session will live.

use super::dp_cache_aware::is_overloaded;
use super::spec::Parameters;
use super::{Board, Choice, Considered, Policy, PolicyError, TurnView, WorkerView};
use crate::action::Fetch;
use crate::event::Role;

/// Parameters of the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HomingConfig {
    /// The longest tail, in tokens, that a decode-only worker prefills beside its decoding without a second thought. Of
    /// coding-agent turns nine in ten are below the default.
    pub append_tokens: u32,
    /// So few tokens to compute are not worth a prefill worker, whoever lacks them.
    pub local_tokens: u32,
    /// A longer tail is appended still if a prefill worker had to compute at least so many times its tokens.
    pub heavy: f64,
    /// A decode-only worker prefills a whole prompt itself if prefill workers would take so many times as long.
    pub overflow: f64,
    /// Prompt tokens that a worker prefills in a second.
    pub prefill_tps: f64,
    /// Prompt tokens whose KV a link moves in a second.
    pub transfer_tps: f64,
    /// What one request in flight costs another on its worker, in seconds.
    pub request_s: f64,
    /// What a full pool costs compared with an empty one, in seconds.
    pub pool_s: f64,
    /// What it costs to fetch a history beside moving it, in seconds: two more requests, one of them among running decodes.
    pub fetch_s: f64,
    /// What a recent failure of a link costs, in seconds.
    pub failure_s: f64,
    /// Requests above the mean that count as overload...
    pub abs: u32,
    /// ...if they are above so many times the mean, too.
    pub rel: f64,
}

impl Default for HomingConfig {
    fn default() -> Self {
        Self {
            append_tokens: 4_096,
            local_tokens: 512,
            heavy: 4.0,
            overflow: 3.0,
            // Of the step-time calibration: an H20 at 8K tokens of context; 10 GB/s at 98,304 bytes a token.
            prefill_tps: 15_000.0,
            transfer_tps: 100_000.0,
            request_s: 0.05,
            pool_s: 1.0,
            fetch_s: 0.1,
            failure_s: 2.0,
            abs: 16,
            rel: 1.5,
        }
    }
}

impl HomingConfig {
    pub(super) fn parse(parameters: &mut Parameters<'_>) -> Result<Self, PolicyError> {
        let default = Self::default();
        Ok(Self {
            append_tokens: parameters.whole("append_tokens", default.append_tokens)?,
            local_tokens: parameters.whole("local_tokens", default.local_tokens)?,
            heavy: parameters.number("heavy", default.heavy)?,
            overflow: parameters.number("overflow", default.overflow)?,
            prefill_tps: parameters.positive("prefill_tps", default.prefill_tps)?,
            transfer_tps: parameters.positive("transfer_tps", default.transfer_tps)?,
            request_s: parameters.number("request_s", default.request_s)?,
            pool_s: parameters.number("pool_s", default.pool_s)?,
            fetch_s: parameters.number("fetch_s", default.fetch_s)?,
            failure_s: parameters.number("failure_s", default.failure_s)?,
            abs: parameters.whole("abs", default.abs)?,
            rel: parameters.number("rel", default.rel)?,
        })
    }
}

/// The policy.
#[derive(Debug)]
pub struct Homing {
    config: HomingConfig,
}

impl Policy for Homing {
    fn choose(&mut self, board: &Board, turn: &TurnView) -> Choice {
        let mut plans: Vec<Considered> = board
            .decoders()
            .map(|worker| self.best_for(board, worker, turn))
            .collect();
        let Some(home) = home(board, turn) else {
            return Choice::least(plans, "has no home: least estimate");
        };
        let at = plans
            .iter()
            .position(|plan| plan.plan.decode == home.id)
            .expect("a home is a decode worker");
        let stay = plans.remove(at);
        let mut elsewhere = Choice::least(plans, "its home has no room, and waiting costs more than moving");
        let cheaper = elsewhere
            .considered
            .first()
            .is_some_and(|best| best.denied.is_none() && best.score < stay.score);
        let moves = match stay.denied {
            Some(_) => turn.waited.as_secs_f64() >= self.prefill_s(turn.prompt_tokens) && elsewhere.plan.is_some(),
            None => cheaper && is_overloaded(board, home, self.config.abs, self.config.rel),
        };
        if moves {
            if stay.denied.is_none() {
                "its home is overloaded".clone_into(&mut elsewhere.reason);
            }
            elsewhere.considered.push(stay);
            return elsewhere;
        }
        let lacks = home.lacks(turn);
        let reason = match stay.plan.prefill {
            None => format!("at home, {lacks} tokens to append"),
            Some(_) => format!("at home, {lacks} tokens are too many to append"),
        };
        Choice::only(stay, elsewhere.considered, reason)
    }
}

/// The worker that holds this session's history, if one does.
fn home<'b>(board: &'b Board, turn: &TurnView) -> Option<&'b WorkerView> {
    let holds = |worker: &&WorkerView| {
        !turn.new_family
            && worker.exclusive_tokens > 0
            && u64::from(worker.lacks(turn)) * 2 <= u64::from(turn.prompt_tokens)
    };
    board.decoders().filter(holds).max_by_key(|worker| {
        (
            worker.exclusive_tokens,
            turn.home == Some(worker.id),
            std::cmp::Reverse(worker.id),
        )
    })
}

impl Homing {
    /// A policy with these parameters.
    #[must_use]
    pub const fn new(config: HomingConfig) -> Self {
        Self { config }
    }

    /// The best plan that ends on this decode worker.
    fn best_for(&self, board: &Board, decode: &WorkerView, turn: &TurnView) -> Considered {
        let alone = self.alone(decode, turn);
        let Some(seeded) = self
            .seeded(board, decode, turn)
            .filter(|_| !self.is_light(decode, turn))
        else {
            return alone;
        };
        let takes_all = match decode.role {
            Role::Both => alone.score <= seeded.score,
            Role::Decode | Role::Prefill => self.overflows(&alone, &seeded, turn),
        };
        if takes_all || self.is_cheaper_to_append(board, decode, &seeded, turn) {
            alone
        } else {
            seeded
        }
    }

    /// Whether the prefill workers are so far behind that a decode-only worker had better do their work.
    fn overflows(&self, alone: &Considered, seeded: &Considered, turn: &TurnView) -> bool {
        let waited_s = if seeded.denied.is_some() {
            turn.waited.as_secs_f64()
        } else {
            0.0
        };
        alone.denied.is_none() && seeded.score + waited_s > alone.score * self.config.overflow
    }

    /// Whether so little is to be computed that no prefill worker is worth it.
    fn is_light(&self, decode: &WorkerView, turn: &TurnView) -> bool {
        let appends = !turn.new_family && decode.exclusive_tokens > 0;
        let bound = if appends {
            self.config.append_tokens.max(self.config.local_tokens)
        } else {
            self.config.local_tokens
        };
        decode.lacks(turn) <= bound
    }

    /// Whether the decode worker holds so much that the prefill worker of this plan would compute many times what it lacks.
    fn is_cheaper_to_append(&self, board: &Board, decode: &WorkerView, seeded: &Considered, turn: &TurnView) -> bool {
        let prefill = seeded.plan.prefill.and_then(|prefill| board.worker(prefill));
        let computes = prefill.map_or(turn.prompt_tokens, |prefill| prefill.lacks(turn));
        let holds = !turn.new_family && decode.exclusive_tokens > 0;
        holds && f64::from(computes) >= self.config.heavy * f64::from(decode.lacks(turn))
    }

    fn alone(&self, worker: &WorkerView, turn: &TurnView) -> Considered {
        let own = if turn.new_family {
            0
        } else {
            worker.exclusive_tokens.min(worker.held_tokens())
        };
        let ahead = worker.account.append_tokens + worker.account.prefill_tokens;
        let prefill_s = self.prefill_s(turn.prompt_tokens.saturating_sub(own)) + ahead as f64 / self.config.prefill_tps;
        Considered {
            plan: worker.alone(turn),
            resident_tokens: worker.resident_tokens,
            score: prefill_s + self.place_s(worker, turn),
            denied: worker.denies_alone,
        }
    }

    /// The plan with the prefill worker that has it there first; one with room if there is any. `None` where nobody can.
    fn seeded(&self, board: &Board, decode: &WorkerView, turn: &TurnView) -> Option<Considered> {
        if !turn.may_transfer {
            return None;
        }
        let place_s = self.place_s(decode, turn);
        let plans = board.prefillers(decode).map(|prefill| {
            let arrival_s = self.arrival_s(board, prefill, decode, turn);
            let saved = self.saved_by_fetching(board, prefill, turn);
            let plan = decode.seeded_by(prefill.id, turn);
            Considered {
                plan: saved.map_or(plan, |(fetch, _)| plan.fetching(fetch)),
                resident_tokens: decode.resident_tokens,
                score: arrival_s - saved.map_or(0.0, |(_, saved_s)| saved_s) + place_s,
                denied: decode.denies_seed.or(prefill.denies_prefill),
            }
        });
        plans.min_by(|left, right| {
            (left.denied.is_some().cmp(&right.denied.is_some())).then(left.score.total_cmp(&right.score))
        })
    }

    /// The history that `prefill` had better pull than compute, and the seconds that this saves.
    fn saved_by_fetching(&self, board: &Board, prefill: &WorkerView, turn: &TurnView) -> Option<(Fetch, f64)> {
        let fetch = board.fetchable(prefill, turn)?;
        let tokens = fetch.tokens - prefill.held_tokens();
        let ahead = board.link(fetch.from, prefill.id).transfers + 1;
        let moved_s = f64::from(ahead) * f64::from(tokens) / self.config.transfer_tps;
        let saved_s = self.prefill_s(tokens) - moved_s;
        (saved_s > self.config.fetch_s).then_some((fetch, saved_s - self.config.fetch_s))
    }

    /// When the KV that `prefill` computes would be at `decode`.
    fn arrival_s(&self, board: &Board, prefill: &WorkerView, decode: &WorkerView, turn: &TurnView) -> f64 {
        let link = board.link(prefill.id, decode.id);
        let queued_s = prefill.account.prefill_tokens as f64 / self.config.prefill_tps;
        let own = if turn.new_family {
            0
        } else {
            decode.exclusive_tokens.min(decode.held_tokens())
        };
        let moved_s = f64::from(turn.prompt_tokens.saturating_sub(own)) / self.config.transfer_tps;
        queued_s
            + self.prefill_s(prefill.lacks(turn))
            + f64::from(link.transfers + 1) * moved_s
            + f64::from(link.failures) * self.config.failure_s
    }

    fn prefill_s(&self, tokens: u32) -> f64 {
        f64::from(tokens) / self.config.prefill_tps
    }

    /// What it costs to live at this worker: its company, and how full its pool would be.
    fn place_s(&self, worker: &WorkerView, turn: &TurnView) -> f64 {
        let moves_in = if turn.home == Some(worker.id) {
            0
        } else {
            u64::from(turn.prompt_tokens)
        };
        let demand = (worker.live_tokens + moves_in) as f64 / worker.kv_tokens.max(1) as f64;
        let company = f64::from(worker.account.requests.saturating_add(worker.waiting));
        company * self.config.request_s + fullness(demand) * self.config.pool_s
    }
}

/// How full a pool is that is wanted so many times over: a full one, and the share of the demand that has no room in it.
/// Bounded, because a pool that is wanted a hundred times over turns nobody away; it only keeps next to nothing.
fn fullness(demand: f64) -> f64 {
    if demand <= 1.0 { demand } else { 2.0 - 1.0 / demand }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{board, turn};
    use super::super::{LinkView, Plan};
    use super::*;
    use crate::action::Path;
    use crate::admission::Denied;
    use homing_units::{Duration, WorkerId};

    const PD: [Role; 4] = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
    const DP: [Role; 3] = [Role::Both; 3];

    /// A later turn of a session whose history of so many tokens worker `at` holds.
    fn later(board: &mut Board, at: usize, held: u32) -> TurnView {
        board.workers[at].resident_tokens = held;
        board.workers[at].exclusive_tokens = held / 2;
        let home = Some(board.workers[at].id);
        TurnView {
            new_family: false,
            was_resident: true,
            home,
            ..turn()
        }
    }

    fn check<const N: usize>(
        roles: [Role; N],
        set: impl FnOnce(&mut Board) -> TurnView,
        expected: Option<(Path, Option<u32>, u32)>,
    ) {
        let mut board = board(roles);
        let turn = set(&mut board);
        let choice = Homing::new(HomingConfig::default()).choose(&board, &turn);
        let plan = choice
            .plan
            .map(|plan: Plan| (plan.path, plan.prefill.map(|id| id.0), plan.decode.0));
        assert_eq!(plan, expected, "{} {:?}", choice.reason, choice.considered);
        if let Some(plan) = choice.plan {
            assert_eq!(choice.considered[0].plan, plan, "the chosen one comes first");
        }
    }

    #[test]
    fn small_tails_are_appended_and_heavy_ones_prefilled_elsewhere() {
        check(PD, |board| later(board, 3, 19_000), Some((Path::Append, None, 3)));
        check(PD, |board| later(board, 3, 15_904), Some((Path::Append, None, 3)));
        check(PD, |board| later(board, 3, 14_999), Some((Path::Reseed, Some(0), 3)));
        // The prefill worker would compute four times the tail.
        check(PD, |board| later(board, 3, 15_000), Some((Path::Append, None, 3)));
        let long = |board: &mut Board| TurnView {
            prompt_tokens: 80_000,
            ..later(board, 3, 70_000)
        };
        check(PD, long, Some((Path::Append, None, 3)));
    }

    #[test]
    fn a_history_is_fetched_where_that_is_faster_than_computing_it() {
        let fetches = |held: u32, set: &dyn Fn(&mut Board)| {
            let mut board = board(PD);
            let turn = later(&mut board, 3, held);
            set(&mut board);
            let choice = Homing::new(HomingConfig::default()).choose(&board, &turn);
            choice.plan.unwrap().fetch.map(|fetch| (fetch.from.0, fetch.tokens))
        };
        assert_eq!(fetches(14_999, &|_| {}), Some((3, 14_992)));
        // Both prefill workers have as much of it already, or the link fails.
        let held = |board: &mut Board| {
            board.workers[0].resident_tokens = 14_000;
            board.workers[1].resident_tokens = 14_000;
        };
        assert_eq!(fetches(14_999, &held), None);
        let lends_not = |board: &mut Board| board.workers[3].denies_lend = Some(Denied::Busy);
        assert_eq!(fetches(14_999, &lends_not), None);
        let failed = |board: &mut Board| {
            for prefill in 0..2 {
                let link = LinkView {
                    transfers: 0,
                    failures: 1,
                };
                board.links.insert((WorkerId(3), WorkerId(prefill)), link);
            }
        };
        assert_eq!(fetches(14_999, &failed), None);
        // Appended: nobody prefills for it.
        assert_eq!(fetches(15_904, &|_| {}), None);
    }

    #[test]
    fn without_a_home_the_least_estimate_wins() {
        check(PD, |_| turn(), Some((Path::Seed, Some(0), 2)));
        let loaded = |board: &mut Board| {
            board.workers[0].account.prefill_tokens = 1;
            board.workers[2].live_tokens = 1;
            turn()
        };
        check(PD, loaded, Some((Path::Seed, Some(1), 3)));
        let failing = |board: &mut Board| {
            let link = LinkView {
                transfers: 0,
                failures: 1,
            };
            board.links.insert((WorkerId(0), WorkerId(2)), link);
            turn()
        };
        check(PD, failing, Some((Path::Seed, Some(1), 2)));
        check(
            PD,
            |_| TurnView {
                was_resident: true,
                new_family: false,
                ..turn()
            },
            Some((Path::Reseed, Some(0), 2)),
        );
        check(
            PD,
            |_| TurnView {
                prompt_tokens: 512,
                ..turn()
            },
            Some((Path::Local, None, 2)),
        );
        check(
            PD,
            |_| TurnView {
                may_transfer: false,
                ..turn()
            },
            Some((Path::Local, None, 2)),
        );
        check(DP, |_| turn(), Some((Path::Local, None, 0)));
        check([Role::Both, Role::Decode], |_| turn(), Some((Path::Local, None, 0)));
        check([Role::Decode; 2], |_| turn(), Some((Path::Local, None, 0)));
        let half_gone = |board: &mut Board| later(board, 2, 9_999);
        check(DP, half_gone, Some((Path::Append, None, 2)));
    }

    #[test]
    fn decode_workers_help_when_prefill_workers_are_far_behind() {
        // Alone: 20,000 tokens at 15,000 a second, and a fifth of the pool: 1.53 s.
        let behind = |tokens| {
            move |board: &mut Board| {
                for prefill in 0..2 {
                    board.workers[prefill].account.prefill_tokens = tokens;
                }
                turn()
            }
        };
        check(PD, behind(40_000), Some((Path::Seed, Some(0), 2)));
        check(PD, behind(46_500), Some((Path::Local, None, 2)));
        let full = |waited| {
            move |board: &mut Board| {
                for prefill in 0..2 {
                    board.workers[prefill].denies_prefill = Some(Denied::PrefillTokens);
                }
                TurnView { waited, ..turn() }
            }
        };
        check(PD, full(Duration::from_secs(2)), None);
        check(PD, full(Duration::from_secs(3)), Some((Path::Local, None, 2)));
    }

    #[test]
    fn boilerplate_decides_who_prefills_and_never_who_decodes() {
        let boilerplate = |board: &mut Board| {
            board.workers[1].resident_tokens = 15_000;
            board.workers[3].resident_tokens = 15_000;
            turn()
        };
        check(PD, boilerplate, Some((Path::Seed, Some(1), 2)));
        check(
            DP,
            |board| TurnView {
                home: None,
                new_family: true,
                ..later(board, 2, 15_000)
            },
            Some((Path::Local, None, 0)),
        );
    }

    #[test]
    fn a_pool_is_no_more_than_full() {
        let full = |demand: f64, expected: f64| {
            assert!(
                (fullness(demand) - expected).abs() < 1e-9,
                "{demand}: {}",
                fullness(demand)
            );
        };
        full(0.0, 0.0);
        full(0.5, 0.5);
        full(1.0, 1.0);
        full(2.0, 1.5);
        full(1e12, 2.0);
        // However much is wanted of the others, a fresh worker does not take all that comes: two seconds of company at most.
        let wanted = |requests| {
            move |board: &mut Board| {
                board.workers[0].live_tokens = 20 * board.workers[0].kv_tokens;
                board.workers[1].live_tokens = 20 * board.workers[1].kv_tokens;
                board.workers[2].account.requests = requests;
                turn()
            }
        };
        check(DP, wanted(30), Some((Path::Local, None, 2)));
        check(DP, wanted(40), Some((Path::Local, None, 0)));
    }

    #[test]
    fn a_home_is_left_only_when_that_pays() {
        let busy = |requests| {
            move |board: &mut Board| {
                let turn = later(board, 2, 19_000);
                board.workers[2].account.requests = requests;
                turn
            }
        };
        check(DP, busy(24), Some((Path::Append, None, 2)));
        check(DP, busy(40), Some((Path::Local, None, 0)));
        let full = |waited| {
            move |board: &mut Board| {
                let turn = later(board, 2, 19_000);
                board.workers[2].denies_alone = Some(Denied::PoolFull);
                TurnView { waited, ..turn }
            }
        };
        check(DP, full(Duration::from_millis(1_300)), None);
        check(DP, full(Duration::from_millis(1_400)), Some((Path::Local, None, 0)));
        let dead = |board: &mut Board| {
            let turn = later(board, 2, 19_000);
            board.workers[2].denies_alone = Some(Denied::Dead);
            turn
        };
        check(DP, dead, Some((Path::Local, None, 0)));
    }
}
