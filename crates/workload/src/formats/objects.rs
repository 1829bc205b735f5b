//! Splits bytes into JSON objects: one a line, or, where the first line holds no whole object, one after the other.
//!
//! A published session is often a file of its own, printed over many lines; traces of many sessions have one a line. A
//! broken line of the latter kind must not swallow those after it, so the first line decides for the whole input.

use super::{TraceError, TraceProblem};
use std::io::{BufRead, Read};

/// An object may have so many bytes. The longest session seen has 9 MB; what is above this is no trace.
pub(super) const MAX_OBJECT_BYTES: u64 = 256 << 20;

/// The objects of an input.
pub(super) struct Objects<R> {
    input: R,
    /// Lines read so far.
    lines: u64,
    /// Whether objects go over line ends; known after the first line.
    spanning: Option<bool>,
    bytes: Vec<u8>,
}

impl<R: BufRead> Objects<R> {
    /// The objects of `input`, which begins on line `first`.
    pub(super) const fn new(input: R, first: u64) -> Self {
        Self {
            input,
            lines: first - 1,
            spanning: None,
            bytes: Vec::new(),
        }
    }

    /// The next object's bytes, not yet known to be JSON, and the line on which it begins; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<(u64, &[u8])>, TraceError> {
        self.bytes.clear();
        let mut first_line = self.lines + 1;
        let mut nesting = Nesting::default();
        while self.add_line()? {
            if self.bytes.trim_ascii().is_empty() {
                first_line = self.lines + 1;
                self.bytes.clear();
                continue;
            }
            let open = nesting.is_open_after(&self.bytes);
            if !(open && *self.spanning.get_or_insert(open)) {
                self.spanning = Some(self.spanning.unwrap_or(false));
                break;
            }
        }
        Ok((!self.bytes.is_empty()).then_some((first_line, self.bytes.as_slice())))
    }

    /// Adds the next line to the object; false at the end.
    fn add_line(&mut self) -> Result<bool, TraceError> {
        let line = self.lines + 1;
        let left = MAX_OBJECT_BYTES + 1 - self.bytes.len() as u64;
        let read = (&mut self.input)
            .take(left)
            .read_until(b'\n', &mut self.bytes)
            .map_err(|error| TraceError {
                line,
                problem: error.into(),
            })?;
        if self.bytes.len() as u64 > MAX_OBJECT_BYTES {
            return Err(TraceError {
                line,
                problem: TraceProblem::TooLong,
            });
        }
        self.lines = if read > 0 { line } else { self.lines };
        Ok(read > 0)
    }
}

/// How deep in braces and brackets the end of some bytes is. It looks at each byte once.
#[derive(Default)]
struct Nesting {
    seen: usize,
    depth: u32,
    in_string: bool,
    escaped: bool,
}

impl Nesting {
    /// Whether something is still open after `bytes`, which begin with those of the calls before.
    fn is_open_after(&mut self, bytes: &[u8]) -> bool {
        for &byte in &bytes[self.seen..] {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.in_string => self.escaped = true,
                b'"' => self.in_string = !self.in_string,
                b'{' | b'[' if !self.in_string => self.depth = self.depth.saturating_add(1),
                b'}' | b']' if !self.in_string => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
        self.seen = bytes.len();
        self.depth > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(input: &str, expected: &[(u64, &str)]) {
        let mut objects = Objects::new(input.as_bytes(), 1);
        let mut found = Vec::new();
        while let Some((line, bytes)) = objects.next().expect("bytes in memory can be read") {
            found.push((line, String::from_utf8_lossy(bytes).trim().to_owned()));
        }
        let found: Vec<(u64, &str)> = found.iter().map(|(line, text)| (*line, text.as_str())).collect();
        assert_eq!(found, expected, "for {input:?}");
    }

    #[test]
    fn the_first_line_decides_whether_objects_go_over_line_ends() {
        check("", &[]);
        check("\n \n", &[]);
        check("{}\n\n{\"a\": 1}", &[(1, "{}"), (3, "{\"a\": 1}")]);
        check(
            "{}\n{\"a\":\n1}\n{}",
            &[(1, "{}"), (2, "{\"a\":"), (3, "1}"), (4, "{}")],
        );
        check(
            "\n{\"a\":\n [1,\n 2]}\n\n{\n}\n",
            &[(2, "{\"a\":\n [1,\n 2]}"), (6, "{\n}")],
        );
        check("{\"a\": \"}\\\"\n{\"}", &[(1, "{\"a\": \"}\\\"\n{\"}")]);
        check("{\"a\":\n", &[(1, "{\"a\":")]);
        check("}}\n{}", &[(1, "}}"), (2, "{}")]);
    }
}
