//! The clients: one for each turn in flight, with what it has received and what its record will say.
//!
//! An answer's tokens have no content; what matters are their times and the hashes of the blocks that they fill, which are
//! the turn's own, so that nothing is found in a cache because of them but a continuation of this very turn.

use crate::logs::path;
use homing_engine::api::Owner;
use homing_kv::{BlockHash, Prompt};
use homing_report::{Path, RequestRecord};
use homing_router::action::Decision;
use homing_router::event::{ClientKind, Resume};
use homing_units::{Duration, Instant, RequestId, SessionId};
use homing_workload::{Trace, TurnRef, answer_block, prompt_of};

/// A turn in flight.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub(crate) turn: TurnRef,
    pub(crate) sent: Instant,
    /// The turn's prompt, and what was received of the answer when the last attempt failed.
    pub(crate) prompt: Prompt,
    /// Tokens of the turn's prompt alone.
    own_tokens: u32,
    /// Whole blocks of the turn's prompt alone.
    own_blocks: u32,
    /// Tokens of the answer that are wanted in all.
    pub(crate) wanted: u32,
    /// Tokens received so far, over all attempts.
    pub(crate) received: u32,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    itl_max: Option<Duration>,
    path: Option<Path>,
    worker: Option<usize>,
    prefill_worker: Option<usize>,
    /// When its decode worker answered whether it takes it; nothing is sent before.
    pub(crate) admitted: Instant,
    /// Its session, where the decode worker may keep the KV.
    pub(crate) kept_session: Option<SessionId>,
    /// Whose request it is to the engines, as the router sees it.
    pub(crate) owner: Option<Owner>,
    pub(crate) kind: ClientKind,
    /// Prompt tokens that were computed for it, on whatever worker.
    pub(crate) computed_tokens: u32,
}

impl Client {
    pub(crate) fn new(trace: &Trace, turn: TurnRef, now: Instant) -> Self {
        let prompt = prompt_of(trace, turn);
        Self {
            turn,
            sent: now,
            own_tokens: prompt.tokens,
            own_blocks: u32::try_from(prompt.blocks.len()).expect("no more blocks than tokens"),
            prompt,
            wanted: trace.turn(turn).output_tokens,
            received: 0,
            first_token: None,
            last_token: None,
            itl_max: None,
            path: None,
            worker: None,
            prefill_worker: None,
            admitted: now,
            kept_session: None,
            owner: None,
            kind: kind(trace.turn(turn).agent),
            computed_tokens: 0,
        }
    }

    /// How it is served, from now on.
    pub(crate) fn decided(&mut self, decision: &Decision) {
        self.path = Some(path(decision.path));
        self.worker = Some(decision.decode.0 as usize);
        self.prefill_worker = decision.prefill.map(|worker| worker.0 as usize);
        self.kept_session = decision.keeps_kv.then_some(decision.session);
        self.owner = Some(Owner {
            session: decision.session,
            kind: self.kind.0,
        });
    }

    /// Whether its session moves from one decode worker to another, by the last plan.
    pub(crate) fn moves(&self) -> bool {
        self.path == Some(homing_report::Path::Migrate)
    }

    /// Where it is decoded (its index), by the last plan.
    pub(crate) const fn decode_node(&self) -> Option<usize> {
        self.worker
    }

    /// Tokens of the answer that the prompt of the next leg has in it.
    pub(crate) const fn sent_tokens(&self) -> u32 {
        self.prompt.tokens - self.own_tokens
    }

    /// A token of the answer has come.
    pub(crate) fn receive(&mut self, now: Instant) {
        self.received += 1;
        self.first_token.get_or_insert(now);
        if let Some(last) = self.last_token.replace(now) {
            self.itl_max = self.itl_max.max(Some(now - last));
        }
    }

