//! Readers of recorded traces: one file a format; the format is recognised from the first JSON object.
//!
//! Objects, and not one document, because real traces are larger than a reader wants to hold twice: each object becomes
//! turns before the next is read. Decompression is the caller's. A new format is a file beside these, a variant of
//! `Format` with the fields that give it away, and an arm in `Format::reader`.

mod claude_code;
mod fields;
mod mooncake;
mod objects;

use crate::trace::{Session, Trace};
use fields::Object;
use objects::{MAX_OBJECT_BYTES, Objects};
use std::io::BufRead;

/// So many sessions can be told apart by their content ids.
const MAX_SESSIONS: usize = (1 << 24) - 1;

/// Why a trace could not be read, and where.
#[derive(Debug, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct TraceError {
    /// The line, counted from 1; where an object goes over several, the one on which it begins.
    pub line: u64,
    /// What is wrong with it.
    pub problem: TraceProblem,
}

/// What is wrong with a line of a trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceProblem {
    /// The bytes could not be had.
    #[error("cannot be read: {0}")]
    Read(#[from] std::io::Error),
    /// The trace has no line.
    #[error("the trace is empty, expected at least one JSON object")]
    Empty,
    /// The line is longer than any trace's.
    #[error("more than `{limit}` bytes, expected one JSON object a line", limit = MAX_OBJECT_BYTES)]
    TooLong,
    /// The line is no JSON object.
    #[error("no JSON object ({reason}), expected one JSON object a line")]
    NoObject {
        /// What the JSON parser says.
        reason: String,
    },
    /// The first line belongs to no known format.
    #[error("unknown trace format with the fields {found}, expected {expected}")]
    UnknownFormat {
        /// The fields of the first line.
        found: String,
        /// The formats and the fields that give them away.
        expected: String,
    },
    /// A field is missing.
    #[error("field `{field}` is missing, expected {expected}")]
    Missing {
        /// Its path in the line, such as `requests[3].in`.
        field: String,
        /// What it should hold.
        expected: String,
    },
    /// A field holds something else than it should.
    #[error("field `{field}` is `{found}`, expected {expected}")]
    Wrong {
        /// Its path in the line, such as `requests[3].in`.
        field: String,
        /// What it holds, shortened.
        found: String,
        /// What it should hold.
        expected: String,
    },
    /// More sessions than content ids can tell apart.
    #[error("more than `{limit}` sessions", limit = MAX_SESSIONS)]
    TooManySessions,
}

/// A known format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    /// Coding-agent sessions, one a line.
    ClaudeCode,
    /// Mooncake's requests, one a line.
    Mooncake,
}

impl Format {
    const ALL: [Self; 2] = [Self::ClaudeCode, Self::Mooncake];

    /// Its name and the fields that give it away.
    const fn signature(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::ClaudeCode => ("a coding-agent trace", &["id", "block_size", "requests"]),
            Self::Mooncake => (
                "a Mooncake trace",
                &["timestamp", "input_length", "output_length", "hash_ids"],
            ),
        }
    }

    /// The format whose fields `first` has.
    fn recognise(first: &Object<'_>) -> Result<Self, TraceProblem> {
        let has_all = |format: &Self| format.signature().1.iter().all(|field| first.has(field));
        Self::ALL
            .into_iter()
            .find(has_all)
            .ok_or_else(|| TraceProblem::UnknownFormat {
                found: quoted(first.names()),
                expected: Self::ALL
                    .into_iter()
                    .map(|format| {
                        format!(
                            "{} ({})",
                            format.signature().0,
                            quoted(format.signature().1.iter().copied())
                        )
                    })
                    .collect::<Vec<_>>()
                    .join(" or "),
            })
    }

    fn reader(self) -> Box<dyn LineReader> {
        match self {
            Self::ClaudeCode => Box::new(claude_code::Reader::default()),
            Self::Mooncake => Box::new(mooncake::Reader),
        }
    }
}

