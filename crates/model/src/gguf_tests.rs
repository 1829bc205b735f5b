//! Tests of the GGUF reader: `tiny` written as a file and read back, and files with something wrong about them.

use crate::gguf_error::GgufProblem;
use crate::model::WeightSource as _;
use crate::tiny::{TinyWeights, tiny_config};
use crate::{ChatInput, Chunk, KvStore, Model, Vocabulary};
use candle_core::quantized::gguf_file::{Value, write};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use homing_kv::BlockId;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

/// What goes into a file.
struct Contents {
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, QTensor>,
}

impl Contents {
    /// The tiny model of seed 3 with its vocabulary.
    fn tiny() -> Self {
        Self {
            metadata: metadata(),
            tensors: tensors(),
        }
    }

    fn without(mut self, name: &str) -> Self {
        assert!(
            self.metadata.remove(name).is_some() || self.tensors.remove(name).is_some(),
            "`{name}` was there"
        );
        self
    }

    fn with(mut self, key: &str, value: Value) -> Self {
        self.metadata.insert(key.to_owned(), value);
        self
    }

    fn with_tensor(mut self, name: &str, rows: usize, columns: usize) -> Self {
        let tensor = Tensor::ones((rows, columns), candle_core::DType::F32, &Device::Cpu).unwrap();
        self.tensors
            .insert(name.to_owned(), QTensor::quantize(&tensor, GgmlDType::F32).unwrap());
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = std::io::Cursor::new(Vec::new());
        let metadata: Vec<_> = self.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let tensors: Vec<_> = self
            .tensors
            .iter()
            .map(|(name, tensor)| (name.as_str(), tensor))
            .collect();
        write(&mut bytes, &metadata, &tensors).unwrap();
        bytes.into_inner()
    }
}

fn metadata() -> BTreeMap<String, Value> {
    let config = tiny_config();
    let count = |count: usize| Value::U32(u32::try_from(count).unwrap());
    let text = |text: &str| Value::String(text.to_owned());
    let tokenizer = crate::Tokenizer::bytes();
    let parts = crate::tokenizer::byte_parts();
    let kinds = (0..parts.tokens.len())
        .map(|id| Value::I32(if id < 256 { 1 } else { 3 }))
        .collect();
    let entries = [
        ("general.architecture", text("llama")),
        ("llama.block_count", count(config.layers)),
        ("llama.embedding_length", count(config.hidden)),
        ("llama.feed_forward_length", count(config.feed_forward)),
        ("llama.attention.head_count", count(config.heads)),
        ("llama.attention.head_count_kv", count(config.kv_heads)),
        ("llama.context_length", count(config.context_tokens)),
        (
            "llama.attention.layer_norm_rms_epsilon",
            Value::F32(config.norm_epsilon),
        ),
        ("tokenizer.ggml.model", text("gpt2")),
        (
            "tokenizer.ggml.tokens",
            Value::Array(parts.tokens.iter().map(|token| text(token)).collect()),
        ),
        ("tokenizer.ggml.token_type", Value::Array(kinds)),
        ("tokenizer.ggml.merges", Value::Array(vec![text("h i")])),
        (
            "tokenizer.ggml.eos_token_id",
            Value::U32(tokenizer.control("<|im_end|>").unwrap()),
        ),
    ];
    // A merge needs its result among the tokens: `hi` takes the place of a byte that no text has.
    let mut metadata: BTreeMap<String, Value> = entries.map(|(key, value)| (key.to_owned(), value)).into();
    if let Some(Value::Array(tokens)) = metadata.get_mut("tokenizer.ggml.tokens") {
        tokens[0xff] = text("hi");
    }
    metadata
}

