//! The words of a model in a Hugging Face directory, as vLLM and SGLang open it: `tokenizer.json`, the chat template, and
//! what the configurations say about the ends of prompts and answers. No weights are read.
//!
//! Tokens are the `tokenizers` crate's, whatever the kind. Text of tokens is ours and knows two spellings: GPT-2's alphabet
//! of bytes, and SentencePiece's `▁` and `<0xNN>`. Truncation and padding that a file asks for are not done: engines do
//! neither.

use crate::alphabet::spelled_bytes;
use crate::template::{ChatTemplate, TemplateError};
use crate::tokenizer::{Token, Tokenizer, ends_answers};
use crate::vocabulary::Vocabulary;
use serde_json::Value as Json;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The file that makes a directory one of Hugging Face's, as far as words go.
pub(crate) const TOKENIZER: &str = "tokenizer.json";

/// Why the words of a directory could not be read.
#[derive(Debug, thiserror::Error)]
pub enum HuggingFaceError {
    /// A file cannot be read.
    #[error("`{}` cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: std::io::Error,
    },
    /// A file is no JSON.
    #[error("`{}` is no JSON: {reason}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The tokenizer is none.
    #[error("`{}` holds no tokenizer: {reason}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The length of the context is not said.
    #[error("`{}` does not say `max_position_embeddings`, expected the longest sequence in tokens", .0.display())]
    Context(PathBuf),
    /// The chat template is none.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

/// What the files of a directory say.
struct Files {
    directory: PathBuf,
    /// `config.json`.
    model: Json,
    /// `tokenizer_config.json`.
    words: Json,
    /// `generation_config.json`.
    generation: Json,
}

/// Opens the words of a directory.
pub(crate) fn load(directory: &Path) -> Result<Vocabulary, HuggingFaceError> {
    let json = |name: &str| Ok::<_, HuggingFaceError>(read_json(&directory.join(name))?.unwrap_or_default());
    let files = Files {
        directory: directory.to_owned(),
        model: json("config.json")?,
        words: json("tokenizer_config.json")?,
        generation: json("generation_config.json")?,
    };
    let name = directory.file_name().unwrap_or(directory.as_os_str());
    Ok(Vocabulary {
        name: name.to_string_lossy().into_owned(),
        tokenizer: files.tokenizer()?,
        template: files.template()?,
        context_tokens: files.context_tokens()?,
    })
}

