//! The papers' experiments on paper hardware, and the document that sets their figures beside ours.
//!
//! An experiment declares its setups; they run, a few at a time; then it makes a section of what was observed: rows with
//! the paper's figure, ours with its interval, and a verdict that is computed. It measures nothing itself (that is
//! `homing-sim`) and knows no clock.

pub mod experiments;
pub mod observe;
pub mod paper;
pub mod planner;
pub mod recorded;
pub mod render;
pub mod rerun;
pub mod results;
pub mod sample;
pub mod section;
pub mod setup;
pub mod verdict;

pub use observe::Observed;
pub use paper::Paper;
pub use results::Results;
pub use sample::Sample;
pub use section::{Row, Section, Shared, Table};
pub use setup::{Arrivals, Setup};
pub use verdict::{Expect, Verdict};
