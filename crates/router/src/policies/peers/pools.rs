//! What the peers share: pools by role, candidates in order, and plans made of the first of each.
//!
//! All four systems choose the prefill and the decode worker apart from each other, each by a cost of its own, and break
//! ties at random. Here equals are put in an order drawn from the request and the worker: even over many requests, the
//! same in every run. It knows no system's formula.

use crate::admission::Denied;
use crate::event::Role;
use crate::policies::{Board, Choice, Considered, Plan, TurnView, WorkerView};
use homing_units::{RequestId, WorkerId};
use std::cmp::Ordering;

/// The workers of a cluster by what these systems would have them do: prefill-only workers make it a disaggregated one, in
/// which all others decode; without them each worker serves alone. Those that can never take the turn are left out.
#[derive(Debug)]
pub(super) struct Pools<'b> {
    /// Whether there are prefill-only workers, alive or not.
    pub(super) disaggregated: bool,
    /// Those of them that could take the turn.
    pub(super) prefill: Vec<&'b WorkerView>,
    /// Who could decode it with KV from one of them; without any, who could serve it alone.
    pub(super) decode: Vec<&'b WorkerView>,
}

/// A candidate for a leg.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ranked<'b> {
    pub(super) worker: &'b WorkerView,
    /// What its system compares; lower is better.
    pub(super) cost: f64,
    pub(super) denied: Option<Denied>,
}

/// How a candidate compares: a lower group beats any cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cost {
    /// 0 for what is left after a filter, more for what it left out.
    pub(super) group: u8,
    /// Within the group.
    pub(super) cost: f64,
}

impl<'b> Pools<'b> {
    pub(super) fn of(board: &'b Board) -> Self {
        let lasting = |denied: Option<Denied>| denied.is_some_and(Denied::is_lasting);
        let is_prefiller = |worker: &&WorkerView| worker.role == Role::Prefill;
        let disaggregated = board.workers.iter().any(|worker| is_prefiller(&worker));
        let decodes = |worker: &&WorkerView| {
            !lasting(if disaggregated {
                worker.denies_seed
            } else {
                worker.denies_alone
            })
        };
        Self {
            disaggregated,
            prefill: (board.workers.iter())
                .filter(is_prefiller)
                .filter(|worker| !lasting(worker.denies_prefill))
                .collect(),
            decode: (board.workers.iter())
                .filter(|worker| !is_prefiller(worker))
                .filter(decodes)
                .collect(),
        }
    }
}

impl Cost {
    /// The only group.
    pub(super) const fn of(cost: f64) -> Self {
        Self { group: 0, cost }
    }
}

/// Why a worker does not take a leg that prefills for another.
pub(super) const fn prefill_denied(worker: &WorkerView) -> Option<Denied> {
    worker.denies_prefill
}

/// Why a worker does not take a leg whose KV comes from elsewhere.
pub(super) const fn seed_denied(worker: &WorkerView) -> Option<Denied> {
    worker.denies_seed
}

/// Why a worker does not serve alone.
pub(super) const fn alone_denied(worker: &WorkerView) -> Option<Denied> {
    worker.denies_alone
}

/// Those of a pool that can take a leg now.
pub(super) fn able<'b>(pool: &[&'b WorkerView], denied: impl Fn(&WorkerView) -> Option<Denied>) -> Vec<&'b WorkerView> {
    pool.iter().copied().filter(|worker| denied(worker).is_none()).collect()
}

/// A pool from the best candidate to the worst; who cannot take the leg comes last.
pub(super) fn ranked<'b>(
    turn: &TurnView,
    pool: &[&'b WorkerView],
    denied: impl Fn(&WorkerView) -> Option<Denied>,
    cost: impl Fn(&WorkerView) -> Cost,
) -> Vec<Ranked<'b>> {
    let mut keyed: Vec<_> = (pool.iter())
        .map(|worker| (denied(worker), cost(worker), lot(turn.request, worker.id, 0), *worker))
        .collect();
    keyed.sort_by(order);
    let candidate = |(denied, Cost { cost, .. }, _, worker)| Ranked { worker, cost, denied };
    keyed.into_iter().map(candidate).collect()
}

type Keyed<'b> = (Option<Denied>, Cost, u64, &'b WorkerView);

fn order(left: &Keyed<'_>, right: &Keyed<'_>) -> Ordering {
    (left.0.is_some().cmp(&right.0.is_some()))
        .then(left.1.group.cmp(&right.1.group))
        .then(left.1.cost.total_cmp(&right.1.cost))
        .then(left.2.cmp(&right.2))
}

/// A number drawn for a request and a worker. Different `purpose`s draw apart.
pub(super) fn lot(request: RequestId, worker: WorkerId, purpose: u8) -> u64 {
    let mut bytes = [purpose; 13];
    bytes[..8].copy_from_slice(&request.0.to_le_bytes());
    bytes[8..12].copy_from_slice(&worker.0.to_le_bytes());
    xxhash_rust::xxh3::xxh3_64(&bytes)
}

