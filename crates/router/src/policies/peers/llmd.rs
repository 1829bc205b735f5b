//! `peer-llmd`: the endpoint picker of llm-d, as its guides configure it for agents and for disaggregation.
//!
//! Source: llm-d/llm-d-router (formerly llm-d-inference-scheduler), `pkg/epp/framework/plugins/`: `scheduling/filter/
//! prefixcacheaffinity`, `scheduling/scorer/{tokenload,activerequest}`, `scheduling/profilehandler/disagg`,
//! `requestcontrol/dataproducer/inflightload`; and llm-d/llm-d, `guides/agentic-serving/router/` and
//! `guides/pd-disaggregation/router/`; main branches as stored in 2026.
//!
//! ```text
//! prefix-cache-affinity-filter: sticky workers are those with matched blocks / blocks of the prompt >= affinity
//!     ttft_ms(w) = inflight_tokens / peak_prefill * 1000
//!     all are kept where none is sticky, or where the least ttft_ms of the sticky ones
//!     is more than max_penalty_ms above the least of the others; else only the sticky ones are kept
//! token-load-scorer:     1 - min(1, tokens / queue_tokens), tokens = inflight_tokens + what this turn lacks there     most wins
//! active-request-scorer: 1 for workers with at most `idle` requests, else (most - requests) / most * max_busy         most wins
//! inflight_tokens:       prompt tokens that were sent there, were not cached there, and are not prefilled yet
//! ```
//!
//! Workers that serve alone (the agentic guide): the filter, then token-load. With prefill-only workers: the decode profile
//! first (active-request), then the decider, and if it says so the prefill profile (the filter, then token-load):
//!
//! ```text
//! always-disagg-pd-decider: yes                                           both guides with prefill workers have it
//! prefix-based-pd-decider:  prompt >= prompt_tokens and prompt >= non_cached and uncached on the chosen decode worker
//!                           >= non_cached; no where non_cached is 0, which is the plugin's default
//! ```
//!
//! If it says no, the chosen decode worker prefills what it lacks itself: llm-d's decode workers are vLLM servers, and any of
//! them can. So with `decider=prefix-based` and nothing else the prefill workers stay idle, and that is what llm-d does.
//!
//! | parameter | default | meaning |
//! | --- | --- | --- |
//! | `affinity` | 0.8 | share of the prompt's blocks that makes a worker sticky, 0 to 1; 0 turns the filter off |
//! | `max_penalty_ms` | 18000 | how much longer a sticky worker's backlog may take; 0 for as long as it likes |
//! | `peak_prefill` | 15928 | tokens a second (`peakPrefillThroughput`; the plugin's own, measured for a 32B model on 2 H100) |
//! | `explore` | 0 | probability of skipping the filter, 0 to 1 |
//! | `queue_tokens` | 4194304 | tokens that score 0 (`queueThresholdTokens`) |
//! | `idle` | 0 | requests of a worker that still counts as idle (`idleThreshold`) |
//! | `max_busy` | 1.0 | the best score of one that does not, 0 to 1 (`maxBusyScore`) |
//! | `decider` | `always` | `always`, or `prefix-based` |
//! | `non_cached` | 0 | `nonCachedTokens` of `prefix-based`; 0 never disaggregates |
//! | `prompt_tokens` | 0 | `promptTokens` of `prefix-based` |
//! | `decode` | `active-request` | the decode profile; `affinity` puts the filter before it, for `prefix-based` |
//!
//! Not faithful, and why:
//! - Ties are drawn from the request (there: shuffled before the best is picked), and so is exploration.
//! - Its approximate index remembers what was sent where, in blocks of its own size (256 tokens in the agentic guide) and as
//!   many as are configured. Here blocks are the cluster's, and matched is what the residency index knows in accelerator and
//!   host memory.
//! - The tokens of a disaggregated turn leave its prefill worker's account when it has prefilled; there only with the first
//!   token to the client.
//! - The agentic guide's fairness between programs (LAS) orders llm-d's own queue, which holds requests back only once the
//!   whole pool is saturated. There is no such queue here: all turns are sent at once.
//! - Where no prefill worker is left, the decode worker serves alone, as there when the prefill profile finds nobody.
//! - A failure is the client's error: the picker does not retry.

use super::pools::{Cost, Pools, Ranked, able, alone, alone_denied, lot, prefill_denied, ranked, seed_denied, seeded};
use super::share;
use crate::admission::Denied;
use crate::policies::spec::Parameters;
use crate::policies::{Admission, Board, Choice, Habits, Policy, PolicyError, TurnView, WorkerView};
use homing_units::WorkerId;

