//! Mooncake's traces: one request a line with an absolute time and ids of its blocks of 512 tokens, shared by all rows.
//!
//! The rows name no session, so each becomes a session of one turn that starts at its recorded time; what rows share
//! they share by their ids. The last id may be that of a partial block; a partial block has no content id in a
//! [`Turn`], and is dropped here.

use super::fields::{Dates, Object};
use super::{LineReader, TraceProblem};
use crate::trace::{Session, Turn};
use homing_units::Duration;

/// Tokens in a block of every published Mooncake trace.
const BLOCK_SIZE: u32 = 512;

/// The block size of a trace's rows: their `block_size`, a field that this project adds where it is not 512, or what
/// the caller says, or 512.
#[derive(Debug)]
pub(super) struct BlockSize {
    given: Option<u32>,
    found: Option<u32>,
}

impl BlockSize {
    pub(super) const fn new(given: Option<u32>) -> Self {
        Self { given, found: None }
    }

    /// The block size of this row, which is that of all.
    pub(super) fn of(&mut self, line: &Object<'_>) -> Result<u32, TraceProblem> {
        const EXPECTED: &str = "a number of tokens, at least 1";
        let own = match line.has("block_size") {
            true => line.required_positive("block_size", EXPECTED)?,
            false => self.given.unwrap_or(BLOCK_SIZE),
        };
        match *self.found.get_or_insert(own) {
            found if found == own => Ok(own),
            found => {
                let expected = format!("{found}, the block size of the rows before");
                Err(line.wrong("block_size", &own.to_string(), &expected))
            }
        }
    }

    /// The block size of the rows so far.
    pub(super) fn get(&self) -> u32 {
        self.found.or(self.given).unwrap_or(BLOCK_SIZE)
    }
}

/// Reads rows.
#[derive(Debug)]
pub(super) struct Reader {
    block_size: BlockSize,
    dates: Dates,
}

impl Reader {
    pub(super) fn new(block_size: Option<u32>) -> Self {
        Self {
            block_size: BlockSize::new(block_size),
            dates: Dates::default(),
        }
    }
}

impl LineReader for Reader {
    fn read(&mut self, line: &Object<'_>, sessions: &mut Vec<Session>) -> Result<(), TraceProblem> {
        let expected = "the time of arrival in milliseconds, at least 0";
        let start = line.date("timestamp", 1e-3, expected)?;
        self.dates.check(line, "timestamp", start)?;
        let turn = turn(line, self.block_size.of(line)?)?;
        sessions.push(Session {
            id: format!("row-{}", sessions.len() + 1),
            start: Some(start),
            turns: vec![turn],
        });
        Ok(())
    }

    fn block_size(&self) -> u32 {
        self.block_size.get()
    }
}

/// The one turn of a row with an id for each started block, without its place in time.
pub(super) fn turn(line: &Object<'_>, block_size: u32) -> Result<Turn, TraceProblem> {
    let prompt_tokens = line.required_tokens("input_length", 1)?;
    let output_tokens = line.required_tokens("output_length", 0)?;
    let mut content = line.ids("hash_ids")?;
    let blocks = prompt_tokens.div_ceil(block_size) as usize;
    if content.len() != blocks {
        let found = format!("{} ids", content.len());
        let expected = format!("{blocks} ids, one for each started block of an `input_length` of {prompt_tokens}");
        return Err(line.wrong("hash_ids", &found, &expected));
    }
    content.truncate((prompt_tokens / block_size) as usize);
    // A request samples at least one token, whatever was recorded.
    let output_tokens = output_tokens.max(1);
    Ok(Turn {
        agent: 0,
        prompt_tokens,
        output_tokens,
        content: content.into(),
        after: Vec::new(),
        gap: Duration::ZERO,
    })
}

#[cfg(test)]
mod tests {
    use crate::formats::read_trace;
    use homing_units::Duration;

    fn check_error(row: &str, expected: &str) {
        let error = read_trace("test", row.as_bytes()).expect_err("a broken row");
        assert_eq!(error.to_string(), expected, "for {row}");
    }

    #[test]
    fn a_row_is_a_session_of_one_turn() {
        let rows = r#"{"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}
                      {"timestamp": 1500, "input_length": 1100, "output_length": 0, "hash_ids": [0, 1, 9]}"#;
        let rows = rows.replace("                      ", "");
        let trace = read_trace("test", rows.as_bytes()).expect("a good trace");
        trace.check_invariants();
        assert_eq!(trace.sessions[1].start, Some(Duration::from_millis(1500)));
        let turn = &trace.sessions[1].turns[0];
        assert_eq!(
            (turn.prompt_tokens, turn.output_tokens),
            (1100, 1),
            "no output counts as one token"
        );
        assert_eq!(
            turn.content[..],
            [0, 1],
            "the partial block has no id, and ids are shared by all rows"
        );
    }

