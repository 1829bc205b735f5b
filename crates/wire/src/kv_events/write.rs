//! Batches written: events as maps, with the fields and in the order of vLLM 0.32, so that our bytes are its bytes.

use super::{CacheEvent, EventBatch};
use bytes::Bytes;
use rmp::encode as write;
use rmpv::Value;

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
        // A worker keeps thousands of batches for replays: each without the room that was guessed for it.
        Bytes::from(out.into_boxed_slice())
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
