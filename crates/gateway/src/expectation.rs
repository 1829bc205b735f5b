//! Why a worker found more or fewer cached tokens of a prompt than the router expected when it planned the turn.
//!
//! What events say is exact until it is old: events that are on their way, that were lost, and blocks that a worker dropped
//! since the plan are seen in the worker's own event stream. What none of these explains was no fact but a prediction: of a
//! leg that was sent there and whose blocks no event has told yet, or of a worker without events.

use homing_wire::transfer_offer::Life;

/// Losses that a worker's events have told so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Losses {
    /// Events that say that blocks were dropped.
    pub(crate) removals: u64,
    /// Gaps in the numbers of the events.
    pub(crate) gaps: u64,
}

/// What was expected of a worker's cache as a turn was planned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expectation {
    /// Prompt tokens in its cache.
    pub(crate) tokens: u32,
    /// Tokens of the prompt.
    pub(crate) prompt_tokens: u32,
    /// Whether the worker tells what it holds.
    pub(crate) has_events: bool,
    /// The worker, and the life that it was known to live.
    pub(crate) life: Life,
    pub(crate) losses: Losses,
}

impl Expectation {
    /// Why so many were found; `None` where they are as many as expected.
    pub(crate) fn difference(&self, found: u32, life: Life, losses: Losses) -> Option<&'static str> {
        if found == self.tokens {
            return None;
        }
        // An engine computes one token of a prompt at least, and with it that token's block.
        let is_whole = self.tokens == self.prompt_tokens;
        Some(if life != self.life {
            "epoch"
        } else if !self.has_events {
            "predicted"
        } else if losses.gaps > self.losses.gaps {
            "events_lost"
        } else if found > self.tokens {
            "events_behind"
        } else if losses.removals > self.losses.removals {
            "evicted"
        } else if is_whole {
            "last_token"
        } else {
            "predicted"
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_units::{BootEpoch, WorkerId};

    const LIFE: Life = Life {
        worker: WorkerId(0),
        epoch: BootEpoch(7),
    };

    #[test]
    fn each_difference_has_a_reason() {
        let check = |tokens: u32, found: u32, removals: u64, gaps: u64, has_events: bool, expected: Option<&str>| {
            let before = Losses { removals: 3, gaps: 1 };
            let now = Losses {
                removals: 3 + removals,
                gaps: 1 + gaps,
            };
            let expectation = Expectation {
                tokens,
                prompt_tokens: 320,
                has_events,
                life: LIFE,
                losses: before,
            };
            let case = (tokens, found, removals, gaps, has_events);
            assert_eq!(expectation.difference(found, LIFE, now), expected, "{case:?}");
            let reborn = Life {
                epoch: BootEpoch(8),
                ..LIFE
            };
            let of_life = expected.map(|_| "epoch");
            assert_eq!(expectation.difference(found, reborn, now), of_life, "{case:?}");
        };
        check(64, 64, 5, 5, true, None);
        check(64, 96, 0, 0, true, Some("events_behind"));
        check(64, 96, 2, 0, true, Some("events_behind"));
        check(64, 96, 0, 1, true, Some("events_lost"));
        check(64, 32, 0, 1, true, Some("events_lost"));
        check(64, 32, 2, 0, true, Some("evicted"));
        check(320, 288, 0, 0, true, Some("last_token"));
        check(64, 32, 0, 0, true, Some("predicted"));
        check(64, 32, 0, 0, false, Some("predicted"));
        check(64, 96, 0, 0, false, Some("predicted"));
    }
}
