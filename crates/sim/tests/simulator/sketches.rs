//! What workers' sketches are worth where their KV events are lost for good, or never sent.

use crate::common::{agents, config, run};
use homing_report::logs::{DecisionLine, LogKind};
use homing_sim::fault::schedule::parse;
use std::collections::BTreeMap;

/// What the router was wrong by, over all requests that were served.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Wrong {
    requests: u64,
    /// Tokens that were expected in a cache and had to be computed: the silent recompute.
    recomputed: u64,
    /// Tokens that were in a cache and not expected there.
    missed: u64,
    /// Prompt tokens that were computed in all.
    computed: u64,
}

/// Agents on three workers whose pools hold a part of their sessions, over some seeds.
fn wrong(stack: &str, faults: &str) -> Wrong {
    let mut wrong = Wrong::default();
    for seed in 1..=4 {
        let trace = agents(seed, 16, 12);
        let mut config = config(&trace, &format!("h200x3-dp:kv=4800{stack}"), "homing");
        config.seed = seed;
        config.logs = true;
        config.thorough = true;
        config.faults = parse(faults).expect(faults);
        let outcome = run(&trace, &config);
        let lines = outcome.logs.text(LogKind::Decisions).lines();
        let decisions = lines.map(|line| serde_json::from_str::<DecisionLine>(line).expect("a decision"));
        let expected: BTreeMap<u64, u32> = decisions
            .map(|line| (line.request, line.expected_cached_tokens))
            .collect();
        for request in outcome.run.requests.iter().filter(|request| request.error.is_none()) {
            let expected = expected[&request.request];
            wrong.requests += 1;
            wrong.recomputed += u64::from(expected.saturating_sub(request.cached_tokens));
            wrong.missed += u64::from(request.cached_tokens.saturating_sub(expected));
            wrong.computed += u64::from(request.prompt_tokens - request.cached_tokens);
        }
    }
    wrong
}

/// Batches of each worker's events are lost again and again, and no worker keeps any for a replay.
fn lost() -> String {
    let lost: Vec<String> = (0..60)
        .map(|index| format!("{}500ms kv {} 2 lost", index / 3, index % 3))
        .collect();
    lost.join("; ")
}

/// Without sketches the router goes by what it sent where, within the size of the pools, and knows little of what is there. With them it is as
/// good as if no event had been lost: 34,768 tokens were in a cache and not expected there without, 32 with; 164,842 were computed without,
/// 160,602 with and 160,986 with all events.
#[test]
fn where_events_are_lost_for_good_sketches_tell_what_is_resident() {
    let (without, with) = (wrong(":replay=0", &lost()), wrong(":replay=0:sketch=told", &lost()));
    let all_events = wrong("", "");
    assert_eq!(without.requests, with.requests);
    let by = |wrong: Wrong| wrong.recomputed + wrong.missed;
    assert!(by(with) * 10 < by(without), "{with:?}, {without:?} without");
    assert!(
        by(with) * 10 < by(all_events) * 12,
        "{with:?}, {all_events:?} with all events"
    );
    assert!(
        with.computed * 102 < without.computed * 100,
        "{with:?}, {without:?} without"
    );
}

/// Where no event ever comes a sketch is as old as the last probe, and these pools turn over within a second: half of what was wrong is right.
#[test]
fn where_no_events_are_sent_sketches_tell_most_of_what_is_resident() {
    let (without, with) = (wrong(":events=off", ""), wrong(":events=off:sketch=told", ""));
    let by = |wrong: Wrong| wrong.recomputed + wrong.missed;
    assert!(by(with) * 2 < by(without), "{with:?}, {without:?} without");
}

#[test]
fn nobody_is_asked_whose_events_say_it_all() {
    assert_eq!(wrong(":sketch=told", ""), wrong("", ""));
}
