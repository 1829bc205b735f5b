//! From GGUF's quantised blocks to integers with a scale and an offset.
//!
//! The five formats with blocks of 32 and one scale are taken over exactly. The others are made Q8_0 first, by candle;
//! float formats become float32.

use crate::matrix::Weights;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Result};

/// Values that share a scale and an offset.
pub(crate) const BLOCK: usize = 32;

/// What turns the integers of a block into values: `integer * scale + offset`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Affine {
    pub(crate) scale: f32,
    pub(crate) offset: f32,
}

/// The weights of a tensor.
///
/// # Errors
/// If candle cannot convert the tensor.
pub(crate) fn weights_of(tensor: &QTensor) -> Result<Weights> {
    let columns = tensor.shape().dims().last().copied().unwrap_or(0);
    match tensor.dtype() {
        GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16 => Ok(Weights::Float(floats_of(tensor)?)),
        GgmlDType::Q8_0 => Ok(blocks(&tensor.data()?, q8_0)),
        GgmlDType::Q4_0 => Ok(blocks(&tensor.data()?, q4_0)),
        GgmlDType::Q4_1 => Ok(blocks(&tensor.data()?, q4_1)),
        GgmlDType::Q5_0 => Ok(blocks(&tensor.data()?, q5_0)),
        GgmlDType::Q5_1 => Ok(blocks(&tensor.data()?, q5_1)),
        _ if columns.is_multiple_of(BLOCK) => {
            let requantised = QTensor::quantize(&tensor.dequantize(&Device::Cpu)?, GgmlDType::Q8_0)?;
            Ok(blocks(&requantised.data()?, q8_0))
        }
        _ => Ok(Weights::Float(floats_of(tensor)?)),
    }
}

/// The values of a tensor.
///
/// # Errors
/// If candle cannot convert the tensor.
pub(crate) fn floats_of(tensor: &QTensor) -> Result<Vec<f32>> {
    tensor.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1()
}

/// Decodes blocks of `BYTES` bytes one by one.
fn blocks<const BYTES: usize>(bytes: &[u8], decode: impl Fn(&[u8; BYTES], &mut [i8; BLOCK]) -> Affine) -> Weights {
    let (blocks, rest) = bytes.as_chunks::<BYTES>();
    assert!(rest.is_empty(), "a tensor has whole blocks");
    let mut quants = vec![0; blocks.len() * BLOCK];
    let (places, _) = quants.as_chunks_mut();
    let affines = blocks
        .iter()
        .zip(places)
        .map(|(block, quants)| decode(block, quants))
        .collect();
    Weights::Quantised(quants, affines)
}

/// A scale, 32 signed bytes.
fn q8_0(block: &[u8; 34], quants: &mut [i8; BLOCK]) -> Affine {
    for (quant, byte) in quants.iter_mut().zip(&block[2..]) {
        *quant = byte.cast_signed();
    }
    Affine {
        scale: half(block, 0),
        offset: 0.0,
    }
}

/// A scale, nibbles from -8 on.
fn q4_0(block: &[u8; 18], quants: &mut [i8; BLOCK]) -> Affine {
    nibbles(&block[2..], 0, 8, quants);
    Affine {
        scale: half(block, 0),
        offset: 0.0,
    }
}

/// A scale, an offset, nibbles from 0 on.
fn q4_1(block: &[u8; 20], quants: &mut [i8; BLOCK]) -> Affine {
    nibbles(&block[4..], 0, 0, quants);
    Affine {
        scale: half(block, 0),
        offset: half(block, 2),
    }
}

/// A scale, the fifth bits, nibbles; from -16 on.
fn q5_0(block: &[u8; 22], quants: &mut [i8; BLOCK]) -> Affine {
    let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    nibbles(&block[6..], high, 16, quants);
    Affine {
        scale: half(block, 0),
        offset: 0.0,
    }
}

/// A scale, an offset, the fifth bits, nibbles; from 0 on.
fn q5_1(block: &[u8; 24], quants: &mut [i8; BLOCK]) -> Affine {
    let high = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
    nibbles(&block[8..], high, 0, quants);
    Affine {
        scale: half(block, 0),
        offset: half(block, 2),
    }
}

/// The low nibbles of 16 bytes, then the high ones, each with its bit of `fifths` on top, less `zero`.
fn nibbles(bytes: &[u8], fifths: u32, zero: u8, quants: &mut [i8; BLOCK]) {
    let low = bytes.iter().map(|byte| byte & 0xf);
    let high = bytes.iter().map(|byte| byte >> 4);
    for (index, (quant, nibble)) in quants.iter_mut().zip(low.chain(high)).enumerate() {
        let fifth = u8::from(fifths >> index & 1 == 1) << 4;
        *quant = (nibble | fifth).cast_signed() - zero.cast_signed();
    }
}

/// The float16 at a place of a block. Exact: its exponent is moved up and its range scaled back, subnormals too.
/// (An infinity, which no scale is, would become 65,536.)
fn half(block: &[u8], at: usize) -> f32 {
    let bits = u32::from(u16::from_le_bytes([block[at], block[at + 1]]));
    /// 2^112, the difference of the exponents' biases.
    const REBIAS: f32 = f32::from_bits((112 + 127) << 23);
    let magnitude = f32::from_bits((bits & 0x7fff) << 13) * REBIAS;
    if bits & 0x8000 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Tensor;

    #[test]
    fn blocks_are_taken_over_exactly() {
        // Large and tiny values, so that scales are normal and subnormal float16.
        let values: Vec<f32> = (0..96)
            .map(|i| {
                ((i * 37 % 64) as f32 - 20.0)
                    * if i < 32 {
                        3.0
                    } else if i < 64 {
                        0.01
                    } else {
                        1e-6
                    }
            })
            .collect();
        let tensor = Tensor::from_vec(values, (3, 32), &Device::Cpu).unwrap();
        for format in [
            GgmlDType::Q8_0,
            GgmlDType::Q4_0,
            GgmlDType::Q4_1,
            GgmlDType::Q5_0,
            GgmlDType::Q5_1,
        ] {
            let tensor = QTensor::quantize(&tensor, format).unwrap();
            let Weights::Quantised(quants, affines) = weights_of(&tensor).unwrap() else {
                panic!("{format:?} stays quantised");
            };
            for (index, expected) in floats_of(&tensor).unwrap().into_iter().enumerate() {
                let Affine { scale, offset } = affines[index / BLOCK];
                let found = f32::from(quants[index]) * scale + offset;
                assert_eq!(found, expected, "{format:?} value {index}");
            }
        }
    }

    #[test]
    fn other_formats_become_q8_0_or_float() {
        let values: Vec<f32> = (0..512).map(|i| (i as f32 * 0.37).sin()).collect();
        let tensor = Tensor::from_vec(values.clone(), (2, 256), &Device::Cpu).unwrap();
        let of = |format| weights_of(&QTensor::quantize(&tensor, format).unwrap()).unwrap();
        assert!(matches!(of(GgmlDType::Q6K), Weights::Quantised(quants, _) if quants.len() == 512));
        assert!(matches!(of(GgmlDType::F32), Weights::Float(floats) if floats == values));
        assert!(matches!(of(GgmlDType::F16), Weights::Float(_)));
    }
}
