//! Reading GGUF files: the shape, the weights, the tokenizer and the chat template of a dense Llama.
//!
//! What the file says is checked before it is believed: another architecture, a missing key, a tensor of another shape or
//! one that the forward pass would ignore (biases, experts) is an error that names it. Parsing is candle's.

use crate::config::{ModelConfig, RopeConfig};
use crate::gguf_error::{GgufError, GgufProblem};
use crate::model::{Model, WeightSource};
use crate::template::{CHATML, ChatTemplate};
use crate::tokenizer::{Cut, TokenKind, Tokenizer, TokenizerParts};
use crate::vocabulary::Vocabulary;
use candle_core::Device;
use candle_core::quantized::QTensor;
use candle_core::quantized::gguf_file::{Content, Value};
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

/// The only architecture that is computed here.
const ARCHITECTURE: &str = "llama";

/// Wider heads than any model's; a damaged file must not make us allocate by its numbers.
const MAX_HEAD_DIM: usize = 1 << 12;

/// Tensors of one layer.
const LAYER_TENSORS: [&str; 9] = [
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
];

impl Model {
    /// The model in a GGUF file.
    ///
    /// # Errors
    /// If the file is not a whole GGUF file of a dense Llama; see [`GgufProblem`].
    pub fn load_gguf(path: &Path) -> Result<Self, GgufError> {
        let mut file = GgufFile::open(path)?;
        file.model().map_err(|problem| GgufError {
            path: path.to_owned(),
            problem,
        })
    }
}

/// The model in a GGUF file and its words: the header, which takes a while to parse, is read once.
pub(crate) fn load(path: &Path) -> Result<(Model, Vocabulary), GgufError> {
    let mut file = GgufFile::open(path)?;
    let vocabulary = file.vocabulary();
    let both = vocabulary.and_then(|vocabulary| Ok((file.model()?, vocabulary)));
    both.map_err(|problem| GgufError {
        path: path.to_owned(),
        problem,
    })
}

impl Vocabulary {
    /// The words of the model in a GGUF file. Its weights are not read.
    ///
    /// # Errors
    /// If the file is not a GGUF file of a Llama with a byte-level BPE tokenizer; see [`GgufProblem`].
    pub fn load_gguf(path: &Path) -> Result<Self, GgufError> {
        let file = GgufFile::open(path)?;
        file.vocabulary().map_err(|problem| GgufError {
            path: path.to_owned(),
            problem,
        })
    }
}

/// A GGUF file whose header has been read.
pub(crate) struct GgufFile {
    content: Content,
    reader: BufReader<File>,
    name: String,
}

impl GgufFile {
    pub(crate) fn open(path: &Path) -> Result<Self, GgufError> {
        let problem = |problem| GgufError {
            path: path.to_owned(),
            problem,
        };
        let file = File::open(path).map_err(|error| problem(GgufProblem::Open(error)))?;
        let mut reader = BufReader::new(file);
        let content = Content::read(&mut reader).map_err(|error| problem(GgufProblem::Header(one_line(&error))))?;
        let name = path
            .file_stem()
            .map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
        let file = Self { content, reader, name };
        let found = file.text("general.architecture").map_err(problem)?;
        if found != ARCHITECTURE {
            return Err(problem(GgufProblem::Architecture {
                found: found.to_owned(),
            }));
        }
        Ok(file)
    }

    fn model(&mut self) -> Result<Model, GgufProblem> {
        let config = self.config()?;
        self.refuse_unknown_tensors(&config)?;
        Model::new(config, self)
    }

