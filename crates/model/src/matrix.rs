//! Weights and their products with rows of activations.
//!
//! An output is one dot product in float32, in the fixed order of [`math::dots`]. Tiles, strips and threads only decide
//! when a dot product is computed, never how, so a row's result depends on the row and the weights alone.
//!
//! Weights stay small integers with a scale and an offset for each 32 of them, as GGUF has them: that represents Q4_0,
//! Q4_1, Q5_0, Q5_1 and Q8_0 exactly. A few columns at a time are expanded to float32 in the first-level cache and met
//! by all rows of a tile. Activations are never rounded, so the result agrees with plain float32 on the same weights.
//!
//! candle reads and quantises tensors, but its `QMatMul` is not used, for two reasons. It rounds activations to eight
//! bits, which moves the logits of a small model by a tenth of their spread (SmolLM2 then calls the capital of France by
//! another name). And its kernels depend on the row count and the processor: Q6_K rounds one row otherwise than two,
//! Q4_K changes kernel at 32 rows, Q8_0 rounds otherwise where VNNI exists and the width is a multiple of 256. Two
//! workers, or a prefill and a decode, would then disagree. Formats other than those above (the K-quants) are
//! requantised to Q8_0 at load; float formats stay float32.

use crate::math;
use crate::quants::{Affine, BLOCK};
use rayon::prelude::*;

/// Columns that are expanded together, and rows that are multiplied together: eight sums fit into a core's registers.
const COLUMN_TILE: usize = 4;
const ROW_PAIR: usize = 2;

/// Rows that meet expanded columns before the next columns are expanded.
const ROW_TILE: usize = 16;

/// Multiplications below which work stays on the calling thread: some 50 us, several times what handing it over costs.
pub(crate) const PARALLEL_MIN: usize = 1 << 19;

/// Pieces of work for each thread, so that one that is interrupted holds up the others little.
const PIECES_PER_THREAD: usize = 4;

/// A matrix of weights, `[outputs][inputs]`.
pub(crate) struct Matrix {
    inputs: usize,
    weights: Weights,
}

/// Weights row after row.
pub(crate) enum Weights {
    /// Integers, and the scale and offset of each [`BLOCK`] of them.
    Quantised(Vec<i8>, Vec<Affine>),
    /// As they are.
    Float(Vec<f32>),
}

impl Matrix {
    /// The matrix of these weights, with `inputs` of them in a row.
    pub(crate) fn new(weights: Weights, inputs: usize) -> Self {
        let count = match &weights {
            Weights::Quantised(quants, affines) => {
                assert_eq!(quants.len(), affines.len() * BLOCK, "whole blocks");
                assert!(inputs.is_multiple_of(BLOCK), "blocks do not cross rows");
                quants.len()
            }
            Weights::Float(values) => values.len(),
        };
        assert!(inputs > 0 && count.is_multiple_of(inputs), "a matrix has whole rows");
        Self { inputs, weights }
    }

    /// Matrices over the same inputs as one, their outputs one after the other.
    pub(crate) fn stack(matrices: impl IntoIterator<Item = Self>) -> Self {
        let stacked = matrices.into_iter().reduce(|mut whole, part| {
            assert_eq!(whole.inputs, part.inputs, "stacked matrices share their inputs");
            match (&mut whole.weights, part.weights) {
                (Weights::Quantised(quants, affines), Weights::Quantised(more_quants, more_affines)) => {
                    quants.extend(more_quants);
                    affines.extend(more_affines);
                }
                (Weights::Float(values), Weights::Float(more)) => values.extend(more),
                (Weights::Quantised(..), Weights::Float(more)) => {
                    let mut values = whole.expanded();
                    values.extend(more);
                    whole.weights = Weights::Float(values);
                }
                (Weights::Float(values), Weights::Quantised(quants, affines)) => {
                    values.extend(Self::new(Weights::Quantised(quants, affines), whole.inputs).expanded());
                }
            }
            whole
        });
        stacked.expect("at least one matrix")
    }

