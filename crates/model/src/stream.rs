//! The text of a stream of tokens, never with half a character.
//!
//! A token is a run of bytes and may end inside a character. What is complete is given at once; the beginning of a
//! character waits for the rest.

use crate::tokenizer::Tokenizer;

/// Decodes token by token: what it gives, put together, is what [`Tokenizer::decode`] gives for all tokens at once.
/// It holds back at most three bytes, the beginning of a character.
pub struct StreamDecoder {
    tokenizer: Tokenizer,
    pending: Vec<u8>,
}

impl StreamDecoder {
    pub(crate) fn new(tokenizer: Tokenizer) -> Self {
        Self {
            tokenizer,
            pending: Vec::new(),
        }
    }

    /// The text that is complete with this token; empty while a character is not.
    pub fn push(&mut self, token: u32) -> String {
        self.pending.extend_from_slice(self.tokenizer.text_bytes(token));
        let mut text = String::new();
        let mut held = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            // Only the last chunk can be the beginning of a character; any other invalid run is over.
            let begun = chunk.invalid();
            if is_begun_character(begun) && self.pending.ends_with(begun) && is_last(chunk, &self.pending) {
                held = begun.len();
            } else if !begun.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.pending.drain(..self.pending.len() - held);
        text
    }

    /// What is left at the end of the stream: U+FFFD for a character that was never completed.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

/// Whether a chunk's bytes are the last ones of `bytes`.
fn is_last(chunk: std::str::Utf8Chunk<'_>, bytes: &[u8]) -> bool {
    std::ptr::eq(chunk.invalid().as_ptr_range().end, bytes.as_ptr_range().end)
}

/// Whether bytes are a proper beginning of some character's UTF-8, so that more bytes could complete it.
fn is_begun_character(bytes: &[u8]) -> bool {
    !bytes.is_empty()
        && std::str::from_utf8(bytes).is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_stream_says_what_the_whole_says(
            tokens in prop::collection::vec(prop_oneof![
                0u32..260,
                prop::sample::select("aé€😀\u{301}".bytes().map(u32::from).collect::<Vec<_>>()),
            ], 0..40),
        ) {
            let tokenizer = Tokenizer::bytes();
            let mut stream = tokenizer.stream();
            let mut text = String::new();
            for token in &tokens {
                text.push_str(&stream.push(*token));
                prop_assert!(stream.pending.len() <= 3, "held back {:?}", stream.pending);
            }
            text.push_str(&stream.finish());
            prop_assert_eq!(text, tokenizer.decode(&tokens));
        }
    }

    #[test]
    fn no_half_character_is_streamed() {
        let mut stream = Tokenizer::bytes().stream();
        let shown: Vec<String> = "aé😀".bytes().map(|byte| stream.push(u32::from(byte))).collect();
        assert_eq!(shown, ["a", "", "é", "", "", "", "😀"]);
    }
}