    /// From where another attempt goes on. Its prompt is what the next dispatch sends.
    pub(crate) fn resume(&mut self, block_size: u32) -> Resume {
        if self.received == 0 {
            return Resume::Start;
        }
        let tokens = self.own_tokens + self.received;
        let mut blocks = self.prompt.blocks.to_vec();
        while blocks.len() < (tokens / block_size) as usize {
            let index = u32::try_from(blocks.len()).expect("no more blocks than tokens");
            blocks.push(self.answer_hash(blocks.last().copied(), index));
        }
        self.prompt = Prompt::new(blocks, tokens, block_size);
        Resume::After {
            prompt: self.prompt.clone(),
            max_output_tokens: self.wanted - self.received,
        }
    }

    /// The hash of a block that the answer fills: `index` is its place among the blocks of prompt and answer.
    pub(crate) fn answer_hash(&self, parent: Option<BlockHash>, index: u32) -> BlockHash {
        answer_block(parent, self.turn, index - self.own_blocks)
    }

    /// What is left of it.
    pub(crate) fn record(
        &self,
        trace: &Trace,
        request: RequestId,
        now: Instant,
        names: &[String],
        error: Option<&str>,
    ) -> RequestRecord {
        let (session, turn) = (trace.session(self.turn), trace.turn(self.turn));
        let before = &session.turns[..self.turn.turn as usize];
        let name = |worker: Option<usize>| worker.map(|worker| names[worker].clone());
        RequestRecord {
            request: request.0,
            session: self.turn.session,
            session_name: session.id.clone(),
            agent: turn.agent,
            turn: self.turn.turn,
            first_of_agent: before.iter().all(|earlier| earlier.agent != turn.agent),
            arrival: self.sent,
            first_token: self.first_token,
            end: now,
            itl_max: self.itl_max,
            prompt_tokens: turn.prompt_tokens,
            cached_tokens: turn.prompt_tokens.saturating_sub(self.computed_tokens),
            output_tokens: self.received,
            path: self.path,
            worker: name(self.worker),
            prefill_worker: name(self.prefill_worker),
            error: error.map(str::to_owned),
        }
    }
}

/// What a driver is told of the client: whether it works for another agent, as coding agents say in their headers.
const fn kind(agent: u32) -> ClientKind {
    ClientKind(if agent == 0 { 1 } else { 2 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_workload::{Session, Turn};

    const BLOCK: u32 = 16;

    fn client(prompt_tokens: u32) -> Client {
        let turn = Turn {
            agent: 0,
            prompt_tokens,
            output_tokens: 50,
            content: (0..u64::from(prompt_tokens / BLOCK)).collect(),
            after: Vec::new(),
            gap: Duration::ZERO,
        };
        let session = Session {
            id: "s".to_owned(),
            start: None,
            turns: vec![turn],
        };
        let trace = Trace {
            name: "t".to_owned(),
            block_size: BLOCK,
            sessions: vec![session],
        };
        Client::new(&trace, TurnRef { session: 0, turn: 0 }, Instant::ZERO)
    }

    #[test]
    fn an_attempt_goes_on_after_what_was_received() {
        let mut client = client(40);
        assert_eq!(client.resume(BLOCK), Resume::Start);
        let own = client.prompt.clone();
        (0..30).for_each(|second| client.receive(Instant::from_nanos(second)));
        // Tokens 41 to 70: the blocks that end at 48 and 64 are full.
        let third = client.answer_hash(own.tip(), 2);
        let fourth = client.answer_hash(Some(third), 3);
        let blocks = [&own.blocks[..], &[third, fourth]].concat();
        let prompt = Prompt::new(blocks, 70, BLOCK);
        assert_eq!(
            client.resume(BLOCK),
            Resume::After {
                prompt: prompt.clone(),
                max_output_tokens: 20
            }
        );
        assert_eq!(
            client.resume(BLOCK),
            Resume::After {
                prompt,
                max_output_tokens: 20
            },
            "asked again"
        );
        (0..10).for_each(|second| client.receive(Instant::from_nanos(second)));
        let Resume::After {
            prompt,
            max_output_tokens,
        } = client.resume(BLOCK)
        else {
            panic!("some was received")
        };
        assert_eq!(
            (prompt.tokens, prompt.blocks.len(), max_output_tokens),
            (80, 5, 10),
            "and a second time"
        );
    }
}
