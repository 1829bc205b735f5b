//! Trace formats, session DAGs, generators, and the causal order in which turns are sent.
//!
//! Pure: files are opened by the caller, formats are read from bytes, and the replay is a state machine that is told
//! when a turn has ended and asked which turns are due.

pub mod content;
mod draw;
pub mod formats;
pub mod generate;
mod ids;
pub mod replay;
pub mod stats;
pub mod trace;
pub mod write;

pub use content::{answer_block, prompt_of, shrunk, tokens_of, words_of};
pub use formats::{ReadOptions, TraceError, TraceProblem, read_trace, read_trace_with};
pub use generate::{GeneratorError, generate, is_generator};
pub use ids::ContentIds;
pub use replay::{LeftOut, Replay, ReplayConfig, ReplayError, Start};
pub use stats::{Quantiles, TraceStats, stats};
pub use trace::{Session, Trace, Turn, TurnRef};
pub use write::{OutputFormat, losses, write_trace};
