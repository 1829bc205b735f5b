//! `homing sim --events`: a recording through the core once more, its actions compared with those of then.

use crate::failure::Usage;
use crate::output::print;
use anyhow::Result;
use homing_router::recording::ReplayError;
use homing_sim::{EventsError, EventsOutcome, replay_events};
use serde_json::json;
use std::path::Path;

/// Replays a recording; it fails where the core does not do what it did then.
pub fn run(path: &Path, json: bool) -> Result<()> {
    let wrong = |error: &dyn std::fmt::Display| Usage::error(format_args!("recording `{}`: {error}", path.display()));
    // A device would be read without end.
    if path.exists() && !path.is_file() {
        return Err(wrong(&"is no file, expected what `--record` wrote"));
    }
    let bytes = std::fs::read(path).map_err(|error| wrong(&error))?;
    let outcome = replay_events(&bytes).map_err(|EventsError(error)| match error {
        ReplayError::Recording(_) => wrong(&error),
        ReplayError::Differs { .. } => anyhow::Error::new(error),
    })?;
    print(&text(&outcome, json))
}

fn text(outcome: &EventsOutcome, json: bool) -> String {
    let EventsOutcome {
        events,
        actions,
        digest,
        duration,
        complete,
    } = *outcome;
    let digest = format!("{digest:016x}");
    if json {
        let document = json!({
            "schema": "homing.events/1",
            "events": events,
            "actions": actions,
            "actions_digest": digest,
            "duration_s": duration.as_secs_f64(),
            "complete": complete,
            "same_actions": true,
        });
        return format!("{document}\n");
    }
    let mut text = format!(
        "{events} events over {:.1} s led to the same {actions} actions as then (digest {digest})\n",
        duration.as_secs_f64()
    );
    if !complete {
        text += "note: the recording is cut off; what came after its last checkpoint could not be compared\n";
    }
    text
}
