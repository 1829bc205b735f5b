//! Trace formats, session DAGs, generators, and the causal order in which turns are sent.
//!
//! Pure: files are opened by the caller, formats are read from bytes, and the replay is a state machine that is told
//! when a turn has ended and asked which turns are due.

pub mod trace;
