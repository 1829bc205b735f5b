//! The engines as the shell addresses them: where they are, what they are called, what they said of themselves.
//!
//! Read by every request without a lock. What an engine is doing and whether it may be used is the core's knowledge;
//! here is only what is needed to send it something, and what the fleet as a whole can serve.

use crate::config::{EngineKind, WorkerSpec};
use crate::proxy::dialect::Dialect;
use arc_swap::ArcSwapOption;
use homing_router::event::{Role, WorkerInfo};
use homing_units::WorkerId;
use homing_wire::openai::{ApiError, ModelCard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// All engines of the configuration, by id.
pub(crate) struct Fleet {
    members: Vec<Member>,
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
}

/// What an engine said of itself when it joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) info: WorkerInfo,
    /// What it serves.
    pub(crate) models: Vec<ModelCard>,
    /// Where it publishes and replays its KV events.
    pub(crate) endpoints: KvEndpoints,
}

/// Where KV events come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KvEndpoints {
    pub(crate) events: Option<String>,
    pub(crate) replay: Option<String>,
}

impl Fleet {
    pub(crate) fn new(specs: &[WorkerSpec]) -> Self {
        let mut counts = [0_u32; 3];
        let members = (0..)
            .zip(specs)
            .map(|(id, spec)| Member::new(WorkerId(id), spec, &mut counts))
            .collect();
        Self { members }
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

    /// Whether a worker is to be asked in this dialect.
    pub(crate) fn speaks(&self, worker: WorkerId, dialect: Dialect) -> bool {
        self.member(worker)
            .is_some_and(|member| member.spec.native_apis && dialect.is_spoken_by(member.spec.kind))
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
        }
    }

    pub(crate) fn uri(&self, path: &str) -> String {
        format!("{}{path}", self.url)
    }

    pub(crate) fn known(&self) -> Option<Arc<Known>> {
        self.known.load_full()
    }

    pub(crate) fn set_known(&self, known: Known) {
        self.known.store(Some(Arc::new(known)));
    }

    pub(crate) fn set_reachable(&self, reachable: bool) {
        self.reachable.store(reachable, Ordering::Relaxed);
    }

    fn is_reachable(&self) -> bool {
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
}
