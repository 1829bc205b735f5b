//! A real forward pass over real keys and values.

use super::{Backend, BackendError, Chosen, Item, NamedBlock, StepOutcome};
use crate::sampler::choose;
use homing_engine::api::Step;
use homing_model::{Chunk, KvStore, Model};
use homing_units::Duration;
use std::sync::Arc;

/// A model and the storage of its blocks.
pub struct ModelBackend {
    model: Arc<Model>,
    store: KvStore,
    /// Whether chosen tokens come with a digest of their logits.
    digests: bool,
}

impl ModelBackend {
    /// A backend with `blocks` blocks of `block_size` tokens. Tests ask for `digests` of the logits.
    #[must_use]
    pub fn new(model: Arc<Model>, block_size: u32, blocks: u32, digests: bool) -> Self {
        Self {
            store: KvStore::new(model.config(), block_size, blocks),
            model,
            digests,
        }
    }
}

impl Backend for ModelBackend {
    fn run(&mut self, _step: &Step, items: &[Item<'_>]) -> Result<StepOutcome, BackendError> {
        let chunks: Vec<Chunk<'_>> = items.iter().map(chunk).collect();
        let rows = self
            .model
            .forward(&mut self.store, &chunks)
            .map_err(|error| BackendError::Forward(error.to_string()))?;
        let chosen = items.iter().zip(rows).filter_map(|(item, logits)| {
            let (choice, logits) = (item.choice?, logits?);
            let digest = self.digests.then(|| digest(&logits));
            Some(Chosen {
                token: choose(&logits, choice.sampling, choice.draw),
                digest,
            })
        });
        Ok(StepOutcome {
            chosen: chosen.collect(),
            wait: Duration::ZERO,
        })
    }

    fn payload_bytes(&self) -> usize {
        self.store.block_bytes()
    }

    fn read_block(&self, block: &NamedBlock) -> Vec<u8> {
        let mut payload = Vec::new();
        let read = self.store.read_block(block.block, block.tokens, &mut payload);
        read.expect("the engine hands out blocks of the pool only, and they hold a whole block's tokens at most");
        // What an earlier owner left in the rest of a partial block stays here.
        payload.resize(self.payload_bytes(), 0);
        payload
    }

    fn write_block(&mut self, block: &NamedBlock, payload: &[u8]) -> Result<(), BackendError> {
        // Bytes do not say which tokens they belong to: the two workers have agreed on the prompt's hash before.
        let wrong = BackendError::PayloadLength {
            got: payload.len(),
            want: self.payload_bytes(),
        };
        if payload.len() != self.payload_bytes() {
            return Err(wrong);
        }
        let used = block.tokens as usize * self.store.token_bytes();
        self.store.write_block(block.block, &payload[..used]).map_err(|_| wrong)
    }

    fn transfer_wait(&self, _tokens: u32) -> Duration {
        Duration::ZERO
    }
}

fn chunk<'a>(item: &Item<'a>) -> Chunk<'a> {
    Chunk {
        tokens: &item.sequence[item.start..item.start + item.count],
        start: u32::try_from(item.start).expect("a sequence is shorter than 2^32 tokens"),
        blocks: item.table,
        logits: item.choice.is_some(),
    }
}

/// A digest of the bits of a row of logits.
fn digest(logits: &[f32]) -> u64 {
    let mut hasher = blake3::Hasher::new();
    for value in logits {
        hasher.update(&value.to_bits().to_le_bytes());
    }
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    u64::from_le_bytes(bytes)
}
