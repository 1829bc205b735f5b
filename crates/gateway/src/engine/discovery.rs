//! What an engine says of itself: the embedded worker in one answer, vLLM spread over several pages, with what it does
//! not say taken from the configuration. SGLang is in `sglang`.

use super::sglang;
use super::source::{EventSource, reached_at};
use crate::config::EngineKind;
use crate::fleet::{Extensions, Known, KvEndpoints, Member};
use crate::upstream::Upstream;
use homing_router::event::{Abilities, LoadReport, Role, WorkerInfo};
use homing_units::{BootEpoch, WorkerId};
use homing_wire::metrics_text::{Metrics, names};
use homing_wire::openai::{ModelCard, ModelList};
use homing_wire::sglang::names::RANK_LABEL;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// The part of the embedded worker's `/homing/info` that a router needs.
#[derive(Debug, Deserialize)]
struct HomingInfo {
    role: Role,
    epoch: BootEpoch,
    model: String,
    kv_tokens: u64,
    max_context_tokens: u32,
    endpoints: HomingEndpoints,
    /// What it can be asked beyond vLLM's dialect; an earlier one does not say.
    #[serde(default)]
    extensions: Vec<String>,
    /// 0 where it does not say.
    #[serde(default)]
    export_lease_ms: u64,
}

#[derive(Debug, Deserialize)]
struct HomingEndpoints {
    kv_events: SocketAddr,
    kv_replay: SocketAddr,
}

/// A part of vLLM's `/kv_event_sources`: where one engine of the server publishes, as it was configured.
#[derive(Clone, Debug, Deserialize)]
struct VllmSource {
    endpoint: Option<String>,
    replay_endpoint: Option<String>,
}

/// By data-parallel rank.
type VllmSources = BTreeMap<u32, VllmSource>;

/// Asks an engine who it is.
///
/// # Errors
/// It does not answer, or says something else than expected; for the log.
pub(super) async fn discover(member: &Member, upstream: &Upstream, timeout: Duration) -> Result<Known, String> {
    match member.spec.kind {
        EngineKind::Homing => {
            let body = upstream.get(&member.uri("/homing/info"), timeout).await?;
            homing(member, &body)
        }
        EngineKind::Vllm => {
            let models = upstream.get(&member.uri("/v1/models"), timeout).await?;
            let metrics = upstream.get(&member.uri("/metrics"), timeout).await?;
            let metrics = metrics_of(member, &metrics);
            let mut known = vllm(member, &models, &metrics)?;
            if known.endpoints.events.is_none() {
                // A release without the page answers 404: then there are no events.
                let page = upstream.get(&member.uri("/kv_event_sources"), timeout).await;
                let sources = page
                    .ok()
                    .and_then(|page| serde_json::from_slice::<VllmSources>(&page).ok());
                known.endpoints = endpoints_of(member, &sources.unwrap_or_default());
                known.info.kv_events = known.endpoints.events.is_some();
            }
            Ok(known)
        }
        EngineKind::Sglang => sglang::discover(member, upstream, timeout).await,
    }
}

fn homing(member: &Member, body: &[u8]) -> Result<Known, String> {
    let info: HomingInfo =
        serde_json::from_slice(body).map_err(|error| format!("expected `/homing/info` of a worker: {error}"))?;
    let card = ModelCard {
        id: info.model,
        object: "model".to_owned(),
        created: 0,
        owned_by: "homing".to_owned(),
        max_model_len: Some(info.max_context_tokens),
    };
    let spec = &member.spec;
    let can = |name: &str| info.extensions.iter().any(|extension| extension == name);
    Ok(Known {
        extensions: Extensions {
            tells_room: can("probe"),
            renewable_lease: (can("renew") && info.export_lease_ms > 0)
                .then(|| Duration::from_millis(info.export_lease_ms)),
        },
        info: WorkerInfo {
            id: member.id,
            name: member.name.clone(),
            role: spec.role.unwrap_or(info.role),
            epoch: info.epoch,
            kv_tokens: spec.kv_tokens.unwrap_or(info.kv_tokens),
            max_context_tokens: info.max_context_tokens,
            transfers: spec.transfers.unwrap_or(true),
            kv_events: true,
            abilities: Abilities::default(),
        },
        models: vec![card],
        endpoints: KvEndpoints {
            events: configured_source(member)
                .or_else(|| Some(EventSource::Connect(endpoint(member, info.endpoints.kv_events)))),
            replay: spec
                .kv_replay
                .clone()
                .or_else(|| Some(endpoint(member, info.endpoints.kv_replay))),
        },
        sglang: None,
    })
}

