//! Attention straight over the paged blocks: no copy into a contiguous cache, no mask.
//!
//! For each (row, head): the scores of all positions up to the row's own, their exponentials, and the weighted sum of the
//! values, each in the order of positions. Rows are taken in tiles and positions block by block only so that keys and
//! values are read once from memory; no order inside a (row, head) depends on either, nor on the block's size or id, so
//! the result is the same however a prompt was cut, batched or placed.

use crate::config::ModelConfig;
use crate::kv_store::KvStore;
use crate::math;
use crate::matrix::PARALLEL_MIN;
use homing_kv::BlockId;
use rayon::prelude::*;

/// Rows of one sequence that read keys and values together. Their scores for a few thousand positions fit into the
/// second-level cache.
const ROW_TILE: usize = 4;

/// Keys, and queries, whose dot products are taken together.
const KEY_TILE: usize = 4;
const QUERY_PAIR: usize = 2;

/// Rows of a batch that belong to one sequence: at positions `start..start + rows`, over these blocks.
#[derive(Clone, Copy)]
pub(crate) struct Span<'a> {
    pub(crate) start: usize,
    pub(crate) rows: usize,
    pub(crate) blocks: &'a [BlockId],
}

/// The attention of one layer.
pub(crate) struct Attention<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) kv: &'a KvStore,
    pub(crate) layer: usize,
}

/// Rows of one tile under one key/value head: `[row][head of the group]`, a slice of `head_dim` each.
struct Unit<'a> {
    /// Position of the first row.
    start: usize,
    kv_head: usize,
    blocks: &'a [BlockId],
    queries: Vec<&'a [f32]>,
    outputs: Vec<&'a mut [f32]>,
}

impl Attention<'_> {
    /// The attention of all rows: `queries` and the result are `[row][head][head_dim]`.
    pub(crate) fn rows(&self, queries: &[f32], spans: &[Span<'_>]) -> Vec<f32> {
        let mut output = vec![0.0; queries.len()];
        let work: usize = spans.iter().map(|span| span.rows * (span.start + span.rows)).sum();
        let mut units = self.units(queries, spans, &mut output);
        if work * 2 * self.config.query_width() < PARALLEL_MIN {
            let mut scores = Vec::new();
            units.iter_mut().for_each(|unit| self.unit(unit, &mut scores));
        } else {
            // Long units are next to each other; single-item pieces let the threads share them evenly.
            units
                .par_iter_mut()
                .with_max_len(1)
                .for_each_init(Vec::new, |scores, unit| self.unit(unit, scores));
        }
        output
    }

    fn units<'a>(&self, queries: &'a [f32], spans: &[Span<'a>], output: &'a mut [f32]) -> Vec<Unit<'a>> {
        let (kv_heads, group, head_dim) = (self.config.kv_heads, self.config.group(), self.config.head_dim);
        let mut units: Vec<Unit<'a>> = Vec::new();
        let mut heads = queries.chunks_exact(head_dim).zip(output.chunks_exact_mut(head_dim));
        for span in spans {
            for tile in (0..span.rows).step_by(ROW_TILE) {
                let first = units.len();
                let start = span.start + tile;
                units.extend((0..kv_heads).map(|kv_head| Unit {
                    start,
                    kv_head,
                    blocks: span.blocks,
                    queries: Vec::with_capacity(ROW_TILE * group),
                    outputs: Vec::with_capacity(ROW_TILE * group),
                }));
                for _ in tile..span.rows.min(tile + ROW_TILE) {
                    for unit in &mut units[first..] {
                        for (query, output) in heads.by_ref().take(group) {
                            unit.queries.push(query);
                            unit.outputs.push(output);
                        }
                    }
                }
            }
        }
        units
    }

    fn unit(&self, unit: &mut Unit<'_>, scores: &mut Vec<f32>) {
        let group = self.config.group();
        let length = unit.start + unit.queries.len() / group;
        scores.clear();
        scores.resize(unit.queries.len() * length, 0.0);
        self.score(unit, length, scores);
        let mut sums = Vec::with_capacity(unit.queries.len());
        for (index, scores) in scores.chunks_exact_mut(length).enumerate() {
            // A row sees the positions up to its own.
            sums.push(math::exp_of_scores(&mut scores[..=unit.start + index / group]));
        }
        self.gather(unit, length, scores);
        for (output, sum) in unit.outputs.iter_mut().zip(sums) {
            output.iter_mut().for_each(|value| *value /= sum);
        }
    }

    /// Scores of every (row, head) of the unit, `[row][head][position]`, those of later positions than the row's included.
    fn score(&self, unit: &Unit<'_>, length: usize, scores: &mut [f32]) {
        let (kv_width, column) = (self.config.kv_width(), unit.kv_head * self.config.head_dim);
        let block_size = self.kv.block_size() as usize;
        for (block, first) in unit.blocks.iter().zip((0..length).step_by(block_size)) {
            let keys = &self.kv.keys(*block, self.layer)[..block_size.min(length - first) * kv_width];
            let key = |index: usize| &keys[index * kv_width + column..][..self.config.head_dim];
            let count = keys.len() / kv_width;
            let whole = count - count % KEY_TILE;
            for index in (0..whole).step_by(KEY_TILE) {
                let keys: [&[f32]; KEY_TILE] = std::array::from_fn(|offset| key(index + offset));
                score_keys(keys, &unit.queries, length, &mut scores[first + index..]);
            }
            for index in whole..count {
                score_keys([key(index)], &unit.queries, length, &mut scores[first + index..]);
            }
        }
        let scale = 1.0 / (self.config.head_dim as f32).sqrt();
        scores.iter_mut().for_each(|score| *score *= scale);
    }

    /// Adds the values, weighted, to the outputs.
    fn gather(&self, unit: &mut Unit<'_>, length: usize, weights: &[f32]) {
        let (kv_width, group) = (self.config.kv_width(), self.config.group());
        let block_size = self.kv.block_size() as usize;
        for (block, first) in unit.blocks.iter().zip((0..length).step_by(block_size)) {
            let values = &self.kv.values(*block, self.layer)[unit.kv_head * self.config.head_dim..];
            for (index, output) in unit.outputs.iter_mut().enumerate() {
                let end = (unit.start + index / group + 1).min(first + block_size);
                if let Some(weights) = weights[index * length..][..length].get(first..end) {
                    weighted_sum(weights, values, kv_width, output);
                }
            }
        }
    }
}

