//! What can be set about the gateway: plain data with a default, read from the file of `homing serve --config` or made
//! by the command line.

use homing_model::PROMPT_MEMORY_BYTES;
use homing_router::RouterConfig;
use homing_router::event::Role;
use serde::{Deserialize, Serialize};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// The gateway's configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatewayConfig {
    /// Where clients connect; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The engines, in the order of their ids.
    pub workers: Vec<WorkerSpec>,
    /// The router core.
    pub router: RouterConfig,
    /// The model whose vocabulary and chat template tokenise prompts, as `homing up --model` takes it; without it the
    /// engines' `/tokenize` is asked.
    pub tokenizer: Option<String>,
    /// Whether known ways in which clients break their own prefixes are undone: Claude Code's billing line, a moving
    /// date, tools in another order. It changes prompts, so it is off by default.
    pub canonicalise: bool,
    /// Where to record the core's events, for `homing sim --events`.
    pub record: Option<PathBuf>,
    /// Bounds of what clients may take up.
    pub limits: GatewayLimits,
    /// How often engines are asked, and how long things may take.
    pub clocks: GatewayClocks,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 8080)),
            workers: Vec::new(),
            router: RouterConfig::default(),
            tokenizer: None,
            canonicalise: false,
            record: None,
            limits: GatewayLimits::default(),
            clocks: GatewayClocks::default(),
        }
    }
}

/// An engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerSpec {
    /// Its address, such as `http://127.0.0.1:8000`.
    pub url: String,
    /// Its name in headers, logs and metrics; by default the role's first letter and a number, such as `d0`.
    #[serde(default)]
    pub name: Option<String>,
    /// What it may do; an embedded worker says it by itself.
    #[serde(default)]
    pub role: Option<Role>,
    /// What kind of engine it is.
    #[serde(default)]
    pub kind: EngineKind,
    /// Where it publishes KV events, such as `tcp://127.0.0.1:5557` or `ipc:///run/vllm/events`; with `bind:` before it the
    /// router listens there and engines connect. An embedded worker says it by itself, and so does a vLLM whose
    /// `/kv_event_sources` names what it has bound.
    #[serde(default)]
    pub kv_events: Option<String>,
    /// Where it replays KV events; said by itself as `kv_events` is.
    #[serde(default)]
    pub kv_replay: Option<String>,
    /// Size of its KV pool in tokens, for an engine whose metrics do not say it.
    #[serde(default)]
    pub kv_tokens: Option<u64>,
    /// Whether it gives and takes KV (vLLM: started with a KV connector); an embedded worker does.
    #[serde(default)]
    pub transfers: Option<bool>,
    /// Whether it is asked in the client's own dialect where it has that API (vLLM: `/v1/messages` and `/v1/responses`) and
    /// serves a streamed turn alone. Such an answer cannot go on elsewhere when the worker is lost; without this, and
    /// always at an engine that lacks the API, requests are translated.
    #[serde(default)]
    pub native_apis: bool,
    /// Which engine of a data-parallel server it is: each rank has a cache of its own and is a worker of its own here, at
    /// the same `url`.
    #[serde(default)]
    pub data_parallel_rank: Option<u32>,
    /// Where decode servers meet an SGLang prefill server (`HOST:PORT`), where that is not the port that it says on the
    /// host of its `url`.
    #[serde(default)]
    pub bootstrap: Option<String>,
}

impl WorkerSpec {
    /// An engine of which only the address and the kind are known.
    #[must_use]
    pub fn new(url: impl Into<String>, kind: EngineKind) -> Self {
        Self {
            url: url.into(),
            name: None,
            role: None,
            kind,
            kv_events: None,
            kv_replay: None,
            kv_tokens: None,
            transfers: None,
            native_apis: false,
            data_parallel_rank: None,
            bootstrap: None,
        }
    }
}

/// Kinds of engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// The embedded worker, which says everything about itself.
    Homing,
    /// vLLM, of which the configuration says what it does not.
    #[default]
    Vllm,
    /// SGLang, which says most of it in `/server_info`.
    Sglang,
}

