//! The engines as the shell addresses them: where they are, what they are called, what they said of themselves.
//!
//! Read by every request without a lock. What an engine is doing and whether it may be used is the core's knowledge;
//! here is only what is needed to send it something, and what the fleet as a whole can serve.

use crate::config::{EngineKind, WorkerSpec};
use crate::engine::{EventSource, Server};
use crate::proxy::dialect::Dialect;
use arc_swap::ArcSwapOption;
use homing_router::event::{Role, WorkerInfo};
use homing_units::{BootEpoch, WorkerId};
use homing_wire::openai::{ApiError, ModelCard};
use homing_wire::transfer_offer::Life;
use http::{HeaderName, HeaderValue};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// All engines of the configuration, by id.
pub(crate) struct Fleet {
    members: Vec<Member>,
    /// Held while an engine is compared with its peers and taken: of two that do not fit each other one joins.
    joining: Mutex<()>,
}

/// One engine.
pub(crate) struct Member {
    pub(crate) id: WorkerId,
    pub(crate) name: String,
    /// Its address without a slash at the end.
    url: String,
    pub(crate) spec: WorkerSpec,
    known: ArcSwapOption<Known>,
    reachable: AtomicBool,
    /// Why it could not join when it was last tried.
    problem: ArcSwapOption<String>,
}

/// What an engine said of itself when it joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) info: WorkerInfo,
    /// What it serves.
    pub(crate) models: Vec<ModelCard>,
    /// Where it publishes and replays its KV events.
    pub(crate) endpoints: KvEndpoints,
    /// What an SGLang server says beyond that; `None` for other kinds.
    pub(crate) sglang: Option<Server>,
    /// What it can be asked beyond its dialect.
    pub(crate) extensions: Extensions,
}

/// What an engine can be asked beyond its dialect, as it says itself. Nothing, where it says nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Extensions {
    /// Whether it tells how much room it has.
    pub(crate) tells_room: bool,
    /// How long it holds KV for a puller that does not come, where that can be renewed.
    pub(crate) renewable_lease: Option<Duration>,
}

impl Known {
    /// Whether it serves a model that a peer serves: engines of one fleet answer for each other.
    fn serves_what(&self, peer: &Self) -> bool {
        self.models
            .iter()
            .any(|model| peer.models.iter().any(|of_peer| of_peer.id == model.id))
    }

    /// Why it cannot be in one fleet with a peer, if so.
    pub(crate) fn misfit(&self, peer: &Self) -> Option<String> {
        let name = &peer.info.name;
        if !self.serves_what(peer) {
            return Some(format!(
                "refused: expected one of the models that {name} serves, `{}`, found `{}`",
                peer.model_names(),
                self.model_names()
            ));
        }
        match (&self.sglang, &peer.sglang) {
            (Some(own), Some(of_peer)) => own.misfit(of_peer, name),
            (None, None) => None,
            (Some(_), None) | (None, Some(_)) => (self.info.transfers && peer.info.transfers).then(|| {
                format!(
                    "refused: expected an engine of the kind of {name}, since engines of two kinds cannot exchange kv"
                )
            }),
        }
    }

    /// What it serves, for a message.
    fn model_names(&self) -> String {
        let names: Vec<&str> = self.models.iter().map(|model| model.id.as_str()).collect();
        names.join("`, `")
    }
}

/// Where KV events come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KvEndpoints {
    pub(crate) events: Option<EventSource>,
    pub(crate) replay: Option<String>,
}

impl Fleet {
    pub(crate) fn new(specs: &[WorkerSpec]) -> Self {
        let mut counts = [0_u32; 3];
        let members = (0..)
            .zip(specs)
            .map(|(id, spec)| Member::new(WorkerId(id), spec, &mut counts))
            .collect();
        Self {
            members,
            joining: Mutex::new(()),
        }
    }

    /// Takes an engine in, or a new life of it, where it fits its peers.
    ///
    /// # Errors
    /// It could not answer for a peer, or a peer for it: what was expected, for the log.
    pub(crate) fn admit(&self, worker: WorkerId, known: &Known) -> Result<(), String> {
        let _alone = self.joining.lock().unwrap_or_else(PoisonError::into_inner);
        let peers = self
            .members
            .iter()
            .filter(|peer| peer.id != worker && peer.is_reachable());
        if let Some(reason) = peers.filter_map(Member::known).find_map(|peer| known.misfit(&peer)) {
            return Err(reason);
        }
        if let Some(member) = self.member(worker) {
            member.set_known(known.clone());
            member.set_reachable(true);
        }
        Ok(())
    }

