//! What was measured, against what must hold; printed as it comes.

use anyhow::{Result, ensure};
use std::fmt::Display;

/// The lines of all acts.
#[derive(Default)]
pub struct Report {
    broken: Vec<String>,
}

impl Report {
    /// An act begins.
    pub fn begin(&mut self, act: &str) {
        println!("\n==> {act}");
    }

    /// A figure that nothing hangs on.
    pub fn say(&mut self, what: &str, value: impl Display) {
        println!("    {what}: {value}");
    }

    /// A figure, what it must be, and whether it is.
    pub fn check(&mut self, what: &str, value: impl Display, wanted: &str, holds: bool) {
        let verdict = if holds { "ok" } else { "BROKEN" };
        let line = format!("{what}: {value} (wanted: {wanted})");
        println!("    {verdict:6} {line}");
        if !holds {
            self.broken.push(line);
        }
    }

    /// An error that names all that did not hold.
    pub fn verdict(self) -> Result<()> {
        ensure!(self.broken.is_empty(), "did not hold:\n  {}", self.broken.join("\n  "));
        Ok(())
    }
}
