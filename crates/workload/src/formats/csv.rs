//! Tables of single requests with times and lengths: Azure's LLM inference traces and `BurstGPT`.
//!
//! Columns as published (their names were checked against public readers of both, not against the releases themselves):
//! Azure `TIMESTAMP,ContextTokens,GeneratedTokens` with dates such as `2023-11-16 18:17:03.9799600`, in the 2024
//! release with `+00:00` behind; `BurstGPT` `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type` with
//! seconds, in its third part also `Session ID` and `Elapsed time`. Other columns are passed over: so are `BurstGPT`'s
//! sessions, because nothing says what their prompts share.
//!
//! Each row is a session of one turn that shares nothing with others, in blocks of 64 tokens (neither trace has
//! blocks). Times count from the earliest row. A recorded 0 (failed requests of `BurstGPT`) becomes 1 token.

use super::fields::{MAX_TOKENS, YEAR, shortened};
use super::{TraceError, TraceProblem, quoted};
use crate::content::{Scope, local_id};
use crate::trace::{Session, Turn};
use homing_units::Duration;
use std::io::{BufRead, Read};

/// Tokens in a block; the traces say nothing of it.
pub(super) const BLOCK_SIZE: u32 = 64;

/// A row may have so many bytes.
const MAX_ROW_BYTES: u64 = 64 << 10;

/// The tables that are known, for an error message.
pub(super) const KNOWN: &str = "an Azure table (`TIMESTAMP`, `ContextTokens`, `GeneratedTokens`) or a BurstGPT table \
                                (`Timestamp`, `Request tokens`, `Response tokens`)";

/// What a table's columns are called.
struct Columns {
    time: &'static str,
    prompt: &'static str,
    output: &'static str,
    total: Option<&'static str>,
    /// Nanoseconds of a time.
    parse: fn(&str) -> Option<i128>,
    expected_time: &'static str,
}

const AZURE: Columns = Columns {
    time: "TIMESTAMP",
    prompt: "ContextTokens",
    output: "GeneratedTokens",
    total: None,
    parse: date_nanoseconds,
    expected_time: "a date such as `2023-11-16 18:17:03.979`",
};

const BURST_GPT: Columns = Columns {
    time: "Timestamp",
    prompt: "Request tokens",
    output: "Response tokens",
    total: Some("Total tokens"),
    parse: seconds_nanoseconds,
    expected_time: "a time in seconds",
};

/// Reads a table whose first line is line `first`, up to `max_sessions` rows.
pub(super) fn read(input: impl BufRead, first: u64, max_sessions: usize) -> Result<Vec<Session>, TraceError> {
    let mut lines = Lines { input, line: first - 1 };
    let header = lines.next()?.unwrap_or_default();
    let table = Table::recognise(&header).map_err(|problem| TraceError { line: first, problem })?;
    let mut rows = Vec::new();
    while let Some(text) = lines.next()? {
        if text.trim().is_empty() {
            continue;
        }
        let at = |problem| TraceError {
            line: lines.line,
            problem,
        };
        if rows.len() == max_sessions {
            return Err(at(TraceProblem::TooManySessions));
        }
        rows.push(table.row(lines.line, &text).map_err(at)?);
    }
    let earliest = rows.iter().map(|row| row.time).min().unwrap_or_default();
    if let Some(late) = rows.iter().find(|row| (row.time - earliest) as u128 > YEAR.as_nanos()) {
        let expected = "a time within a year of the earliest row's";
        return Err(TraceError {
            line: late.line,
            problem: wrong(table.columns.time, &late.text, expected),
        });
    }
    let session = |(index, row): (usize, &Row)| Session {
        id: format!("row-{}", index + 1),
        start: Some(Duration::from_nanos(
            u64::try_from(row.time - earliest).unwrap_or(u64::MAX),
        )),
        turns: vec![row.turn(index as u32)],
    };
    Ok(rows.iter().enumerate().map(session).collect())
}

/// The lines of a table.
struct Lines<R> {
    input: R,
    /// The line that was read last.
    line: u64,
}