    fn config(&self) -> Result<ModelConfig, GgufProblem> {
        let hidden = self.count("llama.embedding_length")?;
        let heads = self.count("llama.attention.head_count")?;
        let kv_heads = self.optional_count("llama.attention.head_count_kv")?.unwrap_or(heads);
        let head_dim = match self.optional_count("llama.attention.key_length")? {
            Some(head_dim) => head_dim,
            None => hidden.checked_div(heads).unwrap_or(0),
        };
        if head_dim > MAX_HEAD_DIM {
            return Err(GgufProblem::Shape(format!(
                "heads of {head_dim}, expected at most {MAX_HEAD_DIM}"
            )));
        }
        if let Some(values) = self.optional_count("llama.attention.value_length")?
            && values != head_dim
        {
            return Err(wrong(
                "llama.attention.value_length",
                &values.to_string(),
                "the length of a key",
            ));
        }
        let vocab = match self
            .content
            .tensor_infos
            .get("token_embd.weight")
            .map(|info| info.shape.dims())
        {
            Some([vocab, _]) => *vocab,
            Some(found) => return Err(shape("token_embd.weight", found, &[0, hidden])),
            None => {
                return Err(GgufProblem::MissingTensor {
                    name: "token_embd.weight".to_owned(),
                });
            }
        };
        let config = ModelConfig {
            name: self.name.clone(),
            layers: self.count("llama.block_count")?,
            hidden,
            feed_forward: self.count("llama.feed_forward_length")?,
            heads,
            kv_heads,
            head_dim,
            vocab,
            context_tokens: self.count("llama.context_length")?,
            norm_epsilon: self.float("llama.attention.layer_norm_rms_epsilon", None)?,
            rope: self.rope(head_dim)?,
        };
        config.validate().map_err(GgufProblem::Shape)?;
        Ok(config)
    }

    fn rope(&self, head_dim: usize) -> Result<RopeConfig, GgufProblem> {
        let dimensions = self.optional_count("llama.rope.dimension_count")?.unwrap_or(head_dim);
        if dimensions > head_dim {
            return Err(wrong(
                "llama.rope.dimension_count",
                &dimensions.to_string(),
                "at most the width of a head",
            ));
        }
        let factor = match self.content.metadata.get("llama.rope.scaling.type") {
            None => 1.0,
            Some(Value::String(kind)) if kind == "none" => 1.0,
            Some(Value::String(kind)) if kind == "linear" => self.float("llama.rope.scaling.factor", None)?,
            Some(other) => return Err(wrong("llama.rope.scaling.type", &brief(other), "`none` or `linear`")),
        };
        let base = self.float("llama.rope.freq_base", Some(10_000.0))?;
        Ok(RopeConfig {
            base,
            dimensions,
            factors: vec![factor; dimensions / 2],
        })
    }

    fn refuse_unknown_tensors(&self, config: &ModelConfig) -> Result<(), GgufProblem> {
        let mut names: Vec<&String> = self.content.tensor_infos.keys().collect();
        names.sort_unstable();
        match names.into_iter().find(|name| !is_known(name, config.layers)) {
            Some(name) => Err(GgufProblem::UnknownTensor { name: name.clone() }),
            None => Ok(()),
        }
    }

    fn vocabulary(&self) -> Result<Vocabulary, GgufProblem> {
        let tokenizer = Tokenizer::new(self.tokenizer_parts()?)?;
        let special = |key| {
            let id = self
                .optional_count(key)
                .ok()
                .flatten()
                .and_then(|id| u32::try_from(id).ok());
            id.map(|id| tokenizer.spelled(id)).unwrap_or_default()
        };
        let (bos, eos) = (
            special("tokenizer.ggml.bos_token_id"),
            special("tokenizer.ggml.eos_token_id"),
        );
        let chat_ml = tokenizer.control("<|im_start|>").map(|_| CHATML);
        let source = match self.content.metadata.get("tokenizer.chat_template") {
            Some(Value::String(source)) => Some(source.as_str()),
            Some(_) | None => chat_ml,
        };
        let template = source.map(|source| ChatTemplate::new(source, &bos, &eos)).transpose()?;
        let context_tokens = self.count("llama.context_length")?;
        let rows = self
            .content
            .tensor_infos
            .get("token_embd.weight")
            .and_then(|info| info.shape.dims().first().copied());
        if rows.is_some_and(|rows| rows < tokenizer.vocab()) {
            let found = format!("a list of {}", tokenizer.vocab());
            return Err(wrong(
                "tokenizer.ggml.tokens",
                &found,
                "at most one for each row of `token_embd.weight`",
            ));
        }
        Ok(Vocabulary {
            name: self.name.clone(),
            tokenizer,
            template,
            context_tokens,
        })
    }