impl Files {
    fn tokenizer(&self) -> Result<Tokenizer, HuggingFaceError> {
        let path = self.directory.join(TOKENIZER);
        let text = read(&path)?.unwrap_or_default();
        let broken = |reason: String| HuggingFaceError::Tokenizer {
            path: path.clone(),
            reason,
        };
        let mut encoder: tokenizers::Tokenizer = text
            .parse()
            .map_err(|error: tokenizers::Error| broken(error.to_string()))?;
        encoder.with_padding(None);
        encoder
            .with_truncation(None)
            .map_err(|error| broken(error.to_string()))?;
        let bos = opening_token(&encoder).map_err(broken)?;
        let tokens = tokens(&encoder, text.contains(r#""ByteLevel""#));
        let mut ends = self.ends(&encoder);
        ends.extend(encoder.get_vocab(true).into_iter().filter_map(|(text, id)| {
            let control = tokens.get(id as usize).is_some_and(|token| token.control);
            (control && ends_answers(&text)).then_some(id)
        }));
        Ok(Tokenizer::assemble(encoder, tokens, bos, ends))
    }

    /// The tokens that are declared to end an answer.
    fn ends(&self, encoder: &tokenizers::Tokenizer) -> Vec<u32> {
        let declared = [&self.generation, &self.model].map(|file| ids(file.get("eos_token_id")));
        let named = self.special("eos_token").and_then(|text| encoder.token_to_id(&text));
        declared.into_iter().flatten().chain(named).collect()
    }

    fn template(&self) -> Result<Option<ChatTemplate>, HuggingFaceError> {
        let own_file = read(&self.directory.join("chat_template.jinja"))?;
        let Some(source) = own_file.or_else(|| self.configured_template()) else {
            return Ok(None);
        };
        let special = |name| self.special(name).unwrap_or_default();
        Ok(Some(ChatTemplate::new(
            &source,
            &special("bos_token"),
            &special("eos_token"),
        )?))
    }

    /// One template, or several with names, of which `default` is meant.
    fn configured_template(&self) -> Option<String> {
        let configured = self.words.get("chat_template")?;
        let named = |templates: &Vec<Json>| {
            let default = templates.iter().find(|template| template["name"] == "default");
            Some(default?.get("template")?.as_str()?.to_owned())
        };
        configured
            .as_str()
            .map(str::to_owned)
            .or_else(|| configured.as_array().and_then(named))
    }

    fn context_tokens(&self) -> Result<usize, HuggingFaceError> {
        let of = |config: &Json| config.get("max_position_embeddings").and_then(Json::as_u64);
        let tokens = of(&self.model).or_else(|| self.model.get("text_config").and_then(of));
        tokens
            .and_then(|tokens| usize::try_from(tokens).ok())
            .ok_or_else(|| HuggingFaceError::Context(self.directory.join("config.json")))
    }

    /// A special token's text: plain, or an added token with its flags.
    fn special(&self, name: &str) -> Option<String> {
        let token = self.words.get(name)?;
        token
            .as_str()
            .or_else(|| token.get("content")?.as_str())
            .map(str::to_owned)
    }
}

/// The token that the tokenizer puts before every text, if it does. One that it puts behind is not for prompts.
fn opening_token(encoder: &tokenizers::Tokenizer) -> Result<Option<u32>, String> {
    let encode = |special| encoder.encode("a", special).map_err(|error| error.to_string());
    let (with, without) = (encode(true)?, encode(false)?);
    let first = with.get_ids().first().copied();
    Ok(first.filter(|first| without.get_ids().first() != Some(first)))
}

fn tokens(encoder: &tokenizers::Tokenizer, byte_level: bool) -> Vec<Token> {
    let vocabulary: HashMap<String, u32> = encoder.get_vocab(true);
    let count = vocabulary.values().max().map_or(0, |last| *last as usize + 1);
    let mut tokens: Vec<Token> = (0..count)
        .map(|_| Token {
            bytes: Box::default(),
            control: false,
        })
        .collect();
    let added = encoder.get_added_vocabulary().get_added_tokens_decoder();
    for (text, id) in vocabulary {
        let bytes = match added.get(&id) {
            Some(_) => text.as_bytes().to_vec(),
            None if byte_level => spelled_bytes(&text).unwrap_or_else(|| text.as_bytes().to_vec()),
            None => sentence_piece_bytes(&text),
        };
        tokens[id as usize] = Token {
            bytes: bytes.into_boxed_slice(),
            control: added.get(&id).is_some_and(|token| token.special),
        };
    }
    tokens
}

/// The bytes of a SentencePiece token: one byte, or text with `▁` for spaces.
fn sentence_piece_bytes(text: &str) -> Vec<u8> {
    let byte = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    match byte
        .filter(|digits| digits.len() == 2)
        .map(|digits| u8::from_str_radix(digits, 16))
    {
        Some(Ok(byte)) => vec![byte],
        Some(Err(_)) | None => text.replace('▁', " ").into_bytes(),
    }
}

/// Ids that are written as one number or as several.
fn ids(value: Option<&Json>) -> Vec<u32> {
    let id = |value: &Json| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Some(Json::Array(several)) => several.iter().filter_map(id).collect(),
        Some(one) => id(one).into_iter().collect(),
        None => Vec::new(),
    }
}

/// A file's text, if it is there.
fn read(path: &Path) -> Result<Option<String>, HuggingFaceError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(HuggingFaceError::Read {
            path: path.to_owned(),
            source,
        }),
    }
}

