//! The parameters in a generator's name, and the name that a mistyped one was probably meant to be.

use super::GeneratorError;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// The parameters that were given and not yet taken, and the names of all that were asked for.
pub(super) struct Parameters {
    generator: String,
    given: Vec<(String, String)>,
    known: Vec<&'static str>,
}

impl Parameters {
    /// Splits `name=value` parts.
    pub(super) fn parse<'a>(generator: &str, parts: impl Iterator<Item = &'a str>) -> Result<Self, GeneratorError> {
        let mut given: Vec<(String, String)> = Vec::new();
        for part in parts {
            let (name, value) = part.split_once('=').ok_or_else(|| GeneratorError::NoParameter {
                part: part.to_owned(),
                generator: generator.to_owned(),
            })?;
            if given.iter().any(|(other, _)| other == name) {
                return Err(GeneratorError::Twice { name: name.to_owned() });
            }
            given.push((name.to_owned(), value.to_owned()));
        }
        Ok(Self {
            generator: generator.to_owned(),
            given,
            known: Vec::new(),
        })
    }

    /// The seed: any number.
    pub(super) fn seed(&mut self, default: u64) -> Result<u64, GeneratorError> {
        self.number("seed", default, 0..=u64::MAX)
    }

    /// A whole number in a range.
    pub(super) fn number<T>(
        &mut self,
        name: &'static str,
        default: T,
        range: RangeInclusive<T>,
    ) -> Result<T, GeneratorError>
    where
        T: FromStr + PartialOrd + Display,
    {
        let expected = format!("a number from {} to {}", range.start(), range.end());
        self.value(name, default, &range, &expected)
    }

    /// A share of all, from 0 to 1.
    pub(super) fn share(&mut self, name: &'static str, default: f64) -> Result<f64, GeneratorError> {
        self.value(name, default, &(0.0..=1.0), "a share from 0 to 1")
    }

    /// Says that all parameters were asked for: what is left is unknown.
    pub(super) fn finish(&self) -> Result<(), GeneratorError> {
        let Some((name, _)) = self.given.first() else {
            return Ok(());
        };
        Err(GeneratorError::UnknownParameter {
            name: name.clone(),
            generator: self.generator.clone(),
            expected: self
                .known
                .iter()
                .map(|name| format!("`{name}`"))
                .collect::<Vec<_>>()
                .join(", "),
            hint: suggestion(name, &self.known, ""),
        })
    }

    fn value<T>(
        &mut self,
        name: &'static str,
        default: T,
        range: &RangeInclusive<T>,
        expected: &str,
    ) -> Result<T, GeneratorError>
    where
        T: FromStr + PartialOrd,
    {
        self.known.push(name);
        let Some(index) = self.given.iter().position(|(given, _)| given == name) else {
            return Ok(default);
        };
        let (_, value) = self.given.remove(index);
        value
            .parse()
            .ok()
            .filter(|value| range.contains(value))
            .ok_or_else(|| GeneratorError::Value {
                name: name.to_owned(),
                value,
                expected: expected.to_owned(),
            })
    }
}

/// A line that asks whether the nearest of `names` was meant; empty where none is near, or nothing of it was written.
pub(super) fn suggestion(name: &str, names: &[&str], prefix: &str) -> String {
    const NEAR: usize = 2;
    names
        .iter()
        .map(|candidate| (distance(name, candidate), candidate))
        .filter(|&(distance, candidate)| distance <= NEAR && distance < candidate.len())
        .min()
        .map(|(_, candidate)| format!("\nhint: did you mean `{prefix}{candidate}`?"))
        .unwrap_or_default()
}

/// How many letters must be added, dropped or changed to make one name the other.
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (index, letter) in one.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = index + 1;
        for (place, &candidate) in other.iter().enumerate() {
            let changed = diagonal + usize::from(letter != candidate);
            diagonal = row[place + 1];
            row[place + 1] = changed.min(row[place] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::distance;

    #[test]
    fn a_distance_counts_letters() {
        let check =
            |one: &str, other: &str, expected: usize| assert_eq!(distance(one, other), expected, "{one} {other}");
        check("", "", 0);
        check("agent", "agent", 0);
        check("agnet", "agent", 2);
        check("agents", "agent", 1);
        check("", "seed", 4);
        check("kitten", "sitting", 3);
    }
}
