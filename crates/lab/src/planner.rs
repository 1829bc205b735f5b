//! `docs/results.md`: the planner against every other policy and every peer's rule, where it wins and, said first, where it
//! loses.
//!
//! A family is a workload on hardware at rising loads. The loads that count are found by the other policies alone: the light one,
//! the knee (the lightest load at which the best of them has three times its light TTFT p90), and the first beyond 1.3 times
//! the knee. Each of them is a cell for each shape and with and without host memory; in a cell all policies run the same
//! sessions over the same seeds. Nothing here is tuned to an outcome: the families are those of the project's task, and the
//! planner's parameters are its defaults.

mod cells;
mod document;
mod figures;

pub use cells::{Cell, Family, Level, families, ladder};
pub use document::document;

use crate::results::{Results, RunError};

/// Policies that stand for the planner with a term left out.
pub const ABLATIONS: [&str; 6] = [
    "homing:without=own",
    "homing:without=others",
    "homing:without=evict",
    "homing:without=future",
    "homing:moves=off",
    "homing:pace_s=0",
];

/// Who finds the knees: strong policies of three kinds.
const SCOUTS: [&str; 3] = ["dp-cache-aware", "peer-sglang", "linear"];

/// How much of it is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Everything, over five seeds.
    Full,
    /// One small family and one seed: to see that it works.
    Quick,
}

impl Extent {
    const fn seeds(self) -> u64 {
        match self {
            Self::Full => 5,
            Self::Quick => 1,
        }
    }
}

/// All policies but the planner.
pub fn others() -> impl Iterator<Item = &'static str> {
    homing_router::policies::names().filter(|name| *name != "homing")
}

/// Runs everything and gives the document.
///
/// # Errors
/// The first setup, in order, that cannot be run.
pub fn run(extent: Extent, threads: usize, progress: impl Fn(usize, usize) + Sync) -> Result<String, RunError> {
    let families = families(extent);
    let scouting = families.iter().flat_map(|family| ladder(family, &SCOUTS));
    let scouted = Results::run(scouting, threads, &progress)?;
    let cells: Vec<Cell> = families
        .iter()
        .flat_map(|family| cells::of_family(family, &SCOUTS, &scouted))
        .collect();
    let seeds = extent.seeds();
    let setups = cells.iter().flat_map(|cell| {
        let ablations = ABLATIONS.into_iter().filter(move |_| cell.level != Level::Light);
        others()
            .chain(["homing"])
            .chain(ablations)
            .map(move |policy| cell.setup(policy, seeds))
    });
    let results = Results::run(setups, threads, &progress)?;
    Ok(document(&cells, &results, seeds))
}
