//! `docs/results.md`: the planner against all other policies, from fresh simulations, never edited by hand.
//!
//! The cells are the crate `homing-lab`'s; this builds it and writes what it prints. Recorded traces are no part of the project:
//! their cells are run where the folder that holds them is named.

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
    /// The folder with the recorded traces.
    #[arg(long, value_name = "FOLDER")]
    traces: Option<PathBuf>,
}

/// Runs the simulations.
pub fn run(args: &Args) -> Result<()> {
    shell::run("cargo", &["build", "--release", "--package", "homing-lab"])?;
    let lab = shell::release_path("homing-lab");
    let mut arguments = vec!["--results".to_owned()];
    if args.quick {
        arguments.push("--quick".to_owned());
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
    let path = shell::root().join("docs").join("results.md");
    fs::write(&path, fresh).with_context(|| format!("writing `{}`", path.display()))
}
