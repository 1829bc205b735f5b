//! Text to tokens and back: GGUF's `gpt2` tokenizers (byte-level BPE), the bytes of `tiny`, and what `hugging_face.rs` reads.
//!
//! Encoding is the `tokenizers` crate's. Decoding is ours, on bytes: a token is a run of bytes, text is what these bytes
//! say in UTF-8, and a stream can be cut after any token without ever showing half a character.

use crate::alphabet::{spelled_bytes, spelling};
use crate::cuts::{Cuts, Uncuttable};
use crate::seams::{PIECE_BYTES, Seams};
use crate::stream::StreamDecoder;
use std::sync::Arc;
use tokenizers::AddedToken;
use tokenizers::models::bpe::{BPE, Merges};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;

/// The special tokens of `tiny`, after its 256 bytes.
pub(crate) const BYTE_SPECIALS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// Control tokens that end an answer in one model family or another, besides those that a model declares.
const ENDS: [&str; 5] = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
];

/// How Llama 3 cuts text before it merges.
pub(crate) const LLAMA_3_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A tokenizer. Cloning shares it.
#[derive(Clone)]
pub struct Tokenizer {
    shared: Arc<Shared>,
}

struct Shared {
    encoder: tokenizers::Tokenizer,
    tokens: Vec<Token>,
    bos: Option<u32>,
    /// Sorted.
    ends: Vec<u32>,
    cuts: Result<Cuts, Uncuttable>,
    seams: Seams,
}

/// A token's bytes, and whether it is a control token, which is no part of the text.
pub(crate) struct Token {
    pub(crate) bytes: Box<[u8]>,
    pub(crate) control: bool,
}

/// What a tokenizer is made of.
#[derive(Clone, Debug, Default)]
pub struct TokenizerParts {
    /// Tokens in the order of their ids, spelt in GPT-2's alphabet of bytes (control and user-defined ones as they are).
    pub tokens: Vec<String>,
    /// What kind of token each is.
    pub kinds: Vec<TokenKind>,
    /// Merges in the order of their ranks.
    pub merges: Vec<(String, String)>,
    /// How text is cut before merging.
    pub cut: Cut,
    /// The token that begins every prompt, where the model wants one.
    pub bos: Option<u32>,
    /// The tokens that the model declares to end an answer. Control tokens that do so in other models are added.
    pub ends: Vec<u32>,
}

/// What a token stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// A run of bytes, found by merging.
    Normal,
    /// A marker such as `<|im_end|>`: found verbatim in prompts, no part of the text of an answer.
    Control,
    /// Found verbatim, and part of the text.
    UserDefined,
}

/// How text is cut before merging.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cut {
    /// GPT-2's pattern.
    #[default]
    Gpt2,
    /// Each digit alone, then GPT-2's pattern.
    SmolLm,
    /// Llama 3's pattern; a piece that is a token is taken whole.
    Llama3,
}

/// Why a tokenizer could not be made.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// Byte-level BPE needs a token for each printable ASCII character, the space and the newline.
    #[error("the vocabulary has no token for byte `{byte:#04x}`, expected byte-level BPE")]
    MissingByte {
        /// The byte.
        byte: u8,
    },
    /// Not one kind for each token.
    #[error("{kinds} token types for {tokens} tokens, expected one for each")]
    Kinds {
        /// Types that came.
        kinds: usize,
        /// Tokens that came.
        tokens: usize,
    },
    /// A special token's id is outside the vocabulary.
    #[error("special token `{id}` is outside the vocabulary, expected less than {tokens}")]
    Special {
        /// The id.
        id: u32,
        /// Tokens of the vocabulary.
        tokens: usize,
    },
    /// The merges do not fit the vocabulary.
    #[error("the merges do not fit the vocabulary: {0}")]
    Merges(String),
}

