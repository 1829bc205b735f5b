//! The objects of one JSON array, one after the other, without the whole array in memory.

use super::objects::MAX_OBJECT_BYTES;
use super::{TraceError, TraceProblem};
use std::io::BufRead;

/// The elements of an array.
pub(super) struct Items<R> {
    input: R,
    /// The line of the next byte.
    line: u64,
    state: State,
    bytes: Vec<u8>,
}

/// Where in the array the next byte is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the bracket.
    Before,
    /// After the bracket: an element or the end comes.
    First,
    /// After an element: a comma or the end comes.
    After,
    /// After a comma: an element comes.
    Comma,
    /// After the end.
    End,
}

impl<R: BufRead> Items<R> {
    /// `input` begins with the array's bracket on line `line`.
    pub(super) const fn new(input: R, line: u64) -> Self {
        Self {
            input,
            line,
            state: State::Before,
            bytes: Vec::new(),
        }
    }

    /// The next element's bytes, not yet known to be JSON, and the line on which it begins; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<(u64, &[u8])>, TraceError> {
        loop {
            let byte = self.peek()?;
            let next = match (self.state, byte) {
                (_, Some(b' ' | b'\t' | b'\r' | b'\n')) => self.state,
                (State::Before, Some(b'[')) => State::First,
                (State::First | State::After, Some(b']')) => State::End,
                (State::After, Some(b',')) => State::Comma,
                (State::First | State::Comma, Some(b'{')) => {
                    self.state = State::After;
                    let line = self.line;
                    self.object()?;
                    return Ok(Some((line, &self.bytes)));
                }
                (State::End, None) => return Ok(None),
                (state, byte) => return Err(self.unexpected(state, byte)),
            };
            self.state = next;
            self.take(byte);
        }
    }

    /// Reads an object, from its brace to the one that closes it.
    fn object(&mut self) -> Result<(), TraceError> {
        self.bytes.clear();
        let (mut depth, mut in_string, mut escaped) = (0_u32, false, false);
        while let Some(byte) = self.peek()? {
            self.take(Some(byte));
            self.bytes.push(byte);
            if self.bytes.len() as u64 > MAX_OBJECT_BYTES {
                return Err(self.at(TraceProblem::TooLong));
            }
            match byte {
                _ if escaped => escaped = false,
                b'\\' if in_string => escaped = true,
                b'"' => in_string = !in_string,
                b'{' | b'[' if !in_string => depth += 1,
                b'}' | b']' if !in_string => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return Ok(());
            }
        }
        Err(self.unexpected(State::First, None))
    }

    fn peek(&mut self) -> Result<Option<u8>, TraceError> {
        let line = self.line;
        let at = |error: std::io::Error| TraceError {
            line,
            problem: error.into(),
        };
        Ok(self.input.fill_buf().map_err(at)?.first().copied())
    }

    /// Passes over the byte that was peeked at.
    fn take(&mut self, byte: Option<u8>) {
        if byte.is_some() {
            self.input.consume(1);
            self.line += u64::from(byte == Some(b'\n'));
        }
    }

    fn unexpected(&self, state: State, byte: Option<u8>) -> TraceError {
        let found = byte.map_or_else(
            || "the end".to_owned(),
            |byte| format!("`{}`", char::from(byte).escape_default()),
        );
        let expected = match state {
            State::Before => "a `[`",
            State::First => "a JSON object or `]`",
            State::After => "`,` or `]`",
            State::Comma => "a JSON object",
            State::End => "nothing after the array",
        };
        self.at(TraceProblem::BrokenArray {
            found,
            expected: expected.to_owned(),
        })
    }

    const fn at(&self, problem: TraceProblem) -> TraceError {
        TraceError {
            line: self.line,
            problem,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn items(input: &str) -> Result<Vec<(u64, String)>, String> {
        let mut items = Items::new(input.as_bytes(), 1);
        let mut found = Vec::new();
        while let Some((line, bytes)) = items.next().map_err(|error| error.to_string())? {
            found.push((line, String::from_utf8_lossy(bytes).into_owned()));
        }
        Ok(found)
    }

    #[test]
    fn elements_come_one_by_one() {
        let check = |input: &str, expected: &[(u64, &str)]| {
            let expected = expected.iter().map(|&(line, text)| (line, text.to_owned())).collect();
            assert_eq!(items(input), Ok(expected), "{input:?}");
        };
        check("[]", &[]);
        check("[ {\"a\": [1, {}]},\n{} ]\n", &[(1, "{\"a\": [1, {}]}"), (2, "{}")]);
        check("[\n{\"a\":\n\"]}\\\"\"}\n]", &[(2, "{\"a\":\n\"]}\\\"\"}")]);
    }

    #[test]
    fn a_broken_array_is_refused_with_its_line() {
        let check = |input: &str, expected: &str| assert_eq!(items(input), Err(expected.to_owned()), "{input:?}");
        check(
            "[1]",
            "line 1: broken JSON array: found `1`, expected a JSON object or `]`",
        );
        check("[{}\n{}]", "line 2: broken JSON array: found `{`, expected `,` or `]`");
        check("[{},]", "line 1: broken JSON array: found `]`, expected a JSON object");
        check("[{}", "line 1: broken JSON array: found the end, expected `,` or `]`");
        check(
            "[{\"a\": ",
            "line 1: broken JSON array: found the end, expected a JSON object or `]`",
        );
        check(
            "[{}] x",
            "line 1: broken JSON array: found `x`, expected nothing after the array",
        );
    }
}
