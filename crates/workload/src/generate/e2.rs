//! `gen:e2`: a stand-in for the trace of the failure-mode taxonomy's runs E2 and E3, which is not public.
//!
//! From the taxonomy: 1,285 requests (section 1.1: 1,054 of 1,285 failed); 50 sessions (section 3.2: 25 of 50 were hit by
//! evictions) of coding agents; about 12,000 tokens of system prompt and tools that all sessions share, in blocks of 24
//! tokens (section 2.2); first prompts of 50,000 to 90,000 tokens, all sent within the first 30 to 60 s at time scale 1
//! (section 4); an eviction freed what only one session held, 67,726 tokens on average (section 3.2); the two workers
//! that were warm first drew all sessions that came after (section 2.2).
//!
//! Inferred: first prompts lie evenly from 50,000 to 90,000 tokens, 70,000 on average. If what an eviction frees is a
//! session near its end, sessions end at 67,726 tokens of their own beside the boilerplate, which makes 394 tokens of
//! growth a turn (the validation report's trace has about 390).
//!
//! Assumed, because the taxonomy is silent, and written down before any policy ran on it: turns a session log-normal
//! with sigma 0.4; outputs and gaps between turns as in `gen:swe52`, whose agent it seems to be; two sessions start at
//! once (0 and 0.5 s, before either can be warm), the others at random from 15 s, when both first prompts are done on
//! any hardware of the papers, to 60 s.

use super::GeneratorError;
use super::history::{Boilerplate, History, Ids};
use super::parameters::Parameters;
use super::pool::Pool;
use super::swe52::{BLOCK_SIZE, BOILERPLATE, GAP, OUTPUT, OUTPUT_MAX};
use super::{SESSIONS_MAX, apportioned, proportional};
use crate::content::Scope;
use crate::draw::{Distribution, shuffle, unit};
use crate::ids::share;
use crate::trace::{Session, Turn};
use homing_units::{Duration, rng_for};

const SESSIONS: u32 = 50;
const REQUESTS: u32 = 1285;

/// Tokens of the first prompt. The middle is set so that the mean is 70,000.
const FIRST: Distribution = Distribution::Quantiles(&[(0.0, 50_000.0), (0.5, 70_000.0), (1.0, 90_000.0)]);

/// The least of them: a boilerplate fits into every first prompt.
const FIRST_MIN: u32 = 50_000;

/// Turns of a session, before they are scaled to the right total.
const TURNS: Distribution = Distribution::LogNormal {
    median: 1.0,
    sigma: 0.4,
};

/// Tokens that the tools add after an answer: 283 on average, which with answers of 111 makes the growth.
const OBSERVATION: Distribution = Distribution::LogNormal {
    median: 172.0,
    sigma: 1.0,
};

/// Sessions that come first, and the time between them.
const LEADERS: usize = 2;
const LEADER_GAP_S: f64 = 0.5;

/// The generator's parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Config {
    /// Sessions; requests are in proportion.
    sessions: u32,
    /// When the sessions after the first two begin to come, in seconds.
    lead_s: u32,
    /// When the last session has started, in seconds.
    window_s: u32,
    /// Tokens of the system prompt and tools that all sessions share.
    boilerplate: u32,
}

impl Config {
    pub(super) fn take(parameters: &mut Parameters) -> Result<Self, GeneratorError> {
        let lead_s = parameters.number("lead_s", 15, 1..=3600)?;
        let config = Self {
            sessions: parameters.number("sessions", SESSIONS, 1..=SESSIONS_MAX)?,
            lead_s,
            window_s: parameters.number("window_s", 60.max(lead_s), lead_s..=86_400)?,
            boilerplate: parameters.number("boilerplate", BOILERPLATE.tokens, 0..=FIRST_MIN)?,
        };
        parameters.finish()?;
        Ok(config)
    }
}

/// The block size and the sessions.
pub(super) fn sessions(config: &Config, seed: u64) -> (u32, Vec<Session>) {
    let mut rng = rng_for(seed, "gen:e2");
    let count = config.sessions as usize;
    let total = proportional(REQUESTS, config.sessions, SESSIONS);
    let weights: Vec<f64> = (0..count)
        .map(|index| TURNS.at((index as f64 + 0.5) / count as f64))
        .collect();
    let mut turns = apportioned(&weights, total);
    shuffle(&mut turns, &mut rng);
    let mut firsts = Pool::spread(FIRST, count, &mut rng);
    let mut draws = Draws {
        outputs: Pool::spread(OUTPUT, total as usize, &mut rng),
        observations: Pool::spread(OBSERVATION, total as usize, &mut rng),
        gaps: Pool::spread(GAP, total as usize, &mut rng),
    };
    let (lead, window) = (f64::from(config.lead_s), f64::from(config.window_s));
    let mut starts: Vec<f64> = (LEADERS..count)
        .map(|_| lead + (window - lead) * unit(&mut rng))
        .collect();
    starts.sort_by(f64::total_cmp);
    let leaders = (0..LEADERS.min(count)).map(|index| index as f64 * LEADER_GAP_S);
    let plan = leaders.chain(starts).zip(turns).enumerate();
    let sessions = plan
        .map(|(index, (start, turns))| Session {
            id: format!("e2-{index:04}"),
            start: Some(Duration::from_secs_f64(start)),
            turns: turns_of(index as u32, turns, first_of(firsts.next(), config), &mut draws),
        })
        .collect();
    (BLOCK_SIZE, sessions)
}

