//! Writes traces: to agentic Mooncake rows, which carry all that a trace holds, and to plain Mooncake rows, which do not.
//!
//! Both forms are JSON, one request a line. Field names of agentic rows are those of Dynamo's converter (`request_id`,
//! `session_id`, `input_length`, `output_length`, `hash_ids`, `timestamp` and `delay` in milliseconds, `wait_for`); a
//! row's `block_size` is ours and stands there where it is not Mooncake's 512. A sub-agent is a session of its own name
//! that waits for the one that forked it. Ids are numbered anew in the order in which they appear, so that other tools
//! need no more than 53 bits for them, and a partial last block gets an id that no other block has, as Mooncake's rule
//! of one id for each started block wants it. Written, read and written again, a trace has the same bytes.
//!
//! What a form cannot carry is [`losses`]; whether to write nevertheless is the caller's decision.

use crate::trace::{Session, Trace, Turn};
use homing_units::Duration;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};

/// Mooncake's block size: rows that have it do not say it.
const BLOCK_SIZE: u32 = 512;

/// A form in which a trace can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputFormat {
    /// Sessions with the order of their turns.
    AgenticMooncake,
    /// Requests with times of arrival.
    Mooncake,
}

/// What of a trace a form cannot carry, a phrase for each kind; empty where it carries all.
#[must_use]
pub fn losses(trace: &Trace, format: OutputFormat) -> Vec<String> {
    match format {
        OutputFormat::AgenticMooncake => losses_of_agentic(trace),
        OutputFormat::Mooncake => losses_of_mooncake(trace),
    }
}

/// Writes the trace, with what its form cannot carry left out.
///
/// # Errors
/// If `out` cannot be written to.
pub fn write_trace(trace: &Trace, format: OutputFormat, out: impl Write) -> io::Result<()> {
    match format {
        OutputFormat::AgenticMooncake => write_agentic(trace, out),
        OutputFormat::Mooncake => write_mooncake(trace, out),
    }
}

fn losses_of_agentic(trace: &Trace) -> Vec<String> {
    let apart = trace.sessions.iter().filter(|session| !is_connected(session)).count();
    let rootless = |session: &&Session| session.turns.iter().all(|turn| turn.agent != 0);
    [
        counted(apart, "sessions whose agents do not wait for one another"),
        counted(
            trace.sessions.iter().filter(rootless).count(),
            "names of sessions whose root agent sends nothing",
        ),
        counted(
            same_names(trace),
            "sessions that have a name of another's, or of its sub-agent (they would be one)",
        ),
    ]
    .concat()
}

/// Sessions with an agent whose name an earlier session's agent has.
fn same_names(trace: &Trace) -> usize {
    let mut owners: BTreeMap<String, usize> = BTreeMap::new();
    let mut taken = |(index, session): (usize, &Session)| {
        let agents: BTreeSet<u32> = session.turns.iter().map(|turn| turn.agent).collect();
        let names = agents.into_iter().map(|agent| agent_name(session, agent));
        // Each name is taken down, whatever the others are.
        let taken = names.filter(|name| *owners.entry(name.clone()).or_insert(index) != index);
        taken.count() > 0
    };
    trace
        .sessions
        .iter()
        .enumerate()
        .filter(|&session| taken(session))
        .count()
}

fn losses_of_mooncake(trace: &Trace) -> Vec<String> {
    let sessions = || trace.sessions.iter();
    let waiting = sessions()
        .flat_map(|session| &session.turns)
        .filter(|turn| !turn.after.is_empty())
        .count();
    let named = sessions().filter(|session| !is_row_name(&session.id)).count();
    let without_start = sessions().filter(|session| session.start.is_none()).count();
    [
        counted(
            waiting,
            "turns that wait for others (they would come as if service took no time)",
        ),
        counted(named, "names of sessions"),
        counted(
            without_start,
            "sessions without a recorded start (they would start at 0)",
        ),
    ]
    .concat()
}

/// Whether a reader made this name up for a row that had none.
fn is_row_name(name: &str) -> bool {
    let number = name.strip_prefix("row-");
    number.is_some_and(|number| number.parse::<u32>().is_ok())
}

fn counted(count: usize, of: &str) -> Vec<String> {
    if count == 0 {
        return Vec::new();
    }
    vec![format!("{count} {of}")]
}

/// Whether all turns hang together by what they wait for and by whose they are.
fn is_connected(session: &Session) -> bool {
    // Each turn's group, named by an earlier turn of it, or by itself.
    let mut groups: Vec<usize> = (0..session.turns.len()).collect();
    let find = |groups: &[usize], mut turn: usize| {
        while groups[turn] != turn {
            turn = groups[turn];
        }
        turn
    };
    let mut last_of: BTreeMap<u32, usize> = BTreeMap::new();
    for (index, turn) in session.turns.iter().enumerate() {
        let own = last_of.insert(turn.agent, index);
        let others = turn.after.iter().map(|&before| before as usize);
        for other in others.chain(own) {
            let (one, other) = (find(&groups, index), find(&groups, other));
            groups[one.max(other)] = one.min(other);
            groups[index] = one.min(other);
        }
    }
    (0..groups.len()).all(|turn| find(&groups, turn) == 0)
}

