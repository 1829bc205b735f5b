//! Turns begin and end.

use super::Simulation;
use crate::client::Client;
use homing_kv::{BlockHash, chain};
use homing_report::logs::RequestLine;
use homing_router::event::{Compared, Event, PromptId, SessionHint, Turn};
use homing_units::RequestId;
use homing_workload::{Trace, TurnRef};

impl Simulation<'_> {
    /// Sends the turns that are due; says whether there were any.
    pub(super) fn send_due_turns(&mut self) -> bool {
        let mut sent = false;
        while let Some(turn) = self.replay.poll_due(self.now) {
            self.send_turn(turn);
            sent = true;
        }
        sent
    }

    fn send_turn(&mut self, turn: TurnRef) {
        let request = RequestId(self.next_request);
        self.next_request += 1;
        let client = Client::new(self.trace, turn, self.now);
        let session = if self.config.named_sessions {
            self.session_key(turn)
        } else {
            SessionHint::Recognise
        };
        self.news.push_back(Event::Turn(Turn {
            request,
            session,
            prompt: client.prompt.clone(),
            compared: compared(self.trace, turn),
            max_output_tokens: client.wanted,
            priority: 0,
            kind: client.kind,
        }));
        self.clients.insert(request, client);
        if self.router.habits().errands.any() {
            self.errands.remember(request, turn);
        }
        self.unplanned.insert(request);
    }

    /// Each agent names itself: agents of a session share no history.
    fn session_key(&self, turn: TurnRef) -> SessionHint {
        let session = BlockHash(u128::from(turn.session) + 1);
        SessionHint::Explicit(chain(Some(session), &[self.trace.turn(turn).agent]).0)
    }

    /// The turn has ended, well or with an error of this kind.
    pub(super) fn end_turn(&mut self, request: RequestId, error: Option<&str>) {
        let Some(client) = self.clients.remove(&request) else {
            self.checkers.ended_twice(request);
            return;
        };
        self.unplanned.remove(&request);
        self.checkers.ended(&client, error.is_none());
        let record = client.record(self.trace, request, self.now, &self.names, error);
        self.logs.add(|| RequestLine::from(&record));
        self.records.push(record);
        self.replay.ended(self.now, client.turn);
    }
}

/// What a driver that sees the tokens would know, as far as the trace says it: an agent continues its last prompt unless
/// it has rewritten its history. A trace of single requests does not say which of them continues another.
fn compared(trace: &Trace, turn: TurnRef) -> Option<Compared> {
    if trace.session(turn).turns.len() == 1 {
        return None;
    }
    let id = |index: u32| PromptId(u64::from(turn.session) << 32 | u64::from(index));
    let (this, turns) = (trace.turn(turn), &trace.session(turn).turns);
    let last = (0..turn.turn)
        .rev()
        .find(|&index| turns[index as usize].agent == this.agent);
    let continued = last.filter(|&index| {
        let last = &turns[index as usize];
        last.prompt_tokens < this.prompt_tokens && this.content.starts_with(&last.content)
    });
    Some(Compared {
        prompt: id(turn.turn),
        continues: continued.map(id),
    })
}