    pub(crate) fn members(&self) -> &[Member] {
        &self.members
    }

    fn member(&self, worker: WorkerId) -> Option<&Member> {
        self.members.get(worker.0 as usize)
    }

    /// A worker's name.
    pub(crate) fn name(&self, worker: WorkerId) -> String {
        self.member(worker)
            .map_or_else(|| worker.to_string(), |member| member.name.clone())
    }

    /// The address of a path of a worker.
    pub(crate) fn uri(&self, worker: WorkerId, path: &str) -> String {
        self.member(worker).map(|member| member.uri(path)).unwrap_or_default()
    }

    /// The life that a worker is known to live.
    pub(crate) fn life(&self, worker: WorkerId) -> Life {
        let known = self.member(worker).and_then(Member::known);
        Life {
            worker,
            epoch: known.map_or_else(BootEpoch::default, |known| known.info.epoch),
        }
    }

    /// Whether a worker is to be asked in this dialect.
    pub(crate) fn speaks(&self, worker: WorkerId, dialect: Dialect) -> bool {
        self.member(worker)
            .is_some_and(|member| member.spec.native_apis && dialect.is_spoken_by(member.spec.kind))
    }

    /// Whether a worker is one of ours.
    pub(crate) fn is_embedded(&self, worker: WorkerId) -> bool {
        self.member(worker)
            .is_some_and(|member| member.spec.kind == EngineKind::Homing)
    }

    /// Where a worker is told that nobody will pull what it holds; `None` for engines that have no such call.
    pub(crate) fn release_uri(&self, worker: WorkerId) -> Option<String> {
        self.is_embedded(worker).then(|| self.uri(worker, "/homing/release"))
    }

    /// Where a worker is told that what it holds is wanted still, and how long it holds it otherwise; `None` where it cannot be
    /// told.
    pub(crate) fn renewal(&self, worker: WorkerId) -> Option<(String, Duration)> {
        let member = self.member(worker)?;
        let lease = member.known()?.extensions.renewable_lease?;
        Some((member.uri("/homing/renew"), lease))
    }

    /// Which engine of a data-parallel server a worker is.
    pub(crate) fn rank(&self, worker: WorkerId) -> Option<u32> {
        self.member(worker)?.spec.data_parallel_rank
    }

    /// The header that says which engine of a data-parallel server a leg is for.
    pub(crate) fn rank_header(&self, worker: WorkerId) -> Option<(HeaderName, HeaderValue)> {
        let rank = self.rank(worker)?;
        Some((HeaderName::from_static("x-data-parallel-rank"), HeaderValue::from(rank)))
    }

    /// What an SGLang server said of itself; `None` for workers of other kinds.
    pub(crate) fn sglang(&self, worker: WorkerId) -> Option<Server> {
        self.member(worker)?.known()?.sglang.clone()
    }

    /// Whether the cached tokens that a decode leg reports are those of the worker's own cache. vLLM reports for a leg that
    /// imports what the exporting worker had cached (0.32, `remote_prefill_cached_tokens`): that says nothing about its own.
    pub(crate) fn reports_own_cache(&self, worker: WorkerId, imports: bool) -> bool {
        !imports
            || self
                .member(worker)
                .is_some_and(|member| member.spec.kind == EngineKind::Homing)
    }

    /// Whether a worker tells by events what it holds.
    pub(crate) fn tells_its_cache(&self, worker: WorkerId) -> bool {
        let known = self.member(worker).and_then(Member::known);
        known.is_some_and(|known| known.info.kv_events)
    }

    /// The workers that answered their last probe.
    pub(crate) fn reachable(&self) -> Vec<WorkerId> {
        self.members
            .iter()
            .filter(|member| member.is_reachable())
            .map(|member| member.id)
            .collect()
    }

    /// The models that are served, each once.
    pub(crate) fn models(&self) -> Vec<ModelCard> {
        let mut models: Vec<ModelCard> = Vec::new();
        for model in self
            .members
            .iter()
            .filter_map(|member| member.known.load_full())
            .flat_map(|known| known.models.clone())
        {
            if models.iter().all(|known| known.id != model.id) {
                models.push(model);
            }
        }
        models
    }

