//! vLLM's KV events: msgpack batches over ZeroMQ, with their sequence numbers and the replay of missed ones.
//!
//! A batch is `[timestamp, [events], data-parallel rank]`. vLLM 0.32 sends each event as a map, older releases as an
//! array that begins with the type's name: both are read, the map is written. Fields that are missing take their
//! defaults; events of unknown types are counted and passed over, so that a newer engine costs precision and not the
//! subscription. A block's hash is an integer of 64 bits or a byte string whose last eight bytes are that integer. It
//! names a block within one engine only: own hashes are computed from `token_ids`.

mod read;
mod write;

use bytes::Bytes;
use thiserror::Error;

/// Bytes of one payload; more are refused.
pub const MAX_PAYLOAD_BYTES: usize = 64 << 20;
/// The sequence number in the frame that ends a replay.
pub const REPLAY_END: u64 = u64::MAX;

/// A batch of events.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EventBatch {
    /// When it was made, in seconds since 1970.
    pub timestamp: f64,
    /// What happened, in order.
    pub events: Vec<CacheEvent>,
    /// The engine of a data-parallel server that it comes from.
    pub data_parallel_rank: Option<u32>,
    /// Events of unknown types that were passed over.
    pub skipped: u32,
}

/// A change of an engine's cache.
#[derive(Clone, Debug, PartialEq)]
pub enum CacheEvent {
    /// Blocks are cached now.
    Stored(BlockStored),
    /// Blocks are no longer cached.
    Removed(BlockRemoved),
    /// Nothing is cached any more.
    AllCleared,
}

/// Blocks are cached now, each the parent of the next.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockStored {
    /// The engine's hashes.
    pub block_hashes: Vec<u64>,
    /// The block before the first, if any.
    pub parent_block_hash: Option<u64>,
    /// The tokens of all blocks: `block_size` for each.
    pub token_ids: Vec<u32>,
    /// Tokens in a block.
    pub block_size: u32,
    /// The adapter that computed them, if any: their KV is of no use to others.
    pub lora_id: Option<i64>,
    /// Where they lie, such as `GPU` or `CPU`.
    pub medium: Option<String>,
    /// The adapter's name, if any.
    pub lora_name: Option<String>,
    /// For each block what else its hash covers (a cache salt, an image), as JSON-like text; empty if nothing does.
    pub extra_keys: Vec<Option<Vec<String>>>,
    /// The KV cache group.
    pub group_idx: Option<u32>,
}

impl BlockStored {
    /// Whether the hashes cover more than the tokens: then the KV serves only requests with the same extra keys.
    #[must_use]
    pub fn is_private(&self) -> bool {
        self.lora_id.is_some() || self.lora_name.is_some() || self.extra_keys.iter().any(Option::is_some)
    }

    /// The tokens of each block, as long as there are both a hash and a block's tokens.
    pub fn blocks(&self) -> impl Iterator<Item = (u64, &[u32])> {
        let tokens = self.token_ids.chunks_exact((self.block_size as usize).max(1));
        self.block_hashes.iter().copied().zip(tokens)
    }
}

/// Blocks are no longer cached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockRemoved {
    /// The engine's hashes.
    pub block_hashes: Vec<u64>,
    /// Where they lay.
    pub medium: Option<String>,
    /// The KV cache group.
    pub group_idx: Option<u32>,
}

/// Why bytes are no batch or frame.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum KvEventError {
    /// The payload is over the bound.
    #[error("the payload has `{bytes}` bytes, expected at most {MAX_PAYLOAD_BYTES}")]
    TooLong {
        /// Its size.
        bytes: usize,
    },
    /// The payload is no msgpack.
    #[error("the payload is no msgpack: {0}")]
    Msgpack(String),
    /// The payload has another shape.
    #[error("the payload is no event batch: `{field}` is wrong, expected {expected}")]
    Shape {
        /// What is wrong.
        field: &'static str,
        /// What was expected.
        expected: &'static str,
    },
    /// The message has other frames.
    #[error("the message has other frames than expected: {expected}")]
    Frames {
        /// What was expected.
        expected: &'static str,
    },
}

/// One message of the publisher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// What it was published under.
    pub topic: String,
    /// Counts from 0 in each life of the engine, without gaps.
    pub sequence: u64,
    /// The batch.
    pub payload: Bytes,
}

/// One message of a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Replay {
    /// A batch that was published before.
    Batch(Frame),
    /// There is no more.
    End,
}

impl Frame {
    /// The frames of a published message.
    #[must_use]
    pub fn encode(&self) -> [Bytes; 3] {
        [
            Bytes::copy_from_slice(self.topic.as_bytes()),
            Bytes::copy_from_slice(&self.sequence.to_be_bytes()),
            self.payload.clone(),
        ]
    }

    /// Reads the frames of a published message.
    ///
    /// # Errors
    /// If there are not three, or the second is no integer of eight bytes.
    pub fn decode(frames: &[Bytes]) -> Result<Self, KvEventError> {
        const EXPECTED: &str = "topic, sequence of 8 bytes, payload";
        let [topic, sequence, payload] = frames else {
            return Err(KvEventError::Frames { expected: EXPECTED });
        };
        Ok(Self {
            topic: String::from_utf8_lossy(topic).into_owned(),
            sequence: big_endian(sequence).ok_or(KvEventError::Frames { expected: EXPECTED })?,
            payload: payload.clone(),
        })
    }
}

impl Replay {
    /// The frames that ask a DEALER's peer for all batches from `start` on.
    #[must_use]
    pub fn encode_request(start: u64) -> [Bytes; 2] {
        [Bytes::new(), Bytes::copy_from_slice(&start.to_be_bytes())]
    }

    /// Reads the frames of a request, without the identity that a ROUTER puts before them.
    ///
    /// # Errors
    /// If they are not an empty one and an integer of eight bytes.
    pub fn decode_request(frames: &[Bytes]) -> Result<u64, KvEventError> {
        match frames {
            [empty, start] if empty.is_empty() => big_endian(start),
            _ => None,
        }
        .ok_or(KvEventError::Frames {
            expected: "an empty frame, first sequence of 8 bytes",
        })
    }

    /// The frames of an answer, without the identity that a ROUTER puts before them.
    #[must_use]
    pub fn encode(&self) -> [Bytes; 4] {
        match self {
            Self::Batch(frame) => {
                let [topic, sequence, payload] = frame.encode();
                [Bytes::new(), topic, sequence, payload]
            }
            Self::End => [
                Bytes::new(),
                Bytes::new(),
                Bytes::copy_from_slice(&REPLAY_END.to_be_bytes()),
                Bytes::new(),
            ],
        }
    }

    /// Reads the frames of an answer.
    ///
    /// # Errors
    /// If they are not an empty one and a published message.
    pub fn decode(frames: &[Bytes]) -> Result<Self, KvEventError> {
        let [empty, message @ ..] = frames else {
            return Err(KvEventError::Frames {
                expected: "an empty frame, topic, sequence of 8 bytes, payload",
            });
        };
        let frame = Frame::decode(message)?;
        match (empty.is_empty(), frame.sequence == REPLAY_END) {
            (false, _) => Err(KvEventError::Frames {
                expected: "an empty first frame",
            }),
            (true, true) => Ok(Self::End),
            (true, false) => Ok(Self::Batch(frame)),
        }
    }
}

fn big_endian(bytes: &[u8]) -> Option<u64> {
    bytes.try_into().map(u64::from_be_bytes).ok()
}

#[cfg(test)]
mod tests;
