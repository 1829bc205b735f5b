//! Reading a recording. Whatever the bytes are, the answer is entries and then an end or an error with its place.

use super::prompts::{Base, PromptTable};
use super::writer::prompt_mut;
use super::{
    Checkpoint, FRAME_BYTES, FRAME_HEADER_BYTES, KIND_CHECKPOINT, KIND_CONFIG, KIND_END, KIND_EVENT, MAGIC, VERSION,
    checksum,
};
use crate::config::RouterConfig;
use crate::event::Event;
use homing_kv::BlockHash;
use homing_units::Instant;
use std::sync::Arc;

/// An open recording: an iterator over its entries. After an error it ends.
#[derive(Debug)]
pub struct Recording<'a> {
    bytes: &'a [u8],
    offset: usize,
    config: RouterConfig,
    prompts: PromptTable,
    over: bool,
}

/// An entry of a recording.
#[derive(Clone, Debug, PartialEq)]
pub enum Entry {
    /// The router was told this.
    Event(Instant, Box<Event>),
    /// The actions up to here.
    Checkpoint(Checkpoint),
    /// The actions of all of it: the recording is complete.
    End(Checkpoint),
}

/// What is wrong with a recording. Offsets are of bytes from its start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordingError {
    /// It is none.
    #[error("this is no recording: expected it to start with `homing-events`")]
    NoRecording,
    /// It was written in another version of the format.
    #[error("recording of format version `{found}`, expected `{VERSION}`")]
    Version {
        /// The version found.
        found: u16,
    },
    /// It ends in the middle of a frame.
    #[error("the recording is cut off at byte {offset}, in a frame that needs {missing} bytes more")]
    CutOff {
        /// Where the frame begins.
        offset: usize,
        /// Bytes that are missing.
        missing: usize,
    },
    /// Something comes after its end: another recording, for example.
    #[error(
        "the recording ends at byte {offset}, and {left} bytes come after it: expected one recording and nothing else"
    )]
    Trailing {
        /// Where it ends.
        offset: usize,
        /// Bytes after that.
        left: usize,
    },
    /// A frame is damaged.
    #[error("the recording is damaged at byte {offset}: {what}")]
    Damaged {
        /// Where the frame begins.
        offset: usize,
        /// What is wrong with it.
        what: String,
    },
}

impl<'a> Recording<'a> {
    /// Opens a recording and reads its configuration.
    ///
    /// # Errors
    /// If the bytes are no recording of this version, or its configuration cannot be read.
    pub fn open(bytes: &'a [u8]) -> Result<Self, RecordingError> {
        let rest = bytes.strip_prefix(MAGIC).ok_or(RecordingError::NoRecording)?;
        let version = rest.first_chunk().ok_or_else(|| RecordingError::CutOff {
            offset: MAGIC.len(),
            missing: 2 - rest.len(),
        })?;
        let found = u16::from_le_bytes(*version);
        if found != VERSION {
            return Err(RecordingError::Version { found });
        }
        let offset = MAGIC.len() + 2;
        let mut recording = Self {
            bytes,
            offset,
            config: RouterConfig::default(),
            prompts: PromptTable::default(),
            over: false,
        };
        let missing = FRAME_HEADER_BYTES;
        let (kind, payload) = recording.frame()?.ok_or(RecordingError::CutOff { offset, missing })?;
        if kind != KIND_CONFIG {
            return Err(damaged(
                offset,
                format!("a frame of kind `{kind}`, expected the configuration"),
            ));
        }
        recording.config = rmp_serde::from_slice(payload).map_err(|error| damaged(offset, error.to_string()))?;
        if recording.config.block_size == 0 {
            return Err(damaged(offset, "a block size of `0`".to_owned()));
        }
        Ok(recording)
    }

    /// The configuration of the router that was recorded.
    #[must_use]
    pub const fn config(&self) -> &RouterConfig {
        &self.config
    }

    /// Reads the next entry; `None` at the end of the bytes.
    fn read(&mut self) -> Result<Option<Entry>, RecordingError> {
        let offset = self.offset;
        let Some((kind, payload)) = self.frame()? else {
            return Ok(None);
        };
        let what = match kind {
            KIND_EVENT => self.event(payload),
            KIND_CHECKPOINT => checkpoint(payload).map(Entry::Checkpoint),
            KIND_END => {
                self.over = true;
                checkpoint(payload).map(Entry::End)
            }
            other => Err(format!("a frame of kind `{other}`, expected an event or a checkpoint")),
        };
        let entry = what.map_err(|what| damaged(offset, what))?;
        let left = self.bytes.len() - self.offset;
        if matches!(entry, Entry::End(_)) && left > 0 {
            return Err(RecordingError::Trailing {
                offset: self.offset,
                left,
            });
        }
        Ok(Some(entry))
    }