/// An agentic row.
#[derive(Serialize)]
struct AgenticRow {
    request_id: String,
    session_id: String,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timestamp: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delay: Option<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    wait_for: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    block_size: Option<u32>,
}

fn write_agentic(trace: &Trace, mut out: impl Write) -> io::Result<()> {
    let mut ids = Numbering::new(trace.block_size);
    for session in &trace.sessions {
        let name = |turn: u32| format!("{}/{turn}", session.id);
        for (turn, index) in session.turns.iter().zip(0_u32..) {
            let row = AgenticRow {
                request_id: name(index),
                session_id: agent_name(session, turn.agent),
                input_length: turn.prompt_tokens,
                output_length: turn.output_tokens,
                hash_ids: ids.number(turn),
                timestamp: session.start.filter(|_| turn.after.is_empty()).map(milliseconds),
                delay: (turn.gap > Duration::ZERO).then(|| milliseconds(turn.gap)),
                wait_for: turn.after.iter().map(|&before| name(before)).collect(),
                block_size: (trace.block_size != BLOCK_SIZE).then_some(trace.block_size),
            };
            write_row(&row, &mut out)?;
        }
    }
    Ok(())
}

/// The root has the session's name.
fn agent_name(session: &Session, agent: u32) -> String {
    match agent {
        0 => session.id.clone(),
        _ => format!("{}#{agent}", session.id),
    }
}

/// A Mooncake row.
#[derive(Serialize)]
struct MooncakeRow {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    block_size: Option<u32>,
}

fn write_mooncake(trace: &Trace, mut out: impl Write) -> io::Result<()> {
    let mut arrivals: Vec<(Duration, &Turn)> = Vec::with_capacity(trace.turn_count());
    for session in &trace.sessions {
        arrivals.extend(arrivals_of(session).into_iter().zip(&session.turns));
    }
    // A stable sort: rows of one time keep the trace's order.
    arrivals.sort_by_key(|&(at, _)| at);
    let mut ids = Numbering::new(trace.block_size);
    for (at, turn) in arrivals {
        let row = MooncakeRow {
            timestamp: milliseconds(at),
            input_length: turn.prompt_tokens,
            output_length: turn.output_tokens,
            hash_ids: ids.number(turn),
            block_size: (trace.block_size != BLOCK_SIZE).then_some(trace.block_size),
        };
        write_row(&row, &mut out)?;
    }
    Ok(())
}

/// When each turn would come if service took no time.
fn arrivals_of(session: &Session) -> Vec<Duration> {
    let start = session.start.unwrap_or_default();
    let mut arrivals: Vec<Duration> = Vec::with_capacity(session.turns.len());
    for turn in &session.turns {
        let before = turn.after.iter().map(|&before| arrivals[before as usize]).max();
        arrivals.push(before.unwrap_or(start).saturating_add(turn.gap));
    }
    arrivals
}

fn write_row(row: &impl Serialize, out: &mut impl Write) -> io::Result<()> {
    serde_json::to_writer(&mut *out, row)?;
    out.write_all(b"\n")
}

/// A time in milliseconds. Up to 104 days it keeps every nanosecond.
fn milliseconds(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e6
}

/// Numbers content ids in the order in which they appear.
struct Numbering {
    block_size: u32,
    numbers: BTreeMap<u64, u64>,
    next: u64,
}

impl Numbering {
    const fn new(block_size: u32) -> Self {
        Self {
            block_size,
            numbers: BTreeMap::new(),
            next: 0,
        }
    }

