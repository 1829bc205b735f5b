//! Replaying a recording through a new router, and comparing what it does with what was done.

use super::{ActionDigest, Checkpoint, Entry, Recording, RecordingError};
use crate::action::Action;
use crate::event::Event;
use crate::router::Router;
use homing_units::Instant;

/// A replay that went as recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replay {
    /// How far it went, and the digest of its actions.
    pub reached: Checkpoint,
    /// The last checkpoint of the recording that was compared, if it has any.
    pub compared: Option<Checkpoint>,
    /// Whether the recording has its end; without, what came after the last checkpoint is not compared.
    pub complete: bool,
}

/// Why a replay is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// The recording cannot be read.
    #[error(transparent)]
    Recording(#[from] RecordingError),
    /// The router did not do what it did then.
    #[error(
        "the replay does other things than were recorded, between event {} and event {}: {} actions with digest \
         `{:016x}`, expected {} with `{:016x}`",
        .same.events, .recorded.events, .replayed.actions, .replayed.digest, .recorded.actions, .recorded.digest
    )]
    Differs {
        /// The last checkpoint where both agreed.
        same: Checkpoint,
        /// What was recorded.
        recorded: Checkpoint,
        /// What the replay did.
        replayed: Checkpoint,
    },
}

/// Feeds a recording to a new router of the recorded configuration. `see` is shown each event with the actions that it led
/// to, and the router after it.
///
/// # Errors
/// If the recording cannot be read, but for a last frame that is cut off, or if the actions are not those recorded.
pub fn replay(bytes: &[u8], mut see: impl FnMut(Instant, &Event, &[Action], &Router)) -> Result<Replay, ReplayError> {
    let recording = Recording::open(bytes)?;
    let mut router = Router::new(recording.config().clone());
    let mut digest = ActionDigest::default();
    let (mut events, mut compared, mut complete) = (0, None, false);
    for entry in recording {
        match entry {
            Ok(Entry::Event(at, event)) => {
                events += 1;
                router.handle(at, Event::clone(&event));
                let actions: Vec<_> = std::iter::from_fn(|| router.poll_action()).collect();
                actions.iter().for_each(|action| digest.add(action));
                see(at, &event, &actions, &router);
            }
            Ok(Entry::Checkpoint(recorded)) => compared = Some(compare(compared, recorded, digest.checkpoint(events))?),
            Ok(Entry::End(recorded)) => {
                compared = Some(compare(compared, recorded, digest.checkpoint(events))?);
                complete = true;
            }
            Err(RecordingError::CutOff { .. }) => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Replay {
        reached: digest.checkpoint(events),
        compared,
        complete,
    })
}

fn compare(same: Option<Checkpoint>, recorded: Checkpoint, replayed: Checkpoint) -> Result<Checkpoint, ReplayError> {
    if recorded == replayed {
        return Ok(recorded);
    }
    Err(ReplayError::Differs {
        same: same.unwrap_or_default(),
        recorded,
        replayed,
    })
}
