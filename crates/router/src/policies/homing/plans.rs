//! Who could serve a turn, and how.
//!
//! Every decode worker alone; with a prefill worker, of those that would have it done first, which may pull the history before
//! it prefills; and with the KV from where the session's history lies, if that is elsewhere. Sources are ranked once and only the first few are looked at for each
//! decode worker, so a large fleet costs the sum of its workers and not the product. A link that failed lately, or is being tried
//! by another transfer after it failed, is no way for KV while there is another.

use super::cost::Cost;
use super::estimate::{Estimate, Place};
use super::terms::{self, Here, Prefill};
use crate::action::Fetch;
use crate::admission::Denied;
use crate::event::Role;
use crate::policies::Considered;

/// Prefill workers that are looked at for each decode worker: the first may have a bad link to it.
const SOURCES: usize = 3;

/// So many of a turn's plans are put in order, the best ones: of a large fleet's hundreds nobody asks which comes last.
pub(super) const RANKED: usize = 48;

/// A plan with its price.
#[derive(Clone, Copy, Debug)]
pub(super) struct Priced {
    pub(super) considered: Considered,
    pub(super) cost: Cost,
}

/// Where a plan's KV comes from, if not from its decode worker itself. What it costs there is the same for all places.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source<'e, 'a> {
    /// Who prefills what is lacking.
    pub(super) place: &'e Place<'a>,
    /// What it pulls before.
    pub(super) fetch: Option<Fetch>,
    /// It is the session's home, and hands it over.
    hands_over: bool,
    /// Seconds until it has the whole prompt's KV.
    pub(super) prefilled_s: f64,
    /// Its prefill.
    pub(super) work: Prefill,
}

impl<'e, 'a> Source<'e, 'a> {
    fn new(estimate: &'e Estimate<'a>, place: &'e Place<'a>, fetch: Option<Fetch>, hands_over: bool) -> Self {
        let fetched = fetch.map_or(0, |fetch| fetch.tokens);
        let held = place.worker.held_tokens().max(fetched);
        let work = Prefill::new(estimate, place, estimate.turn.prompt_tokens.saturating_sub(held));
        Self {
            place,
            fetch,
            hands_over,
            prefilled_s: terms::first::prefilled_s(estimate, place, &work, fetch),
            work,
        }
    }
}

/// The best first and the next ones in order, as far as anybody looks; the rest behind them as it comes.
pub(super) fn rank(plans: &mut [Priced]) {
    let order = |left: &Priced, right: &Priced| {
        let (left, right) = (&left.considered, &right.considered);
        let ends = |considered: &Considered| (considered.plan.decode, considered.plan.prefill);
        Considered::by_preference(left, right).then_with(|| ends(left).cmp(&ends(right)))
    };
    if plans.len() > RANKED {
        plans.select_nth_unstable_by(RANKED, order);
    }
    let ranked = plans.len().min(RANKED);
    plans[..ranked].sort_by(order);
}

/// All plans worth a thought.
pub(super) fn all(estimate: &Estimate<'_>) -> Vec<Priced> {
    let prefillers = prefillers(estimate);
    let holders = holders(estimate);
    let mut plans = Vec::with_capacity(estimate.places.len() * 2);
    for place in &estimate.places {
        let receives = estimate.turn.may_transfer && receives(place);
        let here = Here::new(estimate, place);
        let priced = |source| priced(estimate, place, &here, source);
        let alone = priced(None);
        let spared = receives && is_spared(estimate, place, &alone, &prefillers);
        if !spared && !place.worker.denies_alone.is_some_and(Denied::is_lasting) {
            plans.push(alone);
        }
        if !receives {
            continue;
        }
        let able = || prefillers.iter().filter(|source| spares(estimate, source, place));
        let is_sure = |source: &&Source<'_, '_>| !is_doubtful(estimate, source, place);
        let any_sure = able().any(|source| is_sure(&source));
        let open = able().filter(|source| !any_sure || is_sure(source));
        plans.extend(open.take(SOURCES).map(|source| priced(Some(source))));
        let more = |source: &&Source<'_, '_>| source.place.worker.held_tokens() > place.worker.held_tokens();
        let holder = holders.iter().filter(is_sure).find(more);
        plans.extend(holder.map(|source| priced(Some(source))));
    }
    plans
}

/// Whether a decode-only worker leaves the turn's prefill to a prefill worker: where it is more than its budget and they
/// are not far behind.
fn is_spared(estimate: &Estimate<'_>, place: &Place<'_>, alone: &Priced, prefillers: &[Source<'_, '_>]) -> bool {
    place.worker.role == Role::Decode
        && place.worker.lacks(estimate.turn) > budget(estimate, place)
        && prefillers.iter().any(|source| {
            spares(estimate, source, place)
                && !is_doubtful(estimate, source, place)
                && source.place.worker.denies_prefill.is_none()
                && source.prefilled_s <= estimate.config.overflow * alone.cost.first_s
        })
}

/// Tokens that a decode-only worker may prefill of the turn, where a prefill worker can do it.
fn budget(estimate: &Estimate<'_>, place: &Place<'_>) -> u32 {
    let holds = !estimate.turn.new_family && place.worker.exclusive_tokens > 0;
    let most = if holds {
        estimate.config.append_tokens
    } else {
        estimate.config.local_tokens
    };
    place
        .append_budget(estimate.config.itl_target_s, estimate.turn.prompt_tokens)
        .min(f64::from(most)) as u32
}

