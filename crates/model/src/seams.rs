//! Where a long text is cut so that it can be tokenised piece by piece: what the `tokenizers` crate builds on the way takes some 300 bytes
//! a token, megabytes for one long message, and is dropped as soon as the ids are out.
//!
//! One seam is before a marker (`cuts.rs`). Within a message there is another, for tokenizers whose pre-tokenizer cuts text into words by one of
//! the patterns known here: between an ASCII letter and a space or line feed. In each of these patterns no match holds a letter
//! with white space after it, and none looks back. A match that reaches the letter therefore ends with it, whatever follows, and the next begins
//! at the white space, whatever came before. Merges stay within a match. A normaliser other than NFC, which composes no letter with a
//! space, could reach over it, and so could an added token that holds white space or takes it from beside it: then there is no such seam.

use crate::cuts::{Cuts, Uncuttable};
use crate::tokenizer::LLAMA_3_PATTERN;
use tokenizers::AddedToken;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;

/// A piece is at least so long, in bytes: some hundred kilobytes on the way.
pub(crate) const PIECE_BYTES: usize = 2_048;

/// How Qwen2 and later cut text before they merge.
pub(crate) const QWEN_2_PATTERN: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Where a tokenizer's texts can be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seams {
    /// Before markers and after words.
    Words,
    /// Before markers.
    Markers,
    /// Nowhere: the whole is more than its parts.
    None,
}

impl Seams {
    /// Those of a tokenizer with these cuts.
    pub(crate) fn of(encoder: &tokenizers::Tokenizer, cuts: &Result<Cuts, Uncuttable>) -> Self {
        let added = encoder.get_added_vocabulary().get_added_tokens_decoder().values();
        let words = encoder
            .get_normalizer()
            .is_none_or(|normalizer| matches!(normalizer, NormalizerWrapper::NFC(_)))
            && encoder.get_pre_tokenizer().is_some_and(cuts_after_words)
            && added.into_iter().all(keeps_off_white_space);
        match cuts {
            Ok(_) | Err(Uncuttable::NoMarker) if words => Self::Words,
            Ok(_) => Self::Markers,
            Err(_) => Self::None,
        }
    }

    /// Where the piece that begins at `from` ends: at the first seam after `bytes_min` bytes, or with the text.
    pub(crate) fn next(self, text: &str, from: usize, bytes_min: usize, cuts: Option<&Cuts>) -> usize {
        let from = from.saturating_add(bytes_min.max(1));
        let word = (self == Self::Words).then(|| after_word(text.as_bytes(), from));
        let marker = || (self != Self::None).then(|| Some(cuts?.next(text, from)?.at));
        word.flatten().or_else(|| marker().flatten()).unwrap_or(text.len())
    }
}

/// The first place from `from` on that follows a letter and begins with white space.
fn after_word(text: &[u8], from: usize) -> Option<usize> {
    let pairs = text.get(from - 1..)?.windows(2);
    let mut ends = pairs.map(|pair| pair[0].is_ascii_alphabetic() && matches!(pair[1], b' ' | b'\n'));
    ends.position(|ends| ends).map(|offset| from + offset)
}

/// Whether a pre-tokenizer cuts between each letter and the white space after it, wherever the text begins and ends.
fn cuts_after_words(pre_tokenizer: &PreTokenizerWrapper) -> bool {
    let of_bytes = |level: &ByteLevel, use_regex: bool| !level.add_prefix_space && level.use_regex == use_regex;
    match pre_tokenizer {
        PreTokenizerWrapper::ByteLevel(level) => of_bytes(level, true),
        PreTokenizerWrapper::Sequence(parts) => match parts.as_ref() {
            [PreTokenizerWrapper::Digits(_), PreTokenizerWrapper::ByteLevel(level)] => of_bytes(level, true),
            [PreTokenizerWrapper::Split(split), PreTokenizerWrapper::ByteLevel(level)] => {
                is_known(split) && of_bytes(level, false)
            }
            _ => false,
        },
        _ => false,
    }
}

fn is_known(split: &Split) -> bool {
    let known = |pattern: &SplitPattern| match pattern {
        SplitPattern::Regex(pattern) => [LLAMA_3_PATTERN, QWEN_2_PATTERN].contains(&pattern.as_str()),
        SplitPattern::String(_) => false,
    };
    split.behavior == SplitDelimiterBehavior::Isolated && !split.invert && known(&split.pattern)
}

