//! What can be wrong with a GGUF file: one line each, with the name of what is wrong and what was expected.

use crate::template::TemplateError;
use crate::tokenizer::TokenizerError;
use std::path::PathBuf;

/// Why a GGUF file could not be used.
#[derive(Debug, thiserror::Error)]
#[error("`{}`: {problem}", path.display())]
pub struct GgufError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    #[source]
    pub problem: GgufProblem,
}

/// What is wrong with a GGUF file.
#[derive(Debug, thiserror::Error)]
pub enum GgufProblem {
    /// It cannot be opened.
    #[error("cannot be opened: {0}")]
    Open(#[source] std::io::Error),
    /// It is no GGUF file, or its header is cut off or damaged.
    #[error("is not a whole GGUF file: {0}")]
    Header(String),
    /// It holds a model of another kind.
    #[error("holds a model of architecture `{found}`, expected `llama`")]
    Architecture {
        /// The architecture that it declares.
        found: String,
    },
    /// A key of the header is missing.
    #[error("has no `{key}`, expected {expected}")]
    MissingKey {
        /// The key.
        key: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// A key of the header has a value that cannot be used.
    #[error("has `{key}` = `{found}`, expected {expected}")]
    Key {
        /// The key.
        key: String,
        /// Its value, in short.
        found: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// The shape does not make a model.
    #[error("has an impossible shape: {0}")]
    Shape(String),
    /// A tensor is missing.
    #[error("has no tensor `{name}`")]
    MissingTensor {
        /// The tensor.
        name: String,
    },
    /// A tensor does not fit the declared shape.
    #[error("has tensor `{name}` of shape {found:?}, expected {expected:?}")]
    TensorShape {
        /// The tensor.
        name: String,
        /// Its dimensions, rows first.
        found: Vec<usize>,
        /// The dimensions that the header implies.
        expected: Vec<usize>,
    },
    /// A tensor that the forward pass does not know: to ignore it would give wrong answers.
    #[error("has tensor `{name}`, which a dense Llama without biases does not have")]
    UnknownTensor {
        /// The tensor.
        name: String,
    },
    /// A tensor's data cannot be read: the file is cut off, or the format is not known.
    #[error("has no readable data for tensor `{name}`: {problem}")]
    Data {
        /// The tensor.
        name: String,
        /// The reader's complaint.
        problem: String,
    },
    /// The tokenizer cannot be made.
    #[error("has an unusable tokenizer: {0}")]
    Tokenizer(#[from] TokenizerError),
    /// The chat template cannot be used.
    #[error("has an unusable chat template: {0}")]
    Template(#[from] TemplateError),
}
