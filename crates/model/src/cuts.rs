//! Where a text may be cut so that its parts, tokenised one by one, give the tokens of the whole.
//!
//! A tokenizer first finds its added tokens (`<|im_start|>`) in the raw text, from left to right, the longest that fits;
//! what lies between two of them is a piece. Normaliser, pre-tokenizer and model then see each piece alone, so that
//! nothing reaches over an added token: not a merge, not a combining character, not the space that SentencePiece puts
//! before a text. A cut right before an added token, which begins the second part, is therefore safe if that token is
//! found there whatever surrounds it. A token for which that holds is a *marker*:
//!
//! - it is looked for in the raw text, not in the normalised one, where a normaliser may reach over it;
//! - it strips no white space beside it, and need not be a word of its own;
//! - it begins with ASCII punctuation: white space could be stripped away by the token before it, and a letter or digit
//!   could keep that token from being a word of its own;
//! - no other added token of the raw text overlaps it, in any text.
//!
//! A vocabulary without markers, and a tokenizer for which the whole is more than its parts (it truncates, pads, or draws
//! lots), cannot be cut, and says why.

use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::{AddedToken, ModelWrapper};

/// The markers of a tokenizer.
pub(crate) struct Cuts {
    /// Sorted, so that those with one first byte lie together.
    markers: Vec<Box<str>>,
    /// For each byte, whether a marker begins with it.
    begins: Box<[bool; 256]>,
}

/// Why a tokenizer's texts cannot be cut: every prompt is tokenised from its beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Uncuttable {
    /// No added token is found whatever surrounds it.
    #[error("no added token is found whatever surrounds it, expected one such as `<|im_start|>`")]
    NoMarker,
    /// Special tokens in a text are taken for text.
    #[error("special tokens in a text are taken for text")]
    SpecialsAsText,
    /// Long texts are truncated.
    #[error("long texts are truncated")]
    Truncates,
    /// Short texts are padded.
    #[error("short texts are padded")]
    Pads,
    /// One text has different tokens each time.
    #[error("merges are left out, or pieces drawn, by chance")]
    Random,
}

/// A marker in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Where it begins, in bytes: the cut is before it.
    pub(crate) at: usize,
    /// Where it ends.
    pub(crate) end: usize,
}

impl Cuts {
    /// The markers of a tokenizer.
    pub(crate) fn of(encoder: &tokenizers::Tokenizer) -> Result<Self, Uncuttable> {
        if encoder.get_added_vocabulary().get_encode_special_tokens() {
            return Err(Uncuttable::SpecialsAsText);
        }
        if encoder.get_truncation().is_some() {
            return Err(Uncuttable::Truncates);
        }
        if encoder.get_padding().is_some() {
            return Err(Uncuttable::Pads);
        }
        if draws_lots(encoder.get_model()) {
            return Err(Uncuttable::Random);
        }
        let whole_pieces = encoder.get_normalizer().is_none_or(normalises_each_piece)
            && encoder.get_pre_tokenizer().is_none_or(splits_each_piece);
        assert!(whole_pieces, "every kind that is known works on one piece at a time");
        let added = encoder.get_added_vocabulary().get_added_tokens_decoder().values();
        let raw: Vec<&AddedToken> = added.filter(|token| !token.normalized).collect();
        let markers = raw.iter().filter(|token| is_marker(token, &raw));
        Self::new(markers.map(|token| token.content.as_str().into()).collect())
    }

    fn new(mut markers: Vec<Box<str>>) -> Result<Self, Uncuttable> {
        if markers.is_empty() {
            return Err(Uncuttable::NoMarker);
        }
        markers.sort_unstable();
        let mut begins = Box::new([false; 256]);
        for marker in &markers {
            begins[usize::from(marker.as_bytes()[0])] = true;
        }
        Ok(Self { markers, begins })
    }

    /// The first marker of a text that begins at this byte or later.
    pub(crate) fn next(&self, text: &str, from: usize) -> Option<Cut> {
        let bytes = text.as_bytes();
        let mut from = from;
        while let Some(offset) = bytes
            .get(from..)?
            .iter()
            .position(|byte| self.begins[usize::from(*byte)])
        {
            let at = from + offset;
            if let Some(length) = self.marker_at(&bytes[at..]) {
                return Some(Cut { at, end: at + length });
            }
            from = at + 1;
        }
        None
    }

    /// The length of the marker that a text begins with.
    fn marker_at(&self, text: &[u8]) -> Option<usize> {
        // Of the markers that sort up to the text, one that begins it is the last: no marker begins another.
        let after = self.markers.partition_point(|marker| marker.as_bytes() <= text);
        let marker = self.markers[..after].last()?.as_bytes();
        text.starts_with(marker).then_some(marker.len())
    }
}

/// Whether an added token is found in the raw text whatever surrounds it. `raw` are all that are looked for there.
fn is_marker(token: &AddedToken, raw: &[&AddedToken]) -> bool {
    let punctuation = |character: char| character.is_ascii_punctuation() && character != '_';
    !token.lstrip
        && !token.rstrip
        && !token.single_word
        && token.content.starts_with(punctuation)
        && raw
            .iter()
            .all(|other| !overlaps(token.content.as_bytes(), other.content.as_bytes()))
}

