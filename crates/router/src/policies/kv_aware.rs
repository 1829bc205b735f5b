//! `kv-aware`: the router of the papers' prefill/decode prototype ("KVC"). A session is pinned to its first decode worker for
//! ever; a turn is appended there if that worker admits it, else prefilled elsewhere and pulled, at once.
//!
//! Source: `FAILURE_MODES_ZH` (the taxonomy) §1 to §4 for the score, the load floor, the fallback and the knobs;
//! `STRUCTURAL_VALIDATION_REPORT_ZH` (the report) §1 for the pin and the missing capacity term, §3 for the pause hint, §5
//! for the choice of the prefill worker. Kept with its faults: it is what they measured.
//!
//! ```text
//! a session without a decode worker goes to the one with the largest
//!   score = overlap + sticky_bonus [it was served there last] + load_floor * max(0, mean - assigned) / max(1, mean)
//!   overlap: blocks of the prompt that lie there; with `overlap=exclusive` those that its family owns (taxonomy §2.5)
//!   assigned: decode legs that the worker was ever given; mean: that of all decode workers
//!   equal scores: least assigned, then the first worker
//! append at its worker D if  the session is resident at D
//!                       and  uncached tail <= direct_max
//!                       and  usage_after = (pool tokens in use + tail + expected output) / pool tokens <= rho
//! else the next prefill worker in turn prefills the whole prompt, and D pulls it
//! pause before either, with backpressure=on (report §3, of D's last figures) or drain (ours), at most max_pause: kv_aware/pause.rs
//! ```
//!
//! | parameter | default | from |
//! | --- | --- | --- |
//! | `overlap` | `all` | taxonomy §2.2 (all), §2.5 (`exclusive`) |
//! | `sticky_bonus` | 1 block | taxonomy §2.4 names it, not its value |
//! | `load_floor` | 0 (off) | taxonomy §2.4 names K, not its value |
//! | `reject_threshold` | 0 (never) | taxonomy §2.3, `migration_reject_threshold` |
//! | `seed_min_turn` | 1 (every turn) | taxonomy §1.4, `kvcache-seed-min-turn-id`; their stable setting is 2 |
//! | `soft_cap` | 0 (off) | taxonomy §3.4, `kvcache-session-soft-cap` |
//! | `direct_max` | 8,192 tokens | taxonomy §3.4, `kvcache-direct-max-uncached-tokens` |
//! | `request_timeout` | 0 (off) | taxonomy §1.4: 180 or 300 seconds |
//! | `rho` | 0.95 | taxonomy §1.3 |
//! | `backpressure` | `off` | report §3, `enable-backpressure` (`on`); `drain` is what we would have done |
//! | `max_pause` | 2 s | report §3, `backpressure-max-pause-s` |
//! | `prefill` | `round-robin` | report §5; `healthy` is the repair that it proposes |
//! | `affinity` | `soft` | `hard` waits for a worker that is gone, as users of other routers report (dynamo#11447) |
//!
//! The transfer timeout is the engine's, not the router's.
//!
//! Assumed, where the papers are silent or ambiguous:
//! - One overlapping block counts 1, and all terms of the score are in blocks. ("More boilerplate blocks than K / sticky_bonus
//!   stay cold" can also be read as a weight of `sticky_bonus` a block; at its default of 1 that is the same.)
//! - `sticky_bonus` decides only where a pin was forgotten while the session is still known, since pins hold otherwise.
//! - A worker that is asked before each turn (`Habits::probes`) tells truly what it holds, through its KV events.
//! - Resident means that D holds more of the prompt than the session's first prompt had: of boilerplate it can only hold less.
//! - A denial that counts for `reject_threshold` is one for room (`usage_after > rho`), on a turn after the first. After so
//!   many in a row the session is placed anew among the other decode workers. An admitted append starts the count again.
//! - `seed_min_turn` counts turns from 1. A turn below it is served by prefill and decode worker as any other, but its KV is
//!   not kept (`Choice::keeps_kv`), so the next turn is a reseed, as taxonomy §4.4 says.
//! - `soft_cap`: while so many other sessions have a place at D, a seed there is served without one. A session that has had no
//!   turn in the last 16 turns a place that D was given is taken to have ended. (There the cap trims the idle one; a router cannot.)
//! - `overshoot` is in thousandths of the pool above 0.90: then the bounds of 200 and 2,000 ms mean something, whereas
//!   counted in tokens nearly every hint would be 2,000.
//! - `usage_after` of the hint is that of the admission question, so it counts the tail, on both paths.
//! - With `backpressure=on` a turn pauses once, before it is sent, on whichever path; then its path is decided on what D says by then.
//! - A D that died takes its pins with it: the session is placed anew. (There the run was over.)
//! - Without prefill workers (all workers do both) D prefills the whole prompt itself.
//! - Turns are sent at once, and a failure is the client's error: no retry, as nothing of the kind is described.
//!
//! Bounds: [`MAX_PINS`] pins, the longest unused forgotten first; places by `soft_cap`, of a bounded number of workers.

