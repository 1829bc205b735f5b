//! SGLang as an engine: who it says it is when it joins, what keeps it out, and what is a sign of its life.
//!
//! A server's mode is its role: `prefill` computes prompts for others, `decode` takes what they computed, `null` does both
//! and nothing with others. Sources of the shapes: `homing_wire::sglang`. Never run against a GPU server here.
//!
//! Signs of life. `/health` lets the scheduler make a token, which takes a second on an idle server and as long as a prefill on
//! a busy one. Its answer counts; where none comes in time, `/v1/models` is asked, which needs no scheduler: a server that
//! answers it is busy, not dead.

use super::source::{EventSource, reached_at};
use crate::fleet::{Extensions, Known, KvEndpoints, Member};
use crate::upstream::Upstream;
use homing_router::event::{Abilities, LoadReport, Role, WorkerInfo};
use homing_units::{BootEpoch, WorkerId};
use homing_wire::metrics_text::Metrics;
use homing_wire::openai::ModelList;
use homing_wire::sglang::{Mode, ServerInfo, names};
use std::time::Duration;

/// What is known of an SGLang server beyond what is known of all workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Server {
    /// What it does.
    pub(crate) mode: Mode,
    /// Where decode servers meet it: host and port.
    pub(crate) bootstrap: (String, u16),
    /// Its engines; more than one where it is data-parallel.
    pub(crate) ranks: u32,
    /// Tokens of a page.
    pub(crate) page_size: Option<u32>,
    /// The last part of its tokenizer's path: folders differ from machine to machine.
    pub(crate) tokenizer: String,
    /// Whether a decode server prefills what it is asked to prefill.
    pub(crate) local_prefill: bool,
    /// Whether its cache tells sessions apart.
    pub(crate) session_cache: bool,
}

/// Asks a server who it is. It must be well: one that is still starting has no answer to `/health` but 503.
///
/// # Errors
/// It does not answer, says something else than expected, or cannot be used; for the log.
pub(super) async fn discover(member: &Member, upstream: &Upstream, timeout: Duration) -> Result<Known, String> {
    upstream.get(&member.uri("/health"), timeout).await?;
    let models = upstream.get(&member.uri("/v1/models"), timeout).await?;
    let info = match upstream.get(&member.uri("/server_info"), timeout).await {
        Ok(info) => info,
        // Its name in earlier releases.
        Err(_) => upstream.get(&member.uri("/get_server_info"), timeout).await?,
    };
    let info =
        ServerInfo::parse(&info).map_err(|error| format!("expected `/server_info` of an SGLang server: {error}"))?;
    known(member, &models, &info)
}

/// Whether a server lives, where it is known who it is.
///
/// # Errors
/// It does not answer, or says that it is not well; for the log.
pub(super) async fn sign_of_life(member: &Member, upstream: &Upstream, timeout: Duration) -> Result<(), String> {
    match tokio::time::timeout(timeout, upstream.get(&member.uri("/health"), timeout)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) if error.starts_with("answered") => Err(error),
        Ok(Err(_)) | Err(_) => upstream.get(&member.uri("/v1/models"), timeout).await.map(drop),
    }
}

fn known(member: &Member, models: &[u8], info: &ServerInfo) -> Result<Known, String> {
    let models: ModelList =
        serde_json::from_slice(models).map_err(|error| format!("expected `/v1/models` of an engine: {error}"))?;
    let context = models.data.iter().filter_map(|model| model.max_model_len).max();
    let max_context_tokens = context
        .or(info.context_length)
        .ok_or("expected `max_model_len` in `/v1/models`, found none")?;
    let (spec, role) = (&member.spec, role(member, info)?);
    let disaggregated = info.mode != Mode::Null;
    // A decode server keeps nothing unless told to: each of its turns is computed and pushed whole, which works.
    let caches = !info.disable_radix_cache;
    if !caches && info.mode != Mode::Decode {
        return Err("refused: expected a server that caches prefixes, found `disable_radix_cache` true".to_owned());
    }
    let endpoints = endpoints(member, info);
    Ok(Known {
        info: WorkerInfo {
            id: member.id,
            name: member.name.clone(),
            role,
            epoch: info.life.map(BootEpoch).unwrap_or_default(),
            kv_tokens: spec
                .kv_tokens
                .unwrap_or_else(|| pool_tokens(member, info, max_context_tokens)),
            max_context_tokens,
            transfers: disaggregated && spec.transfers.unwrap_or(true),
            // One that keeps nothing has nothing to tell, and that is known.
            kv_events: endpoints.events.is_some() || !caches,
            abilities: Abilities {
                prefills_alone: info.mode != Mode::Decode || info.local_prefill,
                hands_over: false,
                caches,
            },
        },
        models: models.data,
        endpoints,
        sglang: Some(Server {
            mode: info.mode,
            bootstrap: bootstrap(member, info),
            ranks: info.dp_size,
            page_size: info.page_size,
            tokenizer: last_part(&info.tokenizer_path).to_owned(),
            local_prefill: info.mode == Mode::Decode && info.local_prefill,
            session_cache: info.session_cache,
        }),
        extensions: Extensions::default(),
    })
}

