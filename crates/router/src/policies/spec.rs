//! The text form of a policy, `name:key=value:key=value`, and the factory behind it. A wrong name or key is answered with the
//! nearest right one.

use super::{Policy, all, names};
use homing_units::Duration;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The longest time that a parameter takes, in seconds: a day.
const LONGEST_S: f64 = 86_400.0;

/// Which policy, with which parameters. Only well-formed ones exist.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PolicySpec {
    text: String,
}

/// Why a text names no policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// There is no policy of this name.
    #[error("unknown policy `{name}`, did you mean `{nearest}`? (known: {known})")]
    UnknownName {
        /// What was given.
        name: String,
        /// The most similar name.
        nearest: String,
        /// All names.
        known: String,
    },
    /// The policy has no parameter of this name.
    #[error("policy `{policy}` has no parameter `{key}`{hint}")]
    UnknownParameter {
        /// The policy.
        policy: String,
        /// What was given.
        key: String,
        /// The most similar parameter, if there are any, and all of them.
        hint: String,
    },
    /// A parameter's value is not what it should be.
    #[error("parameter `{key}` of policy `{policy}` is `{value}`, expected {expected}")]
    BadValue {
        /// The policy.
        policy: String,
        /// The parameter.
        key: String,
        /// What was given.
        value: String,
        /// What was expected.
        expected: &'static str,
    },
    /// A part is not `key=value`, or a key is given twice.
    #[error("policy parameter `{part}`: expected `key=value`, each key once")]
    BadPart {
        /// What was given.
        part: String,
    },
}

impl PolicySpec {
    /// Makes the policy.
    ///
    /// # Panics
    /// Never: a specification is checked when it is made.
    #[must_use]
    pub fn build(&self) -> Box<dyn Policy> {
        make(&self.text).expect("a specification is checked when it is made")
    }

    /// The policy's name, without parameters.
    #[must_use]
    pub fn name(&self) -> &str {
        self.text.split(':').next().unwrap_or_default()
    }
}

impl Default for PolicySpec {
    fn default() -> Self {
        Self {
            text: "homing".to_owned(),
        }
    }
}

impl FromStr for PolicySpec {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        make(text)?;
        Ok(Self { text: text.to_owned() })
    }
}

impl TryFrom<String> for PolicySpec {
    type Error = PolicyError;

    fn try_from(text: String) -> Result<Self, PolicyError> {
        text.parse()
    }
}

impl From<PolicySpec> for String {
    fn from(spec: PolicySpec) -> Self {
        spec.text
    }
}

impl fmt::Display for PolicySpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn make(text: &str) -> Result<Box<dyn Policy>, PolicyError> {
    let (name, rest) = text
        .split_once(':')
        .map_or((text, None), |(name, rest)| (name, Some(rest)));
    let Some((_, make)) = all().find(|(known, _)| *known == name) else {
        return Err(PolicyError::UnknownName {
            name: name.to_owned(),
            nearest: nearest(name, names()).unwrap_or_default().to_owned(),
            known: names().collect::<Vec<_>>().join(", "),
        });
    };
    let mut parameters = Parameters::parse(name, rest)?;
    let policy = make(&mut parameters)?;
    parameters.finish()?;
    Ok(policy)
}

/// The parameters of one policy; each is taken once, and what is left at the end is unknown.
pub(super) struct Parameters<'a> {
    policy: &'a str,
    given: Vec<(&'a str, &'a str)>,
    known: Vec<&'static str>,
}

impl<'a> Parameters<'a> {
    pub(super) fn parse(policy: &'a str, text: Option<&'a str>) -> Result<Self, PolicyError> {
        let mut given: Vec<(&str, &str)> = Vec::new();
        for part in text.into_iter().flat_map(|text| text.split(':')) {
            let pair = part.split_once('=').filter(|(key, _)| !key.is_empty());
            match pair {
                Some((key, value)) if given.iter().all(|(other, _)| *other != key) => given.push((key, value)),
                _ => return Err(PolicyError::BadPart { part: part.to_owned() }),
            }
        }
        Ok(Self {
            policy,
            given,
            known: Vec::new(),
        })
    }

