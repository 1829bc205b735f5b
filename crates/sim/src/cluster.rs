//! The cluster on paper: which workers there are, what they may do, how much KV they hold, and how fast they are.
//!
//! A preset names a GPU, a count and a shape (`h200x8-2p6d`); parameters follow after colons; a TOML text says
//! everything itself. What a step costs is the engine's `StepModel`; nothing here knows about policies or traces.

mod parameters;
mod values;

use crate::nearest::nearest;
use crate::stack::Stack;
use homing_engine::api::Eviction;
use homing_engine::{StepModel, StepModelError};
use homing_router::event::Role;
use homing_units::Duration;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use values::{bandwidth, pool, positive};

/// Workers of one cluster; more are refused.
pub const MAX_WORKERS: u32 = 1024;

/// A cluster on paper.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// As it was asked for, parameters included.
    pub name: String,
    /// What steps and transfers cost on each worker.
    pub step_model: StepModel,
    /// Tokens in one engine step.
    pub max_batch_tokens: u32,
    /// Requests that run at once on a worker.
    pub max_running: u32,
    /// The workers, in the order of their ids.
    pub workers: Vec<WorkerSpec>,
    /// Host memory of each worker for KV that its pool evicts, in bytes; 0 for none.
    pub host_bytes: u64,
    /// Bandwidth between host memory and GPU, in bytes a second and direction.
    pub pcie_bytes_per_second: f64,
    /// KV from another worker lands in host memory and crosses PCIe after its last byte, as without GPU-direct RDMA.
    pub staging: bool,
    /// What a request pays for each token of its prompt before its first step, beside the step model's front end: the
    /// tokeniser and the copies of ids. 0 by default, for want of a published figure.
    pub front_end_per_token: Duration,
    /// Workers evict first what is worth least to keep, by the returns of sessions that they have seen, whatever the policy; by default the
    /// least recently used.
    pub expects_returns: bool,
    /// What of the papers' stack it has; nothing by default.
    pub stack: Stack,
}

/// A worker on paper.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerSpec {
    /// Its name in logs and reports: `p0`, `d0`, or `w0` for one that does both.
    pub name: String,
    /// What it may do.
    pub role: Role,
    /// Room for KV in tokens.
    pub kv_tokens: u32,
}