/// A worker that listens on every address is reached where its HTTP is.
fn endpoint(member: &Member, address: SocketAddr) -> String {
    if !address.ip().is_unspecified() {
        return format!("tcp://{address}");
    }
    format!("tcp://{}:{}", member.host(), address.port())
}

/// Where the configuration says that its events come from; it was checked at the start.
fn configured_source(member: &Member) -> Option<EventSource> {
    member.spec.kv_events.as_ref()?.parse().ok()
}

/// An engine's metrics page; of a data-parallel server's page what this rank's engine says, and what all share.
pub(super) fn metrics_of(member: &Member, page: &[u8]) -> Metrics {
    let mut metrics = Metrics::parse(&String::from_utf8_lossy(page));
    if let Some(rank) = member.spec.data_parallel_rank {
        let rank = rank.to_string();
        let label = match member.spec.kind {
            EngineKind::Homing | EngineKind::Vllm => "engine",
            EngineKind::Sglang => RANK_LABEL,
        };
        metrics
            .samples
            .retain(|sample| sample.label(label).is_none_or(|engine| engine == rank));
    }
    metrics
}

/// Where a vLLM says that its events come from. What it cannot say alone is said to whoever configures it, once.
fn endpoints_of(member: &Member, sources: &VllmSources) -> KvEndpoints {
    let rank = member.spec.data_parallel_rank;
    let source = match (rank, sources.len()) {
        (Some(rank), _) => sources.get(&rank),
        (None, 0 | 1) => sources.values().next(),
        (None, ranks) => {
            tracing::warn!(
                worker = member.name,
                ranks,
                "a data-parallel server: list it once for each rank with `data_parallel_rank`, its cache is not followed"
            );
            None
        }
    };
    let Some(VllmSource {
        endpoint: Some(bound),
        replay_endpoint,
    }) = source.cloned()
    else {
        return KvEndpoints::default();
    };
    let host = member.host();
    let events = reached_at(&bound, &host).map(EventSource::Connect);
    if events.is_none() {
        tracing::warn!(
            worker = member.name,
            endpoint = bound,
            "it connects there with its kv events: set `kv_events = \"bind:..\"` if that is the router"
        );
    }
    KvEndpoints {
        events,
        // This socket an engine binds whatever its form.
        replay: member.spec.kv_replay.clone().or_else(|| {
            let bound = replay_endpoint?;
            reached_at(&bound, &host).or(Some(bound))
        }),
    }
}

fn vllm(member: &Member, models: &[u8], metrics: &Metrics) -> Result<Known, String> {
    let models: ModelList =
        serde_json::from_slice(models).map_err(|error| format!("expected `/v1/models` of an engine: {error}"))?;
    let context = models.data.iter().filter_map(|model| model.max_model_len).max();
    let max_context_tokens = context.ok_or("expected `max_model_len` in `/v1/models`, found none")?;
    let caching = metrics.label(names::CACHE_CONFIG_INFO, "enable_prefix_caching");
    if caching.is_some_and(|caching| caching.eq_ignore_ascii_case("false")) {
        return Err("refused: expected an engine that caches prefixes, found `enable_prefix_caching` false".to_owned());
    }
    let spec = &member.spec;
    let kv_tokens = spec.kv_tokens.or_else(|| pool_tokens(metrics)).unwrap_or_else(|| {
        tracing::warn!(
            worker = member.name,
            "its metrics do not say the size of its kv pool, set `kv_tokens`"
        );
        u64::from(max_context_tokens)
    });
    Ok(Known {
        info: WorkerInfo {
            id: member.id,
            name: member.name.clone(),
            role: spec.role.unwrap_or(Role::Both),
            epoch: epoch_of(metrics).unwrap_or_default(),
            kv_tokens,
            max_context_tokens,
            // A role of its own is given only to an engine that was started with a KV connector.
            transfers: spec
                .transfers
                .unwrap_or(spec.role.is_some_and(|role| role != Role::Both)),
            kv_events: spec.kv_events.is_some(),
            abilities: Abilities::default(),
        },
        models: models.data,
        endpoints: KvEndpoints {
            events: configured_source(member),
            replay: spec.kv_replay.clone(),
        },
        sglang: None,
        extensions: Extensions::default(),
    })
}

