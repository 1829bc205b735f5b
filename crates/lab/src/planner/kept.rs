//! Outcomes kept in a file, so that a comparison of an hour that was interrupted goes on where it was, and families that were run one
//! by one make one document.
//!
//! A line is a seed, the command of its setup, and the figures as their bits: what is read is to the bit what was written. Whoever keeps
//! outcomes over a change of the code gets the old code's; nothing here can tell. A line that was cut off is run again.

use super::outcome::{Outcome, Outcomes};
use crate::results::RunError;
use crate::setup::{Setup, SetupError};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::sync::Mutex;

/// Outcomes by the seed and the command of their setup, and the file to which new ones are added.
#[derive(Debug, Default)]
pub struct Kept {
    known: BTreeMap<(u64, String), Outcome>,
    file: Option<Mutex<File>>,
}

impl Kept {
    /// Those in this file, which is made where there is none.
    ///
    /// # Errors
    /// If it cannot be read or written.
    pub fn open(path: &Path) -> std::io::Result<Self> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error),
        };
        let mut file = OpenOptions::new().append(true).create(true).open(path)?;
        if !text.is_empty() && !text.ends_with('\n') {
            writeln!(file)?;
        }
        Ok(Self {
            known: text.lines().filter_map(parsed).collect(),
            file: Some(Mutex::new(file)),
        })
    }

    /// Runs those of the setups that are not known yet, and gives all.
    ///
    /// # Errors
    /// The first setup, in order, that cannot be run.
    pub(super) fn run(
        &self,
        setups: Vec<Setup>,
        threads: usize,
        progress: impl Fn(usize, usize) + Sync,
    ) -> Result<Outcomes, RunError> {
        Outcomes::run_with(setups, threads, progress, |setup, seed| self.outcome(setup, seed))
    }

    fn outcome(&self, setup: &Setup, seed: u64) -> Result<Outcome, SetupError> {
        let key = (seed, setup.clone().seeds(1).command());
        if let Some(known) = self.known.get(&key) {
            return Ok(*known);
        }
        let outcome = Outcome::simulate(setup, seed)?;
        if let Some(file) = &self.file {
            let mut file = file.lock().expect("writing a line does not panic");
            // What cannot be kept is run again another time.
            let _ = writeln!(file, "{}", line(seed, &key.1, &outcome));
        }
        Ok(outcome)
    }
}

fn line(seed: u64, command: &str, outcome: &Outcome) -> String {
    let figures = outcome.figures().map(|figure| match figure {
        Some(figure) => format!("{:016x}", figure.to_bits()),
        None => "-".to_owned(),
    });
    format!("{seed}\t{command}\t{}\t.", figures.join("\t"))
}

fn parsed(line: &str) -> Option<((u64, String), Outcome)> {
    let mut fields = line.strip_suffix("\t.")?.split('\t');
    let (seed, command) = (fields.next()?.parse().ok()?, fields.next()?.to_owned());
    let figures = fields.map(|field| match field {
        "-" => Some(None),
        bits => u64::from_str_radix(bits, 16)
            .ok()
            .map(|bits| Some(f64::from_bits(bits))),
    });
    let figures: Vec<Option<f64>> = figures.collect::<Option<_>>()?;
    Some(((seed, command), Outcome::from_figures(figures.try_into().ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_as_it_was_written_and_one_that_was_cut_off_is_not() {
        let mut figures = [
            Some(0.1 + 0.2),
            None,
            Some(f64::MIN_POSITIVE),
            Some(3.0),
            None,
            Some(1e9),
            Some(0.0),
            None,
        ];
        let outcome = Outcome::from_figures(figures);
        let written = line(7, "homing sim --runs 1", &outcome);
        let read = parsed(&written).expect("whole");
        assert_eq!(read, ((7, "homing sim --runs 1".to_owned()), outcome));
        (0..written.len()).for_each(|end| assert_eq!(parsed(&written[..end]), None, "cut at {end}"));
        figures[3] = None;
        assert_ne!(read.1, Outcome::from_figures(figures));
    }

    #[test]
    fn what_is_kept_is_not_run_again() {
        let path = std::env::temp_dir().join(format!("homing-kept-{}.txt", std::process::id()));
        let setup = || vec![Setup::new("gen:swe52:sessions=2:seed=1", "h100x2-dp", "sticky").seeds(2)];
        let run = || {
            let kept = Kept::open(&path).expect("a file in the folder for such");
            let outcomes = kept.run(setup(), 1, |_, _| {}).expect("a good setup");
            (outcomes.of(&setup()[0]).to_vec(), kept.known.len())
        };
        let (first, known) = run();
        assert_eq!(known, 0);
        let text = std::fs::read_to_string(&path).expect("it was written");
        let (second, known) = run();
        assert_eq!((known, &second), (2, &first));
        assert_eq!(
            std::fs::read_to_string(&path).expect("it is there"),
            text,
            "nothing was added"
        );
        std::fs::remove_file(&path).expect("it is ours");
    }
}
