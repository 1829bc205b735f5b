//! What must hold in every run, checked in every run.
//!
//! Every request ends exactly once; tokens are conserved between engines, clients and records; pools and queues keep
//! their invariants; nobody waits for ever; and at the end everything is at rest. A violation is an error of the run,
//! which names the check, the instant and what was found; the seed is the caller's.

use crate::client::Client;
use crate::config::SimError;
use crate::node::Node;
use homing_units::{Duration, Instant, RequestId};
use std::collections::BTreeMap;

/// Events at one instant; more are taken for a loop without end.
pub(crate) const MAX_EVENTS_AN_INSTANT: u32 = 10_000_000;
/// Instants between two checks of one worker, each in its turn: it costs a pass over a pool, and what checks cost an
/// instant must not grow with the fleet.
const INSTANTS_A_CHECK: u64 = 1 << 17;

/// What was counted and what went wrong.
#[derive(Debug, Default)]
pub(crate) struct Checkers {
    instants: u64,
    /// Requests that ended.
    pub(crate) ended: u64,
    /// Tokens that clients received, of requests that ended.
    pub(crate) received_tokens: u64,
    /// Tokens that prefill legs sampled; no client sees them.
    pub(crate) prefill_tokens: u64,
    /// Tokens that were lost on their way or came too late for anybody.
    pub(crate) lost_tokens: u64,
    /// Tokens for strangers.
    pub(crate) stranger_tokens: u64,
    violation: Option<SimError>,
}

impl Checkers {
    /// Something that must hold does not. The first one counts.
    pub(crate) fn note(&mut self, check: &'static str, at: Instant, found: String) {
        self.violation.get_or_insert(SimError::Check { check, at, found });
    }

    /// Instants that are over.
    pub(crate) const fn instants(&self) -> u64 {
        self.instants
    }

    /// A request has ended.
    pub(crate) fn ended(&mut self, client: &Client, completed: bool) {
        self.ended += 1;
        self.received_tokens += u64::from(client.received);
        if completed && client.received != client.wanted {
            let found = format!(
                "`{}` of `{}` tokens for {:?}",
                client.received, client.wanted, client.turn
            );
            self.note("that an answer is whole", client.sent, found);
        }
    }

    /// A request that is not in flight has ended.
    pub(crate) fn ended_twice(&mut self, request: RequestId) {
        self.note(
            "that a request ends once",
            Instant::ZERO,
            format!("`{request}` ended again"),
        );
    }

    /// Called when an instant is over.
    pub(crate) fn each_instant(
        &mut self,
        now: Instant,
        nodes: &[Node],
        clients: &BTreeMap<RequestId, Client>,
        bound: Duration,
    ) -> Result<(), SimError> {
        self.instants += 1;
        // Requests are numbered in the order in which they were sent: the first has waited longest.
        if let Some((request, client)) = clients.first_key_value() {
            let waited = now - client.sent;
            if waited > bound {
                return Err(SimError::Stuck {
                    request: *request,
                    waited,
                    bound,
                });
            }
        }
        if self.instants.is_multiple_of(INSTANTS_A_CHECK) {
            let turn = (self.instants / INSTANTS_A_CHECK) as usize % nodes.len();
            check_nodes(&nodes[turn..=turn]);
        }
        self.result()
    }

    /// The first thing that did not hold.
    pub(crate) fn result(&mut self) -> Result<(), SimError> {
        self.violation.take().map_or(Ok(()), Err)
    }
}

/// Every engine's own checks.
pub(crate) fn check_nodes(nodes: &[Node]) {
    for engine in nodes.iter().filter_map(|node| node.engine.as_ref()) {
        engine.check_invariants();
    }
}

/// Nothing may be left in an engine when everything is at rest.
pub(crate) fn leftovers(node: &Node) -> Option<String> {
    let snapshot = node.engine.as_ref()?.snapshot();
    let requests = snapshot.running + snapshot.waiting + snapshot.importing + snapshot.exporting;
    let used = snapshot.blocks_total - snapshot.blocks_free - snapshot.blocks_evictable;
    (requests > 0 || used > 0 && !node.has_slots()).then(|| format!("worker `{}` has {snapshot:?}", node.spec.name))
}
