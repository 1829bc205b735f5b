//! The shape of a model: what the loader found out and what the forward pass, the pool and the worker size themselves by.
//!
//! Only dense Llama: RMS norm, rotary embedding on interleaved pairs (GGUF's order), grouped-query attention, SwiGLU.

/// The largest count that a shape may have: beyond it float32 does not count exactly, and no model comes near.
const MAX_COUNT: usize = 1 << 24;

/// The shape of a dense Llama-family model. Counts are of elements, not of bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// What `/v1/models` calls it.
    pub name: String,
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub feed_forward: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; each serves `heads / kv_heads` query heads.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Tokens of the vocabulary; the length of a row of logits.
    pub vocab: usize,
    /// The longest sequence, in tokens.
    pub context_tokens: usize,
    /// Added to the mean square before its root is taken.
    pub norm_epsilon: f32,
    /// The rotary embedding.
    pub rope: RopeConfig,
}

/// The rotary embedding: pair `i` of a head turns by `position * base^(-2i / dimensions) / factor(i)`.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// The base of the frequencies.
    pub base: f32,
    /// How many elements of a head turn; the rest pass through. Even, at most the head's width.
    pub dimensions: usize,
    /// What each pair's frequency is divided by (Llama 3's and linear scaling); one for each pair.
    pub factors: Vec<f32>,
}

impl ModelConfig {
    /// Query heads that share one key/value head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Width of all query heads together.
    #[must_use]
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key heads (or of all value heads) together.
    #[must_use]
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Bytes of keys and values of one token, all layers together.
    #[must_use]
    pub fn kv_bytes_per_token(&self) -> usize {
        self.layers * 2 * self.kv_width() * size_of::<f32>()
    }

    /// What is wrong with the shape, if anything.
    ///
    /// # Errors
    /// The first rule that the shape breaks, as a sentence.
    pub fn validate(&self) -> Result<(), String> {
        let counts = [
            ("layers", self.layers),
            ("hidden", self.hidden),
            ("feed_forward", self.feed_forward),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("vocab", self.vocab),
            ("context_tokens", self.context_tokens),
        ];
        for (name, count) in counts {
            if count == 0 || count > MAX_COUNT {
                return Err(format!("`{name}` is {count}, expected 1 to {MAX_COUNT}"));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(format!(
                "{} heads do not share {} kv heads evenly",
                self.heads, self.kv_heads
            ));
        }
        let rope = &self.rope;
        if !rope.dimensions.is_multiple_of(2) || rope.dimensions > self.head_dim {
            return Err(format!(
                "{} rotary dimensions, expected an even number up to {}",
                rope.dimensions, self.head_dim
            ));
        }
        if rope.factors.len() != rope.dimensions / 2 {
            return Err(format!(
                "{} rotary factors, expected {}",
                rope.factors.len(),
                rope.dimensions / 2
            ));
        }
        if !(rope.base.is_finite() && rope.base > 0.0) {
            return Err(format!("rotary base `{}`, expected a positive number", rope.base));
        }
        if !(self.norm_epsilon.is_finite() && self.norm_epsilon >= 0.0) {
            return Err(format!(
                "norm epsilon `{}`, expected a number from 0 on",
                self.norm_epsilon
            ));
        }
        if let Some(factor) = rope
            .factors
            .iter()
            .find(|factor| !(factor.is_finite() && **factor > 0.0))
        {
            return Err(format!("rotary factor `{factor}`, expected a positive number"));
        }
        Ok(())
    }
}
