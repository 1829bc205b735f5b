//! `gen:agent`: coding-agent sessions with the statistics of real ones.
//!
//! Fitted to the figures of 710 sessions of kv-cache-tester's public traces: turns a session p50 45, p90 155; first
//! prompt p50 24K tokens, last 134K; uncached tail p50 705, p75 1,674, p90 4,077, p99 65,706, with 2.5% of the turns at
//! 16,384 or more; output p50 216, p90 899; gap p50 10 s, p75 34, p90 171, p99 3,039; history rewritten in 2.8% of the
//! turns, median 51K tokens; boilerplate p50 14,947 tokens. Boilerplate is shared by the sessions of one version of the
//! agent. Sub-agents are rare, fork in groups of one to three with boilerplate of their own, and are joined.
//!
//! The heavy tails are rewrites (compaction, edits of early history, expired context); what else appends stays below
//! 16,384 tokens. Figures that no source gives (quantiles below the median, the shape of sub-agents) are read off a
//! sample of the same sessions.

use super::history::{Boilerplate, History, Ids};
use super::parameters::Parameters;
use super::{GeneratorError, SESSIONS_MAX};
use crate::content::Scope;
use crate::draw::{Distribution, unit};
use crate::ids::share;
use crate::trace::{Session, Turn};
use homing_units::{Duration, Rng, rng_for};

/// Root turns of the longest session.
const TURNS_MAX: f64 = 2000.0;

/// The standard deviation of the logarithm of a session's root turns.
const TURNS_SIGMA: f64 = 0.965;

const BOILERPLATE: Distribution = Distribution::Quantiles(&[
    (0.0, 8400.0),
    (0.1, 11_600.0),
    (0.25, 12_800.0),
    (0.5, 14_947.0),
    (0.75, 15_400.0),
    (0.9, 15_800.0),
    (1.0, 21_300.0),
]);

/// Tokens of the first prompt. A quarter of the sessions begin with a history that was resumed.
const FIRST: Distribution = Distribution::Quantiles(&[
    (0.0, 10_900.0),
    (0.1, 16_000.0),
    (0.25, 19_000.0),
    (0.5, 24_000.0),
    (0.75, 100_000.0),
    (0.85, 200_000.0),
    (0.95, 415_000.0),
    (1.0, 800_000.0),
]);

/// Uncached tokens of a turn that only appends: the quantiles of all turns, less the rewrites above.
const TAIL: Distribution = Distribution::Quantiles(&[
    (0.0, 41.0),
    (0.1, 225.0),
    (0.25, 365.0),
    (0.514, 705.0),
    (0.772, 1674.0),
    (0.821, 2048.0),
    (0.926, 4077.0),
    (0.98, 7500.0),
    (1.0, 16_384.0),
]);

/// Uncached tokens of a rewritten history.
const REWRITE: Distribution = Distribution::LogNormal {
    median: 51_000.0,
    sigma: 0.7,
};

/// One rewrite in so many is a compaction: the prompt becomes boilerplate and a summary.
const COMPACTION_SHARE: f64 = 0.15;

const OUTPUT: Distribution = Distribution::LogNormal {
    median: 216.0,
    sigma: 1.113,
};
const OUTPUT_MAX: f64 = 16_000.0;

/// Seconds between a root agent's turns: tool runs and people.
const GAP: Distribution = Distribution::Quantiles(&[
    (0.0, 0.5),
    (0.1, 4.0),
    (0.25, 6.0),
    (0.5, 10.0),
    (0.75, 34.0),
    (0.9, 171.0),
    (0.99, 3039.0),
    (1.0, 77_000.0),
]);

/// What a sub-agent knows before its task; it grows faster and pauses less than the root.
const SUB_BOILERPLATE_TOKENS: u32 = 8700;
const SUB_TASK: Distribution = Distribution::LogNormal {
    median: 9000.0,
    sigma: 0.3,
};
const SUB_TURNS: Distribution = Distribution::LogNormal {
    median: 10.0,
    sigma: 0.5,
};
const SUB_TURNS_MAX: f64 = 60.0;
const SUB_GROWTH: f64 = 2.5;
const SUB_GAP: Distribution = Distribution::LogNormal {
    median: 3.0,
    sigma: 0.5,
};

/// Seconds from a group's end to the turn that joins it.
const JOIN_GAP: Distribution = Distribution::LogNormal {
    median: 25.0,
    sigma: 0.6,
};

