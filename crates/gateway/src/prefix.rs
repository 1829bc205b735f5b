//! What clients do to their own prefixes: which message of a session changed, and how many cached tokens it cost.
//!
//! A prompt is cached as far as it repeats what was there before. An agent that moves one line at its beginning, such as
//! a date, computes everything behind it again at each turn, and nothing else shows that it does. `outline` is what is
//! remembered of a request, `breaks` compares two of them, `watch` remembers the last ones of each session, and
//! `canonical` undoes the known cases where that is wanted.

pub(crate) mod breaks;
pub(crate) mod canonical;
pub(crate) mod outline;
pub(crate) mod watch;
