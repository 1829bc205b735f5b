//! Server-sent events: an incremental decoder for any chunking of the bytes, and the encoder.
//!
//! Follows the WHATWG form: lines end in LF, CRLF or CR; a blank line ends an event; lines that begin with a colon are
//! comments. `id` and `retry` are read and dropped, because nobody here reconnects to a stream. An event that the end of
//! the stream cuts off is never given out.

use bytes::{BufMut, Bytes, BytesMut};
use thiserror::Error;

/// The data of the event that ends an OpenAI stream.
pub const DONE: &[u8] = b"[DONE]";
/// The bytes of the event that ends an OpenAI stream.
pub const DONE_EVENT: Bytes = Bytes::from_static(b"data: [DONE]\n\n");
/// A comment line, as an event of nothing: whoever reads server-sent events passes it over.
pub const COMMENT: Bytes = Bytes::from_static(b": waiting\n\n");
/// The bound of an event where the caller has none of its own: a chunk with the ids of a long prompt fits.
pub const DEFAULT_MAX_EVENT_BYTES: usize = 16 << 20;

/// One event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SseEvent {
    /// Its name, where it has one.
    pub event: Option<String>,
    /// Its data lines, joined by LF.
    pub data: Bytes,
}

impl SseEvent {
    /// Whether it ends an OpenAI stream.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.data.as_ref() == DONE
    }

    /// Its bytes on the wire.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(self.data.len() + 32);
        if let Some(name) = &self.event {
            put_line(&mut out, b"event: ", name.as_bytes());
        }
        for line in self.data.split(|byte| *byte == b'\n') {
            put_line(&mut out, b"data: ", line);
        }
        out.put_u8(b'\n');
        out.freeze()
    }
}

/// The bytes of an event that has only data. The data holds no CR, as JSON texts and tokens escape it.
#[must_use]
pub fn encode_data(data: &[u8]) -> Bytes {
    SseEvent {
        event: None,
        data: Bytes::copy_from_slice(data),
    }
    .encode()
}

/// The bytes of a comment, which keeps an idle connection open and that every client ignores.
#[must_use]
pub fn encode_comment(text: &str) -> Bytes {
    let mut out = BytesMut::with_capacity(text.len() + 4);
    put_line(&mut out, b": ", text.as_bytes());
    out.put_u8(b'\n');
    out.freeze()
}

fn put_line(out: &mut BytesMut, prefix: &[u8], line: &[u8]) {
    out.put_slice(prefix);
    out.put_slice(line);
    out.put_u8(b'\n');
}

/// Why a stream cannot be decoded further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SseError {
    /// An event is over the bound.
    #[error("an event of the stream is longer than `{limit}` bytes")]
    TooLong {
        /// The bound in bytes.
        limit: usize,
    },
}

/// Decodes a stream: [`push`](Self::push) bytes as they come, then [`poll`](Self::poll) until it is `None`.
#[derive(Debug)]
pub struct SseDecoder {
    buffer: BytesMut,
    /// Bytes of the buffer that hold no line end.
    scanned: usize,
    /// The last line ended in CR: an LF that follows belongs to it.
    after_carriage_return: bool,
    /// A byte order mark may still come.
    at_start: bool,
    event: Option<String>,
    data: Option<BytesMut>,
    max_event_bytes: usize,
}

impl Default for SseDecoder {
    fn default() -> Self {
        Self::new(DEFAULT_MAX_EVENT_BYTES)
    }
}

impl SseDecoder {
    /// A decoder that refuses events of more than `max_event_bytes`.
    #[must_use]
    pub fn new(max_event_bytes: usize) -> Self {
        Self {
            buffer: BytesMut::new(),
            scanned: 0,
            after_carriage_return: false,
            at_start: true,
            event: None,
            data: None,
            max_event_bytes,
        }
    }

    /// Takes more bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole event, if there is one.
    ///
    /// # Errors
    /// If an event, finished or not, is over the bound. Nothing more is decoded then.
    pub fn poll(&mut self) -> Result<Option<SseEvent>, SseError> {
        while let Some(line) = self.next_line() {
            if let Some(event) = self.take_line(&line) {
                return Ok(Some(event));
            }
            self.check_bound()?;
        }
        self.check_bound()?;
        Ok(None)
    }

