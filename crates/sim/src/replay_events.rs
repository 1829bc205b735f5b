//! A recording fed back through a fresh router: the same events must give the same actions.
//!
//! The recording carries digests of the actions that were taken when it was made, so that one file is enough to tell.

use homing_router::recording::{ReplayError, replay};
use homing_units::{Duration, Instant};
use serde::Serialize;
use thiserror::Error;

/// What a replay of a recording shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct EventsOutcome {
    /// Events that were replayed.
    pub events: u64,
    /// Actions that they led to.
    pub actions: u64,
    /// A digest of these actions.
    pub digest: u64,
    /// From the first event to the last.
    pub duration: Duration,
    /// The recording was closed; otherwise it was cut off and was replayed up to there.
    pub complete: bool,
}

/// Why a recording could not be replayed, or did not give the same actions.
#[derive(Debug, Error)]
#[error(transparent)]
pub struct EventsError(#[from] pub ReplayError);

/// Replays a recording and compares the actions.
///
/// # Errors
/// If it is no recording, is broken, or the actions differ from those when it was made.
pub fn replay_events(recording: &[u8]) -> Result<EventsOutcome, EventsError> {
    let mut times: Option<(Instant, Instant)> = None;
    let replayed = replay(recording, |at, _, _, _| {
        let first = times.map_or(at, |(first, _)| first);
        times = Some((first, at));
    })?;
    Ok(EventsOutcome {
        events: replayed.reached.events,
        actions: replayed.reached.actions,
        digest: replayed.reached.digest,
        duration: times.map_or(Duration::ZERO, |(first, last)| last - first),
        complete: replayed.complete,
    })
}
