//! Each scalar figure over all runs: mean, spread and a bootstrap interval.
//!
//! Figures are found by walking a run's own JSON, so that a figure added to the schema is summarised without a second
//! list of names. Figures of single workers and single kinds of error are not summarised: not every run has them.

use crate::run::Run;
use crate::stats::{bootstrap_95, mean, rounded, stdev};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// One figure over all runs that have it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MetricSummary {
    /// The mean.
    pub mean: f64,
    /// The standard deviation of the sample; null below two runs.
    pub stdev: Option<f64>,
    /// The 95% bootstrap interval of the mean; null below two runs.
    pub ci95: Option<[f64; 2]>,
    /// Runs that have the figure.
    pub n: u64,
}

impl MetricSummary {
    /// The summary of one figure. `name` is part of what decides the interval's resamples; `None` of nothing.
    #[must_use]
    pub fn of(name: &str, values: &[f64]) -> Option<Self> {
        Some(Self {
            mean: rounded(mean(values)?),
            stdev: stdev(values).map(rounded),
            ci95: bootstrap_95(values, name).map(|bounds| bounds.map(rounded)),
            n: values.len() as u64,
        })
    }
}

/// The summary of all figures, by their path in a run, such as `ttft_s.p90`.
pub(crate) fn summarise(runs: &[Run]) -> BTreeMap<String, MetricSummary> {
    let mut figures: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for run in runs {
        let run = serde_json::to_value(run).expect("a run has string keys and finite numbers");
        collect("", &run, &mut figures);
    }
    figures
        .into_iter()
        .filter_map(|(name, values)| MetricSummary::of(&name, &values).map(|summary| (name, summary)))
        .collect()
}

/// Each figure of one run, by its path in it.
pub(crate) fn figures_of(run: &Run) -> BTreeMap<String, f64> {
    let mut figures = BTreeMap::new();
    let run = serde_json::to_value(run).expect("a run has string keys and finite numbers");
    collect("", &run, &mut figures);
    figures.into_iter().map(|(name, values)| (name, values[0])).collect()
}

/// Adds the numbers below `value` under their dotted paths.
fn collect(path: &str, value: &Value, figures: &mut BTreeMap<String, Vec<f64>>) {
    const SKIPPED: [&str; 3] = ["seed", "errors.by_kind", "errors.by_worker"];
    match value {
        Value::Number(number) => {
            let number = number.as_f64().expect("every JSON number is one of 64 bits here");
            figures.entry(path.to_owned()).or_default().push(number);
        }
        Value::Object(fields) => {
            for (name, value) in fields {
                let path = if path.is_empty() {
                    name.clone()
                } else {
                    format!("{path}.{name}")
                };
                if !SKIPPED.contains(&path.as_str()) {
                    collect(&path, value, figures);
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::String(_) | Value::Array(_) => {}
    }
}
