//! vLLM's KV events: msgpack batches over ZeroMQ, with their sequence numbers and the replay of missed ones.
//!
//! A batch is `[timestamp, [events], data-parallel rank]`. vLLM 0.32 sends each event as a map, older releases as an
//! array that begins with the type's name: both are read, the map is written. Fields that are missing take their
//! defaults; events of unknown types are counted and passed over, so that a newer engine costs precision and not the
//! subscription. A block's hash is an integer of 64 bits or a byte string whose last eight bytes are that integer. It
//! names a block within one engine only: own hashes are computed from `token_ids`.

use bytes::Bytes;
use rmp::encode as write;
use rmpv::{Value, ValueRef};
use thiserror::Error;

/// Bytes of one payload; more are refused.
pub const MAX_PAYLOAD_BYTES: usize = 64 << 20;
/// How deep a payload may nest, as the decoder counts (twice a level). A batch, its events, a field, the extra keys of a
/// block and a key that is a list are five levels.
const MAX_DEPTH: usize = 16;
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

impl EventBatch {
    /// The payload: events as maps, with the fields that vLLM 0.32 sends.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let tokens: usize = self.events.iter().map(CacheEvent::weight).sum();
        let mut out = Vec::with_capacity(64 + 5 * tokens);
        write::write_array_len(&mut out, 3).expect(IN_MEMORY);
        write::write_f64(&mut out, self.timestamp).expect(IN_MEMORY);
        write::write_array_len(&mut out, length(self.events.len())).expect(IN_MEMORY);
        for event in &self.events {
            event.write(&mut out);
        }
        put_number(&mut out, self.data_parallel_rank.map(u64::from));
        Bytes::from(out)
    }

    /// Reads a payload, whichever form its events have.
    ///
    /// # Errors
    /// If it is over the bound, no msgpack, or no batch of events.
    pub fn decode(payload: &[u8]) -> Result<Self, KvEventError> {
        if payload.len() > MAX_PAYLOAD_BYTES {
            return Err(KvEventError::TooLong { bytes: payload.len() });
        }
        let mut rest = payload;
        let value = rmpv::decode::read_value_ref_with_max_depth(&mut rest, MAX_DEPTH)
            .map_err(|error| KvEventError::Msgpack(error.to_string()))?;
        if !rest.is_empty() {
            return Err(KvEventError::Msgpack(format!("`{}` bytes follow it", rest.len())));
        }
        let ValueRef::Array(parts) = value else {
            return Err(KvEventError::Shape {
                field: "batch",
                expected: "an array",
            });
        };
        let mut parts = parts.into_iter();
        let mut batch = Self {
            timestamp: parts
                .next()
                .and_then(|timestamp| timestamp.to_owned().as_f64())
                .ok_or(KvEventError::Shape {
                    field: "timestamp",
                    expected: "a number",
                })?,
            ..Self::default()
        };
        let Some(ValueRef::Array(events)) = parts.next() else {
            return Err(KvEventError::Shape {
                field: "events",
                expected: "an array",
            });
        };
        for event in &events {
            match CacheEvent::read(event)? {
                Some(event) => batch.events.push(event),
                None => batch.skipped += 1,
            }
        }
        batch.data_parallel_rank = parts.next().as_ref().and_then(as_u32);
        Ok(batch)
    }
}

impl CacheEvent {
    /// Integers that it carries, to size the buffer.
    fn weight(&self) -> usize {
        match self {
            Self::Stored(stored) => 64 + stored.token_ids.len() + 2 * stored.block_hashes.len(),
            Self::Removed(removed) => 32 + 2 * removed.block_hashes.len(),
            Self::AllCleared => 8,
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Stored(stored) => {
                put_map(out, 11, "BlockStored");
                put_key(out, "block_hashes");
                put_numbers(out, stored.block_hashes.iter().copied());
                put_key(out, "parent_block_hash");
                put_number(out, stored.parent_block_hash);
                put_key(out, "token_ids");
                put_numbers(out, stored.token_ids.iter().copied().map(u64::from));
                put_key(out, "block_size");
                put_number(out, Some(u64::from(stored.block_size)));
                put_key(out, "lora_id");
                match stored.lora_id {
                    Some(id) => put_value(out, &Value::from(id)),
                    None => put_number(out, None),
                }
                put_key(out, "medium");
                put_text(out, stored.medium.as_deref());
                put_key(out, "lora_name");
                put_text(out, stored.lora_name.as_deref());
                put_key(out, "extra_keys");
                put_value(out, &extra_keys_value(&stored.extra_keys));
                put_key(out, "group_idx");
                put_number(out, stored.group_idx.map(u64::from));
                put_key(out, "kv_cache_spec_kind");
                put_text(out, Some("full_attention"));
            }
            Self::Removed(removed) => {
                put_map(out, 4, "BlockRemoved");
                put_key(out, "block_hashes");
                put_numbers(out, removed.block_hashes.iter().copied());
                put_key(out, "medium");
                put_text(out, removed.medium.as_deref());
                put_key(out, "group_idx");
                put_number(out, removed.group_idx.map(u64::from));
            }
            Self::AllCleared => put_map(out, 1, "AllBlocksCleared"),
        }
    }

