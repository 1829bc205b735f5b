//! Readers of recorded traces: one file a format; the format is recognised from the first JSON object, or from the header
//! of a table.
//!
//! Objects, and not one document, because real traces are larger than a reader wants to hold twice: each object becomes
//! turns before the next is read; they come one a line, printed over many, or as the elements of one array.
//! Decompression is the caller's. A new format is a file beside these, a variant of `Format` with the fields that give it
//! away, and an arm in `Format::reader`.

mod agentic;
mod bailian;
mod claude_code;
mod csv;
mod fields;
mod items;
mod mooncake;
mod objects;

use crate::trace::{Session, Trace};
use fields::{Object, YEAR};
use items::Items;
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
    #[error("the trace is empty, expected at least one request")]
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
    /// The row of a table is longer than any trace's.
    #[error("more than `{limit}` bytes, expected a row of a table")]
    RowTooLong {
        /// Bytes that a row may have.
        limit: u64,
    },
    /// The row of a table has more cells than its first line: what is in which column nobody knows.
    #[error("a row of {found} cells, expected at most {expected} as in the first line")]
    TooManyCells {
        /// Cells of the row.
        found: usize,
        /// Cells of the first line.
        expected: usize,
    },
    /// The input is neither JSON objects nor a known table.
    #[error("unknown table with the columns {found}, expected JSON objects, {known}", known = csv::KNOWN)]
    UnknownTable {
        /// The columns of the first line.
        found: String,
    },
    /// A JSON array is no list of objects.
    #[error("broken JSON array: found {found}, expected {expected}")]
    BrokenArray {
        /// What is there.
        found: String,
        /// What should be.
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
    /// Requests that name what they wait for.
    Agentic,
    /// Requests that name the one before them in their chat.
    Bailian,
    /// Mooncake's requests, one a line.
    Mooncake,
}

impl Format {
    /// The most special first: some have another's fields and more.
    const ALL: [Self; 4] = [Self::ClaudeCode, Self::Agentic, Self::Bailian, Self::Mooncake];

    /// Its name and the fields that give it away.
    const fn signature(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::ClaudeCode => ("a coding-agent trace", &["id", "block_size", "requests"]),
            Self::Agentic => (
                "an agentic Mooncake trace",
                &["request_id", "input_length", "output_length", "hash_ids"],
            ),
            Self::Bailian => (
                "a Qwen-Bailian trace",
                &[
                    "chat_id",
                    "parent_chat_id",
                    "timestamp",
                    "input_length",
                    "output_length",
                    "hash_ids",
                ],
            ),
            Self::Mooncake => (
                "a Mooncake trace",
                &["timestamp", "input_length", "output_length", "hash_ids"],
            ),
        }
    }

    /// The format whose fields `first` has. A row that is null in a field, or lacks one of a format's, is a broken one of
    /// that.
    fn recognise(first: &Object<'_>) -> Result<Self, TraceProblem> {
        let lacks = |format: &Self, has: &dyn Fn(&str) -> bool| -> Vec<&'static str> {
            let fields = format.signature().1.iter().copied();
            fields.filter(|field| !has(field)).collect()
        };
        let with_all = |has: &dyn Fn(&str) -> bool| Self::ALL.into_iter().find(|format| lacks(format, has).is_empty());
        if let Some(format) =
            with_all(&|field| first.has(field)).or_else(|| with_all(&|field| first.names_field(field)))
        {
            return Ok(format);
        }
        // The most general first: the more special have all its fields and more.
        for format in Self::ALL.into_iter().rev() {
            if let &[field] = lacks(&format, &|field| first.names_field(field)).as_slice() {
                return Err(TraceProblem::Missing {
                    field: field.to_owned(),
                    expected: format!("it as in {}", format.signature().0),
                });
            }
        }
        Err(TraceProblem::UnknownFormat {
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

    fn reader(self, options: &ReadOptions) -> Box<dyn LineReader> {
        match self {
            Self::ClaudeCode => Box::new(claude_code::Reader::new(options.shared_boilerplate)),
            Self::Agentic => Box::new(agentic::Reader::new(options.block_size)),
            Self::Bailian => Box::new(bailian::Reader::default()),
            Self::Mooncake => Box::new(mooncake::Reader::new(options.block_size)),
        }
    }
}

/// What a format does: turn one line after the other into sessions.
trait LineReader {
    /// The sessions of one line are added to `sessions`.
    fn read(&mut self, line: &Object<'_>, sessions: &mut Vec<Session>) -> Result<(), TraceProblem>;

    /// Tokens in a block; known after the first line.
    fn block_size(&self) -> u32;

    /// Adds the sessions that need all lines. An error comes with its line.
    fn finish(&mut self, _sessions: &mut Vec<Session>) -> Result<(), (u64, TraceProblem)> {
        Ok(())
    }
}

/// How a trace is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadOptions {
    /// Whether the tools with which coding-agent sessions begin are one content in all sessions of equal `tool_tokens`,
    /// and the system prompt after them in all of these that have equal `system_tokens` too. Their ids are local to a
    /// session, so that the trace does not say it; without it no session shares anything with another.
    pub shared_boilerplate: bool,
    /// Tokens in a block of a Mooncake trace whose rows do not say it; 512 where this is `None`. Formats that say their
    /// block size, or have one only, pass it over.
    pub block_size: Option<u32>,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self {
            shared_boilerplate: true,
            block_size: None,
        }
    }
}