/// The size of an engine's pool in tokens, as vLLM's metrics say it: over all engines of a data-parallel server.
fn pool_tokens(metrics: &Metrics) -> Option<u64> {
    let number =
        |sample: &homing_wire::metrics_text::Sample, label| -> Option<u64> { sample.label(label)?.parse().ok() };
    let of_engine = |sample| {
        let blocks = || Some(number(sample, "num_gpu_blocks")?.saturating_mul(number(sample, "block_size")?));
        number(sample, "kv_cache_size_tokens").or_else(blocks)
    };
    metrics
        .of(names::CACHE_CONFIG_INFO)
        .map(of_engine)
        .sum::<Option<u64>>()
        .filter(|tokens| *tokens > 0)
}

/// A life of an engine that does not name its lives: when its process started, in milliseconds since 1970.
pub(super) fn epoch_of(metrics: &Metrics) -> Option<BootEpoch> {
    let start = metrics.of(names::PROCESS_START_TIME).next()?.value * 1e3;
    // Above 0 and below 2^53 the conversion is exact; anything else is no time.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the range was checked"
    )]
    (start > 0.0 && start < 9e15).then_some(BootEpoch(start as u64))
}

/// An engine's own figures of its load.
pub(super) fn load_of(member: &Member, metrics: &Metrics, kv_tokens: u64) -> Option<LoadReport> {
    match member.spec.kind {
        EngineKind::Homing | EngineKind::Vllm => vllm_load(member.id, metrics, kv_tokens),
        EngineKind::Sglang => sglang::load_of(member.id, metrics, kv_tokens),
    }
}

fn vllm_load(worker: WorkerId, metrics: &Metrics, kv_tokens: u64) -> Option<LoadReport> {
    let engines = metrics.of(names::KV_CACHE_USAGE).count().max(1);
    let usage = metrics.sum(names::KV_CACHE_USAGE)?.clamp(0.0, f64::from(u32::MAX)) / engines as f64;
    Some(LoadReport {
        worker,
        running: whole(metrics.sum(names::REQUESTS_RUNNING)?),
        waiting: whole(metrics.sum(names::REQUESTS_WAITING)?),
        kv_tokens_used: u64::from(whole(usage * kv_tokens as f64)),
        transfer_queue: 0,
        retracted: 0,
    })
}

