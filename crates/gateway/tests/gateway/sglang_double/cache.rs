//! A rank's radix cache: pages of tokens under chained hashes, with what their KV was really computed from.
//!
//! Pages are shared by their *keys* (the tokens of the request that stored them); an answer follows their *content*. The
//! two differ only where a router sent different prompts to the legs of one turn, and then every later hit shows it.

use rmpv::Value;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

struct Page {
    parent: Option<i64>,
    content: Vec<u32>,
}

/// The cache of one data-parallel rank.
pub struct Cache {
    page_size: usize,
    pages: BTreeMap<i64, Page>,
}

/// A change that is announced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    Stored {
        hashes: Vec<i64>,
        parent: Option<i64>,
        tokens: Vec<u32>,
    },
    Removed(Vec<i64>),
    Cleared,
}

/// How events are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventForm {
    /// Maps under `type`, as since 2026 (0.5.23: `KVCacheEvent`, `omit_defaults`, `tag=True`).
    Map,
    /// Arrays that begin with the type's name, as in 2025 (`array_like=True`).
    Array,
}

impl Cache {
    pub fn new(page_size: u32) -> Self {
        Self {
            page_size: page_size as usize,
            pages: BTreeMap::new(),
        }
    }

    /// The content of the pages that begin `prompt`, whose last token is always computed.
    pub fn matched(&self, prompt: &[u32]) -> Vec<u32> {
        let mut content = Vec::new();
        let whole = &prompt[..prompt.len().saturating_sub(1)];
        for hash in self.hashes(whole) {
            let Some(page) = self.pages.get(&hash) else { break };
            content.extend(&page.content);
        }
        content
    }

    /// Stores the whole pages of `keys`; says which are new, one run of them after the other.
    pub fn insert(&mut self, keys: &[u32], content: &[u32]) -> Vec<Change> {
        let mut changes = Vec::new();
        let mut parent = None;
        let mut run: Option<Change> = None;
        for (index, hash) in self.hashes(keys).into_iter().enumerate() {
            let span = index * self.page_size..(index + 1) * self.page_size;
            if let Entry::Vacant(vacant) = self.pages.entry(hash) {
                vacant.insert(Page {
                    parent,
                    content: content[span.clone()].to_vec(),
                });
                let new = run.get_or_insert_with(|| Change::Stored {
                    hashes: Vec::new(),
                    parent,
                    tokens: Vec::new(),
                });
                if let Change::Stored { hashes, tokens, .. } = new {
                    hashes.push(hash);
                    tokens.extend(&keys[span]);
                }
            } else {
                changes.extend(run.take());
            }
            parent = Some(hash);
        }
        changes.extend(run);
        changes
    }

    /// Forgets the pages of `keys` from page `from` on, and what hangs on them.
    pub fn evict(&mut self, keys: &[u32], from: usize) -> Vec<Change> {
        let mut gone: Vec<i64> = self.hashes(keys).into_iter().skip(from).collect();
        gone.retain(|hash| self.pages.remove(hash).is_some());
        loop {
            let orphan = |page: &Page| page.parent.is_some_and(|parent| !self.pages.contains_key(&parent));
            let orphans: Vec<i64> = self
                .pages
                .iter()
                .filter(|(_, page)| orphan(page))
                .map(|(hash, _)| *hash)
                .collect();
            if orphans.is_empty() {
                break;
            }
            for hash in orphans {
                self.pages.remove(&hash);
                gone.push(hash);
            }
        }
        if gone.is_empty() {
            Vec::new()
        } else {
            vec![Change::Removed(gone)]
        }
    }

    pub fn clear(&mut self) -> Vec<Change> {
        self.pages.clear();
        vec![Change::Cleared]
    }

    pub fn tokens(&self) -> usize {
        self.pages.len() * self.page_size
    }

    /// Signed 64-bit numbers chained over whole pages. SGLang takes the first eight bytes of a chained SHA-256
    /// (`mem_cache/utils.py`, `hash_str_to_int64`); a router may make nothing of their values.
    fn hashes(&self, keys: &[u32]) -> Vec<i64> {
        let mut parent = [0; 32];
        let mut hashes = Vec::new();
        for page in keys.chunks_exact(self.page_size) {
            let mut hasher = blake3::Hasher::new();
            hasher.update(&parent);
            for token in page {
                hasher.update(&token.to_le_bytes());
            }
            parent = *hasher.finalize().as_bytes();
            let head = parent[..8].try_into().expect("eight bytes");
            hashes.push(i64::from_be_bytes(head));
        }
        hashes
    }
}

/// The payload of a batch: `[ts, [events], attn_dp_rank]` (`EventBatch`).
pub fn encode(changes: &[Change], rank: u32, page_size: u32, form: EventForm) -> Vec<u8> {
    let events = changes.iter().map(|change| event(change, page_size, form)).collect();
    let batch = Value::Array(vec![
        Value::from(1_790_000_000.25),
        Value::Array(events),
        Value::from(rank),
    ]);
    let mut bytes = Vec::new();
    rmpv::encode::write_value(&mut bytes, &batch).expect("memory takes it");
    bytes
}

fn event(change: &Change, page_size: u32, form: EventForm) -> Value {
    let list = |hashes: &[i64]| Value::Array(hashes.iter().copied().map(Value::from).collect());
    let (name, fields) = match change {
        Change::Stored { hashes, parent, tokens } => (
            "BlockStored",
            vec![
                ("block_hashes", list(hashes)),
                ("parent_block_hash", parent.map_or(Value::Nil, Value::from)),
                (
                    "token_ids",
                    Value::Array(tokens.iter().copied().map(Value::from).collect()),
                ),
                ("block_size", Value::from(page_size)),
                // Without a default of its own, so it is sent even when there is none.
                ("lora_id", Value::Nil),
                ("medium", Value::from("GPU")),
            ],
        ),
        Change::Removed(hashes) => (
            "BlockRemoved",
            vec![("block_hashes", list(hashes)), ("medium", Value::from("GPU"))],
        ),
        Change::Cleared => ("AllBlocksCleared", Vec::new()),
    };
    match form {
        EventForm::Map => {
            let tag = (Value::from("type"), Value::from(name));
            let fields = fields.into_iter().map(|(name, value)| (Value::from(name), value));
            Value::Map([tag].into_iter().chain(fields).collect())
        }
        // The fields of 2025 end before `medium`.
        EventForm::Array => {
            let fields = fields
                .into_iter()
                .filter(|(name, _)| *name != "medium")
                .map(|(_, value)| value);
            Value::Array([Value::from(name)].into_iter().chain(fields).collect())
        }
    }
}
