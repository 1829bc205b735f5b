//! What a memory gives for a prompt is what tokenising and hashing the whole gives, for real tokenizers of each kind and
//! whatever came before: turns that grow, edited and shortened histories, templates that change earlier turns, added
//! tokens in what users write, and a memory that is too small.

use super::*;
use crate::seams::tests::of_words;
use crate::template::{ChatInput, ChatTemplate};
use crate::{CHATML, Cut, ModelSpec, cached, default_cache_dir, open_vocabulary};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::Write as _;
use std::sync::LazyLock;
use tokenizers::models::bpe::BPE;
use tokenizers::models::unigram::Unigram;
use tokenizers::normalizers::{NFC, NormalizerWrapper, Prepend, Replace, Sequence};
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::{AddedToken, ModelWrapper};

/// Whole words, so that merges have something to do.
const WORDS: [&str; 6] = ["hello", "the", "router", "token", "né", "user"];

/// Added tokens of every kind, some of which make trouble for others.
fn added() -> Vec<AddedToken> {
    let raw = |content: &str| AddedToken::from(content, true);
    vec![
        raw("<s>"),
        raw("<|im_start|>"),
        raw("<|im_end|>"),
        raw("<|im"),
        raw("<left>").lstrip(true),
        raw("<right>").rstrip(true),
        raw("<word>").single_word(true),
        AddedToken::from("<né>", false).normalized(true),
        AddedToken::from("[x]", false).normalized(false),
        AddedToken::from("x]", false).normalized(false),
    ]
}

/// The pieces of a SentencePiece vocabulary: bytes, characters, and all beginnings of a few words.
fn pieces() -> Vec<String> {
    let bytes = (0..=u8::MAX).map(|byte| format!("<0x{byte:02X}>"));
    let mut pieces: Vec<String> = ["<unk>".to_owned()].into_iter().chain(bytes).collect();
    let mut seen: BTreeSet<String> = pieces.iter().cloned().collect();
    let characters = "▁abcdefghijklmnopqrstuvwxyzé0123<>|[]_\n".chars().map(String::from);
    let words = WORDS.iter().map(|word| format!("▁{word}"));
    let beginnings = words.flat_map(|word| {
        let ends: Vec<usize> = word
            .char_indices()
            .map(|(at, _)| at)
            .skip(2)
            .chain([word.len()])
            .collect();
        ends.into_iter()
            .map(move |end| word[..end].to_owned())
            .collect::<Vec<_>>()
    });
    for piece in characters.chain(beginnings).chain(["▁▁", "▁▁▁▁"].map(str::to_owned)) {
        if seen.insert(piece.clone()) {
            pieces.push(piece);
        }
    }
    pieces
}

fn sentence_piece_bpe() -> BPE {
    let pieces = pieces();
    let known: BTreeSet<&str> = pieces.iter().map(String::as_str).collect();
    let split = |piece: &str| {
        let (last, _) = piece.char_indices().next_back()?;
        let (left, right) = piece.split_at(last);
        let both = known.contains(left) && known.contains(right);
        both.then(|| (left.to_owned(), right.to_owned()))
    };
    let mut merges: Vec<(String, String)> = pieces.iter().skip(257).filter_map(|piece| split(piece)).collect();
    merges.push(("▁▁".to_owned(), "▁▁".to_owned()));
    let vocabulary: tokenizers::models::bpe::Vocab = pieces.iter().cloned().zip(0..).collect();
    let builder = BPE::builder().vocab_and_merges(vocabulary, merges);
    builder
        .unk_token("<unk>".to_owned())
        .fuse_unk(true)
        .byte_fallback(true)
        .build()
        .unwrap()
}

fn unigram() -> Unigram {
    let score = |(index, piece): (usize, String)| (piece.clone(), -(index as f64) / 50.0 + piece.len() as f64);
    Unigram::from(pieces().into_iter().enumerate().map(score).collect(), Some(0), true).unwrap()
}

