//! `peer-sglang`: the `cache_aware` policy of SGLang's model gateway (SMG), in its form that gates each candidate.
//!
//! Source: smg-project/smg (formerly in sgl-project/sglang as `sgl-model-gateway`), `model_gateway/src/policies/cache_aware.rs`,
//! `least_load.rs`, `power_of_two.rs`, `registry.rs` and `worker/expected_wait.rs`, main branch as stored in 2026.
//!
//! ```text
//! affinity (tree):   the workers with the longest match, if match / prompt > cache_threshold
//! affinity (events): the workers with the most matching blocks, if there are any
//! spill(w):          load > rel * mean load and load > mean load + abs       load: requests in flight; mean of the healthy
//! chosen:            of the affinity workers that do not spill the one with the least expected wait;
//!                    if all of them spill, of all workers that do not; without affinity, of all workers
//! expected wait, s:  (queued_tokens + dispatched_tokens) / throughput + kv_pressure * k / (1 - k)     k: use of the pool, <= 0.999
//! decay:             a match counts matched / (1 + overlap_decay * x), x = (waiting uncached tokens above the least of the
//!                    candidates / block) / blocks of the prompt
//! ```
//!
//! A cluster with prefill-only workers: the prefill worker by `cache_aware`, the decode worker by `decode`. Where no decode policy
//! is set there, it is the main one, `cache_aware` too, with a memory of its own. There is no prefill on a decode worker.
//!
//! | parameter | default | meaning |
//! | --- | --- | --- |
//! | `cache_threshold` | 0.5 | share of the prompt that must match, 0 to 1 |
//! | `abs` | 32 | requests above the mean that make a candidate spill... (`balance_abs_threshold`) |
//! | `rel` | 1.1 | ...if it has so many times the mean, too (`balance_rel_threshold`) |
//! | `index` | `tree` | what it matches on: `tree` (HTTP workers), or `events` (gRPC workers with KV events) |
//! | `overlap_decay` | 0.0 | how fast a prefill backlog devalues a match |
//! | `kv_pressure` | 0.15 | seconds that a half full pool counts for (`kv_pressure_weight`) |
//! | `throughput` | 2000 | tokens a second that a worker works off (`default_throughput`) |
//! | `mean_prefill` | 1024 | tokens of a request of unknown length (`mean_prefill_tokens`) |
//! | `decode` | `cache-aware` | decode workers by `cache-aware`, `least-load` (expected wait of all), `power-of-two` (of two), `round-robin` |
//!
//! Not faithful, and why:
//! - Its tree holds what it sent where (10,000 nodes a worker, the least recent evicted each 30 s), whatever the engine evicted.
//!   Here the match is what the residency index knows, in accelerator and host memory.
//! - `queued_tokens` is there the worker's report of each 10 s, and `dispatched_tokens` what was sent since. Here the tokens that
//!   were sent and are not prefilled yet stand for both, known exactly; where there are none, the reported queue counts
//!   `mean_prefill` a request. A seed whose KV is not at its decode worker yet counts `mean_prefill` as dispatched, as a request
//!   does over HTTP. A measured generation rate is not reported to the router, so `throughput` is always the fallback.
//! - Ties are drawn from the request. Temperature is 0, their default; the triggers on KV spread and ceiling are off there, too.
//! - Arithmetic is in 64 bits where theirs compares the match in 32.
//! - It sends both legs at once there, here prefill before decode. Where no prefill worker is left it answers with an error
//!   at once; here the turn waits for one, as long as the router lets it.
//! - Five tries, their default, but the pauses and the circuit breaker are the router's own.

use super::pools::{Cost, Pools, Ranked, able, alone, alone_denied, lot, prefill_denied, ranked, seed_denied, seeded};
use super::share;
use crate::admission::Denied;
use crate::policies::spec::Parameters;
use crate::policies::{Admission, Board, Choice, Habits, Policy, PolicyError, TurnView, WorkerView};
use homing_units::WorkerId;

