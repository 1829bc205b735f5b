//! Two or more reports side by side: for each figure, which differences stand.
//!
//! A winner is called only where the 95% intervals of the mean over runs lie apart and each side has three runs or more.
//! One run proves nothing and two give no spread worth the name, so neither is ever called. Where reports used the same
//! seeds on the same workload, the differences by seed are bootstrapped too and stated; they are the sharper instrument,
//! but the verdict stays with the stricter rule: intervals that do not overlap.
//!
//! How strict that is should be known: the interval of three runs is their whole range, and two equal systems of three
//! runs each stand wholly apart by chance in one figure of ten (2 * 3! * 3! / 6!). Five runs a side make that 1 in 126.
//! The notes of a comparison say so.
//!
//! It does not know where the reports came from and reads no file. All of its output follows from its input alone.

mod notes;
mod text;

pub(crate) use text::said;

use crate::metric::{self, Better};
use crate::run::{Report, Run};
use crate::stats::{bootstrap_95, mean, rounded};
use crate::summary::{MetricSummary, figures_of};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The name of the schema.
pub const COMPARE_SCHEMA: &str = "homing.compare/1";

/// Runs that a side needs before a difference is called.
pub const RUNS_WANTED: u64 = 3;

/// Reports that are compared at once, at most: more cannot be told apart on a page.
pub const REPORTS_MAX: usize = 8;

/// A report and where it came from.
#[derive(Clone, Debug, PartialEq)]
pub struct Source {
    /// Its folder or file, as the user named it.
    pub name: String,
    /// The report.
    pub report: Report,
}

/// The comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Always [`COMPARE_SCHEMA`].
    pub schema: String,
    /// What is compared, in the order given.
    pub reports: Vec<Compared>,
    /// In what the reports differ besides policy: a difference in a figure may come from these.
    pub unlike: Vec<Unlike>,
    /// What a reader has to know before believing a verdict.
    pub notes: Vec<String>,
    /// Each figure that at least one report has: the headline ones first, then by path.
    pub metrics: Vec<MetricComparison>,
}

/// One of the reports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    /// `A`, `B`, ...: what the rest of the comparison calls it.
    pub label: String,
    /// Its folder or file.
    pub name: String,
    /// The trace or generator.
    pub trace: String,
    /// The cluster.
    pub cluster: String,
    /// The policy.
    pub policy: String,
    /// What recorded gaps were divided by.
    pub time_scale: f64,
    /// The seeds of its runs.
    pub seeds: Vec<u64>,
}

/// Something that should be equal between reports and is not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unlike {
    /// What.
    pub what: String,
    /// Its value in each report.
    pub values: Vec<String>,
}

/// One figure in all reports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MetricComparison {
    /// Its path in a run.
    pub name: String,
    /// Its unit; empty for counts and shares.
    pub unit: String,
    /// Which way is better.
    pub better: Better,
    /// Its summary in each report; null where none of the runs has it.
    pub reports: Vec<Option<MetricSummary>>,
    /// What can be said over all reports.
    pub verdict: Verdict,
    /// The label of the report that beats every other, where one does.
    pub winner: Option<String>,
    /// Each two reports.
    pub pairs: Vec<Pair>,
}

/// One figure in two reports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pair {
    /// The label of the first.
    pub a: String,
    /// The label of the second.
    pub b: String,
    /// Mean of `b` less mean of `a`.
    pub difference: Option<f64>,
    /// The difference as a share of `a`'s mean; null where that is 0.
    pub relative: Option<f64>,
    /// The differences by seed, where both have the same seeds on the same workload.
    pub paired: Option<Paired>,
    /// What can be said.
    pub verdict: Verdict,
    /// The label of the better one, where the verdict is [`Verdict::Better`].
    pub winner: Option<String>,
}

/// The differences between runs of one seed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Paired {
    /// Seeds.
    pub n: u64,
    /// Mean difference, `b` less `a`.
    pub mean: f64,
    /// Its 95% bootstrap interval; null below two seeds.
    pub ci95: Option<[f64; 2]>,
    /// Whether the interval leaves 0 out. Stated; it does not decide the verdict.
    pub apart_from_zero: bool,
}

/// What can be said of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The intervals lie apart and one side is better.
    Better,
    /// The intervals lie apart; of this figure neither direction is better. Over more than two reports: some lie apart,
    /// and none beats all others.
    Differs,
    /// The intervals overlap.
    NotDistinguishable,
    /// Every run of both has the same value.
    Equal,
    /// A side has two runs: three or more are needed.
    TooFewRuns,
    /// A side has one run: it proves nothing.
    OneRun,
    /// A side does not have the figure.
    Missing,
}