    /// A finite number of at least zero.
    pub(super) fn number(&mut self, key: &'static str, default: f64) -> Result<f64, PolicyError> {
        self.take(key, "a number of at least 0", |value| {
            value
                .parse()
                .ok()
                .filter(|number: &f64| number.is_finite() && *number >= 0.0)
        })
        .map(|value| value.unwrap_or(default))
    }

    /// A finite number above zero.
    pub(super) fn positive(&mut self, key: &'static str, default: f64) -> Result<f64, PolicyError> {
        self.take(key, "a number above 0", |value| {
            value
                .parse()
                .ok()
                .filter(|number: &f64| number.is_finite() && *number > 0.0)
        })
        .map(|value| value.unwrap_or(default))
    }

    /// A time in seconds, at most [`LONGEST_S`].
    pub(super) fn seconds(&mut self, key: &'static str, default: Duration) -> Result<Duration, PolicyError> {
        let value = self.take(key, "seconds from 0 to 86400", |value| {
            let seconds = value
                .parse()
                .ok()
                .filter(|seconds| (0.0..=LONGEST_S).contains(seconds))?;
            Some(Duration::from_secs_f64(seconds))
        })?;
        Ok(value.unwrap_or(default))
    }

    /// A whole number.
    pub(super) fn whole(&mut self, key: &'static str, default: u32) -> Result<u32, PolicyError> {
        let value = self.take(key, "a whole number of at least 0", |value| value.parse().ok())?;
        Ok(value.unwrap_or(default))
    }

    /// One of these words, the first where none is given. `expected` lists them for the error.
    pub(super) fn choice(
        &mut self,
        key: &'static str,
        expected: &'static str,
        words: &[&'static str],
    ) -> Result<&'static str, PolicyError> {
        let value = self.take(key, expected, |value| words.iter().copied().find(|word| *word == value))?;
        Ok(value.unwrap_or(words[0]))
    }

    fn take<T>(
        &mut self,
        key: &'static str,
        expected: &'static str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, PolicyError> {
        self.known.push(key);
        let Some(index) = self.given.iter().position(|(given, _)| *given == key) else {
            return Ok(None);
        };
        let (_, value) = self.given.remove(index);
        parse(value).map(Some).ok_or_else(|| PolicyError::BadValue {
            policy: self.policy.to_owned(),
            key: key.to_owned(),
            value: value.to_owned(),
            expected,
        })
    }

    pub(super) fn finish(self) -> Result<(), PolicyError> {
        let Some((key, _)) = self.given.first() else {
            return Ok(());
        };
        let hint = match nearest(key, self.known.iter().copied()) {
            Some(nearest) => format!(", did you mean `{nearest}`? (known: {})", self.known.join(", ")),
            None => ": it takes none".to_owned(),
        };
        Err(PolicyError::UnknownParameter {
            policy: self.policy.to_owned(),
            key: (*key).to_owned(),
            hint,
        })
    }
}

/// The name with the smallest edit distance, the first of equals.
fn nearest<'n>(name: &str, names: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    names.min_by_key(|known| edit_distance(name.as_bytes(), known.as_bytes()))
}

