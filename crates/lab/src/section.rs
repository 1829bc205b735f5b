//! What an experiment hands to the document: rows of theirs beside ours, tables of our own, and the reasons.
//!
//! A reason belongs to a verdict and to a condition on the figures. It is printed only where its row does not reproduce and
//! the condition holds, so that no sentence of the document says more than the runs do.

use crate::paper::{Figure, Paper};
use crate::sample::Sample;
use crate::setup::Setup;
use crate::verdict::{Expect, Verdict};
use std::fmt::Write as _;

/// The part of the document that one experiment makes.
#[derive(Clone, Debug, Default)]
pub struct Section {
    /// Its heading.
    pub title: &'static str,
    /// What was run and what was assumed; said before the figures.
    pub intro: &'static str,
    /// Their figures beside ours.
    pub rows: Vec<Row>,
    /// Further figures of ours.
    pub tables: Vec<Table>,
    /// The setups that it used.
    pub setups: Vec<Setup>,
}

/// A figure or a claim: theirs, ours, and what the comparison says.
#[derive(Clone, Debug)]
pub struct Row {
    /// What it is.
    pub what: String,
    /// Keys of the paper's figures that it shows.
    pub keys: Vec<String>,
    /// The paper's side.
    pub theirs: String,
    /// Our side.
    pub ours: String,
    /// What the comparison says.
    pub verdict: Verdict,
    /// Reasons that apply if it does not reproduce.
    pub reasons: Vec<String>,
}

/// Figures of ours in a table.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// What it shows.
    pub title: String,
    /// The heads of its columns.
    pub heads: Vec<String>,
    /// Its rows, as long as the heads.
    pub rows: Vec<Vec<String>>,
}

impl Section {
    /// An empty section.
    #[must_use]
    pub fn new(title: &'static str, intro: &'static str, setups: Vec<Setup>) -> Self {
        Self {
            title,
            intro,
            setups,
            ..Self::default()
        }
    }

    /// Adds a row.
    pub fn row(&mut self, row: Row) {
        self.rows.push(row);
    }
}

impl Row {
    /// A figure of a paper beside ours, compared by mean.
    #[must_use]
    pub fn figure(paper: &Paper, key: &str, what: &str, expect: Expect, ours: &Sample) -> Self {
        let figure = paper.figure(key);
        Self {
            what: what.to_owned(),
            keys: vec![key.to_owned()],
            theirs: cite(paper, figure),
            ours: estimate(ours, &figure.unit),
            verdict: Verdict::of(expect, Some(figure.mean()), ours),
            reasons: Vec::new(),
        }
    }

    /// A claim of a paper with the figures it rests on, and what ours say.
    #[must_use]
    pub fn claim(paper: &Paper, keys: &[&str], what: &str, ours: String, verdict: Verdict) -> Self {
        let theirs: Vec<String> = keys.iter().map(|key| cite(paper, paper.figure(key))).collect();
        Self {
            what: what.to_owned(),
            keys: keys.iter().map(|key| (*key).to_owned()).collect(),
            theirs: theirs.join("; "),
            ours,
            verdict,
            reasons: Vec::new(),
        }
    }

    /// A question that the papers leave open: no figure of theirs, and what ours say.
    #[must_use]
    pub fn open(what: &str, ours: String, verdict: Verdict) -> Self {
        Self {
            what: what.to_owned(),
            keys: Vec::new(),
            theirs: "not measured there".to_owned(),
            ours,
            verdict,
            reasons: Vec::new(),
        }
    }

    /// A reason that holds under a condition on the figures.
    #[must_use]
    pub fn because(mut self, condition: bool, reason: impl Into<String>) -> Self {
        if condition {
            self.reasons.push(reason.into());
        }
        self
    }
}

/// Reasons that several rows share: the first of these that does not reproduce has them in full, the others point at it.
#[derive(Clone, Debug, Default)]
pub struct Shared {
    reasons: Vec<String>,
    said_for: Option<String>,
}

impl Shared {
    /// These reasons, which hold already.
    #[must_use]
    pub fn new(reasons: Vec<String>) -> Self {
        Self {
            reasons,
            said_for: None,
        }
    }

    /// The row with them, if it does not reproduce and the condition holds.
    #[must_use]
    pub fn explain(&mut self, condition: bool, mut row: Row) -> Row {
        if !condition || row.verdict.holds() || self.reasons.is_empty() {
            return row;
        }
        match &self.said_for {
            Some(other) => row.reasons.push(format!("As for *{other}*.")),
            None => {
                row.reasons.extend(self.reasons.iter().cloned());
                self.said_for = Some(row.what.clone());
            }
        }
        row
    }
}

