//! Agentic Mooncake traces: requests that name what they wait for.
//!
//! Fields `request_id`, `session_id` (one agent's trajectory), `input_length`, `output_length`, `hash_ids` (one for each
//! started block), `timestamp` (ms), `wait_for` (request ids), `delay` and `tool_wait_ms` (ms; together the wait after
//! the last of them), `branches`, `prefix_reset`, `tool_events`. The names, the units and that sum were checked against
//! the public converter that writes such rows; that the last three say nothing beyond the others is read off it, and they
//! are passed over. Blocks have 512 tokens unless the row's `block_size` (a field of this project's own) or the
//! caller says otherwise: the published rows do not say it.
//!
//! A session here is all rows that waits or equal `session_id`s connect: a root agent and its sub-agents. Its name is
//! that of the first row's trajectory. Rows may come in any order that their waits allow to be sorted. A row that waits
//! for nothing is sent at its time; one that waits, after its wait, whatever its time.

use super::fields::{Dates, Object};
use super::mooncake::{self, BlockSize};
use super::{LineReader, TraceProblem};
use crate::ids::share;
use crate::trace::{Session, Turn};
use homing_units::Duration;
use std::collections::{BTreeMap, BTreeSet};

const TIME: &str = "a time in milliseconds, at least 0";

/// Reads rows, and makes sessions of them at the end.
#[derive(Debug)]
pub(super) struct Reader {
    block_size: BlockSize,
    rows: Vec<Row>,
    /// The rows by `request_id`.
    names: BTreeMap<String, usize>,
    dates: Dates,
}

#[derive(Debug)]
struct Row {
    line: u64,
    trajectory: String,
    wait_for: Vec<String>,
    time: Option<Duration>,
    wait: Option<Duration>,
    turn: Turn,
}

impl Reader {
    pub(super) fn new(block_size: Option<u32>) -> Self {
        Self {
            block_size: BlockSize::new(block_size),
            rows: Vec::new(),
            names: BTreeMap::new(),
            dates: Dates::default(),
        }
    }
}

impl LineReader for Reader {
    fn read(&mut self, line: &Object<'_>, _: &mut Vec<Session>) -> Result<(), TraceProblem> {
        let id: String = line.required("request_id", "the request's name")?;
        let trajectory = line.optional("session_id", "the name of the agent's trajectory")?;
        let delay = line.optional_duration("delay", 1e-3, TIME)?;
        let tool_wait = line.optional_duration("tool_wait_ms", 1e-3, TIME)?;
        let time = line.optional_date("timestamp", 1e-3, TIME)?;
        if let Some(time) = time {
            self.dates.check(line, "timestamp", time)?;
        }
        let row = Row {
            line: line.line,
            trajectory: trajectory.unwrap_or_else(|| id.clone()),
            wait_for: line.optional("wait_for", "a list of request ids")?.unwrap_or_default(),
            time,
            wait: delay.map_or(tool_wait, |delay| Some(delay + tool_wait.unwrap_or_default())),
            turn: mooncake::turn(line, self.block_size.of(line)?)?,
        };
        if self.names.insert(id.clone(), self.rows.len()).is_some() {
            return Err(line.wrong("request_id", &id, "a name that no row before has"));
        }
        self.rows.push(row);
        Ok(())
    }

    fn block_size(&self) -> u32 {
        self.block_size.get()
    }

    fn finish(&mut self, sessions: &mut Vec<Session>) -> Result<(), (u64, TraceProblem)> {
        let waits = self.waits()?;
        let mut rows: Vec<Option<Row>> = std::mem::take(&mut self.rows).into_iter().map(Some).collect();
        for members in components(&rows, &waits) {
            let order = sorted(&members, &waits).map_err(|row| {
                (
                    line_of(&rows, row),
                    wrong("an order in which rows do not wait for each other"),
                )
            })?;
            let session: Vec<Row> = order.iter().filter_map(|&row| rows[row].take()).collect();
            sessions.push(session_of(session, &order, &waits));
        }
        Ok(())
    }
}

impl Reader {
    /// The rows that each row waits for.
    fn waits(&self) -> Result<Vec<Vec<usize>>, (u64, TraceProblem)> {
        let of = |row: &Row| {
            let place = |name: &String| {
                let expected = "the `request_id`s of rows of the trace";
                let unknown = || (row.line, wrong_value(name, expected));
                self.names.get(name).copied().ok_or_else(unknown)
            };
            row.wait_for.iter().map(place).collect()
        };
        self.rows.iter().map(of).collect()
    }
}

fn line_of(rows: &[Option<Row>], row: usize) -> u64 {
    rows[row].as_ref().map_or(0, |row| row.line)
}

fn wrong(expected: &str) -> TraceProblem {
    wrong_value("a circle", expected)
}

