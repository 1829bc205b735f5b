//! An agent's growing prompt: shared boilerplate, then blocks that only this agent has.

use crate::content::{Scope, local_id};

/// Boilerplate that many sessions begin with: the tools and the system prompt of one version of an agent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Boilerplate {
    /// Which: equal numbers are equal content in all sessions of a trace.
    pub number: u32,
    /// Its length.
    pub tokens: u32,
}

/// Hands out the content ids of one session and scope.
#[derive(Debug)]
pub(super) struct Ids {
    session: u32,
    scope: Scope,
    next: u64,
}

impl Ids {
    pub(super) const fn new(session: u32, scope: Scope) -> Self {
        Self {
            session,
            scope,
            next: 0,
        }
    }

    fn next(&mut self) -> u64 {
        let id = local_id(self.session, self.scope, self.next).expect("a session has fewer than 2^39 blocks");
        self.next += 1;
        id
    }
}

/// What an agent's next prompt is made of.
#[derive(Clone, Debug)]
pub(super) struct History {
    block_size: u32,
    /// The content ids of its whole blocks.
    pub content: Vec<u64>,
    /// Its length in tokens.
    pub tokens: u32,
}

impl History {
    /// A prompt that is boilerplate alone.
    pub(super) fn new(block_size: u32, boilerplate: Boilerplate) -> Self {
        // Below 2^40, where no session's own ids are.
        let first = (u64::from(boilerplate.number) + 1) << 20;
        let blocks = u64::from(boilerplate.tokens / block_size);
        Self {
            block_size,
            content: (first..first + blocks).collect(),
            tokens: boilerplate.tokens,
        }
    }

    /// Makes the prompt longer. Its partial last block becomes a whole one of new content.
    pub(super) fn append(&mut self, tokens: u32, ids: &mut Ids) {
        self.tokens += tokens;
        self.fill(ids);
    }

    /// Makes the prompt longer so that `uncached` tokens of it are in no whole block of the prompt before.
    pub(super) fn append_uncached(&mut self, uncached: u32, ids: &mut Ids) {
        let partial = self.tokens % self.block_size;
        self.append(uncached.saturating_sub(partial).max(1), ids);
    }

    /// Replaces everything after the first `kept` tokens (rounded down to whole blocks), up to `tokens` in all.
    pub(super) fn rewrite(&mut self, kept: u32, tokens: u32, ids: &mut Ids) {
        self.content.truncate((kept.min(tokens) / self.block_size) as usize);
        self.tokens = tokens;
        self.fill(ids);
    }

    fn fill(&mut self, ids: &mut Ids) {
        let blocks = (self.tokens / self.block_size) as usize;
        while self.content.len() < blocks {
            self.content.push(ids.next());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_shares_what_was_before_and_nothing_else() {
        let boilerplate = Boilerplate { number: 0, tokens: 20 };
        let mut ids = Ids::new(0, Scope::Root);
        let mut history = History::new(8, boilerplate);
        assert_eq!(history.content.len(), 2, "its partial block is nobody's yet");
        let check = |history: &History, tokens: u32, shared_with: &History, shared: usize| {
            assert_eq!(history.tokens, tokens);
            assert_eq!(history.content.len() as u32, tokens / 8);
            let same = history
                .content
                .iter()
                .zip(&shared_with.content)
                .take_while(|(a, b)| a == b)
                .count();
            assert_eq!(same, shared);
        };
        let start = history.clone();
        history.append(14, &mut ids);
        check(&history, 34, &start, 2);
        let longer = history.clone();
        history.append_uncached(10, &mut ids);
        check(&history, 42, &longer, 4);
        history.rewrite(27, 50, &mut ids);
        check(&history, 50, &longer, 3);
        assert!(
            !longer.content.contains(&history.content[3]),
            "what was rewritten is new"
        );
        let mut other = History::new(8, boilerplate);
        other.append(100, &mut Ids::new(1, Scope::Root));
        check(&other, 120, &longer, 2);
    }
}
