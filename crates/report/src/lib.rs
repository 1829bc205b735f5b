//! The run schema and its statistics.
//!
//! What a run left behind (one record a request, one a worker) becomes the document that `homing sim`, `homing replay`
//! and `homing compare` share, and the structural logs beside it. Pure, and without the router's and the engine's types:
//! who has those makes records of them.

pub mod compare;
pub mod html;
pub mod logs;
pub mod metric;
pub mod record;
pub mod run;
mod sessions;
pub mod stats;
mod summary;
mod workers;

pub use compare::{Comparison, Source, Verdict};
pub use metric::Better;
pub use record::{LeftOut, Path, RequestRecord, WorkerRecord};
pub use run::{Balance, ClassBounds, Distribution, Experiment, Report, Run, RunRecord, SCHEMA, Worker, WrongField};
pub use sessions::{AppendRate, RATES_LISTED_MAX, STARVED_NAMED_MAX, Sessions};
pub use summary::MetricSummary;
