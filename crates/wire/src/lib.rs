//!
//! Pure: bytes in, values out, and back. Sockets, timers and retries are the shells' business. Whatever a peer sends is
//! data: a decoder answers garbled input with an error and never panics, and every buffer has a named bound.

pub mod openai;