fn sentence_piece(
    model: impl Into<ModelWrapper>,
    normalizer: Option<NormalizerWrapper>,
    prepend: Option<PrependScheme>,
) -> Tokenizer {
    let mut encoder = tokenizers::Tokenizer::new(model);
    encoder.with_normalizer(normalizer).unwrap();
    encoder.with_pre_tokenizer(prepend.map(|scheme| Metaspace::new('▁', scheme, scheme != PrependScheme::Never)));
    encoder.add_tokens(added()).unwrap();
    let bos = encoder.token_to_id("<s>");
    Tokenizer::assemble(encoder, Vec::new(), bos, Vec::new())
}

/// SmolLM2's, where it is in the cache. A test must not download a hundred megabytes, nor be silent about it: the test
/// harness hides what is printed by macros.
fn smollm2() -> Option<Tokenizer> {
    let spec = ModelSpec::SmolLm2;
    if cached(&spec, &default_cache_dir()).is_none() {
        let note = b"SKIPPED: SmolLM2's tokenizer is not in the cache; `homing up --model smollm2` fetches it\n";
        std::io::stderr().write_all(note).unwrap();
        return None;
    }
    Some(open_vocabulary(&spec, &default_cache_dir()).unwrap().0.tokenizer)
}

static TOKENIZERS: LazyLock<Vec<(&str, Tokenizer)>> = LazyLock::new(|| {
    let old_llama = Sequence::new(vec![
        Prepend::new("▁".to_owned()).into(),
        Replace::new(" ", "▁").unwrap().into(),
    ]);
    let mut tokenizers = vec![
        ("bytes", Tokenizer::bytes()),
        ("words cut as by GPT-2", of_words(Cut::Gpt2)),
        ("words cut as by SmolLM", of_words(Cut::SmolLm)),
        ("words cut as by Llama 3", of_words(Cut::Llama3)),
        (
            "SentencePiece BPE, prefix first",
            sentence_piece(sentence_piece_bpe(), None, Some(PrependScheme::First)),
        ),
        (
            "SentencePiece BPE, prefix always, NFC",
            sentence_piece(sentence_piece_bpe(), Some(NFC.into()), Some(PrependScheme::Always)),
        ),
        (
            "SentencePiece BPE, prefix by normaliser",
            sentence_piece(sentence_piece_bpe(), Some(old_llama.into()), None),
        ),
        (
            "Unigram, prefix first, NFC",
            sentence_piece(unigram(), Some(NFC.into()), Some(PrependScheme::First)),
        ),
    ];
    tokenizers.extend(smollm2().map(|tokenizer| ("SmolLM2", tokenizer)));
    tokenizers
});

/// Pieces of what people, programs and templates write.
fn fragment() -> impl Strategy<Value = String> {
    let fixed = prop::sample::select(vec![
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>user\n",
        "<|im_end|>\n",
        "<|im",
        "_start|>",
        "<s>",
        "<left>",
        "<right>",
        "<word>",
        "<né>",
        "<ne\u{301}>",
        "[x]",
        "[x",
        "]",
        "\u{301}",
        "\u{338}",
        "e",
        " ",
        "   ",
        "\n\n",
        "\t",
        "hello",
        " the",
        "router",
        "12",
        "345",
        "日本",
        "🙂",
        "👩‍👩‍👧",
        "\u{1}",
        "\u{7}",
        "_",
        "'s",
        "<",
        ">",
    ]);
    prop_oneof![6 => fixed.prop_map(str::to_owned), 1 => any::<String>()]
}

/// What a text is made of, and what becomes of it next.
#[derive(Clone, Debug)]
enum Edit {
    /// More at its end.
    Append(Vec<String>),
    /// A piece is another one.
    Replace(usize, String),
    /// Its beginning goes, as agents compact a history.
    Compact(usize, Vec<String>),
    /// Its end goes.
    Truncate(usize),
    /// It comes again.
    Repeat,
}

