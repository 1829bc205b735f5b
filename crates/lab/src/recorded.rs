//! Recorded traces: files of the working folder, packed or not, each read once and shared by all runs.
//!
//! A trace of a hundred megabytes is read in seconds and simulated hundreds of times.

use homing_workload::{Trace, TraceError, read_trace};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Error};
use std::sync::{Arc, Mutex};

/// Why there is no such trace.
#[derive(Debug, thiserror::Error)]
pub enum RecordedError {
    /// The file cannot be read.
    #[error("recorded trace `{name}`: {error}")]
    File {
        /// Its name.
        name: String,
        /// Why.
        #[source]
        error: Error,
    },
    /// It holds no trace.
    #[error("recorded trace `{name}`: {error}")]
    Content {
        /// Its name.
        name: String,
        /// Why.
        #[source]
        error: Box<TraceError>,
    },
}

/// Those that were read. As many as there are names in the experiments.
static READ: Mutex<BTreeMap<String, Arc<Trace>>> = Mutex::new(BTreeMap::new());

/// The trace in the file of this name; `.zst` is unpacked.
///
/// # Errors
/// If there is no such file or it holds no trace.
///
/// # Panics
/// If another thread panicked while it read one.
pub fn open(name: &str) -> Result<Arc<Trace>, RecordedError> {
    // Held while reading: whoever wants the same one waits for it.
    let mut read = READ.lock().expect("reading a trace does not panic");
    if let Some(trace) = read.get(name) {
        return Ok(Arc::clone(trace));
    }
    let wrong = |error| RecordedError::File {
        name: name.to_owned(),
        error,
    };
    let file = BufReader::new(File::open(name).map_err(wrong)?);
    let trace = if name.ends_with(".zst") {
        read_trace(name, BufReader::new(zstd::Decoder::with_buffer(file).map_err(wrong)?))
    } else {
        read_trace(name, file)
    };
    let trace = Arc::new(trace.map_err(|error| RecordedError::Content {
        name: name.to_owned(),
        error: Box::new(error),
    })?);
    read.insert(name.to_owned(), Arc::clone(&trace));
    Ok(trace)
}
