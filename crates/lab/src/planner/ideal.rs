//! What no router could beat: the same sessions on clusters that cannot be built.
//!
//! A router chooses places, and with them how requests share workers. So clusters in which no choice is left and every one of them
//! came out for the best say how much there is to choose. Each takes away more of what is physical; what a row gains over a real
//! policy is the most that any router gains, and the difference between two rows is what its kind of trouble is worth.
//!
//! ```text
//! alone         each request has an idle worker for itself, which holds all of its prompt that was ever shown before
//! undisturbed   the same, but decoding is shared: at each step all who decode are spread evenly over the workers, and no prefill
//!               waits for anything or takes any of a worker's time from them
//! steady        the same, but the workers' time that all prefills take is missing, evenly over the whole run
//! balanced      prefills take time when they come: each has a worker for itself while it runs, first come first served, and those who decode are
//!               spread evenly at each step over the workers that are left, or over all if they are faster so
//! ```
//!
//! In all of them a prefill computes only what no earlier prompt of anybody began with (all KV is everywhere at once, for ever, for
//! nothing), steps take what the cluster's step model says, without noise, and prefill/decode shapes may use each worker for both.
//! Of `alone` no figure can be beaten, request by request. `undisturbed` cannot be beaten by a router that treats requests alike, since
//! a step's time grows with its batch: one that gave up some requests for the others could do better at a 90th percentile. So it is with
//! `steady` as far as decoding goes, since what is missing is missed the least where it is missing evenly; how long first tokens wait for
//! their prefill to get its share it does not say. `balanced` is no bound but one very good router: it moves whole batches between two
//! steps for nothing, and begins each prefill as soon as any worker has none.
//!
//! Sessions are a closed loop as in the simulator: a turn follows the end of the one before it. Nothing here is a policy, and nothing
//! of it can be chosen for a cluster that serves.

use super::outcome::Outcome;
use crate::setup::{Setup, SetupError};
use homing_engine::{Chunk, StepModel, StepShape};
use homing_report::stats::{mean, quantile, sorted};
use homing_sim::{Cluster, SimError};
use homing_units::{Duration, Instant};
use homing_workload::{Replay, Trace, TurnRef};
use smallvec::smallvec;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// How much of what is physical is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ideal {
    /// Each request has a worker for itself.
    Alone,
    /// Decoding is shared evenly, prefills cost nobody anything.
    Undisturbed,
    /// Prefills take workers' time, evenly over the run.
    Steady,
    /// Prefills take workers' time when they come.
    Balanced,
}

/// All of them, the farthest from what can be built first.
pub const IDEALS: [(Ideal, &str); 4] = [
    (Ideal::Alone, "alone"),
    (Ideal::Undisturbed, "undisturbed"),
    (Ideal::Steady, "steady"),
    (Ideal::Balanced, "balanced"),
];

/// What has less than this share of a token left to come has ended: what sums of floating-point numbers leave over.
const NOTHING: f64 = 1e-6;

/// The workers that prefills take are found to this, or as near as so many attempts come.
const SETTLED: f64 = 0.01;
const ATTEMPTS: u32 = 8;

/// However many prefills take, so much of a worker is left.
const LEFT: f64 = 0.1;

impl Ideal {
    /// One run of a setup's sessions; its policy does not count.
    ///
    /// # Errors
    /// If the setup is wrong.
    pub fn simulate(self, setup: &Setup, seed: u64) -> Result<Outcome, SetupError> {
        let trace = setup.trace(seed)?;
        let config = setup.config(&trace, seed)?;
        let mut replay = config.replay;
        replay.seed = seed;
        let replay = Replay::new(&trace, &replay).map_err(SimError::from)?;
        Ok(self.run(&trace, &config.cluster, &replay))
    }

    fn run(self, trace: &Trace, cluster: &Cluster, replay: &Replay) -> Outcome {
        let mut missing = 0.0;
        for attempt in 0.. {
            let mut run = Run::new(self, trace, cluster, replay.clone());
            run.missing = missing;
            while run.step() {}
            let taken = (run.prefill_s / run.now_s).min(run.workers - LEFT);
            // What is missing makes the run longer, and of a longer run the prefills take a smaller share.
            if self != Self::Steady || attempt == ATTEMPTS || (taken - missing).abs() < SETTLED {
                return run.outcome();
            }
            missing = taken;
        }
        unreachable!("the last attempt ends it")
    }
}

/// A request whose prompt is being computed or waits for that.
#[derive(Clone, Copy, Debug)]
struct Prefilling {
    turn: TurnRef,
    sent_s: f64,
    /// When it is done, once it has begun.
    lasts_s: f64,
    /// Its first step, as far as it makes others wait.
    first_step: Chunk,
}

/// A request that decodes.
#[derive(Clone, Copy, Debug)]
struct Decoding {
    turn: TurnRef,
    sent_s: f64,
    first_token_s: f64,
    /// Tokens still to come.
    left: f64,
    context: u64,
}