/// Sub-agents of a group: one, with these chances of a second and a third.
const SECOND_SUB_AGENT: f64 = 0.4;
const THIRD_SUB_AGENT: f64 = 0.15;

/// The generator's parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Config {
    sessions: u32,
    /// The median of a session's root turns.
    turns: u32,
    /// Versions of the agent; sessions of one version share its boilerplate.
    versions: u32,
    /// No prompt is longer.
    context: u32,
    /// Share of the turns that rewrite history.
    rewrites: f64,
    /// Share of the root turns that fork sub-agents.
    subagents: f64,
    block: u32,
}

impl Config {
    pub(super) fn take(parameters: &mut Parameters) -> Result<Self, GeneratorError> {
        let config = Self {
            sessions: parameters.number("sessions", 60, 1..=SESSIONS_MAX)?,
            turns: parameters.number("turns", 45, 1..=1000)?,
            versions: parameters.number("versions", 3, 1..=1000)?,
            context: parameters.number("context", 1_000_000, 32_768..=1_000_000)?,
            rewrites: parameters.share("rewrites", 0.028)?,
            subagents: parameters.share("subagents", 0.0011)?,
            block: parameters.number("block", 64, 1..=4096)?,
        };
        parameters.finish()?;
        Ok(config)
    }
}

/// The block size and the sessions.
pub(super) fn sessions(config: &Config, seed: u64) -> (u32, Vec<Session>) {
    let mut rng = rng_for(seed, "gen:agent");
    let turns = Distribution::LogNormal {
        median: f64::from(config.turns),
        sigma: TURNS_SIGMA,
    };
    let turns = turns.spread(config.sessions as usize, &mut rng);
    let firsts = FIRST.spread(config.sessions as usize, &mut rng);
    let plan = turns.into_iter().zip(firsts).enumerate();
    let sessions = plan
        .map(|(index, (turns, first))| {
            let mut builder = Builder::new(config, index as u32, rng_for(seed, &format!("gen:agent:{index}")));
            builder.root(turns.round().clamp(1.0, TURNS_MAX) as u32, first.round() as u32);
            share(&mut builder.turns);
            Session {
                id: format!("agent-{index:04}"),
                start: None,
                turns: builder.turns,
            }
        })
        .collect();
    (config.block, sessions)
}

/// Builds the turns of one session.
struct Builder<'a> {
    config: &'a Config,
    rng: Rng,
    version: u32,
    root_ids: Ids,
    sub_ids: Ids,
    agents: u32,
    turns: Vec<Turn>,
}

impl<'a> Builder<'a> {
    fn new(config: &'a Config, session: u32, mut rng: Rng) -> Self {
        let version = (unit(&mut rng) * f64::from(config.versions)) as u32;
        Self {
            config,
            version,
            root_ids: Ids::new(session, Scope::Root),
            sub_ids: Ids::new(session, Scope::SubAgents),
            agents: 1,
            turns: Vec::new(),
            rng,
        }
    }

    /// The root agent's turns, and the sub-agents that they fork.
    fn root(&mut self, count: u32, first: u32) {
        let boilerplate = self.boilerplate();
        let mut history = History::new(self.config.block, boilerplate);
        let task = first.min(self.config.context).saturating_sub(boilerplate.tokens);
        history.append(task.max(1), &mut self.root_ids);
        let mut last = self.push(0, &history, Vec::new(), 0.0);
        for _ in 1..count {
            let joined = self.fork(last);
            self.grow(&mut history, boilerplate.tokens);
            last = if joined.is_empty() {
                let gap = GAP.draw(&mut self.rng);
                self.push(0, &history, vec![last], gap)
            } else {
                let gap = JOIN_GAP.draw(&mut self.rng);
                self.push(0, &history, joined, gap)
            };
        }
    }

    /// The boilerplate of this session's version: versions are spread evenly over the distribution.
    fn boilerplate(&self) -> Boilerplate {
        let share = (f64::from(self.version) + 0.5) / f64::from(self.config.versions);
        Boilerplate {
            number: self.version,
            tokens: BOILERPLATE.at(share).round() as u32,
        }
    }

