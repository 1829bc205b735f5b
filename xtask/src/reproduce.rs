//! `docs/reproduction.md`: the source papers' figures beside ours, from fresh simulations, never edited by hand.
//!
//! The experiments are the crate `homing-lab`; this builds it, takes what it prints, and writes the file or compares it.

use crate::shell;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;

/// What to do with the document.
#[derive(clap::Args)]
pub struct Args {
    /// Compare the document with the file instead of writing it; exit code 1 if they differ.
    #[arg(long)]
    check: bool,
    /// Print the sections of these experiments only, for work in progress; the file stays as it is.
    #[arg(long, value_name = "ROW", conflicts_with = "check")]
    only: Vec<String>,
}

/// Runs the experiments.
pub fn run(args: &Args) -> Result<()> {
    shell::run("cargo", &["build", "--release", "--package", "homing-lab"])?;
    let lab = shell::release_path("homing-lab");
    let only: Vec<&str> = args.only.iter().flat_map(|name| ["--only", name.as_str()]).collect();
    let fresh = String::from_utf8(shell::output(&lab, &only)?).context("the document is text")?;
    if !args.only.is_empty() {
        print!("{fresh}");
        return Ok(());
    }
    let path = shell::root().join("docs").join("reproduction.md");
    if args.check {
        return compare(&path, &fresh);
    }
    fs::create_dir_all(shell::root().join("docs")).context("making `docs`")?;
    fs::write(&path, fresh).with_context(|| format!("writing `{}`", path.display()))
}

/// An error that shows the first line that differs, if one does.
pub fn compare(path: &Path, fresh: &str) -> Result<()> {
    let written = fs::read_to_string(path).with_context(|| format!("reading `{}`", path.display()))?;
    let difference = first_difference(&written, fresh);
    ensure!(
        difference.is_none(),
        "`{}` is not what fresh simulations give; {}",
        path.display(),
        difference.unwrap_or_default()
    );
    Ok(())
}

/// The first line in which two texts differ.
fn first_difference(written: &str, fresh: &str) -> Option<String> {
    if written == fresh {
        return None;
    }
    let (mut written, mut fresh) = (written.split('\n'), fresh.split('\n'));
    for number in 1.. {
        match (written.next(), fresh.next()) {
            (Some(old), Some(new)) if old == new => {}
            (old, new) => {
                let shown = |line: Option<&str>| line.unwrap_or("nothing").to_owned();
                return Some(format!("line {number} is `{}`, expected `{}`", shown(old), shown(new)));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_that_differs_is_shown() {
        let check = |written: &str, fresh: &str, expected: Option<&str>| {
            assert_eq!(first_difference(written, fresh).as_deref(), expected);
        };
        check("a\nb\n", "a\nb\n", None);
        check("a\nb\n", "a\nc\n", Some("line 2 is `b`, expected `c`"));
        check("a\n", "a\nb\n", Some("line 2 is ``, expected `b`"));
        check("a", "", Some("line 1 is `a`, expected ``"));
    }
}