fn tensors() -> BTreeMap<String, QTensor> {
    let config = tiny_config();
    let mut shapes = vec![
        ("token_embd".to_owned(), config.vocab, config.hidden),
        ("output".to_owned(), config.vocab, config.hidden),
    ];
    shapes.push(("output_norm".to_owned(), 1, config.hidden));
    for layer in 0..config.layers {
        let parts = [
            ("attn_norm", 1, config.hidden),
            ("attn_q", config.query_width(), config.hidden),
            ("attn_k", config.kv_width(), config.hidden),
            ("attn_v", config.kv_width(), config.hidden),
            ("attn_output", config.hidden, config.query_width()),
            ("ffn_norm", 1, config.hidden),
            ("ffn_gate", config.feed_forward, config.hidden),
            ("ffn_up", config.feed_forward, config.hidden),
            ("ffn_down", config.hidden, config.feed_forward),
        ];
        shapes.extend(parts.map(|(part, rows, columns)| (format!("blk.{layer}.{part}"), rows, columns)));
    }
    let tensor = |(name, rows, columns): (String, usize, usize)| {
        let name = format!("{name}.weight");
        let tensor = TinyWeights { seed: 3 }.tensor(&name, rows, columns).unwrap();
        (name, tensor)
    };
    shapes.into_iter().map(tensor).collect()
}

fn file(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("small.gguf");
    fs::write(&path, bytes).unwrap();
    (directory, path)
}

fn logits(model: &Model) -> Vec<f32> {
    let mut kv = KvStore::new(model.config(), 16, 1);
    let chunk = Chunk {
        tokens: &[72, 105, 257],
        start: 0,
        blocks: &[BlockId(0)],
        logits: true,
    };
    model.forward(&mut kv, &[chunk]).unwrap().remove(0).unwrap()
}

#[test]
fn a_model_survives_being_a_file() {
    let (_directory, path) = file(&Contents::tiny().bytes());
    let model = Model::load_gguf(&path).unwrap();
    assert_eq!(model.config().name, "small");
    assert_eq!(logits(&model), logits(&Model::tiny(3)));
    let vocabulary = Vocabulary::load_gguf(&path).unwrap();
    assert_eq!(vocabulary.tokenizer.encode("hi<|im_end|>!"), [0xff, 258, 33]);
    assert_eq!(vocabulary.tokenizer.end_tokens(), [256, 258]);
    let messages = serde_json::json!([{"role": "user", "content": "hi"}]);
    let input = ChatInput {
        messages: &messages,
        tools: None,
        add_generation_prompt: true,
        unix_seconds: 0,
    };
    let expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(
        vocabulary.render(&input).as_deref(),
        Ok(expected),
        "ChatML, for lack of a template"
    );
}

#[test]
fn scaled_rotary_embeddings_change_the_result() {
    let plain = logits(&Model::tiny(3));
    let check = |contents: Contents| {
        let (_directory, path) = file(&contents.bytes());
        let found = logits(&Model::load_gguf(&path).unwrap());
        assert!(
            found
                .iter()
                .zip(&plain)
                .any(|(found, plain)| (found - plain).abs() > 1e-3)
        );
    };
    let linear = Contents::tiny().with("llama.rope.scaling.type", Value::String("linear".to_owned()));
    check(linear.with("llama.rope.scaling.factor", Value::F32(8.0)));
    check(Contents::tiny().with("llama.rope.freq_base", Value::F32(50.0)));
    check(Contents::tiny().with("llama.rope.dimension_count", Value::U32(8)));
}

#[test]
fn wrong_files_are_refused_by_name() {
    let check = |contents: Contents, expected: &str| {
        let (_directory, path) = file(&contents.bytes());
        let error = Model::load_gguf(&path).err().expect(expected).to_string();
        assert_eq!(error, format!("`{}`: {expected}", path.display()));
    };
    let tiny = Contents::tiny;
    let text = |text: &str| Value::String(text.to_owned());
    check(
        tiny().with("general.architecture", text("qwen3")),
        "holds a model of architecture `qwen3`, expected `llama`",
    );
    check(
        tiny().without("general.architecture"),
        "has no `general.architecture`, expected a string",
    );
    check(
        tiny().without("llama.block_count"),
        "has no `llama.block_count`, expected a count",
    );
    check(
        tiny().with("llama.block_count", text("3")),
        "has `llama.block_count` = `3`, expected a count",
    );
    check(
        tiny().with("llama.block_count", Value::U32(0)),
        "has an impossible shape: `layers` is 0, expected 1 to 16777216",
    );
    check(
        tiny().with("llama.block_count", Value::U32(4)),
        "has no tensor `blk.3.attn_norm.weight`",
    );
    check(
        tiny().with("llama.block_count", Value::U32(2)),
        "has tensor `blk.2.attn_k.weight`, which a dense Llama without biases does not have",
    );
    check(
        tiny().with("llama.attention.head_count_kv", Value::U32(3)),
        "has an impossible shape: 4 heads do not share 3 kv heads evenly",
    );
    check(
        tiny().with("llama.attention.head_count", Value::U32(0)),
        "has an impossible shape: `heads` is 0, expected 1 to 16777216",
    );
    check(
        tiny().with("llama.attention.key_length", Value::U32(1 << 31)),
        "has an impossible shape: heads of 2147483648, expected at most 4096",
    );
    check(
        tiny().with("llama.rope.scaling.type", text("yarn")),
        "has `llama.rope.scaling.type` = `yarn`, expected `none` or `linear`",
    );
    check(
        tiny().with("llama.feed_forward_length", Value::U32(96)),
        "has tensor `blk.0.ffn_gate.weight` of shape [128, 64], expected [96, 64]",
    );
    check(
        tiny().without("output_norm.weight"),
        "has no tensor `output_norm.weight`",
    );
    check(
        tiny().with_tensor("blk.0.attn_q.bias", 1, 64),
        "has tensor `blk.0.attn_q.bias`, which a dense Llama without biases does not have",
    );
}

