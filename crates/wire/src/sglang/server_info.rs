//! `/server_info` (`/get_server_info` before 0.5.9 or so): the settings that a server was started with, flat, and what its
//! engines say of themselves.
//!
//! Of some four hundred members a router needs a dozen. Members that are missing take SGLang's defaults, because releases
//! add and rename them; what is there and of another type is an error, because then nobody knows what it means.

use serde::Deserialize;
use serde_json::value::RawValue;
use xxhash_rust::xxh3::xxh3_64;

/// What a server does with requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// It prefills and decodes, and has nothing to do with others.
    #[default]
    Null,
    /// It prefills, and pushes the KV to a decode server.
    Prefill,
    /// It decodes what was prefilled elsewhere.
    Decode,
}

impl Mode {
    /// Its name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// What a router needs of `/server_info`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerInfo {
    /// Its release.
    pub version: Option<String>,
    /// What it does.
    pub mode: Mode,
    /// The model's path or name.
    pub model_path: String,
    /// The tokenizer's path or name; the model's where none was given.
    pub tokenizer_path: String,
    /// Tokens of a page, the unit of its cache.
    pub page_size: Option<u32>,
    /// Engines of a data-parallel server, each with a cache of its own.
    pub dp_size: u32,
    /// Tokens that the pool of one engine holds.
    pub max_total_num_tokens: Option<u64>,
    /// The longest prompt and output, where it was set.
    pub context_length: Option<u32>,
    /// Whether it keeps no prefixes. A decode server keeps none unless told to.
    pub disable_radix_cache: bool,
    /// Where decode servers ask a prefill server.
    pub bootstrap_port: u16,
    /// Whether a decode server prefills where it is asked to (`--disaggregation-decode-enable-conditional-agg`, a draft in 0.5.23).
    pub local_prefill: bool,
    /// Whether its cache tells sessions apart.
    pub session_cache: bool,
    /// Whether it says how many prompt tokens were cached.
    pub cache_report: bool,
    /// Whether it has a metrics page.
    pub metrics: bool,
    /// Where its KV events come from, if it publishes any.
    pub kv_events: Option<KvPublisher>,
    /// What differs from start to start: a hash of the start's measured times and of the seed that was drawn; `None` where it
    /// says neither.
    pub life: Option<u64>,
}

/// Where a server's engines publish KV events: engine `r` at the port plus `r`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvPublisher {
    /// The endpoint of engine 0 as it was configured, such as `tcp://*:5557`.
    pub endpoint: String,
    /// The same for the replay of missed batches.
    pub replay_endpoint: Option<String>,
    /// Whether the engine listens there; `None` where that follows from the endpoint's form.
    pub binds: Option<bool>,
}

impl KvPublisher {
    /// The endpoints of one engine: its events and their replay.
    #[must_use]
    pub fn of_rank(&self, rank: u32) -> (String, Option<String>) {
        let replay = self.replay_endpoint.as_deref().map(|endpoint| offset(endpoint, rank));
        (offset(&self.endpoint, rank), replay)
    }
}

/// An endpoint whose port is so much higher.
fn offset(endpoint: &str, rank: u32) -> String {
    let moved = endpoint
        .rsplit_once(':')
        .filter(|_| endpoint.starts_with("tcp://"))
        .and_then(|(address, port)| Some(format!("{address}:{}", port.parse::<u32>().ok()? + rank)));
    moved.unwrap_or_else(|| endpoint.to_owned())
}

/// The port of a prefill server's bootstrap where none was set.
const BOOTSTRAP_PORT: u16 = 8998;

#[derive(Deserialize)]
struct Wire<'a> {
    #[serde(default)]
    version: Option<String>,
    #[serde(default)]
    disaggregation_mode: Option<Mode>,
    model_path: String,
    #[serde(default)]
    tokenizer_path: Option<String>,
    #[serde(default)]
    page_size: Option<u32>,
    #[serde(default)]
    dp_size: Option<u32>,
    #[serde(default)]
    max_total_num_tokens: Option<u64>,
    #[serde(default)]
    context_length: Option<u32>,
    #[serde(default)]
    disable_radix_cache: Option<bool>,
    #[serde(default)]
    disaggregation_bootstrap_port: Option<u16>,
    #[serde(default)]
    disaggregation_decode_enable_conditional_agg: Option<bool>,
    #[serde(default)]
    enable_session_radix_cache: Option<bool>,
    #[serde(default)]
    enable_cache_report: Option<bool>,
    #[serde(default)]
    enable_metrics: Option<bool>,
    #[serde(default)]
    kv_events: Option<Publisher>,
    #[serde(default)]
    kv_events_config: Option<String>,
    #[serde(default)]
    internal_states: Vec<InternalState>,
    #[serde(default, borrow)]
    startup_time: Option<&'a RawValue>,
    #[serde(default, borrow)]
    random_seed: Option<&'a RawValue>,
}

