//! What must hold of a drill's figures: `off.failed_share >= 0.5`, `on.latency_p99_s <= 2 * calm.latency_p99_s`.
//!
//! A statement compares a figure of a setting with a number, with another figure, or with a multiple of one. Nothing more is
//! needed, and whoever reads a scenario can check it by eye.

use serde::Deserialize;
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// A statement.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub struct Statement {
    text: String,
    left: Reference,
    relation: Relation,
    factor: f64,
    right: Option<Reference>,
}

/// A figure of a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// The setting.
    pub setting: String,
    /// The figure.
    pub figure: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Relation {
    AtLeast,
    AtMost,
}

/// Why a text is no statement.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{text}` is no statement, expected `SETTING.FIGURE >= NUMBER` or `SETTING.FIGURE <= NUMBER * SETTING.FIGURE`")]
pub struct StatementError {
    text: String,
}

impl Statement {
    /// The settings that it speaks of.
    #[must_use]
    pub fn settings(&self) -> Vec<&str> {
        let right = self.right.iter().map(|right| right.setting.as_str());
        [self.left.setting.as_str()].into_iter().chain(right).collect()
    }

    /// Whether it holds, and the figures on both sides; `figure` gives those of settings, `None` where there is no such figure.
    ///
    /// # Errors
    /// The reference that names no figure.
    pub fn check(&self, figure: impl Fn(&Reference) -> Option<f64>) -> Result<(bool, f64, f64), Reference> {
        let get = |reference: &Reference| figure(reference).ok_or_else(|| reference.clone());
        let left = get(&self.left)?;
        let right = match &self.right {
            Some(right) => self.factor * get(right)?,
            None => self.factor,
        };
        let holds = match self.relation {
            Relation::AtLeast => left >= right,
            Relation::AtMost => left <= right,
        };
        Ok((holds, left, right))
    }
}

impl fmt::Display for Statement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl TryFrom<String> for Statement {
    type Error = StatementError;

    fn try_from(text: String) -> Result<Self, StatementError> {
        text.parse()
    }
}

impl FromStr for Statement {
    type Err = StatementError;

    fn from_str(text: &str) -> Result<Self, StatementError> {
        parse(text).ok_or_else(|| StatementError { text: text.to_owned() })
    }
}

fn parse(text: &str) -> Option<Statement> {
    let (left, relation, right) = [(">=", Relation::AtLeast), ("<=", Relation::AtMost)]
        .into_iter()
        .find_map(|(sign, relation)| text.split_once(sign).map(|(left, right)| (left, relation, right)))?;
    let (factor, right) = match right.split_once('*') {
        Some((factor, right)) => (number(factor)?, Some(reference(right)?)),
        None => match number(right) {
            Some(number) => (number, None),
            None => (1.0, Some(reference(right)?)),
        },
    };
    Some(Statement {
        text: text.to_owned(),
        left: reference(left)?,
        relation,
        factor,
        right,
    })
}

fn number(text: &str) -> Option<f64> {
    text.trim().parse().ok().filter(|number: &f64| number.is_finite())
}

fn reference(text: &str) -> Option<Reference> {
    let (setting, figure) = text.trim().split_once('.')?;
    let word = |word: &str| {
        !word.is_empty()
            && word
                .chars()
                .all(|letter| letter.is_ascii_alphanumeric() || "_-".contains(letter))
    };
    (word(setting) && word(figure)).then(|| Reference {
        setting: setting.to_owned(),
        figure: figure.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_compare_figures() {
        let check = |text: &str, expected: (bool, f64, f64)| {
            let figure = |reference: &Reference| match (reference.setting.as_str(), reference.figure.as_str()) {
                ("off", "failed_share") => Some(0.6),
                ("on", "p99_s") => Some(3.0),
                ("calm", "p99_s") => Some(2.0),
                _ => None,
            };
            let statement: Statement = text.parse().expect(text);
            assert_eq!(statement.check(figure), Ok(expected), "{text}");
            assert_eq!(statement.to_string(), text);
        };
        check("off.failed_share >= 0.5", (true, 0.6, 0.5));
        check("off.failed_share <= 0.5", (false, 0.6, 0.5));
        check("on.p99_s <= 2 * calm.p99_s", (true, 3.0, 4.0));
        check("on.p99_s <= calm.p99_s", (false, 3.0, 2.0));
    }

    #[test]
    fn what_is_none_is_said() {
        for text in [
            "",
            "off.x",
            "off >= 1",
            "off.x == 1",
            "off.x >= y",
            "off.x >= 2 * 3",
            "off.x <= NaN",
        ] {
            let error = text.parse::<Statement>().expect_err(text).to_string();
            assert!(error.contains("expected"), "{error}");
        }
        let statement: Statement = "off.x >= 1".parse().expect("a statement");
        assert_eq!(statement.check(|_| None).expect_err("no figure").figure, "x");
    }
}