    /// Whether nothing is left that an end of the stream would cut off.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty() && self.data.is_none() && self.event.is_none()
    }

    fn check_bound(&self) -> Result<(), SseError> {
        let held = self.buffer.len() + self.data.as_ref().map_or(0, BytesMut::len);
        // What has been pushed may hold several whole events: only the part without a line end counts.
        let unfinished = if self.scanned == self.buffer.len() {
            held
        } else {
            held - self.buffer.len()
        };
        match unfinished > self.max_event_bytes {
            true => Err(SseError::TooLong {
                limit: self.max_event_bytes,
            }),
            false => Ok(()),
        }
    }

    fn next_line(&mut self) -> Option<Bytes> {
        if self.after_carriage_return && self.buffer.first() == Some(&b'\n') {
            let _line_feed = self.buffer.split_to(1);
        }
        if !self.buffer.is_empty() {
            self.after_carriage_return = false;
        }
        let end = self.buffer[self.scanned..]
            .iter()
            .position(|byte| matches!(byte, b'\n' | b'\r'));
        let Some(end) = end.map(|offset| self.scanned + offset) else {
            self.scanned = self.buffer.len();
            return None;
        };
        self.scanned = 0;
        self.after_carriage_return = self.buffer[end] == b'\r';
        let line = self.buffer.split_to(end + 1).freeze();
        Some(line.slice(..end))
    }

    fn take_line(&mut self, line: &Bytes) -> Option<SseEvent> {
        const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
        let line = match std::mem::take(&mut self.at_start) && line.starts_with(BYTE_ORDER_MARK) {
            true => line.slice(BYTE_ORDER_MARK.len()..),
            false => line.clone(),
        };
        if line.is_empty() {
            let event = self.event.take();
            return self.data.take().map(|data| SseEvent {
                event,
                data: data.freeze(),
            });
        }
        let (field, value) = match line.iter().position(|byte| *byte == b':') {
            Some(colon) => (&line[..colon], &line[colon + 1..]),
            None => (&line[..], &[][..]),
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match field {
            b"data" => match &mut self.data {
                Some(data) => {
                    data.put_u8(b'\n');
                    data.put_slice(value);
                }
                None => self.data = Some(BytesMut::from(value)),
            },
            b"event" => self.event = Some(String::from_utf8_lossy(value).into_owned()),
            // Comments (an empty field), `id`, `retry` and what else there may be.
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decode(chunks: &[&[u8]]) -> Vec<SseEvent> {
        let mut decoder = SseDecoder::default();
        let mut events = Vec::new();
        for chunk in chunks {
            decoder.push(chunk);
            while let Some(event) = decoder.poll().expect("within the bound") {
                events.push(event);
            }
        }
        events
    }

    #[test]
    fn events_are_read() {
        let check = |stream: &str, expected: &[(Option<&str>, &str)]| {
            let expected: Vec<SseEvent> = expected
                .iter()
                .map(|(name, data)| SseEvent {
                    event: name.map(str::to_owned),
                    data: Bytes::copy_from_slice(data.as_bytes()),
                })
                .collect();
            assert_eq!(decode(&[stream.as_bytes()]), expected, "{stream:?} at once");
            let bytes: Vec<&[u8]> = stream.as_bytes().chunks(1).collect();
            assert_eq!(decode(&bytes), expected, "{stream:?} byte by byte");
        };
        check("data: a\n\n", &[(None, "a")]);
        check(
            "data:a\r\n\r\ndata:  b\r\rdata: [DONE]\n\n",
            &[(None, "a"), (None, " b"), (None, "[DONE]")],
        );
        check("data: a\ndata:\ndata: b\n\n", &[(None, "a\n\nb")]);
        check(
            ": hi\n\nevent: error\nid: 7\nretry: 5\ndata: {}\n\n",
            &[(Some("error"), "{}")],
        );
        check("event: lonely\n\ndata: x\n\n", &[(None, "x")]);
        check("\u{feff}data: x\n\n", &[(None, "x")]);
        check("data\n\ndatax: no\n\n", &[(None, "")]);
        check("data: cut off\n", &[]);
        check("data: cut off", &[]);
    }

    #[test]
    fn what_is_cut_off_is_seen() {
        let mut decoder = SseDecoder::default();
        decoder.push(b"data: a\n\ndata: b\n");
        assert_eq!(
            decoder.poll().map(|event| event.map(|event| event.data)),
            Ok(Some(Bytes::from_static(b"a")))
        );
        assert_eq!(decoder.poll(), Ok(None));
        assert!(!decoder.is_empty(), "an event has begun");
        decoder.push(b"\n");
        assert!(decoder.poll().is_ok_and(|event| event.is_some()) && decoder.is_empty());
    }

    #[test]
    fn a_long_event_is_refused_and_many_short_ones_are_not() {
        let error = SseError::TooLong { limit: 100 };
        let mut decoder = SseDecoder::new(100);
        decoder.push("data: x\n\n".repeat(1000).as_bytes());
        while decoder.poll().expect("each event is short").is_some() {}
        decoder.push(&[b'x'; 101]);
        assert_eq!(decoder.poll(), Err(error), "one line without an end");
        let mut decoder = SseDecoder::new(100);
        decoder.push("data: x\n".repeat(1000).as_bytes());
        assert_eq!(decoder.poll(), Err(error), "many lines without a blank one");
    }

    proptest! {
        #[test]
        fn any_chunking_gives_the_same_events(
            events in prop::collection::vec(("[a-z]{0,3}", "[ -~\n]{0,20}"), 0..8),
            cuts in prop::collection::vec(0_usize..400, 0..20),
            line_end in prop::sample::select(vec!["\n", "\r\n", "\r"]),
        ) {
            let expected: Vec<SseEvent> = events
                .iter()
                .map(|(name, data)| SseEvent {
                    event: (!name.is_empty()).then(|| name.clone()),
                    data: Bytes::copy_from_slice(data.as_bytes()),
                })
                .collect();
            let stream: String =
                expected.iter().map(|event| String::from_utf8_lossy(&event.encode()).replace('\n', line_end)).collect();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(stream.len())).collect();
            cuts.extend([0, stream.len()]);
            cuts.sort_unstable();
            let chunks: Vec<&[u8]> = cuts.windows(2).map(|cut| &stream.as_bytes()[cut[0]..cut[1]]).collect();
            prop_assert_eq!(decode(&chunks), expected);
        }

        #[test]
        fn garbage_never_panics(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..10)) {
            let mut decoder = SseDecoder::new(64);
            for chunk in &chunks {
                decoder.push(chunk);
                while let Ok(Some(_)) = decoder.poll() {}
            }
        }
    }
}