/// A run under way. Times are seconds from its start.
struct Run<'a> {
    ideal: Ideal,
    trace: &'a Trace,
    model: &'a StepModel,
    chunk: u32,
    workers: f64,
    /// Workers that are missing all the time.
    missing: f64,
    replay: Replay,
    now_s: f64,
    /// What all prefills take of workers' time.
    prefill_s: f64,
    shown: Shown,
    waiting: VecDeque<Prefilling>,
    /// By when they are done, in nanoseconds, and a number that tells them apart.
    prefilling: BTreeMap<(u64, u64), Prefilling>,
    decoding: Vec<Decoding>,
    begun: u64,
    latencies_s: Vec<f64>,
    ttfts_s: Vec<f64>,
    tpots_s: Vec<f64>,
    prompt_tokens: u64,
}

impl<'a> Run<'a> {
    fn new(ideal: Ideal, trace: &'a Trace, cluster: &'a Cluster, replay: Replay) -> Self {
        Self {
            ideal,
            trace,
            model: &cluster.step_model,
            chunk: cluster.max_batch_tokens,
            workers: cluster.workers.len() as f64,
            missing: 0.0,
            replay,
            now_s: 0.0,
            prefill_s: 0.0,
            shown: Shown::default(),
            waiting: VecDeque::new(),
            prefilling: BTreeMap::new(),
            decoding: Vec::new(),
            begun: 0,
            latencies_s: Vec::new(),
            ttfts_s: Vec::new(),
            tpots_s: Vec::new(),
            prompt_tokens: 0,
        }
    }

    /// Goes on to whatever happens next; says whether anything did.
    fn step(&mut self) -> bool {
        let due = self.replay.next_due().map(seconds);
        let prefilled = self.prefilling.keys().next().map(|(at, _)| *at as f64 / 1e9);
        let paces = self.paces();
        let answered = self
            .decoding
            .iter()
            .zip(&paces)
            .map(|(request, pace)| self.now_s + request.left * pace);
        let Some(next_s) = due.into_iter().chain(prefilled).chain(answered).min_by(f64::total_cmp) else {
            return false;
        };
        let next_s = next_s.max(self.now_s);
        for (request, pace) in self.decoding.iter_mut().zip(&paces) {
            request.left -= (next_s - self.now_s) / pace;
        }
        self.now_s = next_s;
        self.end_answers();
        self.end_prefills();
        while let Some(turn) = self.replay.poll_due(instant(self.now_s)) {
            self.send(turn);
        }
        self.begin_prefills();
        true
    }

    /// Seconds that each of those who decode takes for a token.
    fn paces(&self) -> Vec<f64> {
        let batch = self.decoding.len() as f64;
        let context: u64 = self.decoding.iter().map(|request| request.context).sum();
        let alone = |request: &Decoding| self.decode_s(1.0, request.context as f64);
        let spread = |workers: f64| self.decode_s((batch / workers).max(1.0), context as f64 / workers.min(batch));
        match self.ideal {
            Ideal::Alone => self.decoding.iter().map(alone).collect(),
            Ideal::Undisturbed | Ideal::Steady => {
                let left = self.workers - self.missing;
                if batch <= left {
                    return self.decoding.iter().map(alone).collect();
                }
                vec![spread(left); self.decoding.len()]
            }
            Ideal::Balanced => {
                let left = self.workers - self.prefilling.len() as f64;
                if batch <= left {
                    return self.decoding.iter().map(alone).collect();
                }
                let beside = 1.0 / self.rate_among_prefills(batch / self.workers, context as f64 / self.workers);
                let apart = if left > 0.0 { spread(left) } else { f64::INFINITY };
                vec![apart.min(beside); self.decoding.len()]
            }
        }
    }

    /// Tokens a second of each of those who decode, where they are spread over all workers, some of which prefill.
    fn rate_among_prefills(&self, batch: f64, context: f64) -> f64 {
        let free = self.workers - self.prefilling.len() as f64;
        let beside = self.prefilling.values().map(|prefill| {
            let shape = StepShape {
                prefills: smallvec![prefill.first_step],
                decode_batch: batch.round() as u32,
                decode_context_tokens: context as u64,
            };
            1.0 / self.model.step_time(&shape).as_secs_f64()
        });
        (free / self.decode_s(batch.max(1.0), context) + beside.sum::<f64>()) / self.workers
    }

    /// A step that only decodes; of a batch that is no whole number between those of the whole numbers about it.
    fn decode_s(&self, batch: f64, context: f64) -> f64 {
        let whole = |batch: f64| {
            let shape = StepShape {
                decode_batch: batch as u32,
                decode_context_tokens: context as u64,
                ..StepShape::default()
            };
            self.model.step_time(&shape).as_secs_f64()
        };
        let below = batch.floor();
        let part = batch - below;
        whole(below) * (1.0 - part) + if part > 0.0 { whole(below + 1.0) * part } else { 0.0 }
    }

