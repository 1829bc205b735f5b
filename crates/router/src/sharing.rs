//! How much prompts share from the start: one with another, or with those of other families.
//!
//! Hashes are chained, so equality at one place means equality before it: a few looks tell what a walk would.

use homing_kv::{BlockHash, Prompt, ResidencyIndex};

/// How many blocks two prompts share from the start.
pub(crate) fn shared_blocks(left: &[BlockHash], right: &[BlockHash]) -> usize {
    let shorter = left.len().min(right.len());
    // Strangers share nothing, continuations all of the shorter one: look there first.
    if shorter > 0 && left[shorter - 1] == right[shorter - 1] {
        return shorter;
    }
    shared_beyond(left, right, 0)
}

/// The same where only more than `floor` matters: what they share, or else `floor`. One look is enough where it is not more, which is
/// what one prompt against those of a whole fleet mostly finds: they share what all do.
pub(crate) fn shared_beyond(left: &[BlockHash], right: &[BlockHash], floor: usize) -> usize {
    let (mut shared, mut open) = (floor, left.len().min(right.len()));
    if shared >= open || left[shared] != right[shared] {
        return floor;
    }
    shared += 1;
    while shared < open {
        let middle = usize::midpoint(shared, open);
        if left[middle] == right[middle] {
            shared = middle + 1;
        } else {
            open = middle;
        }
    }
    shared
}

/// Tokens at the prompt's beginning that other families show too.
pub(crate) fn shared_tokens(family: u64, prompt: &Prompt, index: &ResidencyIndex) -> u32 {
    let shared = index.shared_depth(family, &prompt.blocks) as u64;
    let whole = prompt.blocks.len().max(1) as u64;
    u32::try_from(u64::from(prompt.tokens) * shared / whole).map_or(prompt.tokens, |tokens| tokens.min(prompt.tokens))
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_kv::hash_blocks;

    #[test]
    fn it_is_what_a_walk_finds() {
        let prompts: Vec<Vec<BlockHash>> = [
            &[][..],
            &[1],
            &[1, 1, 1, 1, 1],
            &[1, 1, 1, 2, 2, 2],
            &[2, 1, 1],
            &[1; 40],
        ]
        .iter()
        .map(|tokens| hash_blocks(tokens, 1))
        .collect();
        for left in &prompts {
            for right in &prompts {
                let walked = left.iter().zip(right).take_while(|(left, right)| left == right).count();
                assert_eq!(shared_blocks(left, right), walked, "{left:?} and {right:?}");
                for floor in 0..50 {
                    assert_eq!(
                        shared_beyond(left, right, floor),
                        walked.max(floor),
                        "{left:?} and {right:?} beyond {floor}"
                    );
                }
            }
        }
    }
}
