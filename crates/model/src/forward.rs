//! The forward pass: pieces of several sequences, prefill and decode alike, through all layers in one batch.
//!
//! Every row's arithmetic is independent of its batch (see `matrix`, `attention` and `math`), so a token's logits have
//! the same bits whether its prompt was prefilled whole or in chunks, alone or with others, here or on another worker
//! whose blocks were copied over.

use crate::attention::{Attention, Span};
use crate::config::ModelConfig;
use crate::kv_store::KvStore;
use crate::math;
use crate::matrix::PARALLEL_MIN;
use crate::model::{Layer, Model};
use crate::rope::Rotations;
use homing_kv::BlockId;

/// A piece of one sequence: tokens at positions `start..start + tokens.len()`, whose predecessors' keys and values are in
/// the blocks already (or are computed by an earlier chunk of the same call).
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    /// The tokens to compute; at least one.
    pub tokens: &'a [u32],
    /// Position of the first of them.
    pub start: u32,
    /// The blocks of the sequence from position 0 on; at least enough for the last of the tokens.
    pub blocks: &'a [BlockId],
    /// Whether the logits after the last token are wanted.
    pub logits: bool,
}

/// Why a batch was refused. Nothing was computed or written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForwardError {
    /// A chunk has no tokens.
    #[error("chunk {chunk} has no tokens")]
    Empty {
        /// Index of the chunk.
        chunk: usize,
    },
    /// A token is outside the vocabulary.
    #[error("token `{token}` in chunk {chunk} is outside the vocabulary, expected less than {vocab}")]
    Token {
        /// Index of the chunk.
        chunk: usize,
        /// The token.
        token: u32,
        /// Tokens of the vocabulary.
        vocab: usize,
    },
    /// The sequence would grow beyond the context.
    #[error("chunk {chunk} ends at {end} tokens, expected at most {context_tokens}")]
    Context {
        /// Index of the chunk.
        chunk: usize,
        /// Length of the sequence after the chunk, in tokens.
        end: usize,
        /// The longest sequence, in tokens.
        context_tokens: usize,
    },
    /// The block table is shorter than the sequence.
    #[error("chunk {chunk} has {found} blocks, expected {expected}")]
    Blocks {
        /// Index of the chunk.
        chunk: usize,
        /// Blocks that came.
        found: usize,
        /// Blocks that hold the sequence.
        expected: usize,
    },
    /// The block table names a block that the pool does not have.
    #[error("block `{block}` in chunk {chunk} is outside the pool, expected less than {blocks}")]
    NoSuchBlock {
        /// Index of the chunk.
        chunk: usize,
        /// The block.
        block: u32,
        /// Blocks of the pool.
        blocks: u32,
    },
    /// The pool was made for a model of another shape.
    #[error("the pool has {found} bytes for a token, expected {expected}")]
    Shape {
        /// Bytes of a token in the pool.
        found: usize,
        /// Bytes of a token of this model.
        expected: usize,
    },
}