/// The values that are still to be handed out.
struct Draws {
    outputs: Pool,
    observations: Pool,
    gaps: Pool,
}

/// The history with which a session begins: the boilerplate, and so many tokens in all.
struct First {
    boilerplate: Boilerplate,
    tokens: u32,
}

fn first_of(tokens: f64, config: &Config) -> First {
    First {
        boilerplate: Boilerplate {
            tokens: config.boilerplate,
            ..BOILERPLATE
        },
        tokens: tokens.round() as u32,
    }
}

/// The turns of one session, which begins with this prompt.
fn turns_of(session: u32, count: u32, first: First, draws: &mut Draws) -> Vec<Turn> {
    let mut ids = Ids::new(session, Scope::Root);
    let own = first.tokens - first.boilerplate.tokens;
    let mut history = History::new(BLOCK_SIZE, first.boilerplate);
    history.append(own, &mut ids);
    let mut turns: Vec<Turn> = Vec::with_capacity(count as usize);
    for turn in 0..count {
        let gap = Duration::from_secs_f64(draws.gaps.next());
        let observation = draws.observations.next().round().max(1.0) as u32;
        if let Some(before) = turns.last() {
            history.append(before.output_tokens + observation, &mut ids);
        }
        turns.push(Turn {
            agent: 0,
            prompt_tokens: history.tokens,
            output_tokens: draws.outputs.next().round().clamp(1.0, OUTPUT_MAX) as u32,
            content: history.content.clone().into(),
            after: turn.checked_sub(1).into_iter().collect(),
            gap: if turn == 0 { Duration::ZERO } else { gap },
        });
    }
    share(&mut turns);
    turns
}

#[cfg(test)]
mod tests {
    use crate::generate::generate;
    use crate::trace::Session;

    fn check(name: &str, seed: u64, figure: f64, expected: f64, tolerance: f64) {
        assert!(
            (figure / expected - 1.0).abs() <= tolerance,
            "{name} is {figure}, not {expected}; seed {seed}"
        );
    }

    fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
        let count = values.len() as f64;
        values.sum::<f64>() / count
    }

    #[test]
    fn it_has_the_figures_of_the_taxonomy() {
        for seed in [1, 2, 3] {
            let trace = generate("gen:e2", seed).expect("a good name");
            trace.check_invariants();
            assert_eq!(
                (trace.turn_count(), trace.sessions.len(), trace.block_size),
                (1285, 50, 24)
            );
            let first = |session: &Session| f64::from(session.turns[0].prompt_tokens);
            let last = |session: &Session| f64::from(session.turns[session.turns.len() - 1].prompt_tokens);
            let firsts = trace.sessions.iter().map(first);
            assert!(firsts.clone().all(|tokens| (49_999.0..=90_001.0).contains(&tokens)));
            check("first prompt", seed, mean(firsts), 70_000.0, 0.01);
            let own = trace.sessions.iter().map(|session| last(session) - 12_000.0);
            check("own tokens at the end", seed, mean(own), 67_726.0, 0.02);
            let starts: Vec<f64> = trace
                .sessions
                .iter()
                .map(|s| s.start.expect("it has times").as_secs_f64())
                .collect();
            assert_eq!(starts[..2], [0.0, 0.5]);
            assert!(
                starts[2..].iter().all(|start| (15.0..60.0).contains(start)),
                "seed {seed}"
            );
            assert!(starts.is_sorted());
        }
    }

    #[test]
    fn sessions_share_the_boilerplate_alone() {
        let trace = generate("gen:e2:sessions=3:lead_s=100:window_s=100", 1).expect("a good name");
        let contents = [0, 1, 2].map(|index: usize| &trace.sessions[index].turns[0].content);
        let shared = contents[0].iter().zip(contents[1].iter()).take_while(|(a, b)| a == b);
        assert_eq!(shared.count(), 500);
        assert!(!contents[1][500..].iter().any(|id| contents[2].contains(id)));
        assert_eq!(trace.turn_count(), 77, "requests are in proportion");
    }
}