/// Whether `other` can be found at, or across the beginning of, a `token` in some text, and is not that token.
fn overlaps(token: &[u8], other: &[u8]) -> bool {
    let agree = |from: usize| {
        let both = token.len().min(other.len() - from);
        other[from..from + both] == token[..both]
    };
    // A shorter token at the same place loses to the longer one; a longer one wins.
    let hides = other.len() > token.len() && agree(0);
    hides || (1..other.len()).any(agree)
}

fn draws_lots(model: &ModelWrapper) -> bool {
    match model {
        ModelWrapper::BPE(model) => model.dropout.is_some_and(|dropout| dropout > 0.0),
        ModelWrapper::Unigram(model) => model.alpha.is_some_and(|alpha| alpha != 0.0),
        ModelWrapper::WordPiece(_) | ModelWrapper::WordLevel(_) => false,
    }
}

/// Whether a normaliser works on one piece at a time. Each kind by name: for a new one somebody has to find out.
fn normalises_each_piece(normalizer: &NormalizerWrapper) -> bool {
    match normalizer {
        NormalizerWrapper::BertNormalizer(_)
        | NormalizerWrapper::StripNormalizer(_)
        | NormalizerWrapper::StripAccents(_)
        | NormalizerWrapper::NFC(_)
        | NormalizerWrapper::NFD(_)
        | NormalizerWrapper::NFKC(_)
        | NormalizerWrapper::NFKD(_)
        | NormalizerWrapper::Sequence(_)
        | NormalizerWrapper::Lowercase(_)
        | NormalizerWrapper::Nmt(_)
        | NormalizerWrapper::Precompiled(_)
        | NormalizerWrapper::Replace(_)
        | NormalizerWrapper::Prepend(_)
        | NormalizerWrapper::ByteLevel(_) => true,
    }
}

/// Whether a pre-tokenizer works on one piece at a time. `Metaspace` asks besides whether the piece begins the text; a
/// part that begins with a marker has no such piece.
fn splits_each_piece(pre_tokenizer: &PreTokenizerWrapper) -> bool {
    match pre_tokenizer {
        PreTokenizerWrapper::BertPreTokenizer(_)
        | PreTokenizerWrapper::ByteLevel(_)
        | PreTokenizerWrapper::Delimiter(_)
        | PreTokenizerWrapper::Metaspace(_)
        | PreTokenizerWrapper::Whitespace(_)
        | PreTokenizerWrapper::Sequence(_)
        | PreTokenizerWrapper::Split(_)
        | PreTokenizerWrapper::Punctuation(_)
        | PreTokenizerWrapper::WhitespaceSplit(_)
        | PreTokenizerWrapper::Digits(_)
        | PreTokenizerWrapper::UnicodeScripts(_)
        | PreTokenizerWrapper::FixedLength(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(content: &str) -> AddedToken {
        AddedToken::from(content, true)
    }

    #[test]
    fn a_marker_is_found_whatever_surrounds_it() {
        let check = |tokens: &[AddedToken], expected: &[&str]| {
            let all: Vec<&AddedToken> = tokens.iter().collect();
            let mut markers: Vec<&str> = all.iter().map(|token| token.content.as_str()).collect();
            markers.retain(|content| is_marker(all.iter().find(|token| token.content == *content).unwrap(), &all));
            assert_eq!(markers, expected, "{tokens:?}");
        };
        check(&[raw("<a>"), raw("<b>")], &["<a>", "<b>"]);
        check(
            &[
                raw("<l>").lstrip(true),
                raw("<r>").rstrip(true),
                raw("<w>").single_word(true),
            ],
            &[],
        );
        // A longer one hides it, one before it takes its beginning; one that is only its beginning does nothing.
        check(&[raw("<a>"), raw("<a>b")], &["<a>b"]);
        check(&[raw("<a>"), raw("x<")], &[]);
        check(&[raw("<a>"), raw("x<a>y"), raw("<a")], &[]);
        check(&[raw("<a>"), raw("<")], &["<a>"]);
        // One that could begin inside itself would be found once only.
        check(&[raw("<<")], &[]);
        check(&[raw(" <a>"), raw("END"), raw("_b_"), raw("[c]")], &["[c]"]);
    }

    #[test]
    fn the_next_marker_is_found() {
        let cuts = Cuts::new(["<|im|>", "<|end|>", "[c]"].map(Box::from).to_vec()).unwrap();
        let check = |text: &str, from: usize, expected: Option<(usize, usize)>| {
            let found = cuts.next(text, from).map(|cut| (cut.at, cut.end));
            assert_eq!(found, expected, "{text:?} from {from}");
        };
        check("", 0, None);
        check("abc", 7, None);
        check("<|im|>", 0, Some((0, 6)));
        check("<|im|>", 1, None);
        check("é<|i<|end|>x[c]", 0, Some((5, 12)));
        check("é<|i<|end|>x[c]", 6, Some((13, 16)));
        check("<|im|", 0, None);
        assert!(Cuts::new(Vec::new()).is_err());
    }
}
