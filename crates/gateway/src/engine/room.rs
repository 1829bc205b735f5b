//! How much room an embedded worker has, as it says itself (`/homing/probe`).
//!
//! The worker answers from its last published snapshot, so to ask costs its scheduler nothing. To ask books nothing either: the
//! core decides on what it was told last, and no decision waits for an answer.

use crate::fleet::Member;
use crate::upstream::Upstream;
use homing_router::event::RoomReport;
use homing_units::BootEpoch;
use serde::Deserialize;
use std::time::Duration;

/// The part of a worker's answer that a router needs.
#[derive(Debug, Deserialize)]
struct Probe {
    epoch: BootEpoch,
    spare_tokens: u64,
    room_pause_ms: u64,
}

/// What a worker says; `None` where it says nothing, or nothing that makes sense: then the ledger alone decides.
pub(super) async fn room(member: &Member, upstream: &Upstream, timeout: Duration) -> Option<RoomReport> {
    let body = upstream.get(&member.uri("/homing/probe"), timeout).await;
    let read = body.and_then(|body| read(member, &body));
    read.inspect_err(|error| tracing::debug!(worker = member.name, error, "a worker did not say how much room it has"))
        .ok()
}

fn read(member: &Member, body: &[u8]) -> Result<RoomReport, String> {
    let probe: Probe =
        serde_json::from_slice(body).map_err(|error| format!("expected `/homing/probe` of a worker: {error}"))?;
    Ok(RoomReport {
        worker: member.id,
        epoch: probe.epoch,
        spare_tokens: probe.spare_tokens,
        pause: Duration::from_millis(probe.room_pause_ms),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{EngineKind, WorkerSpec};
    use crate::fleet::Fleet;

    #[test]
    fn a_workers_answer_is_read_and_anything_else_is_none() {
        let fleet = Fleet::new(&[WorkerSpec::new("http://h:1", EngineKind::Homing)]);
        let check = |body: &str, expected: Option<(u64, u64)>| {
            let found = read(&fleet.members()[0], body.as_bytes()).ok();
            let found = found.map(|room| (room.spare_tokens, room.pause.as_millis() as u64));
            assert_eq!(found, expected, "{body}");
        };
        check(
            r#"{"epoch":7,"admit":false,"free_tokens":90,"recommended_pause_ms":20,"spare_tokens":64,"room_pause_ms":40,"load":{}}"#,
            Some((64, 40)),
        );
        check(r#"{"epoch":7,"admit":true,"free_tokens":90}"#, None);
        check("not found", None);
    }
}
