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
        running: 0,
        waiting: 0,
        transfer_queue: 0,
        retracted: 0,
        kv_tokens_used: 0,
        assigned_requests: 0,
        recent_ttft_s: None,
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
        turn_index: 0,
        prompt_tokens: 20_000,
        max_output_tokens: 512,
        expected_output_tokens: 512,
        block_size: 16,
        prefix: None,
        new_family: true,
        was_resident: false,
        home: None,
        waited: Duration::ZERO,
        may_transfer: true,
    }
}
