//! What those lose who come to the place while the turn is prefilled there.
//!
//! ```text
//! arrivals = live sessions there * (1 - busy share) * share that comes back / mean gap, in turns a second
//! behind   = arrivals * prefill * (queue + prefill / 2)
//! ```
//!
//! An engine prefills in order of arrival. Whoever comes while the queue that is there now is worked off waits for the whole of this
//! prefill; whoever comes during it, for the half of it that is left on average. A short tail costs next to nothing so; a prompt of a
//! few seconds makes all who live there wait, whose own tails would have taken a moment. Whoever has no home may still go elsewhere,
//! so only those count who live at the place. A prefill worker is nobody's home.

use crate::policies::homing::estimate::Place;

/// Seconds that those to come will lose together by a prefill of so many seconds.
pub(super) fn seconds(place: &Place<'_>, prefill_s: f64) -> f64 {
    place.arrivals * prefill_s * (place.queue_s + prefill_s / 2.0)
}