    /// The event; `None` if its type is unknown.
    fn read(value: &ValueRef<'_>) -> Result<Option<Self>, KvEventError> {
        let fields = Fields::of(value)?;
        match fields.kind {
            "BlockStored" => Ok(Some(Self::Stored(BlockStored {
                block_hashes: hashes(&fields)?,
                parent_block_hash: fields.get("parent_block_hash").map(hash).transpose()?,
                token_ids: token_ids(&fields)?,
                block_size: fields
                    .get("block_size")
                    .and_then(as_u32)
                    .filter(|size| *size > 0)
                    .ok_or(KvEventError::Shape {
                        field: "block_size",
                        expected: "an integer above 0",
                    })?,
                lora_id: fields.get("lora_id").and_then(|id| id.to_owned().as_i64()),
                medium: fields.text("medium"),
                lora_name: fields.text("lora_name"),
                extra_keys: extra_keys(&fields),
                group_idx: fields.get("group_idx").and_then(as_u32),
            }))),
            "BlockRemoved" => Ok(Some(Self::Removed(BlockRemoved {
                block_hashes: hashes(&fields)?,
                medium: fields.text("medium"),
                group_idx: fields.get("group_idx").and_then(as_u32),
            }))),
            "AllBlocksCleared" => Ok(Some(Self::AllCleared)),
            _ => Ok(None),
        }
    }
}

/// The fields of an event, whichever form it has.
struct Fields<'a> {
    kind: &'a str,
    form: Form<'a>,
}

enum Form<'a> {
    Map(&'a [(ValueRef<'a>, ValueRef<'a>)]),
    /// The fields after the type, in the order of [`ARRAY_STORED`] or [`ARRAY_REMOVED`].
    Array(&'a [ValueRef<'a>]),
}

const ARRAY_STORED: [&str; 9] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
];
const ARRAY_REMOVED: [&str; 3] = ["block_hashes", "medium", "group_idx"];

impl<'a> Fields<'a> {
    fn of(value: &'a ValueRef<'a>) -> Result<Self, KvEventError> {
        let error = KvEventError::Shape {
            field: "event",
            expected: "a map with `type` or an array that begins with it",
        };
        match value {
            ValueRef::Map(entries) => {
                let form = Form::Map(entries);
                let kind = lookup(entries, "type").and_then(as_text).ok_or(error)?;
                Ok(Self { kind, form })
            }
            ValueRef::Array(items) => {
                let (kind, rest) = items.split_first().ok_or_else(|| error.clone())?;
                Ok(Self {
                    kind: as_text(kind).ok_or(error)?,
                    form: Form::Array(rest),
                })
            }
            _ => Err(error),
        }
    }

    /// A field; `nil` counts as missing.
    fn get(&self, name: &str) -> Option<&'a ValueRef<'a>> {
        let value = match self.form {
            Form::Map(entries) => lookup(entries, name),
            Form::Array(items) => {
                let names: &[&str] = if self.kind == "BlockStored" {
                    &ARRAY_STORED
                } else {
                    &ARRAY_REMOVED
                };
                names
                    .iter()
                    .position(|field| *field == name)
                    .and_then(|index| items.get(index))
            }
        };
        value.filter(|value| !matches!(value, ValueRef::Nil))
    }

    fn text(&self, name: &str) -> Option<String> {
        self.get(name).and_then(as_text).map(str::to_owned)
    }
}

fn lookup<'a>(entries: &'a [(ValueRef<'a>, ValueRef<'a>)], name: &str) -> Option<&'a ValueRef<'a>> {
    entries
        .iter()
        .find(|(key, _)| as_text(key) == Some(name))
        .map(|(_, value)| value)
}

