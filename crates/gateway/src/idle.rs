//! What is remembered of sessions beside the core goes when they do: prompts' tokens, their tails, where they broke.
//!
//! None of these memories has a clock. Each gives a mark of its order of uses; a few times while a session may be idle the marks
//! of all are taken, and what was not used since the oldest of them is forgotten: after the idle time at the earliest, and
//! a quarter of it later at the latest. So a router that lives for months remembers who is there, not who has been; the
//! bounds of the memories themselves are for those who are all there at once.

use crate::prefix::watch::Watch;
use crate::proxy::errands::prompts::Prompts;
use crate::shell::Shell;
use crate::tails::Tails;
use crate::tokenise::Words;
use homing_model::PromptMark;
use homing_units::RequestId;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Times that the memories are looked through while a session may be idle.
const STEPS: usize = 4;

/// The shortest time between two such looks.
const STEP_MIN: Duration = Duration::from_millis(100);

/// The memories.
pub(crate) struct Memories<'a> {
    pub(crate) words: Option<&'a Words>,
    pub(crate) tails: &'a Tails,
    pub(crate) prefixes: &'a Watch,
    /// The prompts that errands may carry.
    pub(crate) carried: &'a Prompts,
}

/// A moment in the order of uses of each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Marks {
    words: Option<PromptMark>,
    tails: u64,
    prefixes: u64,
    carried: Option<RequestId>,
}

/// How much they hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Held {
    /// Bytes of prompts' texts, tokens and hashes.
    pub(crate) prompt_bytes: usize,
    /// Prompts whose last tokens are known.
    pub(crate) tails: usize,
    /// Sessions whose last prompts are outlined.
    pub(crate) sessions: usize,
    /// Prompts that errands may carry.
    pub(crate) carried: usize,
}

impl Memories<'_> {
    /// Now.
    pub(crate) fn mark(&self) -> Marks {
        Marks {
            words: self.words.map(|words| words.memory.mark()),
            tails: self.tails.mark(),
            prefixes: self.prefixes.mark(),
            carried: self.carried.mark(),
        }
    }

    /// Forgets what was not used since.
    pub(crate) fn forget_unused_since(&self, marks: Marks) {
        if let (Some(words), Some(mark)) = (self.words, marks.words) {
            words.memory.forget_unused_since(mark);
        }
        self.tails.forget_unused_since(marks.tails);
        self.prefixes.forget_unused_since(marks.prefixes);
        if let Some(mark) = marks.carried {
            self.carried.forget_up_to(mark);
        }
    }

    pub(crate) fn held(&self) -> Held {
        Held {
            prompt_bytes: self.words.map_or(0, |words| words.memory.bytes()),
            tails: self.tails.len(),
            sessions: self.prefixes.len(),
            carried: self.carried.len(),
        }
    }
}

/// Forgets what no turn has used for as long as a session may be idle, for as long as it runs.
pub(crate) async fn forget_idle(shell: Arc<Shell>, idle: Duration) {
    let step = (idle / STEPS as u32).max(STEP_MIN);
    let mut marks = VecDeque::with_capacity(STEPS);
    loop {
        tokio::time::sleep(step).await;
        let words = shell.tokeniser.words();
        let memories = shell.memories(words.as_deref());
        if marks.len() == STEPS
            && let Some(long_ago) = marks.pop_front()
        {
            memories.forget_unused_since(long_ago);
            tracing::debug!(held = ?memories.held(), "what is remembered of prompts");
        }
        marks.push_back(memories.mark());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefix::outline::Fresh;
    use crate::prefix::watch::{Origin, Turned};
    use crate::tokenise::{Encoding, Text, Tokeniser};
    use homing_model::Vocabulary;
    use homing_units::SessionId;

    /// Sessions that come, take a few turns and never come again leave nothing: after thousands of them as much is held as
    /// after the first few.
    #[test]
    fn what_is_held_is_a_matter_of_who_is_there_and_not_of_who_has_been() {
        const THERE: u64 = 8;
        let tokeniser = Tokeniser::of_vocabulary(Arc::new(Vocabulary::tiny()), 16, 1 << 24);
        let (words, tails, prefixes) = (tokeniser.words().unwrap(), tokeniser.tails(), Watch::default());
        let carried = Prompts::new(false);
        let memories = Memories {
            words: Some(&words),
            tails: &tails,
            prefixes: &prefixes,
            carried: &carried,
        };
        let turn = |session: u64, turn: usize| {
            let text = format!(
                "<|im_start|>session {session:06} {}<|im_end|>",
                "says much ".repeat(50 * turn)
            );
            let text = Text::Prompt {
                text,
                add_special_tokens: false,
            };
            let Encoding::Done(encoded) = words.encode(&text, None, usize::MAX).unwrap() else {
                panic!("a text is encoded")
            };
            tails.compare(&encoded.tokens, &encoded.prompt, 16, 0);
            let turned = Turned {
                origin: Origin::default(),
                fresh: &Fresh::default(),
                prompt: &encoded.prompt,
                block_size: 16,
            };
            prefixes.turn(SessionId(session), &turned);
        };
        let mut held = Vec::new();
        for generation in 0..300 {
            let mark = memories.mark();
            for session in generation * THERE..(generation + 1) * THERE {
                (1..=3).for_each(|index| turn(session, index));
            }
            memories.forget_unused_since(mark);
            held.push(memories.held());
        }
        assert_eq!(held[0].sessions, THERE as usize);
        assert!(
            held[0].tails >= THERE as usize && held[0].prompt_bytes > 0,
            "{:?}",
            held[0]
        );
        assert!(held.iter().all(|later| *later == held[0]), "{held:?}");
        memories.forget_unused_since(memories.mark());
        assert_eq!(memories.held(), Held::default());
    }
}