fn edit() -> impl Strategy<Value = Edit> {
    let some = || prop::collection::vec(fragment(), 0..12);
    prop_oneof![
        6 => some().prop_map(Edit::Append),
        2 => (any::<usize>(), fragment()).prop_map(|(at, text)| Edit::Replace(at, text)),
        1 => (any::<usize>(), some()).prop_map(|(at, text)| Edit::Compact(at, text)),
        1 => any::<usize>().prop_map(Edit::Truncate),
        1 => Just(Edit::Repeat),
    ]
}

fn apply(parts: &mut Vec<String>, edit: &Edit) {
    let place = |at: usize, parts: &[String]| at % (parts.len() + 1);
    match edit {
        Edit::Append(more) => parts.extend(more.iter().cloned()),
        Edit::Replace(at, text) => {
            let at = place(*at, parts);
            if let Some(part) = parts.get_mut(at) {
                part.clone_from(text);
            }
        }
        Edit::Compact(at, summary) => drop(parts.splice(..place(*at, parts), summary.iter().cloned())),
        Edit::Truncate(at) => parts.truncate(place(*at, parts)),
        Edit::Repeat => {}
    }
}

fn memory(tokenizer: &Tokenizer, block_size: u32, bytes_min: usize, bytes_max: usize) -> PromptMemory {
    PromptMemory::with_segments(tokenizer.clone(), block_size, Segmenter { bytes_min }, bytes_max)
}

/// Encodes a text with a memory and without, and checks that nothing can be told apart.
fn check(memory: &PromptMemory, name: &str, text: &str, opening: Opening) -> EncodedPrompt {
    let encoded = memory.encode(text, opening);
    let cold = memory.encode_cold(text, opening);
    assert_eq!(encoded.tokens, cold.tokens, "{name}, {opening:?}: {text:?}");
    if opening == Opening::Text {
        let whole = memory.tokenizer.encode_in_pieces(text, usize::MAX);
        assert_eq!(cold.tokens, PromptTokens::from(whole), "{name}: {text:?}");
    }
    assert_eq!(encoded.prompt, cold.prompt, "{name}, {opening:?}: {text:?}");
    memory.tree().check_invariants();
    encoded
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    #[test]
    fn a_known_beginning_changes_nothing(
        edits in prop::collection::vec((0usize..2, edit()), 1..12),
        bytes_min in prop::sample::select(vec![1usize, 2, 9, 40]),
        bytes_max in prop::sample::select(vec![1usize << 20, 12_000, 4_000]),
        block_size in 1u32..6,
        opening in prop::sample::select(vec![Opening::Text, Opening::Bos]),
    ) {
        for (name, tokenizer) in TOKENIZERS.iter() {
            let memory = memory(tokenizer, block_size, bytes_min, bytes_max);
            // Two conversations beside each other, which may begin alike.
            let mut conversations = [Vec::new(), Vec::new()];
            for (which, edit) in &edits {
                apply(&mut conversations[*which], edit);
                check(&memory, name, &conversations[*which].concat(), opening);
            }
        }
    }

    #[test]
    fn pieces_have_the_tokens_of_the_whole(
        parts in prop::collection::vec(fragment(), 0..40),
        bytes_min in prop::sample::select(vec![0usize, 1, 2, 5, 17]),
    ) {
        let text = parts.concat();
        for (name, tokenizer) in TOKENIZERS.iter() {
            let whole = tokenizer.encode_in_pieces(&text, usize::MAX);
            assert_eq!(tokenizer.encode_in_pieces(&text, bytes_min), whole, "{name}, at least {bytes_min}: {text:?}");
        }
    }

    #[test]
    fn templates_may_look_back(
        turns in prop::collection::vec((any::<bool>(), prop::collection::vec(fragment(), 0..8), any::<usize>()), 1..10),
        block_size in 1u32..20,
    ) {
        // Like Qwen3's: thoughts of earlier turns are gone once another turn follows; the number of messages comes first.
        let looking_back = "{{ messages|length % 3 }}{% for message in messages %}<|im_start|>{{ message.role }}\n\
            {% if loop.last %}{{ message.content }}{% else %}{{ message.content.split(' ')|last }}{% endif %}<|im_end|>\n\
            {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}";
        for template in [CHATML, looking_back] {
            let template = ChatTemplate::new(template, "<s>", "<|im_end|>").unwrap();
            for (name, tokenizer) in TOKENIZERS.iter() {
                let memory = memory(tokenizer, block_size, 9, 1 << 20);
                let mut messages: Vec<Value> = Vec::new();
                for (assistant, content, kept) in &turns {
                    let role = if *assistant { "assistant" } else { "user" };
                    // Now and then an earlier message goes.
                    if kept % 5 == 0 && !messages.is_empty() {
                        messages.remove(kept % messages.len());
                    }
                    messages.push(json!({"role": role, "content": content.concat()}));
                    let text = template.render(&ChatInput {
                        messages: &json!(messages),
                        tools: None,
                        add_generation_prompt: !*assistant,
                        unix_seconds: 0,
                    });
                    check(&memory, name, &text.unwrap(), Opening::Text);
                }
            }
        }
    }
}