fn as_text<'a>(value: &'a ValueRef<'a>) -> Option<&'a str> {
    match value {
        ValueRef::String(text) => (*text).into_str(),
        _ => None,
    }
}

fn as_u64(value: &ValueRef<'_>) -> Option<u64> {
    match value {
        ValueRef::Integer(number) => number.as_u64(),
        _ => None,
    }
}

fn as_u32(value: &ValueRef<'_>) -> Option<u32> {
    as_u64(value).and_then(|number| u32::try_from(number).ok())
}

fn hash(value: &ValueRef<'_>) -> Result<u64, KvEventError> {
    match value {
        // A release that hashes to signed integers means the same 64 bits.
        ValueRef::Integer(number) => number.as_u64().or_else(|| number.as_i64().map(i64::cast_unsigned)),
        ValueRef::Binary(bytes) => bytes.last_chunk().copied().map(u64::from_be_bytes),
        _ => None,
    }
    .ok_or(KvEventError::Shape {
        field: "block_hashes",
        expected: "integers of 64 bits or byte strings of 8 and more",
    })
}

fn hashes(fields: &Fields<'_>) -> Result<Vec<u64>, KvEventError> {
    match fields.get("block_hashes") {
        Some(ValueRef::Array(items)) => items.iter().map(hash).collect(),
        _ => Err(KvEventError::Shape {
            field: "block_hashes",
            expected: "an array",
        }),
    }
}

fn token_ids(fields: &Fields<'_>) -> Result<Vec<u32>, KvEventError> {
    const SHAPE: KvEventError = KvEventError::Shape {
        field: "token_ids",
        expected: "an array of token ids",
    };
    match fields.get("token_ids") {
        Some(ValueRef::Array(items)) => items.iter().map(|item| as_u32(item).ok_or(SHAPE)).collect(),
        _ => Err(SHAPE),
    }
}

fn extra_keys(fields: &Fields<'_>) -> Vec<Option<Vec<String>>> {
    let Some(ValueRef::Array(blocks)) = fields.get("extra_keys") else {
        return Vec::new();
    };
    let text = |key: &ValueRef<'_>| as_text(key).map_or_else(|| key.to_string(), str::to_owned);
    blocks
        .iter()
        .map(|block| match block {
            ValueRef::Nil => None,
            ValueRef::Array(keys) => Some(keys.iter().map(text).collect()),
            key => Some(vec![text(key)]),
        })
        .collect()
}

fn extra_keys_value(keys: &[Option<Vec<String>>]) -> Value {
    if keys.is_empty() {
        return Value::Nil;
    }
    let block = |keys: &Option<Vec<String>>| match keys {
        None => Value::Nil,
        Some(keys) => Value::Array(keys.iter().map(|key| Value::from(key.as_str())).collect()),
    };
    Value::Array(keys.iter().map(block).collect())
}

const IN_MEMORY: &str = "writing to memory does not fail";

fn length(items: usize) -> u32 {
    u32::try_from(items).expect("a batch has fewer than 2^32 items")
}

fn put_map(out: &mut Vec<u8>, entries: u32, kind: &str) {
    write::write_map_len(out, entries).expect(IN_MEMORY);
    put_key(out, "type");
    put_text(out, Some(kind));
}

fn put_key(out: &mut Vec<u8>, key: &str) {
    write::write_str(out, key).expect(IN_MEMORY);
}

fn put_text(out: &mut Vec<u8>, text: Option<&str>) {
    match text {
        Some(text) => write::write_str(out, text).expect(IN_MEMORY),
        None => put_number(out, None),
    }
}

fn put_number(out: &mut Vec<u8>, number: Option<u64>) {
    match number {
        Some(number) => drop(write::write_uint(out, number).expect(IN_MEMORY)),
        None => write::write_nil(out).expect(IN_MEMORY),
    }
}

fn put_numbers(out: &mut Vec<u8>, numbers: impl ExactSizeIterator<Item = u64>) {
    write::write_array_len(out, length(numbers.len())).expect(IN_MEMORY);
    numbers.for_each(|number| put_number(out, Some(number)));
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    rmpv::encode::write_value(out, value).expect(IN_MEMORY);
}

#[cfg(test)]
#[path = "kv_events_tests.rs"]
mod tests;