/// What a format does: turn one line after the other into sessions.
trait LineReader {
    /// The sessions of one line are added to `sessions`.
    fn read(&mut self, line: &Object<'_>, sessions: &mut Vec<Session>) -> Result<(), TraceProblem>;

    /// Tokens in a block; known after the first line.
    fn block_size(&self) -> u32;
}

/// Reads a trace from uncompressed bytes. `name` becomes the trace's name.
///
/// # Errors
/// The first line that is broken or contradicts itself, with its number, the field and what was expected.
pub fn read_trace(name: &str, input: impl BufRead) -> Result<Trace, TraceError> {
    let mut reader: Option<Box<dyn LineReader>> = None;
    let mut sessions = Vec::new();
    let mut objects = Objects::new(input);
    while let Some((line, bytes)) = objects.next()? {
        let at = |problem| TraceError { line, problem };
        let object = Object::parse(bytes).map_err(at)?;
        let reader = match &mut reader {
            Some(reader) => reader,
            None => reader.insert(Format::recognise(&object).map_err(at)?.reader()),
        };
        reader.read(&object, &mut sessions).map_err(at)?;
        if sessions.len() > MAX_SESSIONS {
            return Err(at(TraceProblem::TooManySessions));
        }
    }
    let reader = reader.ok_or(TraceError {
        line: 1,
        problem: TraceProblem::Empty,
    })?;
    Ok(Trace {
        name: name.to_owned(),
        block_size: reader.block_size(),
        sessions,
    })
}

/// Names in backticks, with commas between.
fn quoted<'a>(names: impl Iterator<Item = &'a str>) -> String {
    const SHOWN: usize = 12;
    names
        .take(SHOWN)
        .map(|name| format!("`{name}`"))
        .collect::<Vec<_>>()
        .join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MOONCAKE: &str = r#"{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}"#;

    fn check_error(input: &str, expected: &str) {
        let error = read_trace("test", input.as_bytes()).expect_err("a broken trace");
        assert_eq!(error.to_string(), expected, "for {input:?}");
    }

    #[test]
    fn a_broken_trace_is_refused_with_its_line() {
        check_error("", "line 1: the trace is empty, expected at least one JSON object");
        check_error(
            "\n  \n",
            "line 1: the trace is empty, expected at least one JSON object",
        );
        check_error(
            "{\"timestamp\": 0, \"chat_id\": 7}",
            "line 1: unknown trace format with the fields `chat_id`, `timestamp`, expected a coding-agent trace (`id`, \
             `block_size`, `requests`) or a Mooncake trace (`timestamp`, `input_length`, `output_length`, `hash_ids`)",
        );
        check_error(
            "[1, 2]",
            "line 1: no JSON object (invalid type: sequence, expected a map, at column 0), expected one JSON object a line",
        );
        check_error(
            &format!("{MOONCAKE}\n\n{}\n{MOONCAKE}\n", &MOONCAKE[..20]),
            "line 3: no JSON object (EOF while parsing a string, at column 20), expected one JSON object a line",
        );
    }

    #[test]
    fn line_ends_are_no_matter() {
        let check = |input: &str, sessions: usize| {
            let trace = read_trace("test", input.as_bytes()).expect("a good trace");
            assert_eq!(
                (trace.sessions.len(), trace.block_size),
                (sessions, 512),
                "for {input:?}"
            );
            trace.check_invariants();
        };
        check(&format!("\r\n{MOONCAKE}\r\n\n{MOONCAKE}"), 2);
        check(&MOONCAKE.replace(", ", ",\n  "), 1);
        check(&format!("{0}\n{0}\n", MOONCAKE.replace(", ", ",\n  ")), 2);
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_reader_panic_or_break_a_promise(
            session in any::<bool>(),
            place in any::<prop::sample::Index>(),
            removed in 0_usize..20,
            bytes in proptest::collection::vec(prop::sample::select(b"{}[]\",:-.0193aenst \n\\".to_vec()), 0..6),
        ) {
            const SESSION: &str = r#"{"id": "a", "block_size": 4, "requests": [{"t": 0, "type": "n", "in": 9, "out": 3, "hash_ids":
                [1, 2], "api_time": 2}, {"t": 5, "duration_ms": 9, "type": "subagent", "requests": [{"t": 0, "type": "s", "in":
                4, "out": 1, "hash_ids": [7]}]}, {"t": 6.5, "type": "n", "in": 9, "out": 3, "hash_ids": [1, 2]}]}"#;
            let mut text = if session { SESSION } else { MOONCAKE }.as_bytes().to_vec();
            let from = place.index(text.len());
            let to = (from + removed).min(text.len());
            text.splice(from..to, bytes);
            if let Ok(trace) = read_trace("test", text.as_slice()) {
                trace.check_invariants();
            }
        }
    }
}
