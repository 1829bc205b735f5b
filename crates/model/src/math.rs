//! The float32 arithmetic outside matrix products, each with one fixed order of operations.
//!
//! A sum is taken over a fixed number of lanes and the lanes are added in a fixed tree, so the compiler may use vector
//! instructions without being allowed to change a bit; `mul_add` is one rounding on every platform. The exponential is
//! ours because the system's differs between platforms and does not vectorise. Nothing here knows about batches.

/// Lanes of a reduction: one AVX2 register of float32.
const LANES: usize = 8;

type Lanes = [f32; LANES];

/// The dot products of `C` columns with `R` rows, all equally long. Each is computed as if it were alone: they are taken
/// together because eight independent chains of multiply-adds keep a core busy, and each value is loaded less often.
pub(crate) fn dots<const C: usize, const R: usize>(columns: [&[f32]; C], rows: [&[f32]; R]) -> [[f32; R]; C] {
    let length = columns[0].len();
    let mut sums = lanes_of_dots(columns, rows).map(|rows| rows.map(add_lanes));
    let rest = length - length % LANES;
    if rest < length {
        for (column, sums) in columns.iter().zip(&mut sums) {
            for (row, sum) in rows.iter().zip(sums) {
                let pairs = column[rest..].iter().zip(&row[rest..]);
                *sum = pairs.fold(*sum, |sum, (left, right)| left.mul_add(*right, sum));
            }
        }
    }
    sums
}

/// Lane `i` of a dot product: the products of elements `i`, `i + 8`, ... one after the other. Not inlined: what is done with
/// the lanes afterwards would keep the compiler from holding them in vector registers.
#[inline(never)]
fn lanes_of_dots<const C: usize, const R: usize>(columns: [&[f32]; C], rows: [&[f32]; R]) -> [[Lanes; R]; C] {
    let chunks = columns[0].len() / LANES;
    let columns: [&[Lanes]; C] = columns.map(|column| &column.as_chunks().0[..chunks]);
    let rows: [&[Lanes]; R] = rows.map(|row| &row.as_chunks().0[..chunks]);
    let mut sums = [[[0.0; LANES]; R]; C];
    for chunk in 0..chunks {
        for (column, sums) in columns.iter().zip(&mut sums) {
            for (row, sum) in rows.iter().zip(sums) {
                *sum = multiply_add(&column[chunk], &row[chunk], sum);
            }
        }
    }
    sums
}

#[inline]
fn multiply_add(left: &Lanes, right: &Lanes, sum: &Lanes) -> Lanes {
    std::array::from_fn(|lane| left[lane].mul_add(right[lane], sum[lane]))
}

fn add_lanes([a, b, c, d, e, f, g, h]: Lanes) -> f32 {
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// The sum of a slice.
fn sum(values: &[f32]) -> f32 {
    let (chunks, rest) = values.as_chunks();
    rest.iter()
        .fold(add_lanes(lanes_of_sum(chunks)), |sum, value| sum + value)
}

#[inline(never)]
fn lanes_of_sum(chunks: &[Lanes]) -> Lanes {
    let mut sums = [0.0; LANES];
    for chunk in chunks {
        sums = std::array::from_fn(|lane| sums[lane] + chunk[lane]);
    }
    sums
}

/// The largest value of a slice, negative infinity if it is empty.
fn max(values: &[f32]) -> f32 {
    let larger = |left: f32, right: f32| if left > right { left } else { right };
    let (chunks, rest) = values.as_chunks();
    let lanes = largest_lanes(chunks);
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, larger)
}

#[inline(never)]
fn largest_lanes(chunks: &[Lanes]) -> Lanes {
    let mut largest = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        largest = std::array::from_fn(|lane| {
            if chunk[lane] > largest[lane] {
                chunk[lane]
            } else {
                largest[lane]
            }
        });
    }
    largest
}

/// `e^x`, to about two units in the last place for `-87 <= x <= 88`; beyond that the value at the bound.
///
/// The argument is split as `n ln 2 + r`, `|r| <= ln 2 / 2`; `e^r` is its Taylor polynomial of degree 7, whose error
/// there (below `r^8 / 8!`, 5e-9) is less than a rounding.
#[inline]
fn exp(x: f32) -> f32 {
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
        let [[square]] = dots([input], [input]);
        let mean = square / width as f32;
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
            assert_eq!(dots([&values], [&vec![1.0; length]]), [[expected]], "dot of {length}");
            assert_eq!(
                max(&values),
                values.last().copied().unwrap_or(f32::NEG_INFINITY),
                "max of {length}"
            );
        }
    }

    #[test]
    fn dots_are_the_same_together_and_alone() {
        for length in [8, 13, 64] {
            let values: Vec<Vec<f32>> = (0..6)
                .map(|row| (0..length).map(|i| ((row * 31 + i * 7) as f32).sin()).collect())
                .collect();
            let row = |index: usize| values[index].as_slice();
            let together = dots([row(0), row(1), row(2), row(3)], [row(4), row(5)]);
            for (column, sums) in together.iter().enumerate() {
                for (index, sum) in sums.iter().enumerate() {
                    assert_eq!(dots([row(column)], [row(4 + index)]), [[*sum]], "length {length}");
                }
            }
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