impl Model {
    /// Computes the chunks, writes their keys and values into the pool and gives, for each chunk that asked, the logits
    /// after its last token (`config().vocab` of them).
    ///
    /// Chunks may share blocks that they only read. Two chunks must not write the same position of the same block.
    ///
    /// # Errors
    /// If a chunk is not computable as it stands; then none is.
    pub fn forward(&self, kv: &mut KvStore, chunks: &[Chunk<'_>]) -> Result<Vec<Option<Vec<f32>>>, ForwardError> {
        check(&self.config, kv, chunks)?;
        let rows: usize = chunks.iter().map(|chunk| chunk.tokens.len()).sum();
        if rows * self.config.hidden * self.config.hidden < PARALLEL_MIN {
            return Ok(self.compute(kv, chunks));
        }
        // Inside the pool, the parallel sections below are handed over without waking this thread each time.
        Ok(rayon::scope(|_| self.compute(kv, chunks)))
    }

    fn compute(&self, kv: &mut KvStore, chunks: &[Chunk<'_>]) -> Vec<Option<Vec<f32>>> {
        let mut batch = Batch::new(&self.config, kv, chunks);
        let mut residual = self.embed(chunks);
        for (index, layer) in self.layers.iter().enumerate() {
            batch.attend(index, layer, &mut residual);
            batch.feed_forward(layer, &mut residual);
        }
        self.logits(chunks, &residual)
    }

    fn embed(&self, chunks: &[Chunk<'_>]) -> Vec<f32> {
        let tokens: Vec<u32> = chunks.iter().flat_map(|chunk| chunk.tokens).copied().collect();
        let mut residual = vec![0.0; tokens.len() * self.config.hidden];
        for (token, row) in tokens.iter().zip(residual.chunks_exact_mut(self.config.hidden)) {
            self.embedding.row(*token as usize, row);
        }
        residual
    }

    fn logits(&self, chunks: &[Chunk<'_>], residual: &[f32]) -> Vec<Option<Vec<f32>>> {
        let hidden = self.config.hidden;
        let mut asked = Vec::new();
        let mut end = 0;
        for chunk in chunks {
            end += chunk.tokens.len();
            if chunk.logits {
                asked.extend_from_slice(&residual[(end - 1) * hidden..end * hidden]);
            }
        }
        let mut normed = vec![0.0; asked.len()];
        math::rms_norm(&asked, &self.output_norm, self.config.norm_epsilon, &mut normed);
        let logits = self.output.as_ref().unwrap_or(&self.embedding).multiply(&normed);
        let mut rows = logits.chunks_exact(self.config.vocab);
        chunks
            .iter()
            .map(|chunk| {
                if chunk.logits {
                    rows.next().map(<[f32]>::to_vec)
                } else {
                    None
                }
            })
            .collect()
    }
}

/// What all layers of one call share.
struct Batch<'a> {
    config: &'a ModelConfig,
    kv: &'a mut KvStore,
    spans: Vec<Span<'a>>,
    rotations: Rotations,
}

impl<'a> Batch<'a> {
    fn new(config: &'a ModelConfig, kv: &'a mut KvStore, chunks: &[Chunk<'a>]) -> Self {
        let span = |chunk: &Chunk<'a>| Span {
            start: chunk.start as usize,
            rows: chunk.tokens.len(),
            blocks: chunk.blocks,
        };
        let positions = chunks.iter().flat_map(|chunk| (chunk.start..).take(chunk.tokens.len()));
        let rotations = Rotations::new(&config.rope, positions);
        Self {
            config,
            kv,
            spans: chunks.iter().map(span).collect(),
            rotations,
        }
    }

    /// Adds a layer's attention to the residual stream.
    fn attend(&mut self, index: usize, layer: &Layer, residual: &mut [f32]) {
        let mut normed = vec![0.0; residual.len()];
        math::rms_norm(residual, &layer.attention_norm, self.config.norm_epsilon, &mut normed);
        let mut projected = layer.query_key_value.multiply(&normed);
        let queries = self.place(index, &mut projected);
        let attention = Attention {
            config: self.config,
            kv: self.kv,
            layer: index,
        };
        let attended = attention.rows(&queries, &self.spans);
        math::add(residual, &layer.attention_output.multiply(&attended));
    }

    /// Turns queries and keys, puts keys and values into their blocks and gives the queries.
    fn place(&mut self, layer: usize, projected: &mut [f32]) -> Vec<f32> {
        let (head_dim, query_width, kv_width) =
            (self.config.head_dim, self.config.query_width(), self.config.kv_width());
        let width = query_width + 2 * kv_width;
        let block_size = self.kv.block_size() as usize;
        let mut queries = Vec::with_capacity(projected.len() / width * query_width);
        let mut rows = projected.chunks_exact_mut(width).enumerate();
        for span in &self.spans {
            for (position, (row, values)) in (span.start..span.start + span.rows).zip(&mut rows) {
                let (turned, value) = values.split_at_mut(query_width + kv_width);
                self.rotations.apply(row, turned, head_dim);
                let (query, key) = turned.split_at(query_width);
                queries.extend_from_slice(query);
                self.kv.write(
                    span.blocks[position / block_size],
                    layer,
                    position % block_size,
                    key,
                    value,
                );
            }
        }
        queries
    }

    /// Adds a layer's feed-forward network to the residual stream.
    fn feed_forward(&self, layer: &Layer, residual: &mut [f32]) {
        let mut normed = vec![0.0; residual.len()];
        math::rms_norm(
            residual,
            &layer.feed_forward_norm,
            self.config.norm_epsilon,
            &mut normed,
        );
        let gate_up = layer.gate_up.multiply(&normed);
        let mut activated = vec![0.0; gate_up.len() / 2];
        math::swiglu(&gate_up, self.config.feed_forward, &mut activated);
        math::add(residual, &layer.down.multiply(&activated));
    }
}

fn check(config: &ModelConfig, kv: &KvStore, chunks: &[Chunk<'_>]) -> Result<(), ForwardError> {
    let (found, expected) = (kv.token_bytes(), config.kv_bytes_per_token());
    if found != expected {
        return Err(ForwardError::Shape { found, expected });
    }
    chunks
        .iter()
        .enumerate()
        .try_for_each(|(index, chunk)| check_chunk(config, kv, index, chunk))
}

fn check_chunk(config: &ModelConfig, kv: &KvStore, index: usize, chunk: &Chunk<'_>) -> Result<(), ForwardError> {
    let (vocab, context_tokens) = (config.vocab, config.context_tokens);
    if chunk.tokens.is_empty() {
        return Err(ForwardError::Empty { chunk: index });
    }
    if let Some(token) = chunk.tokens.iter().find(|token| **token as usize >= vocab) {
        return Err(ForwardError::Token {
            chunk: index,
            token: *token,
            vocab,
        });
    }
    let end = chunk.start as usize + chunk.tokens.len();
    if end > context_tokens {
        return Err(ForwardError::Context {
            chunk: index,
            end,
            context_tokens,
        });
    }
    let (found, expected) = (chunk.blocks.len(), end.div_ceil(kv.block_size() as usize));
    if found < expected {
        return Err(ForwardError::Blocks {
            chunk: index,
            found,
            expected,
        });
    }
    match chunk.blocks.iter().find(|block| block.0 >= kv.blocks()) {
        Some(block) => Err(ForwardError::NoSuchBlock {
            chunk: index,
            block: block.0,
            blocks: kv.blocks(),
        }),
        None => Ok(()),
    }
}