/// Why there is no such cluster. All of these are wrong input (exit code 2).
#[derive(Debug, Error)]
pub enum ClusterError {
    /// No preset has this name.
    #[error(
        "no cluster `{name}`, did you mean `{nearest}`? (known: {PRESETS}, another GPU, count and shape such as `h20x8-3p5d`, or a TOML file)"
    )]
    Unknown {
        /// The name.
        name: String,
        /// The most similar preset.
        nearest: &'static str,
    },
    /// A parameter that no cluster has.
    #[error("no cluster parameter `{name}`, did you mean `{nearest}`? (known: {known})")]
    UnknownParameter {
        /// Its name.
        name: String,
        /// The most similar one.
        nearest: &'static str,
        /// All, with examples.
        known: String,
    },
    /// An engine that there is not.
    #[error("no engine `{name}`, did you mean `{nearest}`? (known: `block`, `session-slot`, `vllm`)")]
    UnknownEngine {
        /// The name.
        name: String,
        /// The most similar one.
        nearest: &'static str,
    },
    /// A parameter that is not `name=value`, or is given twice.
    #[error("cluster parameter `{parameter}`: expected `name=value`, each name once")]
    Parameter {
        /// As it was given.
        parameter: String,
    },
    /// A parameter's value is wrong.
    #[error("cluster parameter `{name}` is `{value}`, expected {expected}")]
    Value {
        /// The parameter.
        name: &'static str,
        /// What was given.
        value: String,
        /// What was expected.
        expected: &'static str,
    },
    /// The TOML text is wrong.
    #[error("broken cluster file: {0}")]
    Toml(#[from] toml::de::Error),
    /// The step model is wrong.
    #[error(transparent)]
    StepModel(#[from] StepModelError),
    /// The workers are wrong.
    #[error("the cluster has {found}, expected {expected}")]
    Workers {
        /// What was given.
        found: String,
        /// What was expected.
        expected: &'static str,
    },
}

/// The presets that the documentation names.
pub const PRESETS: &str = "`h100x8-dp`, `h100x8-2p6d`, `h200x8-dp`, `h200x8-2p6d`, `h200x4-1p3d`, `h20x8-dp`";

/// A GPU of the presets: its name, its step-time profile with Qwen3-30B-A3B, its room for KV in tokens.
const GPUS: [(&str, &str, u32); 4] = [
    ("h100", "h100-qwen3-30b", 92_000),
    ("h200", "h200-qwen3-30b", 700_000),
    ("h20", "h20-qwen3-30b", 241_000),
    ("b200", "b200-qwen3-30b", 1_000_000),
];

/// Those that the documentation names, for a suggestion.
const PRESET_NAMES: [&str; 6] = [
    "h100x8-dp",
    "h100x8-2p6d",
    "h200x8-dp",
    "h200x8-2p6d",
    "h200x4-1p3d",
    "h20x8-dp",
];

/// PCIe 5 moves 45 to 54 GB a second between host memory and a GPU.
const DEFAULT_PCIE_BYTES_PER_SECOND: f64 = 50e9;
const DEFAULT_MAX_BATCH_TOKENS: u32 = 8192;
const DEFAULT_MAX_RUNNING: u32 = 256;

impl Cluster {
    /// A preset with its parameters, such as `h100x8-dp:kv=136000:nic=40GBps`.
    ///
    /// # Errors
    /// If the preset, a parameter or its value is unknown; the message lists what was expected.
    pub fn preset(spec: &str) -> Result<Self, ClusterError> {
        let mut parts = spec.split(':');
        let name = parts.next().unwrap_or_default();
        let mut cluster = Self::plain_preset(name)?;
        cluster.name = spec.to_owned();
        let given: Vec<(&str, &str)> = parts
            .map(|part| part.split_once('=').ok_or_else(|| parameters::malformed(part)))
            .collect::<Result<_, _>>()?;
        parameters::apply(&mut cluster, &given)?;
        Ok(cluster)
    }

    /// A cluster from a TOML text.
    ///
    /// # Errors
    /// If the text is no TOML, lacks or adds a key, or a figure makes no sense.
    pub fn from_toml(name: &str, text: &str) -> Result<Self, ClusterError> {
        let file: ClusterFile = toml::from_str(text)?;
        let mut step_model = match file.step_model {
            StepModelFile::Profile(profile) => StepModel::profile(&profile)?,
            // Through its text, because only that way is it validated.
            StepModelFile::Table(table) => StepModel::from_toml(&table.to_string())?,
        };
        if let Some(nic) = file.nic {
            step_model.nic_bytes_per_second = bandwidth("nic", &nic)?;
        }
        let mut workers = Vec::new();
        for group in &file.workers {
            let kv_tokens = group.kv_tokens.unwrap_or(step_model.kv_tokens);
            add_workers(&mut workers, group.role, group.count, kv_tokens)?;
        }
        let mut cluster = Self {
            max_batch_tokens: positive("max_batch_tokens", file.max_batch_tokens)?,
            max_running: positive("max_running", file.max_running)?,
            ..Self::plain(name, step_model, workers)
        };
        let texts: Vec<(String, String)> = file
            .parameters
            .into_iter()
            .map(|(name, value)| (name, text_of(value)))
            .collect();
        let given: Vec<(&str, &str)> = texts
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        parameters::apply(&mut cluster, &given)?;
        cluster.check_roles()?;
        Ok(cluster)
    }

    /// Room for KV of the largest worker that decodes, in tokens.
    #[must_use]
    pub fn largest_decode_tokens(&self) -> u32 {
        self.workers
            .iter()
            .filter(|worker| worker.role.decodes())
            .map(|worker| worker.kv_tokens)
            .max()
            .unwrap_or(0)
    }

    /// What its workers evict first.
    pub(crate) fn eviction(&self) -> Eviction {
        if !self.expects_returns {
            return Eviction::Lru;
        }
        Eviction::Expected {
            cost_doubles_after_tokens: self.step_model.cost_doubles_after_tokens(),
        }
    }

    fn plain_preset(name: &str) -> Result<Self, ClusterError> {
        let unknown = || ClusterError::Unknown {
            name: name.to_owned(),
            nearest: nearest(name, PRESET_NAMES.into_iter()).unwrap_or_default(),
        };
        let (size, shape) = name.split_once('-').ok_or_else(unknown)?;
        let (gpu, count) = size.split_once('x').ok_or_else(unknown)?;
        let count: u32 = count.parse().map_err(|_| unknown())?;
        let (_, profile, kv_tokens) = GPUS.iter().find(|(known, ..)| *known == gpu).ok_or_else(unknown)?;
        let mut workers = Vec::new();
        if shape == "dp" {
            add_workers(&mut workers, Role::Both, count, *kv_tokens)?;
        } else {
            let (prefill, decode) = split_shape(shape).ok_or_else(unknown)?;
            if prefill.checked_add(decode) != Some(count) {
                return Err(ClusterError::Workers {
                    found: format!("`{shape}` of `{count}` GPUs"),
                    expected: "a shape that uses every GPU",
                });
            }
            add_workers(&mut workers, Role::Prefill, prefill, *kv_tokens)?;
            add_workers(&mut workers, Role::Decode, decode, *kv_tokens)?;
        }
        let cluster = Self::plain(name, StepModel::profile(profile)?, workers);
        cluster.check_roles()?;
        Ok(cluster)
    }

    /// A cluster with nothing but its workers.
    fn plain(name: &str, step_model: StepModel, workers: Vec<WorkerSpec>) -> Self {
        Self {
            name: name.to_owned(),
            step_model,
            max_batch_tokens: DEFAULT_MAX_BATCH_TOKENS,
            max_running: DEFAULT_MAX_RUNNING,
            workers,
            host_bytes: 0,
            pcie_bytes_per_second: DEFAULT_PCIE_BYTES_PER_SECOND,
            staging: false,
            front_end_per_token: Duration::ZERO,
            expects_returns: false,
            stack: Stack::default(),
        }
    }

    fn check_roles(&self) -> Result<(), ClusterError> {
        let expected = "a worker that prefills and one that decodes";
        let some = |can: fn(Role) -> bool| self.workers.iter().any(|worker| can(worker.role));
        match (some(Role::prefills), some(Role::decodes)) {
            (true, true) => Ok(()),
            (false, _) => Err(ClusterError::Workers {
                found: "no worker that prefills".to_owned(),
                expected,
            }),
            (_, false) => Err(ClusterError::Workers {
                found: "no worker that decodes".to_owned(),
                expected,
            }),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClusterFile {
    step_model: StepModelFile,
    #[serde(default)]
    nic: Option<String>,
    #[serde(default = "default_max_batch_tokens")]
    max_batch_tokens: u32,
    #[serde(default = "default_max_running")]
    max_running: u32,
    #[serde(default)]
    parameters: toml::Table,
    workers: Vec<WorkerGroup>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum StepModelFile {
    Profile(String),
    Table(toml::Table),
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct WorkerGroup {
    role: Role,
    count: u32,
    #[serde(default)]
    kv_tokens: Option<u32>,
}

const fn default_max_batch_tokens() -> u32 {
    DEFAULT_MAX_BATCH_TOKENS
}

const fn default_max_running() -> u32 {
    DEFAULT_MAX_RUNNING
}

fn add_workers(workers: &mut Vec<WorkerSpec>, role: Role, count: u32, kv_tokens: u32) -> Result<(), ClusterError> {
    if u64::from(count) + workers.len() as u64 > u64::from(MAX_WORKERS) {
        return Err(ClusterError::Workers {
            found: format!("`{count}` more workers beside `{}`", workers.len()),
            expected: "1,024 in all at most",
        });
    }
    pool("kv_tokens", kv_tokens)?;
    let prefix = match role {
        Role::Prefill => 'p',
        Role::Decode => 'd',
        Role::Both => 'w',
    };
    let named = workers.iter().filter(|worker| worker.role == role).count();
    let names = (named..named + count as usize).map(|index| format!("{prefix}{index}"));
    workers.extend(names.map(|name| WorkerSpec { name, role, kv_tokens }));
    Ok(())
}

/// The counts of `2p6d`.
fn split_shape(shape: &str) -> Option<(u32, u32)> {
    let (prefill, decode) = shape.strip_suffix('d')?.split_once('p')?;
    Some((prefill.parse().ok()?, decode.parse().ok()?))
}

/// A parameter's value in a file as it is written after a preset.
fn text_of(value: toml::Value) -> String {
    match value {
        toml::Value::String(text) => text,
        toml::Value::Boolean(on) => if on { "on" } else { "off" }.to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests;