/// One figure of one report: by run, in order of seeds as reported.
struct Side {
    label: String,
    by_run: Vec<(u64, f64)>,
    summary: Option<MetricSummary>,
}

impl Comparison {
    /// The comparison of these reports.
    ///
    /// # Panics
    /// If there are more than [`REPORTS_MAX`].
    #[must_use]
    pub fn of(sources: &[Source]) -> Self {
        assert!(
            sources.len() <= REPORTS_MAX,
            "at most {REPORTS_MAX} reports are compared"
        );
        let reports: Vec<Compared> = sources
            .iter()
            .enumerate()
            .map(|(index, source)| Compared::of(index, source))
            .collect();
        let unlike = notes::unlike(sources);
        let same_workload = !unlike
            .iter()
            .any(|unlike| notes::CHANGES_WORKLOAD.contains(&unlike.what.as_str()));
        let figures: Vec<Vec<BTreeMap<String, f64>>> = sources
            .iter()
            .map(|source| source.report.runs.iter().map(figures_of).collect())
            .collect();
        let metrics = names(&figures)
            .into_iter()
            .map(|name| {
                let sides = sources.iter().zip(&reports).zip(&figures);
                let sides =
                    sides.map(|((source, of), figures)| Side::of(&of.label, &name, &source.report.runs, figures));
                MetricComparison::of(&name, &sides.collect::<Vec<_>>(), same_workload)
            })
            .collect();
        let mut comparison = Self {
            schema: COMPARE_SCHEMA.to_owned(),
            reports,
            unlike,
            notes: Vec::new(),
            metrics,
        };
        comparison.notes = notes::notes(sources, &comparison);
        comparison
    }

    /// The document as one line of JSON, without a line end.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("a comparison has string keys and finite numbers")
    }

    /// The comparison as a table for people, ending with a line end.
    #[must_use]
    pub fn to_text(&self) -> String {
        text::text(self)
    }

    /// The figure of this path.
    #[must_use]
    pub fn metric(&self, name: &str) -> Option<&MetricComparison> {
        self.metrics.iter().find(|metric| metric.name == name)
    }
}

/// The paths that any run has: the headline ones first.
fn names(figures: &[Vec<BTreeMap<String, f64>>]) -> Vec<String> {
    let all: BTreeSet<&String> = figures.iter().flatten().flat_map(BTreeMap::keys).collect();
    let headline = metric::HEADLINE
        .into_iter()
        .filter(|name| all.iter().any(|known| known.as_str() == *name));
    let rest = all.iter().filter(|name| !metric::HEADLINE.contains(&name.as_str()));
    headline
        .map(str::to_owned)
        .chain(rest.map(|name| (*name).clone()))
        .collect()
}

impl Compared {
    fn of(index: usize, source: &Source) -> Self {
        let report = &source.report;
        Self {
            label: label(index),
            name: source.name.clone(),
            trace: report.trace.clone(),
            cluster: report.cluster.clone(),
            policy: report.policy.clone(),
            time_scale: report.time_scale,
            seeds: report.runs.iter().map(|run| run.seed).collect(),
        }
    }
}

/// `A` for the first.
fn label(index: usize) -> String {
    let letter = u8::try_from(index).map_or(b'Z', |index| b'A' + index.min(25));
    char::from(letter).to_string()
}

impl Side {
    fn of(label: &str, name: &str, runs: &[Run], figures: &[BTreeMap<String, f64>]) -> Self {
        let values = runs.iter().zip(figures);
        let by_run: Vec<(u64, f64)> = values
            .filter_map(|(run, figures)| figures.get(name).map(|&value| (run.seed, value)))
            .collect();
        let values: Vec<f64> = by_run.iter().map(|&(_, value)| value).collect();
        Self {
            label: label.to_owned(),
            summary: MetricSummary::of(name, &values),
            by_run,
        }
    }

    /// Its values by seed; `None` where a seed was run twice.
    fn by_seed(&self) -> Option<BTreeMap<u64, f64>> {
        let by_seed: BTreeMap<u64, f64> = self.by_run.iter().copied().collect();
        (by_seed.len() == self.by_run.len()).then_some(by_seed)
    }
}

