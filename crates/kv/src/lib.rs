//! Token blocks: chained hashes, the radix index with owners, the paged pool and its eviction.
//!
//! Pure: no clock, socket, file or task. The engine's pool and the router's index speak of the same [`BlockHash`].

mod bits;
mod hash;
mod host;
mod index;
mod order;
mod pool;
mod prompt;
pub mod returns;
mod sketch;

pub use hash::{BlockHash, BlockHasher, BlockMap, chain, chain_blocks, hash_blocks};
pub use host::{HostChange, HostTier, Spilled};
pub use index::{IndexDump, IndexedBlock, MAX_OWNERS, MAX_WORKERS, Overlap, ResidencyIndex, WorkerBlocks};
pub use order::{CLASSES, Densities, Expectations, Mark, UNKNOWN};
pub use pool::{Allocation, BlockPool, BlockState, Committed, Evicted, PoolDump, PoolStatistics};
pub use prompt::Prompt;
pub use sketch::{BITS_PER_BLOCK, HASHES, Known, RATE_MAX, SKETCH_BLOCKS_MAX, Sketch, SketchError};

use serde::{Deserialize, Serialize};

/// A physical block of a paged pool: an index into the worker's KV storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockId(pub u32);

/// Where a block's KV lies on its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// In the accelerator's memory: usable at once.
    Gpu,
    /// In the host's memory: usable after a reload.
    Host,
}
