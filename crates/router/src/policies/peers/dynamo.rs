//! `peer-dynamo`: the KV router of NVIDIA Dynamo.
//!
//! Source: ai-dynamo/dynamo, `lib/kv-router/src/scheduling/` (`selector/default.rs`, `config.rs`), `conditional_disagg.rs` and
//! `docs/components/router/`, main branch as stored in 2026. The formula is that of the newest of them, with the prefill term
//! clamped at 0.
//!
//! ```text
//! cost = prefill_scale * max(0, raw_prefill - credit) + decode_blocks + request_weight * active_requests      least wins
//! raw_prefill = (active_prefill_tokens + prompt) / block
//! credit      = overlap_credit * decay * device_blocks + host_weight * host_blocks
//! decay       = 1 / (1 + credit_decay * ((active_prefill_tokens - least of all) / block) / ceil(prompt / block))
//! decode_blocks = blocks of the active requests' prompts + floor(prompt / block)
//! ```
//!
//! A cluster with prefill-only workers: the prefill worker by the same cost with `decode_blocks` = 0 (its router does not track
//! active blocks), the decode worker by `decode_blocks + request_weight * active_requests` alone (overlap credit 0, prefill
//! tokens not tracked, no reuse assumed). With `conditional` on, the decode worker is the one with the least
//! `max(0, decode_blocks - credit) + request_weight * active_requests`, without decay, and the turn may stay there:
//!
//! ```text
//! isl:  uncached < eff_isl and uncached / prompt < eff_isl_ratio, on the chosen decode worker, accelerator memory only
//! load: active_prefill_tokens of the chosen prefill worker > queue_threshold * batch_tokens
//! isl-or-load: either; never while the decode worker's active blocks > decode_busy * its pool's blocks
//! ```
//!
//! Queue: while all workers that could prefill have more than `queue_threshold * batch_tokens` active prefill tokens, turns wait
//! in the router, first come first served.
//!
//! | parameter | default | meaning |
//! | --- | --- | --- |
//! | `overlap_credit` | 1.0 | worth of a block in accelerator memory, 0 to 1 (`overlap_score_credit`) |
//! | `credit_decay` | 0.0 | how fast a prefill backlog devalues it (`overlap_score_credit_decay`) |
//! | `host_weight` | 0.75 | worth of a block in host memory, 0 to 1 (`host_cache_hit_weight`) |
//! | `prefill_scale` | 1.0 | weight of prefill against decode (`prefill_load_scale`) |
//! | `request_weight` | 0.0 | blocks that each active request counts for (`decode_active_request_weight`) |
//! | `queue` | `on` | whether turns wait in the router; `off` is their unset threshold |
//! | `queue_threshold` | 4.0 | batches of prefill that make a worker busy (`router_queue_threshold`; 16.0 in one newer version) |
//! | `batch_tokens` | 8192 | an engine's `max_num_batched_tokens`; vLLM's default for a server on such accelerators |
//! | `conditional` | `off` | conditional disaggregation, experimental there: `off`, `isl`, `load`, `isl-or-load` |
//! | `eff_isl` | 2048 | `conditional_disagg_eff_isl_threshold` |
//! | `eff_isl_ratio` | 0.7 | `conditional_disagg_eff_isl_ratio_threshold` |
//! | `decode_busy` | 0, unset | share of the pool above which the decode worker prefills nothing itself |
//!
//! Not faithful, and why:
//! - Ties are drawn from the request (there: at random). Temperature is 0, their default; there is no softmax.
//! - No disk tier and no shared cache: no engine here has one. No taints, no priorities, no pinned sessions (off by default).
//! - A server for both: the active requests' blocks are the ledger's reservation less the expected outputs (theirs tracks no
//!   outputs by default); it counts blocks that two running requests share once, but not those that three share. Blocks
//!   that the new prompt shares with running requests are counted again, on each worker alike.
//! - The decode worker of a disaggregated turn is chosen together with the prefill worker, not once the prefill is done.
//! - Where no prefill worker is left, turns are served by the decode workers alone, as there without `enforce_disagg`.
//! - A failure is the client's error (`migration_limit` 0), and nothing is refused because workers are busy (off by default).

use super::pools::{Cost, Pools, Ranked, able, alone, alone_denied, prefill_denied, ranked, seed_denied, seeded};
use super::share;
use crate::admission::Denied;
use crate::policies::spec::Parameters;
use crate::policies::{Admission, Board, Choice, Habits, Policy, PolicyError, TurnView, WorkerView};

