//! A JSON object of which each field is parsed on its own, so that an error can name the field and what it should hold.
//!
//! A derived struct would say "invalid type at column 7041" of a line of 600 KB; the second look at each field costs
//! little beside that. It does not know any format.

use super::TraceProblem;
use homing_units::Duration;
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// A hundred years: no time of a trace is longer.
pub(super) const MAX_NANOSECONDS: f64 = 100.0 * 366.0 * 86_400.0 * 1e9;

/// A JSON object with unparsed fields and its own place in the line.
pub(super) struct Object<'a> {
    /// The line on which the outermost object begins.
    pub line: u64,
    fields: BTreeMap<String, &'a RawValue>,
    path: String,
}

impl<'a> Object<'a> {
    /// The object that a whole line is.
    pub(super) fn parse(number: u64, line: &'a [u8]) -> Result<Self, TraceProblem> {
        let fields = serde_json::from_slice(line.trim_ascii_end()).map_err(|error| {
            // The parser counts lines within this one.
            let said = error.to_string();
            let reason = said.split(" at line ").next().unwrap_or(&said);
            TraceProblem::NoObject {
                reason: format!("{reason}, at column {}", error.column()),
            }
        })?;
        Ok(Self {
            line: number,
            fields,
            path: String::new(),
        })
    }

    /// Whether it has this field, and not null.
    pub(super) fn has(&self, field: &str) -> bool {
        self.fields.get(field).is_some_and(|raw| raw.get() != "null")
    }

    /// The names of its fields, in alphabetical order.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.fields.keys().map(String::as_str)
    }

    /// The field's value, or nothing where it is missing or null.
    pub(super) fn optional<T>(&self, field: &str, expected: &str) -> Result<Option<T>, TraceProblem>
    where
        T: serde::Deserialize<'a>,
    {
        match self.fields.get(field) {
            Some(raw) if raw.get() != "null" => match serde_json::from_str(raw.get()) {
                Ok(value) => Ok(Some(value)),
                Err(_) => Err(self.wrong(field, raw.get(), expected)),
            },
            _ => Ok(None),
        }
    }

    /// The field's value.
    pub(super) fn required<T>(&self, field: &str, expected: &str) -> Result<T, TraceProblem>
    where
        T: serde::Deserialize<'a>,
    {
        self.optional(field, expected)?.ok_or_else(|| TraceProblem::Missing {
            field: self.place(field),
            expected: expected.to_owned(),
        })
    }

    /// The field's value, a number of seconds or the like that is at least 0, or nothing.
    pub(super) fn optional_not_negative(&self, field: &str, expected: &str) -> Result<Option<f64>, TraceProblem> {
        match self.optional::<f64>(field, expected)? {
            Some(value) if value < 0.0 => Err(self.wrong(field, &value.to_string(), expected)),
            value => Ok(value),
        }
    }

    /// The field's value, a time that is at least 0, in units of `unit` seconds.
    pub(super) fn duration(&self, field: &str, unit: f64, expected: &str) -> Result<Duration, TraceProblem> {
        match self.optional_duration(field, unit, expected)? {
            Some(time) => Ok(time),
            None => Err(TraceProblem::Missing {
                field: self.place(field),
                expected: expected.to_owned(),
            }),
        }
    }

    /// The field's value, a time that is at least 0, in units of `unit` seconds, or nothing.
    pub(super) fn optional_duration(
        &self,
        field: &str,
        unit: f64,
        expected: &str,
    ) -> Result<Option<Duration>, TraceProblem> {
        let Some(value) = self.optional_not_negative(field, expected)? else {
            return Ok(None);
        };
        // Rounded, so that what was written as a fraction comes back as it was.
        let nanoseconds = (value * (unit * 1e9)).round();
        if nanoseconds > MAX_NANOSECONDS {
            return Err(self.wrong(field, &value.to_string(), expected));
        }
        Ok(Some(Duration::from_nanos(nanoseconds as u64)))
    }

    /// The field's value, a count that is at least 1.
    pub(super) fn required_positive(&self, field: &str, expected: &str) -> Result<u32, TraceProblem> {
        match self.required::<u32>(field, expected)? {
            0 => Err(self.wrong(field, "0", expected)),
            value => Ok(value),
        }
    }

    /// The field's value, a list of objects.
    pub(super) fn objects(&self, field: &str) -> Result<Vec<Object<'a>>, TraceProblem> {
        let expected = "a list of objects";
        let items: Vec<BTreeMap<String, &'a RawValue>> = self.required(field, expected)?;
        let place = self.place(field);
        Ok(items
            .into_iter()
            .enumerate()
            .map(|(index, fields)| Object {
                line: self.line,
                fields,
                path: format!("{place}[{index}]."),
            })
            .collect())
    }

    /// The error that a field holds the wrong thing.
    pub(super) fn wrong(&self, field: &str, found: &str, expected: &str) -> TraceProblem {
        TraceProblem::Wrong {
            field: self.place(field),
            found: shortened(found),
            expected: expected.to_owned(),
        }
    }

    fn place(&self, field: &str) -> String {
        format!("{}{field}", self.path)
    }
}

/// The first characters of what was found, for an error message of one line.
pub(super) fn shortened(found: &str) -> String {
    const SHOWN: usize = 40;
    let mut short: String = found
        .chars()
        .take(SHOWN)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    if found.chars().nth(SHOWN).is_some() {
        write!(short, "…").expect("writing to a string cannot fail");
    }
    short
}
