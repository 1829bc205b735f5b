//! Running other programs from the project's root, with what is run printed first.

use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// The project's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the project")
        .to_path_buf()
}

/// Runs `program` with `arguments` in the project's root; an error if it fails.
pub fn run(program: &str, arguments: &[&str]) -> Result<()> {
    run_with(program, arguments, &[])
}

/// [`run`] with environment variables.
pub fn run_with(program: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Result<()> {
    println!("\n==> {program} {}", arguments.join(" "));
    let started = Instant::now();
    let status = Command::new(program)
        .args(arguments)
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .current_dir(root())
        .status()
        .with_context(|| format!("`{program}` could not be started"))?;
    ensure!(status.success(), "`{program} {}` failed: {status}", arguments.join(" "));
    println!("    done in {} s", started.elapsed().as_secs());
    Ok(())
}

/// What `program` prints on its standard output; an error if it fails.
pub fn output(program: &str, arguments: &[&str]) -> Result<Vec<u8>> {
    let output = Command::new(program)
        .args(arguments)
        .current_dir(root())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("`{program}` could not be started"))?;
    ensure!(
        output.status.success(),
        "`{program} {}` failed: {}",
        arguments.join(" "),
        output.status
    );
    Ok(output.stdout)
}

/// Whether `program` starts and ends well; it prints nothing.
pub fn succeeds(program: &str, arguments: &[&str]) -> bool {
    Command::new(program)
        .args(arguments)
        .current_dir(root())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// The release build of `homing`, built if it must be.
pub fn release_binary() -> Result<String> {
    run("cargo", &["build", "--release", "--package", "homing"])?;
    Ok(release_path("homing"))
}

/// Where the release build of a binary lies.
pub fn release_path(binary: &str) -> String {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    target.join("release").join(binary).display().to_string()
}