    /// Makes the root's prompt what it is a turn later.
    fn grow(&mut self, history: &mut History, boilerplate: u32) {
        let tail = TAIL.draw(&mut self.rng).round() as u32;
        let full = history.tokens + tail > self.config.context;
        if !full && unit(&mut self.rng) >= self.config.rewrites {
            history.append_uncached(tail, &mut self.root_ids);
            return;
        }
        let rewritten = REWRITE.draw(&mut self.rng).round() as u32;
        let compacted = full || unit(&mut self.rng) < COMPACTION_SHARE;
        let tokens = if compacted {
            boilerplate + rewritten
        } else {
            history.tokens.max(boilerplate + rewritten)
        };
        // A compaction keeps the boilerplate; an edit keeps what was before it.
        let tokens = tokens.min(self.config.context);
        history.rewrite(tokens.saturating_sub(rewritten), tokens, &mut self.root_ids);
    }

    /// Perhaps forks a group of sub-agents after turn `parent`. Returns their last turns.
    fn fork(&mut self, parent: u32) -> Vec<u32> {
        if unit(&mut self.rng) >= self.config.subagents {
            return Vec::new();
        }
        let more = unit(&mut self.rng);
        let group = 1 + u32::from(more < SECOND_SUB_AGENT) + u32::from(more < THIRD_SUB_AGENT);
        (0..group).map(|_| self.sub_agent(parent)).collect()
    }

    /// The turns of one sub-agent. Returns its last.
    fn sub_agent(&mut self, parent: u32) -> u32 {
        let agent = self.agents;
        self.agents += 1;
        // Numbers after those of the root's versions.
        let boilerplate = Boilerplate {
            number: self.config.versions + self.version,
            tokens: SUB_BOILERPLATE_TOKENS,
        };
        let mut history = History::new(self.config.block, boilerplate);
        history.append(SUB_TASK.draw(&mut self.rng).round() as u32, &mut self.sub_ids);
        let mut last = self.push(agent, &history, vec![parent], 0.0);
        let count = SUB_TURNS.draw(&mut self.rng).round().clamp(1.0, SUB_TURNS_MAX) as u32;
        for _ in 1..count {
            let tail = (TAIL.draw(&mut self.rng) * SUB_GROWTH).round() as u32;
            if history.tokens + tail > self.config.context {
                break;
            }
            history.append_uncached(tail, &mut self.sub_ids);
            let gap = SUB_GAP.draw(&mut self.rng);
            last = self.push(agent, &history, vec![last], gap);
        }
        last
    }

    /// Adds a turn with this prompt. Returns its index.
    fn push(&mut self, agent: u32, history: &History, after: Vec<u32>, gap_s: f64) -> u32 {
        let index = u32::try_from(self.turns.len()).expect("turns and sub-agents of a session are bounded");
        self.turns.push(Turn {
            agent,
            prompt_tokens: history.tokens,
            output_tokens: OUTPUT.draw(&mut self.rng).round().clamp(1.0, OUTPUT_MAX) as u32,
            content: history.content.clone().into(),
            after,
            gap: Duration::from_secs_f64(gap_s),
        });
        index
    }
}

#[cfg(test)]
mod tests {
    use crate::generate::generate;
    use crate::trace::{Session, Trace, Turn};

    fn trace(name: &str, seed: u64) -> Trace {
        let trace = generate(name, seed).expect("a good name");
        trace.check_invariants();
        trace
    }

    fn roots(session: &Session) -> Vec<&Turn> {
        session.turns.iter().filter(|turn| turn.agent == 0).collect()
    }

    fn shared_blocks(before: &Turn, turn: &Turn) -> u32 {
        before
            .content
            .iter()
            .zip(&turn.content)
            .take_while(|(a, b)| a == b)
            .count() as u32
    }

    /// Whether the quantiles of `values` are within `tolerance` of what they should be.
    fn check(name: &str, mut values: Vec<f64>, quantiles: &[(f64, f64)], tolerance: f64) {
        values.sort_by(f64::total_cmp);
        for &(share, expected) in quantiles {
            let value = values[((values.len() - 1) as f64 * share).round() as usize];
            let off = value / expected - 1.0;
            assert!(
                off.abs() <= tolerance,
                "{name} at {share} is {value}, not {expected}, for seed {SEED}"
            );
        }
    }

    const SEED: u64 = 1;

