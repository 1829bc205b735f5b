//! A Llama-family forward pass on CPU over a paged KV pool, with GGUF loading, tokenizer and chat template.
//!
//! [`open()`] gives a [`Bundle`]: a [`Model`] and its [`Vocabulary`]. [`Model::forward`] computes chunks of several
//! sequences over the blocks of a [`KvStore`]; the bits of a token's logits do not depend on what else was in the batch,
//! on how the prompt was cut, on which blocks hold it or on where they were computed. That is what lets a router move
//! sessions between workers and prove that nothing changed.
//!
//! Not here: scheduling and block ownership (`homing-engine`, `homing-kv`), sampling (the worker), any network access
//! except the one download of a model that was asked for.

#![expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "float32 arithmetic on counts far below 2^24"
)]

mod alphabet;
mod attention;
mod chat_value;
mod config;
mod cuts;
mod download;
mod emits;
mod forward;
mod gguf;
mod gguf_error;
#[cfg(test)]
mod gguf_tests;
mod hugging_face;
mod kv_store;
mod math;
mod matrix;
mod model;
mod open;
mod prompt_memory;
mod prompt_tokens;
mod prompt_tree;
mod quants;
#[cfg(test)]
mod reference;
mod rope;
mod seams;
mod stream;
mod strftime;
mod template;
mod tiny;
mod to_json;
mod tokenizer;
mod vocabulary;

pub use chat_value::{ChatSource, ChatValue};
pub use config::{ModelConfig, RopeConfig};
pub use cuts::Uncuttable;
pub use download::DownloadError;
pub use forward::{Chunk, ForwardError};
pub use gguf_error::{GgufError, GgufProblem};
pub use hugging_face::HuggingFaceError;
pub use kv_store::{KvError, KvStore};
pub use model::Model;
pub use open::{Bundle, ModelSpec, OpenError, TINY_SEED, cached, default_cache_dir, open, open_vocabulary, resolve};
pub use prompt_memory::{EncodedPrompt, Opening, PROMPT_MEMORY_BYTES, PromptMark, PromptMemory};
pub use prompt_tokens::PromptTokens;
pub use stream::StreamDecoder;
pub use template::{CHATML, ChatInput, ChatTemplate, TemplateError};
pub use tokenizer::{Cut, TokenKind, Tokenizer, TokenizerError, TokenizerParts};
pub use vocabulary::Vocabulary;