    #[test]
    fn dates_count_from_the_earliest() {
        let row =
            |time: u64| format!(r#"{{"timestamp": {time}, "input_length": 3, "output_length": 5, "hash_ids": [0]}}"#);
        let check = |times: [u64; 2], expected: [u64; 2]| {
            let text = times.map(row).join("\n");
            let trace = read_trace("test", text.as_bytes()).expect("good rows");
            let starts = trace
                .sessions
                .iter()
                .map(|session| session.start.expect("a time").as_millis() as u64);
            assert_eq!(starts.collect::<Vec<_>>(), expected, "{times:?}");
        };
        check([1_700_000_000_700, 1_700_000_000_000], [700, 0]);
        check([86_400_000, 86_400_500], [86_400_000, 86_400_500]);
    }

    #[test]
    fn a_broken_row_names_its_field() {
        check_error(
            r#"{"timestamp": 0, "input_length": 1025, "output_length": 5, "hash_ids": [0, 1]}"#,
            "line 1: field `hash_ids` is `2 ids`, expected 3 ids, one for each started block of an `input_length` of 1025",
        );
        check_error(
            r#"{"timestamp": -3, "input_length": 1, "output_length": 5, "hash_ids": [0]}"#,
            "line 1: field `timestamp` is `-3`, expected the time of arrival in milliseconds, at least 0",
        );
        check_error(
            r#"{"timestamp": 0, "input_length": "long", "output_length": 5, "hash_ids": [0]}"#,
            "line 1: field `input_length` is `\"long\"`, expected a number of tokens, at least 1",
        );
        check_error(
            r#"{"timestamp": 0, "input_length": 0, "output_length": 5, "hash_ids": []}"#,
            "line 1: field `input_length` is `0`, expected a number of tokens, at least 1",
        );
        check_error(
            r#"{"timestamp": 0, "input_length": 3, "output_length": 4294967295, "hash_ids": [0]}"#,
            "line 1: field `output_length` is `4294967295`, expected a number of tokens, at most 100000000",
        );
        check_error(
            r#"{"timestamp": 0, "input_length": 1e30, "output_length": 1, "hash_ids": [0]}"#,
            "line 1: field `input_length` is `1e30`, expected a number of tokens, at most 100000000",
        );
        check_error(
            r#"{"timestamp": 0, "input_length": 1025, "output_length": 5, "hash_ids": [0, 1, -2]}"#,
            "line 1: field `hash_ids[2]` is `-2`, expected a block id, a whole number from 0",
        );
        check_error(
            r#"{"timestamp": 1e17, "input_length": 3, "output_length": 5, "hash_ids": [0]}"#,
            "line 1: field `timestamp` is `100000000000000000`, expected the time of arrival in milliseconds, at least 0",
        );
        check_error(
            r#"{"timestamp": 0, "input_length": 3, "output_length": 5, "hash_ids": [0]}
{"timestamp": 1700000000000, "input_length": 3, "output_length": 5, "hash_ids": [0]}"#,
            "line 2: field `timestamp` is `1700000000000`, expected a time within a year of the first row's",
        );
        check_error(
            r#"{"timestamp": 0, "input_length": 3, "output_length": 5, "hash_ids": [0], "timestamp": 1}"#,
            "line 1: no JSON object (field `timestamp` twice, at column 88), expected one JSON object a line",
        );
        check_error(
            r#"{"timestamp": null, "input_length": 3, "output_length": 5, "hash_ids": [0]}"#,
            "line 1: field `timestamp` is missing, expected the time of arrival in milliseconds, at least 0",
        );
        check_error(
            r#"{"timestamp": 3, "input_length": 3, "output_length": 5}"#,
            "line 1: field `hash_ids` is missing, expected it as in a Mooncake trace",
        );
        let good = r#"{"timestamp": 0, "input_length": 3, "output_length": 5, "hash_ids": [0]}"#;
        check_error(
            &format!("{good}\n{}", r#"{"timestamp": 0, "input_length": 3, "hash_ids": [0]}"#),
            "line 2: field `output_length` is missing, expected a number of tokens",
        );
    }
}