impl<R: BufRead> Lines<R> {
    fn next(&mut self) -> Result<Option<String>, TraceError> {
        self.line += 1;
        let line = self.line;
        let at = |problem| TraceError { line, problem };
        let mut bytes = Vec::new();
        let read = (&mut self.input).take(MAX_ROW_BYTES + 1).read_until(b'\n', &mut bytes);
        read.map_err(|error| at(error.into()))?;
        if bytes.len() as u64 > MAX_ROW_BYTES {
            return Err(at(TraceProblem::RowTooLong { limit: MAX_ROW_BYTES }));
        }
        Ok((!bytes.is_empty()).then(|| String::from_utf8_lossy(&bytes).into_owned()))
    }
}

/// A row's values, without the spaces and quotes around them.
fn cells(line: &str) -> impl Iterator<Item = &str> {
    line.split(',').map(|cell| cell.trim().trim_matches('"').trim())
}

/// A table: its columns, and where they are.
struct Table {
    columns: &'static Columns,
    /// Cells of a row, at most.
    cells: usize,
    time: usize,
    prompt: usize,
    output: usize,
    total: Option<usize>,
}

/// A row, as it is in the table.
struct Row {
    line: u64,
    /// The time as it is written.
    text: String,
    /// Nanoseconds from some time.
    time: i128,
    prompt_tokens: u32,
    output_tokens: u32,
}

impl Table {
    fn recognise(header: &str) -> Result<Self, TraceProblem> {
        // Of two columns of one name nobody knows which is meant.
        let place = |name: &str| {
            let mut places = cells(header)
                .zip(0..)
                .filter(|(cell, _)| *cell == name)
                .map(|(_, place)| place);
            places.next().filter(|_| places.next().is_none())
        };
        let table = |columns: &'static Columns| {
            Some(Self {
                columns,
                cells: cells(header).count(),
                time: place(columns.time)?,
                prompt: place(columns.prompt)?,
                output: place(columns.output)?,
                total: columns.total.and_then(place),
            })
        };
        table(&AZURE).or_else(|| table(&BURST_GPT)).ok_or_else(|| {
            let columns: Vec<String> = cells(header).map(shortened).collect();
            TraceProblem::UnknownTable {
                found: quoted(columns.iter().map(String::as_str)),
            }
        })
    }

    fn row(&self, number: u64, line: &str) -> Result<Row, TraceProblem> {
        let cells: Vec<&str> = cells(line).collect();
        if cells.len() > self.cells {
            return Err(TraceProblem::TooManyCells {
                found: cells.len(),
                expected: self.cells,
            });
        }
        let cell = |place: usize, name: &str, expected: &str| {
            let missing = || TraceProblem::Missing {
                field: name.to_owned(),
                expected: expected.to_owned(),
            };
            cells
                .get(place)
                .copied()
                .filter(|cell| !cell.is_empty())
                .ok_or_else(missing)
        };
        let tokens = |place: usize, name: &str| {
            let expected = format!("a number of tokens, at most {MAX_TOKENS}");
            let text = cell(place, name, &expected)?;
            let tokens = text.parse::<u32>().ok().filter(|&tokens| tokens <= MAX_TOKENS);
            tokens.ok_or_else(|| wrong(name, text, &expected))
        };
        let Columns {
            time, prompt, output, ..
        } = self.columns;
        let text = cell(self.time, time, self.columns.expected_time)?;
        let row = Row {
            line: number,
            text: text.to_owned(),
            time: (self.columns.parse)(text).ok_or_else(|| wrong(time, text, self.columns.expected_time))?,
            prompt_tokens: tokens(self.prompt, prompt)?,
            output_tokens: tokens(self.output, output)?,
        };
        if let (Some(place), Some(name)) = (self.total, self.columns.total) {
            let sum = row.prompt_tokens + row.output_tokens;
            let total = tokens(place, name)?;
            if total != sum {
                let expected = format!("{sum}, the sum of `{prompt}` and `{output}`");
                return Err(wrong(name, &total.to_string(), &expected));
            }
        }
        Ok(row)
    }
}