fn read_json(path: &Path) -> Result<Option<Json>, HuggingFaceError> {
    let Some(text) = read(path)? else { return Ok(None) };
    let json = serde_json::from_str(&text).map_err(|error| HuggingFaceError::Json {
        path: path.to_owned(),
        reason: error.to_string(),
    });
    json.map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A directory of these files.
    fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(directory.path().join(name), text).unwrap();
        }
        directory
    }

    /// Bytes `a` to `c` and two merges, in GPT-2's alphabet or SentencePiece's.
    fn tokenizer(sentence_piece: bool) -> String {
        let space = if sentence_piece { "▁" } else { "Ġ" };
        let split = if sentence_piece {
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": false})
        } else {
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true})
        };
        let spaced = format!("{space}a");
        let vocabulary = json!({"a": 0, "b": 1, "c": 2, space: 3, "ab": 4, spaced: 5, "<0x0A>": 6});
        let added = |id: u32, content: &str, special: bool| {
            json!({"id": id, "content": content, "special": special, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false})
        };
        let template = json!({"type": "TemplateProcessing", "pair": [],
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [7], "tokens": ["<s>"]}}});
        let file = json!({
            "version": "1.0",
            "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
            "padding": null,
            "added_tokens": [added(7, "<s>", true), added(8, "<|im_end|>", true), added(9, "<tool>", false)],
            "normalizer": null,
            "pre_tokenizer": split,
            "post_processor": template,
            "decoder": null,
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": sentence_piece, "ignore_merges": false,
                "vocab": vocabulary, "merges": [["a", "b"], [space, "a"]]}
        });
        file.to_string()
    }

    #[test]
    fn words_are_those_of_the_directory() {
        let config = r#"{"max_position_embeddings": 4096, "eos_token_id": 2}"#;
        let words = r#"{"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>", "chat_template":
            [{"name": "other", "template": ""}, {"name": "default", "template": "{{ bos_token }}{{ eos_token }}"}]}"#;
        for sentence_piece in [false, true] {
            let directory = directory(&[
                (TOKENIZER, &tokenizer(sentence_piece)),
                ("config.json", config),
                ("tokenizer_config.json", words),
                ("generation_config.json", r#"{"eos_token_id": [1, 2]}"#),
            ]);
            let vocabulary = load(directory.path()).unwrap();
            let tokenizer = &vocabulary.tokenizer;
            assert_eq!(vocabulary.context_tokens, 4096);
            assert_eq!(tokenizer.end_tokens(), [1, 2, 8]);
            assert_eq!(tokenizer.bos(), Some(7));
            let tokens = tokenizer.encode_prompt("abc a<tool>b<|im_end|>");
            assert_eq!(tokens, [7, 4, 2, 5, 9, 1, 8], "SentencePiece: {sentence_piece}");
            assert_eq!(tokenizer.decode(&tokens), "abc a<tool>b");
            let newline = if sentence_piece { "\n" } else { "<0x0A>" };
            assert_eq!(tokenizer.decode(&[6]), newline);
            let input = crate::ChatInput {
                messages: &json!([{"role": "user"}]),
                tools: None,
                add_generation_prompt: true,
                unix_seconds: 0,
            };
            assert_eq!(vocabulary.render(&input).as_deref(), Ok("<s><|im_end|>"));
        }
    }

    #[test]
    fn a_template_of_its_own_comes_first_and_none_is_none() {
        let check = |files: &[(&str, &str)], expected: Option<&str>| {
            let tokenizer = tokenizer(false);
            let needed = [
                (TOKENIZER, tokenizer.as_str()),
                ("config.json", r#"{"max_position_embeddings": 9}"#),
            ];
            let vocabulary = load(directory(&[&needed, files].concat()).path()).unwrap();
            let input = crate::ChatInput {
                messages: &json!([{"role": "user"}]),
                tools: None,
                add_generation_prompt: true,
                unix_seconds: 0,
            };
            assert_eq!(vocabulary.render(&input).ok().as_deref(), expected, "{files:?}");
        };
        let configured = ("tokenizer_config.json", r#"{"chat_template": "configured"}"#);
        check(&[], None);
        check(&[configured], Some("configured"));
        check(&[configured, ("chat_template.jinja", "own")], Some("own"));
    }

    #[test]
    fn what_is_wrong_is_said() {
        let check = |files: &[(&str, &str)], expected: &str| {
            let error = load(directory(files).path()).err().unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        };
        let tokenizer = tokenizer(false);
        check(&[("config.json", "{")], "config.json` is no JSON");
        check(&[], "tokenizer.json` holds no tokenizer");
        check(&[(TOKENIZER, "{}")], "tokenizer.json` holds no tokenizer");
        check(&[(TOKENIZER, &tokenizer)], "does not say `max_position_embeddings`");
        let template = [(TOKENIZER, tokenizer.as_str()), ("chat_template.jinja", "{% if %}")];
        check(&template, "the chat template is not valid");
    }
}