/// The description that recent releases give of their publisher.
#[derive(Deserialize)]
struct Publisher {
    endpoint_host: String,
    endpoint_port_base: u16,
    #[serde(default)]
    replay_endpoint_port_base: Option<u16>,
}

/// `--kv-events-config`, a JSON text of its own.
#[derive(Deserialize)]
struct PublisherConfig {
    #[serde(default)]
    publisher: Option<String>,
    #[serde(default)]
    endpoint: Option<String>,
    #[serde(default)]
    replay_endpoint: Option<String>,
    #[serde(default)]
    bind: Option<bool>,
}

/// Of one engine: it knows of a role that was switched at run time.
#[derive(Deserialize)]
struct InternalState {
    #[serde(default)]
    disaggregation_mode: Option<Mode>,
}

impl ServerInfo {
    /// Reads the answer.
    ///
    /// # Errors
    /// It is no JSON object, has no `model_path`, or a member that is needed has another type; the message says which.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let wire: Wire<'_> = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let switched = wire.internal_states.first().and_then(|state| state.disaggregation_mode);
        let life = wire.life();
        let kv_events = wire.publisher();
        Ok(Self {
            mode: switched.or(wire.disaggregation_mode).unwrap_or_default(),
            tokenizer_path: wire.tokenizer_path.unwrap_or_else(|| wire.model_path.clone()),
            model_path: wire.model_path,
            version: wire.version,
            page_size: wire.page_size.filter(|size| *size > 0),
            dp_size: wire.dp_size.unwrap_or(1).max(1),
            max_total_num_tokens: wire.max_total_num_tokens.filter(|tokens| *tokens > 0),
            context_length: wire.context_length.filter(|length| *length > 0),
            disable_radix_cache: wire.disable_radix_cache.unwrap_or_default(),
            bootstrap_port: wire.disaggregation_bootstrap_port.unwrap_or(BOOTSTRAP_PORT),
            local_prefill: wire.disaggregation_decode_enable_conditional_agg.unwrap_or_default(),
            session_cache: wire.enable_session_radix_cache.unwrap_or_default(),
            cache_report: wire.enable_cache_report.unwrap_or_default(),
            metrics: wire.enable_metrics.unwrap_or_default(),
            kv_events,
            life,
        })
    }
}