    /// Outputs of a row.
    pub(crate) fn outputs(&self) -> usize {
        match &self.weights {
            Weights::Quantised(quants, _) => quants.len() / self.inputs,
            Weights::Float(values) => values.len() / self.inputs,
        }
    }

    /// The weights of output `index` as float32.
    pub(crate) fn row(&self, index: usize, values: &mut [f32]) {
        let range = index * self.inputs..(index + 1) * self.inputs;
        match &self.weights {
            Weights::Quantised(quants, affines) => {
                expand(
                    &quants[range.clone()],
                    &affines[range.start / BLOCK..range.end / BLOCK],
                    values,
                );
            }
            Weights::Float(weights) => values.copy_from_slice(&weights[range]),
        }
    }

    fn expanded(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.outputs() * self.inputs];
        values
            .chunks_exact_mut(self.inputs)
            .enumerate()
            .for_each(|(index, values)| self.row(index, values));
        values
    }

    /// The product of each row of `input` (`[rows][inputs]`) with the weights: `[rows][outputs]`.
    pub(crate) fn multiply(&self, input: &[f32]) -> Vec<f32> {
        let (rows, outputs) = (input.len() / self.inputs, self.outputs());
        let mut output = vec![0.0; rows * outputs];
        let threads = rayon::current_num_threads();
        if threads == 1 || rows * self.inputs * outputs < PARALLEL_MIN {
            let mut whole: Vec<&mut [f32]> = output.chunks_exact_mut(outputs).collect();
            self.columns(0, input, &mut whole, &mut Vec::new());
            return output;
        }
        let width = outputs
            .div_ceil(threads * PIECES_PER_THREAD)
            .next_multiple_of(COLUMN_TILE);
        let mut strips: Vec<Vec<&mut [f32]>> = Vec::new();
        strips.resize_with(outputs.div_ceil(width), || Vec::with_capacity(rows));
        for row in output.chunks_exact_mut(outputs) {
            for (strip, part) in strips.iter_mut().zip(row.chunks_mut(width)) {
                strip.push(part);
            }
        }
        let strip = |scratch: &mut Vec<f32>, (index, rows): (usize, &mut Vec<&mut [f32]>)| {
            self.columns(index * width, input, rows, scratch);
        };
        strips.par_iter_mut().enumerate().for_each_init(Vec::new, strip);
        output
    }

    /// Fills columns from `first` on, as many as the slices are long, in all rows.
    fn columns(&self, first: usize, input: &[f32], output: &mut [&mut [f32]], scratch: &mut Vec<f32>) {
        let width = output.first().map_or(0, |row| row.len());
        scratch.resize(COLUMN_TILE * self.inputs, 0.0);
        for (input, output) in input.chunks(ROW_TILE * self.inputs).zip(output.chunks_mut(ROW_TILE)) {
            for column in (0..width).step_by(COLUMN_TILE) {
                let columns = COLUMN_TILE.min(width - column);
                let expanded = &mut scratch[..columns * self.inputs];
                for (index, values) in expanded.chunks_exact_mut(self.inputs).enumerate() {
                    self.row(first + column + index, values);
                }
                if columns == COLUMN_TILE {
                    self.tile::<COLUMN_TILE>(column, input, output, expanded);
                } else {
                    for (index, expanded) in expanded.chunks_exact(self.inputs).enumerate() {
                        self.tile::<1>(column + index, input, output, expanded);
                    }
                }
            }
        }
    }

    /// Fills `C` columns from `column` on in a tile of rows.
    fn tile<const C: usize>(&self, column: usize, input: &[f32], output: &mut [&mut [f32]], weights: &[f32]) {
        let weights: [&[f32]; C] = std::array::from_fn(|index| &weights[index * self.inputs..][..self.inputs]);
        let pairs = input.chunks_exact(ROW_PAIR * self.inputs);
        let rest = pairs.remainder();
        for (pair, output) in pairs.zip(output.chunks_exact_mut(ROW_PAIR)) {
            let (first, second) = pair.split_at(self.inputs);
            let sums = math::dots(weights, [first, second]);
            for (row, output) in output.iter_mut().enumerate() {
                output[column..column + C].copy_from_slice(&sums.map(|sums| sums[row]));
            }
        }
        if !rest.is_empty()
            && let Some(output) = output.last_mut()
        {
            output[column..column + C].copy_from_slice(&math::dots(weights, [rest]).map(|[sum]| sum));
        }
    }
}

