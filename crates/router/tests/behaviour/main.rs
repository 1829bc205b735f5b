//! What the router does, behaviour by behaviour.

mod admission;
mod errands;
mod fetches;
mod habits;
mod handoff;
mod order;
mod pushes;
mod sessions;
mod sketches;
#[path = "../support/mod.rs"]
mod support;
mod workers;

use homing_kv::{Prompt, Sketch};
use homing_router::action::{Path, WorkerState};
use homing_router::event::{
    Compared, Event, FailureCause, HealthReport, KvBatch, KvUpdate, Leg, LegUsage, PromptId, Resume, Role, RoomReport,
    SessionHint, SessionSketch, SketchReport, WorkerInfo,
};
use homing_router::{Limits, RouterConfig};
use homing_units::{BootEpoch, Duration, RequestId, SessionId, WorkerId};
use std::collections::{BTreeMap, BTreeSet};
use support::{BLOCK, Driver, prompt, worker, workers};

pub(crate) const RECOGNISE: SessionHint = SessionHint::Recognise;
pub(crate) const PD: [Role; 4] = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
pub(crate) const DP: [Role; 3] = [Role::Both; 3];

pub(crate) fn health(worker: u32, epoch: u64, alive: bool) -> Event {
    Event::Health(HealthReport {
        worker: WorkerId(worker),
        epoch: Some(BootEpoch(epoch)),
        alive,
    })
}

pub(crate) fn die(driver: &mut Driver, worker: u32) {
    for _ in 0..3 {
        driver.tell(health(worker, 1, false));
    }
    assert_eq!(driver.states[&WorkerId(worker)], WorkerState::Dead);
}

/// One turn from its start to its end; how it went and where.
pub(crate) fn served(driver: &mut Driver, hint: SessionHint, prompt: Prompt) -> (Path, u32) {
    let request = driver.turn(hint, prompt, 50);
    driver.serve(request);
    let decision = driver.decision(request);
    (decision.path, decision.decode.0)
}

pub(crate) fn small_pool(roles: &[Role], kv_tokens: u64) -> Vec<WorkerInfo> {
    workers(roles)
        .into_iter()
        .map(|info| WorkerInfo { kv_tokens, ..info })
        .collect()
}