/// What [`lot`] is drawn for when the filter may be skipped.
const EXPLORED: u8 = 2;
/// No worker's id: exploration is drawn for a request and a pool.
const NOBODY: WorkerId = WorkerId(u32::MAX);

/// Parameters of the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LlmdConfig {
    filter: Filter,
    queue_tokens: f64,
    idle: u32,
    max_busy: f64,
    decider: Decider,
    decode_filtered: bool,
}

/// The prefix-cache-affinity filter.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Filter {
    affinity: f64,
    max_penalty_ms: f64,
    peak_prefill: f64,
    explore: f64,
}

/// Who decides whether a turn is prefilled apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decider {
    Always,
    PrefixBased { non_cached: u32, prompt_tokens: u32 },
}

impl LlmdConfig {
    pub(super) fn parse(parameters: &mut Parameters<'_>) -> Result<Self, PolicyError> {
        let name = "peer-llmd";
        let filter = Filter {
            affinity: share(parameters, name, "affinity", 0.8)?,
            max_penalty_ms: parameters.number("max_penalty_ms", 18_000.0)?,
            peak_prefill: parameters.positive("peak_prefill", 15_928.0)?,
            explore: share(parameters, name, "explore", 0.0)?,
        };
        let decider = parameters.choice("decider", "`always` or `prefix-based`", &["always", "prefix-based"])?;
        let non_cached = parameters.whole("non_cached", 0)?;
        let prompt_tokens = parameters.whole("prompt_tokens", 0)?;
        let decode_words = ["active-request", "affinity"];
        Ok(Self {
            filter,
            queue_tokens: parameters.positive("queue_tokens", 4_194_304.0)?,
            idle: parameters.whole("idle", 0)?,
            max_busy: share(parameters, name, "max_busy", 1.0)?,
            decider: match decider {
                "always" => Decider::Always,
                _ => Decider::PrefixBased {
                    non_cached,
                    prompt_tokens,
                },
            },
            decode_filtered: parameters.choice("decode", "`active-request` or `affinity`", &decode_words)?
                == "affinity",
        })
    }
}

impl Filter {
    /// The workers that it keeps, and why.
    fn keep<'b>(&self, turn: &TurnView, workers: &[&'b WorkerView]) -> (Vec<&'b WorkerView>, &'static str) {
        if workers.len() <= 1 || self.affinity <= 0.0 {
            return (workers.to_vec(), "one worker or no filter");
        }
        if drawn(turn) < self.explore {
            return (workers.to_vec(), "exploring");
        }
        let blocks = f64::from(turn.prompt_tokens / turn.block_size);
        let is_sticky = |worker: &&WorkerView| {
            let matched = f64::from(worker.held_tokens() / turn.block_size);
            blocks > 0.0 && matched / blocks >= self.affinity
        };
        let (sticky, others): (Vec<&WorkerView>, Vec<&WorkerView>) = workers.iter().copied().partition(is_sticky);
        if sticky.is_empty() {
            return (others, "nobody holds the prompt");
        }
        let penalty_ms = self.least_ttft_ms(&sticky) - self.least_ttft_ms(&others);
        if self.max_penalty_ms > 0.0 && !others.is_empty() && penalty_ms > self.max_penalty_ms {
            return (workers.to_vec(), "who holds the prompt is too far behind");
        }
        (sticky, "holds the prompt")
    }

    /// The shortest backlog.
    fn least_ttft_ms(&self, workers: &[&WorkerView]) -> f64 {
        let ttft_ms = |worker: &&WorkerView| inflight_tokens(worker) / self.peak_prefill * 1_000.0;
        workers.iter().map(ttft_ms).fold(f64::INFINITY, f64::min)
    }
}

impl Decider {
    fn disaggregates(self, turn: &TurnView, decode: &WorkerView) -> bool {
        match self {
            Self::Always => true,
            Self::PrefixBased {
                non_cached,
                prompt_tokens,
            } => {
                let matched = decode.held_tokens() / turn.block_size * turn.block_size;
                let uncached = turn.prompt_tokens.saturating_sub(matched);
                non_cached > 0 && turn.prompt_tokens >= prompt_tokens && uncached >= non_cached
            }
        }
    }
}

/// The policy.
#[derive(Debug)]
pub(super) struct Llmd {
    config: LlmdConfig,
}

type Denies = fn(&WorkerView) -> Option<Denied>;

impl Llmd {
    pub(super) const fn new(config: LlmdConfig) -> Self {
        Self { config }
    }

