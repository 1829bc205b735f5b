//! Qwen-Bailian's traces: chats of requests that name the one before them, ids of blocks of 16 tokens shared by all rows.
//!
//! Fields `chat_id`, `parent_chat_id` (-1: none), `timestamp` in seconds, `input_length`, `output_length`, `type`, `turn`
//! and `hash_ids`, of which there are `ceil(input_length / 16)`. Names, units and the count of ids were checked against
//! public readers and their examples, not against the release itself. `type` and `turn` are passed over.
//!
//! A row follows its parent where the trace has it, and begins a session where not: published traces are windows of a
//! longer time. The trace has no service times, so that the gap after a parent is the distance of their arrivals: more
//! than the client waited, by what the service took then.

use super::fields::{Dates, Object};
use super::{LineReader, TraceProblem};
use crate::ids::share;
use crate::trace::{Session, Turn};
use homing_units::Duration;
use std::collections::BTreeMap;

const BLOCK_SIZE: u32 = 16;

const TIME: &str = "the time of arrival in seconds, at least 0";

/// Reads rows.
#[derive(Debug, Default)]
pub(super) struct Reader {
    /// The rows so far, by `chat_id`.
    rows: BTreeMap<i64, Row>,
    /// Parents that no row has been so far, and the first line that names them.
    unknown: BTreeMap<i64, u64>,
    dates: Dates,
}

/// Where a row went.
#[derive(Clone, Copy, Debug)]
struct Row {
    session: usize,
    turn: u32,
    time: Duration,
}

impl LineReader for Reader {
    fn read(&mut self, line: &Object<'_>, sessions: &mut Vec<Session>) -> Result<(), TraceProblem> {
        let chat: i64 = line.required("chat_id", "a number of its own")?;
        let parent: i64 = line.required("parent_chat_id", "the `chat_id` of the request before, or -1")?;
        let time = line.date("timestamp", 1.0, TIME)?;
        self.dates.check(line, "timestamp", time)?;
        let mut turn = super::mooncake::turn(line, BLOCK_SIZE)?;
        self.check_order(line, chat, parent)?;
        let row = match self.rows.get(&parent).copied() {
            Some(parent) => {
                let turns = &mut sessions[parent.session].turns;
                turn.after = vec![parent.turn];
                turn.gap = time.checked_sub(parent.time).ok_or_else(|| {
                    let expected = format!("a time at or after its parent's, {} s", parent.time.as_secs_f64());
                    line.wrong("timestamp", &time.as_secs_f64().to_string(), &expected)
                })?;
                turns.push(turn);
                Row {
                    session: parent.session,
                    turn: turns.len() as u32 - 1,
                    time,
                }
            }
            None => {
                self.unknown.entry(parent).or_insert(line.line);
                sessions.push(begun(chat, time, turn));
                Row {
                    session: sessions.len() - 1,
                    turn: 0,
                    time,
                }
            }
        };
        if self.rows.insert(chat, row).is_some() {
            return Err(line.wrong("chat_id", &chat.to_string(), "a number that no row before has"));
        }
        Ok(())
    }

    fn block_size(&self) -> u32 {
        BLOCK_SIZE
    }

    fn finish(&mut self, sessions: &mut Vec<Session>) -> Result<(), (u64, TraceProblem)> {
        for session in sessions {
            share(&mut session.turns);
        }
        Ok(())
    }
}

impl Reader {
    /// A row comes before those that follow it.
    fn check_order(&self, line: &Object<'_>, chat: i64, parent: i64) -> Result<(), TraceProblem> {
        if parent == chat {
            return Err(line.wrong("parent_chat_id", &parent.to_string(), "another row's `chat_id`, or -1"));
        }
        match self.unknown.get(&chat) {
            Some(follower) => {
                let expected = format!("a row before line {follower}, which follows it");
                Err(line.wrong("chat_id", &chat.to_string(), &expected))
            }
            None => Ok(()),
        }
    }
}

/// A session that begins with this turn.
fn begun(chat: i64, time: Duration, turn: Turn) -> Session {
    Session {
        id: format!("chat-{chat}"),
        start: Some(time),
        turns: vec![turn],
    }
}

#[cfg(test)]
mod tests {
    use crate::formats::read_trace;
    use homing_units::Duration;

    const ROWS: &str = r#"{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 33, "output_length": 132, "type": "text", "turn": 1, "hash_ids": [7, 8, 9]}
{"chat_id": 160, "parent_chat_id": 12, "timestamp": 62, "input_length": 16, "output_length": 8, "type": "text", "turn": 4, "hash_ids": [7]}
{"chat_id": 161, "parent_chat_id": 159, "timestamp": 70, "input_length": 48, "output_length": 80, "type": "text", "turn": 2, "hash_ids": [7, 8, 11]}"#;

    fn check_error(from: &str, to: &str, expected: &str) {
        let error = read_trace("test", ROWS.replacen(from, to, 1).as_bytes()).expect_err("broken rows");
        assert_eq!(error.to_string(), expected, "{from} -> {to}");
    }

    #[test]
    fn rows_follow_their_parents() {
        let trace = read_trace("test", ROWS.as_bytes()).expect("good rows");
        trace.check_invariants();
        assert_eq!((trace.block_size, trace.sessions.len()), (16, 2));
        let chat = &trace.sessions[0];
        assert_eq!(
            (chat.id.as_str(), chat.start),
            ("chat-159", Some(Duration::from_millis(61_500)))
        );
        let second = &chat.turns[1];
        assert_eq!(
            (second.after.as_slice(), second.gap),
            (&[0][..], Duration::from_millis(8500))
        );
        assert_eq!(second.content[..], [7, 8, 11]);
        assert!(chat.turns[0].content.shares_memory(&second.content));
        assert_eq!(
            trace.sessions[1].turns[0].content[..],
            [7],
            "an unknown parent begins a session"
        );
    }

    #[test]
    fn a_broken_row_names_its_field() {
        check_error(
            "[7, 8, 9]",
            "[7, 8]",
            "line 1: field `hash_ids` is `2 ids`, expected 3 ids, one for each started block of an `input_length` of 33",
        );
        check_error(
            "161",
            "160",
            "line 3: field `chat_id` is `160`, expected a number that no row before has",
        );
        check_error(
            "\"chat_id\": 161",
            "\"chat_id\": 12",
            "line 3: field `chat_id` is `12`, expected a row before line 2, which follows it",
        );
        check_error(
            "\"parent_chat_id\": 159",
            "\"parent_chat_id\": 161",
            "line 3: field `parent_chat_id` is `161`, expected another row's `chat_id`, or -1",
        );
        check_error(
            "\"timestamp\": 70",
            "\"timestamp\": 7",
            "line 3: field `timestamp` is `7`, expected a time at or after its parent's, 61.5 s",
        );
        check_error(
            "\"parent_chat_id\": 12",
            "\"parent_chat_id\": \"x\"",
            "line 2: field `parent_chat_id` is `\"x\"`, expected the `chat_id` of the request before, or -1",
        );
    }
}
