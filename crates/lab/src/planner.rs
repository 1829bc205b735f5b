//! `docs/results.md`: the planner against every other policy and every peer's rule, where it wins and, said first, where it
//! loses.
//!
//! A family is a workload on hardware at rising loads. The loads that count are found by the other policies alone: the light one,
//! the knee (the lightest load at which the best of them has three times its light TTFT p90), and the first beyond 1.3 times
//! the knee. Each of them is a cell for each shape and with and without host memory; in a cell all policies run the same
//! sessions. Nothing here is tuned to an outcome: the families are those of the project's task, and the planner's parameters
//! are its defaults.
//!
//! Time is bounded, so seeds go where they decide something: one for every other policy, all of them for the planner and for
//! those few that came out best, one of which is what the planner is compared with.

mod acceptance;
mod cells;
mod document;
mod figures;
mod ideal;
mod kept;
mod outcome;
mod pareto;

pub use cells::{Cell, Family, Level, Loads, families, keys, ladder};
pub use document::document;
pub use ideal::{IDEALS, Ideal};
pub use kept::Kept;
pub use outcome::{Outcome, Outcomes};
pub use pareto::plot;

use crate::results::RunError;
use crate::setup::Setup;

/// Policies that stand for the planner with a term or a means left out.
pub const ABLATIONS: [&str; 7] = [
    "homing:without=own",
    "homing:without=others",
    "homing:without=behind",
    "homing:without=evict",
    "homing:without=future",
    "homing:moves=off",
    "homing:pace_s=0",
];

/// Who finds the knees: strong policies of three kinds.
const SCOUTS: [&str; 3] = ["dp-cache-aware", "peer-sglang", "linear"];

/// So many of the other policies of a cell, the best after one seed, run all of them.
const CONTENDERS: usize = 3;

/// How much of it is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Everything.
    Full,
    /// Every family at its knee, without the prefill/decode shape with host memory, and beyond it, data-parallel only; over two seeds.
    Brief,
    /// One small family and one seed: to see that it works.
    Quick,
}

/// What to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How much.
    pub extent: Extent,
    /// Only these families, by their keys; all where there is none.
    pub families: Vec<String>,
    /// Seeds of the planner and of those who come near it.
    pub seeds: u64,
    /// Seeds of the planner with something left out.
    pub ablation_seeds: u64,
    /// Policies beside those that are left out of the planner: experiments.
    pub variants: Vec<String>,
}

/// What was run, and what came of it.
#[derive(Debug)]
pub struct Comparison {
    /// What was asked for.
    pub options: Options,
    /// The cells, family by family.
    pub cells: Vec<Cell>,
    /// Their outcomes and those of the acceptance rows.
    pub outcomes: Outcomes,
    /// What the clusters of [`IDEALS`], in their order, make of the loaded cells, with the planner's seeds.
    pub ideals: Vec<Outcomes>,
}

/// All policies but the planner.
pub fn others() -> impl Iterator<Item = &'static str> {
    homing_router::policies::names().filter(|name| *name != "homing")
}

impl Options {
    /// Everything of an extent.
    #[must_use]
    pub const fn new(extent: Extent) -> Self {
        let (seeds, ablation_seeds) = match extent {
            Extent::Full => (5, 1),
            Extent::Brief => (2, 1),
            Extent::Quick => (1, 1),
        };
        Self {
            extent,
            families: Vec::new(),
            seeds,
            ablation_seeds,
            variants: Vec::new(),
        }
    }

    fn chosen(&self) -> Vec<Family> {
        if self.families.is_empty() {
            return families(self.extent);
        }
        let mut chosen = cells::known();
        chosen.retain(|family| self.families.iter().any(|key| key == family.key));
        chosen
    }

    /// The planner with something left out or otherwise.
    pub fn ablations(&self) -> impl Iterator<Item = &str> {
        ABLATIONS.into_iter().chain(self.variants.iter().map(String::as_str))
    }
}

/// Runs everything that is not kept already.
///
/// # Errors
/// The first setup, in order, that cannot be run.
pub fn run(
    options: Options,
    kept: &Kept,
    threads: usize,
    progress: impl Fn(usize, usize) + Sync,
) -> Result<Comparison, RunError> {
    let simulate = |setups: Vec<Setup>| kept.run(setups, threads, &progress);
    let families = options.chosen();
    let scouted = simulate(families.iter().flat_map(|family| ladder(family, &SCOUTS)).collect())?;
    let cells: Vec<Cell> = families
        .iter()
        .flat_map(|family| cells::of_family(family, &SCOUTS, &scouted))
        .filter(|cell| options.extent != Extent::Brief || cell.is_brief())
        .collect();
    let all = |cell: &Cell| others().map(|policy| cell.setup(policy, 1)).collect::<Vec<_>>();
    let first = simulate(cells.iter().flat_map(all).collect())?;
    let mut setups: Vec<Setup> = acceptance::setups(&options);
    for cell in &cells {
        let contenders = figures::ranked(&first, cell).into_iter().take(CONTENDERS);
        setups.extend(
            contenders
                .chain(["homing"])
                .map(|policy| cell.setup(policy, options.seeds)),
        );
        if cell.is_heavy() {
            setups.extend(
                options
                    .ablations()
                    .map(|policy| cell.setup(policy, options.ablation_seeds)),
            );
        }
    }
    let outcomes = first.and(simulate(setups)?);
    let ideals = ideals(&cells, options.seeds, threads)?;
    Ok(Comparison {
        options,
        cells,
        outcomes,
        ideals,
    })
}

/// The loaded cells on clusters that cannot be built.
fn ideals(cells: &[Cell], seeds: u64, threads: usize) -> Result<Vec<Outcomes>, RunError> {
    let heavy = || {
        cells
            .iter()
            .filter(|cell| cell.is_heavy())
            .map(|cell| cell.setup("homing", seeds))
    };
    let run = |(ideal, _): (Ideal, _)| {
        Outcomes::run_with(heavy(), threads, |_, _| {}, |setup, seed| ideal.simulate(setup, seed))
    };
    IDEALS.into_iter().map(run).collect()
}
