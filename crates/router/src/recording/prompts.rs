//! The table of recent prompts that both ends keep alike: a prompt is written as "so much of that one, then these".
//!
//! Both ends do the same steps in the same order, so no prompt needs a name. A prompt that goes on from most of another
//! takes its place, so that the table holds about one prompt a session.

use crate::sharing::shared_blocks;
use homing_kv::BlockHash;
use std::sync::Arc;

/// Prompts in the table; above, the one that was used longest ago is dropped.
const PROMPTS: usize = 512;

/// Blocks in the table, all prompts together; above, the same.
const BLOCKS: usize = 1 << 21;

/// Recent prompts, the latest last.
#[derive(Debug, Default)]
pub(super) struct PromptTable {
    prompts: Vec<Arc<[BlockHash]>>,
    blocks: usize,
}

/// A prompt as what it adds to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Base {
    /// Counts back from the end of the table, from 1; 0 is none.
    pub(super) back: u32,
    /// Blocks that are kept of it.
    pub(super) keep: u32,
}

impl PromptTable {
    /// The prompt that shares most with this one, the latest of equals.
    pub(super) fn base_of(&self, prompt: &[BlockHash]) -> Base {
        let mut best = Base { back: 0, keep: 0 };
        for (back, known) in (1..).zip(self.prompts.iter().rev()) {
            let keep = u32::try_from(shared_blocks(known, prompt)).expect("a prompt has fewer than 2^32 blocks");
            if keep > best.keep {
                best = Base { back, keep };
            }
        }
        best
    }

    /// The blocks that a prompt keeps of its base; `None` where there is no such base or it is shorter.
    pub(super) fn kept(&self, base: Base) -> Option<&[BlockHash]> {
        if base.back == 0 {
            return (base.keep == 0).then_some(&[]);
        }
        let index = self.prompts.len().checked_sub(base.back as usize)?;
        self.prompts[index].get(..base.keep as usize)
    }

    /// Takes a prompt in that was written or read.
    pub(super) fn remember(&mut self, prompt: Arc<[BlockHash]>, base: Base) {
        let replaced = self
            .prompts
            .len()
            .checked_sub(base.back as usize)
            .filter(|_| base.back > 0);
        if let Some(index) = replaced.filter(|index| base.keep as usize * 2 >= self.prompts[*index].len()) {
            self.blocks -= self.prompts.remove(index).len();
        }
        self.blocks += prompt.len();
        self.prompts.push(prompt);
        while self.prompts.len() > PROMPTS || self.blocks > BLOCKS && self.prompts.len() > 1 {
            self.blocks -= self.prompts.remove(0).len();
        }
    }
}