/// Integers as float32.
fn expand(quants: &[i8], affines: &[Affine], values: &mut [f32]) {
    let (quants, _) = quants.as_chunks::<BLOCK>();
    let (values, _) = values.as_chunks_mut::<BLOCK>();
    for ((quants, affine), values) in quants.iter().zip(affines).zip(values) {
        for index in 0..BLOCK {
            values[index] = f32::from(quants[index]).mul_add(affine.scale, affine.offset);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quants::weights_of;
    use candle_core::quantized::{GgmlDType, QTensor};
    use candle_core::{Device, Tensor};

    fn values(count: usize, seed: u64) -> Vec<f32> {
        use rand::RngExt as _;
        let mut rng = homing_units::rng_for(seed, "matrix");
        (0..count).map(|_| rng.random_range(-1.0..1.0)).collect()
    }

    fn matrix(outputs: usize, inputs: usize, seed: u64, format: GgmlDType) -> Matrix {
        let tensor = Tensor::from_vec(values(inputs * outputs, seed), (outputs, inputs), &Device::Cpu).unwrap();
        Matrix::new(
            weights_of(&QTensor::quantize(&tensor, format).unwrap()).unwrap(),
            inputs,
        )
    }

    #[test]
    fn a_row_does_not_depend_on_its_batch_or_on_threads() {
        let shapes = [
            (64, 37, GgmlDType::Q8_0),
            (256, 48, GgmlDType::Q4_1),
            (576, 961, GgmlDType::Q8_0),
            (33, 20, GgmlDType::F32),
        ];
        for (inputs, outputs, format) in shapes {
            let matrix = matrix(outputs, inputs, 1, format);
            let input = values(inputs * 41, 2);
            let whole = matrix.multiply(&input);
            for threads in [1, 3] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                assert_eq!(
                    pool.install(|| matrix.multiply(&input)),
                    whole,
                    "{inputs}x{outputs}, {threads} threads"
                );
            }
            for (row, expected) in input.chunks_exact(inputs).zip(whole.chunks_exact(outputs)) {
                assert_eq!(matrix.multiply(row), expected, "{inputs}x{outputs}, one row");
            }
        }
    }

    #[test]
    fn products_are_those_of_the_weights_as_float32() {
        for format in [GgmlDType::F32, GgmlDType::Q8_0, GgmlDType::Q4_1] {
            let (inputs, outputs, rows) = (96, 11, 3);
            let matrix = matrix(outputs, inputs, 3, format);
            let (weights, input) = (matrix.expanded(), values(inputs * rows, 4));
            for (index, found) in matrix.multiply(&input).into_iter().enumerate() {
                let (row, column) = (index / outputs, index % outputs);
                let pairs = weights[column * inputs..][..inputs]
                    .iter()
                    .zip(&input[row * inputs..][..inputs]);
                let expected: f64 = pairs
                    .map(|(weight, value)| f64::from(*weight) * f64::from(*value))
                    .sum();
                assert!(
                    (f64::from(found) - expected).abs() < 1e-5,
                    "{format:?} row {row} column {column}"
                );
            }
        }
    }

    #[test]
    fn stacked_matrices_give_their_outputs_side_by_side() {
        for formats in [
            [GgmlDType::Q8_0, GgmlDType::Q4_1],
            [GgmlDType::Q8_0, GgmlDType::F32],
            [GgmlDType::F32; 2],
        ] {
            for [first, second] in [formats, [formats[1], formats[0]]] {
                let parts = || [matrix(3, 64, 5, first), matrix(2, 64, 6, second)];
                let input = values(64, 7);
                let expected: Vec<f32> = parts().iter().flat_map(|part| part.multiply(&input)).collect();
                assert_eq!(
                    Matrix::stack(parts()).multiply(&input),
                    expected,
                    "{first:?} and {second:?}"
                );
            }
        }
    }
}
