//! The protocol by which one worker pulls KV blocks from another: frames over one TCP connection, sans-IO.
//!
//! The puller sends a request; the holder accepts, sends each block in order, and waits; the puller acknowledges when it
//! has verified all of them, and only then may the holder release them. Every frame is
//!
//! ```text
//! magic 4 | version 2 | kind 2 | payload length 4 | XXH3-64 of these 12 bytes | payload | XXH3-64 of the payload, seeded
//! ```
//!
//! all little endian. The seed is the header's checksum, so that a payload under another header does not pass either. A
//! flipped bit anywhere is refused: KV that is wrong by one bit gives wrong answers that nobody notices. XXH3 guards
//! against faults, not against attackers: workers trust each other's network.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use homing_kv::BlockHash;
use homing_units::BootEpoch;
use thiserror::Error;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// What every frame begins with.
pub const MAGIC: [u8; 4] = *b"HMKV";
/// The version of this protocol.
pub const VERSION: u16 = 1;
/// Bytes of a header.
pub const HEADER_BYTES: usize = 20;
/// Bytes after a payload.
pub const TRAILER_BYTES: usize = 8;
/// Bytes of a request's id; longer ones are refused.
pub const MAX_REQUEST_ID_BYTES: usize = 256;
/// Bytes of a block; larger ones are refused.
pub const MAX_BLOCK_BYTES: u32 = 64 << 20;
/// A bound for payloads where no block is expected: requests, refusals, acknowledgements.
pub const MAX_CONTROL_BYTES: usize = 1024;

/// One frame's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Puller to holder: send these blocks.
    Request(PullRequest),
    /// Holder to puller: the blocks follow.
    Accepted,
    /// Holder to puller: no.
    Refused(Refusal),
    /// Holder to puller: one block.
    Block {
        /// Its index in the prompt.
        index: u32,
        /// Its KV.
        data: Bytes,
    },
    /// Puller to holder: everything has arrived; release it.
    Ack,
}

/// What a puller asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullRequest {
    /// The holder's life that the parameters came from.
    pub epoch: BootEpoch,
    /// The holder's own id of the request, at most [`MAX_REQUEST_ID_BYTES`] long.
    pub request: String,
    /// The hash of the whole prompt.
    pub prompt: BlockHash,
    /// Index, in the prompt, of the first block wanted.
    pub first_block: u32,
    /// Blocks wanted. 0 releases the export without a pull.
    pub count: u32,
    /// Bytes of a block; both sides must agree.
    pub block_bytes: u32,
}

/// Why a holder refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// It knows no such export: it was released, it expired, or it never was.
    #[error("no such export is held")]
    UnknownExport,
    /// It was restarted since.
    #[error("the holder was restarted: its boot epoch is `{}`", actual.0)]
    EpochMismatch {
        /// Its present life.
        actual: BootEpoch,
    },
    /// The export is of another prompt.
    #[error("the export is of another prompt")]
    PromptMismatch,
    /// The export has fewer blocks.
    #[error("the export has `{available}` blocks, fewer than were asked for")]
    BadRange {
        /// Blocks that it has.
        available: u32,
    },
    /// Its blocks have another size.
    #[error("the holder's blocks have `{actual}` bytes")]
    BlockBytesMismatch {
        /// Their size in bytes.
        actual: u32,
    },
    /// It serves as many pulls as it may.
    #[error("the holder serves as many pulls as it may")]
    Busy,
}

/// Why bytes are no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FrameError {
    /// The peer speaks something else.
    #[error("the peer does not speak this protocol: a frame begins with `HMKV`")]
    Magic,
    /// The header was changed on the way.
    #[error("a frame's header does not match its checksum")]
    HeaderChecksum,
    /// The peer speaks another version.
    #[error("the peer speaks version `{found}`, expected {VERSION}")]
    Version {
        /// Its version.
        found: u16,
    },
    /// The payload is over the bound.
    #[error("a frame's payload has `{length}` bytes, expected at most `{limit}`")]
    TooLong {
        /// Its size.
        length: u32,
        /// The bound.
        limit: usize,
    },
    /// The payload was changed on the way.
    #[error("a frame's payload does not match its checksum")]
    PayloadChecksum,
    /// The payload is none of this kind.
    #[error("a frame of kind `{kind}` has an unknown kind or content")]
    Content {
        /// The frame's kind.
        kind: u16,
    },
}

