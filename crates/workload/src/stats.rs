//! What a trace looks like in figures: counts, lengths, gaps, and how much of it repeats.
//!
//! The figures are those by which traces of agents are compared: how long sessions are, what a turn adds to the prompt
//! before it, how long an agent pauses, how much every session begins with. All but one follow from the trace alone; the
//! idle share needs to know how long turns take, which no trace here keeps, so it assumes a service and says so. Nothing
//! here depends on a policy or a cluster.

use crate::content::prompt_of;
use crate::trace::{Session, Trace, Turn, TurnRef};
use homing_kv::BlockMap;
use homing_units::Duration;
use serde::Serialize;
use std::collections::BTreeMap;

/// Tails below this many tokens are light: one decode step can carry them.
pub const LIGHT_TAIL_TOKENS: u32 = 2048;

/// Tails from this many tokens are heavy.
pub const HEAVY_TAIL_TOKENS: u32 = 16_384;

/// Gaps of an hour and more say that a session was left, not that it idles.
pub const IDLE_GAP_MAX: Duration = Duration::from_secs(3600);

/// The service that the idle share assumes: seconds for each token of an answer, and new tokens of a prompt a second.
pub const ASSUMED_SECONDS_PER_OUTPUT_TOKEN: f64 = 0.02;
/// See [`ASSUMED_SECONDS_PER_OUTPUT_TOKEN`].
pub const ASSUMED_PREFILL_TOKENS_PER_SECOND: f64 = 10_000.0;

/// The figures of a trace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TraceStats {
    /// Names this form: `homing.trace-stats/1`.
    pub schema: &'static str,
    /// The trace's name.
    pub trace: String,
    /// Tokens in a block of its content.
    pub block_size: u32,
    /// Whether every session has a recorded start.
    pub recorded_starts: bool,
    /// Sessions.
    pub sessions: u64,
    /// Turns of all agents.
    pub requests: u64,
    /// Agents other than the sessions' roots.
    pub sub_agents: u64,
    /// Turns of those.
    pub sub_agent_requests: u64,
    /// From the first recorded start to the last, in seconds.
    pub starts_span_s: Option<f64>,
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Tokens of all answers.
    pub output_tokens: u64,
    /// Turns of the root agent in a session.
    pub turns_per_session: Option<Quantiles>,
    /// Tokens of a prompt.
    pub prompt_length: Option<Quantiles>,
    /// Tokens of a session's first prompt.
    pub first_prompt_length: Option<Quantiles>,
    /// Tokens of the root agent's last prompt.
    pub last_prompt_length: Option<Quantiles>,
    /// Tokens of an answer.
    pub output_length: Option<Quantiles>,
    /// Seconds between what a turn waits for and the turn, for turns that wait.
    pub gap_s: Option<Quantiles>,
    /// What a later turn's prompt adds to the prompt before it.
    pub tail: Tails,
    /// Leading tokens of a session's first prompt that another session's begins with too, in whole blocks.
    pub boilerplate_length: Option<Quantiles>,
    /// Those tokens, as a share of all first prompts' tokens.
    pub boilerplate_share: f64,
    /// Share of later turns' prompt tokens that the same agent's prompt before has at the same place.
    pub repeated_share: f64,
    /// Share of all prompt tokens that some other prompt of the trace has at the same place, counting each once as new:
    /// what a cache without a limit would hit.
    pub unlimited_cache_share: f64,
    /// Later turns that change what the prompt before had, beyond its last whole block.
    pub rewrites: Rewrites,
    /// Share of the time that contexts are held for which they wait for the client.
    pub idle: Idle,
}

/// Quantiles, by nearest rank, and the mean.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Quantiles {
    /// How many values there are.
    pub count: u64,
    /// Their mean.
    pub mean: f64,
    /// The least.
    pub min: f64,
    /// A tenth lies at or below.
    pub p10: f64,
    /// The median.
    pub p50: f64,
    /// Three quarters lie at or below.
    pub p75: f64,
    /// Nine tenths lie at or below.
    pub p90: f64,
    /// 99% lie at or below.
    pub p99: f64,
    /// The greatest.
    pub max: f64,
}

/// What later turns add.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Tails {
    /// Tokens of a later turn's prompt beyond the whole blocks that it shares with the one before.
    pub length: Option<Quantiles>,
    /// Share of tails below [`LIGHT_TAIL_TOKENS`].
    pub light_share: f64,
    /// Their share of all tails' tokens.
    pub light_token_share: f64,
    /// Share of tails from [`HEAVY_TAIL_TOKENS`].
    pub heavy_share: f64,
    /// Their share of all tails' tokens.
    pub heavy_token_share: f64,
}

