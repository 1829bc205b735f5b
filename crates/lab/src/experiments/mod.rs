//! The experiments, one family a file: which setups they need, and the section that they make of what was observed.

mod collapse;
mod dp;
mod elastic;
mod kvc;
mod time_scale;

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
pub const ALL: [Experiment; 5] = [
    dp::EXPERIMENT,
    kvc::EXPERIMENT,
    time_scale::EXPERIMENT,
    collapse::EXPERIMENT,
    elastic::EXPERIMENT,
];

/// A figure of each run of a setup.
fn sample(results: &Results, setup: &Setup, figure: impl Fn(&Observed) -> Option<f64>) -> Sample {
    Sample::of(results.of(setup).iter().map(figure))
}
