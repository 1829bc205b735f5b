//! Leases that begin anew, as the gateway's `proxy/renewal` does it with embedded workers: several times in a lease's length for
//! as long as the leg that is to pull is wanted, and until it has pulled. Renewals are not lost here; a worker that is down, or has
//! another life, gets none.

use super::{Simulation, Wake};
use crate::heap::Rank;
use homing_engine::api::Input;
use homing_router::event::{FailureCause, LegId};
use homing_units::{Duration, RequestId};

/// How often a lease is renewed in its length.
const RENEWALS_A_LEASE: u32 = 3;

impl Simulation<'_> {
    /// KV is held: its lease is to begin anew before it ends.
    pub(super) fn plan_renewal(&mut self, node: usize, export: RequestId) {
        if self.config.cluster.stack.renews_leases() {
            let every = self.renewed_every(node);
            self.heap.plan(self.now + every, Rank::Timer, Wake::Renew(export));
        }
    }

    /// It is renewed, unless it was pulled or given up, or its puller goes on without it.
    pub(super) fn renew_lease(&mut self, export: RequestId) {
        let Some(leg) = self.legs.get(export).filter(|leg| leg.exported) else {
            return;
        };
        let (node, epoch, wanted) = (leg.node, leg.epoch, self.is_wanted(leg.id));
        let held = self.nodes[node].epoch == epoch && self.nodes[node].exports.contains(&export);
        if held && wanted {
            self.tell_engine(node, epoch, Input::RenewExport(export));
            self.plan_renewal(node, export);
        }
    }

    /// A lease has ended all the same: the next renewal is told so, and the router plans anew.
    pub(super) fn lease_ended(&mut self, node: usize, leg: LegId) {
        if self.config.cluster.stack.renews_leases() {
            let heard = self.now + self.renewed_every(node);
            self.heap.plan(heard, Rank::Timer, Wake::HeldNoMore(leg));
        }
    }

    /// The router hears that what a leg held is gone. Of a leg that matters no more it makes nothing.
    pub(super) fn held_no_more(&mut self, leg: LegId) {
        if self.clients.contains_key(&leg.request) {
            self.fail_leg(leg, FailureCause::Transfer);
        }
    }

    /// Whether a client waits for what this leg holds: whoever is to pull it has not answered, or has not been sent yet.
    fn is_wanted(&self, held: LegId) -> bool {
        let puller = held.leg.puller().and_then(|leg| self.legs.engine_id(held.sibling(leg)));
        let waits = puller
            .and_then(|puller| self.legs.get(puller))
            .is_none_or(|leg| leg.sampled == 0);
        waits && self.clients.contains_key(&held.request)
    }

    fn renewed_every(&self, node: usize) -> Duration {
        self.nodes[node].lease() / RENEWALS_A_LEASE
    }
}
