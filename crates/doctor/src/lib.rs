//! Failure modes as first-class things: data with five fields, and detectors that find them in what a run left behind.
//!
//! Pure: texts in, findings out. Who has a folder reads its files and hands them in; what is printed is the caller's, too,
//! except that the words are here ([`text`]). The drills that make each mode happen are in `homing-drills`, and detectors
//! know nothing of them.

mod case;
mod detect;
pub mod engine_logs;
pub mod evidence;
pub mod finding;
pub mod mode;
pub mod text;

pub use detect::diagnose;
pub use evidence::{Evidence, EvidenceError};
pub use finding::{Cost, Finding, Level, Proof};
pub use mode::{Mode, ModeId, Severity};