/// Tries of a request.
const ATTEMPTS: u32 = 5;
/// The fullest that a pool is taken for.
const FULLEST: f64 = 0.999;
/// What [`lot`] is drawn for when two of the decode workers are picked.
const TWO_PICKED: u8 = 1;

/// Parameters of the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SglangConfig {
    cache_threshold: f64,
    abs: f64,
    rel: f64,
    /// Matches on reported blocks and not on what was sent.
    events: bool,
    overlap_decay: f64,
    kv_pressure_s: f64,
    throughput: f64,
    mean_prefill: f64,
    decode: DecodePolicy,
}

/// How decode workers are chosen in a disaggregated cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DecodePolicy {
    CacheAware,
    LeastLoad,
    PowerOfTwo,
    RoundRobin,
}

impl SglangConfig {
    pub(super) fn parse(parameters: &mut Parameters<'_>) -> Result<Self, PolicyError> {
        Ok(Self {
            cache_threshold: share(parameters, "peer-sglang", "cache_threshold", 0.5)?,
            abs: f64::from(parameters.whole("abs", 32)?),
            rel: parameters.number("rel", 1.1)?,
            events: parameters.choice("index", "`tree` or `events`", &["tree", "events"])? == "events",
            overlap_decay: parameters.number("overlap_decay", 0.0)?,
            kv_pressure_s: parameters.number("kv_pressure", 0.15)?,
            throughput: parameters.positive("throughput", 2_000.0)?,
            mean_prefill: parameters.positive("mean_prefill", 1_024.0)?,
            decode: DecodePolicy::parse(parameters)?,
        })
    }
}

impl DecodePolicy {
    fn parse(parameters: &mut Parameters<'_>) -> Result<Self, PolicyError> {
        let words = ["cache-aware", "least-load", "power-of-two", "round-robin"];
        let expected = "`cache-aware`, `least-load`, `power-of-two` or `round-robin`";
        Ok(match parameters.choice("decode", expected, &words)? {
            "least-load" => Self::LeastLoad,
            "power-of-two" => Self::PowerOfTwo,
            "round-robin" => Self::RoundRobin,
            _ => Self::CacheAware,
        })
    }
}

/// The policy.
#[derive(Debug)]
pub(super) struct Sglang {
    config: SglangConfig,
    last_decode: Option<WorkerId>,
}

type Denies = fn(&WorkerView) -> Option<Denied>;

impl Sglang {
    pub(super) const fn new(config: SglangConfig) -> Self {
        Self {
            config,
            last_decode: None,
        }
    }

    /// A pool by `cache_aware`; its second result is why.
    fn cache_aware<'b>(
        &self,
        turn: &TurnView,
        pool: &[&'b WorkerView],
        denied: Denies,
    ) -> (Vec<Ranked<'b>>, &'static str) {
        let able = able(pool, denied);
        let mean = able.iter().map(|worker| load(worker)).sum::<f64>() / able.len().max(1) as f64;
        let spills = |worker: &WorkerView| {
            let load = load(worker);
            load > self.config.rel * mean && load > mean + self.config.abs
        };
        let affine = self.affinity(turn, &able);
        let calm = |workers: &[&WorkerView]| -> Vec<WorkerId> {
            let calm = workers.iter().filter(|worker| !spills(worker));
            calm.map(|worker| worker.id).collect()
        };
        let (left, reason) = if affine.is_empty() {
            (Vec::new(), "no match, least expected wait")
        } else {
            match calm(&affine) {
                left if left.is_empty() => (calm(&able), "longest match spills, least expected wait"),
                left => (left, "longest match"),
            }
        };
        let rank = ranked(turn, pool, denied, |worker| Cost {
            // Where nothing is left of a filter, it is none.
            group: u8::from(!left.is_empty() && !left.contains(&worker.id)),
            cost: self.expected_wait_s(worker),
        });
        (rank, reason)
    }

