//! What a plan costs, term by term, in seconds.

use crate::policies::PolicyError;
use crate::policies::spec::Parameters;
use std::fmt;

/// The terms of a plan's cost, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Until the first token.
    pub first_s: f64,
    /// From the first token to the last.
    pub own_s: f64,
    /// What those lose who decode there.
    pub others_s: f64,
    /// What those lose who come there while it is prefilled.
    pub behind_s: f64,
    /// Bringing back what is displaced.
    pub evict_s: f64,
    /// The session's coming turns.
    pub future_s: f64,
}

impl Cost {
    /// What this turn costs, without those that come.
    #[must_use]
    pub fn now_s(&self) -> f64 {
        self.total_s() - self.future_s
    }

    /// The sum.
    #[must_use]
    pub fn total_s(&self) -> f64 {
        self.first_s + self.own_s + self.others_s + self.behind_s + self.evict_s + self.future_s
    }
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "first {:.3} + own {:.3} + others {:.3} + behind {:.3} + evict {:.3} + future {:.3} s",
            self.first_s, self.own_s, self.others_s, self.behind_s, self.evict_s, self.future_s
        )
    }
}

/// Which terms count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Generating the answer.
    pub own: bool,
    /// What others lose.
    pub others: bool,
    /// What those lose who come next.
    pub behind: bool,
    /// What is displaced.
    pub evict: bool,
    /// Coming turns.
    pub future: bool,
}

impl Default for Terms {
    fn default() -> Self {
        Self {
            own: true,
            others: true,
            behind: true,
            evict: true,
            future: true,
        }
    }
}

impl Terms {
    /// The parameter `without`: the one term that does not count.
    pub(super) fn parse(parameters: &mut Parameters<'_>) -> Result<Self, PolicyError> {
        let names = ["nothing", "own", "others", "behind", "evict", "future"];
        let expected = "`nothing`, `own`, `others`, `behind`, `evict` or `future`";
        let without = parameters.choice("without", expected, &names)?;
        Ok(Self {
            own: without != "own",
            others: without != "others",
            behind: without != "behind",
            evict: without != "evict",
            future: without != "future",
        })
    }
}
