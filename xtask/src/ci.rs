//! Everything that must hold before a change lands, cheapest first.

use crate::shell::{self, run as sh, run_with};
use crate::{chaos, determinism, tidy};
use anyhow::Result;

/// The version that is installed where cargo-deny is missing; pinned, so that CI changes only with a commit.
const CARGO_DENY: &str = "0.20.2";

/// What proptest draws its cases from. One commit has one verdict here: whoever wants other cases sets it, or runs
/// `cargo test`, which draws afresh each time.
const SEED: &str = "PROPTEST_RNG_SEED";

/// Runs all checks; stops at the first that fails.
pub fn run() -> Result<()> {
    sh("cargo", &["fmt", "--all", "--check"])?;
    tidy::run()?;
    sh(
        "cargo",
        &[
            "clippy",
            "--workspace",
            "--all-targets",
            "--locked",
            "--",
            "-D",
            "warnings",
        ],
    )?;
    run_with(
        "cargo",
        &["doc", "--workspace", "--no-deps", "--locked"],
        &[("RUSTDOCFLAGS", "-D warnings")],
    )?;
    determinism::run()?;
    chaos::run_seeds(1, chaos::SEEDS_IN_CI)?;
    fetch_model();
    run_with("cargo", &["test", "--workspace", "--locked"], &[(SEED, &seed())])?;
    deny()?;
    println!("\nci: all green");
    Ok(())
}

fn seed() -> String {
    std::env::var(SEED).unwrap_or_else(|_| "20261130".to_owned())
}

/// Fetches SmolLM2 for the tests that compute with it, by starting a worker whose standard input has ended already. Where
/// it cannot be had those tests say so and are left out; the others hold without it.
fn fetch_model() {
    let arguments = [
        "worker",
        "--model",
        "smollm2",
        "--listen",
        "127.0.0.1:0",
        "--exit-with-stdin",
    ];
    let fetched = shell::release_binary().and_then(|homing| sh(&homing, &arguments));
    if let Err(error) = fetched {
        println!("\nWARNING: SmolLM2 cannot be had, its tests are left out: {error:#}\n");
    }
}

/// Bans, licences and sources of the dependencies; advisories only where their database can be reached.
fn deny() -> Result<()> {
    let tools = shell::root().join("target").join("tools");
    let installed = tools.join("bin").join("cargo-deny").display().to_string();
    let program = ["cargo-deny", installed.as_str()]
        .into_iter()
        .find(|program| shell::succeeds(program, &["--version"]));
    let program = match program {
        Some(program) => program.to_owned(),
        None => {
            let tools = tools.display().to_string();
            sh(
                "cargo",
                &[
                    "install",
                    "cargo-deny",
                    "--version",
                    CARGO_DENY,
                    "--locked",
                    "--root",
                    &tools,
                ],
            )?;
            installed
        }
    };
    sh(&program, &["--locked", "check", "bans", "licenses", "sources"])?;
    if !shell::succeeds(&program, &["fetch", "db"]) {
        println!("note: the advisory database cannot be reached, advisories are not checked");
        return Ok(());
    }
    sh(&program, &["--locked", "check", "advisories"])
}