mod pause;
mod pins;
mod places;

use super::round_robin::in_turn;
use super::spec::Parameters;
use super::{Admission, Board, Choice, Considered, Habits, Order, Plan, Policy, PolicyError, TurnView, WorkerView};
use crate::admission::Denied;
use homing_units::{Duration, WorkerId};
pub use pause::Backpressure;
use pins::{Pin, Pins};
use places::Places;

/// Sessions whose decode worker is remembered, as many as the router remembers sessions by default.
const MAX_PINS: usize = 65_536;

/// Parameters of the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvAwareConfig {
    /// Only blocks that the session's family owns count as overlap.
    pub exclusive_overlap: bool,
    /// What it counts for a worker that it served the session last, in blocks.
    pub sticky_bonus: f64,
    /// What it counts for a worker that it was never assigned anything, in blocks.
    pub load_floor: f64,
    /// Denied admissions in a row before a session is placed anew; 0 for never.
    pub reject_threshold: u32,
    /// The first turn, counted from 1, whose KV is kept at the decode worker.
    pub seed_min_turn: u32,
    /// Sessions that have a place at a decode worker; 0 for any number.
    pub soft_cap: u32,
    /// The longest uncached tail, in tokens, that is appended.
    pub direct_max: u32,
    /// How long a request may take to its first token; `None` for the router's own clocks.
    pub request_timeout: Option<Duration>,
    /// The share of a pool that an append may fill.
    pub rho: f64,
    /// Which hints of decode workers are heeded.
    pub backpressure: Backpressure,
    /// The longest pause.
    pub max_pause: Duration,
    /// Whether prefill workers are chosen by their transfers and failures, and not in turn.
    pub healthy_prefill: bool,
    /// Whether a session's turns wait for its decode worker where that is gone, instead of being placed anew.
    pub hard_affinity: bool,
}

impl Default for KvAwareConfig {
    fn default() -> Self {
        Self {
            exclusive_overlap: false,
            sticky_bonus: 1.0,
            load_floor: 0.0,
            reject_threshold: 0,
            seed_min_turn: 1,
            soft_cap: 0,
            direct_max: 8_192,
            request_timeout: None,
            rho: 0.95,
            backpressure: Backpressure::Off,
            max_pause: Duration::from_secs(2),
            healthy_prefill: false,
            hard_affinity: false,
        }
    }
}

impl KvAwareConfig {
    pub(super) fn parse(parameters: &mut Parameters<'_>) -> Result<Self, PolicyError> {
        let default = Self::default();
        let timeout = parameters.seconds("request_timeout", Duration::ZERO)?;
        Ok(Self {
            exclusive_overlap: parameters.choice("overlap", "`all` or `exclusive`", &["all", "exclusive"])?
                == "exclusive",
            sticky_bonus: parameters.number("sticky_bonus", default.sticky_bonus)?,
            load_floor: parameters.number("load_floor", default.load_floor)?,
            reject_threshold: parameters.whole("reject_threshold", default.reject_threshold)?,
            seed_min_turn: parameters.whole("seed_min_turn", default.seed_min_turn)?,
            soft_cap: parameters.whole("soft_cap", default.soft_cap)?,
            direct_max: parameters.whole("direct_max", default.direct_max)?,
            request_timeout: (!timeout.is_zero()).then_some(timeout),
            rho: parameters.positive("rho", default.rho)?,
            backpressure: {
                let expected = "`off`, `on` or `drain`";
                Backpressure::of(parameters.choice("backpressure", expected, &Backpressure::WORDS)?)
            },
            max_pause: parameters.seconds("max_pause", default.max_pause)?,
            healthy_prefill: parameters.choice("prefill", "`round-robin` or `healthy`", &["round-robin", "healthy"])?
                == "healthy",
            hard_affinity: parameters.choice("affinity", "`soft` or `hard`", &["soft", "hard"])? == "hard",
        })
    }
}

/// The policy.
#[derive(Debug)]
pub struct KvAware {
    config: KvAwareConfig,
    pins: Pins,
    places: Places,
    last_prefill: Option<WorkerId>,
}