impl Wire<'_> {
    fn life(&self) -> Option<u64> {
        let said = [self.startup_time, self.random_seed].map(|value| value.map_or("null", RawValue::get));
        said.iter()
            .any(|text| *text != "null")
            .then(|| xxh3_64(said.join("\n").as_bytes()))
    }

    fn publisher(&self) -> Option<KvPublisher> {
        let config = self.kv_events_config.as_deref();
        let config = config.and_then(|text| serde_json::from_str::<PublisherConfig>(text).ok());
        let binds = config.as_ref().and_then(|config| config.bind);
        if let Some(described) = &self.kv_events {
            let at = |port: u16| format!("tcp://{}:{port}", described.endpoint_host);
            return Some(KvPublisher {
                endpoint: at(described.endpoint_port_base),
                replay_endpoint: described.replay_endpoint_port_base.map(at),
                binds,
            });
        }
        let config = config.filter(|config| config.publisher.as_deref() == Some("zmq"))?;
        Some(KvPublisher {
            endpoint: config.endpoint.unwrap_or_else(|| "tcp://*:5557".to_owned()),
            replay_endpoint: config.replay_endpoint,
            binds,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the members that matter look like in 0.5.23, among a few that do not.
    const DECODE: &str = r#"{"model_path":"/models/Qwen3-8B","tokenizer_path":"/models/Qwen3-8B","served_model_name":"qwen3",
        "page_size":16,"tp_size":1,"dp_size":2,"disaggregation_mode":"decode","disaggregation_bootstrap_port":8998,
        "disaggregation_transfer_backend":"nixl","disable_radix_cache":true,"enable_metrics":true,"random_seed":612,
        "kv_events_config":"{\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5657\"}",
        "launch_command":"sglang serve","status":"ready","max_total_num_tokens":412000,"max_req_input_len":40954,
        "kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"topic":"","block_size":16,"dp_size":2,
        "replay_endpoint_port_base":5657},"startup_time":{"load_weight":3.25,"scheduler_e2e":21.5},
        "internal_states":[{"disaggregation_mode":"decode","memory_usage":{}}],"version":"0.5.23","context_length":null}"#;

    #[test]
    fn a_decode_server_says_who_it_is() {
        let info = ServerInfo::parse(DECODE.as_bytes()).expect("0.5.23's form");
        assert_eq!((info.mode, info.dp_size, info.page_size), (Mode::Decode, 2, Some(16)));
        assert_eq!((info.bootstrap_port, info.max_total_num_tokens), (8998, Some(412_000)));
        assert!(info.disable_radix_cache && info.metrics && !info.local_prefill && !info.cache_report);
        let events = info.kv_events.expect("it publishes");
        assert_eq!(
            events.of_rank(1),
            ("tcp://*:5558".to_owned(), Some("tcp://*:5658".to_owned()))
        );
        assert_eq!(info.context_length, None);
    }

    #[test]
    fn lives_differ_by_what_a_start_measures_and_draws() {
        let life = |text: &str| ServerInfo::parse(text.as_bytes()).expect("an answer").life;
        assert!(life(DECODE).is_some());
        assert_ne!(life(DECODE), life(&DECODE.replace("3.25", "3.26")));
        assert_ne!(life(DECODE), life(&DECODE.replace("612", "613")));
        assert_eq!(life(DECODE), life(&DECODE.replace("412000", "1")));
        assert_eq!(life(r#"{"model_path":"m"}"#), None);
    }

    #[test]
    fn releases_without_a_description_are_read_by_their_settings() {
        let check = |config: &str, expected: Option<(&str, Option<&str>, Option<bool>)>| {
            let text = serde_json::json!({"model_path": "m", "kv_events_config": config}).to_string();
            let found = ServerInfo::parse(text.as_bytes()).expect("an answer").kv_events;
            let expected = expected.map(|(endpoint, replay, binds)| KvPublisher {
                endpoint: endpoint.to_owned(),
                replay_endpoint: replay.map(str::to_owned),
                binds,
            });
            assert_eq!(found, expected, "{config}");
        };
        check(
            r#"{"publisher":"zmq","endpoint":"ipc:///run/x"}"#,
            Some(("ipc:///run/x", None, None)),
        );
        check(
            r#"{"publisher":"zmq","replay_endpoint":"tcp://*:6"}"#,
            Some(("tcp://*:5557", Some("tcp://*:6"), None)),
        );
        check(
            r#"{"publisher":"zmq","endpoint":"tcp://127.0.0.1:7","bind":true}"#,
            Some(("tcp://127.0.0.1:7", None, Some(true))),
        );
        check(r#"{"publisher":"null"}"#, None);
        check("{", None);
        check("", None);
    }

    #[test]
    fn defaults_and_wrong_types() {
        let bare = ServerInfo::parse(br#"{"model_path":"m"}"#).expect("all else has a default");
        assert_eq!(
            (bare.mode, bare.dp_size, bare.tokenizer_path.as_str()),
            (Mode::Null, 1, "m")
        );
        let switched = r#"{"model_path":"m","disaggregation_mode":"prefill","internal_states":[{"disaggregation_mode":"decode"}]}"#;
        assert_eq!(
            ServerInfo::parse(switched.as_bytes()).expect("an answer").mode,
            Mode::Decode
        );
        for wrong in [
            "",
            "[]",
            "{}",
            r#"{"model_path":"m","page_size":"16"}"#,
            r#"{"model_path":"m","disaggregation_mode":"encode"}"#,
        ] {
            assert!(ServerInfo::parse(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
