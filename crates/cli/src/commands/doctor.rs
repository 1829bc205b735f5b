//! `homing doctor`: what went wrong in a run, in the five fields; in a folder of a run, of other engines' logs, or live.

mod live;

use crate::doctor_args as args;
use crate::failure::Usage;
use crate::output::print;
use anyhow::{Context, Result};
use homing_doctor::evidence::SUMMARY;
use homing_doctor::{Evidence, EvidenceError, Finding, Mode, diagnose, engine_logs, text};
use homing_report::logs::LogKind;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Bytes of all files that are read; a folder with more is refused.
const BYTES_MAX: u64 = 2 << 30;
/// Levels of folders below the one that was given in which logs of engines are looked for.
const DEPTH_MAX: usize = 4;
/// Files that are read.
const FILES_MAX: usize = 10_000;

/// What `--json` prints.
#[derive(Serialize)]
struct Document<'d> {
    schema: &'static str,
    place: &'d str,
    findings: Vec<Diagnosed<'d>>,
}

/// A finding with what is known of its mode.
#[derive(Serialize)]
struct Diagnosed<'d> {
    #[serde(flatten)]
    finding: &'d Finding,
    known: &'static Mode,
}

/// Looks at a folder or a router.
pub fn run(args: &args::Doctor) -> Result<()> {
    let findings = if args.place.contains("://") {
        live::diagnose(&args.place, args.watch)?
    } else {
        of_folder(Path::new(&args.place))?
    };
    print(&if args.json {
        let known = |finding| Diagnosed {
            finding,
            known: finding.mode.mode(),
        };
        let document = Document {
            schema: "homing.diagnosis/1",
            place: &args.place,
            findings: findings.iter().map(known).collect(),
        };
        format!(
            "{}\n",
            serde_json::to_string(&document).context("the findings are no JSON")?
        )
    } else {
        text::diagnosis(&findings)
    })
}

fn of_folder(folder: &Path) -> Result<Vec<Finding>> {
    let wrong = |error: &dyn std::fmt::Display| Usage::error(format_args!("`{}`: {error}", folder.display()));
    if !folder.is_dir() {
        return Err(wrong(&"expected a folder, or the URL of a router"));
    }
    let files = read(folder, is_of_run, 0).map_err(|error| wrong(&error))?;
    match Evidence::read(&files) {
        Ok(evidence) => Ok(diagnose(&evidence)),
        Err(EvidenceError::NoRun) => {
            let files = read(folder, is_log, DEPTH_MAX).map_err(|error| wrong(&error))?;
            if files.is_empty() {
                return Err(wrong(
                    &"neither the folder of a run nor one of engine logs (`*.log`, `*.txt`, `*.out`, `*.err`)",
                ));
            }
            Ok(engine_logs::diagnose(&files))
        }
        Err(error) => Err(wrong(&error)),
    }
}

/// Whether a file is one that a run leaves.
fn is_of_run(name: &str) -> bool {
    name == SUMMARY || LogKind::ALL.iter().any(|kind| name.ends_with(&kind.file_name()))
}

/// Whether a file may be an engine's log.
fn is_log(name: &str) -> bool {
    [".log", ".txt", ".out", ".err"].iter().any(|end| name.ends_with(end))
}

/// The texts of a folder's files, and of those of folders below down to `depth`, by their path in it.
fn read(folder: &Path, wanted: fn(&str) -> bool, depth: usize) -> Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    let (mut folders, mut bytes) = (vec![(PathBuf::new(), 0)], 0);
    while let Some((inside, level)) = folders.pop() {
        for entry in fs::read_dir(folder.join(&inside))? {
            let entry = entry?;
            let (path, kind) = (inside.join(entry.file_name()), entry.file_type()?);
            let name = entry.file_name().to_string_lossy().into_owned();
            if kind.is_dir() && level < depth {
                folders.push((path, level + 1));
            } else if kind.is_file() && wanted(&name) {
                bytes += entry.metadata()?.len();
                anyhow::ensure!(
                    bytes <= BYTES_MAX,
                    "more than {BYTES_MAX} bytes of logs, expected fewer"
                );
                anyhow::ensure!(
                    files.len() < FILES_MAX,
                    "more than {FILES_MAX} files of logs, expected fewer"
                );
                // Engines write what models say: not all of it is UTF-8.
                let text = String::from_utf8_lossy(&fs::read(folder.join(&path))?).into_owned();
                files.insert(path.to_string_lossy().into_owned(), text);
            }
        }
    }
    Ok(files)
}
