//! The forward pass once more, the way a textbook writes it: float32 weights, plain loops, one contiguous sequence, no
//! cache, no blocks, no batch. Tests compare the real one with it. It shares no code with that: even the rotation and the
//! exponential are the standard library's.

use crate::config::ModelConfig;
use crate::model::WeightSource;
use crate::quants::floats_of;
use crate::{Chunk, KvStore, Model};
use homing_kv::BlockId;
use std::fmt::Debug;

/// Weights as float32, as the source gives them.
struct Reference {
    config: ModelConfig,
    embedding: Vec<f32>,
    layers: Vec<[Vec<f32>; 9]>,
    norm: Vec<f32>,
    output: Option<Vec<f32>>,
}

impl Reference {
    fn new<S: WeightSource<Error: Debug>>(config: &ModelConfig, source: &mut S) -> Self {
        let (hidden, wide, vocab) = (config.hidden, config.feed_forward, config.vocab);
        let (query, kv) = (config.query_width(), config.kv_width());
        let mut read = |name: &str, rows, columns| floats_of(&source.tensor(name, rows, columns).unwrap()).unwrap();
        let layer = |index: usize| {
            let shapes = [
                ("attn_norm", 1, hidden),
                ("attn_q", query, hidden),
                ("attn_k", kv, hidden),
                ("attn_v", kv, hidden),
                ("attn_output", hidden, query),
                ("ffn_norm", 1, hidden),
                ("ffn_gate", wide, hidden),
                ("ffn_up", wide, hidden),
                ("ffn_down", hidden, wide),
            ];
            shapes.map(|(part, rows, columns)| read(&format!("blk.{index}.{part}.weight"), rows, columns))
        };
        let layers = (0..config.layers).map(layer).collect();
        let embedding = read("token_embd.weight", vocab, hidden);
        let norm = read("output_norm.weight", 1, hidden);
        let output = source
            .has("output.weight")
            .then(|| floats_of(&source.tensor("output.weight", vocab, hidden).unwrap()).unwrap());
        Self {
            config: config.clone(),
            embedding,
            layers,
            norm,
            output,
        }
    }

    /// Logits after the last of the tokens.
    fn logits(&self, tokens: &[u32]) -> Vec<f32> {
        let hidden = self.config.hidden;
        let row = |token: &u32| self.embedding[*token as usize * hidden..][..hidden].to_vec();
        let mut residual: Vec<Vec<f32>> = tokens.iter().map(row).collect();
        for [attention_norm, query, key, value, output, ffn_norm, gate, up, down] in &self.layers {
            let normed: Vec<_> = residual.iter().map(|row| self.norm(row, attention_norm)).collect();
            let queries: Vec<_> = normed
                .iter()
                .enumerate()
                .map(|(at, row)| self.turn(at, product(query, row)))
                .collect();
            let keys: Vec<_> = normed
                .iter()
                .enumerate()
                .map(|(at, row)| self.turn(at, product(key, row)))
                .collect();
            let values: Vec<_> = normed.iter().map(|row| product(value, row)).collect();
            for (at, row) in residual.iter_mut().enumerate() {
                let attended = self.attend(&queries[at], &keys[..=at], &values[..=at]);
                add(row, &product(output, &attended));
                let normed = self.norm(row, ffn_norm);
                let (gate, up) = (product(gate, &normed), product(up, &normed));
                let activated: Vec<f32> = gate
                    .iter()
                    .zip(up)
                    .map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up)
                    .collect();
                add(row, &product(down, &activated));
            }
        }
        let last = self.norm(residual.last().unwrap(), &self.norm);
        product(self.output.as_ref().unwrap_or(&self.embedding), &last)
    }

    fn norm(&self, row: &[f32], weight: &[f32]) -> Vec<f32> {
        let square: f32 = row.iter().map(|value| value * value).sum();
        let scale = (square / row.len() as f32 + self.config.norm_epsilon).sqrt();
        row.iter()
            .zip(weight)
            .map(|(value, weight)| value / scale * weight)
            .collect()
    }

    /// The rotary embedding, pairs side by side.
    fn turn(&self, position: usize, mut heads: Vec<f32>) -> Vec<f32> {
        for head in heads.chunks_mut(self.config.head_dim) {
            for pair in 0..self.config.rope.dimensions / 2 {
                let exponent = -2.0 * pair as f64 / self.config.rope.dimensions as f64;
                let frequency =
                    f64::from(self.config.rope.base).powf(exponent) / f64::from(self.config.rope.factors[pair]);
                let (sine, cosine) = (position as f64 * frequency).sin_cos();
                let (x, y) = (f64::from(head[2 * pair]), f64::from(head[2 * pair + 1]));
                head[2 * pair] = (x * cosine - y * sine) as f32;
                head[2 * pair + 1] = (x * sine + y * cosine) as f32;
            }
        }
        heads
    }

    fn attend(&self, query: &[f32], keys: &[Vec<f32>], values: &[Vec<f32>]) -> Vec<f32> {
        let (width, group) = (self.config.head_dim, self.config.group());
        let mut output = vec![0.0; query.len()];
        for head in 0..self.config.heads {
            let (own, shared) = (
                head * width..(head + 1) * width,
                head / group * width..(head / group + 1) * width,
            );
            let query = &query[own.clone()];
            let score = |key: &Vec<f32>| {
                let dot: f32 = query
                    .iter()
                    .zip(&key[shared.clone()])
                    .map(|(query, key)| query * key)
                    .sum();
                dot / (width as f32).sqrt()
            };
            let scores: Vec<f32> = keys.iter().map(score).collect();
            let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let weights: Vec<f32> = scores.iter().map(|score| (score - largest).exp()).collect();
            let sum: f32 = weights.iter().sum();
            for (weight, value) in weights.iter().zip(values) {
                for (output, value) in output[own.clone()].iter_mut().zip(&value[shared.clone()]) {
                    *output += weight / sum * value;
                }
            }
        }
        output
    }
}

