//! The float32 arithmetic outside matrix products, each with one fixed order of operations.
//!
//! A sum is taken over a fixed number of lanes and the lanes are added in a fixed tree, so the compiler may use vector
//! instructions without being allowed to change a bit; `mul_add` is one rounding on every platform. The exponential is
//! ours because the system's differs between platforms and does not vectorise. Nothing here knows about batches.

/// Lanes of a reduction: two AVX2 registers of float32, enough to hide the latency of an addition.
const LANES: usize = 16;

/// The dot product of two equally long slices.
pub(crate) fn dot(left: &[f32], right: &[f32]) -> f32 {
    debug_assert_eq!(left.len(), right.len(), "a dot product takes equally long slices");
    let mut lanes = [0.0f32; LANES];
    let (left, left_rest) = left.as_chunks::<LANES>();
    let (right, right_rest) = right.as_chunks::<LANES>();
    for (left, right) in left.iter().zip(right) {
        for lane in 0..LANES {
            lanes[lane] = left[lane].mul_add(right[lane], lanes[lane]);
        }
    }
    let rest = left_rest.iter().zip(right_rest);
    rest.fold(add_lanes(lanes), |sum, (left, right)| left.mul_add(*right, sum))
}

/// The sum of a slice.
pub(crate) fn sum(values: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] += chunk[lane];
        }
    }
    rest.iter().fold(add_lanes(lanes), |sum, value| sum + value)
}

fn add_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// The largest value of a slice, negative infinity if it is empty.
pub(crate) fn max(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = if chunk[lane] > lanes[lane] {
                chunk[lane]
            } else {
                lanes[lane]
            };
        }
    }
    lanes
        .iter()
        .chain(rest)
        .copied()
        .fold(f32::NEG_INFINITY, |best, value| if value > best { value } else { best })
}

/// `e^x`, to about two units in the last place for `-87 <= x <= 88`; beyond that the value at the bound.
///
/// The argument is split as `n ln 2 + r`, `|r| <= ln 2 / 2`; `e^r` is its Taylor polynomial of degree 7, whose error
/// there (below `r^8 / 8!`, 5e-9) is less than a rounding.
pub(crate) fn exp(x: f32) -> f32 {
    /// Adding it rounds to an integer, which then is in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    /// The upper bits of ln 2, so that `n` times it is exact, and the rest.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN_2_LOW, n.mul_add(-LN_2_HIGH, x));
    let mut polynomial = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        polynomial = r.mul_add(polynomial, coefficient);
    }
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127);
    polynomial * f32::from_bits(exponent << 23)
}

/// Turns scores into `e^(score - max)` in place and returns their sum.
pub(crate) fn exp_of_scores(scores: &mut [f32]) -> f32 {
    let largest = max(scores);
    for score in scores.iter_mut() {
        *score = exp(*score - largest);
    }
    sum(scores)
}

/// Root-mean-square norm of each row of `input`, scaled by `weight`, into `output`.
pub(crate) fn rms_norm(input: &[f32], weight: &[f32], epsilon: f32, output: &mut [f32]) {
    let width = weight.len();
    for (input, output) in input.chunks_exact(width).zip(output.chunks_exact_mut(width)) {
        #[expect(clippy::cast_precision_loss, reason = "a width is far below 2^24")]
        let mean = dot(input, input) / width as f32;
        let scale = 1.0 / (mean + epsilon).sqrt();
        for ((value, weight), output) in input.iter().zip(weight).zip(output) {
            *output = value * scale * weight;
        }
    }
}

/// SwiGLU of rows that hold the gate's half and then the up half: `silu(gate) * up`.
pub(crate) fn swiglu(gate_up: &[f32], width: usize, output: &mut [f32]) {
    for (row, output) in gate_up.chunks_exact(2 * width).zip(output.chunks_exact_mut(width)) {
        let (gate, up) = row.split_at(width);
        for ((gate, up), output) in gate.iter().zip(up).zip(output) {
            *output = gate / (1.0 + exp(-gate)) * up;
        }
    }
}

/// Adds `delta` to `residual`, element by element.
pub(crate) fn add(residual: &mut [f32], delta: &[f32]) {
    for (residual, delta) in residual.iter_mut().zip(delta) {
        *residual += delta;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_to_the_true_value() {
        let mut worst = 0.0f64;
        for step in -87_000..=88_000 {
            let x = f64::from(step) as f32 / 1000.0;
            let truth = f64::from(x).exp();
            worst = worst.max(((f64::from(exp(x)) - truth) / truth).abs());
        }
        assert!(worst < 3e-7, "relative error {worst}");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-1e9), exp(-87.0), "below the bound it stays at the bound");
        assert_eq!(exp(f32::NEG_INFINITY), exp(-87.0));
    }

    #[test]
    fn reductions_cover_every_element() {
        for length in [0, 1, 15, 16, 17, 40] {
            let values: Vec<f32> = (0..length).map(|i| i as f32).collect();
            let expected: f32 = values.iter().sum();
            assert_eq!(sum(&values), expected, "sum of {length}");
            assert_eq!(dot(&values, &vec![1.0; length]), expected, "dot of {length}");
            assert_eq!(
                max(&values),
                values.last().copied().unwrap_or(f32::NEG_INFINITY),
                "max of {length}"
            );
        }
    }

    #[test]
    fn norm_and_swiglu_follow_their_formulas() {
        let mut normed = [0.0; 4];
        rms_norm(&[3.0, 4.0, 0.0, 0.0], &[1.0, 2.0], 0.0, &mut normed);
        assert!((normed[0] - 3.0 / 12.5f32.sqrt()).abs() < 1e-6, "{normed:?}");
        assert!((normed[1] - 8.0 / 12.5f32.sqrt()).abs() < 1e-6, "{normed:?}");
        let mut output = [0.0; 1];
        swiglu(&[2.0, 3.0], 1, &mut output);
        assert!((output[0] - 6.0 / (1.0 + (-2.0f32).exp())).abs() < 1e-6, "{output:?}");
    }
}