impl Message {
    /// The frame's bytes.
    ///
    /// # Panics
    /// If a block has more than [`MAX_BLOCK_BYTES`] or an id more than [`MAX_REQUEST_ID_BYTES`]: a caller checks what it
    /// was given before it asks.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let (kind, payload) = self.payload();
        assert!(
            payload.len() <= MAX_BLOCK_BYTES as usize + 4,
            "a block is at most {MAX_BLOCK_BYTES} bytes"
        );
        let length = u32::try_from(payload.len()).expect("bounded above");
        let mut out = BytesMut::with_capacity(HEADER_BYTES + payload.len() + TRAILER_BYTES);
        out.put_slice(&MAGIC);
        out.put_u16_le(VERSION);
        out.put_u16_le(kind);
        out.put_u32_le(length);
        let check = xxh3_64(&out);
        out.put_u64_le(check);
        out.put_slice(&payload);
        out.put_u64_le(xxh3_64_with_seed(&payload, check));
        out.freeze()
    }

    fn payload(&self) -> (u16, Bytes) {
        let mut out = BytesMut::new();
        let kind = match self {
            Self::Request(request) => {
                let id = request.request.as_bytes();
                assert!(
                    id.len() <= MAX_REQUEST_ID_BYTES,
                    "an id is at most {MAX_REQUEST_ID_BYTES} bytes"
                );
                out.put_u64_le(request.epoch.0);
                out.put_u128_le(request.prompt.0);
                out.put_u32_le(request.first_block);
                out.put_u32_le(request.count);
                out.put_u32_le(request.block_bytes);
                out.put_slice(id);
                1
            }
            Self::Accepted => 2,
            Self::Refused(refusal) => {
                let (code, detail) = refusal.code();
                out.put_u32_le(code);
                out.put_u64_le(detail);
                3
            }
            Self::Block { index, data } => {
                out.reserve(4 + data.len());
                out.put_u32_le(*index);
                out.put_slice(data);
                4
            }
            Self::Ack => 5,
        };
        (kind, out.freeze())
    }

    fn decode(kind: u16, mut payload: Bytes) -> Result<Self, FrameError> {
        const REQUEST_BYTES: usize = 8 + 16 + 4 + 4 + 4;
        let message = match kind {
            1 if (REQUEST_BYTES..=REQUEST_BYTES + MAX_REQUEST_ID_BYTES).contains(&payload.len()) => {
                let epoch = BootEpoch(payload.get_u64_le());
                let prompt = BlockHash(payload.get_u128_le());
                let (first_block, count) = (payload.get_u32_le(), payload.get_u32_le());
                let block_bytes = payload.get_u32_le();
                String::from_utf8(payload.to_vec()).ok().map(|request| {
                    Self::Request(PullRequest {
                        epoch,
                        request,
                        prompt,
                        first_block,
                        count,
                        block_bytes,
                    })
                })
            }
            2 if payload.is_empty() => Some(Self::Accepted),
            3 if payload.len() == 12 => Refusal::of_code(payload.get_u32_le(), payload.get_u64_le()).map(Self::Refused),
            4 if payload.len() >= 4 => Some(Self::Block {
                index: payload.get_u32_le(),
                data: payload,
            }),
            5 if payload.is_empty() => Some(Self::Ack),
            _ => None,
        };
        message.ok_or(FrameError::Content { kind })
    }
}

impl Refusal {
    fn code(self) -> (u32, u64) {
        match self {
            Self::UnknownExport => (1, 0),
            Self::EpochMismatch { actual } => (2, actual.0),
            Self::PromptMismatch => (3, 0),
            Self::BadRange { available } => (4, u64::from(available)),
            Self::BlockBytesMismatch { actual } => (5, u64::from(actual)),
            Self::Busy => (6, 0),
        }
    }

    fn of_code(code: u32, detail: u64) -> Option<Self> {
        let number = u32::try_from(detail);
        match code {
            1 if detail == 0 => Some(Self::UnknownExport),
            2 => Some(Self::EpochMismatch {
                actual: BootEpoch(detail),
            }),
            3 if detail == 0 => Some(Self::PromptMismatch),
            4 => number.ok().map(|available| Self::BadRange { available }),
            5 => number.ok().map(|actual| Self::BlockBytesMismatch { actual }),
            6 if detail == 0 => Some(Self::Busy),
            _ => None,
        }
    }
}

/// Decodes frames: [`push`](Self::push) bytes as they come, then [`poll`](Self::poll) until it is `None`.
///
/// A header is judged as soon as it is whole, so that a garbled length is never waited for. After an error nothing more
/// is decoded: the connection is to be closed.
#[derive(Debug)]
pub struct FrameDecoder {
    buffer: BytesMut,
    max_payload_bytes: usize,
    failed: Option<FrameError>,
}

impl FrameDecoder {
    /// A decoder that refuses payloads of more than `max_payload_bytes`: [`MAX_CONTROL_BYTES`] at the holder,
    /// [`Self::for_blocks`] at the puller.
    #[must_use]
    pub fn new(max_payload_bytes: usize) -> Self {
        Self {
            buffer: BytesMut::new(),
            max_payload_bytes,
            failed: None,
        }
    }

    /// A decoder for frames of blocks of `block_bytes`.
    #[must_use]
    pub fn for_blocks(block_bytes: u32) -> Self {
        Self::new((block_bytes as usize + 4).max(MAX_CONTROL_BYTES))
    }