impl Table {
    /// A table without rows.
    #[must_use]
    pub fn new(title: &str, heads: &[&str]) -> Self {
        Self {
            title: title.to_owned(),
            heads: heads.iter().map(|head| (*head).to_owned()).collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row.
    ///
    /// # Panics
    /// If it has not one cell for each head.
    pub fn row(&mut self, cells: Vec<String>) {
        assert_eq!(cells.len(), self.heads.len(), "a cell for each head");
        self.rows.push(cells);
    }
}

/// A figure of a paper with its place.
fn cite(paper: &Paper, figure: &Figure) -> String {
    let values: Vec<String> = figure.values.iter().map(|value| plain(*value)).collect();
    let mut text = values.join(" / ");
    if !figure.unit.is_empty() {
        let _ = write!(text, " {}", figure.unit);
    }
    let document = paper.documents().position(|(key, _)| key == figure.source);
    let number = document.expect("a test knows every source") + 1;
    let _ = write!(text, " [{number}, {}]", figure.section);
    if let Some(note) = &figure.note {
        let _ = write!(text, " ({note})");
    }
    text
}

/// A mean with its interval.
#[must_use]
pub fn estimate(sample: &Sample, unit: &str) -> String {
    let Some(mean) = sample.mean() else {
        return "none".to_owned();
    };
    let mut text = number(mean);
    if let Some([low, high]) = sample.interval() {
        let _ = write!(text, " [{}, {}]", number(low), number(high));
    }
    if !unit.is_empty() {
        let _ = write!(text, " {unit}");
    }
    text
}

/// The values of each run.
#[must_use]
pub fn each(sample: &Sample) -> String {
    if sample.values.is_empty() {
        "none".to_owned()
    } else {
        list(&sample.values)
    }
}

/// Several figures of one run, as the papers print those of their workers.
#[must_use]
pub fn list(values: &[f64]) -> String {
    let values: Vec<String> = values.iter().map(|value| number(*value)).collect();
    values.join(" / ")
}

/// The smallest and the largest value.
#[must_use]
pub fn range(sample: &Sample) -> String {
    sample.range().map_or_else(
        || "none".to_owned(),
        |[low, high]| format!("{} to {}", number(low), number(high)),
    )
}

/// A figure with about three significant digits, and whole from 100 on.
#[must_use]
pub fn number(value: f64) -> String {
    let magnitude = value.abs();
    let decimals = match magnitude {
        _ if magnitude >= 100.0 => 0,
        _ if magnitude >= 10.0 => 1,
        _ if magnitude >= 1.0 => 2,
        _ => 3,
    };
    let whole = value.fract() == 0.0;
    grouped(&format!("{value:.*}", if whole { 0 } else { decimals }))
}

/// A value as the paper prints it.
#[must_use]
pub fn plain(value: f64) -> String {
    grouped(&format!("{value}"))
}

/// The text of a number with its thousands set apart.
fn grouped(text: &str) -> String {
    let (sign, digits) = text.strip_prefix('-').map_or(("", text), |digits| ("-", digits));
    let (whole, fraction) = digits
        .split_once('.')
        .map_or((digits, None), |(whole, rest)| (whole, Some(rest)));
    let mut grouped = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index) % 3 == 0 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    fraction.map_or_else(|| format!("{sign}{grouped}"), |rest| format!("{sign}{grouped}.{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(values: &[f64]) -> Sample {
        Sample::of(values.iter().copied().map(Some))
    }

    #[test]
    fn numbers_are_short_and_grouped() {
        let check = |value: f64, expected: &str| assert_eq!(number(value), expected);
        check(0.0, "0");
        check(0.0312, "0.031");
        check(1.426, "1.43");
        check(12.34, "12.3");
        check(912.0, "912");
        check(67_726.4, "67,726");
        check(-1234.5, "-1,234");
        check(1_000_000.0, "1,000,000");
    }

    #[test]
    fn a_row_shows_both_sides_and_where_theirs_stands() {
        let paper = Paper::load();
        let row = Row::figure(
            &paper,
            "dp.latency.mean",
            "latency",
            Expect::Within(0.25),
            &sample(&[1.5, 1.5]),
        );
        assert_eq!(row.theirs, "1.426 s [3, headline comparison]");
        assert_eq!(row.ours, "1.50 [1.50, 1.50] s");
        assert_eq!(row.verdict, Verdict::Within(0.25));
    }

    #[test]
    fn several_figures_are_set_side_by_side() {
        assert_eq!(list(&[9.0, 43.0, 0.125]), "9 / 43 / 0.125");
        assert_eq!(range(&sample(&[43.0, 9.0, 16.0])), "9 to 43");
        assert_eq!(
            (range(&sample(&[])), each(&sample(&[]))),
            ("none".to_owned(), "none".to_owned())
        );
    }

    #[test]
    fn a_shared_reason_is_said_once() {
        let row = |what: &str, holds: bool| Row::open(what, String::new(), Verdict::shape(holds));
        let mut why = Shared::new(vec!["pools are small".to_owned()]);
        assert!(why.explain(true, row("a", true)).reasons.is_empty(), "it reproduces");
        assert!(
            why.explain(false, row("b", false)).reasons.is_empty(),
            "it does not apply"
        );
        assert_eq!(why.explain(true, row("c", false)).reasons, ["pools are small"]);
        assert_eq!(why.explain(true, row("d", false)).reasons, ["As for *c*."]);
        assert!(Shared::default().explain(true, row("e", false)).reasons.is_empty());
    }

    #[test]
    fn a_reason_needs_its_condition() {
        let paper = Paper::load();
        let row = Row::figure(&paper, "dp.errors", "errors", Expect::AtMost(0.0), &sample(&[1.0]))
            .because(false, "not so")
            .because(true, "so");
        assert_eq!(row.reasons, ["so"]);
    }
}