    /// The workers that match best, if they match well enough.
    fn affinity<'b>(&self, turn: &TurnView, able: &[&'b WorkerView]) -> Vec<&'b WorkerView> {
        let longest = able.iter().map(|worker| worker.held_tokens()).max().unwrap_or(0);
        let long_enough = f64::from(longest) > self.config.cache_threshold * f64::from(turn.prompt_tokens);
        let matching: Vec<(&WorkerView, f64)> = (able.iter().copied())
            .filter_map(|worker| {
                let held = worker.held_tokens();
                if self.config.events {
                    let blocks = held / turn.block_size;
                    (blocks > 0).then_some((worker, f64::from(blocks)))
                } else {
                    (long_enough && held == longest).then_some((worker, 1.0))
                }
            })
            .collect();
        let least = matching
            .iter()
            .map(|(worker, _)| unprefilled_tokens(worker))
            .min()
            .unwrap_or(0);
        let request_blocks = f64::from((turn.prompt_tokens / turn.block_size).max(1));
        let decayed = |(worker, score): &(&'b WorkerView, f64)| {
            let excess = (unprefilled_tokens(worker) - least) as f64 / f64::from(turn.block_size);
            (
                *worker,
                score / (1.0 + self.config.overlap_decay * (excess / request_blocks)),
            )
        };
        let scored: Vec<_> = matching.iter().map(decayed).collect();
        let best = scored.iter().map(|(_, score)| *score).fold(0.0, f64::max);
        let is_best = |(worker, score): (&'b WorkerView, f64)| (score >= best).then_some(worker);
        scored.into_iter().filter_map(is_best).collect()
    }

    /// Seconds until a worker would be through with what it has, and a penalty for a full pool.
    fn expected_wait_s(&self, worker: &WorkerView) -> f64 {
        let queued = match unprefilled_tokens(worker) {
            0 => f64::from(worker.waiting) * self.config.mean_prefill,
            tokens => tokens as f64,
        };
        let dispatched = f64::from(worker.account.seeds) * self.config.mean_prefill;
        let used = (worker.kv_tokens_used as f64 / worker.kv_tokens.max(1) as f64).min(FULLEST);
        (queued + dispatched) / self.config.throughput + self.config.kv_pressure_s * used / (1.0 - used)
    }

    fn rank_decode<'b>(&self, turn: &TurnView, pool: &[&'b WorkerView]) -> Vec<Ranked<'b>> {
        let waits = |worker: &WorkerView| self.expected_wait_s(worker);
        match self.config.decode {
            DecodePolicy::CacheAware => self.cache_aware(turn, pool, seed_denied).0,
            DecodePolicy::LeastLoad => ranked(turn, pool, seed_denied, |worker| Cost::of(waits(worker))),
            DecodePolicy::PowerOfTwo => {
                let mut picked = able(pool, seed_denied);
                picked.sort_by_key(|worker| lot(turn.request, worker.id, TWO_PICKED));
                picked.truncate(2);
                ranked(turn, pool, seed_denied, |worker| Cost {
                    group: u8::from(picked.iter().all(|pick| pick.id != worker.id)),
                    cost: waits(worker),
                })
            }
            DecodePolicy::RoundRobin => ranked(turn, pool, seed_denied, |worker| Cost {
                group: u8::from(self.last_decode.is_some_and(|last| worker.id <= last)),
                cost: f64::from(worker.id.0),
            }),
        }
    }
}

impl Policy for Sglang {
    fn choose(&mut self, board: &Board, turn: &TurnView) -> Choice {
        let pools = Pools::of(board);
        if !pools.disaggregated {
            let (candidates, reason) = self.cache_aware(turn, &pools.decode, alone_denied);
            return alone(turn, &candidates, reason);
        }
        let (prefills, reason) = self.cache_aware(turn, &pools.prefill, prefill_denied);
        let decodes = self.rank_decode(turn, &pools.decode);
        let choice = seeded(turn, &prefills, &decodes, reason);
        self.last_decode = choice.plan.map(|plan| plan.decode).or(self.last_decode);
        choice
    }

    fn habits(&self) -> Habits {
        Habits {
            admission: Admission::AtOnce,
            attempts: Some(ATTEMPTS),
            ..Habits::default()
        }
    }
}

fn load(worker: &WorkerView) -> f64 {
    f64::from(worker.account.requests)
}

