//! `docs/results.md` and its plot `docs/results.svg`: the planner against all other policies, from fresh simulations, never edited
//! by hand.
//!
//! The cells are the crate `homing-lab`'s; this builds it and writes what it prints. Recorded traces are no part of the project:
//! their cells are run where the folder that holds them is named.

use crate::reproduce::compare;
use crate::shell;
use anyhow::{Context, Result};
use std::fs;
use std::path::PathBuf;

/// What to run.
#[derive(clap::Args)]
pub struct Args {
    /// Only what shows that the document can be made; it is printed, and the file stays as it is.
    #[arg(long)]
    quick: bool,
    /// Only the knees and what is beyond, over two seeds.
    #[arg(long, conflicts_with = "quick")]
    brief: bool,
    /// A file in which outcomes are kept, so that an interrupted run goes on; for one build only.
    #[arg(long, value_name = "FILE")]
    keep: Option<PathBuf>,
    /// Compare both files with fresh ones instead of writing them; exit code 1 if they differ.
    #[arg(long, conflicts_with = "quick")]
    check: bool,
    /// Only these families of workloads; the document says so.
    #[arg(long, conflicts_with = "quick")]
    family: Vec<String>,
    /// Fewer seeds than five, or more; the document says how many.
    #[arg(long)]
    seeds: Option<u64>,
    /// The folder with the recorded traces.
    #[arg(long, value_name = "FOLDER")]
    traces: Option<PathBuf>,
}

/// Runs the simulations.
pub fn run(args: &Args) -> Result<()> {
    shell::run("cargo", &["build", "--release", "--package", "homing-lab"])?;
    let lab = shell::release_path("homing-lab");
    let docs = shell::root().join("docs");
    let scratch = std::env::temp_dir().join("results.svg");
    let written = docs.join("results.svg");
    let plot = if args.quick || args.check { &scratch } else { &written };
    let mut arguments = vec!["--results".to_owned(), "--plot".to_owned(), plot.display().to_string()];
    if args.quick {
        arguments.push("--quick".to_owned());
    }
    if args.brief {
        arguments.push("--brief".to_owned());
    }
    if let Some(file) = &args.keep {
        let file = std::path::absolute(file).with_context(|| format!("looking for `{}`", file.display()))?;
        arguments.extend(["--keep".to_owned(), file.display().to_string()]);
    }
    for family in &args.family {
        arguments.extend(["--family".to_owned(), family.clone()]);
    }
    if let Some(seeds) = args.seeds {
        arguments.extend(["--seeds".to_owned(), seeds.to_string()]);
    }
    if let Some(folder) = &args.traces {
        let folder = fs::canonicalize(folder).with_context(|| format!("looking for `{}`", folder.display()))?;
        arguments.extend(["--traces".to_owned(), folder.display().to_string()]);
    }
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let fresh = String::from_utf8(shell::output(&lab, &arguments)?).context("the document is text")?;
    if args.quick {
        print!("{fresh}");
        return Ok(());
    }
    let path = docs.join("results.md");
    if args.check {
        let plot = fs::read_to_string(plot).with_context(|| format!("reading `{}`", plot.display()))?;
        return compare(&path, &fresh).and_then(|()| compare(&written, &plot));
    }
    fs::write(&path, fresh).with_context(|| format!("writing `{}`", path.display()))
}
