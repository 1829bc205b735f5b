//! How a command fails: exit code 1 when the work failed, 2 when it was asked for in a wrong way.

use crate::output::say;
use clap::error::ErrorKind;
use std::fmt;
use std::process::ExitCode;

/// Wrong usage or input: one line that says what was expected, exit code 2.
#[derive(Debug)]
pub struct Usage(String);

impl Usage {
    /// An error for [`anyhow`] with this line.
    pub fn error(line: impl fmt::Display) -> anyhow::Error {
        anyhow::Error::new(Self(line.to_string()))
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&one_line(&self.0))
    }
}

impl std::error::Error for Usage {}

/// The reader of stdout has gone: it has read what it wanted, so that this is no failure.
#[derive(Debug)]
pub struct ReaderGone;

impl fmt::Display for ReaderGone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reader of stdout has gone")
    }
}

impl std::error::Error for ReaderGone {}

/// What the parser of the command line has to say, and its exit code: help and version as they are, an error in one line.
pub fn usage_exit(error: &clap::Error) -> ExitCode {
    if error.exit_code() == 0 {
        // Nobody is left to tell where this fails.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let line = match error.kind() {
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            "error: expected a command: up, serve, worker, sim, replay, compare, doctor, drill or trace (see `homing --help`)"
                .to_owned()
        }
        _ => one_line(&error.render().to_string()),
    };
    say(line);
    ExitCode::from(2)
}

/// An error in one line: its lines up to the usage and the pointer to help that the parser adds, or the whole of another's.
/// Control characters are spelt out: an error quotes what it was given, and that must not steer the terminal.
fn one_line(text: &str) -> String {
    let of_parser = |line: &&str| line.starts_with("Usage:") || line.starts_with("For more information, try");
    let said = text.lines().map(str::trim).take_while(|line| !of_parser(line));
    let line = said.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
    line.chars()
        .fold(String::with_capacity(line.len()), |mut safe, letter| {
            if letter.is_control() {
                safe.extend(letter.escape_default());
            } else {
                safe.push(letter);
            }
            safe
        })
}

/// The exit code for an error.
pub fn exit_code(error: &anyhow::Error) -> u8 {
    if error.chain().any(|cause| cause.is::<Usage>()) {
        2
    } else {
        1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn an_error_is_one_line() {
        let said = "error: invalid value 'x'\n  [possible values: a, b]\n\nUsage: homing sim [OPTIONS]\n\nFor more";
        assert_eq!(one_line(said), "error: invalid value 'x' [possible values: a, b]");
        let said = "error: invalid value '0'\n\nFor more information, try '--help'.\n";
        assert_eq!(one_line(said), "error: invalid value '0'");
        assert_eq!(one_line("schema `\u{1b}[2Jx`\u{9b}"), "schema `\\u{1b}[2Jx`\\u{9b}");
    }

    #[test]
    fn usage_is_found_below_its_context() {
        assert_eq!(exit_code(&Usage::error("expected a trace")), 2);
        let wrapped = Err::<(), _>(Usage::error("expected a trace"))
            .context("reading")
            .expect_err("an error");
        assert_eq!(exit_code(&wrapped), 2);
        assert_eq!(exit_code(&anyhow::anyhow!("broken")), 1);
    }
}
