//! Rules of the style guide that clippy does not know, checked on every file that git tracks.

use crate::shell;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;

/// Lines of a file, tests not counted, above which it must be split.
const LINES_MAX: usize = 800;
/// What no file may contain: each would tie the project to one machine, or hide work that is not done.
const FORBIDDEN: [(&str, &str); 5] = [
    (concat!("TO", "DO"), "open work belongs into an issue"),
    (concat!("FIX", "ME"), "open work belongs into an issue"),
    (concat!("#[", "ignore"), "a test that does not run proves nothing"),
    (concat!("#[", "allow("), "use #[expect(lint, reason = \"...\")]"),
    (concat!("/work", "/"), "a path of one machine"),
];

/// Checks every tracked Rust file; an error lists all that is wrong.
pub fn run() -> Result<()> {
    println!("\n==> tidy");
    let listed = shell::output("git", &["ls-files", "*.rs"])?;
    let mut wrong = Vec::new();
    build_outputs_are_not_tracked(&mut wrong)?;
    for path in String::from_utf8(listed)?.lines() {
        let file = shell::root().join(path);
        if file.exists() {
            let text = fs::read_to_string(&file).with_context(|| format!("`{path}` could not be read"))?;
            check(path, &text, &mut wrong);
        }
    }
    pure_crates_are_fenced(&shell::root().join("crates"), &mut wrong)?;
    ensure!(wrong.is_empty(), "not tidy:\n  {}", wrong.join("\n  "));
    Ok(())
}

/// What a build or a benchmark leaves, wherever it was started, is no source.
fn build_outputs_are_not_tracked(wrong: &mut Vec<String>) -> Result<()> {
    let listed = shell::output("git", &["ls-files", "target/*", "**/target/*"])?;
    let tracked = String::from_utf8(listed)?;
    wrong.extend(
        tracked
            .lines()
            .next()
            .map(|path| format!("{path}: a build output is tracked")),
    );
    Ok(())
}

/// Checks one file.
fn check(path: &str, text: &str, wrong: &mut Vec<String>) {
    if !text.starts_with("//!") {
        wrong.push(format!(
            "{path}:1: begin with `//!`: what it is, why so, what it does not do"
        ));
    }
    let lines = text.lines().take_while(|line| *line != "#[cfg(test)]").count();
    if lines > LINES_MAX && !path.contains("/tests/") {
        wrong.push(format!(
            "{path}: {lines} lines without tests, at most {LINES_MAX}: split it"
        ));
    }
    for (number, line) in text.lines().enumerate() {
        for (word, reason) in FORBIDDEN {
            if line.contains(word) {
                wrong.push(format!("{path}:{}: `{word}`: {reason}", number + 1));
            }
        }
    }
}

/// Every pure crate links the bans; a crate's own clippy.toml would replace them.
fn pure_crates_are_fenced(crates: &Path, wrong: &mut Vec<String>) -> Result<()> {
    let bans = fs::read_to_string(shell::root().join("lints").join("pure.toml"))?;
    for name in [
        "units", "kv", "engine", "router", "workload", "wire", "sim", "report", "doctor", "drills",
    ] {
        let found = fs::read_to_string(crates.join(name).join("clippy.toml")).unwrap_or_default();
        if found != bans {
            wrong.push(format!("crates/{name}/clippy.toml: must be a link to lints/pure.toml"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaints(text: &str) -> usize {
        let mut wrong = Vec::new();
        check("crates/x/src/lib.rs", text, &mut wrong);
        wrong.len()
    }

    #[test]
    fn the_tree_is_tidy() {
        run().expect("a tidy tree");
    }

    #[test]
    fn each_rule_is_seen() {
        assert_eq!(complaints("//! Fine.\nfn main() {}\n"), 0);
        assert_eq!(complaints("fn main() {}\n"), 1);
        assert_eq!(complaints(&format!("//! Long.\n{}", "\n".repeat(LINES_MAX))), 1);
        assert_eq!(
            complaints(&format!("//! Long tests.\n#[cfg(test)]\n{}", "\n".repeat(LINES_MAX))),
            0
        );
        for (word, _) in FORBIDDEN {
            assert_eq!(complaints(&format!("//! {word}\n")), 1, "{word}");
        }
    }
}