    /// The numbers of a prompt's blocks, the partial one included.
    fn number(&mut self, turn: &Turn) -> Vec<u64> {
        let mut numbers: Vec<u64> = Vec::with_capacity(turn.content.len() + 1);
        for &id in turn.content.iter() {
            let number = *self.numbers.entry(id).or_insert(self.next);
            self.next = self.next.max(number + 1);
            numbers.push(number);
        }
        if !turn.prompt_tokens.is_multiple_of(self.block_size) {
            numbers.push(self.next);
            self.next += 1;
        }
        numbers
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::generate;

    fn turn(agent: u32, content: &[u64], tokens: u32, after: &[u32], gap_ms: u64) -> Turn {
        Turn {
            agent,
            prompt_tokens: tokens,
            output_tokens: 5,
            content: content.iter().copied().collect(),
            after: after.to_vec(),
            gap: Duration::from_millis(gap_ms),
        }
    }

    fn session(id: &str, start: Option<u64>, turns: Vec<Turn>) -> Session {
        Session {
            id: id.to_owned(),
            start: start.map(Duration::from_millis),
            turns,
        }
    }

    fn trace(block_size: u32, sessions: Vec<Session>) -> Trace {
        Trace {
            name: "test".to_owned(),
            block_size,
            sessions,
        }
    }

    fn text(trace: &Trace, format: OutputFormat) -> String {
        let mut out = Vec::new();
        write_trace(trace, format, &mut out).expect("memory takes it");
        String::from_utf8(out).expect("JSON is text")
    }

    fn check_losses(trace: &Trace, format: OutputFormat, expected: &[&str]) {
        assert_eq!(losses(trace, format), expected, "{format:?}");
    }

    #[test]
    fn an_agentic_row_has_all_of_a_turn() {
        let turns = vec![
            turn(0, &[1 << 50, 7], 25, &[], 0),
            turn(1, &[9], 10, &[0], 2),
            turn(0, &[1 << 50, 7, 8], 30, &[0, 1], 2500),
        ];
        let forked = trace(10, vec![session("a", Some(1500), turns)]);
        let rows = [
            r#"{"request_id":"a/0","session_id":"a","input_length":25,"output_length":5,"hash_ids":[0,1,2],"timestamp":1500.0,"block_size":10}"#,
            r#"{"request_id":"a/1","session_id":"a#1","input_length":10,"output_length":5,"hash_ids":[3],"delay":2.0,"wait_for":["a/0"],"block_size":10}"#,
            r#"{"request_id":"a/2","session_id":"a","input_length":30,"output_length":5,"hash_ids":[0,1,4],"delay":2500.0,"wait_for":["a/0","a/1"],"block_size":10}"#,
        ];
        assert_eq!(text(&forked, OutputFormat::AgenticMooncake), rows.join("\n") + "\n");
        check_losses(&forked, OutputFormat::AgenticMooncake, &[]);
    }

    #[test]
    fn agents_that_nothing_connects_are_a_loss() {
        let check = |turns: &[(u32, &[u32])], expected: &[&str]| {
            let turns = turns.iter().map(|&(agent, after)| turn(agent, &[], 5, after, 0));
            let trace = trace(10, vec![session("a", None, turns.collect())]);
            check_losses(&trace, OutputFormat::AgenticMooncake, expected);
        };
        let apart: &[&str] = &["1 sessions whose agents do not wait for one another"];
        check(&[(1, &[]), (0, &[])], apart);
        check(&[(0, &[]), (1, &[]), (1, &[1]), (0, &[0])], apart);
        check(&[(1, &[]), (2, &[]), (0, &[0, 1]), (0, &[])], &[]);
        check(&[(0, &[]), (1, &[]), (2, &[0]), (1, &[2])], &[]);
    }

    #[test]
    fn names_that_would_not_come_back_are_a_loss() {
        let check = |sessions: &[(&str, u32)], expected: &[&str]| {
            let of = |&(id, agent): &(&str, u32)| session(id, None, vec![turn(agent, &[], 5, &[], 0)]);
            let trace = trace(10, sessions.iter().map(of).collect());
            check_losses(&trace, OutputFormat::AgenticMooncake, expected);
            let read = crate::read_trace("test", text(&trace, OutputFormat::AgenticMooncake).as_bytes()).expect("good");
            let names = |trace: &Trace| {
                trace
                    .sessions
                    .iter()
                    .map(|session| session.id.clone())
                    .collect::<Vec<_>>()
            };
            assert_eq!(names(&read) == names(&trace), expected.is_empty(), "{sessions:?}");
        };
        check(&[("a", 0), ("b", 0)], &[]);
        check(&[("a", 1)], &["1 names of sessions whose root agent sends nothing"]);
        let same = "1 sessions that have a name of another's, or of its sub-agent (they would be one)";
        let rootless = "1 names of sessions whose root agent sends nothing";
        check(&[("a", 1), ("a#1", 0)], &[rootless, same]);
    }

    #[test]
    fn a_mooncake_row_has_its_time_and_the_rest_is_said_to_be_lost() {
        let sessions = vec![
            session("row-2", Some(9), vec![turn(0, &[5], 512, &[], 1)]),
            session(
                "b",
                None,
                vec![turn(0, &[5], 513, &[], 0), turn(0, &[5], 600, &[0], 20)],
            ),
        ];
        let trace = trace(512, sessions);
        let rows = [
            r#"{"timestamp":0.0,"input_length":513,"output_length":5,"hash_ids":[0,1]}"#,
            r#"{"timestamp":10.0,"input_length":512,"output_length":5,"hash_ids":[0]}"#,
            r#"{"timestamp":20.0,"input_length":600,"output_length":5,"hash_ids":[0,2]}"#,
        ];
        assert_eq!(text(&trace, OutputFormat::Mooncake), rows.join("\n") + "\n");
        let expected = [
            "1 turns that wait for others (they would come as if service took no time)",
            "1 names of sessions",
            "1 sessions without a recorded start (they would start at 0)",
        ];
        check_losses(&trace, OutputFormat::Mooncake, &expected);
    }

    #[test]
    fn generated_traces_lose_nothing_as_agentic_rows() {
        for name in [
            "gen:agent:sessions=5:turns=5:subagents=0.3",
            "gen:e2:sessions=3",
            "gen:swe52:sessions=3",
        ] {
            let trace = generate(name, 1).expect("a good name");
            check_losses(&trace, OutputFormat::AgenticMooncake, &[]);
        }
    }
}
