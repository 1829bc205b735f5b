//! A Llama-family forward pass on CPU over a paged KV pool, with GGUF loading, tokenizer and chat template.