fn wrong_value(found: &str, expected: &str) -> TraceProblem {
    TraceProblem::Wrong {
        field: "wait_for".to_owned(),
        found: super::fields::shortened(found),
        expected: expected.to_owned(),
    }
}

/// The rows of each session, in the order of the sessions' first rows.
fn components(rows: &[Option<Row>], waits: &[Vec<usize>]) -> Vec<Vec<usize>> {
    let mut parent: Vec<usize> = (0..rows.len()).collect();
    let mut first_of: BTreeMap<&str, usize> = BTreeMap::new();
    for (index, row) in rows.iter().enumerate() {
        let trajectory = row.as_ref().map_or("", |row| row.trajectory.as_str());
        join(&mut parent, *first_of.entry(trajectory).or_insert(index), index);
        for &before in &waits[index] {
            join(&mut parent, before, index);
        }
    }
    let mut members: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for index in 0..rows.len() {
        members.entry(root(&mut parent, index)).or_default().push(index);
    }
    members.into_values().collect()
}

/// Puts two rows into one session. The smaller row stands for both.
fn join(parent: &mut [usize], one: usize, other: usize) {
    let (one, other) = (root(parent, one), root(parent, other));
    parent[one.max(other)] = one.min(other);
}

/// The row that stands for a row's session.
fn root(parent: &mut [usize], mut row: usize) -> usize {
    while parent[row] != row {
        parent[row] = parent[parent[row]];
        row = parent[row];
    }
    row
}

/// The rows such that each comes after those that it waits for, and otherwise as in the trace. An error is a row of a
/// circle.
fn sorted(members: &[usize], waits: &[Vec<usize>]) -> Result<Vec<usize>, usize> {
    let mut followers: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    let mut left: BTreeMap<usize, usize> = BTreeMap::new();
    for &row in members {
        left.insert(row, waits[row].len());
        for &before in &waits[row] {
            followers.entry(before).or_default().push(row);
        }
    }
    let ready = |(&row, &left): (&usize, &usize)| (left == 0).then_some(row);
    let mut ready: BTreeSet<usize> = left.iter().filter_map(ready).collect();
    let mut order = Vec::with_capacity(members.len());
    while let Some(row) = ready.pop_first() {
        left.remove(&row);
        order.push(row);
        for follower in followers.remove(&row).unwrap_or_default() {
            if let Some(count) = left.get_mut(&follower) {
                *count -= 1;
                if *count == 0 {
                    ready.insert(follower);
                }
            }
        }
    }
    left.first_key_value().map_or(Ok(order), |(&row, _)| Err(row))
}

/// The session of these rows, which are in `order`.
fn session_of(rows: Vec<Row>, order: &[usize], waits: &[Vec<usize>]) -> Session {
    let places: BTreeMap<usize, u32> = order.iter().zip(0..).map(|(&row, place)| (row, place)).collect();
    let begin = |row: &Row| row.time.filter(|_| row.wait_for.is_empty());
    let start = rows.iter().filter_map(begin).min();
    let id = name_of(&rows);
    let mut agents: BTreeMap<String, u32> = BTreeMap::new();
    let mut turns = Vec::with_capacity(rows.len());
    for (row, index) in rows.into_iter().zip(order) {
        let since_start = begin(&row)
            .unwrap_or_default()
            .saturating_sub(start.unwrap_or_default());
        let next = agents.len() as u32;
        turns.push(Turn {
            agent: *agents.entry(row.trajectory).or_insert(next),
            after: waits[*index].iter().map(|before| places[before]).collect(),
            gap: since_start + row.wait.unwrap_or_default(),
            ..row.turn
        });
    }
    share(&mut turns);
    Session { id, start, turns }
}

/// The name of the first row's trajectory; where that is `NAME#3`, one of `NAME`'s sub-agents as this project writes
/// them, the latter.
fn name_of(rows: &[Row]) -> String {
    let first = rows[0].trajectory.as_str();
    let root = first.rsplit_once('#').map(|(root, _)| root);
    let known = root.filter(|root| rows.iter().any(|row| row.trajectory == *root));
    known.unwrap_or(first).to_owned()
}

#[cfg(test)]
mod tests {
    use crate::formats::{ReadOptions, read_trace, read_trace_with};
    use crate::generate::generate;
    use crate::write::{OutputFormat, write_trace};
    use homing_units::Duration;

    fn row(id: &str, trajectory: &str, rest: &str) -> String {
        format!(
            r#"{{"request_id": "{id}", "session_id": "{trajectory}", "input_length": 600, "output_length": 5, "hash_ids": [1, 2], {rest}}}"#
        )
    }

    fn check_error(rows: &[String], expected: &str) {
        let error = read_trace("test", rows.join("\n").as_bytes()).expect_err("broken rows");
        assert_eq!(error.to_string(), expected, "for {rows:?}");
    }