/// Bounds of what clients may take up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatewayLimits {
    /// Longest request body, in bytes; longer ones are answered 413.
    pub body_bytes: usize,
    /// Open client connections; more wait to be accepted.
    pub connections: usize,
    /// Tokens of output that are booked for a request without a limit of its own.
    pub default_output_tokens: u32,
    /// Decisions that `/admin/decisions` shows.
    pub decisions: usize,
    /// Bytes of earlier prompts, their tokens and block hashes, that are remembered to spare the next turns the work; above, the
    /// longest unused go, and cost their sessions one prompt that is tokenised from its beginning.
    pub prompt_memory_bytes: usize,
}

impl Default for GatewayLimits {
    fn default() -> Self {
        Self {
            body_bytes: 32 << 20,
            connections: 16_384,
            default_output_tokens: 2_048,
            decisions: 256,
            prompt_memory_bytes: PROMPT_MEMORY_BYTES,
        }
    }
}

/// How often engines are asked, and how long things may take.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatewayClocks {
    /// Between two liveness probes of a worker.
    pub probe_every: Duration,
    /// How long a probe may take.
    pub probe_timeout: Duration,
    /// Between two looks at a worker's metrics.
    pub poll_every: Duration,
    /// How long a look at metrics may take: long, because it says nothing about life.
    pub poll_timeout: Duration,
    /// Longest pause between two tries to reach a worker or its event sockets.
    pub retry_cap: Duration,
    /// How long a client may leave a piece of its stream untaken.
    pub client_stall: Duration,
    /// A client of a stream that has got nothing for so long is sent a sign of life, so that neither it nor a proxy
    /// before the router gives up: `200` and a comment line, or Anthropic's `ping`. An error after that is an event of the stream. 0 sends
    /// none.
    pub keep_alive: Duration,
    /// How long KV that a worker holds for another counts as there: less than the lease after which engines let it go (30 s
    /// in vLLM and in the embedded worker).
    pub offer: Duration,
    /// How long requests may go on after a shutdown began.
    pub drain: Duration,
}

impl Default for GatewayClocks {
    fn default() -> Self {
        Self {
            probe_every: Duration::from_secs(1),
            probe_timeout: Duration::from_secs(2),
            poll_every: Duration::from_secs(1),
            poll_timeout: Duration::from_secs(5),
            retry_cap: Duration::from_secs(2),
            client_stall: Duration::from_secs(120),
            keep_alive: Duration::from_secs(15),
            offer: Duration::from_secs(25),
            drain: Duration::from_secs(5),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_names_what_differs_from_the_default() {
        let text = r#"
            listen = "127.0.0.1:9000"
            [router]
            block_size = 32
            [[workers]]
            url = "http://127.0.0.1:8001"
            role = "prefill"
            kv_events = "tcp://127.0.0.1:5557"
            [[workers]]
            url = "http://127.0.0.1:8002"
            kind = "homing"
            [[workers]]
            url = "http://127.0.0.1:30000"
            kind = "sglang"
            bootstrap = "10.0.0.5:8998"
        "#;
        let config: GatewayConfig = toml::from_str(text).unwrap();
        assert_eq!(config.listen.port(), 9000);
        assert_eq!(config.workers[0].role, Some(Role::Prefill));
        assert_eq!(
            config.workers[1],
            WorkerSpec::new("http://127.0.0.1:8002", EngineKind::Homing)
        );
        assert_eq!(config.workers[2].kind, EngineKind::Sglang);
        assert_eq!(config.workers[2].bootstrap.as_deref(), Some("10.0.0.5:8998"));
        assert_eq!(config.limits, GatewayLimits::default());
        for bad in [
            "lissten = 1",
            "[[workers]]\nname = 'x'",
            "[[workers]]\nurl = 'u'\nkind = 'sglang9'",
        ] {
            assert!(toml::from_str::<GatewayConfig>(bad).is_err(), "{bad}");
        }
    }
}