    #[test]
    fn it_has_the_figures_of_real_sessions() {
        let trace = trace("gen:agent:sessions=150", SEED);
        let sessions: Vec<Vec<&Turn>> = trace.sessions.iter().map(roots).collect();
        let followers = || {
            sessions
                .iter()
                .flat_map(|turns| turns.windows(2))
                .map(|pair| (pair[0], pair[1]))
        };
        let of_sessions =
            |figure: fn(&[&Turn]) -> f64| sessions.iter().map(|turns| figure(turns)).collect::<Vec<f64>>();
        check(
            "turns",
            of_sessions(|turns| turns.len() as f64),
            &[(0.5, 45.0), (0.9, 155.0)],
            0.05,
        );
        check(
            "first prompt",
            of_sessions(|turns| f64::from(turns[0].prompt_tokens)),
            &[(0.5, 24_000.0)],
            0.05,
        );
        let last = |turns: &[&Turn]| f64::from(turns.last().expect("it has turns").prompt_tokens);
        check("last prompt", of_sessions(last), &[(0.5, 134_000.0)], 0.2);
        let tail = |(before, turn): (&Turn, &Turn)| f64::from(turn.prompt_tokens - shared_blocks(before, turn) * 64);
        let tails: Vec<f64> = followers().map(tail).collect();
        check(
            "tail",
            tails.clone(),
            &[(0.5, 705.0), (0.75, 1674.0), (0.9, 4077.0), (0.99, 65_706.0)],
            0.12,
        );
        let share = |least: f64| tails.iter().filter(|&&tail| tail >= least).count() as f64 / tails.len() as f64;
        check("share of heavy tails", vec![share(16_384.0)], &[(0.5, 0.025)], 0.15);
        check(
            "share of tails that are not small",
            vec![share(2048.0)],
            &[(0.5, 0.202)],
            0.05,
        );
        let rewrites =
            followers().filter(|&(before, turn)| shared_blocks(before, turn) + 1 < before.content.len() as u32);
        let rewrites: Vec<f64> = rewrites.map(tail).collect();
        check(
            "share of rewrites",
            vec![rewrites.len() as f64 / tails.len() as f64],
            &[(0.5, 0.028)],
            0.15,
        );
        check("rewrite", rewrites, &[(0.5, 51_000.0)], 0.15);
        let outputs = sessions
            .iter()
            .flatten()
            .map(|turn| f64::from(turn.output_tokens))
            .collect();
        check("output", outputs, &[(0.5, 216.0), (0.9, 899.0)], 0.06);
        let gaps = followers()
            .filter(|(_, turn)| turn.after.len() == 1)
            .map(|(_, turn)| turn.gap.as_secs_f64())
            .collect();
        check(
            "gap",
            gaps,
            &[(0.5, 10.0), (0.75, 34.0), (0.9, 171.0), (0.99, 3039.0)],
            0.2,
        );
    }

    #[test]
    fn sub_agents_fork_and_are_joined_by_the_next_turn() {
        let trace = trace("gen:agent:sessions=20:turns=10:subagents=0.5:context=200000", SEED);
        let (mut joined, mut together) = (0, 0);
        for session in &trace.sessions {
            let root = roots(session);
            for pair in root.windows(2) {
                let waits: Vec<&Turn> = pair[1]
                    .after
                    .iter()
                    .map(|&before| &session.turns[before as usize])
                    .collect();
                assert!(
                    waits.iter().all(|turn| turn.agent > 0) || waits == [pair[0]],
                    "one turn or all of a group"
                );
                joined += usize::from(waits[0].agent > 0);
                together += usize::from(waits.len() > 1);
                assert!(
                    waits
                        .iter()
                        .all(|turn| turn.agent == 0 || shared_blocks(turn, pair[1]) == 0)
                );
            }
            assert!(
                session.turns.iter().all(|turn| turn.prompt_tokens <= 200_000),
                "the limit on prompts holds"
            );
        }
        assert!(
            joined > 50 && together > 15,
            "{joined} groups, {together} of them with several sub-agents"
        );
    }

    #[test]
    fn sessions_of_one_version_share_their_boilerplate_and_nothing_else() {
        let trace = trace("gen:agent:sessions=12:turns=2:versions=2:block=16", SEED);
        let firsts: Vec<&Turn> = trace.sessions.iter().map(|session| &session.turns[0]).collect();
        let mut shared: Vec<u32> = Vec::new();
        for (index, one) in firsts.iter().enumerate() {
            shared.extend(firsts[..index].iter().map(|other| shared_blocks(one, other)));
        }
        shared.sort_unstable();
        shared.dedup();
        // Two versions at a quarter and three quarters of the distribution, and pairs of different ones.
        assert_eq!(shared, [0, 12_800 / 16, 15_400 / 16]);
    }
}