    fn tokenizer_parts(&self) -> Result<TokenizerParts, GgufProblem> {
        let model = self.text("tokenizer.ggml.model")?;
        if model != "gpt2" {
            return Err(wrong("tokenizer.ggml.model", model, "`gpt2` (byte-level BPE)"));
        }
        let cut = match self.content.metadata.get("tokenizer.ggml.pre") {
            None => Cut::Gpt2,
            Some(Value::String(pre)) if pre == "gpt-2" || pre == "default" => Cut::Gpt2,
            Some(Value::String(pre)) if pre == "smollm" => Cut::SmolLm,
            Some(Value::String(pre)) if pre == "llama-bpe" || pre == "llama3" => Cut::Llama3,
            Some(other) => {
                return Err(wrong(
                    "tokenizer.ggml.pre",
                    &brief(other),
                    "`gpt-2`, `default`, `smollm` or `llama-bpe`",
                ));
            }
        };
        let adds_bos = match self.content.metadata.get("tokenizer.ggml.add_bos_token") {
            Some(Value::Bool(adds)) => *adds,
            Some(_) | None => cut == Cut::Llama3,
        };
        let token = |key| Ok::<_, GgufProblem>(self.optional_count(key)?.and_then(|id| u32::try_from(id).ok()));
        let mut ends = Vec::new();
        for key in [
            "tokenizer.ggml.eos_token_id",
            "tokenizer.ggml.eot_token_id",
            "tokenizer.ggml.eom_token_id",
        ] {
            ends.extend(token(key)?);
        }
        let bos = if adds_bos {
            token("tokenizer.ggml.bos_token_id")?
        } else {
            None
        };
        Ok(TokenizerParts {
            tokens: self.texts("tokenizer.ggml.tokens")?,
            kinds: self.kinds()?,
            merges: self.merges()?,
            cut,
            bos,
            ends,
        })
    }

    fn kinds(&self) -> Result<Vec<TokenKind>, GgufProblem> {
        let key = "tokenizer.ggml.token_type";
        let kind = |value: &Value| match integer(value) {
            // Unknown and control tokens.
            Some(2 | 3) => Ok(TokenKind::Control),
            Some(4) => Ok(TokenKind::UserDefined),
            // Normal, unused and byte tokens.
            Some(1 | 5 | 6) => Ok(TokenKind::Normal),
            Some(_) | None => Err(wrong(key, &brief(value), "integers from 1 to 6")),
        };
        self.list(key)?.iter().map(kind).collect()
    }

    fn merges(&self) -> Result<Vec<(String, String)>, GgufProblem> {
        let key = "tokenizer.ggml.merges";
        let merge = |text: String| match text.split_once(' ') {
            Some((left, right)) => Ok((left.to_owned(), right.to_owned())),
            None => Err(wrong(key, &text, "two tokens with a space between")),
        };
        self.texts(key)?.into_iter().map(merge).collect()
    }

    fn value(&self, key: &str, expected: &'static str) -> Result<&Value, GgufProblem> {
        let value = self.content.metadata.get(key);
        value.ok_or_else(|| GgufProblem::MissingKey {
            key: key.to_owned(),
            expected,
        })
    }

    fn text(&self, key: &str) -> Result<&str, GgufProblem> {
        match self.value(key, "a string")? {
            Value::String(text) => Ok(text),
            other => Err(wrong(key, &brief(other), "a string")),
        }
    }

