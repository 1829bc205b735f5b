//! The embedded engine's shell: HTTP in vLLM's dialect, KV events, KV transfer.
