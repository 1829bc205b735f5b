//! Recordings: the events that a router was told, so that the same router can be told them again (`events.bin`).
//!
//! A recording carries the configuration, each event with its time, and from time to time a digest of all actions so far:
//! a replay that ends with the same digest took the same decisions. It holds block hashes and lengths, never tokens or text.
//! A prompt is written as what it adds to an earlier one, so that a session costs its new blocks only.
//!
//! ```text
//! file   = "homing-events" version:u16 frame*
//! frame  = kind:u8 length:u32 checksum:u32 payload            (all numbers little-endian; XXH3 of the payload, seeded with its kind)
//! kind 1 = the configuration                                  MessagePack, the first frame
//! kind 2 = at:u64 prompt? event                               prompt of its own first, then the event without it
//!          prompt? = 0:u8 | 1:u8 base:u32 keep:u32 new:u32 hash:u128*     base counts back in the table of prompts, 0 is none
//! kind 3 = events:u64 actions:u64 digest:u64                  a checkpoint
//! kind 4 = the same                                           the end
//! ```
//!
//! Writing goes into memory: the driver takes the bytes and puts them where it wants. A recording that was cut off, by a
//! crash for example, can be read up to there. One file is one recording: bytes after the end are an error.

mod prompts;
mod reader;
mod replay;
mod writer;

pub use reader::{Entry, Recording, RecordingError};
pub use replay::{Replay, ReplayError, replay};
pub use writer::{ActionDigest, Recorder};

use serde::{Deserialize, Serialize};

/// What a recording starts with.
const MAGIC: &[u8] = b"homing-events";

/// The version of the format; a reader takes this one only.
const VERSION: u16 = 3;

/// Bytes of a frame before its payload.
const FRAME_HEADER_BYTES: usize = 9;

/// Bytes of a frame's payload at most: far more than an event takes, and little enough to be allocated.
const FRAME_BYTES: usize = 64 << 20;

/// Events between two checkpoints.
const CHECKPOINT_EVENTS: u64 = 1_024;

const KIND_CONFIG: u8 = 1;
const KIND_EVENT: u8 = 2;
const KIND_CHECKPOINT: u8 = 3;
const KIND_END: u8 = 4;

/// How far a recording or a replay is, and a digest of all actions up to there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Events so far.
    pub events: u64,
    /// Actions that they led to.
    pub actions: u64,
    /// XXH3 of the actions, each in `MessagePack` and after its length.
    pub digest: u64,
}

fn checksum(kind: u8, payload: &[u8]) -> u32 {
    let mut hash = xxhash_rust::xxh3::Xxh3::with_seed(u64::from(kind));
    hash.update(payload);
    // The low half is as good as any.
    (hash.digest() & u64::from(u32::MAX)) as u32
}