/// Parameters of the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct DynamoConfig {
    overlap_credit: f64,
    credit_decay: f64,
    host_weight: f64,
    prefill_scale: f64,
    request_weight: f64,
    /// Active prefill tokens above which a worker is busy; `None` where there is no queue.
    busy_tokens: Option<f64>,
    conditional: Conditional,
}

/// When a decode worker prefills a turn itself.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Conditional {
    /// Because it lacks little.
    isl: bool,
    /// Because the prefill worker is busy.
    load: bool,
    eff_isl: u32,
    eff_isl_ratio: f64,
    /// `None` where its own load is no obstacle.
    decode_busy: Option<f64>,
}

impl DynamoConfig {
    pub(super) fn parse(parameters: &mut Parameters<'_>) -> Result<Self, PolicyError> {
        let name = "peer-dynamo";
        let overlap_credit = share(parameters, name, "overlap_credit", 1.0)?;
        let credit_decay = parameters.number("credit_decay", 0.0)?;
        let host_weight = share(parameters, name, "host_weight", 0.75)?;
        let prefill_scale = parameters.number("prefill_scale", 1.0)?;
        let request_weight = parameters.number("request_weight", 0.0)?;
        let queues = parameters.choice("queue", "`on` or `off`", &["on", "off"])? == "on";
        let queue_threshold = parameters.number("queue_threshold", 4.0)?;
        let batch_tokens = parameters.whole("batch_tokens", 8_192)?;
        Ok(Self {
            overlap_credit,
            credit_decay,
            host_weight,
            prefill_scale,
            request_weight,
            busy_tokens: queues.then_some(queue_threshold * f64::from(batch_tokens)),
            conditional: Conditional::parse(parameters)?,
        })
    }
}

impl Conditional {
    fn parse(parameters: &mut Parameters<'_>) -> Result<Self, PolicyError> {
        let words = ["off", "isl", "load", "isl-or-load"];
        let when = parameters.choice("conditional", "`off`, `isl`, `load` or `isl-or-load`", &words)?;
        let decode_busy = parameters.number("decode_busy", 0.0)?;
        Ok(Self {
            isl: when.starts_with("isl"),
            load: when.ends_with("load"),
            eff_isl: parameters.whole("eff_isl", 2_048)?,
            eff_isl_ratio: parameters.number("eff_isl_ratio", 0.7)?,
            decode_busy: (decode_busy > 0.0).then_some(decode_busy),
        })
    }

    const fn is_on(&self) -> bool {
        self.isl || self.load
    }
}

/// The policy.
#[derive(Debug)]
pub(super) struct Dynamo {
    config: DynamoConfig,
}

impl Dynamo {
    pub(super) const fn new(config: DynamoConfig) -> Self {
        Self { config }
    }

    /// Blocks that are left to prefill at a worker, with this turn.
    fn prefill_cost(&self, worker: &WorkerView, turn: &TurnView, least_active: u64) -> f64 {
        let active = active_prefill_tokens(worker);
        let raw = blocks(active + u64::from(turn.prompt_tokens), turn);
        let excess = blocks(active.saturating_sub(least_active), turn);
        let request_blocks = f64::from(turn.prompt_tokens.div_ceil(turn.block_size).max(1));
        let decay = 1.0 / (1.0 + self.config.credit_decay * (excess / request_blocks));
        self.config.prefill_scale * (raw - self.credit(worker, turn, decay)).max(0.0)
    }

    /// Blocks that need no prefill, each as much as its tier is worth.
    fn credit(&self, worker: &WorkerView, turn: &TurnView, decay: f64) -> f64 {
        let device = blocks(u64::from(worker.resident_tokens), turn);
        let host = blocks(u64::from(worker.host_tokens), turn);
        self.config.overlap_credit * decay * device + self.config.host_weight * host
    }

    fn request_cost(&self, worker: &WorkerView) -> f64 {
        self.config.request_weight * f64::from(worker.account.requests)
    }

    fn is_busy(&self, worker: &WorkerView) -> bool {
        let busy = |tokens: f64| active_prefill_tokens(worker) as f64 > tokens;
        self.config.busy_tokens.is_some_and(busy)
    }

