//! Choosing a token from a row of logits: a pure function of the row, the request's settings and one random draw.
//!
//! Greedy takes the lowest index among equal maxima, so that the choice depends on the row's bits alone. The draw comes
//! from the caller, so a request's random numbers are its own and do not depend on the batch it ran in.

use homing_units::{Rng, rng_for};
use rand::Rng as _;

/// Temperatures below this mean greedy (as in vLLM): dividing by less only overflows.
const GREEDY_BELOW: f32 = 1e-5;

/// How a request's tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Only the most probable tokens that together reach this probability are drawn from; in (0, 1].
    pub top_p: f32,
    /// Seeds the request's own random numbers.
    pub seed: u64,
}

impl Sampling {
    /// Always the most probable token.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_p: 1.0,
        seed: 0,
    };

    /// Whether no random number is needed.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_BELOW
    }

    /// The request's random numbers.
    #[must_use]
    pub fn rng(&self) -> Rng {
        rng_for(self.seed, "sampling")
    }
}

/// A number in [0, 1) with 53 random bits.
pub fn draw(rng: &mut Rng) -> f64 {
    // 2^-53 is exact, and so is a whole number below 2^53.
    const STEP: f64 = 1.0 / (1_u64 << 53) as f64;
    (rng.next_u64() >> 11) as f64 * STEP
}

/// The chosen token. `draw` in [0, 1) is ignored when greedy.
///
/// # Panics
/// If `logits` is empty.
#[must_use]
pub fn choose(logits: &[f32], sampling: &Sampling, draw: f64) -> u32 {
    assert!(!logits.is_empty(), "a row of logits has at least one entry");
    if sampling.is_greedy() {
        return argmax(logits);
    }
    let mut candidates = probabilities(logits, sampling.temperature);
    let kept = if sampling.top_p < 1.0 {
        // Most probable first; equal ones by index, so that the order is total.
        candidates.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        nucleus(&candidates, f64::from(sampling.top_p))
    } else {
        &candidates
    };
    let mass: f64 = kept.iter().map(|candidate| candidate.1).sum();
    let mut left = draw * mass;
    for (token, probability) in kept {
        left -= probability;
        if left < 0.0 {
            return *token;
        }
    }
    // Rounding may leave a sliver above zero after the last one.
    kept.last().map_or(0, |candidate| candidate.0)
}

/// The lowest index among the largest values. A NaN is never the largest.
fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (index, value) in logits.iter().enumerate() {
        if *value > logits[best] || logits[best].is_nan() {
            best = index;
        }
    }
    index_of(best)
}

/// Every token with its probability, by index.
fn probabilities(logits: &[f32], temperature: f32) -> Vec<(u32, f64)> {
    let scaled = |value: &f32| f64::from(*value) / f64::from(temperature);
    let highest = logits.iter().map(scaled).fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|value| (scaled(value) - highest).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights
        .iter()
        .enumerate()
        .map(|(index, weight)| (index_of(index), weight / total))
        .collect()
}

/// The shortest head of `candidates` (most probable first) whose probability reaches `top_p`: at least one.
fn nucleus(candidates: &[(u32, f64)], top_p: f64) -> &[(u32, f64)] {
    let mut mass = 0.0;
    for (count, candidate) in candidates.iter().enumerate() {
        mass += candidate.1;
        if mass >= top_p {
            return &candidates[..=count];
        }
    }
    candidates
}

fn index_of(index: usize) -> u32 {
    u32::try_from(index).expect("a vocabulary has fewer than 2^32 tokens")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_lowest_of_equal_maxima() {
        let check =
            |logits: &[f32], expected| assert_eq!(choose(logits, &Sampling::GREEDY, 0.9), expected, "{logits:?}");
        check(&[1.0], 0);
        check(&[1.0, 3.0, 3.0], 1);
        check(&[-2.0, -1.0, -3.0], 1);
        check(&[f32::NAN, -1.0, f32::NAN], 1);
        check(&[f32::NEG_INFINITY, f32::NEG_INFINITY], 0);
    }

    #[test]
    fn a_draw_falls_by_probability_within_the_nucleus() {
        let sampling = |top_p| Sampling {
            temperature: 1.0,
            top_p,
            seed: 0,
        };
        // Probabilities 0.5, 0.25, 0.25.
        let logits = [0.0, 2.0_f32.ln(), 0.0];
        let check = |top_p, draw, expected| {
            assert_eq!(
                choose(&logits, &sampling(top_p), draw),
                expected,
                "top_p {top_p} draw {draw}"
            );
        };
        check(1.0, 0.0, 0);
        check(1.0, 0.26, 1);
        check(1.0, 0.74, 1);
        check(1.0, 0.76, 2);
        check(1.0, 0.999_999, 2);
        check(0.99, 0.49, 1);
        check(0.99, 0.51, 0);
        check(0.99, 0.999_999, 2);
        check(0.4, 0.999, 1);
        check(0.7, 0.999, 0);
    }

    #[test]
    fn a_temperature_near_zero_is_greedy_and_a_high_one_is_flat() {
        let logits = [1.0, 5.0, 2.0];
        let at = |temperature, draw| {
            choose(
                &logits,
                &Sampling {
                    temperature,
                    top_p: 1.0,
                    seed: 0,
                },
                draw,
            )
        };
        assert_eq!(at(1e-6, 0.99), 1);
        assert_eq!((at(1e6, 0.1), at(1e6, 0.5), at(1e6, 0.9)), (0, 1, 2));
    }

    #[test]
    fn a_seed_gives_the_same_draws() {
        let draws = |seed| {
            let mut rng = Sampling {
                temperature: 1.0,
                top_p: 1.0,
                seed,
            }
            .rng();
            [draw(&mut rng), draw(&mut rng)]
        };
        assert_eq!(draws(7), draws(7));
        assert_ne!(draws(7), draws(8));
        assert!(draws(7).iter().all(|value| (0.0..1.0).contains(value)));
    }
}
