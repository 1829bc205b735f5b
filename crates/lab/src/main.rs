//! `homing-lab`: runs the experiments and prints the document. Progress goes to standard error.

use clap::Parser;
use homing_lab::experiments::{ALL, Experiment};
use homing_lab::planner::{self, Extent, Options};
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
    /// Of these results only the knees and what is beyond, over two seeds.
    #[arg(long, requires = "results", conflicts_with = "quick")]
    brief: bool,
    /// A file in which outcomes are kept, for a comparison that goes on later with the same build.
    #[arg(long, requires = "results", value_name = "FILE")]
    keep: Option<std::path::PathBuf>,
    /// Of these results only these families.
    #[arg(long, requires = "results", conflicts_with = "quick", value_parser = planner::keys().collect::<Vec<_>>())]
    family: Vec<String>,
    /// Seeds of the planner and of those that come near it.
    #[arg(long, requires = "results", value_parser = clap::value_parser!(u64).range(1..=100))]
    seeds: Option<u64>,
    /// Experiments: policies that are compared with the planner like those with a term left out.
    #[arg(long, requires = "results", value_name = "POLICY")]
    variant: Vec<homing_router::PolicySpec>,
    /// The folder with the recorded traces; without it they are left out.
    #[arg(long, requires = "results", value_name = "FOLDER")]
    traces: Option<std::path::PathBuf>,
    /// Where to write the plot; the document names this file without its folder.
    #[arg(long, requires = "results", value_name = "FILE", default_value = "results.svg")]
    plot: std::path::PathBuf,
    /// Simulations that run at once.
    #[arg(long, default_value_t = 2)]
    threads: usize,
}

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    if cli.results {
        return results(&cli);
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

/// The planner's document on standard output, and its plot.
fn results(cli: &Cli) -> anyhow::Result<()> {
    let plot = std::path::absolute(&cli.plot)?;
    let kept = cli
        .keep
        .as_deref()
        .map(planner::Kept::open)
        .transpose()?
        .unwrap_or_default();
    if let Some(folder) = &cli.traces {
        std::env::set_current_dir(folder)?;
    }
    let plain = Options::new(match (cli.quick, cli.brief) {
        (true, _) => Extent::Quick,
        (_, true) => Extent::Brief,
        _ => Extent::Full,
    });
    let options = Options {
        families: cli.family.clone(),
        seeds: cli.seeds.unwrap_or(plain.seeds),
        ablation_seeds: cli
            .seeds
            .map_or(plain.ablation_seeds, |seeds| seeds.min(plain.ablation_seeds)),
        variants: cli.variant.iter().map(ToString::to_string).collect(),
        ..plain
    };
    let comparison = planner::run(options, &kept, cli.threads, progress)?;
    std::fs::write(&plot, planner::plot(&comparison))?;
    let name = plot.file_name().unwrap_or_default().to_string_lossy().into_owned();
    print!("{}", planner::document(&comparison, &name));
    Ok(())
}

fn progress(ended: usize, all: usize) {
    if ended == all || ended.is_multiple_of(10) {
        eprintln!("{ended} of {all} simulations");
    }
}
