//! The arguments of `homing doctor` and `homing drill`.

use clap::Args;
use std::path::PathBuf;

/// `homing doctor`
#[derive(Args, Debug)]
pub struct Doctor {
    /// What to look at: a folder that `--out` wrote, a folder of SGLang or vLLM logs, or a live router such as
    /// `http://127.0.0.1:8080`.
    #[arg(value_name = "DIR|URL")]
    pub place: String,
    /// How long a live router is watched. What lasts for less than half a minute is not told from what is on its way.
    #[arg(long, default_value_t = 30, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(..=3_600))]
    pub watch: u32,
    /// Print exactly one JSON document on stdout.
    #[arg(long)]
    pub json: bool,
}

/// `homing drill`
#[derive(Args, Debug)]
pub struct Drill {
    /// `list`, `all`, or the name of a failure mode.
    #[arg(value_name = "list|all|MODE")]
    pub what: String,
    /// The seed of its runs.
    #[arg(long, default_value_t = homing_drills::drill::SEED, value_name = "SEED")]
    pub seed: u64,
    /// Keep what each run leaves behind in this folder, for `homing doctor`.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Print exactly one JSON document on stdout.
    #[arg(long)]
    pub json: bool,
}