pub(super) fn whole(value: f64) -> u32 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a float's cast saturates"
    )]
    let whole = value.round() as u32;
    whole
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::WorkerSpec;
    use crate::fleet::Fleet;

    const PAGE: &str = "process_start_time_seconds 1.79599742601e+09\n\
        vllm:num_requests_running{engine=\"0\"} 3.0\n\
        vllm:num_requests_waiting{engine=\"0\"} 2.0\n\
        vllm:kv_cache_usage_perc{engine=\"0\"} 0.5\n\
        vllm:cache_config_info{block_size=\"128\",num_gpu_blocks=\"4096\"} 1.0\n";

    #[test]
    fn vllm_is_known_by_its_pages() {
        let spec = WorkerSpec {
            role: Some(Role::Prefill),
            ..WorkerSpec::new("http://h:1", EngineKind::Vllm)
        };
        let fleet = Fleet::new(&[spec]);
        let models = br#"{"object":"list","data":[{"id":"m","object":"model","max_model_len":16384}]}"#;
        let known = vllm(&fleet.members()[0], models, &Metrics::parse(PAGE)).unwrap();
        assert_eq!((known.info.kv_tokens, known.info.max_context_tokens), (524_288, 16_384));
        assert_eq!(known.info.epoch, BootEpoch(1_795_997_426_010));
        assert!(known.info.transfers && !known.info.kv_events);
        assert!(
            vllm(
                &fleet.members()[0],
                br#"{"object":"list","data":[]}"#,
                &Metrics::parse(PAGE)
            )
            .is_err()
        );
    }

    #[test]
    fn an_engine_without_a_prefix_cache_is_refused() {
        let fleet = Fleet::new(&[WorkerSpec::new("http://h:1", EngineKind::Vllm)]);
        let models = br#"{"object":"list","data":[{"id":"m","object":"model","max_model_len":16384}]}"#;
        let page = PAGE.replace("{block_size", "{enable_prefix_caching=\"False\",block_size");
        let error = vllm(&fleet.members()[0], models, &Metrics::parse(&page)).unwrap_err();
        assert!(error.contains("`enable_prefix_caching` false"), "{error}");
    }

    #[test]
    fn an_engine_says_where_its_events_come_from() {
        let check = |rank: Option<u32>, page: &str, expected: Option<(&str, Option<&str>)>| {
            let spec = WorkerSpec {
                data_parallel_rank: rank,
                ..WorkerSpec::new("http://10.0.0.7:1", EngineKind::Vllm)
            };
            let fleet = Fleet::new(&[spec]);
            let found = endpoints_of(&fleet.members()[0], &serde_json::from_str(page).unwrap());
            let expected = expected.map_or_else(KvEndpoints::default, |(events, replay)| KvEndpoints {
                events: Some(EventSource::Connect(events.to_owned())),
                replay: replay.map(str::to_owned),
            });
            assert_eq!(found, expected, "{page}");
        };
        let one =
            r#"{"0":{"enable_kv_cache_events":true,"endpoint":"ipc:///x","replay_endpoint":"tcp://127.0.0.1:6"}}"#;
        check(None, one, Some(("ipc:///x", Some("tcp://127.0.0.1:6"))));
        let two = r#"{"0":{"endpoint":"tcp://*:5","replay_endpoint":null},"1":{"endpoint":"tcp://*:6","replay_endpoint":"tcp://*:8"}}"#;
        check(Some(1), two, Some(("tcp://10.0.0.7:6", Some("tcp://10.0.0.7:8"))));
        check(Some(2), two, None);
        check(None, two, None);
        check(None, "{}", None);
    }

    #[test]
    fn a_ranks_figures_are_its_own() {
        let spec = WorkerSpec {
            data_parallel_rank: Some(1),
            ..WorkerSpec::new("http://h:1", EngineKind::Vllm)
        };
        let page = "process_start_time_seconds 1.5e9\n\
            vllm:num_requests_running{engine=\"0\"} 3\nvllm:num_requests_running{engine=\"1\"} 4\n\
            vllm:num_requests_waiting{engine=\"0\"} 3\nvllm:num_requests_waiting{engine=\"1\"} 0\n\
            vllm:kv_cache_usage_perc{engine=\"0\"} 1\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.25\n";
        let metrics = metrics_of(&Fleet::new(&[spec]).members()[0], page.as_bytes());
        let load = vllm_load(WorkerId(0), &metrics, 1_000).unwrap();
        assert_eq!((load.running, load.waiting, load.kv_tokens_used), (4, 0, 250));
        assert!(epoch_of(&metrics).is_some());
    }

    #[test]
    fn load_is_read_from_metrics() {
        let load = vllm_load(WorkerId(0), &Metrics::parse(PAGE), 1_000).unwrap();
        assert_eq!((load.running, load.waiting, load.kv_tokens_used), (3, 2, 500));
        assert_eq!(vllm_load(WorkerId(0), &Metrics::parse("nothing here"), 1_000), None);
    }

    #[test]
    fn an_embedded_worker_says_all_of_it() {
        let fleet = Fleet::new(&[WorkerSpec::new("http://10.0.0.7:1", EngineKind::Homing)]);
        let body = br#"{"name":"d0","role":"decode","epoch":7,"model":"tiny","block_size":16,"kv_tokens":4096,
            "max_context_tokens":2048,"endpoints":{"http":"10.0.0.7:1","kv_events":"0.0.0.0:5","kv_replay":"10.0.0.7:6",
            "kv_transfer":"10.0.0.7:8"},"kv_events_topic":"kv@d0@tiny","step_model":null,"version":"0.1.0"}"#;
        let known = homing(&fleet.members()[0], body).unwrap();
        assert_eq!((known.info.role, known.info.epoch), (Role::Decode, BootEpoch(7)));
        assert_eq!(
            known.endpoints.events,
            Some(EventSource::Connect("tcp://10.0.0.7:5".to_owned()))
        );
        assert_eq!(known.endpoints.replay.as_deref(), Some("tcp://10.0.0.7:6"));
        assert_eq!(known.extensions, Extensions::default(), "an earlier one says none");
        let body = String::from_utf8(body.to_vec()).unwrap();
        let body = body.replacen(
            '{',
            r#"{"extensions":["probe","renew","a-later-one"],"export_lease_ms":400,"#,
            1,
        );
        let known = homing(&fleet.members()[0], body.as_bytes()).unwrap();
        let expected = Extensions {
            tells_room: true,
            renewable_lease: Some(Duration::from_millis(400)),
        };
        assert_eq!(known.extensions, expected);
    }
}