/// Dot products of keys at consecutive positions with all queries; those of query `i` begin at `i * length`.
fn score_keys<const K: usize>(keys: [&[f32]; K], queries: &[&[f32]], length: usize, scores: &mut [f32]) {
    let (pairs, rest) = queries.as_chunks::<QUERY_PAIR>();
    for (pair, queries) in pairs.iter().enumerate() {
        let dots = math::dots(keys, *queries);
        for query in 0..QUERY_PAIR {
            scores[(pair * QUERY_PAIR + query) * length..][..K].copy_from_slice(&dots.map(|dots| dots[query]));
        }
    }
    for (index, query) in rest.iter().enumerate() {
        let dots = math::dots(keys, [*query]).map(|[dot]| dot);
        scores[(pairs.len() * QUERY_PAIR + index) * length..][..K].copy_from_slice(&dots);
    }
}

/// Adds `weights[i] * rows[i]` to `output` in the order of `i`; row `i` begins at `i * stride`. Four rows are taken at a
/// time to keep `output` in registers; each element still sees them one after the other.
fn weighted_sum(weights: &[f32], rows: &[f32], stride: usize, output: &mut [f32]) {
    let width = output.len();
    let row = |index: usize| &rows[index * stride..index * stride + width];
    let (quads, rest) = weights.as_chunks::<4>();
    for (quad, [a, b, c, d]) in quads.iter().enumerate() {
        let (first, second, third, fourth) = (row(4 * quad), row(4 * quad + 1), row(4 * quad + 2), row(4 * quad + 3));
        for (i, output) in output.iter_mut().enumerate() {
            let sum = b.mul_add(second[i], a.mul_add(first[i], *output));
            *output = d.mul_add(fourth[i], c.mul_add(third[i], sum));
        }
    }
    for (index, weight) in rest.iter().enumerate() {
        for (output, value) in output.iter_mut().zip(row(4 * quads.len() + index)) {
            *output = weight.mul_add(*value, *output);
        }
    }
}
