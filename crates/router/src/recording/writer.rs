//! Writing a recording, into memory and bit by bit.

use super::prompts::PromptTable;
use super::{
    CHECKPOINT_EVENTS, Checkpoint, KIND_CHECKPOINT, KIND_CONFIG, KIND_END, KIND_EVENT, MAGIC, VERSION, checksum,
};
use crate::action::Action;
use crate::config::RouterConfig;
use crate::event::{Event, Resume};
use homing_kv::Prompt;
use homing_units::Instant;
use serde::Serialize;
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

/// Writes a recording. Call [`Recorder::event`] before the event is handled, [`Recorder::action`] for each action that was
/// polled after it, and [`Recorder::take_bytes`] whenever it suits; [`Recorder::finish`] at the end.
#[derive(Debug)]
pub struct Recorder {
    bytes: Vec<u8>,
    prompts: PromptTable,
    digest: ActionDigest,
    events: u64,
}

/// A running digest of actions.
#[derive(Clone, Default)]
pub struct ActionDigest {
    hash: Xxh3,
    actions: u64,
    scratch: Vec<u8>,
}

impl Recorder {
    /// A recording of a router with this configuration.
    #[must_use]
    pub fn new(config: &RouterConfig) -> Self {
        let mut recorder = Self {
            bytes: [MAGIC, &VERSION.to_le_bytes()].concat(),
            prompts: PromptTable::default(),
            digest: ActionDigest::default(),
            events: 0,
        };
        let config = rmp_serde::to_vec_named(config).expect("a configuration is plain data");
        recorder.frame(KIND_CONFIG, &config);
        recorder
    }

    /// The router is about to be told this.
    pub fn event(&mut self, at: Instant, event: &Event) {
        if self.events > 0 && self.events.is_multiple_of(CHECKPOINT_EVENTS) {
            self.checkpoint(KIND_CHECKPOINT);
        }
        self.events += 1;
        let mut payload = at.as_nanos().to_le_bytes().to_vec();
        if let Some(prompt) = prompt_of(event) {
            payload.push(1);
            self.write_prompt(&mut payload, &prompt.blocks);
            write_event(&mut payload, &without_prompt(event));
        } else {
            payload.push(0);
            write_event(&mut payload, event);
        }
        self.frame(KIND_EVENT, &payload);
    }

    /// The router has asked for this.
    pub fn action(&mut self, action: &Action) {
        self.digest.add(action);
    }

    /// The recording is complete.
    pub fn finish(&mut self) {
        self.checkpoint(KIND_END);
    }

    /// Takes what was written since the last time.
    #[must_use]
    pub fn take_bytes(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    fn checkpoint(&mut self, kind: u8) {
        let Checkpoint {
            events,
            actions,
            digest,
        } = self.digest.checkpoint(self.events);
        let payload = [events, actions, digest].map(u64::to_le_bytes).concat();
        self.frame(kind, &payload);
    }

    fn write_prompt(&mut self, payload: &mut Vec<u8>, blocks: &Arc<[homing_kv::BlockHash]>) {
        let base = self.prompts.base_of(blocks);
        let new = &blocks[base.keep as usize..];
        let count = u32::try_from(new.len()).expect("a prompt has fewer than 2^32 blocks");
        payload.extend([base.back, base.keep, count].map(u32::to_le_bytes).concat());
        payload.extend(new.iter().flat_map(|hash| hash.0.to_le_bytes()));
        self.prompts.remember(Arc::clone(blocks), base);
    }

    fn frame(&mut self, kind: u8, payload: &[u8]) {
        let length = u32::try_from(payload.len()).expect("an event is smaller than 4 GiB");
        self.bytes.push(kind);
        self.bytes.extend(length.to_le_bytes());
        self.bytes.extend(checksum(kind, payload).to_le_bytes());
        self.bytes.extend(payload);
    }
}

impl ActionDigest {
    /// Takes one more action in.
    pub fn add(&mut self, action: &Action) {
        self.scratch.clear();
        action
            .serialize(&mut rmp_serde::Serializer::new(&mut self.scratch))
            .expect("an action is plain data, and memory takes it");
        self.hash.update(&(self.scratch.len() as u64).to_le_bytes());
        self.hash.update(&self.scratch);
        self.actions += 1;
    }

    /// Where it is, after so many events.
    #[must_use]
    pub fn checkpoint(&self, events: u64) -> Checkpoint {
        Checkpoint {
            events,
            actions: self.actions,
            digest: self.hash.digest(),
        }
    }
}

impl std::fmt::Debug for ActionDigest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ActionDigest")
            .field("actions", &self.actions)
            .finish_non_exhaustive()
    }
}

fn write_event(payload: &mut Vec<u8>, event: &Event) {
    event
        .serialize(&mut rmp_serde::Serializer::new(payload))
        .expect("an event is plain data, and memory takes it");
}

/// The prompt of an event, if it has one.
fn prompt_of(event: &Event) -> Option<&Prompt> {
    match event {
        Event::Turn(turn) => Some(&turn.prompt),
        Event::LegFailed(failure) => match &failure.resume {
            Resume::After { prompt, .. } => Some(prompt),
            Resume::Start | Resume::Impossible => None,
        },
        Event::WorkerJoined(_)
        | Event::WorkerLeft(_)
        | Event::Health(_)
        | Event::Load(_)
        | Event::Room(_)
        | Event::Sketches(_)
        | Event::Kv(_)
        | Event::KvRestarted { .. }
        | Event::ResyncDone { .. }
        | Event::PrefillDone { .. }
        | Event::FirstToken { .. }
        | Event::Finished { .. }
        | Event::ClientGone(_)
        | Event::Timeout => None,
    }
}

/// The event with its prompt's length but not its blocks.
fn without_prompt(event: &Event) -> Event {
    let mut event = event.clone();
    if let Some(prompt) = prompt_mut(&mut event) {
        prompt.blocks = [].into();
    }
    event
}

/// The prompt of an event, to be put back.
pub(super) fn prompt_mut(event: &mut Event) -> Option<&mut Prompt> {
    match event {
        Event::Turn(turn) => Some(&mut turn.prompt),
        Event::LegFailed(failure) => match &mut failure.resume {
            Resume::After { prompt, .. } => Some(prompt),
            Resume::Start | Resume::Impossible => None,
        },
        Event::WorkerJoined(_)
        | Event::WorkerLeft(_)
        | Event::Health(_)
        | Event::Load(_)
        | Event::Room(_)
        | Event::Sketches(_)
        | Event::Kv(_)
        | Event::KvRestarted { .. }
        | Event::ResyncDone { .. }
        | Event::PrefillDone { .. }
        | Event::FirstToken { .. }
        | Event::Finished { .. }
        | Event::ClientGone(_)
        | Event::Timeout => None,
    }
}
