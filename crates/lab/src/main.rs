//! `homing-lab`: runs the experiments and prints the document. Progress goes to standard error.

use clap::Parser;
use homing_lab::experiments::{ALL, Experiment};
use homing_lab::planner::{self, Extent};
use homing_lab::render::{document, unshown};
use homing_lab::{Paper, Results};

#[derive(Parser)]
#[command(
    name = "homing-lab",
    about = "The source papers' experiments, as a Markdown document"
)]
struct Cli {
    /// Only these experiments, for work in progress.
    #[arg(long, value_parser = ALL.map(|experiment| experiment.name))]
    only: Vec<String>,
    /// Instead: the planner against all other policies.
    #[arg(long, conflicts_with = "only")]
    results: bool,
    /// Of these results only what shows that they can be made.
    #[arg(long, requires = "results")]
    quick: bool,
    /// The folder with the recorded traces; without it they are left out.
    #[arg(long, requires = "results", value_name = "FOLDER")]
    traces: Option<std::path::PathBuf>,
    /// Simulations that run at once.
    #[arg(long, default_value_t = 2)]
    threads: usize,
}

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    if cli.results {
        if let Some(folder) = &cli.traces {
            std::env::set_current_dir(folder)?;
        }
        let extent = if cli.quick { Extent::Quick } else { Extent::Full };
        print!("{}", planner::run(extent, cli.threads, progress)?);
        return Ok(());
    }
    let wanted = |experiment: &&Experiment| cli.only.is_empty() || cli.only.iter().any(|name| name == experiment.name);
    let experiments: Vec<&Experiment> = ALL.iter().filter(wanted).collect();
    let setups = experiments.iter().flat_map(|experiment| (experiment.setups)());
    let results = Results::run(setups, cli.threads, progress)?;
    let paper = Paper::load();
    let sections: Vec<_> = experiments
        .iter()
        .map(|experiment| (experiment.section)(&paper, &results))
        .collect();
    print!("{}", document(&paper, &sections));
    let unshown = unshown(&paper, &sections);
    if cli.only.is_empty() && !unshown.is_empty() {
        eprintln!("note: {} figures of the papers have no row", unshown.len());
    }
    Ok(())
}

fn progress(ended: usize, all: usize) {
    if ended == all || ended.is_multiple_of(10) {
        eprintln!("{ended} of {all} simulations");
    }
}
