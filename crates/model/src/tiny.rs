//! `tiny`: a Llama of random weights, made from a seed in a millisecond, for tests and for machines with no download.
//!
//! It says nothing sensible, but it is a real model in every other respect: grouped-query attention over a long context,
//! weights in Q8_0, greedy tokens that depend on everything before them. Three choices see to the last: queries and keys
//! are large, so that attention picks positions instead of averaging them all; the output is not the embedding, so that a
//! token does not predict itself; and only printable characters, the newline and `<|im_end|>` have output rows of full
//! size, so that an answer is readable text that ends by itself after a hundred tokens or so.

use crate::config::{ModelConfig, RopeConfig};
use crate::model::{Model, WeightSource};
use crate::tokenizer::BYTE_SPECIALS;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use homing_units::{Rng, rng_for};
use rand::RngExt as _;
use std::convert::Infallible;

/// Output rows of tokens that an answer should not hold are this much smaller than the others.
const RARE: f32 = 0.2;

impl Model {
    /// The tiny model of a seed, in Q8_0. The same seed gives the same bits everywhere.
    #[must_use]
    pub fn tiny(seed: u64) -> Self {
        let Ok(model) = Self::new(tiny_config(), &mut TinyWeights { seed });
        model
    }
}

/// The shape of [`Model::tiny`].
pub(crate) fn tiny_config() -> ModelConfig {
    let head_dim = 16;
    ModelConfig {
        name: "tiny".to_owned(),
        layers: 3,
        hidden: 64,
        feed_forward: 128,
        heads: 4,
        kv_heads: 2,
        head_dim,
        vocab: 256 + BYTE_SPECIALS.len(),
        context_tokens: 32_768,
        norm_epsilon: 1e-5,
        rope: RopeConfig {
            base: 10_000.0,
            dimensions: head_dim,
            factors: vec![1.0; head_dim / 2],
        },
    }
}

/// The weights of [`Model::tiny`] by their GGUF names: each tensor is drawn from a stream of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TinyWeights {
    /// What they are drawn from.
    pub(crate) seed: u64,
}

impl WeightSource for TinyWeights {
    type Error = Infallible;

    fn tensor(&mut self, name: &str, rows: usize, columns: usize) -> Result<QTensor, Infallible> {
        let format = if name.ends_with("norm.weight") {
            GgmlDType::F32
        } else {
            GgmlDType::Q8_0
        };
        let tensor = Tensor::from_vec(self.values(name, rows, columns), (rows, columns), &Device::Cpu);
        let quantised = tensor.and_then(|tensor| QTensor::quantize(&tensor, format));
        Ok(quantised.expect("there are as many values as the shape has, in whole blocks"))
    }

    fn has(&self, name: &str) -> bool {
        name == "output.weight"
    }

    fn unreadable(&self, name: &str, error: candle_core::Error) -> Infallible {
        unreachable!("`{name}` was made here: {error}")
    }
}

impl TinyWeights {
    fn values(&self, name: &str, rows: usize, columns: usize) -> Vec<f32> {
        if name.ends_with("norm.weight") {
            return vec![1.0; rows * columns];
        }
        let mut rng = rng_for(self.seed, name);
        let scale = gain(name) / (columns as f32).sqrt();
        let row = |row| {
            let scale = if name == "output.weight" {
                scale * prominence(row)
            } else {
                scale
            };
            draw(&mut rng, columns).map(|value| value * scale).collect::<Vec<_>>()
        };
        (0..rows).flat_map(row).collect()
    }
}

/// How large a tensor's products are, for inputs of size one.
fn gain(name: &str) -> f32 {
    match name.split('.').rev().nth(1) {
        Some("token_embd") => 4.0,
        Some("attn_q" | "attn_k") => 2.0,
        Some("attn_output") => 2.0,
        _ => 1.5,
    }
}

fn prominence(token: usize) -> f32 {
    let end = 256
        + BYTE_SPECIALS
            .iter()
            .position(|special| *special == "<|im_end|>")
            .unwrap_or(0);
    match u8::try_from(token) {
        Ok(byte) if byte == b'\n' || byte == b' ' || byte.is_ascii_graphic() => 1.0,
        Err(_) if token == end => 1.0,
        Ok(_) | Err(_) => RARE,
    }
}

/// Values of mean 0 and variance 1. Uniform ones, because the tails of a normal draw take a logarithm that differs between
/// platforms.
fn draw(rng: &mut Rng, count: usize) -> impl Iterator<Item = f32> {
    let bound = 3.0f32.sqrt();
    (0..count).map(move |_| rng.random_range(-bound..bound))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Chunk, KvStore, Tokenizer};
    use homing_kv::BlockId;
    use std::collections::BTreeSet;

    /// The tokens that follow a prompt, each the likeliest.
    fn greedy(seed: u64, prompt: &[u32], count: usize) -> Vec<u32> {
        let model = Model::tiny(seed);
        let mut kv = KvStore::new(model.config(), 16, 32);
        let blocks: Vec<BlockId> = (0..32).map(BlockId).collect();
        let mut sequence = prompt.to_vec();
        let mut done = 0;
        while sequence.len() < prompt.len() + count {
            let start = u32::try_from(done).unwrap();
            let chunk = Chunk {
                tokens: &sequence[done..],
                start,
                blocks: &blocks,
                logits: true,
            };
            let logits = model.forward(&mut kv, &[chunk]).unwrap().remove(0).unwrap();
            done = sequence.len();
            let best = (0u32..)
                .zip(&logits)
                .max_by(|(_, left), (_, right)| left.total_cmp(right))
                .unwrap();
            sequence.push(best.0);
        }
        sequence.split_off(prompt.len())
    }

    #[test]
    fn greedy_answers_vary_with_everything_before_them() {
        let tokenizer = Tokenizer::bytes();
        let prompts = ["Hello", "Jello", "Hellp", "Hello Hello Hello Hello Hello Hello"];
        for seed in 0..4 {
            let answers: BTreeSet<Vec<u32>> = prompts
                .iter()
                .map(|prompt| greedy(seed, &tokenizer.encode(prompt), 100))
                .collect();
            assert_eq!(
                answers.len(),
                prompts.len(),
                "seed {seed}: each prompt has its own answer"
            );
            for answer in answers {
                let pairs: BTreeSet<&[u32]> = answer.windows(2).collect();
                assert!(
                    pairs.len() > 60,
                    "seed {seed}: {} of 99 pairs differ in {answer:?}",
                    pairs.len()
                );
                let readable = answer
                    .iter()
                    .filter(|token| prominence(**token as usize) == 1.0)
                    .count();
                assert!(readable > 95, "seed {seed}: {readable} of 100 tokens are readable");
            }
        }
    }

    #[test]
    fn a_seed_has_the_same_weights_for_ever() {
        // Printed once on x86-64 and to be the same everywhere: workers of one fleet may differ in their processor.
        assert_eq!(
            greedy(1, &[72, 105], 12),
            [43, 112, 126, 122, 82, 126, 93, 56, 48, 10, 80, 60]
        );
    }
}