    fn texts(&self, key: &str) -> Result<Vec<String>, GgufProblem> {
        let text = |value: &Value| match value {
            Value::String(text) => Ok(text.clone()),
            other => Err(wrong(key, &brief(other), "strings")),
        };
        self.list(key)?.iter().map(text).collect()
    }

    fn list(&self, key: &str) -> Result<&[Value], GgufProblem> {
        match self.value(key, "a list")? {
            Value::Array(list) => Ok(list),
            other => Err(wrong(key, &brief(other), "a list")),
        }
    }

    fn count(&self, key: &str) -> Result<usize, GgufProblem> {
        let value = self.value(key, "a count")?;
        let count = integer(value).and_then(|count| usize::try_from(count).ok());
        count.ok_or_else(|| wrong(key, &brief(value), "a count"))
    }

    fn optional_count(&self, key: &str) -> Result<Option<usize>, GgufProblem> {
        self.content
            .metadata
            .contains_key(key)
            .then(|| self.count(key))
            .transpose()
    }

    fn float(&self, key: &str, default: Option<f32>) -> Result<f32, GgufProblem> {
        match (self.content.metadata.get(key), default) {
            (None, Some(default)) => Ok(default),
            _ => match self.value(key, "a number")? {
                Value::F32(value) => Ok(*value),
                Value::F64(value) => Ok(*value as f32),
                other => Err(wrong(key, &brief(other), "a number")),
            },
        }
    }
}

impl WeightSource for GgufFile {
    type Error = GgufProblem;

    fn tensor(&mut self, name: &str, rows: usize, columns: usize) -> Result<QTensor, GgufProblem> {
        let missing = || GgufProblem::MissingTensor { name: name.to_owned() };
        let info = self.content.tensor_infos.get(name).ok_or_else(missing)?;
        let expected = if rows == 1 { vec![columns] } else { vec![rows, columns] };
        if info.shape.dims() != expected && info.shape.dims() != [rows, columns] {
            return Err(shape(name, info.shape.dims(), &expected));
        }
        let tensor = info.read(&mut self.reader, self.content.tensor_data_offset, &Device::Cpu);
        tensor.map_err(|error| self.unreadable(name, error))
    }

    fn has(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }

    fn unreadable(&self, name: &str, error: candle_core::Error) -> GgufProblem {
        GgufProblem::Data {
            name: name.to_owned(),
            problem: one_line(&error),
        }
    }
}

fn is_known(name: &str, layers: usize) -> bool {
    match name.split('.').collect::<Vec<_>>().as_slice() {
        ["token_embd" | "output_norm" | "output" | "rope_freqs", "weight"] => true,
        ["blk", layer, part, "weight"] => {
            layer.parse().is_ok_and(|layer: usize| layer < layers) && LAYER_TENSORS.contains(part)
        }
        _ => false,
    }
}

fn integer(value: &Value) -> Option<i64> {
    match value {
        Value::I8(value) => Some(i64::from(*value)),
        Value::I16(value) => Some(i64::from(*value)),
        Value::I32(value) => Some(i64::from(*value)),
        Value::I64(value) => Some(*value),
        other => other.to_u64().ok().and_then(|value| i64::try_from(value).ok()),
    }
}

fn wrong(key: &str, found: &str, expected: &'static str) -> GgufProblem {
    GgufProblem::Key {
        key: key.to_owned(),
        found: found.to_owned(),
        expected,
    }
}

fn shape(name: &str, found: &[usize], expected: &[usize]) -> GgufProblem {
    GgufProblem::TensorShape {
        name: name.to_owned(),
        found: found.to_vec(),
        expected: expected.to_vec(),
    }
}

/// A value for an error message: long ones are cut.
fn brief(value: &Value) -> String {
    match value {
        Value::String(text) => text.chars().take(40).collect(),
        Value::Array(list) => format!("a list of {}", list.len()),
        other => format!("{other:?}"),
    }
}

fn one_line(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}
