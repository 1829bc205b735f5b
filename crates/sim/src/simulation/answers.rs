//! The way of an answer from a worker to the router's shell and its client: at once, unless a fault holds it back, doubles
//! it or swallows it.
//!
//! The shell reads an answer piece by piece. A connection never loses a piece from its middle: a silent one is silent to its
//! end, a held one delivers all that it held in order. Of an answer that was given up while it was held, what arrives later
//! is told to the router's core all the same: a core that does not fence it off sends its client what belongs to nobody.

use super::{BROKEN_CONNECTION_LATENCY, Simulation, Wake};
use crate::fault::Mishap;
use crate::heap::Rank;
use crate::legs::{self, Piece, Wire};
use homing_router::event::{Event, Leg, LegId};
use homing_units::{Instant, RequestId};

impl Simulation<'_> {
    /// A worker sends a piece of an answer.
    pub(super) fn pass_on(&mut self, engine_id: RequestId, piece: Piece) {
        let Some(leg) = self.legs.get_mut(engine_id) else {
            return;
        };
        match &mut leg.wire {
            Wire::Open | Wire::Twice => self.arrives(engine_id, piece),
            Wire::Held { pieces, .. } => pieces.push(piece),
            Wire::Silent => self.checkers.lost_tokens += u64::from(piece == Piece::Token),
        }
    }

    fn arrives(&mut self, engine_id: RequestId, piece: Piece) {
        let Some(leg) = self.legs.get_mut(engine_id) else {
            return;
        };
        let (id, twice) = (leg.id, leg.wire == Wire::Twice);
        if piece == Piece::Token {
            leg.arrived_tokens += 1;
            let (place, first) = (leg.begins_after + leg.arrived_tokens, leg.arrived_tokens == 1);
            self.receive(id.request, place);
            if !first {
                return;
            }
        }
        self.answered(id, piece, twice);
        if id.leg == Leg::Fetch {
            // Other prefill legs stay until what they hold was pulled.
            self.legs.remove(engine_id);
        }
        if matches!(piece, Piece::Ended(_)) {
            self.legs.remove(engine_id);
            if !self.trouble.is_gone(id.request) {
                self.end_turn(id.request, None);
            }
        }
    }

    /// A client receives a token, which has this place in its answer.
    fn receive(&mut self, request: RequestId, place: u32) {
        let Some(client) = self.clients.get_mut(&request) else {
            self.checkers.lost_tokens += 1;
            return;
        };
        client.receive(self.now);
        if client.received != place {
            let found = format!("token `{place}` as the `{}`th of `{request}`", client.received);
            self.checkers.note("that no token is lost or doubled", self.now, found);
        }
    }

    /// The router's core hears of an answer.
    fn answered(&mut self, leg: LegId, piece: Piece, twice: bool) {
        let event = match piece {
            Piece::Prefilled { cached_tokens } => Event::PrefillDone {
                leg,
                cached_tokens: Some(cached_tokens),
            },
            Piece::Token => Event::FirstToken { leg },
            Piece::Ended(usage) => Event::Finished { leg, usage },
        };
        self.news.extend(twice.then(|| event.clone()));
        self.news.push_back(event);
    }

    /// Something happens to all answers of a worker that are under way.
    pub(super) fn answers_meet(&mut self, node: usize, mishap: Mishap) {
        for engine_id in self.legs.on(node) {
            let Some(leg) = self.legs.get_mut(engine_id).filter(|leg| leg.arrived && !leg.exported) else {
                continue;
            };
            match (mishap, &leg.wire) {
                (_, Wire::Silent | Wire::Held { .. }) => {}
                (Mishap::Lost, _) => leg.wire = Wire::Silent,
                (Mishap::Twice, _) => leg.wire = Wire::Twice,
                (Mishap::Late(lasts), _) => {
                    let until = self.now + lasts;
                    let pieces = Vec::new();
                    leg.wire = Wire::Held { until, pieces };
                    self.heap.plan(until, Rank::News, Wake::AnswerGoesOn(engine_id));
                }
            }
        }
    }

    /// What an answer held back arrives.
    pub(super) fn answer_goes_on(&mut self, engine_id: RequestId) {
        let Some(leg) = self.legs.get_mut(engine_id) else {
            return;
        };
        if let Wire::Held { pieces, .. } = std::mem::take(&mut leg.wire) {
            for piece in pieces {
                self.arrives(engine_id, piece);
            }
        }
    }

    /// The shell is done with a leg. What was held back of its answer is late when it comes.
    pub(super) fn forget_leg(&mut self, engine_id: RequestId) -> Option<legs::Leg> {
        let leg = self.legs.remove(engine_id)?;
        if let Wire::Held { until, pieces } = &leg.wire {
            self.comes_late(&leg, *until, pieces);
        }
        Some(leg)
    }

    fn comes_late(&mut self, leg: &legs::Leg, until: Instant, pieces: &[Piece]) {
        let mut first = leg.arrived_tokens == 0;
        // The core hears first that the connection broke, where that is why.
        let until = until.max(self.now + BROKEN_CONNECTION_LATENCY * 2);
        for piece in pieces {
            let event = match *piece {
                Piece::Prefilled { cached_tokens } => Some(Event::PrefillDone {
                    leg: leg.id,
                    cached_tokens: Some(cached_tokens),
                }),
                Piece::Token => {
                    self.checkers.lost_tokens += 1;
                    std::mem::take(&mut first).then_some(Event::FirstToken { leg: leg.id })
                }
                Piece::Ended(usage) => Some(Event::Finished { leg: leg.id, usage }),
            };
            if let Some(event) = event {
                self.heap.plan(until, Rank::News, Wake::News(Box::new(event)));
            }
        }
    }
}