/// A server's mode is its role; a configuration may narrow what `null` means, and contradict nothing.
fn role(member: &Member, info: &ServerInfo) -> Result<Role, String> {
    let of_mode = match info.mode {
        Mode::Null => Role::Both,
        Mode::Prefill => Role::Prefill,
        Mode::Decode => Role::Decode,
    };
    match (member.spec.role, of_mode) {
        (None, of_mode) => Ok(of_mode),
        (Some(role), of_mode) if role == of_mode => Ok(role),
        (Some(Role::Decode), Role::Both) => Ok(Role::Decode),
        (Some(role), _) => Err(format!(
            "refused: expected a server for the role `{}`, found `disaggregation_mode` `{}`",
            match role {
                Role::Prefill => "prefill",
                Role::Decode => "decode",
                Role::Both => "both",
            },
            info.mode.as_str()
        )),
    }
}

/// Where decode servers meet a prefill server: at the port that it says, on the host where the router reaches it, unless the
/// configuration knows better.
fn bootstrap(member: &Member, info: &ServerInfo) -> (String, u16) {
    let configured = member.spec.bootstrap.as_deref().and_then(bootstrap_at);
    configured.unwrap_or_else(|| (member.host(), info.bootstrap_port))
}

/// The host and the port of `HOST:PORT`.
pub(crate) fn bootstrap_at(text: &str) -> Option<(String, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let port = port.parse().ok().filter(|port| *port > 0)?;
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

/// The pool of the engines that a worker stands for.
fn pool_tokens(member: &Member, info: &ServerInfo, max_context_tokens: u32) -> u64 {
    let engines = match member.spec.data_parallel_rank {
        Some(_) => 1,
        None => u64::from(info.dp_size),
    };
    let Some(tokens) = info.max_total_num_tokens else {
        tracing::warn!(
            worker = member.name,
            "it does not say the size of its kv pool, set `kv_tokens`"
        );
        return u64::from(max_context_tokens);
    };
    tokens.saturating_mul(engines)
}

/// Where a server says that its events come from. What it cannot say alone is said to whoever configures it.
fn endpoints(member: &Member, info: &ServerInfo) -> KvEndpoints {
    if let Some(configured) = &member.spec.kv_events {
        return KvEndpoints {
            events: configured.parse().ok(),
            replay: member.spec.kv_replay.clone(),
        };
    }
    // A cache that keeps nothing publishes nothing.
    let Some(publisher) = info.kv_events.as_ref().filter(|_| !info.disable_radix_cache) else {
        return KvEndpoints::default();
    };
    if info.dp_size > 1 && member.spec.data_parallel_rank.is_none() {
        tracing::warn!(
            worker = member.name,
            ranks = info.dp_size,
            "a data-parallel server: list it once for each rank with `data_parallel_rank`, its cache is not followed"
        );
        return KvEndpoints::default();
    }
    let host = member.host();
    let (bound, replay) = publisher.of_rank(member.spec.data_parallel_rank.unwrap_or_default());
    let listens = reached_at(&bound, &host).or_else(|| (publisher.binds == Some(true)).then(|| bound.clone()));
    if listens.is_none() {
        tracing::warn!(
            worker = member.name,
            endpoint = bound,
            "it connects there with its kv events: set `kv_events = \"bind:..\"` if that is the router"
        );
    }
    KvEndpoints {
        events: listens.map(EventSource::Connect),
        // This socket a server binds whatever its form.
        replay: member
            .spec
            .kv_replay
            .clone()
            .or_else(|| replay.map(|bound| reached_at(&bound, &host).unwrap_or(bound))),
    }
}

impl Server {
    /// Why two servers of one fleet cannot serve for each other, if so; `peer` is the other's name.
    pub(crate) fn misfit(&self, other: &Self, peer: &str) -> Option<String> {
        if self.tokenizer != other.tokenizer {
            return Some(format!(
                "refused: expected the tokenizer of {peer}, `{}`, found `{}`",
                other.tokenizer, self.tokenizer
            ));
        }
        match (self.page_size, other.page_size) {
            (Some(own), Some(of_peer)) if own != of_peer => Some(format!(
                "refused: expected the page size of {peer}, `{of_peer}`, found `{own}`"
            )),
            _ => None,
        }
    }
}

/// A server's own figures of its load; of a data-parallel server over all its engines, or this rank's.
pub(super) fn load_of(worker: WorkerId, metrics: &Metrics, kv_tokens: u64) -> Option<LoadReport> {
    let count = |name: &str| metrics.sum(name).map(super::discovery::whole);
    let queued = |names: [&str; 2]| names.map(|name| count(name).unwrap_or_default()).iter().sum();
    let engines = metrics.of(names::TOKEN_USAGE).count().max(1);
    let usage = metrics.sum(names::TOKEN_USAGE)?.clamp(0.0, f64::from(u32::MAX)) / engines as f64;
    let waits: u32 = queued([names::PREFILL_BOOTSTRAP_QUEUE, names::DECODE_PREALLOC_QUEUE]);
    Some(LoadReport {
        worker,
        running: count(names::REQUESTS_RUNNING)?,
        // Those that wait for the other side's server wait as well.
        waiting: count(names::REQUESTS_WAITING)?.saturating_add(waits),
        kv_tokens_used: u64::from(super::discovery::whole(usage * kv_tokens as f64)),
        transfer_queue: queued([names::PREFILL_INFLIGHT_QUEUE, names::DECODE_TRANSFER_QUEUE]),
        retracted: count(names::REQUESTS_RETRACTED).unwrap_or_default(),
    })
}

/// A server's life: what its start measured and drew, and the restarts that its events told of. Either may be the same in two
/// lives (a fixed seed, a server without events); where both change, they do so before the new life is met.
pub(super) fn epoch(said: BootEpoch, restarts: BootEpoch) -> BootEpoch {
    BootEpoch(said.0.wrapping_add(restarts.0).max(1))
}

fn last_part(path: &str) -> &str {
    path.trim_end_matches('/').rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{EngineKind, WorkerSpec};
    use crate::fleet::Fleet;
    use serde_json::{Value, json};

    const MODELS: &[u8] = br#"{"object":"list","data":[{"id":"qwen3","object":"model","owned_by":"sglang","root":"qwen3","max_model_len":40960}]}"#;

    fn spec() -> WorkerSpec {
        WorkerSpec::new("http://10.0.0.7:30000", EngineKind::Sglang)
    }

    /// What a server of this mode says, with some members changed.
    fn said(mode: &str, changed: &Value) -> ServerInfo {
        let mut said = json!({
            "model_path": "/models/Qwen3-8B", "tokenizer_path": "/models/Qwen3-8B/", "page_size": 16, "dp_size": 1,
            "disaggregation_mode": mode, "disaggregation_bootstrap_port": 8998, "disable_radix_cache": mode == "decode",
            "max_total_num_tokens": 412_000, "random_seed": 7, "version": "0.5.23",
            "kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "",
                "block_size": 16, "dp_size": 1},
        });
        for (name, value) in changed.as_object().expect("members") {
            said[name] = value.clone();
        }
        ServerInfo::parse(said.to_string().as_bytes()).expect("an answer")
    }

    fn joined(spec: WorkerSpec, info: &ServerInfo) -> Result<Known, String> {
        known(&Fleet::new(&[spec]).members()[0], MODELS, info)
    }

    #[test]
    fn a_mode_is_a_role_and_says_what_a_server_can_do() {
        let check = |mode, changed: Value, expected: (Role, bool, bool, bool, bool)| {
            let known = joined(spec(), &said(mode, &changed)).unwrap();
            let WorkerInfo {
                role,
                transfers,
                kv_events,
                abilities,
                ..
            } = known.info;
            let found = (role, transfers, kv_events, abilities.prefills_alone, abilities.caches);
            assert_eq!(found, expected, "{mode} {changed}");
        };
        check("null", json!({}), (Role::Both, false, true, true, true));
        check(
            "null",
            json!({"kv_events": null}),
            (Role::Both, false, false, true, true),
        );
        check("prefill", json!({}), (Role::Prefill, true, true, true, true));
        check("decode", json!({}), (Role::Decode, true, true, false, false));
        let caches = json!({"disable_radix_cache": false});
        check("decode", caches, (Role::Decode, true, true, false, true));
        let alone = json!({"disaggregation_decode_enable_conditional_agg": true});
        check("decode", alone, (Role::Decode, true, true, true, false));
    }

    #[test]
    fn what_keeps_a_server_out_is_said() {
        let check = |spec: WorkerSpec, mode, changed: Value, expected: &str| {
            let error = joined(spec, &said(mode, &changed)).unwrap_err();
            assert!(error.starts_with("refused") && error.contains(expected), "{error}");
        };
        check(
            spec(),
            "null",
            json!({"disable_radix_cache": true}),
            "`disable_radix_cache`",
        );
        check(
            spec(),
            "prefill",
            json!({"disable_radix_cache": true}),
            "`disable_radix_cache`",
        );
        let prefill = WorkerSpec {
            role: Some(Role::Prefill),
            ..spec()
        };
        check(prefill.clone(), "decode", json!({}), "`decode`");
        check(prefill, "null", json!({}), "`null`");
    }

    #[test]
    fn where_to_meet_is_where_the_configuration_says() {
        let check = |text: &str, expected: Option<(&str, u16)>| {
            let expected = expected.map(|(host, port)| (host.to_owned(), port));
            assert_eq!(bootstrap_at(text), expected, "{text}");
        };
        check("10.1.0.6:8998", Some(("10.1.0.6", 8998)));
        check("[fd00::6]:8998", Some(("[fd00::6]", 8998)));
        for wrong in ["", "h", "h:", ":8998", "h:0", "h:70000"] {
            check(wrong, None);
        }
        let told = WorkerSpec {
            bootstrap: Some("10.1.0.6:9000".to_owned()),
            ..spec()
        };
        let server = joined(told, &said("prefill", &json!({}))).unwrap().sglang.unwrap();
        assert_eq!(server.bootstrap, ("10.1.0.6".to_owned(), 9000));
    }

    #[test]
    fn servers_of_one_fleet_have_one_tokenizer_and_one_page_size() {
        let server = |changed: Value| joined(spec(), &said("prefill", &changed)).unwrap().sglang.unwrap();
        let own = server(json!({}));
        assert_eq!(
            own.misfit(&server(json!({"tokenizer_path": "/other/Qwen3-8B"})), "p0"),
            None
        );
        let other = own.misfit(&server(json!({"tokenizer_path": "Llama-3"})), "p0").unwrap();
        assert!(other.contains("`Llama-3`, found `Qwen3-8B`"), "{other}");
        let pages = own.misfit(&server(json!({"page_size": 1})), "p0").unwrap();
        assert!(pages.contains("page size of p0, `1`, found `16`"), "{pages}");
        assert_eq!(own.misfit(&server(json!({"page_size": null})), "p0"), None);
    }

    #[test]
    fn each_rank_is_met_and_followed_by_itself() {
        let ranked = WorkerSpec {
            data_parallel_rank: Some(2),
            ..spec()
        };
        let replay = json!({"dp_size": 4, "kv_events": {"endpoint_host": "*", "endpoint_port_base": 5557,
            "replay_endpoint_port_base": 6557}});
        let known = joined(ranked, &said("prefill", &replay)).unwrap();
        assert_eq!(known.info.kv_tokens, 412_000);
        let server = known.sglang.unwrap();
        assert_eq!((server.ranks, server.bootstrap), (4, ("10.0.0.7".to_owned(), 8998)));
        assert_eq!(
            known.endpoints.events,
            Some(EventSource::Connect("tcp://10.0.0.7:5559".to_owned()))
        );
        assert_eq!(known.endpoints.replay.as_deref(), Some("tcp://10.0.0.7:6559"));
        let whole = joined(spec(), &said("prefill", &replay)).unwrap();
        assert_eq!(whole.info.kv_tokens, 4 * 412_000);
        assert_eq!(whole.endpoints, KvEndpoints::default());
    }

    #[test]
    fn a_concrete_address_is_connected_to_only_where_the_server_binds_it() {
        let check = |binds: Value, expected: Option<&str>| {
            let config = json!({"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557", "bind": binds}).to_string();
            let changed = json!({"kv_events": null, "kv_events_config": config});
            let known = joined(spec(), &said("null", &changed)).unwrap();
            let expected = expected.map(|endpoint| EventSource::Connect(endpoint.to_owned()));
            assert_eq!(known.endpoints.events, expected, "{binds}");
        };
        check(json!(true), Some("tcp://127.0.0.1:5557"));
        check(json!(null), None);
    }

    #[test]
    fn load_is_read_from_metrics() {
        let page = "sglang:num_running_reqs{engine_type=\"decode\",tp_rank=\"0\"} 5.0\n\
            sglang:num_queue_reqs{tp_rank=\"0\"} 1.0\nsglang:token_usage{tp_rank=\"0\"} 0.25\n\
            sglang:num_decode_prealloc_queue_reqs{tp_rank=\"0\"} 2.0\n\
            sglang:num_decode_transfer_queue_reqs{tp_rank=\"0\"} 3.0\nsglang:num_retracted_reqs{tp_rank=\"0\"} 4.0\n";
        let load = load_of(WorkerId(0), &Metrics::parse(page), 1_000).unwrap();
        assert_eq!((load.running, load.waiting, load.transfer_queue), (5, 3, 3));
        assert_eq!((load.retracted, load.kv_tokens_used), (4, 250));
        assert_eq!(
            load_of(WorkerId(0), &Metrics::parse("vllm:num_requests_running 1"), 1_000),
            None
        );
    }
}
