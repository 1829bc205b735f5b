//! What a run left behind, as it lies in its folder: the report and the structural logs, each line with its number.
//!
//! The files are handed in as texts: this crate opens none. Logs of several runs in one folder are told apart by the
//! `seed-N.` before their names. A file that is missing is an empty sheet, so that a live replay without an engine's logs can
//! be looked at, too; a line that cannot be read is an error that names it.

use homing_report::Report;
use homing_report::logs::{
    AdmissionLine, BackpressureLine, BindingLine, DecisionLine, EvictionLine, LogKind, LogLine, RequestLine,
    RouterSampleLine, TransferLine, WorkerEventLine, WorkerSampleLine,
};
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// The name of the report in a run's folder.
pub const SUMMARY: &str = "summary.json";

/// The error of a request whose client hung up: its own decision, and no failure.
pub const CLIENT_GONE: &str = "client_gone";

/// A line of a log.
#[derive(Clone, Debug, PartialEq)]
pub struct Line<T> {
    /// Its number in its file, from 1.
    pub number: u32,
    /// What it says.
    pub value: T,
}

/// One log of one run.
#[derive(Clone, Debug, PartialEq)]
pub struct Sheet<T> {
    /// The name of its file.
    pub file: String,
    /// Its lines, in order.
    pub lines: Vec<Line<T>>,
}

impl<T> Sheet<T> {
    /// What its lines say.
    pub fn values(&self) -> impl DoubleEndedIterator<Item = &T> {
        self.lines.iter().map(|line| &line.value)
    }
}

/// The logs of one run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunLogs {
    /// Its seed, where the folder has several runs.
    pub seed: Option<u64>,
    /// See [`LogKind::Requests`].
    pub requests: Sheet<RequestLine>,
    /// See [`LogKind::Decisions`].
    pub decisions: Sheet<DecisionLine>,
    /// See [`LogKind::AdmissionEvents`].
    pub admissions: Sheet<AdmissionLine>,
    /// See [`LogKind::BackpressureEvents`].
    pub backpressure: Sheet<BackpressureLine>,
    /// See [`LogKind::SessionDBinding`].
    pub bindings: Sheet<BindingLine>,
    /// See [`LogKind::KvTransfers`].
    pub transfers: Sheet<TransferLine>,
    /// See [`LogKind::Evictions`].
    pub evictions: Sheet<EvictionLine>,
    /// See [`LogKind::WorkerSamples`].
    pub samples: Sheet<WorkerSampleLine>,
    /// See [`LogKind::WorkerEvents`].
    pub worker_events: Sheet<WorkerEventLine>,
    /// See [`LogKind::RouterSamples`].
    pub router_samples: Sheet<RouterSampleLine>,
}

/// A folder of runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Evidence {
    /// Its report, where there is one.
    pub report: Option<Report>,
    /// Its runs: by seed where there are several.
    pub runs: Vec<RunLogs>,
}

/// Why a folder cannot be read as a run.
#[derive(Debug, Error)]
pub enum EvidenceError {
    /// None of the files is one that a run leaves.
    #[error("no `summary.json` and no structural log, expected the folder of a run (`homing sim --out DIR`)")]
    NoRun,
    /// A line is not what its file is made of.
    #[error("`{file}` line {line}: {error}")]
    Line {
        /// The file.
        file: String,
        /// The line, from 1.
        line: u32,
        /// What is wrong.
        error: serde_json::Error,
    },
    /// The report is not one.
    #[error("`{SUMMARY}`: {0}")]
    Report(serde_json::Error),
}

impl Evidence {
    /// Reads the texts of a folder's files, by name. Other files than a run's are left alone.
    ///
    /// # Errors
    /// If there is nothing of a run, or a line is broken.
    pub fn read(files: &BTreeMap<String, String>) -> Result<Self, EvidenceError> {
        let report = match files.get(SUMMARY) {
            Some(text) => Some(serde_json::from_str(text).map_err(EvidenceError::Report)?),
            None => None,
        };
        let seeds = seeds(files.keys().map(String::as_str));
        if report.is_none() && seeds.is_empty() {
            return Err(EvidenceError::NoRun);
        }
        let runs = seeds.into_iter().map(|seed| RunLogs::read(files, seed));
        Ok(Self {
            report,
            runs: runs.collect::<Result<_, _>>()?,
        })
    }
}

