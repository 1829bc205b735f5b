//! The rotary position embedding on interleaved pairs: GGUF stores the query and key weights of Llama so permuted that
//! elements `2i` and `2i + 1` of a head turn together.
//!
//! Angles are taken in float64 and through `libm`, so that a far position is as exact as a near one and every platform
//! gets the same bits. They are made for the rows of a batch, once for all layers; a table of the whole context would be
//! large for long contexts and is not faster.

use crate::config::RopeConfig;

/// Cosines and sines for the rows of a batch.
pub(crate) struct Rotations {
    pairs: usize,
    /// `[row][pair]`, each cosine and sine.
    turns: Vec<(f32, f32)>,
}

impl Rotations {
    /// The rotations of rows at these positions.
    pub(crate) fn new(config: &RopeConfig, positions: impl Iterator<Item = u32>) -> Self {
        let frequencies = frequencies(config);
        let turns = positions.flat_map(|position| frequencies.iter().map(move |frequency| turn(position, *frequency)));
        Self {
            pairs: frequencies.len(),
            turns: turns.collect(),
        }
    }

    /// Turns all heads of row `row`, each `head_dim` wide.
    pub(crate) fn apply(&self, row: usize, heads: &mut [f32], head_dim: usize) {
        let turns = &self.turns[row * self.pairs..(row + 1) * self.pairs];
        for head in heads.chunks_exact_mut(head_dim) {
            let (pairs, _) = head.as_chunks_mut::<2>();
            for ([first, second], (cosine, sine)) in pairs.iter_mut().zip(turns) {
                let (x, y) = (*first, *second);
                *first = x.mul_add(*cosine, -(y * sine));
                *second = x.mul_add(*sine, y * cosine);
            }
        }
    }
}

fn frequencies(config: &RopeConfig) -> Vec<f64> {
    let pair = |(index, factor): (u32, &f32)| {
        let exponent = -2.0 * f64::from(index) / config.dimensions as f64;
        libm::pow(f64::from(config.base), exponent) / f64::from(*factor)
    };
    (0u32..).zip(&config.factors).map(pair).collect()
}

fn turn(position: u32, frequency: f64) -> (f32, f32) {
    let angle = f64::from(position) * frequency;
    (libm::cos(angle) as f32, libm::sin(angle) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_turn_by_their_frequency_and_the_rest_stays() {
        let config = RopeConfig {
            base: 100.0,
            dimensions: 4,
            factors: vec![1.0, 2.0],
        };
        let rotations = Rotations::new(&config, [0, 3].into_iter());
        let mut head = [1.0, 0.0, 0.0, 1.0, 5.0, 6.0];
        rotations.apply(0, &mut head, 6);
        assert_eq!(head, [1.0, 0.0, 0.0, 1.0, 5.0, 6.0], "position 0 turns nothing");
        rotations.apply(1, &mut head, 6);
        // The second pair's frequency is 100^(-2/4) / 2.
        let (first, second) = (3.0f32, 3.0f32 * 0.05);
        let expected = [first.cos(), first.sin(), -second.sin(), second.cos(), 5.0, 6.0];
        for (found, expected) in head.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6, "{head:?}");
        }
    }
}
