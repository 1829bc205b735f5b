//! Base content: beginnings of prompts that many families own. The most worth are kept, by owners times tokens, each by the
//! session that showed it last; its blocks are those of that session's prompt, so that nothing of it is kept twice.

use homing_kv::BlockHash;
use homing_units::SessionId;
use std::collections::BTreeMap;

/// Beginnings that are kept; above, the one worth least is dropped.
const KEPT: usize = 8;

/// What is known of base content.
#[derive(Debug, Default)]
pub(crate) struct BaseContent {
    by_tip: BTreeMap<BlockHash, Beginning>,
}

/// A beginning that many families own, by the hash of its last block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Beginning {
    /// Whose prompt began with it last.
    pub(crate) session: SessionId,
    /// Whole blocks of it.
    pub(crate) blocks: u32,
    /// Families that own it, as far as they are counted.
    pub(crate) owners: u32,
}

impl Beginning {
    const fn worth(self) -> u64 {
        self.blocks as u64 * self.owners as u64
    }
}

impl BaseContent {
    /// A prompt began with it.
    pub(crate) fn shown(&mut self, tip: BlockHash, beginning: Beginning) {
        self.by_tip.insert(tip, beginning);
        if self.by_tip.len() > KEPT {
            let least = self
                .by_tip
                .iter()
                .min_by_key(|(tip, beginning)| (beginning.worth(), **tip));
            let least = *least.expect("what is over the bound is not empty").0;
            self.by_tip.remove(&least);
        }
    }

    /// It cannot be found any more.
    pub(crate) fn forget(&mut self, tip: BlockHash) {
        self.by_tip.remove(&tip);
    }

    /// All of it, what is worth most first.
    pub(crate) fn by_worth(&self) -> Vec<(BlockHash, Beginning)> {
        let mut all: Vec<_> = self.by_tip.iter().map(|(tip, beginning)| (*tip, *beginning)).collect();
        all.sort_by_key(|(tip, beginning)| (std::cmp::Reverse(beginning.worth()), *tip));
        all
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_tip.is_empty()
    }

    pub(crate) fn check_invariants(&self) {
        assert!(self.by_tip.len() <= KEPT, "base content is bounded");
        assert!(self.by_tip.values().all(|beginning| beginning.blocks > 0), "{self:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_worth_most_is_kept_and_comes_first() {
        let mut base = BaseContent::default();
        let beginning = |session, blocks, owners| Beginning {
            session: SessionId(session),
            blocks,
            owners,
        };
        for (tip, blocks) in (1..).zip([10, 70, 30, 20, 50, 60, 40, 80, 25]) {
            base.shown(BlockHash(tip), beginning(0, blocks, 5));
        }
        base.check_invariants();
        let kept = |base: &BaseContent| base.by_worth().iter().map(|(tip, _)| tip.0).collect::<Vec<_>>();
        assert_eq!(kept(&base), [8, 2, 6, 5, 7, 3, 9, 4], "the one of 10 blocks gave way");
        base.shown(BlockHash(9), beginning(7, 25, 20));
        base.forget(BlockHash(6));
        assert_eq!(kept(&base), [9, 8, 2, 5, 7, 3, 4], "owners count too");
        assert_eq!(base.by_worth()[0].1.session, SessionId(7));
    }
}
