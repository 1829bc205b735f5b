//! The handshake of the papers' engine (SGLang): the decode worker makes room before the prompt is prefilled.
//!
//! With [`Order::DecodeFirst`] both legs of a seed are sent at once. The decode worker's engine allocates blocks for the whole
//! prompt as soon as it has room for them, and only then does the prefill worker's engine see the request. A seed that waits
//! for room holds nothing at the prefill worker, and the decode worker's blocks are taken for as long as the prefill and
//! the transfer last. The transfer timeout holds for the handshake with the prefill after it, and again for the transfer:
//! whoever runs out of it is a dead peer (taxonomy §1.2, "P to D queues, the handshake times out").
//!
//! The router knows nothing of it: it hears of the prefill leg's end and sends the decode leg then, which is found waiting.
//! What ends a handshake before is reported as an end of its prefill leg.

use super::{Simulation, Wake};
use crate::heap::Rank;
use crate::simulation::stack::TIMED_OUT;
use crate::stack::{HandshakeClock, Order};
use homing_engine::api::{Import, ImportError, Input};
use homing_report::logs::TransferPhase;
use homing_router::action::{Dispatch, KvUse};
use homing_router::event::{FailureCause, Leg, LegId};
use homing_units::{Duration, RequestId};
use std::collections::BTreeMap;

/// Handshakes under way, by their decode legs: one for each seed whose prompt is not prefilled yet.
#[derive(Clone, Debug, Default)]
pub(super) struct Handshakes {
    by_decode_leg: BTreeMap<LegId, Handshake>,
}

#[derive(Clone, Debug)]
struct Handshake {
    prefill: RequestId,
    from: usize,
    decode: RequestId,
    to: usize,
    /// How long the prefill worker's front end takes.
    front_end: Duration,
    /// The blocks that the KV goes into; `None` while there is no room.
    import: Option<Import>,
}

impl Simulation<'_> {
    /// A leg was sent. If it is a prefill leg that has to wait for its decode leg, the engine's id of that one.
    pub(super) fn decode_goes_ahead(&mut self, prefill: RequestId, front_end: Duration) -> Option<RequestId> {
        if self.config.cluster.stack.order == Order::PrefillFirst {
            return None;
        }
        let leg = self.legs.get(prefill).filter(|leg| leg.id.leg == Leg::Prefill)?;
        let (from, decode_leg) = (leg.node, decode_leg(leg.id));
        let client = self.clients.get(&decode_leg.request)?;
        let to = client.decode_node().filter(|to| self.nodes[*to].has_slots())?;
        let dispatch = Dispatch {
            leg: decode_leg,
            worker: self.nodes[to].id,
            kv: KvUse::Import {
                from: self.nodes[from].id,
            },
            prefix_tokens: None,
        };
        let decode = self.begin_leg(dispatch)?;
        let handshake = Handshake {
            prefill,
            from,
            decode,
            to,
            front_end,
            import: None,
        };
        self.handshakes.by_decode_leg.insert(decode_leg, handshake);
        self.start_handshake_clock(decode_leg, HandshakeClock::Sent);
        Some(decode)
    }

    /// The transfer timeout runs from now on, if this is when it begins to.
    fn start_handshake_clock(&mut self, decode_leg: LegId, at: HandshakeClock) {
        let stack = &self.config.cluster.stack;
        if let Some(timeout) = stack.transfer_timeout.filter(|_| stack.clock == at) {
            let at = self.now + timeout;
            self.heap.plan(at, Rank::Timer, Wake::HandshakeTimeout(decode_leg));
        }
    }

    /// Whether a decode leg has gone ahead of its prefill leg.
    pub(super) fn shakes_hands(&self, decode: RequestId) -> bool {
        let leg = self.legs.get(decode);
        leg.is_some_and(|leg| self.handshakes.by_decode_leg.contains_key(&leg.id))
    }

    /// A decode worker's engine has room: the prefill worker may begin. Whether there was a handshake that waited for it.
    pub(super) fn room_was_made(&mut self, import: &Import) -> bool {
        let leg = self.legs.get(import.id);
        let Some(handshake) = leg.and_then(|leg| self.handshakes.by_decode_leg.get_mut(&leg.id)) else {
            return false;
        };
        handshake.import = Some(import.clone());
        let (at, prefill, decode) = (self.now + handshake.front_end, handshake.prefill, handshake.decode);
        self.heap.plan(at, Rank::Arrival, Wake::Arrival(prefill));
        if let Some(leg) = self.legs.get(decode) {
            self.start_handshake_clock(leg.id, HandshakeClock::Room);
        }
        true
    }

    /// The router sends the decode leg of a handshake: the KV is ready and is moved, unless the peer counts as dead. Whether
    /// there was a handshake.
    pub(super) fn handshake_is_complete(&mut self, leg: LegId) -> bool {
        let Some(handshake) = self.handshakes.by_decode_leg.remove(&leg) else {
            return false;
        };
        let import = handshake.import.expect("the prefill leg began when there was room");
        if self.dropped_for_dead(handshake.decode) {
            self.unfence(handshake.to, handshake.decode);
        } else {
            self.begin_pull(handshake.to, &import);
        }
        true
    }

    /// A handshake's time is up, if it is still under way.
    pub(super) fn handshake_timeout(&mut self, leg: LegId) {
        let Some(handshake) = self.handshakes.by_decode_leg.get(&leg) else {
            return;
        };
        let (from, to) = (handshake.from, handshake.to);
        let phase = match handshake.import {
            None => TransferPhase::Queued,
            Some(_) => TransferPhase::Prefilling,
        };
        self.note_failed_transfer((from, to), handshake.decode, TIMED_OUT, phase);
        self.fail_leg(leg, FailureCause::Transfer);
        self.take_for_dead(from, to);
    }

    /// One leg of a handshake has ended, so the other one does. Gives the leg that the router knows of.
    pub(super) fn end_handshake(&mut self, leg: LegId) -> LegId {
        let Some(handshake) = self.handshakes.by_decode_leg.remove(&decode_leg(leg)) else {
            return leg;
        };
        self.give_up(handshake.decode);
        self.give_up(handshake.prefill);
        // Where the decode worker has not heard that nobody writes into its blocks, it keeps them until it does.
        let heard = self.config.cluster.stack.defects.abort_heard_after.is_none();
        if handshake.import.is_some() && heard {
            self.unfence(handshake.to, handshake.decode);
        }
        LegId {
            leg: Leg::Prefill,
            ..leg
        }
    }

    /// Nobody will write into the blocks of an import that was given up.
    pub(super) fn unfence(&mut self, to: usize, decode: RequestId) {
        let outcome = Err(ImportError::Unknown);
        self.tell_engine(to, self.nodes[to].epoch, Input::ImportDone { id: decode, outcome });
    }
}

/// The decode leg of the same attempt.
fn decode_leg(leg: LegId) -> LegId {
    LegId {
        leg: Leg::Decode,
        ..leg
    }
}
