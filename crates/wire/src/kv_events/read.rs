//! Batches read: from maps and from tagged arrays, with whatever fields there are.

use super::{BlockRemoved, BlockStored, CacheEvent, EventBatch, KvEventError, MAX_PAYLOAD_BYTES};
use rmpv::ValueRef;

/// How deep a payload may nest, as the decoder counts (twice a level). A batch, its events, a field, the extra keys of a
/// block and a key that is a list are five levels.
const MAX_DEPTH: usize = 16;

impl EventBatch {
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
        Some(ValueRef::Array(items)) => items.iter().map(|item| token(item).ok_or(SHAPE)).collect(),
        _ => Err(SHAPE),
    }
}

/// A token's id. SGLang's cache of a model with a draft model is keyed by pairs of neighbours: the first is the page's own.
fn token(value: &ValueRef<'_>) -> Option<u32> {
    match value {
        ValueRef::Array(pair) => pair.first().and_then(as_u32),
        id => as_u32(id),
    }
}

fn extra_keys(fields: &Fields<'_>) -> Vec<Option<Vec<String>>> {
    // SGLang has the salt in a field of its own, and one for all blocks of an event.
    if let Some(salt) = fields.text("cache_salt") {
        return vec![Some(vec![salt])];
    }
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
