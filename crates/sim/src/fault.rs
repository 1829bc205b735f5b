//! What can go wrong on purpose: crashed, paused, slow and stalled workers, links that are cut or slow, KV events and answers
//! that are lost, doubled or late, probes that miss, clients that hang up, a router that stands still, pools under pressure.
//!
//! A fault is plain data at an instant, and a list of them is a schedule with a text form ([`schedule`]), so that what a seed
//! drew can be cut down, printed and replayed. A fault on a worker that is down, or on answers that are not there, does
//! nothing. What each one does to whom is in `simulation/faults.rs`.

pub mod schedule;

use homing_units::{Duration, WorkerId};

/// One fault. It happens at the instant that the schedule names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The worker's process dies: connections break, its cache and everything that it held are gone.
    WorkerCrash(WorkerId),
    /// The worker's process is started again: a new boot epoch and an empty cache. Nothing happens if it is up.
    WorkerRestart(WorkerId),
    /// The worker's process stands still (SIGSTOP): connections stay open, nothing is answered, probes neither.
    WorkerPause(WorkerId),
    /// It goes on, first with all that reached it meanwhile.
    WorkerResume(WorkerId),
    /// The worker's scheduler stands still once for so long; its probes are answered.
    WorkerStall {
        /// The worker.
        worker: WorkerId,
        /// How much longer its next step takes.
        lasts: Duration,
    },
    /// Steps of the worker take so many percent of their time from now on; 100 ends it.
    WorkerSlow {
        /// The worker.
        worker: WorkerId,
        /// Percent, at least 1.
        percent: u32,
    },
    /// The way of KV from one worker to another changes.
    Link {
        /// Who sends.
        from: WorkerId,
        /// Who receives.
        to: WorkerId,
        /// How it is from now on.
        state: LinkState,
    },
    /// So many of the worker's next probes are not answered, although it lives.
    ProbesLost {
        /// The worker.
        worker: WorkerId,
        /// How many.
        probes: u32,
    },
    /// So many of the worker's next reports of its load do not arrive.
    LoadsLost {
        /// The worker.
        worker: WorkerId,
        /// How many.
        reports: u32,
    },
    /// Something happens to the worker's next batches of KV events.
    KvBatches {
        /// The worker.
        worker: WorkerId,
        /// How many batches.
        batches: u32,
        /// What.
        mishap: Mishap,
    },
    /// Something happens to all answers of the worker that are under way now: lost ones are never heard of again, as behind
    /// a firewall that forgot the connection; late ones stand still for a while; doubled ones are told to the router twice.
    Answers {
        /// The worker.
        worker: WorkerId,
        /// What.
        mishap: Mishap,
    },
    /// All connections between the router and the worker break; the worker lives on.
    ConnectionsBreak(WorkerId),
    /// A client hangs up: this one of those with a request in flight, the longest waiting first, modulo their number.
    ClientAbort {
        /// Which.
        nth: u32,
    },
    /// The router's core stands still for so long: what reaches it waits, its clocks ring late.
    RouterStall {
        /// How long.
        lasts: Duration,
    },
    /// The worker drops what it has cached and nobody uses.
    CacheCleared(WorkerId),
    /// Somebody sends the worker a request past the router.
    Stranger {
        /// The worker.
        worker: WorkerId,
        /// Length of the prompt, which nobody shares.
        prompt_tokens: u32,
        /// Length of the answer.
        output_tokens: u32,
    },
}

/// How KV gets from one worker to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// As the network model says.
    Up,
    /// Bytes take so many percent of their time.
    Slow {
        /// Percent, at least 1.
        percent: u32,
    },
    /// Connections are refused, and those that were open break.
    Cut,
    /// Nothing arrives and nobody is told: what is under way goes on when the link is up again.
    Stalled,
}

/// What happens to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mishap {
    /// It does not arrive.
    Lost,
    /// It arrives twice.
    Twice,
    /// It arrives so much later.
    Late(Duration),
}

impl Fault {
    /// The workers that it happens to: none, one, or the two ends of a link.
    pub fn workers(self) -> impl Iterator<Item = WorkerId> {
        let (one, other) = match self {
            Self::WorkerCrash(worker)
            | Self::WorkerRestart(worker)
            | Self::WorkerPause(worker)
            | Self::WorkerResume(worker)
            | Self::WorkerStall { worker, .. }
            | Self::WorkerSlow { worker, .. }
            | Self::ProbesLost { worker, .. }
            | Self::LoadsLost { worker, .. }
            | Self::KvBatches { worker, .. }
            | Self::Answers { worker, .. }
            | Self::ConnectionsBreak(worker)
            | Self::CacheCleared(worker)
            | Self::Stranger { worker, .. } => (Some(worker), None),
            Self::Link { from, to, .. } => (Some(from), Some(to)),
            Self::ClientAbort { .. } | Self::RouterStall { .. } => (None, None),
        };
        one.into_iter().chain(other)
    }
}