    /// The model that a request means: the one it names, or the only one.
    ///
    /// # Errors
    /// It names one that is not served (404). While no worker has been reached everything passes: what to do with a
    /// request that nobody can serve is the core's answer.
    pub(crate) fn served_model(&self, named: Option<&str>) -> Result<String, ApiError> {
        let models = self.models();
        match named {
            None => Ok(models.first().map(|model| model.id.clone()).unwrap_or_default()),
            Some(name) if models.is_empty() || models.iter().any(|model| model.id == name) => Ok(name.to_owned()),
            Some(name) => {
                let served: Vec<&str> = models.iter().map(|model| model.id.as_str()).collect();
                Err(ApiError::unknown_model(name, &served.join("`, `")))
            }
        }
    }

    /// The longest prompt and output that any worker takes, in tokens.
    pub(crate) fn longest_context(&self) -> Option<u32> {
        let known = self.members.iter().filter_map(|member| member.known.load_full());
        known.map(|known| known.info.max_context_tokens).max()
    }

    /// Whether engines of this fleet turn a model's text into tool calls and reasoning.
    pub(crate) fn parses_output(&self) -> bool {
        self.members.iter().any(|member| member.spec.kind != EngineKind::Homing)
    }
}

impl Member {
    fn new(id: WorkerId, spec: &WorkerSpec, counts: &mut [u32; 3]) -> Self {
        let (letter, count) = match spec.role.unwrap_or(Role::Both) {
            Role::Prefill => ('p', &mut counts[0]),
            Role::Decode => ('d', &mut counts[1]),
            Role::Both => ('w', &mut counts[2]),
        };
        let name = spec.name.clone().unwrap_or_else(|| format!("{letter}{count}"));
        *count += 1;
        Self {
            id,
            name,
            url: spec.url.trim_end_matches('/').to_owned(),
            spec: spec.clone(),
            known: ArcSwapOption::empty(),
            reachable: AtomicBool::new(false),
            problem: ArcSwapOption::empty(),
        }
    }

    pub(crate) fn uri(&self, path: &str) -> String {
        format!("{}{path}", self.url)
    }

    /// The host of its address, an IPv6 address in brackets.
    pub(crate) fn host(&self) -> String {
        let uri: http::Uri = self.url.parse().unwrap_or_default();
        uri.host().unwrap_or("127.0.0.1").to_owned()
    }

    pub(crate) fn known(&self) -> Option<Arc<Known>> {
        self.known.load_full()
    }

    pub(crate) fn problem(&self) -> Option<Arc<String>> {
        self.problem.load_full()
    }

    pub(crate) fn set_problem(&self, problem: String) {
        self.problem.store(Some(Arc::new(problem)));
    }

    pub(crate) fn set_known(&self, known: Known) {
        self.known.store(Some(Arc::new(known)));
    }

    pub(crate) fn set_reachable(&self, reachable: bool) {
        self.reachable.store(reachable, Ordering::Relaxed);
    }

    pub(crate) fn is_reachable(&self) -> bool {
        self.reachable.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_roles() {
        let spec = |role, name: Option<&str>| WorkerSpec {
            role,
            name: name.map(str::to_owned),
            ..WorkerSpec::new("http://h/", EngineKind::Vllm)
        };
        let specs = [
            spec(Some(Role::Prefill), None),
            spec(Some(Role::Decode), None),
            spec(None, None),
            spec(Some(Role::Decode), Some("big")),
            spec(Some(Role::Decode), None),
        ];
        let fleet = Fleet::new(&specs);
        let names: Vec<&str> = fleet.members().iter().map(|member| member.name.as_str()).collect();
        assert_eq!(names, ["p0", "d0", "w0", "big", "d2"]);
        assert_eq!(fleet.uri(WorkerId(1), "/health"), "http://h/health");
        assert_eq!(
            fleet.served_model(Some("anything")).unwrap(),
            "anything",
            "no worker has said what it serves"
        );
    }

    #[test]
    fn a_rank_is_addressed_and_an_import_says_nothing_of_its_cache() {
        let ranked = WorkerSpec {
            data_parallel_rank: Some(3),
            ..WorkerSpec::new("http://h", EngineKind::Vllm)
        };
        let fleet = Fleet::new(&[ranked, WorkerSpec::new("http://h", EngineKind::Homing)]);
        let (name, value) = fleet.rank_header(WorkerId(0)).unwrap();
        assert_eq!((name.as_str(), value.to_str().unwrap()), ("x-data-parallel-rank", "3"));
        assert_eq!(fleet.rank_header(WorkerId(1)), None);
        let owns = |worker, imports| fleet.reports_own_cache(WorkerId(worker), imports);
        assert_eq!(
            [owns(0, false), owns(0, true), owns(1, false), owns(1, true)],
            [true, false, true, true]
        );
    }
}
