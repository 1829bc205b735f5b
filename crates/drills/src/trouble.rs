//! What clients do to their own prompts: a line in the head that changes with every turn, and histories that get shorter.
//!
//! Done to the trace before it is sent, because it is the client's doing; where the fix is on, it is not done, as after the
//! gateway's canonicalisation.

use homing_workload::{Trace, Turn};

/// Content ids from here on are used by nothing else.
const OWN_IDS: u64 = 1 << 62;

/// Every turn has something else in this block of its prompt.
pub(crate) fn change_block(trace: &mut Trace, block: u32) {
    let mut next = OWN_IDS;
    for turn in trace.sessions.iter_mut().flat_map(|session| &mut session.turns) {
        let mut content: Vec<u64> = turn.content.iter().copied().collect();
        if let Some(id) = content.get_mut(block as usize) {
            *id = next;
            next += 1;
        }
        turn.content = content.into();
    }
}

/// Every so many turns of a session the last tenth of its history is dropped, as after an edit, and comes back with the next.
pub(crate) fn shorten(trace: &mut Trace, every: u32) {
    let block_size = trace.block_size;
    for session in &mut trace.sessions {
        for (index, turn) in (0_u32..).zip(&mut session.turns) {
            if index > 0 && index.is_multiple_of(every) {
                cut_back(turn, block_size);
            }
        }
    }
}

fn cut_back(turn: &mut Turn, block_size: u32) {
    let content: Vec<u64> = turn.content.iter().copied().collect();
    let kept = content.len() - content.len().div_ceil(10);
    if kept > 0 {
        turn.content = content[..kept].to_vec().into();
        turn.prompt_tokens =
            u32::try_from(kept).expect("fewer than before") * block_size + turn.prompt_tokens % block_size;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_workload::generate;

    #[test]
    fn a_changed_block_is_another_in_every_turn() {
        let before = generate("gen:swe52:sessions=2:seed=1", 1).expect("a generator");
        let mut after = before.clone();
        change_block(&mut after, 3);
        after.check_invariants();
        let fourth = |trace: &Trace, turn: usize| trace.sessions[0].turns[turn].content.iter().copied().nth(3);
        assert_eq!(fourth(&before, 0), fourth(&before, 1));
        assert_ne!(fourth(&after, 0), fourth(&after, 1));
        assert_eq!(
            before.sessions[0].turns[1].prompt_tokens,
            after.sessions[0].turns[1].prompt_tokens
        );
    }

    #[test]
    fn a_shortened_prompt_is_shorter_than_the_one_before() {
        let mut trace = generate("gen:swe52:sessions=2:seed=1", 1).expect("a generator");
        shorten(&mut trace, 4);
        trace.check_invariants();
        let turns = &trace.sessions[0].turns;
        assert!(turns[4].prompt_tokens < turns[3].prompt_tokens);
        assert!(turns[5].prompt_tokens > turns[4].prompt_tokens);
    }
}
