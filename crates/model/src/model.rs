//! The weights of a model, put into the form that the forward pass reads.
//!
//! Where they come from is a [`WeightSource`]: a GGUF file, or the generator of `tiny`. Query, key and value weights are
//! stacked into one matrix, gate and up too: fewer, larger products.

use crate::config::ModelConfig;
use crate::matrix::Matrix;
use crate::quants::{floats_of, weights_of};
use candle_core::quantized::QTensor;

/// What each pair's rotary frequency is divided by, where a model (Llama 3) says so.
const ROPE_FACTORS: &str = "rope_freqs.weight";

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
pub(crate) trait WeightSource {
    /// Why weights could not be given.
    type Error;

    /// A tensor of this shape; a vector has one row.
    fn tensor(&mut self, name: &str, rows: usize, columns: usize) -> Result<QTensor, Self::Error>;

    /// Whether there is a tensor of this name.
    fn has(&self, name: &str) -> bool;

    /// The error for a tensor that candle cannot convert.
    fn unreadable(&self, name: &str, error: candle_core::Error) -> Self::Error;
}

impl Model {
    /// A model of this (valid) shape with weights from `source`; an error is the source's.
    pub(crate) fn new<S: WeightSource>(mut config: ModelConfig, source: &mut S) -> Result<Self, S::Error> {
        config.validate().expect("the caller checked the shape");
        let (hidden, vocab) = (config.hidden, config.vocab);
        let mut read = Reader { source };
        let embedding = read.matrix("token_embd.weight", vocab, hidden)?;
        let layers = (0..config.layers)
            .map(|index| read.layer(&config, index))
            .collect::<Result<_, _>>()?;
        if read.source.has(ROPE_FACTORS) {
            let factors = read.vector(ROPE_FACTORS, config.rope.factors.len())?;
            config
                .rope
                .factors
                .iter_mut()
                .zip(factors)
                .for_each(|(factor, further)| *factor *= further);
        }
        let output_norm = read.vector("output_norm.weight", hidden)?;
        let output = if read.source.has("output.weight") {
            Some(read.matrix("output.weight", vocab, hidden)?)
        } else {
            None
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
        let tensor = self.source.tensor(name, rows, columns)?;
        let weights = weights_of(&tensor).map_err(|error| self.source.unreadable(name, error))?;
        let matrix = Matrix::new(weights, columns);
        assert_eq!(matrix.outputs(), rows, "`{name}` has the shape that was asked for");
        Ok(matrix)
    }

    fn vector(&mut self, name: &str, length: usize) -> Result<Vec<f32>, S::Error> {
        let tensor = self.source.tensor(name, 1, length)?;
        let values = floats_of(&tensor).map_err(|error| self.source.unreadable(name, error))?;
        assert_eq!(values.len(), length, "`{name}` has the length that was asked for");
        Ok(values)
    }
}