/// What a decode worker answers to the question whether it takes an append.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Admittance {
    /// The share of the pool that would be in use.
    usage_after: f64,
    /// It holds the session's history.
    resident: bool,
    /// The tail is short enough.
    short: bool,
    /// It has room.
    room: bool,
}

impl Policy for KvAware {
    fn choose(&mut self, board: &Board, turn: &TurnView) -> Choice {
        let pin = self.pin(board, turn);
        if self.config.hard_affinity && pin.is_none() && self.pins.get(turn.session).is_some() {
            return Choice::least(Vec::new(), "waits for its worker, which is gone");
        }
        let Some((decode, score, others)) = self.decode_worker(board, turn, pin) else {
            return Choice::least(Vec::new(), "no decode worker");
        };
        let admittance = self.admittance(decode, turn, pin);
        let admitted = admittance.resident && admittance.short && admittance.room;
        let (plan, denied) = if admitted {
            (decode.alone(turn), decode.denies_alone)
        } else {
            self.fallback(board, decode, turn)
        };
        let wanted = Considered {
            plan,
            resident_tokens: decode.resident_tokens,
            score,
            denied,
        };
        let mut choice = Choice::only(wanted, others, admittance.describe());
        if choice.plan.is_some() {
            match self.pause(decode, turn, &admittance) {
                Some(pause) => delay(&mut choice, decode, pause),
                None => self.commit(&mut choice, turn, pin, admitted, admittance.room),
            }
        }
        choice
    }

    fn habits(&self) -> Habits {
        Habits {
            admission: Admission::AtOnce,
            attempts: Some(1),
            request_timeout: self.config.request_timeout,
            order: Order::Arrival,
            probes: true,
            ..Habits::default()
        }
    }
}

impl KvAware {
    /// A policy with these parameters.
    #[must_use]
    pub const fn new(config: KvAwareConfig) -> Self {
        Self {
            config,
            pins: Pins::new(MAX_PINS),
            places: Places::new(config.soft_cap),
            last_prefill: None,
        }
    }

    /// The session's pin, as long as its worker can serve it at all.
    fn pin(&self, board: &Board, turn: &TurnView) -> Option<Pin> {
        let pin = self.pins.get(turn.session)?;
        board.decoders().any(|worker| worker.id == pin.worker).then_some(pin)
    }

