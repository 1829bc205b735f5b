//! `homing compare`: runs side by side, as a table, a document or a page.
//!
//! It reads what `--out` left: `summary.json` for the figures, and for a page the structural logs beside it, of one run
//! (`requests.jsonl`) or of several (`seed-3.requests.jsonl`). Verdicts and drawings are made in the report crate.

use crate::compare_args::Compare;
use crate::failure::Usage;
use crate::output::{self, OutFile, folder_of, print, say};
use anyhow::Result;
use homing_report::compare::REPORTS_MAX;
use homing_report::html::{RunLogs, page};
use homing_report::logs::{EvictionLine, LogKind, LogLine, RequestLine, WorkerSampleLine};
use homing_report::{Comparison, Report, SCHEMA, Source};
use serde::de::DeserializeOwned;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The name of the summary in a run's folder.
const SUMMARY: &str = "summary.json";

/// Compares the runs; nothing is written before all of them are read.
pub fn run(args: &Compare) -> Result<()> {
    check_count(args)?;
    output::clean_up_when_interrupted()?;
    // Made before any work, so that it is known that it can be written.
    let html = args
        .html
        .as_ref()
        .map(|html| OutFile::create("--html", html))
        .transpose()?;
    let files: Vec<PathBuf> = args.runs.iter().map(|run| summary_file(run)).collect::<Result<_>>()?;
    let sources: Vec<Source> = args
        .runs
        .iter()
        .zip(&files)
        .map(|(run, file)| source(run, file))
        .collect::<Result<_>>()?;
    let comparison = Comparison::of(&sources);
    if let Some(file) = html {
        let logs: Vec<Vec<RunLogs>> = sources
            .iter()
            .zip(&files)
            .map(|(source, file)| logs(&source.report, file))
            .collect::<Result<_>>()?;
        let page = page(&comparison, &sources, &logs);
        file.write(|file| file.write_all(page.as_bytes()))?;
        if let Some(html) = &args.html {
            say(format_args!("the page is in `{}`", html.display()));
        }
    }
    print(&if args.json {
        format!("{}\n", comparison.to_json())
    } else {
        comparison.to_text()
    })
}

fn check_count(args: &Compare) -> Result<()> {
    match args.runs.len() {
        1 if args.html.is_none() => Err(Usage::error(
            "one run has nothing to be compared with, expected two or more (one is enough for `--html`)",
        )),
        count if count > REPORTS_MAX => Err(Usage::error(format_args!(
            "{count} runs, expected at most {REPORTS_MAX}"
        ))),
        _ => Ok(()),
    }
}

/// The summary that an argument means.
fn summary_file(run: &Path) -> Result<PathBuf> {
    let shown = run.display();
    if run.is_file() {
        return Ok(run.to_owned());
    }
    if run.exists() && !run.is_dir() {
        return Err(Usage::error(format_args!(
            "`{shown}` is neither a folder nor a file, expected a run's folder or its `{SUMMARY}`"
        )));
    }
    if !run.is_dir() {
        let hint = nearest_sibling(run)
            .map(|name| format!("; did you mean `{name}`?"))
            .unwrap_or_default();
        return Err(Usage::error(format_args!(
            "`{shown}` does not exist, expected a run's folder or its `{SUMMARY}`{hint}"
        )));
    }
    let file = run.join(SUMMARY);
    if file.is_file() {
        return Ok(file);
    }
    let hint = runs_below(run)
        .map(|name| format!("; `{name}` has one"))
        .unwrap_or_default();
    Err(Usage::error(format_args!(
        "folder `{shown}` has no `{SUMMARY}`, expected what `--out` of `homing sim` wrote{hint}"
    )))
}

/// The first folder in this one that holds a run.
fn runs_below(folder: &Path) -> Option<String> {
    let mut found: Vec<PathBuf> = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).collect();
    found.sort();
    let first = found.into_iter().find(|path| path.join(SUMMARY).is_file())?;
    Some(first.display().to_string())
}

/// The entry beside a missing one whose name is nearest, if one is near.
fn nearest_sibling(missing: &Path) -> Option<String> {
    const NEAR: usize = 2;
    let wanted = missing.file_name()?.to_str()?;
    let entries = fs::read_dir(folder_of(missing)).ok()?.flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let (_, name) = names
        .map(|name| (distance(wanted, &name), name))
        .filter(|(distance, _)| *distance <= NEAR)
        .min()?;
    Some(missing.with_file_name(name).display().to_string())
}

