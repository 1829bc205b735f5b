//! What the gateway has running for each engine: it is discovered, probed, its load is read, its KV events are followed.
//!
//! Everything here only reports. Nothing waits for anything else: a worker that cannot be reached does not keep the
//! gateway from starting, slow metrics do not make a worker look dead, and missing KV events do not stop its requests.

mod agreement;
mod discovery;
mod feed;
mod mapping;
mod room;
mod sessions;
mod sglang;
mod sockets;
mod source;
mod watch;

pub(crate) use sessions::{Closed, OpenSessions};
pub(crate) use sglang::{Server, bootstrap_at};
pub(crate) use source::{EXPECTED_SOURCE, EventSource, is_endpoint};
pub(crate) use watch::{Doubt, Watch};

use std::sync::Arc;
use tokio::sync::mpsc;

/// An order of the core to replay a worker's KV events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Resync {
    pub(crate) from_sequence: u64,
}

/// A worker under watch, as the core's task reaches it.
pub(crate) struct Watched {
    /// Where replays are ordered; one at a time.
    pub(crate) resyncs: mpsc::Sender<Resync>,
    pub(crate) doubt: Arc<Doubt>,
}

impl Watched {
    /// Orders a replay; `false` where one is under way already.
    pub(crate) fn replay_from(&self, from_sequence: u64) -> bool {
        self.resyncs.try_send(Resync { from_sequence }).is_ok()
    }

    /// Has the worker asked who it is.
    pub(crate) fn identify(&self) {
        self.doubt.sequence_began_anew();
    }
}
