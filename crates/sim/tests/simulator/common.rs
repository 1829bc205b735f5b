//! Small traces and clusters for the tests.

use homing_report::{ClassBounds, Experiment, Report};
use homing_sim::{Cluster, SimConfig, SimOutcome, simulate};
use homing_units::{Duration, Rng, rng_for};
use homing_workload::{Session, Trace, Turn};
use rand::Rng as _;

pub const BLOCK: u32 = 16;

/// A draw of `low..high`.
fn draw(rng: &mut Rng, low: u64, high: u64) -> u64 {
    low + rng.next_u64() % (high - low)
}

/// Sessions of growing prompts with shared boilerplate, some with a sub-agent, some with rewritten history.
pub fn agents(seed: u64, sessions: u32, turns: u32) -> Trace {
    let mut rng = rng_for(seed, "tests/agents");
    let session = |index: u32, rng: &mut Rng| {
        let mut made = Vec::new();
        let mut content: Vec<u64> = (0..draw(rng, 2, 9)).collect();
        let mut next = (u64::from(index) + 1) << 32;
        for turn in 0..turns {
            if turn > 0 && draw(rng, 0, 12) == 0 {
                content.truncate(content.len() / 2 + 1);
            }
            let grown = draw(rng, 0, 20);
            content.extend(next..next + grown);
            next += grown;
            made.push(Turn {
                agent: 0,
                prompt_tokens: u32::try_from(content.len()).expect("small") * BLOCK + draw(rng, 0, 16) as u32,
                output_tokens: draw(rng, 1, 40) as u32,
                content: content.clone().into(),
                after: turn.checked_sub(1).into_iter().collect(),
                gap: Duration::from_millis(draw(rng, 0, 4000)),
            });
        }
        if index.is_multiple_of(3) {
            made.push(sub_agent(next, turns - 1, rng));
        }
        Session {
            id: format!("session-{index}"),
            start: None,
            turns: made,
        }
    };
    let sessions = (0..sessions).map(|index| session(index, &mut rng)).collect();
    Trace {
        name: format!("agents:seed={seed}"),
        block_size: BLOCK,
        sessions,
    }
}

fn sub_agent(first: u64, after: u32, rng: &mut Rng) -> Turn {
    let blocks = draw(rng, 1, 9);
    Turn {
        agent: 1,
        prompt_tokens: blocks as u32 * BLOCK,
        output_tokens: draw(rng, 1, 9) as u32,
        content: (first..first + blocks).collect(),
        after: vec![after],
        gap: Duration::ZERO,
    }
}

/// One session of one agent whose turns have these prompt and output lengths, each prompt the start of the next.
pub fn one_session(turns: &[(u32, u32)]) -> Trace {
    let turns = turns
        .iter()
        .zip(0_u32..)
        .map(|(&(prompt_tokens, output_tokens), index)| Turn {
            agent: 0,
            prompt_tokens,
            output_tokens,
            content: (0..u64::from(prompt_tokens / BLOCK)).collect(),
            after: index.checked_sub(1).into_iter().collect(),
            gap: Duration::from_secs(1),
        });
    let session = Session {
        id: "only".to_owned(),
        start: Some(Duration::ZERO),
        turns: turns.collect(),
    };
    Trace {
        name: "one".to_owned(),
        block_size: BLOCK,
        sessions: vec![session],
    }
}

pub fn config(trace: &Trace, cluster: &str, policy: &str) -> SimConfig {
    let cluster = Cluster::preset(cluster).expect(cluster);
    SimConfig::new(trace, cluster, policy.parse().expect(policy))
}

pub fn run(trace: &Trace, config: &SimConfig) -> SimOutcome {
    simulate(trace, config).unwrap_or_else(|error| {
        panic!(
            "{error}\nreplay with trace {}, cluster {}, policy {}, seed {}, faults {:?}",
            trace.name, config.cluster.name, config.policy, config.seed, config.faults
        )
    })
}

/// The report's bytes.
pub fn json(trace: &Trace, config: &SimConfig, outcome: &SimOutcome) -> String {
    let experiment = Experiment {
        trace: trace.name.clone(),
        cluster: config.cluster.name.clone(),
        policy: config.policy.to_string(),
        time_scale: config.replay.time_scale,
        block_size: Some(trace.block_size),
        classes: ClassBounds::default(),
        left_out: outcome.left_out,
    };
    Report::new(&experiment, std::slice::from_ref(&outcome.run)).to_json()
}