#[test]
fn a_turn_costs_what_is_new() {
    for (name, tokenizer) in TOKENIZERS.iter() {
        let memory = PromptMemory::new(tokenizer.clone(), 16, PROMPT_MEMORY_BYTES);
        assert_eq!(memory.why_cold(), None, "{name}");
        let message = |role: &str, number: usize| {
            format!(
                "<|im_start|>{role}\n{}{number}<|im_end|>\n",
                "hello the router ".repeat(40)
            )
        };
        let mut text = String::new();
        for turn in 0..8 {
            text += &message("user", turn);
            let prompt = format!("{text}<|im_start|>assistant\n");
            let encoded = check(&memory, name, &prompt, Opening::Text);
            let new = encoded.tokens.len() - encoded.known_tokens;
            let one = memory.encode_cold(&message("user", 0), Opening::Text).tokens.len();
            assert!(
                new <= 2 * one + 60,
                "{name}, turn {turn}: {new} tokens were new, a message has {one}"
            );
            text += &message("assistant", turn);
        }
        // Another session behind the same beginning, and the first one after its third message was edited.
        let shared = text.find("assistant").unwrap();
        let fork = format!("{}{}", &text[..shared], "assistant\nother");
        assert!(check(&memory, name, &fork, Opening::Text).known_tokens > 0, "{name}");
        let edited = text.replacen("router 1<", "router !<", 1);
        let known = check(&memory, name, &edited, Opening::Text).known_tokens;
        assert!(known > 0, "{name}: what comes before the edited message is known");
        assert_eq!(check(&memory, name, &edited, Opening::Bos).known_tokens, 0, "{name}");
    }
}

#[test]
fn what_is_near_is_what_lacks_few_bytes() {
    for (name, tokenizer) in TOKENIZERS.iter() {
        let memory = PromptMemory::new(tokenizer.clone(), 16, PROMPT_MEMORY_BYTES);
        let first = format!("<|im_start|>user\n{}<|im_end|>\n", "hello the router ".repeat(40));
        let next = format!("{first}<|im_start|>user\nand now?");
        assert_eq!(
            memory.encode_near(&next, Opening::Text, 100),
            None,
            "{name}: nothing is known"
        );
        check(&memory, name, &next, Opening::Text);
        let near = memory.encode_near(&next, Opening::Text, 100);
        let near = near.unwrap_or_else(|| panic!("{name}: all but the last message is known"));
        assert_eq!(near.tokens, memory.encode_cold(&next, Opening::Text).tokens, "{name}");
        assert_eq!(
            memory.encode_near(&next, Opening::Bos, 100),
            None,
            "{name}: with another beginning"
        );
    }
}

