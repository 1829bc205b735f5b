//! `gen:swe52`: a stand-in for the validation report's trace, which is not public.
//!
//! From the report: 4,449 requests in 52 sessions of one agent, about 12,000 tokens of boilerplate that all share, blocks
//! of 24 tokens, longest prompts of 31,344 tokens (the sessions that did well, about a quarter) to 62,043 (the quarter that
//! starved), gaps between turns p10 1.6 s, p50 2.5, p90 7.8, p99 25.1, max 261.
//!
//! Inferred from those peaks: they are log-normal, as sizes of sessions are elsewhere. The one log-normal distribution whose
//! lowest and highest quarter have those two means has median 43,600 and sigma 0.27. Assumed: all sessions grow alike, so a
//! session's turns are in proportion to how far it grows; with 4,449 requests that makes about 375 tokens a turn. The
//! tasks that sessions begin with are assumed, too.
//!
//! Inferred from the paper's latencies, not stated anywhere: outputs, log-normal with median 42 and sigma 1.4. A turn's
//! growth is the answer before it and what the tools said.

use super::GeneratorError;
use super::history::{Boilerplate, History, Ids};
use super::parameters::Parameters;
use crate::content::Scope;
use crate::draw::{Distribution, shuffle};
use crate::ids::share;
use crate::trace::{Session, Turn};
use homing_units::{Duration, rng_for};

pub(super) const BLOCK_SIZE: u32 = 24;
const SESSIONS: u32 = 52;
const REQUESTS: u32 = 4449;
pub(super) const BOILERPLATE: Boilerplate = Boilerplate {
    number: 0,
    tokens: 12_000,
};

/// The longest prompts of the sessions, in tokens.
const PEAK: Distribution = Distribution::LogNormal {
    median: 43_600.0,
    sigma: 0.27,
};

/// The task that a session begins with, in tokens: 1,733 on average.
const TASK: Distribution = Distribution::LogNormal {
    median: 1600.0,
    sigma: 0.4,
};
const TASK_MEAN: f64 = 1733.0;

/// A session grows by so many tokens at least: it has two turns.
const SHORTEST: f64 = 1000.0;

/// Tokens of an answer; the agent asks for no more than `OUTPUT_MAX`.
pub(super) const OUTPUT: Distribution = Distribution::LogNormal {
    median: 42.0,
    sigma: 1.4,
};
pub(super) const OUTPUT_MAX: f64 = 4096.0;

/// Tokens that the tools add after an answer: 264 on average, which with the answers makes the growth that the peaks need.
const OBSERVATION: Distribution = Distribution::LogNormal {
    median: 160.0,
    sigma: 1.0,
};

/// Seconds between turns.
pub(super) const GAP: Distribution = Distribution::Quantiles(&[
    (0.0, 0.9),
    (0.1, 1.6),
    (0.5, 2.5),
    (0.9, 7.8),
    (0.99, 25.1),
    (1.0, 261.0),
]);

/// The generator's parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Config {
    /// Sessions; requests are in proportion.
    sessions: u32,
}

impl Config {
    pub(super) fn take(parameters: &mut Parameters) -> Result<Self, GeneratorError> {
        let config = Self {
            sessions: parameters.number("sessions", SESSIONS, 1..=super::SESSIONS_MAX)?,
        };
        parameters.finish()?;
        Ok(config)
    }
}

/// The block size and the sessions.
pub(super) fn sessions(config: &Config, seed: u64) -> (u32, Vec<Session>) {
    let mut rng = rng_for(seed, "gen:swe52");
    let mut turns = turns_of(config.sessions);
    shuffle(&mut turns, &mut rng);
    let total = turns.iter().sum::<u32>() as usize;
    let mut draws = Draws {
        tasks: TASK.spread(turns.len(), &mut rng),
        outputs: OUTPUT.spread(total, &mut rng),
        observations: OBSERVATION.spread(total, &mut rng),
        gaps: GAP.spread(total, &mut rng),
    };
    let sessions = turns
        .iter()
        .enumerate()
        .map(|(index, &turns)| session(index as u32, turns, &mut draws))
        .collect();
    (BLOCK_SIZE, sessions)
}

/// The turns of each session, rising with its peak, in the right total.
fn turns_of(sessions: u32) -> Vec<u32> {
    let count = f64::from(sessions);
    let first = f64::from(BOILERPLATE.tokens) + TASK_MEAN;
    let growth = |index: u32| (PEAK.at((f64::from(index) + 0.5) / count) - first).max(SHORTEST);
    let all: f64 = (0..sessions).map(growth).sum();
    let turns_a_token = f64::from(REQUESTS) * count / f64::from(SESSIONS) / all;
    // Rounding the running sum, and not each part, keeps the total.
    let mut grown = 0.0;
    let mut begun = 0;
    (0..sessions)
        .map(|index| {
            grown += growth(index);
            let until = (grown * turns_a_token).round() as u32;
            until - std::mem::replace(&mut begun, until)
        })
        .collect()
}

