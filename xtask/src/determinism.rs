//! The determinism meta-test: one seed twice, byte-identical results. It runs before the tests, because none of them
//! means anything where it does not hold.

use crate::shell;
use anyhow::{Result, ensure};

/// Simulations that are run twice each, in two processes: address layout and hash seeds differ between them.
const RUNS: [&[&str]; 3] = [
    &[
        "sim",
        "--trace",
        "gen:agent:sessions=12",
        "--cluster",
        "h200x8-2p6d",
        "--policy",
        "homing",
        "--seed",
        "7",
        "--json",
    ],
    &[
        "sim",
        "--trace",
        "gen:agent:sessions=12",
        "--cluster",
        "h200x8-dp",
        "--policy",
        "dp-cache-aware",
        "--seed",
        "7",
        "--json",
    ],
    &[
        "sim",
        "--trace",
        "gen:swe52",
        "--cluster",
        "h100x8-2p6d",
        "--policy",
        "round-robin",
        "--seed",
        "7",
        "--json",
    ],
];

/// Runs each simulation twice and compares the bytes.
pub fn run() -> Result<()> {
    let homing = shell::release_binary()?;
    for arguments in RUNS {
        println!("==> twice: homing {}", arguments.join(" "));
        let (first, second) = (shell::output(&homing, arguments)?, shell::output(&homing, arguments)?);
        ensure!(!first.is_empty(), "`homing {}` printed nothing", arguments.join(" "));
        ensure!(
            first == second,
            "two runs differ; replay with `homing {}`",
            arguments.join(" ")
        );
    }
    Ok(())
}
