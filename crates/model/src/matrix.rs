//! Weights and their products with rows of activations.
//!
//! A product is made of candle's dot products of quantised blocks (`GgmlType::vec_dot`), one for each (row, column), and
//! of nothing else: the result of a row is a function of that row and of the weights. candle's own `QMatMul` does not
//! promise that. Its kernels depend on the shape, on the number of rows and on the processor: Q6_K with one row and with
//! two rows round activations differently, Q4_K changes kernel at 32 rows, and Q8_0 changes the rounding of activations
//! wherever a row is a multiple of 256 and the processor has VNNI. Its threads also spin while they wait, which several
//! workers on few cores cannot afford. Splitting work over threads here moves dot products around, never their inside.
//!
//! Weights are Q8_0: 32 values share a scale, activations are rounded the same way. Formats without a fast dot product
//! under AVX2 (Q4_1 among them, nine times slower) are requantised when they are loaded, the others too, so that there
//! is one kernel. Rows whose length is no multiple of 32 stay float32.

use candle_core::quantized::GgmlType;
use candle_core::quantized::k_quants::{BlockQ8_0, QK8_0};
use rayon::prelude::*;

/// Rows that are multiplied by a column of weights before the next column is taken: their quantised form stays in the
/// first-level cache.
const ROW_TILE: usize = 16;

/// Multiplications below which work stays on the calling thread: about 0.1 ms, ten times what handing it over costs.
pub(crate) const PARALLEL_MIN: usize = 1 << 18;

/// Pieces of work for each thread, so that one that is interrupted holds up the others little.
const PIECES_PER_THREAD: usize = 4;

/// How weights are kept and activations rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Eight bits, a scale for each 32 values.
    Q8_0,
    /// Float32 throughout: slow, to check the rest against.
    F32,
}

/// A matrix of weights, `[outputs][inputs]`.
pub(crate) struct Matrix {
    outputs: usize,
    inputs: usize,
    weights: Weights,
}

enum Weights {
    Q8_0(Vec<BlockQ8_0>),
    F32(Vec<f32>),
}

impl Matrix {
    /// The matrix of these values, `[outputs][inputs]`.
    pub(crate) fn new(values: &[f32], inputs: usize, precision: Precision) -> Self {
        assert!(
            inputs > 0 && values.len().is_multiple_of(inputs),
            "a matrix has whole rows"
        );
        let weights = match precision {
            Precision::Q8_0 if inputs.is_multiple_of(QK8_0) => {
                let mut blocks = vec![BlockQ8_0::zeros(); values.len() / QK8_0];
                BlockQ8_0::from_float(values, &mut blocks);
                Weights::Q8_0(blocks)
            }
            Precision::Q8_0 | Precision::F32 => Weights::F32(values.to_vec()),
        };
        Self {
            outputs: values.len() / inputs,
            inputs,
            weights,
        }
    }

    /// Matrices over the same inputs as one, their outputs one after the other.
    pub(crate) fn stack(matrices: impl IntoIterator<Item = Self>) -> Self {
        let stacked = matrices.into_iter().reduce(|mut whole, part| {
            assert_eq!(whole.inputs, part.inputs, "stacked matrices share their inputs");
            whole.outputs += part.outputs;
            match (&mut whole.weights, part.weights) {
                (Weights::Q8_0(whole), Weights::Q8_0(part)) => whole.extend(part),
                (Weights::F32(whole), Weights::F32(part)) => whole.extend(part),
                (Weights::Q8_0(_) | Weights::F32(_), _) => unreachable!("the inputs and the precision decide the form"),
            }
            whole
        });
        stacked.expect("at least one matrix")
    }

    /// Outputs of a row.
    pub(crate) fn outputs(&self) -> usize {
        self.outputs
    }

    /// Row `index` as float32.
    pub(crate) fn row(&self, index: usize, values: &mut [f32]) {
        match &self.weights {
            Weights::Q8_0(blocks) => {
                let width = self.inputs / QK8_0;
                BlockQ8_0::to_float(&blocks[index * width..(index + 1) * width], values);
            }
            Weights::F32(weights) => values.copy_from_slice(&weights[index * self.inputs..(index + 1) * self.inputs]),
        }
    }

    /// The product of each row of `input` (`[rows][inputs]`) with the weights: `[rows][outputs]`.
    pub(crate) fn multiply(&self, input: &[f32]) -> Vec<f32> {
        match &self.weights {
            Weights::Q8_0(blocks) => self.multiply_by(blocks, input),
            Weights::F32(values) => self.multiply_by(values, input),
        }
    }