/// The values that are still to be handed out.
struct Draws {
    tasks: Vec<f64>,
    outputs: Vec<f64>,
    observations: Vec<f64>,
    gaps: Vec<f64>,
}

/// The next value; there is one for each turn.
fn next(values: &mut Vec<f64>) -> f64 {
    values.pop().expect("there is one for each turn")
}

fn session(index: u32, count: u32, draws: &mut Draws) -> Session {
    let mut ids = Ids::new(index, Scope::Root);
    let mut history = History::new(BLOCK_SIZE, BOILERPLATE);
    history.append(next(&mut draws.tasks).round() as u32, &mut ids);
    let mut turns: Vec<Turn> = Vec::with_capacity(count as usize);
    for turn in 0..count {
        let gap = Duration::from_secs_f64(next(&mut draws.gaps));
        let observation = next(&mut draws.observations).round().max(1.0) as u32;
        if let Some(before) = turns.last() {
            history.append(before.output_tokens + observation, &mut ids);
        }
        turns.push(Turn {
            agent: 0,
            prompt_tokens: history.tokens,
            output_tokens: next(&mut draws.outputs).round().clamp(1.0, OUTPUT_MAX) as u32,
            content: history.content.clone().into(),
            after: turn.checked_sub(1).into_iter().collect(),
            gap: if turn == 0 { Duration::ZERO } else { gap },
        });
    }
    share(&mut turns);
    Session {
        id: format!("swe-{index:04}"),
        start: None,
        turns,
    }
}

#[cfg(test)]
mod tests {
    use crate::generate::generate;
    use crate::trace::{Trace, Turn};

    /// Whether a figure is within `tolerance` of what it should be.
    fn check(name: &str, seed: u64, figure: f64, expected: f64, tolerance: f64) {
        assert!(
            (figure / expected - 1.0).abs() <= tolerance,
            "{name} is {figure}, not {expected}; seed {seed}"
        );
    }

    fn quantile(mut values: Vec<f64>, share: f64) -> f64 {
        values.sort_by(f64::total_cmp);
        values[((values.len() - 1) as f64 * share).round() as usize]
    }

    fn mean(values: &[f64]) -> f64 {
        values.iter().sum::<f64>() / values.len() as f64
    }

    fn followers(trace: &Trace) -> impl Iterator<Item = (&Turn, &Turn)> {
        trace
            .sessions
            .iter()
            .flat_map(|session| session.turns.windows(2))
            .map(|pair| (&pair[0], &pair[1]))
    }

    #[test]
    fn it_has_the_figures_of_the_report() {
        for seed in [1, 2] {
            let trace = generate("gen:swe52", seed).expect("a good name");
            trace.check_invariants();
            assert_eq!(
                (trace.turn_count(), trace.sessions.len(), trace.block_size),
                (4449, 52, 24)
            );
            let gaps: Vec<f64> = followers(&trace).map(|(_, turn)| turn.gap.as_secs_f64()).collect();
            for (share, expected) in [(0.1, 1.6), (0.5, 2.5), (0.9, 7.8), (0.99, 25.1), (1.0, 261.0)] {
                check("gap", seed, quantile(gaps.clone(), share), expected, 0.05);
            }
            let outputs: Vec<f64> = trace
                .sessions
                .iter()
                .flat_map(|s| &s.turns)
                .map(|turn| f64::from(turn.output_tokens))
                .collect();
            check("median output", seed, quantile(outputs.clone(), 0.5), 42.0, 0.02);
            check("mean output", seed, mean(&outputs), 111.0, 0.03);
            let growth: Vec<f64> = followers(&trace)
                .map(|(before, turn)| f64::from(turn.prompt_tokens - before.prompt_tokens))
                .collect();
            check("growth", seed, mean(&growth), 375.0, 0.03);
            let mut peaks: Vec<f64> = trace
                .sessions
                .iter()
                .map(|s| f64::from(s.turns.last().expect("it has turns").prompt_tokens))
                .collect();
            peaks.sort_by(f64::total_cmp);
            check("peak of the shortest quarter", seed, mean(&peaks[..13]), 31_344.0, 0.04);
            check("peak of the longest quarter", seed, mean(&peaks[39..]), 62_043.0, 0.04);
        }
    }

    #[test]
    fn all_sessions_share_the_boilerplate_and_nothing_else() {
        let trace = generate("gen:swe52:sessions=4", 1).expect("a good name");
        assert_eq!(trace.turn_count(), 342, "requests are in proportion");
        let [first, second] = [0, 1].map(|index: usize| &trace.sessions[index].turns[0].content);
        let shared = first.iter().zip(second).take_while(|(a, b)| a == b).count();
        assert_eq!(shared, 12_000 / 24);
        assert!(!first[shared..].iter().any(|id| second.contains(id)));
        for (before, turn) in followers(&trace) {
            assert!(turn.content.starts_with(&before.content), "history only grows");
            assert!(
                turn.prompt_tokens > before.prompt_tokens + before.output_tokens,
                "the answer is part of it"
            );
        }
    }
}