    /// The next frame's kind and payload; `None` at the end of the bytes.
    fn frame(&mut self) -> Result<Option<(u8, &'a [u8])>, RecordingError> {
        let offset = self.offset;
        let rest = &self.bytes[offset..];
        if rest.is_empty() {
            return Ok(None);
        }
        let cut_off = |needed: usize| RecordingError::CutOff {
            offset,
            missing: needed - rest.len(),
        };
        let (header, rest_of) = rest
            .split_at_checked(FRAME_HEADER_BYTES)
            .ok_or_else(|| cut_off(FRAME_HEADER_BYTES))?;
        let mut fields = Fields(header);
        let (kind, length, expected) = fields.frame_header().map_err(|what| damaged(offset, what))?;
        if length > FRAME_BYTES {
            return Err(damaged(
                offset,
                format!("a frame of `{length}` bytes, expected at most {FRAME_BYTES}"),
            ));
        }
        let payload = rest_of
            .get(..length)
            .ok_or_else(|| cut_off(FRAME_HEADER_BYTES + length))?;
        if checksum(kind, payload) != expected {
            return Err(damaged(offset, "the checksum does not match".to_owned()));
        }
        self.offset += FRAME_HEADER_BYTES + length;
        Ok(Some((kind, payload)))
    }

    fn event(&mut self, payload: &[u8]) -> Result<Entry, String> {
        let mut fields = Fields(payload);
        let at = Instant::from_nanos(fields.u64()?);
        let blocks = match fields.u8()? {
            0 => None,
            1 => Some(self.prompt(&mut fields)?),
            other => return Err(format!("a prompt marker of `{other}`, expected 0 or 1")),
        };
        let mut event: Event = rmp_serde::from_slice(fields.0).map_err(|error| error.to_string())?;
        if let Some(blocks) = blocks {
            let prompt = prompt_mut(&mut event).ok_or("a prompt for an event that has none")?;
            prompt.blocks = blocks;
        }
        Ok(Entry::Event(at, Box::new(event)))
    }

    fn prompt(&mut self, fields: &mut Fields<'_>) -> Result<Arc<[BlockHash]>, String> {
        let base = Base {
            back: fields.u32()?,
            keep: fields.u32()?,
        };
        let count = fields.u32()? as usize;
        let new = fields.take(count.saturating_mul(16))?.chunks_exact(16);
        let kept = self.prompts.kept(base).ok_or("a prompt on a base that is not known")?;
        let hash = |bytes: &[u8]| BlockHash(u128::from_le_bytes(bytes.try_into().expect("a chunk has 16 bytes")));
        let blocks: Arc<[BlockHash]> = kept.iter().copied().chain(new.map(hash)).collect();
        self.prompts.remember(Arc::clone(&blocks), base);
        Ok(blocks)
    }
}

impl Iterator for Recording<'_> {
    type Item = Result<Entry, RecordingError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        let entry = self.read().transpose();
        self.over |= !matches!(entry, Some(Ok(_)));
        entry
    }
}

fn checkpoint(payload: &[u8]) -> Result<Checkpoint, String> {
    let mut fields = Fields(payload);
    Ok(Checkpoint {
        events: fields.u64()?,
        actions: fields.u64()?,
        digest: fields.u64()?,
    })
}

fn damaged(offset: usize, what: String) -> RecordingError {
    RecordingError::Damaged { offset, what }
}

/// Takes fields off the front of a payload.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let (field, rest) = self.0.split_at_checked(count).ok_or("a field goes beyond its frame")?;
        self.0 = rest;
        Ok(field)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        Ok(self.take(N)?.try_into().expect("so many bytes were taken"))
    }

    fn u8(&mut self) -> Result<u8, String> {
        self.array().map(u8::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }

    fn frame_header(&mut self) -> Result<(u8, usize, u32), String> {
        Ok((self.u8()?, self.u32()? as usize, self.u32()?))
    }
}
