//! The experiments, one family a file: which setups they need, and the section that they make of what was observed.

mod backpressure;
mod collapse;
mod company;
mod dp;
mod elastic;
mod eviction;
mod kvc;
mod mechanisms;
mod pinning;
mod stack;
mod time_scale;
mod workers;

use crate::observe::Observed;
use crate::paper::Paper;
use crate::results::Results;
use crate::sample::Sample;
use crate::section::Section;
use crate::setup::Setup;

/// A family of experiments.
#[derive(Clone, Copy, Debug)]
pub struct Experiment {
    /// Its name for `--only`.
    pub name: &'static str,
    /// What it has run.
    pub setups: fn() -> Vec<Setup>,
    /// What it makes of the runs.
    pub section: fn(&Paper, &Results) -> Section,
}

/// All experiments, in the order of the document.
pub const ALL: [Experiment; 10] = [
    dp::EXPERIMENT,
    kvc::EXPERIMENT,
    pinning::EXPERIMENT,
    workers::EXPERIMENT,
    mechanisms::EXPERIMENT,
    backpressure::EXPERIMENT,
    time_scale::EXPERIMENT,
    eviction::EXPERIMENT,
    collapse::EXPERIMENT,
    elastic::EXPERIMENT,
];

/// A figure of one run.
pub(crate) type Get = fn(&Observed) -> Option<f64>;

/// A figure of each run of a setup.
fn sample(results: &Results, setup: &Setup, figure: impl Fn(&Observed) -> Option<f64>) -> Sample {
    Sample::of(results.of(setup).iter().map(figure))
}

/// How many runs of a setup nothing failed in, as a reason for few errors; `None` where something failed in all.
fn spared(results: &Results, setup: &Setup) -> Option<String> {
    let runs = results.of(setup);
    let spared = runs.iter().filter(|run| run.errors() == 0.0).count();
    (spared > 0).then(|| {
        format!(
            "In {spared} of {} runs no seed took as long as the timeout, so no link was ever taken for dead and nothing failed.",
            runs.len()
        )
    })
}

/// A figure of each three runs of a setup, for figures of theirs that were made of three.
fn sample_of_threes(results: &Results, setup: &Setup, figure: impl Fn(&[Observed]) -> Option<f64>) -> Sample {
    Sample::of(results.of(setup).chunks_exact(3).map(figure))
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The largest value by the mean of all: 1 where they are equal. `None` where all are 0.
fn largest_by_mean(values: &[f64]) -> Option<f64> {
    let mean = mean(values).filter(|mean| *mean > 0.0)?;
    Some(values.iter().copied().fold(0.0, f64::max) / mean)
}

#[cfg(test)]
mod tests;