/// Whether an added token neither holds white space nor takes or asks for any beside it.
fn keeps_off_white_space(token: &AddedToken) -> bool {
    !token.lstrip && !token.rstrip && !token.single_word && !token.content.contains(char::is_whitespace)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::tokenizer::byte_parts;
    use crate::{Cut, TokenKind, Tokenizer, TokenizerParts};
    use tokenizers::models::bpe::BPE;
    use tokenizers::normalizers::{Lowercase, NFC};
    use tokenizers::pre_tokenizers::sequence::Sequence;

    /// Bytes, and merges that make words of them; some would reach over white space if nothing cut before it.
    pub(crate) fn of_words(cut: Cut) -> Tokenizer {
        let mut parts = TokenizerParts { cut, ..byte_parts() };
        let chains = [
            "hello", "the", "router", "Ġthe", "Ġrouter", "12", "'s", "ĠĠĠ", "ĊĊ", "rĠ", "eĊ", "lloĠ",
        ];
        for chain in chains {
            let ends: Vec<usize> = chain
                .char_indices()
                .map(|(at, _)| at)
                .skip(1)
                .chain([chain.len()])
                .collect();
            for (at, end) in ends.iter().zip(&ends[1..]) {
                let merged = chain[..*end].to_owned();
                if !parts.tokens.contains(&merged) {
                    parts
                        .merges
                        .push((chain[..*at].to_owned(), chain[*at..*end].to_owned()));
                    parts.tokens.push(merged);
                    parts.kinds.push(TokenKind::Normal);
                }
            }
        }
        Tokenizer::new(parts).unwrap()
    }

    #[test]
    fn a_piece_ends_after_a_word_or_before_a_marker() {
        let tokenizer = Tokenizer::bytes();
        let check = |text: &str, from: usize, bytes_min: usize, expected: usize| {
            let end = Seams::Words.next(text, from, bytes_min, tokenizer.cuts().ok());
            assert_eq!(end, expected, "{text:?} from {from}, at least {bytes_min}");
        };
        check("", 0, 4, 0);
        check("one two", 0, 0, 3);
        check("one two", 0, 3, 3);
        check("one two", 0, 4, 7);
        check("one\n\ntwo 3 4. four six", 3, 3, 8);
        check("one\n\ntwo 3 4. four six", 8, 3, 18);
        check("né 日本 1<|im_end|>1 2", 0, 1, 12);
        check("é é é", 0, 1, 8);
    }

    #[test]
    fn only_known_patterns_have_seams_after_words() {
        let check = |expected: Seams, change: &dyn Fn(&mut tokenizers::Tokenizer)| {
            let mut encoder = tokenizers::Tokenizer::new(BPE::default());
            encoder.add_special_tokens([AddedToken::from("<|end|>", true)]).unwrap();
            encoder.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
            change(&mut encoder);
            assert_eq!(Seams::of(&encoder, &Cuts::of(&encoder)), expected);
        };
        let split = |pattern: &str| {
            let pattern = SplitPattern::Regex(pattern.to_owned());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap();
            Sequence::new(vec![split.into(), ByteLevel::new(false, true, false).into()])
        };
        check(Seams::Words, &|_| ());
        check(Seams::Words, &|encoder| {
            encoder.with_pre_tokenizer(Some(split(QWEN_2_PATTERN)));
            encoder.with_normalizer(Some(NFC)).unwrap();
        });
        check(Seams::Markers, &|encoder| {
            encoder.with_pre_tokenizer(Some(split(r"\w+\s+")));
        });
        check(Seams::Markers, &|encoder| {
            encoder.with_pre_tokenizer(Some(ByteLevel::new(true, true, true)));
        });
        check(Seams::Markers, &|encoder| {
            encoder.with_normalizer(Some(Lowercase)).unwrap();
        });
        check(Seams::Markers, &|encoder| {
            encoder.add_tokens([AddedToken::from("end of", false)]).unwrap();
        });
        check(Seams::None, &|encoder| {
            encoder.with_padding(Some(tokenizers::PaddingParams::default()));
        });
        for cut in [Cut::Gpt2, Cut::SmolLm, Cut::Llama3] {
            assert_eq!(of_words(cut).seams(), Seams::Words, "{cut:?}");
        }
    }
}