    /// The filter, then token-load. The cost is 1 less the score.
    fn rank_prefill<'b>(
        &self,
        turn: &TurnView,
        pool: &[&'b WorkerView],
        denied: Denies,
    ) -> (Vec<Ranked<'b>>, &'static str) {
        let (kept, reason) = self.config.filter.keep(turn, &able(pool, denied));
        let rank = ranked(turn, pool, denied, |worker| {
            let tokens = inflight_tokens(worker) + f64::from(worker.lacks(turn));
            Cost {
                group: outside(&kept, worker),
                cost: (tokens / self.config.queue_tokens).min(1.0),
            }
        });
        (rank, reason)
    }

    /// Active-request, after the filter where that is asked for. The cost is 1 less the score.
    fn rank_decode<'b>(&self, turn: &TurnView, pool: &[&'b WorkerView]) -> Vec<Ranked<'b>> {
        let mut kept = able(pool, seed_denied);
        if self.config.decode_filtered {
            kept = self.config.filter.keep(turn, &kept).0;
        }
        let most = kept.iter().map(|worker| worker.account.requests).max().unwrap_or(0);
        ranked(turn, pool, seed_denied, |worker| Cost {
            group: outside(&kept, worker),
            cost: 1.0 - self.active_request_score(worker.account.requests, most),
        })
    }

    fn active_request_score(&self, requests: u32, most: u32) -> f64 {
        if requests <= self.config.idle {
            return 1.0;
        }
        f64::from(most.saturating_sub(requests)) / f64::from(most.max(1)) * self.config.max_busy
    }
}

impl Policy for Llmd {
    fn choose(&mut self, board: &Board, turn: &TurnView) -> Choice {
        let pools = Pools::of(board);
        if !pools.disaggregated {
            let (candidates, reason) = self.rank_prefill(turn, &pools.decode, alone_denied);
            return alone(turn, &candidates, reason);
        }
        let decodes = self.rank_decode(turn, &pools.decode);
        let apart = decodes
            .first()
            .is_some_and(|decode| self.config.decider.disaggregates(turn, decode.worker));
        if !apart {
            return alone(turn, &decodes, "fewest requests, and the decider says no");
        }
        if pools.prefill.is_empty() {
            return alone(turn, &decodes, "fewest requests, and no prefill worker");
        }
        let (prefills, reason) = self.rank_prefill(turn, &pools.prefill, prefill_denied);
        seeded(turn, &prefills, &decodes, reason)
    }

    fn habits(&self) -> Habits {
        Habits {
            admission: Admission::AtOnce,
            attempts: Some(1),
            ..Habits::default()
        }
    }
}

fn inflight_tokens(worker: &WorkerView) -> f64 {
    (worker.account.append_tokens + worker.account.prefill_tokens) as f64
}

/// The group of a worker: 0 if it was kept.
fn outside(kept: &[&WorkerView], worker: &WorkerView) -> u8 {
    u8::from(kept.iter().all(|other| other.id != worker.id))
}