    fn multiply_by<T: GgmlType>(&self, weights: &[T], input: &[f32]) -> Vec<f32> {
        let rows = input.len() / self.inputs;
        let mut output = vec![0.0; rows * self.outputs];
        let product = Product {
            weights,
            inputs: self.inputs,
            rows: quantise::<T>(input, self.inputs),
        };
        let threads = rayon::current_num_threads();
        if threads == 1 || rows * self.inputs * self.outputs < PARALLEL_MIN {
            let mut whole: Vec<&mut [f32]> = output.chunks_exact_mut(self.outputs).collect();
            product.columns(0, &mut whole);
            return output;
        }
        let width = self.outputs.div_ceil(threads * PIECES_PER_THREAD);
        let mut strips: Vec<Vec<&mut [f32]>> = Vec::new();
        strips.resize_with(self.outputs.div_ceil(width), || Vec::with_capacity(rows));
        for row in output.chunks_exact_mut(self.outputs) {
            for (strip, part) in strips.iter_mut().zip(row.chunks_mut(width)) {
                strip.push(part);
            }
        }
        strips
            .par_iter_mut()
            .enumerate()
            .for_each(|(strip, rows)| product.columns(strip * width, rows));
        output
    }
}

/// Rows in the form that a dot product with `T` takes.
fn quantise<T: GgmlType>(input: &[f32], width: usize) -> Vec<T::VecDotType> {
    let blocks = width / T::BLCK_SIZE;
    let mut rows = vec![T::VecDotType::zeros(); input.len() / width * blocks];
    for (row, values) in rows.chunks_exact_mut(blocks).zip(input.chunks_exact(width)) {
        T::VecDotType::from_float(values, row);
    }
    rows
}

struct Product<'a, T: GgmlType> {
    weights: &'a [T],
    inputs: usize,
    rows: Vec<T::VecDotType>,
}

impl<T: GgmlType> Product<'_, T> {
    /// Fills columns from `first` on, as many as the slices are long, in all rows.
    fn columns(&self, first: usize, outputs: &mut [&mut [f32]]) {
        let blocks = self.inputs / T::BLCK_SIZE;
        let width = outputs.first().map_or(0, |row| row.len());
        for (inputs, outputs) in self.rows.chunks(ROW_TILE * blocks).zip(outputs.chunks_mut(ROW_TILE)) {
            for column in 0..width {
                let start = (first + column) * blocks;
                let weights = &self.weights[start..start + blocks];
                for (input, output) in inputs.chunks_exact(blocks).zip(outputs.iter_mut()) {
                    output[column] = T::vec_dot(self.inputs, weights, input);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(count: usize, seed: u64) -> Vec<f32> {
        use rand::RngExt as _;
        let mut rng = homing_units::rng_for(seed, "matrix");
        (0..count).map(|_| rng.random_range(-1.0..1.0)).collect()
    }

    #[test]
    fn a_row_does_not_depend_on_its_batch_or_on_threads() {
        for (inputs, outputs) in [(64, 37), (256, 48), (576, 960), (33, 20)] {
            let matrix = Matrix::new(&values(inputs * outputs, 1), inputs, Precision::Q8_0);
            let input = values(inputs * 40, 2);
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
    fn products_are_those_of_the_rounded_values() {
        let (inputs, outputs) = (96, 10);
        let weights = values(inputs * outputs, 3);
        let input = values(inputs, 4);
        let exact = Matrix::new(&weights, inputs, Precision::F32).multiply(&input);
        let rounded = Matrix::new(&weights, inputs, Precision::Q8_0).multiply(&input);
        for (column, (exact, rounded)) in exact.iter().zip(&rounded).enumerate() {
            let naive: f32 = (0..inputs).map(|i| weights[column * inputs + i] * input[i]).sum();
            assert!((exact - naive).abs() < 1e-5, "column {column}: {exact} and {naive}");
            assert!((rounded - naive).abs() < 0.1, "column {column}: {rounded} and {naive}");
        }
    }

    #[test]
    fn stacked_matrices_give_their_outputs_side_by_side() {
        let (first, second) = (values(64 * 3, 5), values(64 * 2, 6));
        let stacked = Matrix::stack([
            Matrix::new(&first, 64, Precision::Q8_0),
            Matrix::new(&second, 64, Precision::Q8_0),
        ]);
        let input = values(64, 7);
        let mut expected = Matrix::new(&first, 64, Precision::Q8_0).multiply(&input);
        expected.extend(Matrix::new(&second, 64, Precision::Q8_0).multiply(&input));
        assert_eq!(stacked.multiply(&input), expected);
        assert_eq!(stacked.outputs(), 5);
    }
}
