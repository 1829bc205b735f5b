//! Checks on recorded traces, which are others' data and lie outside the project: run where they are found.

use crate::shell;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::Path;

/// Runs the checks on the traces in `folder`.
pub fn run(folder: &Path) -> Result<()> {
    let homing = shell::release_binary()?;
    let folder = folder
        .canonicalize()
        .with_context(|| format!("no folder `{}`", folder.display()))?;
    coding_agents(&homing, &folder.join("claude-code-180.jsonl.zst"))?;
    for name in ["mooncake-conversation.jsonl.zst", "mooncake-synthetic.jsonl.zst"] {
        mooncake(&homing, &folder.join(name))?;
    }
    println!("traces: all green");
    Ok(())
}

/// The 153 sessions whose first prompt is within 200,000 tokens run without an error, twice the same.
fn coding_agents(homing: &str, trace: &Path) -> Result<()> {
    let trace = trace.display().to_string();
    let arguments = [
        "sim",
        "--trace",
        &trace,
        "--cluster",
        "h200x8-2p6d",
        "--policy",
        "homing",
        "--max-context",
        "200000",
        "--json",
    ];
    let first = shell::output(homing, &arguments)?;
    ensure!(
        first == shell::output(homing, &arguments)?,
        "two runs of `homing {}` differ",
        arguments.join(" ")
    );
    let report: Value = serde_json::from_slice(&first)?;
    let run = &report["runs"][0];
    ensure!(run["errors"]["total"] == 0, "errors: {}", run["errors"]);
    ensure!(
        run["sessions"]["count"] == 153,
        "expected 153 sessions, found {}",
        run["sessions"]["count"]
    );
    ensure!(
        report["left_out"]["sessions"] == 27,
        "expected 27 sessions left out, found {}",
        report["left_out"]
    );
    println!(
        "    requests {}, hit ratio {}, paths {}",
        run["requests"], run["hit_ratio"], run["paths"]
    );
    Ok(())
}

/// A trace of independent requests with shared prefixes runs without an error.
fn mooncake(homing: &str, trace: &Path) -> Result<()> {
    let trace = trace.display().to_string();
    let arguments = [
        "sim",
        "--trace",
        &trace,
        "--cluster",
        "h200x8-dp",
        "--policy",
        "homing",
        "--json",
    ];
    let report: Value = serde_json::from_slice(&shell::output(homing, &arguments)?)?;
    let run = &report["runs"][0];
    ensure!(run["errors"]["total"] == 0, "errors: {}", run["errors"]);
    println!(
        "    requests {}, hit ratio {}, paths {}",
        run["requests"], run["hit_ratio"], run["paths"]
    );
    Ok(())
}
