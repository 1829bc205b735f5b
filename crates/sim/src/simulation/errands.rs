//! Errands: KV that the router has carried while no client waits for it.
//!
//! Whoever drives engines needs a prompt to send: here it is that of the turn which the errand names, as the trace has it. Nobody
//! receives the one token of a leg, and nothing is on any client's record.

use super::Simulation;
use crate::client::Client;
use homing_router::action::Errand;
use homing_units::RequestId;
use homing_workload::TurnRef;
use std::collections::BTreeMap;

/// Errands under way, and the turns that they may be for.
#[derive(Debug, Default)]
pub(super) struct Errands {
    /// Which turn a request was; empty where the policy runs no errands.
    turns: BTreeMap<RequestId, TurnRef>,
    under_way: BTreeMap<RequestId, UnderWay>,
}

/// An errand under way.
#[derive(Debug)]
struct UnderWay {
    /// As if the turn's client asked again.
    asker: Client,
    moves: bool,
}

impl Errands {
    /// A turn may be named by an errand from now on.
    pub(super) fn remember(&mut self, request: RequestId, turn: TurnRef) {
        self.turns.insert(request, turn);
    }

    /// Who seems to ask for what an errand's legs do.
    pub(super) fn asker(&self, errand: RequestId) -> Option<&Client> {
        self.under_way.get(&errand).map(|under_way| &under_way.asker)
    }

    /// Whether it moves a session's KV, so that the source lets go of it.
    pub(super) fn moves(&self, errand: RequestId) -> bool {
        self.under_way.get(&errand).is_some_and(|under_way| under_way.moves)
    }

    /// It is over.
    pub(super) fn end(&mut self, errand: RequestId) {
        self.under_way.remove(&errand);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }
}

impl Simulation<'_> {
    /// The client of a request, or who seems to be that of an errand.
    pub(super) fn asker(&self, request: RequestId) -> Option<&Client> {
        self.clients.get(&request).or_else(|| self.errands.asker(request))
    }

    /// An errand begins.
    pub(super) fn begin_errand(&mut self, errand: &Errand) {
        let Some(turn) = self.errands.turns.get(&errand.of).copied() else {
            let found = format!("{errand:?}");
            self.checkers
                .note("that an errand is for a turn that was sent", self.now, found);
            return;
        };
        let asker = Client::new(self.trace, turn, self.now);
        let moves = errand.moves();
        self.errands.under_way.insert(errand.errand, UnderWay { asker, moves });
    }
}
