//! Boards and turns for the policies' tests.

use super::{Board, TurnView, WorkerView};
use crate::admission::{Account, Denied};
use crate::event::Role;
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
        waiting: 0,
        homed_sessions: 0,
        live_tokens: 0,
        resident_tokens: 0,
        host_tokens: 0,
        exclusive_tokens: 0,
        denies_alone: unable(role.decodes()),
        denies_seed: unable(role.decodes()),
        denies_prefill: unable(role.prefills()),
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
        prompt_tokens: 20_000,
        new_family: true,
        was_resident: false,
        home: None,
        waited: Duration::ZERO,
        may_transfer: true,
    }
}