    /// The session's decode worker, its score (negative, so that the lowest is the best; 0 where a pin decides), and the
    /// others where it was chosen just now.
    fn decode_worker<'b>(
        &self,
        board: &'b Board,
        turn: &TurnView,
        pin: Option<Pin>,
    ) -> Option<(&'b WorkerView, f64, Vec<Considered>)> {
        let threshold = self.config.reject_threshold;
        let rejected = pin.filter(|pin| threshold > 0 && pin.denied >= threshold);
        if let Some(pin) = pin.filter(|_| rejected.is_none()) {
            return Some((board.worker(pin.worker)?, 0.0, Vec::new()));
        }
        let others = |worker: &&WorkerView| rejected.is_none_or(|pin| pin.worker != worker.id);
        self.place(board, turn, board.decoders().filter(others).collect())
            // A session that was denied by the only decode worker stays there.
            .or_else(|| Some((board.worker(rejected?.worker)?, 0.0, Vec::new())))
    }

    /// The decode worker of these with the largest score.
    fn place<'b>(
        &self,
        board: &Board,
        turn: &TurnView,
        workers: Vec<&'b WorkerView>,
    ) -> Option<(&'b WorkerView, f64, Vec<Considered>)> {
        let (count, sum) = board.decoders().fold((0.0, 0.0), |(count, sum), worker| {
            (count + 1.0, sum + worker.assigned_requests as f64)
        });
        let mean = if count > 0.0 { sum / count } else { 0.0 };
        let mut scored: Vec<_> = workers
            .into_iter()
            .map(|worker| (self.score(worker, turn, mean), worker))
            .collect();
        scored.sort_by(|(left_score, left), (right_score, right)| {
            let out = left.denies_alone.is_some().cmp(&right.denies_alone.is_some());
            out.then(right_score.total_cmp(left_score))
                .then(left.assigned_requests.cmp(&right.assigned_requests))
                .then(left.id.cmp(&right.id))
        });
        let (score, best) = *scored.first()?;
        let others = scored[1..].iter().map(|(score, worker)| Considered {
            plan: self.fallback(board, worker, turn).0,
            resident_tokens: worker.resident_tokens,
            score: 0.0 - score,
            denied: worker.denies_alone,
        });
        Some((best, 0.0 - score, others.collect()))
    }

    /// In blocks; the largest wins.
    fn score(&self, worker: &WorkerView, turn: &TurnView, mean: f64) -> f64 {
        let overlap = if self.config.exclusive_overlap {
            worker.exclusive_tokens
        } else {
            worker.held_tokens()
        };
        let sticky = if turn.home == Some(worker.id) {
            self.config.sticky_bonus
        } else {
            0.0
        };
        let below_mean = (mean - worker.assigned_requests as f64).max(0.0) / mean.max(1.0);
        f64::from(overlap / turn.block_size.max(1)) + sticky + self.config.load_floor * below_mean
    }

    fn admittance(&self, decode: &WorkerView, turn: &TurnView, pin: Option<Pin>) -> Admittance {
        let tail = decode.lacks(turn);
        let wanted = decode.kv_tokens_used + u64::from(tail) + u64::from(turn.expected_output_tokens);
        let usage_after = wanted as f64 / decode.kv_tokens.max(1) as f64;
        // The last tokens of a prompt fill no block.
        let held = decode.held_tokens().saturating_add(turn.block_size);
        Admittance {
            usage_after,
            resident: pin.is_some_and(|pin| pin.worker == decode.id && held > pin.first_prompt_tokens),
            short: tail <= self.config.direct_max,
            room: usage_after <= self.config.rho,
        }
    }

    /// The plan in which a prefill worker computes the whole prompt; where there is none, D does.
    fn fallback(&self, board: &Board, decode: &WorkerView, turn: &TurnView) -> (Plan, Option<Denied>) {
        let able: Vec<_> = board.prefillers(decode).cloned().collect();
        let mut next = in_turn(&able, self.last_prefill);
        if self.config.healthy_prefill {
            next.sort_by_key(|prefill| {
                let link = board.link(prefill.id, decode.id);
                (link.failures > 0, link.transfers, link.failures)
            });
        }
        let open = next.iter().find(|worker| worker.denies_prefill.is_none());
        match open.or(next.first()) {
            Some(prefill) => (
                decode.seeded_by(prefill.id, turn),
                decode.denies_seed.or(prefill.denies_prefill),
            ),
            None => (decode.alone(turn), decode.denies_alone),
        }
    }

    /// How long the turn is to pause before it is sent, if at all.
    fn pause(&self, decode: &WorkerView, turn: &TurnView, admittance: &Admittance) -> Option<Duration> {
        let max = self.config.max_pause;
        let pause = match self.config.backpressure {
            Backpressure::Report if turn.waited.is_zero() => pause::report(decode, admittance.usage_after).min(max),
            Backpressure::Drain if turn.waited < pause::PATIENCE => pause::drain(decode, turn, self.config.rho, max),
            Backpressure::Off | Backpressure::Report | Backpressure::Drain => Duration::ZERO,
        };
        (!pause.is_zero()).then_some(pause)
    }

    /// The turn is sent: remembers what follows from that, and says whether its KV is kept.
    fn commit(&mut self, choice: &mut Choice, turn: &TurnView, pin: Option<Pin>, admitted: bool, room: bool) {
        let plan = choice.plan.expect("a turn that is sent has a plan");
        let stays = pin.filter(|pin| pin.worker == plan.decode);
        let denied = match stays {
            Some(pin) if !admitted && !room => pin.denied.saturating_add(1),
            Some(pin) if !admitted => pin.denied,
            _ => 0,
        };
        let first_prompt_tokens = pin.map_or(turn.prompt_tokens, |pin| pin.first_prompt_tokens);
        let now = Pin {
            worker: plan.decode,
            first_prompt_tokens,
            denied,
        };
        self.pins.set(turn.session, now);
        self.last_prefill = plan.prefill.or(self.last_prefill);
        let early = turn.turn_index.saturating_add(1) < self.config.seed_min_turn;
        choice.keeps_kv = !early && self.places.take(plan.decode, turn.session, admitted);
    }
}

impl Admittance {
    fn describe(&self) -> String {
        let usage = self.usage_after * 100.0;
        match (self.resident, self.short, self.room) {
            (true, true, true) => format!("admitted, the pool would be {usage:.0}% full"),
            (false, _, _) => "its worker does not hold the session".to_owned(),
            (true, false, _) => "the tail is too long to append".to_owned(),
            (true, true, false) => format!("not admitted, the pool would be {usage:.0}% full"),
        }
    }
}

/// The plan is not sent now, but looked at again after a pause.
fn delay(choice: &mut Choice, decode: &WorkerView, pause: Duration) {
    choice.plan = None;
    choice.waits_for = Some(decode.id);
    choice.pause = Some(pause);
    choice.reason = format!("pauses {} ms as {} asks", pause.as_millis(), decode.id);
}

#[cfg(test)]
mod tests;