/// The first candidate serves the turn alone.
pub(super) fn alone(turn: &TurnView, candidates: &[Ranked<'_>], reason: impl Into<String>) -> Choice {
    let considered = candidates.iter().map(|candidate| Considered {
        plan: candidate.worker.alone(turn),
        resident_tokens: candidate.worker.resident_tokens,
        score: candidate.cost,
        denied: candidate.denied,
    });
    first(considered.collect(), reason)
}

/// The first prefill candidate prefills the turn for the first decode candidate. The score of a pair is the sum of both costs.
pub(super) fn seeded(
    turn: &TurnView,
    prefills: &[Ranked<'_>],
    decodes: &[Ranked<'_>],
    reason: impl Into<String>,
) -> Choice {
    let (Some(prefill), Some(decode)) = (prefills.first(), decodes.first()) else {
        return first(Vec::new(), reason);
    };
    let pair = |prefill: &Ranked<'_>, decode: &Ranked<'_>| Considered {
        plan: decode.worker.seeded_by(prefill.worker.id, turn),
        resident_tokens: decode.worker.resident_tokens,
        score: prefill.cost + decode.cost,
        denied: decode.denied.or(prefill.denied),
    };
    let others = decodes[1..].iter().map(|decode| pair(prefill, decode));
    let elsewhere = prefills[1..].iter().map(|prefill| pair(prefill, decode));
    let considered = std::iter::once(pair(prefill, decode)).chain(others).chain(elsewhere);
    first(considered.collect(), reason)
}

/// The first of what was considered, unless it is denied: then all is, and the turn waits for whoever comes back first.
fn first(considered: Vec<Considered>, reason: impl Into<String>) -> Choice {
    let plan: Option<Plan> = considered
        .first()
        .filter(|best| best.denied.is_none())
        .map(|best| best.plan);
    let reason = match (plan, considered.first().and_then(|best| best.denied)) {
        (Some(_), _) => reason.into(),
        (None, Some(denied)) => format!("waits: {}", denied.as_str()),
        (None, None) => "waits: no worker of that kind".to_owned(),
    };
    Choice {
        plan,
        considered,
        waits_for: None,
        pause: None,
        keeps_kv: true,
        expected_ttft: None,
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{board, turn};
    use super::*;

    #[test]
    fn equals_win_equally_often_and_always_the_same_way() {
        let board = board([Role::Both; 4]);
        let pool: Vec<_> = board.workers.iter().collect();
        let winner = |request| {
            let turn = TurnView {
                request: RequestId(request),
                ..turn()
            };
            // The last of the four costs more.
            let cost = |worker: &WorkerView| Cost::of(f64::from(worker.id.0 / 3));
            ranked(&turn, &pool, alone_denied, cost)[0].worker.id.0
        };
        let mut wins = [0; 4];
        for request in 0..3_000 {
            wins[winner(request) as usize] += 1;
            assert_eq!(winner(request), winner(request));
        }
        assert_eq!(wins[3], 0);
        assert!(wins[..3].iter().all(|wins| (900..1_100).contains(wins)), "{wins:?}");
    }

    #[test]
    fn a_group_beats_costs_and_who_cannot_comes_last() {
        let mut board = board([Role::Both; 3]);
        board.workers[0].denies_alone = Some(Denied::Suspect);
        let pool: Vec<_> = board.workers.iter().collect();
        let cost = |worker: &WorkerView| Cost {
            group: u8::from(worker.id.0 == 1),
            cost: 9.0 * f64::from(worker.id.0),
        };
        let order: Vec<_> = ranked(&turn(), &pool, alone_denied, cost)
            .iter()
            .map(|candidate| candidate.worker.id.0)
            .collect();
        assert_eq!(order, [2, 1, 0]);
    }

    #[track_caller]
    fn check_pools<const N: usize>(
        roles: [Role; N],
        set: impl FnOnce(&mut Board),
        expected: (bool, Vec<u32>, Vec<u32>),
    ) {
        let mut board = board(roles);
        set(&mut board);
        let pools = Pools::of(&board);
        let ids = |pool: &[&WorkerView]| pool.iter().map(|worker| worker.id.0).collect::<Vec<_>>();
        assert_eq!((pools.disaggregated, ids(&pools.prefill), ids(&pools.decode)), expected);
    }

    #[test]
    fn prefill_only_workers_make_a_cluster_disaggregated() {
        let (p, d, both) = (Role::Prefill, Role::Decode, Role::Both);
        check_pools([both, both], |_| {}, (false, vec![], vec![0, 1]));
        check_pools([p, d, both], |_| {}, (true, vec![0], vec![1, 2]));
        // Dead ones are out, but a cluster stays what it is.
        let dead = |board: &mut Board| board.workers[0].denies_prefill = Some(Denied::Dead);
        check_pools([p, d, d], dead, (true, vec![], vec![1, 2]));
        let suspect = |board: &mut Board| board.workers[1].denies_seed = Some(Denied::Suspect);
        check_pools([p, d, d], suspect, (true, vec![0], vec![1, 2]));
        let leaves = |board: &mut Board| board.workers[1].denies_seed = Some(Denied::TooLong);
        check_pools([p, d, d], leaves, (true, vec![0], vec![2]));
        check_pools([d, both], |_| {}, (false, vec![], vec![0, 1]));
    }
}
