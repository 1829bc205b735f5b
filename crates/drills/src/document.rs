//! `docs/failure-modes.md`: the catalogue of modes, each with its drill. Written from the data, so that it cannot say anything
//! else; a test compares the file.

use crate::scenario::{Scenario, scenario};
use homing_doctor::{ModeId, text};
use std::fmt::Write as _;

const INTRO: &str = "\
# Failure modes

Generated from `crates/doctor/modes` and `crates/drills/scenarios` by `cargo run -p homing-drills --example failure_modes`; a test
compares.

Each mode has five fields: symptom, root cause, trigger, mitigation (what was done about it), fix (what makes it go away).
`homing doctor DIR` finds them in the folder of a run, in folders of SGLang or vLLM logs, and in a live router;
`homing drill MODE` shows one with its fix off, and its absence with the fix on. A mode that is part of another is told beside it.

";

/// The document.
#[must_use]
pub fn failure_modes() -> String {
    let drill = |mode: ModeId| scenario(mode).map_or_else(String::new, drill_section);
    format!("{INTRO}{}", text::catalogue_markdown(drill))
}

fn drill_section(scenario: &Scenario) -> String {
    let mut text = format!("\nThe drill: {}\n\n", scenario.story.trim());
    let load = &scenario.load;
    let _ = writeln!(text, "| setting | cluster | policy |\n| --- | --- | --- |");
    for setting in &scenario.setting {
        let about = setting
            .about
            .as_deref()
            .map_or_else(String::new, |about| format!(": {about}"));
        let _ = writeln!(
            text,
            "| {}{about} | `{}` | `{}` |",
            setting.name, setting.cluster, setting.policy
        );
    }
    let holds: Vec<String> = scenario
        .holds
        .iter()
        .map(|statement| format!("`{statement}`"))
        .collect();
    let trace = load.trace.as_deref().unwrap_or_default();
    let _ = writeln!(text, "\nOn `{trace}`, what must hold: {}.", holds.join(", "));
    text
}
