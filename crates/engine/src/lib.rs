//! The engine core: continuous batching, chunked prefill, KV admission, transfers, KV events, step-time models.
