//! `homing sim --events`: a recording through the core once more, its actions compared with those of then.
use anyhow::Result;
use std::path::Path;
pub fn run(_events: &Path, _json: bool) -> Result<()> {
    Ok(())
}