impl MetricComparison {
    fn of(name: &str, sides: &[Side], same_workload: bool) -> Self {
        let better = metric::better(name);
        let mut pairs = Vec::new();
        for (index, a) in sides.iter().enumerate() {
            for b in &sides[index + 1..] {
                pairs.push(Pair::of(name, better, a, b, same_workload));
            }
        }
        let winner = sides
            .iter()
            .map(|side| &side.label)
            .find(|label| beats_all(label, &pairs))
            .cloned();
        Self {
            name: name.to_owned(),
            unit: metric::unit(name).to_owned(),
            better,
            reports: sides.iter().map(|side| side.summary).collect(),
            verdict: overall(&pairs, winner.is_some()),
            winner,
            pairs,
        }
    }
}

fn beats_all(label: &str, pairs: &[Pair]) -> bool {
    let mut own = pairs
        .iter()
        .filter(|pair| pair.a == label || pair.b == label)
        .peekable();
    own.peek().is_some() && own.all(|pair| pair.winner.as_deref() == Some(label))
}

/// What can be said over all pairs: the weakest ground wins, so that no verdict hides a side with one run.
fn overall(pairs: &[Pair], has_winner: bool) -> Verdict {
    let verdicts: BTreeSet<Verdict> = pairs.iter().map(|pair| pair.verdict).collect();
    let any = |verdict| verdicts.contains(&verdict);
    match pairs {
        [] => Verdict::Missing,
        [pair] => pair.verdict,
        _ if has_winner => Verdict::Better,
        _ if any(Verdict::Better) || any(Verdict::Differs) => Verdict::Differs,
        _ if any(Verdict::OneRun) => Verdict::OneRun,
        _ if any(Verdict::TooFewRuns) => Verdict::TooFewRuns,
        _ if any(Verdict::NotDistinguishable) => Verdict::NotDistinguishable,
        _ if any(Verdict::Equal) => Verdict::Equal,
        _ => Verdict::Missing,
    }
}

impl Pair {
    fn of(name: &str, better: Better, a: &Side, b: &Side, same_workload: bool) -> Self {
        let difference = a.summary.zip(b.summary).map(|(a, b)| rounded(b.mean - a.mean));
        let base = a.summary.map(|a| a.mean.abs()).filter(|&mean| mean > 0.0);
        let verdict = verdict(better, a.summary.as_ref(), b.summary.as_ref());
        let winner = match (verdict, better, difference) {
            (Verdict::Better, Better::Lower, Some(difference)) => Some(if difference < 0.0 { b } else { a }),
            (Verdict::Better, Better::Higher, Some(difference)) => Some(if difference > 0.0 { b } else { a }),
            _ => None,
        };
        Self {
            a: a.label.clone(),
            b: b.label.clone(),
            difference,
            relative: difference
                .zip(base)
                .map(|(difference, base)| rounded(difference / base)),
            paired: same_workload.then(|| Paired::of(name, a, b)).flatten(),
            verdict,
            winner: winner.map(|side| side.label.clone()),
        }
    }
}

fn verdict(better: Better, a: Option<&MetricSummary>, b: Option<&MetricSummary>) -> Verdict {
    let (Some(a), Some(b)) = (a, b) else {
        return Verdict::Missing;
    };
    let (Some(of_a), Some(of_b)) = (a.ci95, b.ci95) else {
        return Verdict::OneRun;
    };
    if a.n.min(b.n) < RUNS_WANTED {
        return Verdict::TooFewRuns;
    }
    let points = of_a[0] == of_a[1] && of_b[0] == of_b[1];
    if points && of_a[0] == of_b[0] {
        return Verdict::Equal;
    }
    // Intervals that touch overlap.
    let apart = of_a[1] < of_b[0] || of_b[1] < of_a[0];
    match (apart, better) {
        (false, _) => Verdict::NotDistinguishable,
        (true, Better::Neither) => Verdict::Differs,
        (true, Better::Lower | Better::Higher) => Verdict::Better,
    }
}

impl Paired {
    /// `None` where the sides did not run the same seeds.
    fn of(name: &str, a: &Side, b: &Side) -> Option<Self> {
        let (of_a, of_b) = (a.by_seed()?, b.by_seed()?);
        if !of_a.keys().eq(of_b.keys()) {
            return None;
        }
        let differences: Vec<f64> = of_a.values().zip(of_b.values()).map(|(a, b)| b - a).collect();
        let ci95 = bootstrap_95(&differences, &format!("paired/{name}"));
        Some(Self {
            n: differences.len() as u64,
            mean: rounded(mean(&differences)?),
            ci95: ci95.map(|bounds| bounds.map(rounded)),
            apart_from_zero: ci95.is_some_and(|[low, high]| low > 0.0 || high < 0.0),
        })
    }
}

#[cfg(test)]
mod tests;