/// Prompt tokens that were sent to a worker, are not cached there, and are not prefilled yet.
const fn unprefilled_tokens(worker: &WorkerView) -> u64 {
    worker.account.append_tokens + worker.account.prefill_tokens
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{board, turn, with_parameters};
    use super::*;
    use crate::action::Path;
    use crate::event::Role;
    use homing_units::RequestId;

    const DP: [Role; 4] = [Role::Both; 4];
    const PD: [Role; 4] = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];

    fn policy(text: &str) -> Sglang {
        with_parameters(text, |parameters| SglangConfig::parse(parameters).map(Sglang::new))
    }

    /// Where a turn of 20,000 tokens goes among four workers that serve alone.
    #[track_caller]
    fn check(text: &str, set: impl FnOnce(&mut Board), expected: u32) {
        let mut board = board(DP);
        set(&mut board);
        let plan = policy(text).choose(&board, &turn()).plan.unwrap();
        assert_eq!((plan.prefill, plan.decode.0), (None, expected), "{text} {board:?}");
    }

    /// Each worker's expected wait in seconds.
    #[track_caller]
    fn check_wait(text: &str, set: impl FnOnce(&mut WorkerView), expected: f64) {
        let mut worker = crate::policies::testing::worker(0, Role::Both);
        set(&mut worker);
        let wait = policy(text).expected_wait_s(&worker);
        assert!((wait - expected).abs() < 1e-9, "{text}: {wait}, expected {expected}");
    }

    #[test]
    fn expected_waits() {
        check_wait("", |_| {}, 0.0);
        // 4,000 tokens to prefill at 2,000 a second.
        check_wait("", |worker| worker.account.append_tokens = 4_000, 2.0);
        // The pool is half full: 0.15 * 0.5 / 0.5 = 0.15. At 80%: 0.15 * 0.8 / 0.2 = 0.6.
        check_wait("", |worker| worker.kv_tokens_used = 50_000, 0.15);
        check_wait("", |worker| worker.kv_tokens_used = 80_000, 0.6);
        // Full counts as 0.999: 0.15 * 0.999 / 0.001 = 149.85.
        check_wait("", |worker| worker.kv_tokens_used = 100_000, 149.85);
        // Three in its queue and no token count: 3 * 1,024 / 2,000 = 1.536. A count beats that.
        check_wait("", |worker| worker.waiting = 3, 1.536);
        let both = |worker: &mut WorkerView| {
            worker.waiting = 3;
            worker.account.prefill_tokens = 1_000;
        };
        check_wait("", both, 0.5);
        // Two seeds on their way: 2 * 1,024 / 2,000 = 1.024.
        check_wait("", |worker| worker.account.seeds = 2, 1.024);
        // (3 * 500 + 2 * 500) / 1,000 + 0.3 * 0.5 / 0.5 = 2.5 + 0.3 = 2.8.
        let all = |worker: &mut WorkerView| {
            worker.waiting = 3;
            worker.account.seeds = 2;
            worker.kv_tokens_used = 50_000;
        };
        check_wait("mean_prefill=500:throughput=1000:kv_pressure=0.3", all, 2.8);
    }

    /// Worker 3 holds so many tokens and worker 0 is the only idle one.
    fn held(tokens: u32) -> impl Fn(&mut Board) {
        move |board| {
            for worker in &mut board.workers[1..] {
                worker.account.append_tokens = 2_000;
            }
            board.workers[3].resident_tokens = tokens;
        }
    }

    #[test]
    fn a_match_counts_above_the_threshold() {
        // 10,000 / 20,000 = 0.5 is not above 0.5: no match, and worker 0 waits 0 s against 1 s.
        check("", held(10_000), 0);
        check("", held(10_001), 3);
        check("cache_threshold=0.8", held(16_000), 0);
        check("cache_threshold=0.8", held(16_001), 3);
        // With events any whole block of 16 is a match.
        check("index=events", held(15), 0);
        check("index=events", held(16), 3);
        // What lies in the host counts as well.
        let host = |board: &mut Board| {
            held(6_000)(board);
            board.workers[3].host_tokens = 4_001;
        };
        check("", host, 3);
        // Two that match alike: the one that waits less, 1 s against 1.5 s.
        let two = |board: &mut Board| {
            held(16_000)(board);
            board.workers[1].resident_tokens = 16_000;
            board.workers[3].account.append_tokens = 3_000;
        };
        check("", two, 1);
        // A block more wins over a shorter wait.
        let longer = |board: &mut Board| {
            two(board);
            board.workers[3].resident_tokens = 16_016;
        };
        check("", longer, 3);
    }

    #[test]
    fn a_candidate_spills_when_it_is_over_both_margins() {
        let loaded = |requests: [u32; 4]| {
            move |board: &mut Board| {
                held(20_000)(board);
                for (worker, requests) in board.workers.iter_mut().zip(requests) {
                    worker.account.requests = requests;
                }
            }
        };
        // mean = 44 / 4 = 11: 44 > 1.1 * 11 = 12.1, 44 > 11 + 32 = 43. Spills to worker 0.
        check("", loaded([0, 0, 0, 44]), 0);
        // mean = 42 / 4 = 10.5: 42 > 42.5 does not hold.
        check("", loaded([0, 0, 0, 42]), 3);
        // mean = (3 * 400 + 440) / 4 = 410: 440 > 442 does not hold; rel alone would not either, 440 > 451.
        check("", loaded([400, 400, 400, 440]), 3);
        // mean = (3 * 400 + 444) / 4 = 411: 444 > 443, but 444 > 1.1 * 411 = 452.1 does not hold.
        check("", loaded([400, 400, 400, 444]), 3);
        // mean = (3 * 400 + 460) / 4 = 415: 460 > 447 and 460 > 456.5.
        check("", loaded([400, 400, 400, 460]), 0);
        // abs=10, rel=2: mean = (4 + 20) / 4 = 6: 20 > 16 and 20 > 12. Worker 0 is out for the same reason in the second case:
        // mean = (20 + 20) / 4 = 10: 20 > 2 * 10 does not hold.
        check("abs=10:rel=2", loaded([4, 0, 0, 20]), 0);
        check("abs=10:rel=2", loaded([20, 0, 0, 20]), 3);
        // One margin at its bound, the other passed: 20 > 15 but 20 > 20 does not hold; 20 > 10 but 20 > 20 does not hold.
        check("abs=5:rel=2", loaded([20, 0, 0, 20]), 3);
        check("abs=10:rel=1", loaded([20, 0, 0, 20]), 3);
        // A spill passes over those that spill themselves: worker 0 waits least, and 50 > 25 + 10 and 50 > 1.1 * 25. The next
        // shortest wait is worker 1's.
        let hot = |board: &mut Board| {
            loaded([50, 0, 0, 50])(board);
            board.workers[1].account.append_tokens = 1_000;
        };
        check("abs=10", hot, 1);
        // Without a match nothing spills: worker 0 waits least.
        let cold = |board: &mut Board| {
            hot(board);
            board.workers[3].resident_tokens = 0;
        };
        check("abs=10", cold, 0);
    }

    #[test]
    fn a_backlog_devalues_a_match_where_that_is_asked_for() {
        // Worker 3 holds 1,000 blocks, worker 1 holds 900, of 1,250. Worker 3 is 10,000 tokens = 625 blocks behind worker 1:
        // x = 625 / 1,250 = 0.5. With decay 0.2: 1,000 / 1.1 = 909 > 900; with 0.3: 1,000 / 1.15 = 869.6 < 900.
        let behind = |board: &mut Board| {
            held(16_000)(board);
            board.workers[1].resident_tokens = 14_400;
            board.workers[3].account.append_tokens = 12_000;
        };
        check("index=events", behind, 3);
        check("index=events:overlap_decay=0.2", behind, 3);
        check("index=events:overlap_decay=0.3", behind, 1);
        // Worker 1's own backlog of 2,000 is the floor and devalues nothing: 1,000 / 1.1125 = 898.9 < 900.
        check("index=events:overlap_decay=0.225", behind, 1);
        // The tree's longest matches count alike, so that the one with the smaller backlog is left.
        let alike = |board: &mut Board| {
            behind(board);
            board.workers[1].resident_tokens = 16_000;
            board.workers[1].kv_tokens_used = 99_000;
        };
        // Waits: worker 1: 1 + 0.15 * 99 = 15.85 s, worker 3: 6 s.
        check("", alike, 3);
        check("overlap_decay=0.2", alike, 1);
    }

    #[track_caller]
    fn check_pd(text: &str, set: impl FnOnce(&mut Board), expected: (Path, u32, u32)) {
        let mut board = board(PD);
        set(&mut board);
        let plan = policy(text).choose(&board, &turn()).plan.unwrap();
        let answer = (plan.path, plan.prefill.map_or(99, |id| id.0), plan.decode.0);
        assert_eq!(answer, expected, "{text} {board:?}");
    }

    /// Prefill worker 1 and decode worker 3 hold most of the prompt and are busier than the others: at the decode workers a seed
    /// is on its way to 3.
    fn warm(board: &mut Board) {
        board.workers[1].resident_tokens = 16_000;
        board.workers[1].account.prefill_tokens = 4_000;
        board.workers[3].resident_tokens = 16_000;
        board.workers[3].account.seeds = 1;
    }

    #[test]
    fn both_legs_are_cache_aware_and_nothing_is_prefilled_where_it_decodes() {
        check_pd("", warm, (Path::Seed, 1, 3));
        // Waits at the decode workers: 2: 0 s, 3: 1,024 / 2,000 = 0.512 s.
        check_pd("decode=least-load", warm, (Path::Seed, 1, 2));
        // Of two workers power-of-two picks both.
        check_pd("decode=power-of-two", warm, (Path::Seed, 1, 2));
        check_pd("decode=round-robin", warm, (Path::Seed, 1, 2));
        // All of it is at the decode worker: P runs all the same.
        let all = |board: &mut Board| {
            warm(board);
            board.workers[3].resident_tokens = 20_000;
            board.workers[3].exclusive_tokens = 20_000;
        };
        check_pd("", all, (Path::Seed, 1, 3));
        // A match at a decode worker is none at a prefill worker: 0 waits 0 s, 1 waits 2 s.
        let elsewhere = |board: &mut Board| {
            warm(board);
            board.workers[1].resident_tokens = 0;
        };
        check_pd("", elsewhere, (Path::Seed, 0, 3));
        let mut board = board(PD);
        board.workers[0].denies_prefill = Some(Denied::Dead);
        board.workers[1].denies_prefill = Some(Denied::Dead);
        assert_eq!(policy("").choose(&board, &turn()).plan, None);
    }

    #[test]
    fn decode_workers_take_turns_or_are_drawn_where_that_is_asked_for() {
        let roles = [Role::Prefill, Role::Decode, Role::Decode, Role::Decode];
        let board = board(roles);
        let mut in_turn = policy("decode=round-robin");
        let went = [(); 4].map(|()| in_turn.choose(&board, &turn()).plan.unwrap().decode.0);
        assert_eq!(went, [1, 2, 3, 1]);
        // The one that waits longest of three loses against whichever of the others it is picked with, and wins never.
        let mut loaded = board;
        loaded.workers[2].account.seeds = 1;
        loaded.workers[3].account.seeds = 2;
        let mut wins = [0; 4];
        for request in 0..3_000 {
            let turn = TurnView {
                request: RequestId(request),
                ..turn()
            };
            let plan = policy("decode=power-of-two").choose(&loaded, &turn).plan.unwrap();
            wins[plan.decode.0 as usize] += 1;
        }
        // Worker 1 wins the pairs (1, 2) and (1, 3), worker 2 the pair (2, 3): 2 of 3 and 1 of 3.
        assert_eq!((wins[0], wins[3]), (0, 0), "{wins:?}");
        assert!((1_900..2_100).contains(&wins[1]), "{wins:?}");
    }

    #[test]
    fn it_sends_at_once_and_tries_five_times() {
        assert_eq!(policy("").habits().admission, Admission::AtOnce);
        assert_eq!(policy("").habits().attempts, Some(5));
    }
}
