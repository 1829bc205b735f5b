//! What can go wrong on purpose.

use homing_units::WorkerId;

/// One fault. It happens at the instant that the schedule names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The worker's process dies: connections break, its cache and everything that it held are gone.
    WorkerCrash(WorkerId),
    /// The worker's process is started again: a new boot epoch and an empty cache. Nothing happens if it is up.
    WorkerRestart(WorkerId),
}

impl Fault {
    /// The worker that it happens to.
    #[must_use]
    pub const fn worker(self) -> WorkerId {
        match self {
            Self::WorkerCrash(worker) | Self::WorkerRestart(worker) => worker,
        }
    }
}