    /// Candidates for a prefill, with `decode` blocks on top; all denied while all are busy.
    fn rank_prefill<'b>(
        &self,
        turn: &TurnView,
        pool: &[&'b WorkerView],
        denied: fn(&WorkerView) -> Option<Denied>,
        decode: impl Fn(&WorkerView) -> f64,
    ) -> Vec<Ranked<'b>> {
        let able = able(pool, denied);
        let least = able
            .iter()
            .map(|worker| active_prefill_tokens(worker))
            .min()
            .unwrap_or(0);
        let parked = able.iter().all(|worker| self.is_busy(worker));
        let park = |worker: &WorkerView| denied(worker).or(parked.then_some(Denied::PrefillTokens));
        let cost = |worker: &WorkerView| Cost::of(self.prefill_cost(worker, turn, least) + decode(worker));
        ranked(turn, pool, park, cost)
    }

    fn rank_decode<'b>(&self, turn: &TurnView, pool: &[&'b WorkerView]) -> Vec<Ranked<'b>> {
        ranked(turn, pool, seed_denied, |worker| {
            let load = prompt_blocks(worker, turn);
            let credit = if self.config.conditional.is_on() {
                self.credit(worker, turn, 1.0)
            } else {
                0.0
            };
            Cost::of((load - credit).max(0.0) + self.request_cost(worker))
        })
    }

    /// Why the chosen decode worker prefills the turn itself, if it does.
    fn bypasses(&self, turn: &TurnView, decode: &WorkerView, prefill: &WorkerView) -> Option<&'static str> {
        let Conditional {
            isl,
            load,
            eff_isl,
            eff_isl_ratio,
            decode_busy,
        } = self.config.conditional;
        let active = (active_tokens(decode) / u64::from(turn.block_size)) as f64;
        let vetoed = decode_busy.is_some_and(|share| active > share * blocks(decode.kv_tokens, turn));
        let uncached = turn.prompt_tokens.saturating_sub(decode.resident_tokens);
        let ratio = f64::from(uncached) / f64::from(turn.prompt_tokens.max(1));
        let short = isl && uncached < eff_isl && ratio < eff_isl_ratio;
        let busy = load && self.is_busy(prefill);
        match (vetoed, short, busy) {
            (true, _, _) | (false, false, false) => None,
            (false, true, _) => Some("short enough to prefill where it decodes"),
            (false, false, true) => Some("prefilled where it decodes, the prefill worker is busy"),
        }
    }
}

impl Policy for Dynamo {
    fn choose(&mut self, board: &Board, turn: &TurnView) -> Choice {
        let pools = Pools::of(board);
        if pools.prefill.is_empty() {
            let on_top = |worker: &WorkerView| footprint_blocks(worker, turn) + self.request_cost(worker);
            let denied = if pools.disaggregated { seed_denied } else { alone_denied };
            let candidates = self.rank_prefill(turn, &pools.decode, denied, on_top);
            return alone(turn, &candidates, "least prefill and decode blocks");
        }
        let decodes = self.rank_decode(turn, &pools.decode);
        let prefills = self.rank_prefill(turn, &pools.prefill, prefill_denied, |worker| self.request_cost(worker));
        if let (Some(decode), Some(prefill)) = (decodes.first(), prefills.first())
            && let Some(reason) = self.bypasses(turn, decode.worker, prefill.worker)
        {
            return alone(turn, &decodes, reason);
        }
        seeded(turn, &prefills, &decodes, "least prefill blocks, least decode blocks")
    }

    fn habits(&self) -> Habits {
        Habits {
            admission: Admission::AtOnce,
            attempts: Some(1),
            ..Habits::default()
        }
    }
}

/// Prompt tokens that were sent to a worker, are not cached there, and are not prefilled yet.
const fn active_prefill_tokens(worker: &WorkerView) -> u64 {
    worker.account.append_tokens + worker.account.prefill_tokens
}

/// Prompt tokens of a decode worker's requests, what they share counted each time.
const fn active_tokens(worker: &WorkerView) -> u64 {
    let account = &worker.account;
    account.seed_tokens + account.decode_tokens + account.append_tokens
}

/// Blocks of the prompts at a decode worker, with this turn.
fn prompt_blocks(worker: &WorkerView, turn: &TurnView) -> f64 {
    blocks(active_tokens(worker), turn) + own_blocks(turn)
}

/// Blocks of the prompts at a worker that serves alone, what they share counted once, with this turn.
fn footprint_blocks(worker: &WorkerView, turn: &TurnView) -> f64 {
    let outputs = u64::from(worker.account.requests) * u64::from(turn.expected_output_tokens);
    blocks(worker.account.reserved_tokens.saturating_sub(outputs), turn) + own_blocks(turn)
}