/// A number from 0 on, below 1, drawn for a request.
fn drawn(turn: &TurnView) -> f64 {
    // The upper 53 bits are what a float holds exactly.
    (lot(turn.request, NOBODY, EXPLORED) >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{board, turn, with_parameters};
    use super::*;
    use crate::action::Path;
    use crate::event::Role;
    use homing_units::RequestId;

    const DP: [Role; 3] = [Role::Both; 3];
    const PD: [Role; 4] = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];

    fn policy(text: &str) -> Llmd {
        with_parameters(text, |parameters| LlmdConfig::parse(parameters).map(Llmd::new))
    }

    /// Where a turn of 20,000 tokens, 1,250 blocks of 16, goes among three workers that serve alone, and the cost there.
    #[track_caller]
    fn check(text: &str, set: impl FnOnce(&mut Board), expected: (u32, f64)) {
        let mut board = board(DP);
        set(&mut board);
        let choice = policy(text).choose(&board, &turn());
        let (plan, cost) = (choice.plan.unwrap(), choice.considered[0].score);
        assert_eq!((plan.prefill, plan.decode.0), (None, expected.0), "{text} {choice:?}");
        assert!(
            (cost - expected.1).abs() < 1e-9,
            "{text}: {cost}, expected {}",
            expected.1
        );
    }

    /// Worker 2 holds so many tokens of the prompt and has so many to prefill; worker 1 has 8,000 to prefill.
    fn warm(held: u32, backlog: u64) -> impl Fn(&mut Board) {
        move |board| {
            board.workers[1].account.append_tokens = 8_000;
            board.workers[2].resident_tokens = held;
            board.workers[2].account.append_tokens = backlog;
        }
    }

    const FULL: f64 = 4_194_304.0;

    #[test]
    fn who_holds_most_of_the_prompt_is_sticky() {
        // 16,000 tokens are 1,000 of 1,250 blocks: 0.8 >= 0.8. Its tokens: 60,000 + 4,000 that it lacks. Least would be worker 0:
        // 0 + 20,000, but it is filtered out.
        check("", warm(16_000, 60_000), (2, 64_000.0 / FULL));
        // 15,999 tokens are 999 whole blocks: 0.7992. All are kept: 20,000, 28,000 and 60,000 + 4,001.
        check("", warm(15_999, 60_000), (0, 20_000.0 / FULL));
        check("affinity=0.79", warm(15_999, 60_000), (2, 64_001.0 / FULL));
        check("affinity=0", warm(20_000, 60_000), (0, 20_000.0 / FULL));
        // Host memory counts.
        let host = |board: &mut Board| {
            warm(10_000, 60_000)(board);
            board.workers[2].host_tokens = 6_000;
        };
        check("", host, (2, 64_000.0 / FULL));
        // Two that are sticky: the lighter one, 8,000 + 2,000 against 7,000 + 4,000.
        let two = |board: &mut Board| {
            warm(16_000, 7_000)(board);
            board.workers[1].resident_tokens = 18_000;
        };
        check("", two, (1, 10_000.0 / FULL));
    }

    #[test]
    fn stickiness_breaks_where_the_backlog_is_too_long() {
        // 286,704 / 15,928 * 1,000 = 18,000 ms more than worker 0: not above the bound. 286,720 / 15,928 * 1,000 = 18,001.004...
        check("", warm(20_000, 286_704), (2, 286_704.0 / FULL));
        check("", warm(20_000, 286_720), (0, 20_000.0 / FULL));
        check("max_penalty_ms=0", warm(20_000, 286_720), (2, 286_720.0 / FULL));
        // 2,000 tokens a second and 1,000 ms: 2,000 is at the bound, 2,001 above.
        check(
            "peak_prefill=2000:max_penalty_ms=1000",
            warm(20_000, 2_000),
            (2, 2_000.0 / FULL),
        );
        // Broken, all are kept, the sticky one too: it has 2,001 + 0, the others 20,000 and 28,000.
        check(
            "peak_prefill=2000:max_penalty_ms=1000",
            warm(20_000, 2_001),
            (2, 2_001.0 / FULL),
        );
        // The best of each side counts: worker 1 is sticky too and has 8,000 tokens, 4,000 ms.
        let two = |board: &mut Board| {
            warm(20_000, 286_720)(board);
            board.workers[1].resident_tokens = 20_000;
        };
        check("peak_prefill=2000:max_penalty_ms=4000", two, (1, 8_000.0 / FULL));
        // All are sticky: nothing to break for.
        let all = |board: &mut Board| {
            two(board);
            board.workers[0].resident_tokens = 20_000;
            board.workers[0].account.append_tokens = 9_000;
        };
        check("max_penalty_ms=1", all, (1, 8_000.0 / FULL));
    }

    #[test]
    fn token_load_is_capped_and_equals_are_drawn() {
        // queue_tokens=10,000: 20,000, 28,000 and 24,000 tokens all score 0, and cost 1.
        let winner = |text: &str, request| {
            let mut board = board(DP);
            warm(0, 4_000)(&mut board);
            let turn = TurnView {
                request: RequestId(request),
                ..turn()
            };
            policy(text).choose(&board, &turn).plan.unwrap().decode.0
        };
        let winners = |text| {
            (0..50)
                .map(|request| winner(text, request))
                .collect::<std::collections::BTreeSet<_>>()
        };
        assert_eq!(winners("queue_tokens=10000").into_iter().collect::<Vec<_>>(), [0, 1, 2]);
        // 25,000: only 28,000 is capped; 20,000 costs 0.8 and is the least.
        assert_eq!(winners("queue_tokens=25000").into_iter().collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn exploration_skips_the_filter_as_often_as_it_should() {
        let explored = |request: &u64| {
            let mut board = board(DP);
            warm(20_000, 60_000)(&mut board);
            let turn = TurnView {
                request: RequestId(*request),
                ..turn()
            };
            // With the filter worker 2, without it worker 0 with 20,000 against 60,000.
            policy("explore=0.25").choose(&board, &turn).plan.unwrap().decode.0 == 0
        };
        let times = (0..2_000).filter(explored).count();
        assert!((440..560).contains(&times), "{times}");
        check("explore=1", warm(20_000, 60_000), (0, 20_000.0 / FULL));
    }

    #[test]
    fn active_requests_score() {
        let score = |text: &str, requests, most| policy(text).active_request_score(requests, most);
        assert_eq!(score("", 0, 0), 1.0);
        assert_eq!(score("", 0, 8), 1.0);
        // (8 - 2) / 8 = 0.75, (8 - 8) / 8 = 0.
        assert_eq!(score("", 2, 8), 0.75);
        assert_eq!(score("", 8, 8), 0.0);
        // idle=2: at the bound it is idle; 3: (8 - 3) / 8 * 0.5 = 0.3125.
        assert_eq!(score("idle=2:max_busy=0.5", 2, 8), 1.0);
        assert_eq!(score("idle=2:max_busy=0.5", 3, 8), 0.3125);
    }

    #[track_caller]
    fn check_pd(text: &str, set: impl FnOnce(&mut Board), expected: (Path, Option<u32>, u32)) {
        let mut board = board(PD);
        set(&mut board);
        let plan = policy(text).choose(&board, &turn()).plan.unwrap();
        let answer = (plan.path, plan.prefill.map(|id| id.0), plan.decode.0);
        assert_eq!(answer, expected, "{text} {board:?}");
    }

    /// Prefill worker 1 holds the prompt and has a short backlog, as decode worker 3 holds 18,000 tokens and has a request more
    /// than decode worker 2.
    fn apart(board: &mut Board) {
        board.workers[1].resident_tokens = 20_000;
        board.workers[1].account.prefill_tokens = 30_000;
        board.workers[2].account.requests = 1;
        board.workers[3].account.requests = 2;
        board.workers[3].resident_tokens = 18_000;
    }

    #[test]
    fn decode_by_requests_and_prefill_by_affinity() {
        // Decode scores: 2: (2 - 1) / 2 = 0.5, 3: 0. Prefill: 1 is sticky; 30,000 / 15,928 s = 1,883.5 ms behind.
        check_pd("", apart, (Path::Seed, Some(1), 2));
        check_pd("max_penalty_ms=1884", apart, (Path::Seed, Some(1), 2));
        // Broken: 0: 0 + 20,000 against 1: 30,000 + 0.
        check_pd("max_penalty_ms=1883", apart, (Path::Seed, Some(0), 2));
        // With the filter in the decode profile 3 alone is left: 18,000 / 20,000 = 0.9.
        check_pd("decode=affinity", apart, (Path::Seed, Some(1), 3));
        let gone = |board: &mut Board| {
            apart(board);
            board.workers[0].denies_prefill = Some(Denied::Dead);
            board.workers[1].denies_prefill = Some(Denied::Dead);
        };
        check_pd("", gone, (Path::Local, None, 2));
    }

    #[test]
    fn the_prefix_based_decider() {
        // Off by default: the decode-only worker prefills all of it.
        check_pd("decider=prefix-based", apart, (Path::Local, None, 2));
        // Worker 2 lacks 20,000.
        check_pd("decider=prefix-based:non_cached=20000", apart, (Path::Seed, Some(1), 2));
        check_pd("decider=prefix-based:non_cached=20001", apart, (Path::Local, None, 2));
        check_pd(
            "decider=prefix-based:non_cached=1:prompt_tokens=20000",
            apart,
            (Path::Seed, Some(1), 2),
        );
        check_pd(
            "decider=prefix-based:non_cached=1:prompt_tokens=20001",
            apart,
            (Path::Local, None, 2),
        );
        // Worker 3 holds 18,000 tokens, 1,125 whole blocks: it lacks 2,000.
        let text = "decode=affinity:decider=prefix-based:non_cached=";
        check_pd(&format!("{text}2000"), apart, (Path::Seed, Some(1), 3));
        check_pd(&format!("{text}2001"), apart, (Path::Local, None, 3));
        // 18,007 tokens are no more whole blocks.
        let part = |board: &mut Board| {
            apart(board);
            board.workers[3].resident_tokens = 18_007;
        };
        check_pd(&format!("{text}2000"), part, (Path::Seed, Some(1), 3));
        let own = |board: &mut Board| {
            apart(board);
            board.workers[3].exclusive_tokens = 18_000;
        };
        let later = TurnView {
            new_family: false,
            ..turn()
        };
        let mut board = board(PD);
        own(&mut board);
        let plan = policy(&format!("{text}2001")).choose(&board, &later).plan.unwrap();
        assert_eq!((plan.path, plan.prefill, plan.decode.0), (Path::Append, None, 3));
    }

    #[test]
    fn it_sends_at_once_and_does_not_retry() {
        assert_eq!(policy("").habits().admission, Admission::AtOnce);
        assert_eq!(policy("").habits().attempts, Some(1));
    }
}
