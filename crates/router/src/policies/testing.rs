//! Boards and turns for the policies' tests.

use super::spec::Parameters;
use super::{Admission, Board, Policy, PolicyError, TurnView, WorkerView};
use crate::admission::{Account, Denied};
use crate::event::Role;
use crate::speed::Speed;
use homing_units::{Duration, RequestId, SessionId, WorkerId};

/// An idle worker of 100,000 tokens.
pub(super) fn worker(id: u32, role: Role) -> WorkerView {
    let unable = |able: bool| (!able).then_some(Denied::Unable);
    WorkerView {
        id: WorkerId(id),
        role,
        transfers: true,
        kv_tokens: 100_000,
        account: Account::default(),
        running: 0,
        waiting: 0,
        transfer_queue: 0,
        retracted: 0,
        kv_tokens_used: 0,
        assigned_requests: 0,
        recent_ttft_s: None,
        homed_sessions: 0,
        live_tokens: 0,
        live_own_tokens: 0,
        live_sessions: 0,
        cached_tokens: 0,
        spills: false,
        prefilling_s: 0.0,
        speed: Speed::default(),
        resident_tokens: 0,
        host_tokens: 0,
        exclusive_tokens: 0,
        denies_alone: unable(role.decodes()),
        denies_seed: unable(role.decodes()),
        denies_prefill: unable(role.prefills()),
        denies_lend: None,
        denies_export: None,
    }
}

/// Idle workers of these roles, by id from 0.
pub(super) fn board<const N: usize>(roles: [Role; N]) -> Board {
    let workers = (0..).zip(roles).map(|(id, role)| worker(id, role)).collect();
    Board {
        workers,
        ..Board::default()
    }
}

/// The first turn of a session, of 20,000 tokens.
pub(super) fn turn() -> TurnView {
    TurnView {
        request: RequestId(0),
        session: SessionId(0),
        turn_index: 0,
        prompt_tokens: 20_000,
        max_output_tokens: 512,
        expected_output_tokens: 512,
        expected_turns: 5.0,
        expected_gap_s: 10.0,
        return_share: 0.8,
        block_size: 16,
        shared_tokens: 0,
        history_tokens: 0,
        prefix: None,
        new_family: true,
        was_resident: false,
        home: None,
        carried: false,
        waited: Duration::ZERO,
        may_transfer: true,
        may_fetch: true,
    }
}

/// What a policy makes of parameters in their text form, `key=value:key=value`; all of them must be known to it.
pub(super) fn with_parameters<T>(text: &str, make: impl FnOnce(&mut Parameters<'_>) -> Result<T, PolicyError>) -> T {
    let mut parameters = Parameters::parse("the policy", (!text.is_empty()).then_some(text)).unwrap();
    let made = make(&mut parameters).unwrap();
    parameters.finish().unwrap();
    made
}

/// A policy of the elastic family, with these parameters, on three idle instances and the first turn of a session of
/// 40,000 tokens: each instance's cost, NAN where it is not considered, and the least wins.
#[track_caller]
pub(super) fn check_elastic<P: Policy>(
    text: &str,
    make: impl FnOnce(&mut Parameters<'_>) -> Result<P, PolicyError>,
    set: impl FnOnce(&mut Board),
    expected: &[f64],
) {
    let mut board = board([Role::Both; 3]);
    set(&mut board);
    let turn = TurnView {
        prompt_tokens: 40_000,
        ..turn()
    };
    let mut policy = with_parameters(text, make);
    assert_eq!(policy.habits().admission, Admission::AtOnce);
    let choice = policy.choose(&board, &turn);
    for (worker, expected) in board.workers.iter().zip(expected) {
        let considered = choice.considered.iter().find(|plan| plan.plan.decode == worker.id);
        let cost = considered.map_or(f64::NAN, |plan| plan.score);
        let equal = (cost - expected).abs() < 1e-9 || cost.is_nan() && expected.is_nan();
        assert!(equal, "{text}: {} costs {cost}, expected {expected}", worker.id);
    }
    let cheapest = choice.considered.iter().filter(|plan| plan.denied.is_none());
    let least = cheapest.map(|plan| plan.score).fold(f64::INFINITY, f64::min);
    let best = &choice.considered[0];
    assert_eq!(choice.plan, Some(best.plan), "the chosen one comes first");
    assert!(best.score <= least, "{text}: {choice:?}");
    assert_eq!(best.plan.prefill, None);
}