/// Whole blocks of the turn's prompt.
fn own_blocks(turn: &TurnView) -> f64 {
    f64::from(turn.prompt_tokens / turn.block_size)
}

fn blocks(tokens: u64, turn: &TurnView) -> f64 {
    tokens as f64 / f64::from(turn.block_size)
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{board, turn, with_parameters};
    use super::*;
    use crate::action::Path;
    use crate::event::Role;
    use homing_units::WorkerId;

    const P: Role = Role::Prefill;
    const D: Role = Role::Decode;
    const PD: [Role; 4] = [P, P, D, D];
    const DP: [Role; 3] = [Role::Both; 3];

    /// A turn of 1,600 tokens, 100 blocks of 16, which is expected to generate 160.
    fn short() -> TurnView {
        TurnView {
            prompt_tokens: 1_600,
            expected_output_tokens: 160,
            ..turn()
        }
    }

    fn choose<const N: usize>(text: &str, roles: [Role; N], turn: &TurnView, set: impl FnOnce(&mut Board)) -> Choice {
        let mut board = board(roles);
        set(&mut board);
        let mut policy = with_parameters(text, |parameters| DynamoConfig::parse(parameters).map(Dynamo::new));
        policy.choose(&board, turn)
    }

    /// Each worker's cost when all serve alone; the least wins.
    #[track_caller]
    fn check_costs(text: &str, set: impl FnOnce(&mut Board), expected: [f64; 3]) {
        let choice = choose(text, DP, &short(), set);
        let cost = |id| {
            let of = |plan: &&crate::policies::Considered| plan.plan.decode == WorkerId(id);
            choice.considered.iter().find(of).map_or(f64::NAN, |plan| plan.score)
        };
        let costs = [0, 1, 2].map(cost);
        let close = costs
            .iter()
            .zip(&expected)
            .all(|(cost, expected)| (cost - expected).abs() < 1e-9);
        assert!(close, "{text}: {costs:?}, expected {expected:?}");
        let least = expected.iter().copied().fold(f64::INFINITY, f64::min);
        let plan = choice.plan.unwrap();
        assert_eq!(expected[plan.decode.0 as usize], least, "{text}: {choice:?}");
        assert_eq!(plan.prefill, None);
    }

    #[test]
    fn serving_alone_costs_prefill_and_decode_blocks() {
        // Idle and empty: 1.0 * max(0, 1,600 / 16 - 0) + 100 = 100 + 100 = 200. All alike: a draw.
        check_costs("", |_| {}, [200.0, 200.0, 200.0]);
        // Worker 0 holds 80 blocks: max(0, 100 - 1.0 * 80) + 100 = 120.
        // Worker 1 holds 40 blocks and 40 more in its host: 100 - (40 + 0.75 * 40) + 100 = 100 - 70 + 100 = 130.
        let holds = |board: &mut Board| {
            board.workers[0].resident_tokens = 1_280;
            board.workers[1].resident_tokens = 640;
            board.workers[1].host_tokens = 640;
        };
        check_costs("", holds, [120.0, 130.0, 200.0]);
        // overlap_credit=0.5: 100 - 0.5 * 80 + 100 = 160; 100 - (20 + 30) + 100 = 150.
        check_costs("overlap_credit=0.5", holds, [160.0, 150.0, 200.0]);
        // host_weight=0, prefill_scale=2: 2 * 20 + 100 = 140; 2 * 60 + 100 = 220; 2 * 100 + 100 = 300.
        check_costs("host_weight=0:prefill_scale=2", holds, [140.0, 220.0, 300.0]);
    }

    #[test]
    fn load_is_weighed_against_what_is_held() {
        // Worker 0 holds all of it: max(0, 100 - 100) = 0. Its three requests have 3 * (1,600 + 160) tokens reserved, 160 of
        // each for its output: 3 * 1,600 / 16 = 300 blocks. 0 + 300 + 100 = 400 against 100 + 100 = 200.
        let busy = |board: &mut Board| {
            board.workers[0].resident_tokens = 1_600;
            board.workers[0].account.requests = 3;
            board.workers[0].account.reserved_tokens = 3 * 1_760;
        };
        check_costs("", busy, [400.0, 200.0, 200.0]);
        // Just as dear as an empty one with one request less and none of it shared: 0 + 100 + 100 = 200, a draw.
        let tie = |board: &mut Board| {
            board.workers[0].resident_tokens = 1_600;
            board.workers[0].account.requests = 1;
            board.workers[0].account.reserved_tokens = 1_760;
        };
        check_costs("", tie, [200.0, 200.0, 200.0]);
        // request_weight=2 breaks it: 200 + 2 * 1 = 202.
        check_costs("request_weight=2", tie, [202.0, 200.0, 200.0]);
        // A backlog of 800 tokens is 50 blocks: (800 + 1,600) / 16 - 100 + 100 = 150.
        let backlog = |board: &mut Board| {
            board.workers[0].resident_tokens = 1_600;
            board.workers[0].account.append_tokens = 800;
        };
        check_costs("", backlog, [150.0, 200.0, 200.0]);
        // credit_decay=1: half a request's blocks behind the others, 1 / (1 + 50 / 100) = 2 / 3 of the credit:
        // 150 - 66.67 + 100 = 183.33.
        check_costs("credit_decay=1", backlog, [550.0 / 3.0, 200.0, 200.0]);
        // Only what is above the least of all counts: 400 of its 800 tokens, 25 blocks, 1 / 1.25 = 0.8 of the credit:
        // 150 - 80 + 100 = 170. The others: (400 + 1,600) / 16 + 100 = 225.
        let all = |board: &mut Board| {
            backlog(board);
            board.workers[1].account.append_tokens = 400;
            board.workers[2].account.append_tokens = 400;
        };
        check_costs("credit_decay=1", all, [170.0, 225.0, 225.0]);
    }

    #[test]
    fn equals_are_drawn() {
        let winner = |request| {
            let turn = TurnView {
                request: homing_units::RequestId(request),
                ..short()
            };
            choose("", DP, &turn, |_| {}).plan.unwrap().decode.0
        };
        let winners: std::collections::BTreeSet<_> = (0..50).map(winner).collect();
        assert_eq!(winners.into_iter().collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn turns_wait_while_all_are_busy() {
        let backlog = |tokens: [u64; 3]| {
            move |board: &mut Board| {
                for (worker, tokens) in board.workers.iter_mut().zip(tokens) {
                    worker.account.append_tokens = tokens;
                }
            }
        };
        let waits = |text, tokens| choose(text, DP, &short(), backlog(tokens)).plan.is_none();
        // 4.0 * 8,192 = 32,768: busy is above, not at it.
        assert!(!waits("", [32_768; 3]));
        assert!(waits("", [32_769; 3]));
        assert!(!waits("", [32_768, 32_769, 40_000]), "one is not busy");
        assert!(!waits("queue=off", [32_769; 3]));
        // 2 * 1,000 = 2,000.
        assert!(waits("queue_threshold=2:batch_tokens=1000", [2_001; 3]));
        // One that cannot be reached does not count as free.
        let away = |board: &mut Board| {
            backlog([32_769, 32_769, 0])(board);
            board.workers[2].denies_alone = Some(Denied::Suspect);
        };
        assert!(choose("", DP, &short(), away).plan.is_none());
    }

    #[track_caller]
    fn check_pd(text: &str, set: impl FnOnce(&mut Board), expected: (Path, Option<u32>, u32, f64)) {
        let choice = choose(text, PD, &short(), set);
        let plan = choice.plan.unwrap();
        let score = choice.considered[0].score;
        let answer = (plan.path, plan.prefill.map(|id| id.0), plan.decode.0, score);
        assert_eq!(answer, expected, "{text}: {choice:?}");
    }

    /// The legs are apart: prefill worker 0 holds nothing and is idle, 1 holds 50 blocks; decode worker 2 has 3,200 prompt
    /// tokens in flight and holds 90 blocks, 3 has 1,600 and holds nothing.
    fn apart(board: &mut Board) {
        board.workers[1].resident_tokens = 800;
        board.workers[2].account.decode_tokens = 1_600;
        board.workers[2].account.seed_tokens = 1_600;
        board.workers[2].account.requests = 2;
        board.workers[2].resident_tokens = 1_440;
        board.workers[3].account.decode_tokens = 1_600;
        board.workers[3].account.requests = 1;
    }

    #[test]
    fn prefill_by_overlap_and_decode_by_load() {
        // Prefill: 0: 100, 1: 100 - 50 = 50. Decode: 2: 3,200 / 16 + 100 = 300, 3: 100 + 100 = 200. Together 250.
        check_pd("", apart, (Path::Seed, Some(1), 3, 250.0));
        // A backlog of 816 tokens at 1 is 51 blocks: 100 + 51 - 50 = 101 > 100. Together 100 + 200.
        let backlog = |board: &mut Board| {
            apart(board);
            board.workers[1].account.prefill_tokens = 816;
        };
        check_pd("", backlog, (Path::Seed, Some(0), 3, 300.0));
        // What is held at a decode worker is worth nothing: 2 holds 90 blocks and has one request less than in `apart`, but 16
        // tokens more in flight than 3: 1,616 / 16 + 100 = 201 > 200.
        let held = |board: &mut Board| {
            apart(board);
            board.workers[2].account.seed_tokens = 16;
        };
        check_pd("", held, (Path::Seed, Some(1), 3, 250.0));
        // All prefill workers are gone: alone, as if there were none. Worker 2: 100 - 90 + 100 = 110 as nothing is reserved.
        let gone = |board: &mut Board| {
            apart(board);
            board.workers[0].denies_prefill = Some(Denied::Dead);
            board.workers[1].denies_prefill = Some(Denied::Dead);
        };
        check_pd("", gone, (Path::Local, None, 2, 110.0));
    }

    #[test]
    fn conditional_disaggregation_keeps_short_prefills_where_they_decode() {
        // Decode: 2: max(0, 300 - 90) = 210, 3: max(0, 200 - 0) = 200. Worker 3 lacks 1,600 of 1,600: ratio 1 >= 0.7.
        check_pd("conditional=isl", apart, (Path::Seed, Some(1), 3, 250.0));
        // Worker 2 with 1,600 in flight: 200 - 90 = 110. It lacks 160 < 2,048, 160 / 1,600 = 0.1 < 0.7.
        let held = |board: &mut Board| {
            apart(board);
            board.workers[2].account.seed_tokens = 0;
        };
        check_pd("conditional=isl", held, (Path::Local, None, 2, 110.0));
        check_pd("conditional=isl:request_weight=5", held, (Path::Local, None, 2, 120.0));
        // The bounds are exclusive: 160 < 160 does not hold, 160 < 161 does; 0.1 < 0.1 does not hold.
        check_pd("conditional=isl:eff_isl=160", held, (Path::Seed, Some(1), 2, 160.0));
        check_pd("conditional=isl:eff_isl=161", held, (Path::Local, None, 2, 110.0));
        check_pd(
            "conditional=isl:eff_isl_ratio=0.1",
            held,
            (Path::Seed, Some(1), 2, 160.0),
        );
        // The decode worker has 1,600 / 16 = 100 active blocks of 100,000 / 16 = 6,250: 100 > 0.016 * 6,250 = 100 does not hold.
        check_pd("conditional=isl:decode_busy=0.016", held, (Path::Local, None, 2, 110.0));
        check_pd(
            "conditional=isl:decode_busy=0.015",
            held,
            (Path::Seed, Some(1), 2, 160.0),
        );
    }

    #[test]
    fn conditional_disaggregation_relieves_busy_prefill_workers() {
        let load = |tokens| {
            move |board: &mut Board| {
                apart(board);
                board.workers[0].account.prefill_tokens = tokens;
                board.workers[1].account.prefill_tokens = tokens;
            }
        };
        // At 32,768 the chosen prefill worker is calm: (32,768 + 1,600) / 16 - 50 = 2,098, and 200 at decode worker 3.
        check_pd("conditional=load", load(32_768), (Path::Seed, Some(1), 3, 2_298.0));
        check_pd("conditional=load", load(32_769), (Path::Local, None, 3, 200.0));
        check_pd("conditional=isl-or-load", load(32_769), (Path::Local, None, 3, 200.0));
        // Without it the turn waits, and without a queue nobody is busy: (32,769 + 1,600) / 16 - 50 = 2,098.0625.
        assert_eq!(choose("conditional=isl", PD, &short(), load(32_769)).plan, None);
        check_pd(
            "conditional=load:queue=off",
            load(32_769),
            (Path::Seed, Some(1), 3, 2_298.062_5),
        );
    }

    #[test]
    fn it_sends_at_once_and_gives_up_at_the_first_failure() {
        let policy = with_parameters("", |parameters| DynamoConfig::parse(parameters).map(Dynamo::new));
        assert_eq!(policy.habits().admission, Admission::AtOnce);
        assert_eq!(policy.habits().attempts, Some(1));
    }
}