impl Tokenizer {
    /// The tokenizer of these parts.
    ///
    /// # Errors
    /// If the parts do not fit together.
    pub fn new(parts: TokenizerParts) -> Result<Self, TokenizerError> {
        let count = parts.tokens.len();
        if parts.kinds.len() != count {
            return Err(TokenizerError::Kinds {
                kinds: parts.kinds.len(),
                tokens: count,
            });
        }
        if let Some(id) = parts
            .bos
            .iter()
            .chain(&parts.ends)
            .copied()
            .find(|id| *id as usize >= count)
        {
            return Err(TokenizerError::Special { id, tokens: count });
        }
        let tokens: Vec<Token> = parts
            .tokens
            .iter()
            .zip(&parts.kinds)
            .map(|(text, kind)| token(text, *kind))
            .collect();
        let mut ends = parts.ends.clone();
        for (id, (text, kind)) in (0..).zip(parts.tokens.iter().zip(&parts.kinds)) {
            if *kind == TokenKind::Control && ends_answers(text) {
                ends.push(id);
            }
        }
        let bos = parts.bos;
        Ok(Self::assemble(encoder(parts)?, tokens, bos, ends))
    }

    /// A tokenizer of an encoder and what its tokens stand for.
    pub(crate) fn assemble(
        encoder: tokenizers::Tokenizer,
        tokens: Vec<Token>,
        bos: Option<u32>,
        mut ends: Vec<u32>,
    ) -> Self {
        ends.sort_unstable();
        ends.dedup();
        let cuts = Cuts::of(&encoder);
        let seams = Seams::of(&encoder, &cuts);
        Self {
            shared: Arc::new(Shared {
                encoder,
                tokens,
                bos,
                ends,
                cuts,
                seams,
            }),
        }
    }

    /// The tokenizer of `tiny`: token `b` is byte `b`, then the special tokens.
    #[must_use]
    pub fn bytes() -> Self {
        Self::new(byte_parts()).expect("every byte has a token")
    }

    /// The tokens of a text. Control tokens that are spelt out in it (as a chat template does) become these tokens.
    /// A byte that the vocabulary cannot spell is left out, as in the model's own tokenizer (SmolLM2 lacks a few control
    /// characters).
    #[must_use]
    pub fn encode(&self, text: &str) -> Vec<u32> {
        self.encode_in_pieces(text, PIECE_BYTES)
    }

    /// The same in pieces of this many bytes or more, so that little is held on the way.
    pub(crate) fn encode_in_pieces(&self, text: &str, bytes_min: usize) -> Vec<u32> {
        let Shared {
            encoder, cuts, seams, ..
        } = &*self.shared;
        let (mut ids, mut from) = (Vec::new(), 0);
        while from < text.len() {
            let to = seams.next(text, from, bytes_min, cuts.as_ref().ok());
            let encoding = encoder.encode_fast(&text[from..to], false);
            ids.extend_from_slice(encoding.expect("a tokenizer takes any text").get_ids());
            from = to;
        }
        ids
    }

    /// The tokens of a plain prompt: [`encode`](Self::encode), after the token that begins prompts if the model has one.
    /// A chat template writes that token itself.
    #[must_use]
    pub fn encode_prompt(&self, text: &str) -> Vec<u32> {
        let mut tokens = self.encode(text);
        if let Some(bos) = self.shared.bos
            && tokens.first() != Some(&bos)
        {
            tokens.insert(0, bos);
        }
        tokens
    }

    /// Where a long text is cut before it is tokenised.
    #[cfg(test)]
    pub(crate) fn seams(&self) -> Seams {
        self.shared.seams
    }

    /// Where texts may be cut.
    ///
    /// # Errors
    /// Nowhere, and why.
    pub(crate) fn cuts(&self) -> Result<&Cuts, Uncuttable> {
        self.shared.cuts.as_ref().map_err(|reason| *reason)
    }