    #[test]
    fn waits_make_sessions_of_agents() {
        let rows = [
            row("other", "b", r#""timestamp": 50"#),
            row(
                "join",
                "a",
                r#""timestamp": 900, "wait_for": ["one", "sub"], "delay": 100.25, "tool_wait_ms": 50"#,
            ),
            row(
                "one",
                "a",
                r#""timestamp": 10.5, "wait_for": [], "branches": ["sub"], "prefix_reset": true"#,
            ),
            row(
                "sub",
                "a/1",
                r#""timestamp": 400, "wait_for": ["one"], "tool_wait_ms": 7"#,
            ),
        ];
        let trace = read_trace("test", rows.join("\n").as_bytes()).expect("good rows");
        trace.check_invariants();
        assert_eq!((trace.block_size, trace.sessions.len()), (512, 2));
        assert_eq!(trace.sessions[0].id, "b");
        let session = &trace.sessions[1];
        assert_eq!(
            (session.id.as_str(), session.start),
            ("a", Some(Duration::from_micros(10_500)))
        );
        let turns: Vec<(u32, &[u32], u128)> = session
            .turns
            .iter()
            .map(|turn| (turn.agent, &turn.after[..], turn.gap.as_micros()))
            .collect();
        assert_eq!(turns, [(0, &[][..], 0), (1, &[0][..], 7000), (0, &[0, 1][..], 150_250)]);
    }

    fn written(trace: &crate::Trace) -> Vec<u8> {
        let mut bytes = Vec::new();
        write_trace(trace, OutputFormat::AgenticMooncake, &mut bytes).expect("memory takes it");
        bytes
    }

    #[test]
    fn what_is_written_is_read_and_written_alike() {
        for name in [
            "gen:agent:sessions=8:turns=12:subagents=0.2:versions=2",
            "gen:e2:sessions=3",
            "gen:elastic850:sessions=9",
            "gen:swe52:sessions=3",
        ] {
            let trace = generate(name, 1).expect("a good name");
            let bytes = written(&trace);
            let read = read_trace(name, bytes.as_slice()).expect("what was written");
            read.check_invariants();
            assert!(
                written(&read) == bytes,
                "{name} is written in other bytes the second time"
            );
            assert_eq!(read.block_size, trace.block_size, "{name}");
            let shape = |trace: &crate::Trace| -> Vec<_> {
                let turns = |turn: &crate::Turn| {
                    let sizes = (turn.prompt_tokens, turn.output_tokens, turn.content.len());
                    (turn.agent, sizes, turn.after.clone(), turn.gap)
                };
                let sessions = trace.sessions.iter();
                sessions
                    .map(|session| {
                        let turns: Vec<_> = session.turns.iter().map(turns).collect();
                        (session.id.clone(), session.start, turns)
                    })
                    .collect()
            };
            assert_eq!(shape(&read), shape(&trace), "{name}");
        }
    }

    #[test]
    fn the_block_size_is_the_rows_or_the_callers() {
        let small = row("a", "a", r#""block_size": 300"#);
        let trace = read_trace("test", small.as_bytes()).expect("good");
        assert_eq!((trace.block_size, trace.sessions[0].start), (300, None));
        let options = ReadOptions {
            block_size: Some(400),
            ..ReadOptions::default()
        };
        let trace = read_trace_with("test", row("a", "a", r#""delay": 0"#).as_bytes(), &options).expect("good");
        assert_eq!(trace.block_size, 400);
        check_error(
            &[small, row("b", "b", r#""block_size": 512"#)],
            "line 2: field `block_size` is `512`, expected 300, the block size of the rows before",
        );
        check_error(
            &[row("a", "a", r#""block_size": 100"#)],
            "line 1: field `hash_ids` is `2 ids`, expected 6 ids, one for each started block of an `input_length` of 600",
        );
    }

    #[test]
    fn broken_waits_name_their_line() {
        check_error(
            &[
                row("a", "a", r#""wait_for": ["b"]"#),
                row("b", "b", r#""wait_for": ["a"]"#),
            ],
            "line 1: field `wait_for` is `a circle`, expected an order in which rows do not wait for each other",
        );
        check_error(
            &[row("x", "x", r#""delay": 1"#), row("a", "a", r#""wait_for": ["b"]"#)],
            "line 2: field `wait_for` is `b`, expected the `request_id`s of rows of the trace",
        );
        check_error(
            &[row("a", "a", r#""delay": 1"#), row("a", "b", r#""delay": 1"#)],
            "line 2: field `request_id` is `a`, expected a name that no row before has",
        );
        check_error(
            &[row("a", "a", r#""delay": -1"#)],
            "line 1: field `delay` is `-1`, expected a time in milliseconds, at least 0",
        );
    }
}