fn product(weights: &[f32], row: &[f32]) -> Vec<f32> {
    weights
        .chunks_exact(row.len())
        .map(|weights| weights.iter().zip(row).map(|(weight, value)| weight * value).sum())
        .collect()
}

fn add(row: &mut [f32], delta: &[f32]) {
    row.iter_mut().zip(delta).for_each(|(value, delta)| *value += delta);
}

/// Logits of the real forward pass: the tokens in two chunks, in blocks in reverse order.
fn logits(model: &Model, tokens: &[u32]) -> Vec<f32> {
    let mut kv = KvStore::new(model.config(), 16, 8);
    let blocks: Vec<BlockId> = (0..8).rev().map(BlockId).collect();
    let (first, second) = tokens.split_at(tokens.len() / 3);
    let start = u32::try_from(first.len()).unwrap();
    model
        .forward(
            &mut kv,
            &[Chunk {
                tokens: first,
                start: 0,
                blocks: &blocks,
                logits: false,
            }],
        )
        .unwrap();
    let second = Chunk {
        tokens: second,
        start,
        blocks: &blocks,
        logits: true,
    };
    model.forward(&mut kv, &[second]).unwrap().remove(0).unwrap()
}

/// The largest difference, relative to the largest logit.
fn deviation(found: &[f32], expected: &[f32]) -> f32 {
    let largest = expected.iter().fold(0.0f32, |largest, logit| largest.max(logit.abs()));
    found
        .iter()
        .zip(expected)
        .map(|(found, expected)| (found - expected).abs() / largest)
        .fold(0.0, f32::max)
}

/// What the issue of agreement with plain float32 asks for.
const TOLERANCE: f32 = 1e-3;

mod tests {
    use super::*;
    use crate::gguf::GgufFile;
    use crate::tiny::{TinyWeights, tiny_config};
    use crate::{ModelSpec, default_cache_dir};

    #[test]
    fn tiny_agrees_with_plain_float32() {
        for seed in 0..4 {
            let reference = Reference::new(&tiny_config(), &mut TinyWeights { seed });
            let model = Model::tiny(seed);
            for length in [3, 50, 120] {
                let tokens: Vec<u32> = (0..length)
                    .map(|index| (index * index + 31 * index + 7) % 259)
                    .collect();
                let deviation = deviation(&logits(&model, &tokens), &reference.logits(&tokens));
                assert!(deviation < TOLERANCE, "seed {seed}, {length} tokens: {deviation}");
            }
        }
    }

    #[test]
    fn smollm2_agrees_with_plain_float32() {
        let Some(path) = crate::open::cached(&ModelSpec::SmolLm2, &default_cache_dir()) else {
            eprintln!("SKIPPED: SmolLM2 is not in the cache; `homing up --model smollm2` fetches it");
            return;
        };
        let model = Model::load_gguf(&path).unwrap();
        let reference = Reference::new(model.config(), &mut GgufFile::open(&path).unwrap());
        let tokens = [504, 3575, 282, 4649, 314];
        let deviation = deviation(&logits(&model, &tokens), &reference.logits(&tokens));
        assert!(deviation < TOLERANCE, "{deviation}");
    }
}
