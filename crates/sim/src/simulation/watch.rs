//! What is logged of workers' states and of what the router takes them to do and to hold.
//!
//! Both are evidence for whoever asks later why requests failed: a worker that died, bookings without requests, an index that
//! claims more than a pool can hold. Nothing here changes anything.

use super::Simulation;
use homing_report::logs::{BookedLine, RouterSampleLine, WorkerChange, WorkerEventLine, seconds};
use homing_router::WorkerStatus;
use homing_router::action::WorkerState;
use homing_units::WorkerId;

impl Simulation<'_> {
    /// A worker's process has died or was started again.
    pub(super) fn log_worker(&mut self, worker: WorkerId, change: WorkerChange, reason: Option<String>) {
        self.logs.add(|| WorkerEventLine {
            t: seconds(self.now),
            worker: self.names[worker.0 as usize].clone(),
            change,
            reason,
        });
    }

    /// The router thinks differently of a worker.
    pub(super) fn log_state(&mut self, worker: WorkerId, state: WorkerState) {
        let change = match state {
            WorkerState::Exact => WorkerChange::Exact,
            WorkerState::Degraded => WorkerChange::Degraded,
            WorkerState::Suspect => WorkerChange::Suspect,
            WorkerState::Dead => WorkerChange::Dead,
        };
        self.log_worker(worker, change, None);
    }

    /// What the router has booked; a sample that would say the same as the last one is left out.
    pub(super) fn sample_router(&mut self) {
        if !self.logs.are_wanted() {
            return;
        }
        let workers = self.router.view_workers().into_iter().map(|status| self.booked(status));
        let line = RouterSampleLine {
            t: seconds(self.now),
            queue_length: u32::try_from(self.router.queue_length()).unwrap_or(u32::MAX),
            sessions: self.router.session_count() as u64,
            workers: workers.collect(),
        };
        let said = (line.queue_length, line.sessions, line.workers.clone());
        if self.router_sampled.as_ref() != Some(&said) {
            self.router_sampled = Some(said);
            self.logs.add(|| line);
        }
    }

    fn booked(&self, status: WorkerStatus) -> BookedLine {
        BookedLine {
            worker: status.name,
            requests: status.in_flight.requests,
            seeds: status.in_flight.seeds,
            exports: status.in_flight.exports,
            reserved_tokens: status.in_flight.reserved_tokens,
            indexed_tokens: u64::from(status.indexed_gpu_blocks) * u64::from(self.trace.block_size),
        }
    }
}
