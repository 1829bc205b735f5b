//! KV over TCP between workers: who holds it serves it, who needs it pulls it.
//!
//! The protocol is `homing_wire::kv_frames`; here are its sockets and its patience. Bytes reach the blocks through the
//! engine thread, a few megabytes between two steps. A holder releases an export when the puller has acknowledged it and
//! at no other sign; a puller acknowledges when every block is verified *and* stored. Whatever goes wrong in between
//! ends the pull with an error and leaves the export to be tried again until its lease ends.

mod client;
mod server;

pub use client::{PullContext, pull, release};
pub use server::{ExportIds, serve};

use std::time::Duration;

/// How long a connection may take to be made.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long either side waits for the other's next bytes, and for its own to be taken.
const IDLE_TIMEOUT: Duration = Duration::from_secs(15);
/// Bytes that pass through the engine thread between two steps.
const CHUNK_BYTES: usize = 4 << 20;
