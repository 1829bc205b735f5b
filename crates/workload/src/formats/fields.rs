//! A JSON object of which each field is parsed on its own, so that an error can name the field and what it should hold.
//!
//! A derived struct would say "invalid type at column 7041" of a line of 600 KB; the second look at each field costs
//! little beside that. It does not know any format.

use super::TraceProblem;
use homing_units::Duration;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

/// A year: no trace is longer, and no gap of one; a simulation would have to pass the time.
pub(super) const YEAR: Duration = Duration::from_secs(366 * 86_400);

/// What counts from some epoch, and not from the trace's start, may be so long after it.
const MAX_DATE: Duration = Duration::from_secs(100 * 366 * 86_400);

/// A prompt or an answer may have so many tokens; what is above this is none, but would fill the memory with block ids
/// or a simulation with steps.
pub(super) const MAX_TOKENS: u32 = 100_000_000;

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
        let Fields(fields) = serde_json::from_slice(line.trim_ascii_end()).map_err(|error| {
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

    /// Whether it has this field, be it null.
    pub(super) fn names_field(&self, field: &str) -> bool {
        self.fields.contains_key(field)
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

    /// The field's value, a time that is at least 0 and at most a [`YEAR`], in units of `unit` seconds, or nothing.
    pub(super) fn optional_duration(
        &self,
        field: &str,
        unit: f64,
        expected: &str,
    ) -> Result<Option<Duration>, TraceProblem> {
        let time = self.optional_time(field, unit, expected)?;
        Ok(time.map(|value| rounded(value, unit)))
    }

    /// The same as a number in these units.
    pub(super) fn optional_time(&self, field: &str, unit: f64, expected: &str) -> Result<Option<f64>, TraceProblem> {
        match self.optional::<f64>(field, expected)? {
            Some(value) if value < 0.0 => Err(self.wrong(field, &value.to_string(), expected)),
            Some(value) if value * unit > YEAR.as_secs_f64() => {
                Err(self.wrong(field, &value.to_string(), &format!("{expected}, within a year")))
            }
            value => Ok(value),
        }
    }

    /// The field's value, a time from the trace's start or from some epoch, in units of `unit` seconds, or nothing.
    pub(super) fn optional_date(
        &self,
        field: &str,
        unit: f64,
        expected: &str,
    ) -> Result<Option<Duration>, TraceProblem> {
        let date = self.optional::<f64>(field, expected)?;
        let good = |date: &f64| (0.0..=MAX_DATE.as_secs_f64()).contains(&(date * unit));
        match date.filter(|date| !good(date)) {
            Some(date) => Err(self.wrong(field, &date.to_string(), expected)),
            None => Ok(date.map(|date| rounded(date, unit))),
        }
    }

    /// The field's value as [`Self::optional_date`] has it.
    pub(super) fn date(&self, field: &str, unit: f64, expected: &str) -> Result<Duration, TraceProblem> {
        match self.optional_date(field, unit, expected)? {
            Some(date) => Ok(date),
            None => Err(TraceProblem::Missing {
                field: self.place(field),
                expected: expected.to_owned(),
            }),
        }
    }

    /// The field's value, a number of tokens from `least` to [`MAX_TOKENS`].
    pub(super) fn required_tokens(&self, field: &str, least: u32) -> Result<u32, TraceProblem> {
        let expected = match least {
            0 => TOKENS.to_owned(),
            least => format!("{TOKENS}, at least {least}"),
        };
        match self.optional_tokens(field, &expected)? {
            Some(tokens) if tokens >= least => Ok(tokens),
            Some(tokens) => Err(self.wrong(field, &tokens.to_string(), &expected)),
            None => Err(TraceProblem::Missing {
                field: self.place(field),
                expected,
            }),
        }
    }

    /// The field's value, a number of tokens up to [`MAX_TOKENS`], or nothing.
    pub(super) fn optional_tokens(&self, field: &str, expected: &str) -> Result<Option<u32>, TraceProblem> {
        // Looked at as a fraction first: what is too large for a whole number is too large.
        let beyond = |raw: &&RawValue| {
            raw.get()
                .parse::<f64>()
                .is_ok_and(|tokens| tokens > f64::from(MAX_TOKENS))
        };
        if let Some(raw) = self.fields.get(field).copied().filter(beyond) {
            let expected = format!("{TOKENS}, at most {MAX_TOKENS}");
            return Err(self.wrong(field, raw.get(), &expected));
        }
        self.optional(field, expected)
    }

    /// The field's value, a list of block ids. An error names the first that is none.
    pub(super) fn ids(&self, field: &str) -> Result<Vec<u64>, TraceProblem> {
        const EXPECTED: &str = "a list of block ids";
        self.required(field, EXPECTED).map_err(|problem| {
            let wrong = |raw: &&RawValue| raw.get().parse::<u64>().is_err();
            self.wrong_element(field, wrong, "a block id, a whole number from 0")
                .unwrap_or(problem)
        })
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
        let items: Vec<Fields<'a>> = self.required(field, expected).map_err(|problem| {
            let wrong = |raw: &&RawValue| serde_json::from_str::<Fields<'_>>(raw.get()).is_err();
            self.wrong_element(field, wrong, "an object that has each field once")
                .unwrap_or(problem)
        })?;
        let place = self.place(field);
        Ok(items
            .into_iter()
            .enumerate()
            .map(|(index, Fields(fields))| Object {
                line: self.line,
                fields,
                path: format!("{place}[{index}]."),
            })
            .collect())
    }

    /// The error that an element of a list is the wrong thing; nothing where the field is no list, or all are right.
    fn wrong_element(&self, field: &str, wrong: impl Fn(&&RawValue) -> bool, expected: &str) -> Option<TraceProblem> {
        let elements: Vec<&RawValue> = self.optional(field, expected).ok().flatten()?;
        let index = elements.iter().position(wrong)?;
        Some(self.wrong(&format!("{field}[{index}]"), elements[index].get(), expected))
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

/// A time of `unit` seconds, rounded, so that what was written as a fraction comes back as it was.
fn rounded(value: f64, unit: f64) -> Duration {
    Duration::from_nanos((value * (unit * 1e9)).round() as u64)
}

/// The times of a trace's rows, which lie within a year.
#[derive(Debug, Default)]
pub(super) struct Dates {
    first: Option<Duration>,
}

impl Dates {
    /// Checks the time that a row has in `field`.
    pub(super) fn check(&mut self, row: &Object<'_>, field: &str, time: Duration) -> Result<(), TraceProblem> {
        let first = *self.first.get_or_insert(time);
        if time.abs_diff(first) <= YEAR {
            return Ok(());
        }
        let found = row.fields.get(field).map_or("", |raw| raw.get());
        Err(row.wrong(field, found, "a time within a year of the first row's"))
    }
}

/// What a number of tokens should be, without its bounds.
const TOKENS: &str = "a number of tokens";

/// The fields of a JSON object, each once: which of two should hold, nobody can say.
struct Fields<'a>(BTreeMap<String, &'a RawValue>);

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor).map(Self)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = BTreeMap<String, &'de RawValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = BTreeMap::new();
        while let Some((name, value)) = map.next_entry::<String, &'de RawValue>()? {
            if fields.contains_key(&name) {
                return Err(A::Error::custom(format_args!("field `{}` twice", shortened(&name))));
            }
            fields.insert(name, value);
        }
        Ok(fields)
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
