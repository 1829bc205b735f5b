//! The weights of a model, put into the form that the forward pass reads.
//!
//! Where they come from is a [`WeightSource`]: a GGUF file, or the generator of `tiny`. Query, key and value weights are
//! stacked into one matrix, gate and up too: fewer, larger products, and activations are rounded once for all of them.

use crate::config::ModelConfig;
use crate::matrix::{Matrix, Precision};

/// A model in memory: read-only, shared by whoever computes with it.
pub struct Model {
    pub(crate) config: ModelConfig,
    pub(crate) embedding: Matrix,
    pub(crate) layers: Vec<Layer>,
    pub(crate) output_norm: Vec<f32>,
    /// `None`: the embedding is the output too.
    pub(crate) output: Option<Matrix>,
}

pub(crate) struct Layer {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) query_key_value: Matrix,
    pub(crate) attention_output: Matrix,
    pub(crate) feed_forward_norm: Vec<f32>,
    pub(crate) gate_up: Matrix,
    pub(crate) down: Matrix,
}

/// Gives weights by their GGUF names (`token_embd.weight`, `blk.0.attn_q.weight`, ...).
pub trait WeightSource {
    /// Why weights could not be given.
    type Error;

    /// The float32 values of a tensor of this shape, row after row. Vectors have one row.
    ///
    /// # Errors
    /// If there is no such tensor, it has another shape, or it cannot be read.
    fn tensor(&mut self, name: &str, rows: usize, columns: usize) -> Result<Vec<f32>, Self::Error>;

    /// Whether there is a tensor of this name.
    fn has(&self, name: &str) -> bool;
}

impl Model {
    /// A model of this shape with weights from `source`.
    ///
    /// # Errors
    /// The source's, if it lacks a tensor.
    ///
    /// # Panics
    /// If the shape is not [valid](ModelConfig::validate), or the source gives a tensor of another size than it was asked for.
    pub fn new<S: WeightSource>(config: ModelConfig, source: &mut S, precision: Precision) -> Result<Self, S::Error> {
        config.validate().expect("the caller checked the shape");
        let (hidden, vocab) = (config.hidden, config.vocab);
        let mut read = Reader { source, precision };
        let embedding = read.matrix("token_embd.weight", vocab, hidden)?;
        let layers = (0..config.layers)
            .map(|index| read.layer(&config, index))
            .collect::<Result<_, _>>()?;
        let output_norm = read.vector("output_norm.weight", hidden)?;
        let output = match read.source.has("output.weight") {
            true => Some(read.matrix("output.weight", vocab, hidden)?),
            false => None,
        };
        Ok(Self {
            config,
            embedding,
            layers,
            output_norm,
            output,
        })
    }

    /// The shape of the model.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }
}

struct Reader<'a, S> {
    source: &'a mut S,
    precision: Precision,
}

impl<S: WeightSource> Reader<'_, S> {
    fn layer(&mut self, config: &ModelConfig, index: usize) -> Result<Layer, S::Error> {
        let (hidden, wide) = (config.hidden, config.feed_forward);
        let (query, kv) = (config.query_width(), config.kv_width());
        let name = |part: &str| format!("blk.{index}.{part}.weight");
        Ok(Layer {
            attention_norm: self.vector(&name("attn_norm"), hidden)?,
            query_key_value: Matrix::stack([
                self.matrix(&name("attn_q"), query, hidden)?,
                self.matrix(&name("attn_k"), kv, hidden)?,
                self.matrix(&name("attn_v"), kv, hidden)?,
            ]),
            attention_output: self.matrix(&name("attn_output"), hidden, query)?,
            feed_forward_norm: self.vector(&name("ffn_norm"), hidden)?,
            gate_up: Matrix::stack([
                self.matrix(&name("ffn_gate"), wide, hidden)?,
                self.matrix(&name("ffn_up"), wide, hidden)?,
            ]),
            down: self.matrix(&name("ffn_down"), hidden, wide)?,
        })
    }

    fn matrix(&mut self, name: &str, rows: usize, columns: usize) -> Result<Matrix, S::Error> {
        let values = self.source.tensor(name, rows, columns)?;
        assert_eq!(values.len(), rows * columns, "`{name}` has the size that was asked for");
        Ok(Matrix::new(&values, columns, self.precision))
    }

    fn vector(&mut self, name: &str, length: usize) -> Result<Vec<f32>, S::Error> {
        let values = self.source.tensor(name, 1, length)?;
        assert_eq!(values.len(), length, "`{name}` has the size that was asked for");
        Ok(values)
    }
}
