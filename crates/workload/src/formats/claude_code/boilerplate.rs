//! Which sessions begin alike: the tools and the system prompt of one version of an agent.
//!
//! Ids are local to a session, so that a trace does not say what two sessions share; it says how many tokens of tools and
//! of system prompt a session begins with. The rule follows how such prompts are put together and how KV is shared, by
//! prefix: the tools come first, and sessions of equal `tool_tokens` have equal tools; the system prompt comes next, and
//! sessions of equal `tool_tokens` and equal `system_tokens` have it equal too. A block over the border of the two belongs
//! to the system prompt. Equal lengths beyond different tools share nothing.
//!
//! That equal lengths mean equal text is assumed. What recorded sessions say for it (180 of them): 53 change something
//! within their boilerplate while they run, and where they do is seen in their ids. Of 69 such places 17 are the first or
//! second block after `tool_tokens`, and none is where the border would be if the system prompt came first. Two sessions
//! of equal tools and unequal system prompts have such a place in common in 26 of 41 pairs, those of equal figures in 10 of
//! 13, and those of unequal tools in 35 of 1,324. Sub-agents of equal figures, whose ids can be compared within their
//! session, begin with equal blocks beyond the whole of their boilerplate, in all pairs.
//!
//! Not shared, though part of it must be equal: system prompts of unequal length (a version's own text, and only then the
//! machine and the folder), and tools of unequal length (the agent's own before added ones), because nothing says how far.
//! What is found in another session's cache is rather more than this than less.

use std::collections::BTreeMap;

/// The parts of boilerplate seen so far.
#[derive(Debug)]
pub(super) struct Versions {
    /// A number for each: tools by their length, and a system prompt by its length after them.
    parts: BTreeMap<(u32, Option<u32>), u32>,
}

/// The blocks of a session's boilerplate: those of its tools, and after them those of its system prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Boilerplate {
    tools: Part,
    system: Part,
}

/// Blocks that end at `end`, and the number of what they hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Part {
    end: u32,
    number: u32,
}

/// Ids below 2^39 are nobody's own: so many parts of so many blocks have room there.
const BLOCKS_MAX: u32 = 1 << 20;
const PARTS_MAX: u32 = (1 << 19) - 1;

impl Versions {
    pub(super) const fn new() -> Self {
        Self { parts: BTreeMap::new() }
    }

    /// The boilerplate of a session with these figures; nothing where it fills no block.
    pub(super) fn of(&mut self, tools: u32, system: u32, block_size: u32) -> Option<Boilerplate> {
        let blocks = |tokens: u32| (tokens / block_size).min(BLOCKS_MAX);
        let tool_blocks = blocks(tools);
        let tools_part = self.part((tools, None), 0, tool_blocks)?;
        let system_part = self.part((tools, Some(system)), tool_blocks, blocks(tools.saturating_add(system)));
        let boilerplate = Boilerplate {
            tools: tools_part,
            system: system_part.unwrap_or(tools_part),
        };
        (boilerplate.blocks() > 0).then_some(boilerplate)
    }

    /// The part from block `from` to `end`; nothing where there are more parts than ids for them: those share nothing.
    fn part(&mut self, key: (u32, Option<u32>), from: u32, end: u32) -> Option<Part> {
        if from == end {
            return Some(Part { end, number: 0 });
        }
        let next = self.parts.len() as u32;
        let number = match self.parts.get(&key) {
            Some(&number) => number,
            None if next == PARTS_MAX => return None,
            None => *self.parts.entry(key).or_insert(next),
        };
        Some(Part { end, number })
    }
}

impl Boilerplate {
    /// Whole blocks.
    pub(super) const fn blocks(self) -> usize {
        self.system.end as usize
    }

    /// The content id of one of them.
    pub(super) fn id(self, block: usize) -> u64 {
        let part = if block < self.tools.end as usize {
            self.tools
        } else {
            self.system
        };
        ((u64::from(part.number) + 1) << 20) | block as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many blocks of 4 tokens, and how many leading ones two versions share.
    fn check(one: (u32, u32), other: (u32, u32), blocks: (usize, usize), shared: usize) {
        let mut versions = Versions::new();
        let mut ids = |(tools, system)| -> Vec<u64> {
            let found = versions.of(tools, system, 4);
            found.map_or_else(Vec::new, |found| {
                (0..found.blocks()).map(|block| found.id(block)).collect()
            })
        };
        let (one_ids, other_ids) = (ids(one), ids(other));
        assert_eq!(
            (one_ids.len(), other_ids.len()),
            blocks,
            "blocks of {one:?} and {other:?}"
        );
        let same = one_ids.iter().zip(&other_ids).take_while(|(one, other)| one == other);
        assert_eq!(same.count(), shared, "{one:?} and {other:?}");
        let common = one_ids.iter().filter(|id| other_ids.contains(id)).count();
        assert_eq!(
            common, shared,
            "nothing is equal after what differs: {one:?} and {other:?}"
        );
    }

    #[test]
    fn tools_are_shared_alone_and_the_system_prompt_only_after_equal_tools() {
        check((8, 8), (8, 8), (4, 4), 4);
        check((8, 8), (8, 9), (4, 4), 2);
        check((8, 8), (8, 0), (4, 2), 2);
        check((8, 8), (12, 8), (4, 5), 0);
        check((8, 8), (12, 4), (4, 4), 0);
        // A block over the border has tools and system prompt in it.
        check((7, 9), (7, 9), (4, 4), 4);
        check((7, 9), (7, 13), (4, 5), 1);
        check((3, 5), (3, 6), (2, 2), 0);
        check((0, 8), (0, 8), (2, 2), 2);
        check((0, 8), (0, 12), (2, 3), 0);
        check((0, 3), (2, 1), (0, 0), 0);
        check((8, 3), (8, 2), (2, 2), 2);
    }

    #[test]
    fn figures_without_bound_have_ids_of_their_own_still() {
        let mut versions = Versions::new();
        let greatest = versions.of(u32::MAX, u32::MAX, 1).expect("many blocks");
        assert_eq!(greatest.blocks(), BLOCKS_MAX as usize);
        assert!(greatest.id(greatest.blocks() - 1) < 1 << 39);
        for tools in 1..PARTS_MAX {
            assert!(versions.of(tools, 0, 1).is_some(), "{tools}");
        }
        let beyond = versions.of(PARTS_MAX, 0, 1);
        assert_eq!(beyond, None, "no ids are left");
        let tools_alone = versions.of(5, 5, 1).expect("tools that are known");
        assert_eq!(tools_alone.blocks(), 5, "a system prompt without ids is not shared");
        assert!(versions.of(PARTS_MAX - 1, 0, 1).expect("the last").id(0) < 1 << 39);
    }
}
