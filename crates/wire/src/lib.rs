//! Codecs of what crosses a socket: OpenAI, SSE, KV events, engine metrics text, transfer parameters, KV frames.
