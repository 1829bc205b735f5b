//! Whether a session's next turn would better find its KV elsewhere.
//!
//! Priced as any turn is, with each worker as busy as it is on average, since the turn comes later: at home, and at each place that could
//! be sent what home holds. What that would displace there is charged, as are the coming turns; the transfer is not, since it is over
//! before anybody waits. A place must beat home by the margin by which any move must: estimates err, and whoever is carried to and fro
//! takes NICs and pools from others.

use super::estimate::{Estimate, Place};
use super::terms::{self, Here, Prefill};
use crate::admission::Denied;
use homing_units::WorkerId;

/// The place that beats `home` by most, of those that beat it by the margin.
pub(super) fn better_home(estimate: &Estimate<'_>, home: WorkerId) -> Option<WorkerId> {
    let config = estimate.config;
    let home = estimate.place(home).filter(|_| config.moves)?;
    let stay_s = terms::all(estimate, home, &Here::new(estimate, home), None).total_s();
    let carried_tokens = home.worker.resident_tokens;
    let cost_s = |place: &Place<'_>| {
        let held = place.worker.resident_tokens.max(carried_tokens);
        let lacks = estimate.turn.prompt_tokens.saturating_sub(held);
        let work = Prefill::new(estimate, place, lacks);
        terms::carried(place, &Here::new(estimate, place), &work).total_s()
    };
    let lasting = |denied: Option<Denied>| denied.is_some_and(Denied::is_lasting);
    let takes = |place: &&Place<'_>| {
        let worker = place.worker;
        let doubtful = estimate.board.link(home.worker.id, worker.id).is_doubtful();
        worker.id != home.worker.id
            && worker.transfers
            && !lasting(worker.denies_seed)
            && !lasting(worker.denies_alone)
            && !doubtful
    };
    let places = estimate.places.iter().filter(takes);
    let best = places.map(|place| (cost_s(place), place.worker.id));
    let (cost_s, id) = best.min_by(|left, right| left.0.total_cmp(&right.0).then(left.1.cmp(&right.1)))?;
    (stay_s - cost_s > config.margin_s + config.margin * stay_s).then_some(id)
}