/// Rewritten histories.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rewrites {
    /// How many.
    pub count: u64,
    /// As a share of later turns.
    pub share: f64,
    /// Tokens that they made new.
    pub length: Option<Quantiles>,
}

/// How much of the time that contexts are held they wait. Gaps under [`IDLE_GAP_MAX`] count.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Idle {
    /// Token-seconds of gaps over those and the assumed service.
    pub share: f64,
    /// Assumed, because traces do not keep it.
    pub assumed_seconds_per_output_token: f64,
    /// Assumed likewise.
    pub assumed_prefill_tokens_per_second: f64,
}

impl Quantiles {
    /// Of these values; nothing where there are none.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Option<Self> {
        if values.is_empty() {
            return None;
        }
        values.sort_by(f64::total_cmp);
        let count = values.len();
        let at = |per_cent: usize| values[(count * per_cent).div_ceil(100).max(1) - 1];
        Some(Self {
            count: count as u64,
            mean: values.iter().sum::<f64>() / count as f64,
            min: values[0],
            p10: at(10),
            p50: at(50),
            p75: at(75),
            p90: at(90),
            p99: at(99),
            max: values[count - 1],
        })
    }
}

/// Measures a trace. It takes time and memory in proportion to the trace's different blocks.
#[must_use]
pub fn stats(trace: &Trace) -> TraceStats {
    let mut turns = TurnFigures::default();
    for session in &trace.sessions {
        turns.add(session, trace.block_size);
    }
    let boilerplate = boilerplate(trace);
    let first: f64 = turns.first.iter().sum();
    TraceStats {
        schema: "homing.trace-stats/1",
        trace: trace.name.clone(),
        block_size: trace.block_size,
        recorded_starts: trace.has_times(),
        sessions: trace.sessions.len() as u64,
        requests: trace.turn_count() as u64,
        sub_agents: turns.sub_agents,
        sub_agent_requests: turns.sub_agent_requests,
        starts_span_s: starts_span(trace),
        prompt_tokens: turns.prompt_tokens,
        output_tokens: turns.output_tokens,
        boilerplate_share: share(boilerplate.iter().sum(), first),
        boilerplate_length: Quantiles::of(boilerplate),
        repeated_share: share(turns.repeated, turns.later_tokens),
        unlimited_cache_share: unlimited_cache_share(trace, turns.prompt_tokens),
        tail: turns.tails(),
        rewrites: turns.rewrites(),
        idle: turns.idle(),
        turns_per_session: Quantiles::of(turns.roots),
        prompt_length: Quantiles::of(turns.prompts),
        first_prompt_length: Quantiles::of(turns.first),
        last_prompt_length: Quantiles::of(turns.last),
        output_length: Quantiles::of(turns.outputs),
        gap_s: Quantiles::of(turns.gaps),
    }
}

/// Whole blocks that two contents begin with.
fn common(one: &[u64], other: &[u64]) -> usize {
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
}

/// A part of a whole; 0 of nothing.
fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

fn starts_span(trace: &Trace) -> Option<f64> {
    let starts = || trace.sessions.iter().filter_map(|session| session.start);
    let span = starts().max()?.saturating_sub(starts().min()?);
    trace.has_times().then_some(span.as_secs_f64())
}

/// Tokens of each session's first prompt that some other session's first prompt begins with too. Of all prompts in order,
/// a prompt's neighbours share the most with it.
fn boilerplate(trace: &Trace) -> Vec<f64> {
    let mut firsts: Vec<&[u64]> = trace.sessions.iter().map(first_content).collect();
    firsts.sort_unstable();
    let shared: Vec<usize> = firsts.windows(2).map(|pair| common(pair[0], pair[1])).collect();
    let blocks = (0..firsts.len()).map(|index| {
        let before = index.checked_sub(1).map_or(0, |before| shared[before]);
        before.max(shared.get(index).copied().unwrap_or(0))
    });
    blocks
        .map(|blocks| blocks as f64 * f64::from(trace.block_size))
        .collect()
}

fn first_content(session: &Session) -> &[u64] {
    session.turns.first().map_or(&[], |turn| &turn.content[..])
}

