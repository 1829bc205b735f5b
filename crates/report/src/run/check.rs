//! Whether a document that was read can be what a run left: its types are right already, its figures may still be none.
//!
//! A document is made by [`Report::new`] or by other people's tools and hands. What is refused here would otherwise come out
//! as a verdict: a share above 1, a time below 0, or one run counted twice as if it were two.

use super::{Report, Run};
use crate::summary::figures_of;
use std::collections::BTreeMap;
use std::fmt::Display;

/// A field of a document that no run can have left.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{field}` is `{found}`, expected {expected}")]
pub struct WrongField {
    /// Its path in the document, such as `runs[0].hit_ratio`.
    pub field: String,
    /// Its value.
    pub found: String,
    /// What it should be.
    pub expected: String,
}

impl Report {
    /// Checks that the figures are possible ones and that no run is there twice.
    ///
    /// # Errors
    /// The first field that is wrong.
    pub fn check(&self) -> Result<(), WrongField> {
        if !(self.time_scale.is_finite() && self.time_scale > 0.0) {
            return Err(wrong("time_scale", self.time_scale, "a number above 0"));
        }
        if self.block_size == Some(0) {
            return Err(wrong("block_size", 0, "a whole number above 0, or null"));
        }
        let mut seen: BTreeMap<u64, usize> = BTreeMap::new();
        for (index, run) in self.runs.iter().enumerate() {
            let field = |name: &str| format!("runs[{index}].{name}");
            if let Some(first) = seen.insert(run.seed, index) {
                let expected =
                    format!("another one than that of `runs[{first}]`: a run that is there twice proves nothing more");
                return Err(wrong(&field("seed"), run.seed, expected));
            }
            run.check(&field)?;
        }
        Ok(())
    }
}

impl Run {
    fn check(&self, field: &impl Fn(&str) -> String) -> Result<(), WrongField> {
        const SHARES: [&str; 2] = ["hit_ratio", "first_error_at_share"];
        for (name, value) in figures_of(self) {
            let is_share = SHARES.contains(&name.as_str());
            if value < 0.0 || is_share && value > 1.0 {
                let expected = if is_share {
                    "a number from 0 to 1"
                } else {
                    "a number of at least 0"
                };
                return Err(wrong(&field(&name), value, expected));
            }
        }
        if self.completed > self.requests {
            let expected = format!("at most the {} that were sent (`requests`)", self.requests);
            return Err(wrong(&field("completed"), self.completed, expected));
        }
        Ok(())
    }
}

fn wrong(field: &str, found: impl Display, expected: impl Into<String>) -> WrongField {
    WrongField {
        field: field.to_owned(),
        found: found.to_string(),
        expected: expected.into(),
    }
}

#[cfg(test)]
mod tests {
    use crate::run::{Experiment, Report, RunRecord};

    fn report() -> Report {
        let runs = [1, 2, 3].map(|seed| RunRecord {
            seed,
            ..RunRecord::default()
        });
        Report::new(&Experiment::example(), &runs)
    }

    #[test]
    fn a_field_that_no_run_leaves_is_named_with_what_was_expected() {
        let check = |change: fn(&mut Report), expected: &str| {
            let mut report = report();
            change(&mut report);
            let said = report
                .check()
                .map_or_else(|error| error.to_string(), |()| "right".to_owned());
            assert_eq!(said, expected);
        };
        check(|_| {}, "right");
        check(|report| report.block_size = None, "right");
        check(|report| report.runs[1].hit_ratio = Some(1.0), "right");
        check(
            |report| report.time_scale = -2.0,
            "`time_scale` is `-2`, expected a number above 0",
        );
        check(
            |report| report.time_scale = 0.0,
            "`time_scale` is `0`, expected a number above 0",
        );
        check(
            |report| report.block_size = Some(0),
            "`block_size` is `0`, expected a whole number above 0, or null",
        );
        check(
            |report| report.runs[1].hit_ratio = Some(7.0),
            "`runs[1].hit_ratio` is `7`, expected a number from 0 to 1",
        );
        check(
            |report| report.runs[1].hit_ratio = Some(-0.5),
            "`runs[1].hit_ratio` is `-0.5`, expected a number from 0 to 1",
        );
        check(
            |report| report.runs[0].first_error_at_share = Some(1.5),
            "`runs[0].first_error_at_share` is `1.5`, expected a number from 0 to 1",
        );
        check(
            |report| report.runs[2].duration_s = -3.0,
            "`runs[2].duration_s` is `-3`, expected a number of at least 0",
        );
        check(
            |report| report.runs[2].by_class.heavy.ttft_s.p90 = Some(-1.0),
            "`runs[2].by_class.heavy.ttft_s.p90` is `-1`, expected a number of at least 0",
        );
        check(
            |report| report.runs[0].completed = 1,
            "`runs[0].completed` is `1`, expected at most the 0 that were sent (`requests`)",
        );
        check(
            |report| report.runs[2].seed = 1,
            "`runs[2].seed` is `1`, expected another one than that of `runs[0]`: a run that is there twice proves \
             nothing more",
        );
    }
}
