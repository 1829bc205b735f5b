//! The content ids of a prompt, shared between the turns of which one's prompt begins with the other's.
//!
//! An agent's prompt repeats nearly all of the one before, so that a copy for each turn would make memory grow with the
//! square of a session's length. A list is a length and the longest list that begins with it: what a session holds is its
//! last prompt, and one more for each rewrite of its history.

use crate::trace::Turn;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// A list of content ids that may be the beginning of another's. It is read like a slice.
#[derive(Clone, Default)]
pub struct ContentIds {
    ids: Arc<[u64]>,
    length: usize,
}

impl ContentIds {
    /// Ids that it keeps in memory, perhaps together with others.
    #[must_use]
    pub fn held(&self) -> usize {
        self.ids.len()
    }

    /// Whether both are beginnings of one list in memory.
    #[must_use]
    pub fn shares_memory(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.ids, &other.ids)
    }
}

impl Deref for ContentIds {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        &self.ids[..self.length]
    }
}

impl From<Vec<u64>> for ContentIds {
    fn from(ids: Vec<u64>) -> Self {
        Self {
            length: ids.len(),
            ids: ids.into(),
        }
    }
}

impl FromIterator<u64> for ContentIds {
    fn from_iter<I: IntoIterator<Item = u64>>(ids: I) -> Self {
        ids.into_iter().collect::<Vec<_>>().into()
    }
}

impl<'a> IntoIterator for &'a ContentIds {
    type Item = &'a u64;
    type IntoIter = std::slice::Iter<'a, u64>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl PartialEq for ContentIds {
    fn eq(&self, other: &Self) -> bool {
        (self.length == other.length && self.shares_memory(other)) || **self == **other
    }
}

impl Eq for ContentIds {}

impl fmt::Debug for ContentIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// Makes each turn's list the beginning of its agent's next one, where it is.
pub(crate) fn share(turns: &mut [Turn]) {
    let agents = turns
        .iter()
        .map(|turn| turn.agent)
        .max()
        .map_or(0, |last| last as usize + 1);
    // The list of the turn after, for each agent; the last turn's is its own.
    let mut after: Vec<Option<ContentIds>> = vec![None; agents];
    for turn in turns.iter_mut().rev() {
        let next = &mut after[turn.agent as usize];
        if let Some(next) = next.as_ref().filter(|next| next.starts_with(&turn.content)) {
            turn.content.ids = Arc::clone(&next.ids);
        }
        *next = Some(turn.content.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_units::Duration;
    use proptest::prelude::*;

    fn turn(agent: u32, content: Vec<u64>) -> Turn {
        Turn {
            agent,
            prompt_tokens: content.len() as u32 * 8 + 1,
            output_tokens: 1,
            content: content.into(),
            after: Vec::new(),
            gap: Duration::ZERO,
        }
    }

    proptest! {
        #[test]
        fn sharing_changes_no_list(lists in proptest::collection::vec((0_u32..3, proptest::collection::vec(0_u64..2, 0..5)), 0..12)) {
            let before: Vec<Turn> = lists.into_iter().map(|(agent, content)| turn(agent, content)).collect();
            let mut after = before.clone();
            share(&mut after);
            prop_assert_eq!(&after, &before);
            for agent in 0..3 {
                let own: Vec<&Turn> = after.iter().filter(|turn| turn.agent == agent).collect();
                for pair in own.windows(2) {
                    let begins = pair[1].content.starts_with(&pair[0].content);
                    prop_assert_eq!(pair[0].content.shares_memory(&pair[1].content), begins);
                }
            }
        }
    }

    #[test]
    fn a_session_that_only_grows_holds_its_last_list_alone() {
        let mut turns: Vec<Turn> = (0..100).map(|length| turn(0, (0..length).collect())).collect();
        share(&mut turns);
        assert!(turns.iter().all(|turn| turn.content.held() == 99));
        assert!(
            turns
                .windows(2)
                .all(|pair| pair[0].content.shares_memory(&pair[1].content))
        );
        assert_eq!(turns[3].content[..], [0, 1, 2]);
    }
}