    /// The text of tokens. Control tokens are left out; bytes that are no UTF-8 become U+FFFD.
    #[must_use]
    pub fn decode(&self, tokens: &[u32]) -> String {
        let bytes: Vec<u8> = tokens
            .iter()
            .flat_map(|token| self.text_bytes(*token))
            .copied()
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// A decoder that is fed one token after the other.
    #[must_use]
    pub fn stream(&self) -> StreamDecoder {
        StreamDecoder::new(self.clone())
    }

    /// The bytes that a token adds to a text: none for a control token or one outside the vocabulary.
    #[must_use]
    pub fn text_bytes(&self, token: u32) -> &[u8] {
        match self.shared.tokens.get(token as usize) {
            Some(token) if !token.control => &token.bytes,
            Some(_) | None => &[],
        }
    }

    /// How a token is written out, for showing it: a control token by its name.
    #[must_use]
    pub fn spelled(&self, token: u32) -> String {
        let bytes = self
            .shared
            .tokens
            .get(token as usize)
            .map_or(&[][..], |token| &token.bytes);
        String::from_utf8_lossy(bytes).into_owned()
    }

    /// The id of a control token such as `<|im_end|>`.
    #[must_use]
    pub fn control(&self, name: &str) -> Option<u32> {
        let id = self.shared.encoder.token_to_id(name)?;
        self.shared
            .tokens
            .get(id as usize)
            .filter(|token| token.control)
            .map(|_| id)
    }

    /// The tokens that end an answer, in ascending order.
    #[must_use]
    pub fn end_tokens(&self) -> &[u32] {
        &self.shared.ends
    }

    /// Whether a token ends an answer.
    #[must_use]
    pub fn is_end(&self, token: u32) -> bool {
        self.shared.ends.binary_search(&token).is_ok()
    }

    /// The token that begins plain prompts, if the model wants one.
    #[must_use]
    pub fn bos(&self) -> Option<u32> {
        self.shared.bos
    }

    /// Tokens of the vocabulary.
    #[must_use]
    pub fn vocab(&self) -> usize {
        self.shared.tokens.len()
    }
}

/// Whether a control token of this name ends an answer in one model family or another.
pub(crate) fn ends_answers(name: &str) -> bool {
    ENDS.contains(&name)
}

/// The parts of [`Tokenizer::bytes`].
pub(crate) fn byte_parts() -> TokenizerParts {
    let specials = BYTE_SPECIALS.map(str::to_owned);
    let mut kinds = vec![TokenKind::Normal; 256];
    kinds.resize(256 + specials.len(), TokenKind::Control);
    let tokens = (0..=u8::MAX)
        .map(|byte| spelling(byte).to_string())
        .chain(specials)
        .collect();
    TokenizerParts {
        tokens,
        kinds,
        ..TokenizerParts::default()
    }
}

fn token(text: &str, kind: TokenKind) -> Token {
    let bytes = match kind {
        TokenKind::Normal => spelled_bytes(text),
        TokenKind::Control | TokenKind::UserDefined => None,
    };
    let bytes = bytes.unwrap_or_else(|| text.as_bytes().to_vec());
    Token {
        bytes: bytes.into_boxed_slice(),
        control: kind == TokenKind::Control,
    }
}

fn encoder(parts: TokenizerParts) -> Result<tokenizers::Tokenizer, TokenizerError> {
    let (mut controls, mut user_defined) = (Vec::new(), Vec::new());
    for (text, kind) in parts.tokens.iter().zip(&parts.kinds) {
        match kind {
            TokenKind::Normal => {}
            TokenKind::Control => controls.push(AddedToken::from(text.clone(), true)),
            TokenKind::UserDefined => user_defined.push(AddedToken::from(text.clone(), false).normalized(false)),
        }
    }
    let vocabulary: tokenizers::models::bpe::Vocab = parts.tokens.into_iter().zip(0..).collect();
    let has = |byte: &u8| vocabulary.contains_key(&spelling(*byte).to_string());
    if let Some(byte) = (b' '..=b'~').chain([b'\n']).find(|byte| !has(byte)) {
        return Err(TokenizerError::MissingByte { byte });
    }
    let merges: Merges = parts.merges;
    let builder = BPE::builder()
        .vocab_and_merges(vocabulary, merges)
        .ignore_merges(parts.cut == Cut::Llama3);
    let mut encoder = tokenizers::Tokenizer::new(
        builder
            .build()
            .map_err(|error| TokenizerError::Merges(error.to_string()))?,
    );
    encoder.with_pre_tokenizer(Some(pre_tokenizer(parts.cut)));
    encoder
        .add_special_tokens(controls)
        .expect("a control token is in the vocabulary");
    encoder
        .add_tokens(user_defined)
        .expect("a user-defined token is in the vocabulary");
    Ok(encoder)
}

fn pre_tokenizer(cut: Cut) -> PreTokenizerWrapper {
    let byte_level = |use_regex| ByteLevel::new(false, true, use_regex).into();
    match cut {
        Cut::Gpt2 => byte_level(true),
        Cut::SmolLm => Sequence::new(vec![Digits::new(true).into(), byte_level(true)]).into(),
        Cut::Llama3 => {
            let pattern = SplitPattern::Regex(LLAMA_3_PATTERN.to_owned());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).expect("the pattern is valid");
            Sequence::new(vec![split.into(), byte_level(false)]).into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bytes_are_tokens_and_control_tokens_are_found() {
        let tokenizer = Tokenizer::bytes();
        let check = |text: &str, expected: &[u32]| {
            assert_eq!(tokenizer.encode(text), expected, "{text:?}");
            assert_eq!(tokenizer.encode_prompt(text), expected, "no token begins prompts");
        };
        check("", &[]);
        check("Hi  é\n", &[72, 105, 32, 32, 0xc3, 0xa9, 10]);
        check("<|im_start|>a<|im_end|>", &[257, 97, 258]);
        check("<|im_star", &[60, 124, 105, 109, 95, 115, 116, 97, 114]);
        assert_eq!(tokenizer.end_tokens(), [256, 258]);
        assert_eq!(tokenizer.control("<|im_start|>"), Some(257));
        assert_eq!(tokenizer.control("a"), None);
        assert_eq!(
            tokenizer.decode(&[257, 72, 105, 258, 9999]),
            "Hi",
            "control and unknown tokens are no text"
        );
        assert_eq!(tokenizer.spelled(257), "<|im_start|>");
    }

    #[test]
    fn merges_and_cuts_follow_the_model() {
        let mut parts = byte_parts();
        for token in ["th", "the", "Ġthe", "12", "<sep>"] {
            parts.tokens.push(token.to_owned());
            parts.kinds.push(if token == "<sep>" {
                TokenKind::UserDefined
            } else {
                TokenKind::Normal
            });
        }
        let pairs = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2")];
        parts.merges = pairs.map(|(left, right)| (left.to_owned(), right.to_owned())).to_vec();
        parts.bos = Some(256);
        let check = |cut, text: &str, expected: &[u32]| {
            let tokenizer = Tokenizer::new(TokenizerParts { cut, ..parts.clone() }).unwrap();
            assert_eq!(tokenizer.encode(text), expected, "{cut:?} {text:?}");
            assert_eq!(
                tokenizer.encode_prompt(text)[..2],
                [256, expected[0]],
                "the first token begins prompts"
            );
            assert_eq!(tokenizer.decode(expected), text);
        };
        check(Cut::Gpt2, "the the<sep>12", &[260, 261, 263, 262]);
        check(Cut::SmolLm, "the the<sep>12", &[260, 261, 263, 49, 50]);
        check(Cut::Llama3, "the the<sep>12", &[260, 261, 263, 262]);
    }

    #[test]
    fn a_vocabulary_without_bytes_is_refused() {
        let mut parts = byte_parts();
        parts.tokens[usize::from(b'a')] = "other".to_owned();
        assert!(matches!(
            Tokenizer::new(parts),
            Err(TokenizerError::MissingByte { byte: b'a' })
        ));
        let mut parts = byte_parts();
        parts.tokens[7] = "bell".to_owned();
        assert_eq!(
            Tokenizer::new(parts).unwrap().encode("a\u{7}b"),
            [97, 98],
            "an unspellable byte is left out"
        );
    }

    proptest! {
        #[test]
        fn any_text_survives_a_round_trip(text in any::<String>()) {
            let tokenizer = Tokenizer::bytes();
            prop_assert_eq!(tokenizer.decode(&tokenizer.encode(&text)), text);
        }
    }
}