#[test]
fn wrong_vocabularies_are_refused_by_name() {
    let check = |contents: Contents, expected: &str| {
        let (_directory, path) = file(&contents.bytes());
        let error = Vocabulary::load_gguf(&path).err().expect(expected).to_string();
        assert_eq!(error, format!("`{}`: {expected}", path.display()));
    };
    let tiny = Contents::tiny;
    let text = |text: &str| Value::String(text.to_owned());
    check(
        tiny().with("tokenizer.ggml.model", text("llama")),
        "has `tokenizer.ggml.model` = `llama`, expected `gpt2` (byte-level BPE)",
    );
    check(
        tiny().with("tokenizer.ggml.pre", text("tekken")),
        "has `tokenizer.ggml.pre` = `tekken`, expected `gpt-2`, `default`, `smollm` or `llama-bpe`",
    );
    check(
        tiny().with("tokenizer.ggml.merges", Value::Array(vec![text("hi")])),
        "has `tokenizer.ggml.merges` = `hi`, expected two tokens with a space between",
    );
    check(
        tiny().with("tokenizer.ggml.token_type", Value::Array(vec![Value::I32(1); 3])),
        "has an unusable tokenizer: 3 token types for 259 tokens, expected one for each",
    );
    check(
        tiny().with("tokenizer.ggml.eos_token_id", Value::U32(900)),
        "has an unusable tokenizer: special token `900` is outside the vocabulary, expected less than 259",
    );
    let (_directory, path) = file(&tiny().with("tokenizer.chat_template", text("{% for %}")).bytes());
    let error = Vocabulary::load_gguf(&path).err().expect("a broken template").problem;
    assert!(matches!(error, GgufProblem::Template(_)), "{error}");
    let (tokens, kinds) = (vec![text("a"); 260], vec![Value::I32(1); 260]);
    let (_directory, path) = file(
        &tiny()
            .with("tokenizer.ggml.tokens", Value::Array(tokens))
            .with("tokenizer.ggml.token_type", Value::Array(kinds))
            .bytes(),
    );
    assert!(Vocabulary::load_gguf(&path).is_err());
}

#[test]
fn cut_and_damaged_files_are_errors_not_panics() {
    let whole = Contents::tiny().bytes();
    for length in (0..whole.len()).step_by(whole.len() / 60) {
        let (_directory, path) = file(&whole[..length]);
        let problem = Model::load_gguf(&path).err().expect("a cut file is refused").problem;
        assert!(
            matches!(problem, GgufProblem::Header(_) | GgufProblem::Data { .. }),
            "{length} bytes: {problem}"
        );
    }
    // Damage to the header may go unnoticed, but must not crash.
    for at in (0..3000).step_by(7) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x81;
        let (_directory, path) = file(&bytes);
        let _ = (Model::load_gguf(&path).is_ok(), Vocabulary::load_gguf(&path).is_ok());
    }
    let missing = Model::load_gguf(&PathBuf::from("no/such.gguf")).err().expect("no file");
    assert!(
        missing.to_string().starts_with("`no/such.gguf`: cannot be opened"),
        "{missing}"
    );
}
