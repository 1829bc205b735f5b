//! No forward pass: steps take the time that an accelerator would take, tokens are a hash of what came before them.
//!
//! A token depends on the whole sequence so far and on nothing else, as a greedy model's would: every path gives the
//! same output, and a stream that is continued on another worker goes on as it would have. A block's payload is its
//! name, so a transfer moves real bytes that prove that the right blocks were moved; the time that the real bytes would
//! take is waited for on top.

use super::{Backend, BackendError, Chosen, Item, NamedBlock, StepOutcome};
use homing_engine::api::Step;
use homing_engine::{StepModel, StepShape};
use homing_kv::chain;
use homing_units::Duration;

/// Output tokens are `a` to `z` as bytes, so that their text is text.
const FIRST_TOKEN: u32 = b'a' as u32;
/// How many different tokens there are.
const TOKENS: u128 = 26;

/// A model of an accelerator's time.
#[derive(Debug)]
pub struct StepBackend {
    model: StepModel,
    block_size: usize,
}

impl StepBackend {
    /// Bytes of a block's payload: its name.
    pub const PAYLOAD_BYTES: usize = size_of::<u128>();

    /// A backend that takes this model's time.
    #[must_use]
    pub fn new(model: StepModel, block_size: u32) -> Self {
        Self {
            model,
            block_size: block_size as usize,
        }
    }

    fn next_token(&self, item: &Item<'_>) -> u32 {
        let whole = item.sequence.len() / self.block_size * self.block_size;
        let state = chain(item.tip, &item.sequence[whole..]);
        FIRST_TOKEN + u32::try_from(state.0 % TOKENS).expect("a remainder of 26 fits")
    }
}

impl Backend for StepBackend {
    fn run(&mut self, step: &Step, items: &[Item<'_>]) -> Result<StepOutcome, BackendError> {
        let choosing = items.iter().filter(|item| item.choice.is_some());
        let chosen = choosing
            .map(|item| Chosen {
                token: self.next_token(item),
                digest: None,
            })
            .collect();
        Ok(StepOutcome {
            chosen,
            wait: self.model.step_time(&StepShape::from(step)),
        })
    }

    fn payload_bytes(&self) -> usize {
        Self::PAYLOAD_BYTES
    }

    fn read_block(&self, block: &NamedBlock) -> Vec<u8> {
        block.name.0.to_le_bytes().to_vec()
    }

    fn write_block(&mut self, block: &NamedBlock, payload: &[u8]) -> Result<(), BackendError> {
        if payload.len() != Self::PAYLOAD_BYTES {
            return Err(BackendError::PayloadLength {
                got: payload.len(),
                want: Self::PAYLOAD_BYTES,
            });
        }
        if payload != block.name.0.to_le_bytes() {
            return Err(BackendError::PayloadName { want: block.name });
        }
        Ok(())
    }

    fn transfer_wait(&self, tokens: u32) -> Duration {
        self.model.transfer_time(self.model.kv_bytes(u64::from(tokens)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Choice;
    use crate::sampler::Sampling;
    use homing_kv::{BlockHash, BlockId};

    fn backend() -> StepBackend {
        StepBackend::new(StepModel::profile("h200-qwen3-30b").unwrap(), 4)
    }

    #[test]
    fn a_token_depends_on_all_that_came_before() {
        let next = |sequence: &[u32]| {
            let tip = homing_kv::hash_blocks(sequence, 4).last().copied();
            let choice = Some(Choice {
                sampling: &Sampling::GREEDY,
                draw: 0.0,
            });
            let item = Item {
                sequence,
                start: 0,
                count: sequence.len(),
                table: &[],
                tip,
                choice,
            };
            backend().run(&Step::default(), &[item]).unwrap().chosen[0].token
        };
        assert_eq!(next(&[1, 2, 3, 4, 5]), next(&[1, 2, 3, 4, 5]));
        let outputs: std::collections::BTreeSet<u32> = (0..100).map(|first| next(&[first, 2, 3, 4, 5])).collect();
        assert!(outputs.len() > 20, "{outputs:?}");
        assert!(outputs.iter().all(|token| (97..123).contains(token)), "{outputs:?}");
    }

    #[test]
    fn a_payload_is_checked_against_the_name() {
        let mut backend = backend();
        let named = |block, name| NamedBlock {
            block: BlockId(block),
            tokens: 4,
            name: BlockHash(name),
        };
        let payload = backend.read_block(&named(3, 7));
        assert!(backend.write_block(&named(9, 7), &payload).is_ok());
        assert!(backend.write_block(&named(9, 8), &payload).is_err());
        assert!(backend.write_block(&named(9, 7), &payload[1..]).is_err());
    }
}