/// JSON objects, however they are laid out.
enum Source<R> {
    Lines(Objects<R>),
    Array(Items<R>),
}

impl<R: BufRead> Source<R> {
    fn next(&mut self) -> Result<Option<(u64, &[u8])>, TraceError> {
        match self {
            Self::Lines(objects) => objects.next(),
            Self::Array(items) => items.next(),
        }
    }
}

/// Reads a trace from uncompressed bytes. `name` becomes the trace's name.
///
/// # Errors
/// The first line that is broken or contradicts itself, with its number, the field and what was expected.
pub fn read_trace(name: &str, input: impl BufRead) -> Result<Trace, TraceError> {
    read_trace_with(name, input, &ReadOptions::default())
}

/// Reads a trace from uncompressed bytes as `options` say.
///
/// # Errors
/// As [`read_trace`].
///
/// # Panics
/// If the options' block size is 0.
pub fn read_trace_with(name: &str, mut input: impl BufRead, options: &ReadOptions) -> Result<Trace, TraceError> {
    assert_ne!(options.block_size, Some(0), "a block holds at least one token");
    let mut line = 1;
    let first = first_byte(&mut input, &mut line).map_err(|error| TraceError {
        line,
        problem: error.into(),
    })?;
    let (block_size, mut sessions) = match first {
        None => {
            return Err(TraceError {
                line: 1,
                problem: TraceProblem::Empty,
            });
        }
        Some(b'{') => read_objects(Source::Lines(Objects::new(input, line)), options)?,
        Some(b'[') => read_objects(Source::Array(Items::new(input, line)), options)?,
        Some(_) => (csv::BLOCK_SIZE, csv::read(input, line, MAX_SESSIONS)?),
    };
    if sessions.is_empty() {
        return Err(TraceError {
            line,
            problem: TraceProblem::Empty,
        });
    }
    count_from_earliest(&mut sessions);
    Ok(Trace {
        name: name.to_owned(),
        block_size,
        sessions,
    })
}

/// Starts that count from an epoch, more than a year before the earliest of them, count from that one instead: nobody
/// waits for 1970 to pass.
fn count_from_earliest(sessions: &mut [Session]) {
    let earliest = sessions
        .iter()
        .filter_map(|session| session.start)
        .min()
        .unwrap_or_default();
    if earliest > YEAR {
        for start in sessions.iter_mut().filter_map(|session| session.start.as_mut()) {
            *start -= earliest;
        }
    }
}

/// The first byte that is neither space nor a mark of the encoding, still to be read, and its line.
fn first_byte(input: &mut impl BufRead, line: &mut u64) -> std::io::Result<Option<u8>> {
    const MARK: &[u8] = b"\xef\xbb\xbf";
    loop {
        let bytes = input.fill_buf()?;
        let Some(&byte) = bytes.first() else { return Ok(None) };
        if !byte.is_ascii_whitespace() && !MARK.contains(&byte) {
            return Ok(Some(byte));
        }
        *line += u64::from(byte == b'\n');
        input.consume(1);
    }
}