/// Whether those who decode at this place, which may do anything, would wait too long for their next token if it prefilled what the
/// turn lacks there: another that may do anything and has fewer who wait can prefill it instead.
fn is_harmed(estimate: &Estimate<'_>, place: &Place<'_>) -> bool {
    let budget = place.append_budget(estimate.config.itl_target_s, estimate.turn.prompt_tokens);
    place.worker.role == Role::Both && f64::from(place.worker.lacks(estimate.turn)) > budget
}

/// Whether a place can take KV and decode with it, now or once it has room.
fn receives(place: &Place<'_>) -> bool {
    place.worker.transfers && !place.worker.denies_seed.is_some_and(Denied::is_lasting)
}

/// Whether a source may prefill for this place: a worker that could decode the turn itself is spared this, unless the place may
/// not prefill all of it, or harms more who decode there than the source would.
fn spares(estimate: &Estimate<'_>, source: &Source<'_, '_>, place: &Place<'_>) -> bool {
    let prefill = source.place.worker;
    let relieves = || prefill.account.decodes < place.worker.account.decodes && is_harmed(estimate, place);
    prefill.id != place.worker.id && (prefill.role == Role::Prefill || place.worker.role == Role::Decode || relieves())
}

/// Whether KV from this source had better come to the place over another link. Where a failure costs nothing, all links are as good.
fn is_doubtful(estimate: &Estimate<'_>, source: &Source<'_, '_>, place: &Place<'_>) -> bool {
    let link = estimate.board.link(source.place.worker.id, place.worker.id);
    estimate.config.failure_s > 0.0 && link.is_doubtful()
}

/// Those that may prefill for others, the soonest done first; the first few pull the history where that is sooner.
fn prefillers<'e, 'a>(estimate: &'e Estimate<'a>) -> Vec<Source<'e, 'a>> {
    let spared = estimate
        .places
        .iter()
        .any(|place| place.worker.role == Role::Decode || is_harmed(estimate, place));
    let able = |place: &&Place<'_>| {
        (spared || place.worker.role == Role::Prefill) && !place.worker.denies_prefill.is_some_and(Denied::is_lasting)
    };
    let mut sources: Vec<Source<'_, '_>> = estimate
        .places
        .iter()
        .filter(able)
        .map(|place| Source::new(estimate, place, None, false))
        .collect();
    let denied = |source: &Source<'_, '_>| source.place.worker.denies_prefill.is_some();
    let order = |left: &Source<'_, '_>, right: &Source<'_, '_>| {
        (denied(left).cmp(&denied(right))).then(left.prefilled_s.total_cmp(&right.prefilled_s))
    };
    sources.sort_by(order);
    for source in sources.iter_mut().take(SOURCES) {
        let fetch = estimate.board.fetchable(source.place.worker, estimate.turn);
        let fetching = Source::new(estimate, source.place, fetch, false);
        if fetch.is_some() && fetching.prefilled_s < source.prefilled_s {
            *source = fetching;
        }
    }
    // They are done sooner, and none of the others is.
    let first = sources.len().min(SOURCES);
    sources[..first].sort_by(order);
    sources
}

/// Those that hold the session's own history and may hand it over, the most first.
fn holders<'e, 'a>(estimate: &'e Estimate<'a>) -> Vec<Source<'e, 'a>> {
    let turn = estimate.turn;
    if turn.new_family || !estimate.config.moves {
        return Vec::new();
    }
    let holds = |place: &&Place<'_>| {
        let worker = place.worker;
        worker.exclusive_tokens > 0
            && worker.denies_export.is_none()
            && u64::from(worker.lacks(turn)) * 2 <= u64::from(turn.prompt_tokens)
    };
    let mut sources: Vec<Source<'_, '_>> = estimate
        .places
        .iter()
        .filter(holds)
        .map(|place| Source::new(estimate, place, None, true))
        .collect();
    sources.sort_by_key(|source| std::cmp::Reverse(source.place.worker.held_tokens()));
    sources
}

/// The plan that ends at `place`: alone, or with KV from a source.
fn priced(estimate: &Estimate<'_>, place: &Place<'_>, here: &Here, source: Option<&Source<'_, '_>>) -> Priced {
    let (turn, worker) = (estimate.turn, place.worker);
    let cost = terms::all(estimate, place, here, source);
    let (plan, denied) = match source {
        None => (worker.alone(turn), worker.denies_alone),
        Some(source) if source.hands_over => (
            worker.moved_from(source.place.worker.id),
            worker.denies_seed.or(source.place.worker.denies_export),
        ),
        Some(source) => {
            let plan = worker.seeded_by(source.place.worker.id, turn);
            (
                source.fetch.map_or(plan, |fetch| plan.fetching(fetch)),
                worker.denies_seed.or(source.place.worker.denies_prefill),
            )
        }
    };
    let considered = Considered {
        plan,
        resident_tokens: worker.resident_tokens,
        score: cost.total_s(),
        denied,
    };
    Priced { considered, cost }
}
