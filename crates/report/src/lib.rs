//! The run schema and its statistics.
//!
//! What a run left behind (one record a request, one a worker) becomes the document that `homing sim`, `homing replay`
//! and `homing compare` share, and the structural logs beside it. Pure, and without the router's and the engine's types:
//! who has those makes records of them.

pub mod compare;
pub mod logs;
pub mod metric;
pub mod record;
pub mod run;
mod sessions;
pub mod stats;
mod summary;

pub use compare::{Comparison, Source};
pub use record::{LeftOut, Path, RequestRecord, WorkerRecord};
pub use run::{ClassBounds, Distribution, Experiment, Report, Run, RunRecord, SCHEMA};
pub use sessions::Sessions;
pub use summary::MetricSummary;
