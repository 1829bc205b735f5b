//! Opens what `--trace` names: a generator, or a file that may be compressed. The crate `workload` reads the bytes.

use crate::failure::Usage;
use anyhow::Result;
use homing_workload::{ReadOptions, Trace, generate, read_trace_with};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// Reads the trace that `name` names. `seed` varies a generator's content, never a recorded trace.
pub fn open(name: &str, seed: u64) -> Result<Trace> {
    open_with(name, seed, &ReadOptions::default())
}

/// Reads the trace that `name` names, a recorded one as `options` say.
pub fn open_with(name: &str, seed: u64, options: &ReadOptions) -> Result<Trace> {
    if name.starts_with("gen:") {
        return generate(name, seed).map_err(Usage::error);
    }
    let path = Path::new(name);
    let label = path
        .file_name()
        .map_or_else(|| name.to_owned(), |file| file.to_string_lossy().into_owned());
    let wrong = |error: &dyn std::fmt::Display| Usage::error(format_args!("trace `{name}`: {error}"));
    let input = decompressed(path).map_err(|error| wrong(&error))?;
    read_trace_with(&label, input, options).map_err(|error| wrong(&error))
}

/// The file's bytes, unpacked where its name or its first bytes say that it is packed.
fn decompressed(path: &Path) -> std::io::Result<Box<dyn BufRead>> {
    const BUFFER: usize = 1 << 20;
    let mut file = BufReader::with_capacity(BUFFER, File::open(path)?);
    let extension = path.extension().and_then(|extension| extension.to_str());
    let first = file.fill_buf()?;
    Ok(if extension == Some("zst") || first.starts_with(ZSTD) {
        Box::new(BufReader::with_capacity(BUFFER, zstd::Decoder::with_buffer(file)?))
    } else if extension == Some("gz") || first.starts_with(GZIP) {
        Box::new(BufReader::with_capacity(
            BUFFER,
            flate2::bufread::MultiGzDecoder::new(file),
        ))
    } else {
        Box::new(file)
    })
}

/// How every zstd frame begins.
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
/// How every gzip member begins.
const GZIP: &[u8] = &[0x1f, 0x8b];