/// The runs that a folder has logs of: `None` is the only one of a folder that has one.
fn seeds<'n>(names: impl Iterator<Item = &'n str>) -> BTreeSet<Option<u64>> {
    let seed_of = |name: &str| {
        let (prefix, rest) = match name.strip_prefix("seed-") {
            Some(rest) => {
                let (seed, rest) = rest.split_once('.')?;
                (Some(seed.parse().ok()?), rest)
            }
            None => (None, name),
        };
        LogKind::ALL
            .iter()
            .any(|kind| kind.file_name() == rest)
            .then_some(prefix)
    };
    names.filter_map(seed_of).collect()
}

impl RunLogs {
    fn read(files: &BTreeMap<String, String>, seed: Option<u64>) -> Result<Self, EvidenceError> {
        Ok(Self {
            seed,
            requests: sheet(files, seed)?,
            decisions: sheet(files, seed)?,
            admissions: sheet(files, seed)?,
            backpressure: sheet(files, seed)?,
            bindings: sheet(files, seed)?,
            transfers: sheet(files, seed)?,
            evictions: sheet(files, seed)?,
            samples: sheet(files, seed)?,
            worker_events: sheet(files, seed)?,
            router_samples: sheet(files, seed)?,
        })
    }
}

/// The log of this kind.
fn sheet<T: LogLine + DeserializeOwned>(
    files: &BTreeMap<String, String>,
    seed: Option<u64>,
) -> Result<Sheet<T>, EvidenceError> {
    let name = T::KIND.file_name();
    let file = seed.map_or_else(|| name.clone(), |seed| format!("seed-{seed}.{name}"));
    let text = files.get(&file).map_or("", String::as_str);
    let mut lines = Vec::new();
    for (number, text) in (1..).zip(text.lines()).filter(|(_, text)| !text.is_empty()) {
        let value = serde_json::from_str(text).map_err(|error| EvidenceError::Line {
            file: file.clone(),
            line: number,
            error,
        })?;
        lines.push(Line { number, value });
    }
    Ok(Sheet { file, lines })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(texts: &[(&str, &str)]) -> BTreeMap<String, String> {
        texts
            .iter()
            .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()))
            .collect()
    }

    const EVICTION: &str = r#"{"t":1.5,"worker":"d0","request":7,"blocks":2,"tokens":48}"#;

    #[test]
    fn runs_are_told_apart_by_seed() {
        let found = Evidence::read(&files(&[
            ("seed-2.evictions.jsonl", EVICTION),
            ("seed-10.requests.jsonl", ""),
            ("seed-x.requests.jsonl", "not ours"),
            ("notes.txt", "not ours"),
        ]))
        .expect("two runs");
        let seeds: Vec<_> = found.runs.iter().map(|run| run.seed).collect();
        assert_eq!(seeds, [Some(2), Some(10)]);
        assert_eq!(found.runs[0].evictions.file, "seed-2.evictions.jsonl");
        assert_eq!(found.runs[0].evictions.lines[0].value.tokens, 48);
    }

    #[test]
    fn what_is_no_run_or_broken_is_said() {
        let check = |texts: &[(&str, &str)], expected: &str| {
            let error = Evidence::read(&files(texts)).expect_err(expected).to_string();
            assert!(error.starts_with(expected), "{error}");
        };
        check(&[("notes.txt", "")], "no `summary.json` and no structural log");
        let two = format!("{EVICTION}\n\n{{}}\n");
        check(&[("evictions.jsonl", &two)], "`evictions.jsonl` line 3: missing field");
        check(&[("summary.json", "{}")], "`summary.json`: missing field");
    }
}