/// Each different block at its place is computed once, and the rest is found.
fn unlimited_cache_share(trace: &Trace, prompt_tokens: u64) -> f64 {
    let mut seen: BlockMap<()> = BlockMap::default();
    let mut found = 0_u64;
    for (session, turns) in trace.sessions.iter().enumerate() {
        for turn in 0..turns.turns.len() {
            let at = TurnRef {
                session: session as u32,
                turn: turn as u32,
            };
            let known = |hash| seen.insert(hash, ()).is_some();
            found += prompt_of(trace, at)
                .blocks
                .iter()
                .copied()
                .map(known)
                .filter(|&known| known)
                .count() as u64;
        }
    }
    share((found * u64::from(trace.block_size)) as f64, prompt_tokens as f64)
}

/// Values of all turns.
#[derive(Default)]
struct TurnFigures {
    prompt_tokens: u64,
    output_tokens: u64,
    sub_agents: u64,
    sub_agent_requests: u64,
    roots: Vec<f64>,
    prompts: Vec<f64>,
    first: Vec<f64>,
    last: Vec<f64>,
    outputs: Vec<f64>,
    gaps: Vec<f64>,
    tails: Vec<f64>,
    rewritten: Vec<f64>,
    /// Tokens of later turns' prompts, and those of them that the prompt before has.
    later_tokens: f64,
    repeated: f64,
    /// Token-seconds.
    idle: f64,
    busy: f64,
}

impl TurnFigures {
    fn add(&mut self, session: &Session, block_size: u32) {
        let mut last_of: BTreeMap<u32, &Turn> = BTreeMap::new();
        let mut roots = 0_u64;
        for turn in &session.turns {
            self.add_turn(turn, last_of.get(&turn.agent).copied(), block_size);
            last_of.insert(turn.agent, turn);
            roots += u64::from(turn.agent == 0);
        }
        let sub_agents = last_of.keys().filter(|&&agent| agent != 0).count() as u64;
        self.sub_agents += sub_agents;
        self.sub_agent_requests += session.turns.len() as u64 - roots;
        self.roots.push(roots as f64);
        self.first
            .extend(session.turns.first().map(|turn| f64::from(turn.prompt_tokens)));
        self.last
            .extend(last_of.get(&0).map(|turn| f64::from(turn.prompt_tokens)));
    }

    fn add_turn(&mut self, turn: &Turn, before: Option<&Turn>, block_size: u32) {
        let (prompt, output) = (f64::from(turn.prompt_tokens), f64::from(turn.output_tokens));
        self.prompt_tokens += u64::from(turn.prompt_tokens);
        self.output_tokens += u64::from(turn.output_tokens);
        self.prompts.push(prompt);
        self.outputs.push(output);
        if !turn.after.is_empty() {
            self.gaps.push(turn.gap.as_secs_f64());
        }
        let mut new = prompt;
        if let Some(before) = before {
            let shared = common(&before.content, &turn.content);
            new = prompt - shared as f64 * f64::from(block_size);
            self.tails.push(new);
            self.later_tokens += prompt;
            self.repeated += prompt - new;
            if shared + 1 < before.content.len() {
                self.rewritten.push(new);
            }
            if turn.gap < IDLE_GAP_MAX {
                self.idle += f64::from(before.prompt_tokens) * turn.gap.as_secs_f64();
            }
        }
        let service = new / ASSUMED_PREFILL_TOKENS_PER_SECOND + output * ASSUMED_SECONDS_PER_OUTPUT_TOKEN;
        self.busy += prompt * service;
    }

    fn tails(&self) -> Tails {
        let all: f64 = self.tails.iter().sum();
        let part = |holds: &dyn Fn(f64) -> bool| {
            let those = || self.tails.iter().copied().filter(|&tail| holds(tail));
            (
                share(those().count() as f64, self.tails.len() as f64),
                share(those().sum(), all),
            )
        };
        let (light_share, light_token_share) = part(&|tail| tail < f64::from(LIGHT_TAIL_TOKENS));
        let (heavy_share, heavy_token_share) = part(&|tail| tail >= f64::from(HEAVY_TAIL_TOKENS));
        Tails {
            length: Quantiles::of(self.tails.clone()),
            light_share,
            light_token_share,
            heavy_share,
            heavy_token_share,
        }
    }

    fn rewrites(&self) -> Rewrites {
        Rewrites {
            count: self.rewritten.len() as u64,
            share: share(self.rewritten.len() as f64, self.tails.len() as f64),
            length: Quantiles::of(self.rewritten.clone()),
        }
    }

