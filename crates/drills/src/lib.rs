//! The drills: for each failure mode a scenario on the deterministic simulator, with the fix off, with the papers'
//! mitigation, and with the fix on.
//!
//! A scenario is data (`scenarios/*.toml`): a load, the settings, and what must hold of their figures. The doctor looks at
//! what each run leaves behind, as it would at a folder from anywhere: it must name the mode with the fix off, and nothing
//! above information with it on. Nothing here models anything; a mechanism is an option of the simulator or of a policy.

pub mod document;
pub mod drill;
mod figures;
mod run;
pub mod scenario;
mod statement;
mod trouble;

pub use drill::{Drill, DrillError, SettingResult, StatementResult, drill};
pub use run::findings;
pub use scenario::{Load, Scenario, Setting, scenario, scenarios};