#[test]
fn the_longest_unused_prompt_is_forgotten_from_its_end() {
    let memory = memory(&Tokenizer::bytes(), 16, 64, 40_000);
    let prompt = |session: usize, messages: usize| -> String {
        (0..messages)
            .map(|number| format!("<|im_start|>user\n{session} {number} {}<|im_end|>\n", "x".repeat(100)))
            .collect()
    };
    let known = |session| check(&memory, "bytes", &prompt(session, 8), Opening::Text).known_tokens;
    for session in 0..40 {
        known(session);
        assert!(known(0) > 700, "in use");
    }
    assert!(memory.bytes() > 30_000, "the memory is used");
    assert_eq!(known(3), 0, "forgotten");
    // A text that would take all of it is not kept.
    let before = memory.bytes();
    check(
        &memory,
        "bytes",
        &format!("{}<|im_end|>", "y".repeat(30_000)),
        Opening::Text,
    );
    assert_eq!(memory.bytes(), before);
}

#[test]
fn what_nobody_used_since_a_mark_is_forgotten_and_what_is_shared_stays() {
    let memory = memory(&Tokenizer::bytes(), 16, 64, 4 << 20);
    let prompt = |session: &str| -> String {
        let message = |text: &str| format!("<|im_start|>user\n{text} {}<|im_end|>\n", "x".repeat(100));
        let own: String = (0..600).map(|number| message(&format!("{session} {number}"))).collect();
        message("shared") + &own
    };
    let known = |session: &str| check(&memory, "bytes", &prompt(session), Opening::Text).known_tokens;
    assert_eq!(memory.forget_unused_since(memory.mark()), 0, "there is nothing");
    known("idle");
    let mark = memory.mark();
    let shared = known("busy");
    assert!(shared > 100, "the first message is shared: {shared}");
    let before = memory.bytes();
    let after = memory.forget_unused_since(mark);
    assert!(after < before * 6 / 10 && after > before * 4 / 10, "{before} {after}");
    assert!(known("busy") > 60_000, "in use");
    assert_eq!(known("idle"), shared, "forgotten but for what is shared");
    assert_eq!(
        memory.forget_unused_since(memory.mark()),
        0,
        "nobody has used anything since now"
    );
}

#[test]
fn what_cannot_be_cut_says_why() {
    let encoder = |tokens: &[AddedToken]| {
        let mut encoder = tokenizers::Tokenizer::new(sentence_piece_bpe());
        encoder.add_tokens(tokens.to_vec()).unwrap();
        encoder
    };
    let check_cold = |encoder: tokenizers::Tokenizer, expected: Uncuttable| {
        let memory = memory(
            &Tokenizer::assemble(encoder, Vec::new(), None, Vec::new()),
            4,
            1,
            1 << 20,
        );
        assert_eq!(memory.why_cold(), Some(expected));
        for text in ["<a>hello<a>", "<a>hello<a>hello"] {
            assert_eq!(check(&memory, "cold", text, Opening::Text).known_tokens, 0);
        }
        assert_eq!(memory.bytes(), 0);
    };
    let marker = AddedToken::from("<a>", true);
    check_cold(encoder(&[]), Uncuttable::NoMarker);
    check_cold(encoder(&[marker.clone().rstrip(true)]), Uncuttable::NoMarker);
    check_cold(encoder(&[marker.clone().normalized(true)]), Uncuttable::NoMarker);
    let mut as_text = encoder(std::slice::from_ref(&marker));
    as_text.set_encode_special_tokens(true);
    check_cold(as_text, Uncuttable::SpecialsAsText);
    let mut truncating = encoder(std::slice::from_ref(&marker));
    truncating
        .with_truncation(Some(tokenizers::TruncationParams::default()))
        .unwrap();
    check_cold(truncating, Uncuttable::Truncates);
    let mut padding = encoder(&[marker]);
    padding.with_padding(Some(tokenizers::PaddingParams::default()));
    check_cold(padding, Uncuttable::Pads);
}
