//! Other engines' logs: which lines of SGLang and vLLM tell of a failure mode, as a table, and the diagnosis of a folder of
//! such logs. For people who do not run Homing yet.
//!
//! Nothing is parsed but what the table names: a line has certain parts in a certain order, and perhaps a number that
//! matters. What a mode cost is counted from lines that stand for a failed request, and from waits that lines name.

use crate::finding::{Cost, Finding, Level, PROOFS_MAX, Proof, ranked};
use crate::mode::ModeId;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// Characters of a line that are kept as evidence.
const LINE_SHOWN: usize = 200;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    pattern: Vec<Pattern>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pattern {
    engine: String,
    mode: ModeId,
    /// Parts of the line, in order.
    all: Vec<String>,
    /// What such a line is.
    says: String,
    /// Whether each line is a request that failed.
    #[serde(default)]
    request: bool,
    /// Whether the number counts requests that failed.
    #[serde(default)]
    many: bool,
    #[serde(default)]
    counts: Option<Which>,
    /// The least number that counts.
    #[serde(default)]
    min: u64,
    /// Whether the number is seconds that somebody waited.
    #[serde(default)]
    seconds: bool,
}

/// Which number is meant.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Which {
    /// The first one after the first part.
    First,
    /// The first one after the last part.
    After,
}

static TABLE: LazyLock<Vec<Pattern>> = LazyLock::new(|| {
    let table: Table = toml::from_str(include_str!("../patterns/engines.toml")).expect("a test reads the table");
    table.pattern
});

/// What matched one pattern.
#[derive(Debug, Default)]
struct Matches {
    lines: u64,
    cost: Cost,
    numbers: Vec<u64>,
    proofs: Vec<Proof>,
}

/// Whether a text looks like an engine's log that says something: whether any of its lines is in the table.
#[must_use]
pub fn knows(text: &str) -> bool {
    text.lines()
        .any(|line| TABLE.iter().any(|pattern| pattern.number_in(line).is_some()))
}

/// What the logs of a folder tell, by file name, the worst first.
#[must_use]
pub fn diagnose(files: &BTreeMap<String, String>) -> Vec<Finding> {
    let mut found: BTreeMap<usize, Matches> = BTreeMap::new();
    for (file, text) in files {
        for (number, line) in (1..).zip(text.lines()) {
            let matched = TABLE
                .iter()
                .enumerate()
                .find_map(|(index, pattern)| Some((index, pattern, pattern.number_in(line)?)));
            if let Some((index, pattern, value)) = matched {
                found.entry(index).or_default().add(pattern, value, || Proof {
                    file: file.clone(),
                    line: number,
                    value: line.trim().chars().take(LINE_SHOWN).collect(),
                });
            }
        }
    }
    let mut by_mode: BTreeMap<ModeId, Finding> = BTreeMap::new();
    for (index, matches) in found {
        let pattern = &TABLE[index];
        let finding = matches.finding(pattern);
        match by_mode.get_mut(&pattern.mode) {
            None => {
                by_mode.insert(pattern.mode, finding);
            }
            Some(other) => other.join(finding),
        }
    }
    ranked(by_mode.into_values().collect())
}

impl Pattern {
    /// The number that matters in a line of this pattern, 0 where none does; `None` where it is no such line.
    fn number_in(&self, line: &str) -> Option<u64> {
        let mut rest = line;
        let mut after_first = None;
        for part in &self.all {
            let at = rest.find(part.as_str())?;
            rest = &rest[at + part.len()..];
            after_first.get_or_insert(rest);
        }
        let Some(which) = self.counts else { return Some(0) };
        let from = match which {
            Which::First => after_first?,
            Which::After => rest,
        };
        whole_numbers(from).next().filter(|number| *number >= self.min)
    }
}

/// The whole numbers of a text; of a fraction its whole part. Digits inside of words and ids are none.
fn whole_numbers(text: &str) -> impl Iterator<Item = u64> {
    let words = text.split(|letter: char| !(letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-' | '_')));
    words.filter_map(|word| {
        let word = word.trim_matches(|letter| matches!(letter, '.' | '-' | '_'));
        let digits = word.strip_suffix('s').unwrap_or(word);
        digits
            .split('.')
            .next()
            .filter(|_| digits.parse::<f64>().is_ok())?
            .parse()
            .ok()
    })
}

impl Matches {
    fn add(&mut self, pattern: &Pattern, number: u64, proof: impl FnOnce() -> Proof) {
        self.lines += 1;
        if pattern.request {
            self.cost.failed_requests += 1;
        }
        if pattern.many {
            self.cost.failed_requests += number;
        }
        if pattern.seconds {
            self.cost.latency_s += number as f64;
        }
        if pattern.counts.is_some() {
            self.numbers.push(number);
        }
        if self.proofs.len() < PROOFS_MAX {
            self.proofs.push(proof());
        }
    }

    fn finding(self, pattern: &Pattern) -> Finding {
        let mut seen = format!("{} lines of {}: {}", self.lines, pattern.engine, pattern.says);
        if let (Some(most), false) = (self.numbers.iter().max(), self.numbers.is_empty()) {
            let mean = self.numbers.iter().sum::<u64>() as f64 / self.numbers.len() as f64;
            seen = format!("{seen} ({mean:.0} on average, {most} at most)");
        }
        Finding {
            mode: pattern.mode,
            level: if self.cost.failed_requests > 0 {
                Level::Error
            } else {
                Level::Warning
            },
            cost: self.cost,
            seen,
            part_of: None,
            seed: None,
            evidence: self.proofs,
        }
    }
}

impl Finding {
    /// Takes what another pattern of the same mode found.
    fn join(&mut self, other: Self) {
        self.level = self.level.max(other.level);
        self.cost.failed_requests += other.cost.failed_requests;
        self.cost.latency_s += other.cost.latency_s;
        self.seen = format!("{}; {}", self.seen, other.seen);
        let half = PROOFS_MAX / 2;
        self.evidence.truncate(half);
        self.evidence.extend(other.evidence.into_iter().take(half));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_whole_words() {
        let check = |text: &str, expected: &[u64]| {
            assert_eq!(whole_numbers(text).collect::<Vec<_>>(), expected, "{text}");
        };
        check("freed 67726 tokens of session s12", &[67_726]);
        check("timed out after 300.1s in KVPoll.Bootstrapping", &[300]);
        check("#retracted_reqs: 1, #new_token_ratio: 0.98 -> 1.0", &[1, 0, 1]);
        check("8f07dfc0-12 cmpl-3da205a6-0", &[]);
    }

    #[test]
    fn every_pattern_has_parts_and_an_engine() {
        for pattern in TABLE.iter() {
            assert!(!pattern.all.is_empty() && !pattern.says.is_empty(), "{pattern:?}");
            assert!(["SGLang", "vLLM"].contains(&pattern.engine.as_str()), "{pattern:?}");
            let uses_number = pattern.many || pattern.seconds || pattern.min > 0;
            assert!(pattern.counts.is_some() || !uses_number, "{pattern:?}");
        }
    }
}