impl Row {
    fn turn(&self, session: u32) -> Turn {
        let prompt_tokens = self.prompt_tokens.max(1);
        let id = |block| local_id(session, Scope::Root, block).expect("a prompt has fewer than 2^39 blocks");
        Turn {
            agent: 0,
            prompt_tokens,
            output_tokens: self.output_tokens.max(1),
            content: (0..u64::from(prompt_tokens / BLOCK_SIZE)).map(id).collect(),
            after: Vec::new(),
            gap: Duration::ZERO,
        }
    }
}

fn wrong(field: &str, found: &str, expected: &str) -> TraceProblem {
    TraceProblem::Wrong {
        field: field.to_owned(),
        found: shortened(found),
        expected: expected.to_owned(),
    }
}

/// A number of seconds in nanoseconds.
fn seconds_nanoseconds(text: &str) -> Option<i128> {
    const MAX_SECONDS: f64 = 1e10;
    let seconds = text
        .parse::<f64>()
        .ok()
        .filter(|seconds| (0.0..=MAX_SECONDS).contains(seconds))?;
    Some((seconds * 1e9).round() as i128)
}

/// A date and time in nanoseconds since 1970; an offset from UTC behind it counts.
fn date_nanoseconds(text: &str) -> Option<i128> {
    let (date, time) = text.split_once([' ', 'T'])?;
    let (time, offset_s) = split_offset(time)?;
    let [year, month, day] = numbers(date, '-')?;
    let (clock, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let [hour, minute, second] = numbers(clock, ':')?;
    let good = (1..=12).contains(&month)
        && (1..=days_of(year, month)).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60;
    let digits = (1..=9).contains(&fraction.len()) && fraction.bytes().all(|byte| byte.is_ascii_digit());
    if !good || !digits || year > 9999 {
        return None;
    }
    let nanoseconds = format!("{fraction:0<9}").parse::<i128>().ok()?;
    let seconds = days(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second - offset_s;
    Some(i128::from(seconds) * 1_000_000_000 + nanoseconds)
}

/// A time of day and the seconds that its clock is ahead of UTC.
fn split_offset(time: &str) -> Option<(&str, i64)> {
    if let Some(time) = time.strip_suffix('Z') {
        return Some((time, 0));
    }
    let Some(place) = time.find(['+', '-']) else {
        return Some((time, 0));
    };
    let (hours, minutes) = time[place + 1..].split_once(':')?;
    let (hours, minutes) = (number(hours)?, number(minutes)?);
    if hours >= 24 || minutes >= 60 {
        return None;
    }
    let seconds = hours * 3600 + minutes * 60;
    let ahead = time[place..].starts_with('+');
    Some((&time[..place], if ahead { seconds } else { -seconds }))
}

/// Three numbers with `separator` between them.
fn numbers(text: &str, separator: char) -> Option<[i64; 3]> {
    let mut parts = text.split(separator).map(number);
    let found = [parts.next()??, parts.next()??, parts.next()??];
    parts.next().is_none().then_some(found)
}

/// A number of up to four digits.
fn number(text: &str) -> Option<i64> {
    let digits = (1..=4).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok())?
}

/// Days of a month.
const fn days_of(year: i64, month: i64) -> i64 {
    let (next_year, next_month) = if month == 12 { (year + 1, 1) } else { (year, month + 1) };
    days(next_year, next_month, 1) - days(year, month, 1)
}

/// Days from 1970 to a date: whole eras of 400 years, in which March begins the year so that leap days come last.
const fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::read_trace;

    const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n";
    const BURST: &str =
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,API log\n";

    fn check(table: &str, expected: &[(u64, u32, u32)]) {
        let trace = read_trace("test", table.as_bytes()).expect("a good table");
        trace.check_invariants();
        let rows = trace.sessions.iter().map(|session| {
            let turn = &session.turns[0];
            let start = session.start.expect("it has times").as_millis() as u64;
            (start, turn.prompt_tokens, turn.output_tokens)
        });
        assert_eq!(
            rows.collect::<Vec<_>>(),
            expected,
            "start in ms, prompt, output of {table}"
        );
    }

    fn check_error(table: &str, expected: &str) {
        let error = read_trace("test", table.as_bytes()).expect_err("a broken table");
        assert_eq!(error.to_string(), expected, "for {table}");
    }

    #[test]
    fn rows_are_single_requests_at_their_times() {
        check(
            &format!("{AZURE}2023-11-16 18:17:04.4799600,64,0\r\n\n\"2023-11-17 00:00:00+00:00\",1,7\n"),
            &[(0, 4808, 10), (500, 64, 1), (20_576_020, 1, 7)],
        );
        check(
            &format!("{BURST}7.5,GPT-4,0,20,20,Conversation log"),
            &[(0, 472, 18), (2500, 1, 20)],
        );
        check(
            "Timestamp,Session ID,Request tokens,Response tokens\n9,a,3,4\n5,b,1,2",
            &[(4000, 3, 4), (0, 1, 2)],
        );
        check(&format!("\n{AZURE}"), &[(0, 4808, 10)]);
        let shares = read_trace("test", format!("{AZURE}2023-11-16 18:17:03.9,4808,1").as_bytes()).expect("good");
        assert_ne!(
            shares.sessions[0].turns[0].content[0],
            shares.sessions[1].turns[0].content[0]
        );
    }

    #[test]
    fn a_broken_row_names_its_line_and_column() {
        check_error(
            &format!("{AZURE}2023-11-16 18:17,1,2"),
            "line 3: field `TIMESTAMP` is `2023-11-16 18:17`, expected a date such as `2023-11-16 18:17:03.979`",
        );
        check_error(
            &format!("{AZURE}2023-11-16 18:17:03,-1,2"),
            "line 3: field `ContextTokens` is `-1`, expected a number of tokens, at most 100000000",
        );
        check_error(
            &format!("{AZURE}2023-11-16 18:17:03,1"),
            "line 3: field `GeneratedTokens` is missing, expected a number of tokens, at most 100000000",
        );
        check_error(
            &format!("{BURST}x,GPT-4,1,2,3,log"),
            "line 3: field `Timestamp` is `x`, expected a time in seconds",
        );
        check_error(
            &format!("{BURST}6,GPT-4,1,2,4,log"),
            "line 3: field `Total tokens` is `4`, expected 3, the sum of `Request tokens` and `Response tokens`",
        );
        check_error(
            &format!("{AZURE}1523-11-16 18:17:03,1,2"),
            "line 2: field `TIMESTAMP` is `2023-11-16 18:17:03.9799600`, expected a time within a year of the earliest row's",
        );
        check_error(
            &format!("{BURST}6,\"GPT-4, new\",1,2,3,log"),
            "line 3: a row of 7 cells, expected at most 6 as in the first line",
        );
        check_error(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n",
            "line 1: the trace is empty, expected at least one request",
        );
        check_error(
            "time,tokens\n1,2",
            "line 1: unknown table with the columns `time`, `tokens`, expected JSON objects, an Azure table (`TIMESTAMP`, \
             `ContextTokens`, `GeneratedTokens`) or a BurstGPT table (`Timestamp`, `Request tokens`, `Response tokens`)",
        );
    }

    #[test]
    fn dates_are_nanoseconds_since_1970() {
        let check = |text: &str, expected: Option<i128>| assert_eq!(date_nanoseconds(text), expected, "{text}");
        check("1970-01-01 00:00:00", Some(0));
        check("2000-03-01 00:00:00.5", Some(951_868_800_500_000_000));
        check("2024-02-29T12:00:00.000000001Z", Some(1_709_208_000_000_000_001));
        check("2024-02-29 12:00:00+02:00", Some(1_709_200_800_000_000_000));
        check("2024-13-01 00:00:00", None);
        check("2023-02-29 00:00:00", None);
        check("2023-12-31 00:00:00", Some(1_703_980_800_000_000_000));
        check("2023-12-32 00:00:00", None);
        check("2024-02-29 12:00:00+24:00", None);
        check("2024-02-29 12:00:00+02:60", None);
        check("2024-01-01 00:00", None);
        check("2024-01-01 00:00:00.", None);
        check("2024-01-01", None);
    }
}