    fn send(&mut self, turn: TurnRef) {
        let known = self.shown.show(self.trace, turn);
        let prompt = self.trace.turn(turn).prompt_tokens;
        let tail = (prompt - known).max(1);
        let front_s = self.model.front_end().as_secs_f64();
        let mut lasts_s = front_s;
        let chunk = |begin: u32| Chunk {
            tokens: self.chunk.min(prompt - begin),
            prefix: begin,
        };
        let first = prompt - tail;
        for begin in (first..prompt).step_by(self.chunk as usize) {
            let shape = StepShape {
                prefills: smallvec![chunk(begin)],
                ..StepShape::default()
            };
            lasts_s += self.model.step_time(&shape).as_secs_f64();
        }
        self.prefill_s += lasts_s - front_s;
        self.prompt_tokens += u64::from(prompt);
        self.waiting.push_back(Prefilling {
            turn,
            sent_s: self.now_s,
            lasts_s,
            first_step: chunk(first),
        });
    }

    fn begin_prefills(&mut self) {
        let limit = match self.ideal {
            Ideal::Alone | Ideal::Undisturbed | Ideal::Steady => usize::MAX,
            Ideal::Balanced => self.workers as usize,
        };
        while self.prefilling.len() < limit
            && let Some(prefill) = self.waiting.pop_front()
        {
            let done = instant(self.now_s + prefill.lasts_s);
            self.begun += 1;
            self.prefilling.insert((done.as_nanos(), self.begun), prefill);
        }
    }

    /// The last step of a prefill gives the first token.
    fn end_prefills(&mut self) {
        while let Some(entry) = self.prefilling.first_entry()
            && entry.key().0 <= instant(self.now_s).as_nanos()
        {
            let prefill = entry.remove();
            let turn = self.trace.turn(prefill.turn);
            self.ttfts_s.push(self.now_s - prefill.sent_s);
            self.decoding.push(Decoding {
                turn: prefill.turn,
                sent_s: prefill.sent_s,
                first_token_s: self.now_s,
                left: f64::from(turn.output_tokens - 1),
                context: u64::from(turn.prompt_tokens),
            });
        }
        self.end_answers();
    }

    fn end_answers(&mut self) {
        let (ended, going): (Vec<_>, Vec<_>) = self.decoding.drain(..).partition(|request| request.left <= NOTHING);
        self.decoding = going;
        for request in ended {
            self.latencies_s.push(self.now_s - request.sent_s);
            let after_first = self.trace.turn(request.turn).output_tokens - 1;
            if after_first > 0 {
                self.tpots_s
                    .push((self.now_s - request.first_token_s) / f64::from(after_first));
            }
            self.replay.ended(instant(self.now_s), request.turn);
        }
    }

    fn outcome(self) -> Outcome {
        assert!(self.replay.done(), "a run without a next event has ended");
        let requests = self.latencies_s.len().max(1) as f64;
        let ttft_mean_s = mean(&self.ttfts_s);
        Outcome {
            latency_mean_s: mean(&self.latencies_s),
            ttft_mean_s,
            ttft_p90_s: quantile(&sorted(self.ttfts_s), 900),
            tpot_p90_s: quantile(&sorted(self.tpots_s), 900),
            busy_max_min: None,
            requests_max_min: None,
            errors: 0.0,
            prompt_tokens_mean: Some(self.prompt_tokens as f64 / requests),
        }
    }
}

/// All prompts that were ever shown, block by block: the chain of a prompt's first blocks stands for them.
#[derive(Debug, Default)]
struct Shown {
    chains: BTreeSet<u64>,
    /// The last turn of each agent of each session, of which all is known to be shown.
    last: BTreeMap<(u32, u32), u32>,
}

impl Shown {
    /// A turn's prompt is shown: tokens at its beginning that were shown before.
    fn show(&mut self, trace: &Trace, turn: TurnRef) -> u32 {
        let this = trace.turn(turn);
        let last = self.last.insert((turn.session, this.agent), turn.turn);
        let last = last.map_or(&[][..], |last| &trace.session(turn).turns[last as usize].content);
        let repeats = last
            .iter()
            .zip(this.content.iter())
            .take_while(|(left, right)| left == right)
            .count();
        let (mut chain, mut known, mut all_known) = (0, 0, true);
        for (index, content) in this.content.iter().enumerate() {
            chain = mixed(chain, *content);
            if index < repeats {
                known = index + 1;
            } else if self.chains.insert(chain) {
                all_known = false;
            } else if all_known {
                known = index + 1;
            }
        }
        u32::try_from(known).expect("a prompt has fewer than 2^32 blocks") * trace.block_size
    }
}

/// A chain goes on with this content: SplitMix64's finisher over both.
const fn mixed(chain: u64, content: u64) -> u64 {
    let mut bits = chain.rotate_left(5) ^ content.wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_add(chain);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

fn seconds(at: Instant) -> f64 {
    at.as_nanos() as f64 / 1e9
}

/// The nanosecond at or after this time, so that what is due then is due.
fn instant(seconds: f64) -> Instant {
    Instant::ZERO + Duration::from_nanos((seconds * 1e9).ceil() as u64)
}

#[cfg(test)]
mod tests;