    fn idle(&self) -> Idle {
        Idle {
            share: share(self.idle, self.idle + self.busy),
            assumed_seconds_per_output_token: ASSUMED_SECONDS_PER_OUTPUT_TOKEN,
            assumed_prefill_tokens_per_second: ASSUMED_PREFILL_TOKENS_PER_SECOND,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(agent: u32, content: &[u64], tokens: u32, after: &[u32], gap_s: u64) -> Turn {
        Turn {
            agent,
            prompt_tokens: tokens,
            output_tokens: 50,
            content: content.iter().copied().collect(),
            after: after.to_vec(),
            gap: Duration::from_secs(gap_s),
        }
    }

    fn trace(sessions: Vec<Vec<Turn>>) -> Trace {
        let session = |turns| Session {
            id: String::new(),
            start: None,
            turns,
        };
        Trace {
            name: "test".to_owned(),
            block_size: 10,
            sessions: sessions.into_iter().map(session).collect(),
        }
    }

    fn check(name: &str, figure: f64, expected: f64) {
        assert!((figure - expected).abs() < 1e-9, "{name} is {figure}, not {expected}");
    }

    #[test]
    fn figures_of_a_trace_that_can_be_counted_by_hand() {
        let stats = stats(&trace(vec![
            vec![
                turn(0, &[1, 2, 3], 35, &[], 0),
                turn(1, &[9], 12, &[0], 0),
                // It keeps three blocks and adds 20 tokens.
                turn(0, &[1, 2, 3, 4, 5], 50, &[0, 1], 100),
                // A rewrite: two blocks stay.
                turn(0, &[1, 2, 6], 30, &[2], 4000),
            ],
            vec![turn(0, &[1, 2, 8], 33, &[], 0)],
            vec![turn(0, &[7], 10, &[], 0)],
        ]));
        assert_eq!((stats.sessions, stats.requests), (3, 6));
        assert_eq!((stats.sub_agents, stats.sub_agent_requests), (1, 1));
        assert_eq!((stats.prompt_tokens, stats.output_tokens), (170, 300));
        assert!(!stats.recorded_starts && stats.starts_span_s.is_none());
        let quantiles = stats.boilerplate_length.expect("three sessions");
        assert_eq!((quantiles.min, quantiles.p50, quantiles.max), (0.0, 20.0, 20.0));
        check("boilerplate", stats.boilerplate_share, 40.0 / 78.0);
        let tail = stats.tail.length.expect("two later turns");
        assert_eq!((tail.count, tail.min, tail.max), (2, 10.0, 20.0));
        check("repeated", stats.repeated_share, 50.0 / 80.0);
        assert_eq!(stats.rewrites.count, 1);
        check("rewrites", stats.rewrites.share, 0.5);
        // 16 whole blocks, of which 9 differ at their place: 1 2 3 4 5 of the root, 6, 8, 7 and 9.
        check("unlimited cache", stats.unlimited_cache_share, 70.0 / 170.0);
        let gaps = stats.gap_s.expect("three turns wait");
        assert_eq!((gaps.count, gaps.max), (3, 4000.0));
        // The gap of 4,000 s is too long to count: 35 tokens idle for 100 s.
        let busy: f64 = [
            (35.0, 35.0),
            (12.0, 12.0),
            (50.0, 20.0),
            (30.0, 10.0),
            (33.0, 33.0),
            (10.0, 10.0),
        ]
        .iter()
        .map(|(prompt, new)| prompt * (new / 10_000.0 + 1.0))
        .sum();
        check("idle", stats.idle.share, 3500.0 / (3500.0 + busy));
    }

    #[test]
    fn a_trace_without_a_turn_has_no_quantiles() {
        let stats = stats(&trace(Vec::new()));
        assert!(stats.prompt_length.is_none() && stats.tail.length.is_none());
        check("repeated", stats.repeated_share, 0.0);
    }

    #[test]
    fn quantiles_are_values_that_occur() {
        let check = |values: &[f64], expected: (f64, f64, f64, f64)| {
            let quantiles = Quantiles::of(values.to_vec()).expect("some values");
            assert_eq!(
                (quantiles.min, quantiles.p50, quantiles.p90, quantiles.max),
                expected,
                "{values:?}"
            );
        };
        check(&[3.0], (3.0, 3.0, 3.0, 3.0));
        check(&[2.0, 1.0], (1.0, 1.0, 2.0, 2.0));
        check(
            &(0..=100).rev().map(f64::from).collect::<Vec<_>>(),
            (0.0, 50.0, 90.0, 100.0),
        );
    }
}