/// The block size and the sessions.
fn read_objects(mut source: Source<impl BufRead>, options: &ReadOptions) -> Result<(u32, Vec<Session>), TraceError> {
    let mut reader: Option<Box<dyn LineReader>> = None;
    let mut sessions = Vec::new();
    while let Some((line, bytes)) = source.next()? {
        let at = |problem| TraceError { line, problem };
        let object = Object::parse(line, bytes).map_err(at)?;
        let reader = match &mut reader {
            Some(reader) => reader,
            None => reader.insert(Format::recognise(&object).map_err(at)?.reader(options)),
        };
        reader.read(&object, &mut sessions).map_err(at)?;
        if sessions.len() > MAX_SESSIONS {
            return Err(at(TraceProblem::TooManySessions));
        }
    }
    let Some(mut reader) = reader else {
        return Ok((1, Vec::new()));
    };
    let finished = reader.finish(&mut sessions);
    finished.map_err(|(line, problem)| TraceError { line, problem })?;
    Ok((reader.block_size(), sessions))
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
        check_error("", "line 1: the trace is empty, expected at least one request");
        check_error("\n  \n", "line 1: the trace is empty, expected at least one request");
        check_error(
            "{\"timestamp\": 0, \"chat_id\": 7}",
            "line 1: unknown trace format with the fields `chat_id`, `timestamp`, expected a coding-agent trace (`id`, \
             `block_size`, `requests`) or an agentic Mooncake trace (`request_id`, `input_length`, `output_length`, `hash_ids`) or \
             a Qwen-Bailian trace (`chat_id`, `parent_chat_id`, `timestamp`, `input_length`, `output_length`, `hash_ids`) or \
             a Mooncake trace (`timestamp`, `input_length`, `output_length`, `hash_ids`)",
        );
        check_error(
            "[1, 2]",
            "line 1: broken JSON array: found `1`, expected a JSON object or `]`",
        );
        check_error("[]", "line 1: the trace is empty, expected at least one request");
        check_error(
            &format!("[{MOONCAKE},\n{{\"timestamp\": -1}}]"),
            "line 2: field `timestamp` is `-1`, expected the time of arrival in milliseconds, at least 0",
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
        check(&format!("\u{feff}{MOONCAKE}"), 1);
        check(&format!("[{MOONCAKE}]"), 1);
        check(&format!("\n[\n  {MOONCAKE},\n  {MOONCAKE}\n]\n"), 2);
        check(&format!("{0}\n{0}\n", MOONCAKE.replace(", ", ",\n  ")), 2);
    }

    /// A good input of each kind, with blocks of 4 tokens where the format lets it choose.
    const INPUTS: [&str; 6] = [
        r#"{"id": "a", "block_size": 4, "tool_tokens": 4, "system_tokens": 1, "requests": [{"t": 0, "type": "n", "in": 9, "out": 3,
            "hash_ids": [1, 2], "api_time": 2}, {"t": 5, "duration_ms": 9, "type": "subagent", "requests": [{"t": 0, "type": "s",
            "in": 4, "out": 1, "hash_ids": [7]}]}, {"t": 6.5, "type": "n", "in": 9, "out": 3, "hash_ids": [1, 2]}]}"#,
        MOONCAKE,
        r#"{"request_id": "a", "session_id": "s", "input_length": 6, "output_length": 1, "hash_ids": [1, 2], "timestamp": 3, "block_size": 4}
{"request_id": "b", "session_id": "t", "input_length": 8, "output_length": 1, "hash_ids": [1, 9], "wait_for": ["a"], "delay": 2.5, "block_size": 4}
{"request_id": "c", "session_id": "s", "input_length": 8, "output_length": 1, "hash_ids": [1, 9], "wait_for": ["b", "a"], "block_size": 4}"#,
        r#"[{"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 17, "output_length": 3, "hash_ids": [1, 2]},
{"chat_id": 2, "parent_chat_id": 1, "timestamp": 2, "input_length": 16, "output_length": 3, "hash_ids": [1]}]"#,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\n2023-11-16 18:17:04+01:00,7,0\n",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,472,18,490,API log\n7.5,x,1,2,3,y\n",
    ];

    #[test]
    fn each_input_of_the_property_below_is_good() {
        for input in INPUTS {
            read_trace("test", input.as_bytes()).expect(input).check_invariants();
        }
    }

    proptest! {
        #[test]
        fn no_edit_makes_a_reader_panic_or_break_a_promise(
            input in 0..INPUTS.len(),
            edits in proptest::collection::vec(
                (
                    any::<prop::sample::Index>(),
                    0_usize..20,
                    proptest::collection::vec(prop::sample::select(b"{}[]\",:-.0193aenst \n\\".to_vec()), 0..6),
                ),
                1..3,
            ),
        ) {
            let mut text = INPUTS[input].as_bytes().to_vec();
            for (place, removed, bytes) in edits {
                let from = place.index(text.len() + 1);
                let to = (from + removed).min(text.len());
                text.splice(from..to, bytes);
            }
            if let Ok(trace) = read_trace("test", text.as_slice()) {
                trace.check_invariants();
            }
        }

        #[test]
        fn no_bytes_make_a_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), begin in 0_usize..5) {
            let begin: &[u8] = [&b""[..], b"{", b"[{", AZURE_HEADER, b"[{\"request_id\":"][begin];
            if let Ok(trace) = read_trace("test", [begin, &bytes].concat().as_slice()) {
                trace.check_invariants();
            }
        }

        #[test]
        fn no_row_makes_a_reader_panic(
            rows in proptest::collection::vec((0_u8..4, 0_u8..4, -2_i64..40, proptest::collection::vec(0_u8..6, 0..3), -1_i64..3), 1..6),
            bailian in any::<bool>(),
        ) {
            let row = |(id, session, length, waits, time): &(u8, u8, i64, Vec<u8>, i64)| {
                let ids: Vec<u64> = (0..u64::try_from(*length).unwrap_or(0).div_ceil(16)).collect();
                let waits: Vec<String> = waits.iter().map(u8::to_string).collect();
                format!(
                    r#"{{"request_id": "{id}", "session_id": "{session}", "chat_id": {id}, "parent_chat_id": {session}, "input_length": {length}, "output_length": 1, "hash_ids": {ids:?}, "wait_for": {waits:?}, "timestamp": {time}, "block_size": 16}}"#
                )
            };
            let mut text = rows.iter().map(row).collect::<Vec<_>>().join("\n");
            if bailian {
                text = text.replace("request_id", "other");
            }
            if let Ok(trace) = read_trace("test", text.as_bytes()) {
                trace.check_invariants();
                prop_assert_eq!(trace.turn_count(), rows.len());
            }
        }
    }

    const AZURE_HEADER: &[u8] = b"TIMESTAMP,ContextTokens,GeneratedTokens\n";
}
