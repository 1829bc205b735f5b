//! Codecs of what crosses a socket: OpenAI, SSE, KV events, engine metrics text, transfer parameters, KV frames.
//!
//! Pure: bytes in, values out, and back. Sockets, timers and retries are the shells' business. Whatever a peer sends is
//! data: a decoder answers garbled input with an error and never panics, and every buffer has a named bound.

pub mod anthropic;
pub mod kv_events;
pub mod kv_frames;
pub mod metrics_text;
pub mod openai;
pub mod owner;
pub mod responses;
pub mod sglang;
pub mod sse;
pub mod transfer_offer;
pub mod transfer_params;
pub mod worker_name;