/// Levenshtein's distance between two byte strings.
fn edit_distance(left: &[u8], right: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (index, byte) in left.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], index + 1);
        for (column, other) in right.iter().enumerate() {
            let changed = diagonal + usize::from(byte != other);
            diagonal = row[column + 1];
            row[column + 1] = changed.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &str) {
        let answer = match text.parse::<PolicySpec>() {
            Ok(spec) => {
                drop(spec.build());
                format!("{} of {spec}", spec.name())
            }
            Err(error) => error.to_string(),
        };
        assert_eq!(answer, expected, "{text}");
    }

    /// What is divided by, and what would make of each instance a busy one, is above 0; what is a cost may be nothing.
    #[test]
    fn factors_and_throughputs_are_above_0_and_costs_are_not_below() {
        let answer = |text: String| text.parse::<PolicySpec>().map_err(|error| error.to_string());
        let cases = [
            ("lazy-migration", "factor", false),
            ("lazy-migration", "throughput", false),
            ("lazy-migration", "decode_iteration_s", true),
            ("contention", "throughput", false),
            ("contention", "decode_iteration_s", true),
            ("unified-v2", "throughput", false),
            ("unified-v3", "throughput", false),
            ("peer-sglang", "throughput", false),
            ("peer-dynamo", "prefill_scale", true),
        ];
        for (policy, key, zero) in cases {
            for value in ["-1", "-0.5", "NaN", "inf", "-inf", "1e999", "", "0x1"] {
                let said = answer(format!("{policy}:{key}={value}")).expect_err("it is no such number");
                let bound = if zero {
                    "a number of at least 0"
                } else {
                    "a number above 0"
                };
                let expected = format!("parameter `{key}` of policy `{policy}` is `{value}`, expected {bound}");
                assert_eq!(said, expected);
            }
            assert_eq!(answer(format!("{policy}:{key}=0")).is_ok(), zero, "{policy} {key}");
            assert!(answer(format!("{policy}:{key}=0.5")).is_ok(), "{policy} {key}");
        }
    }

    #[test]
    fn texts_name_policies_or_say_what_was_expected() {
        check("homing", "homing of homing");
        check(
            "dp-cache-aware:abs=16:rel=1.2",
            "dp-cache-aware of dp-cache-aware:abs=16:rel=1.2",
        );
        let known = format!("(known: {})", names().collect::<Vec<_>>().join(", "));
        check(
            "homin",
            &format!("unknown policy `homin`, did you mean `homing`? {known}"),
        );
        check("", &format!("unknown policy ``, did you mean `homing`? {known}"));
        check(
            "round_robin",
            &format!("unknown policy `round_robin`, did you mean `round-robin`? {known}"),
        );
        check(
            "round-robin:x=1",
            "policy `round-robin` has no parameter `x`: it takes none",
        );
        check(
            "dp-cache-aware:cache_treshold=1",
            "policy `dp-cache-aware` has no parameter `cache_treshold`, did you mean `cache_threshold`? \
             (known: cache_threshold, overlap, abs, rel)",
        );
        check(
            "kv-aware:load_flor=1",
            "policy `kv-aware` has no parameter `load_flor`, did you mean `load_floor`? (known: request_timeout, overlap, \
             sticky_bonus, load_floor, reject_threshold, seed_min_turn, soft_cap, direct_max, rho, backpressure, max_pause, prefill, affinity)",
        );
        check(
            "kv-aware:max_pause=soon",
            "parameter `max_pause` of policy `kv-aware` is `soon`, expected seconds from 0 to 86400",
        );
        check(
            "kv-aware:request_timeout=-1",
            "parameter `request_timeout` of policy `kv-aware` is `-1`, expected seconds from 0 to 86400",
        );
        check(
            "lazy-migration:trigger=recent",
            "parameter `trigger` of policy `lazy-migration` is `recent`, expected `factor`, `average_plus` or `recent_ttft`",
        );
        check(
            "unified-v3:throughput=0",
            "parameter `throughput` of policy `unified-v3` is `0`, expected a number above 0",
        );
        check(
            "lazy-migration:factor=0",
            "parameter `factor` of policy `lazy-migration` is `0`, expected a number above 0",
        );
        check(
            "dp-cache-aware:abs=few",
            "parameter `abs` of policy `dp-cache-aware` is `few`, expected a whole number of at least 0",
        );
        check(
            "dp-cache-aware:rel=NaN",
            "parameter `rel` of policy `dp-cache-aware` is `NaN`, expected a number of at least 0",
        );
        check("homing:", "policy parameter ``: expected `key=value`, each key once");
        check(
            "dp-cache-aware:abs=1:abs=2",
            "policy parameter `abs=2`: expected `key=value`, each key once",
        );
        check(
            "homing:=1",
            "policy parameter `=1`: expected `key=value`, each key once",
        );
    }
}