    /// Takes more bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Whether no frame has begun: an end of the connection cuts nothing off.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// The next whole message, if there is one.
    ///
    /// # Errors
    /// If the bytes are no frame or were changed on the way; the same error again from then on.
    pub fn poll(&mut self) -> Result<Option<Message>, FrameError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        self.poll_frame().inspect_err(|error| self.failed = Some(*error))
    }

    fn poll_frame(&mut self) -> Result<Option<Message>, FrameError> {
        let Some(header) = self.buffer.first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let header = Header::parse(header, self.max_payload_bytes)?;
        let length = header.length as usize;
        let whole = HEADER_BYTES + length + TRAILER_BYTES;
        if self.buffer.len() < whole {
            self.buffer.reserve(whole - self.buffer.len());
            return Ok(None);
        }
        let mut frame = self.buffer.split_to(whole).freeze();
        let mut trailer = frame.split_off(HEADER_BYTES + length);
        let payload = frame.split_off(HEADER_BYTES);
        match trailer.get_u64_le() == xxh3_64_with_seed(&payload, header.check) {
            true => Message::decode(header.kind, payload).map(Some),
            false => Err(FrameError::PayloadChecksum),
        }
    }
}

struct Header {
    kind: u16,
    length: u32,
    check: u64,
}

impl Header {
    fn parse(bytes: &[u8; HEADER_BYTES], max_payload_bytes: usize) -> Result<Self, FrameError> {
        let (checked, mut rest) = bytes.split_at(HEADER_BYTES - 8);
        let check = rest.get_u64_le();
        let mut fields = checked;
        if !fields.starts_with(&MAGIC) {
            return Err(FrameError::Magic);
        }
        if check != xxh3_64(checked) {
            return Err(FrameError::HeaderChecksum);
        }
        fields.advance(MAGIC.len());
        let (version, kind, length) = (fields.get_u16_le(), fields.get_u16_le(), fields.get_u32_le());
        if version != VERSION {
            return Err(FrameError::Version { found: version });
        }
        match length as usize > max_payload_bytes {
            true => Err(FrameError::TooLong {
                length,
                limit: max_payload_bytes,
            }),
            false => Ok(Self { kind, length, check }),
        }
    }
}

/// Why a pull failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PullError {
    /// The bytes were no frames.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The holder said no.
    #[error("the pull was refused: {0}")]
    Refused(Refusal),
    /// The holder sent something else than what follows.
    #[error("the holder broke the protocol: expected {expected}")]
    Protocol {
        /// What was expected.
        expected: &'static str,
    },
}

/// What a puller learns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pulled {
    /// A block has arrived, verified. They come in order.
    Block {
        /// Its index in the prompt.
        index: u32,
        /// Its KV, of the size that was asked for.
        data: Bytes,
    },
    /// All blocks have arrived: send [`Message::Ack`] and close.
    Done,
}

/// The puller's side: send [`Self::request`], [`push`](Self::push) what comes back, then [`poll`](Self::poll) until it
/// is `None`.
#[derive(Debug)]
pub struct Puller {
    request: PullRequest,
    decoder: FrameDecoder,
    accepted: bool,
    received: u32,
    done: bool,
}

impl Puller {
    /// A pull of what `request` asks for.
    #[must_use]
    pub fn new(request: PullRequest) -> Self {
        let decoder = FrameDecoder::for_blocks(request.block_bytes);
        Self {
            request,
            decoder,
            accepted: false,
            received: 0,
            done: false,
        }
    }

    /// The bytes to send first.
    #[must_use]
    pub fn request(&self) -> Bytes {
        Message::Request(self.request.clone()).encode()
    }

    /// Takes more bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.decoder.push(bytes);
    }

    /// What has arrived, if something has.
    ///
    /// # Errors
    /// If the holder refused, broke the protocol, or a byte was changed on the way. Blocks given out before are whole, but
    /// the pull as such has failed.
    pub fn poll(&mut self) -> Result<Option<Pulled>, PullError> {
        if self.accepted && self.received == self.request.count {
            if !self.decoder.is_empty() {
                return Err(PullError::Protocol {
                    expected: "nothing after the last block",
                });
            }
            return Ok((!std::mem::replace(&mut self.done, true)).then_some(Pulled::Done));
        }
        match self.decoder.poll()? {
            None => Ok(None),
            Some(Message::Refused(refusal)) if !self.accepted => Err(PullError::Refused(refusal)),
            Some(Message::Accepted) if !self.accepted => {
                self.accepted = true;
                self.poll()
            }
            Some(Message::Block { index, data }) if self.accepted => self.take_block(index, data).map(Some),
            Some(_) if self.accepted => Err(PullError::Protocol { expected: "a block" }),
            Some(_) => Err(PullError::Protocol {
                expected: "an acceptance or a refusal",
            }),
        }
    }

    fn take_block(&mut self, index: u32, data: Bytes) -> Result<Pulled, PullError> {
        if Some(index) != self.request.first_block.checked_add(self.received) {
            return Err(PullError::Protocol {
                expected: "the blocks in order",
            });
        }
        if data.len() != self.request.block_bytes as usize {
            return Err(PullError::Protocol {
                expected: "a block of the size asked for",
            });
        }
        self.received += 1;
        Ok(Pulled::Block { index, data })
    }
}

#[cfg(test)]
#[path = "kv_frames_tests.rs"]
mod tests;