/// How many letters have to be put in, taken out or changed.
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (index, letter) in one.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = index + 1;
        for column in 0..other.len() {
            let changed = diagonal + usize::from(letter != other[column]);
            diagonal = row[column + 1];
            row[column + 1] = changed.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[other.len()]
}

/// The report in a summary.
fn source(run: &Path, file: &Path) -> Result<Source> {
    let shown = file.display();
    let text = fs::read_to_string(file).map_err(|error| Usage::error(format_args!("`{shown}`: {error}")))?;
    let value: serde_json::Value =
        serde_json::from_str(&text).map_err(|error| Usage::error(format_args!("`{shown}` is not JSON: {error}")))?;
    match value.get("schema").and_then(serde_json::Value::as_str) {
        Some(SCHEMA) => {}
        Some(other) => {
            return Err(Usage::error(format_args!(
                "`{shown}` has schema `{other}`, expected `{SCHEMA}`"
            )));
        }
        None => {
            return Err(Usage::error(format_args!(
                "`{shown}` has no schema, expected `{SCHEMA}`"
            )));
        }
    }
    // Read from the text, so that an error has its place.
    let report: Report = serde_json::from_str(&text)
        .map_err(|error| Usage::error(format_args!("`{shown}` does not hold `{SCHEMA}`: {error}")))?;
    if report.runs.is_empty() {
        return Err(Usage::error(format_args!(
            "`{shown}` has no runs, expected one or more"
        )));
    }
    report
        .check()
        .map_err(|error| Usage::error(format_args!("`{shown}`: {error}")))?;
    Ok(Source {
        name: run.display().to_string(),
        report,
    })
}

/// The logs beside a summary, of each of its runs.
fn logs(report: &Report, summary: &Path) -> Result<Vec<RunLogs>> {
    let folder = folder_of(summary);
    let runs = report.runs.iter().map(|run| {
        let file = |kind: LogKind| match folder.join(format!("seed-{}.{}", run.seed, kind.file_name())) {
            named if named.is_file() => named,
            // Logs without a seed in their name are those of a single run, or of all runs of a live replay together.
            _ => folder.join(kind.file_name()),
        };
        Ok(RunLogs {
            seed: Some(run.seed),
            requests: lines::<RequestLine>(&file(LogKind::Requests))?,
            samples: lines::<WorkerSampleLine>(&file(LogKind::WorkerSamples))?,
            evictions: lines::<EvictionLine>(&file(LogKind::Evictions))?,
        })
    });
    let mut logs: Vec<RunLogs> = runs.collect::<Result<_>>()?;
    if logs.len() > 1 && folder.join(LogKind::Requests.file_name()).is_file() {
        // One file for all runs: its lines do not say which, so they are shown once, as nobody's.
        logs.truncate(1);
        logs[0].seed = None;
    }
    Ok(logs)
}

/// The lines of a log; none where it does not exist.
fn lines<T: LogLine + DeserializeOwned>(file: &Path) -> Result<Vec<T>> {
    let opened = match File::open(file) {
        Ok(opened) => opened,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Usage::error(format_args!("`{}`: {error}", file.display()))),
    };
    let mut lines = Vec::new();
    for (index, line) in BufReader::new(opened).lines().enumerate() {
        let wrong = |error: &dyn std::fmt::Display| {
            Usage::error(format_args!("`{}` line {}: {error}", file.display(), index + 1))
        };
        let line = line.map_err(|error| wrong(&error))?;
        if !line.trim().is_empty() {
            lines.push(serde_json::from_str(&line).map_err(|error| wrong(&of_line(&error)))?);
        }
    }
    Ok(lines)
}

/// What the parser says of one line; it counts lines within that.
fn of_line(error: &serde_json::Error) -> String {
    let said = error.to_string();
    let reason = said.split(" at line ").next().unwrap_or(&said);
    format!("{reason}, at column {}", error.column())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_counts_letters() {
        let check = |one: &str, other: &str, expected: usize| {
            assert_eq!(
                (distance(one, other), distance(other, one)),
                (expected, expected),
                "{one} {other}"
            );
        };
        check("run-a", "run-a", 0);
        check("run-a", "run-b", 1);
        check("runa", "run-a", 1);
        check("", "abc", 3);
        check("kitten", "sitting", 3);
    }
}
