//! The cluster on paper: which workers there are, what they may do, how much KV they hold, and how fast they are.
//!
//! A preset names a GPU, a count and a shape (`h200x8-2p6d`); parameters follow after colons; a TOML text says
//! everything itself. What a step costs is the engine's `StepModel`; nothing here knows about policies or traces.

mod parameters;
mod values;

use crate::nearest::nearest;
use crate::stack::Stack;
use homing_engine::{StepModel, StepModelError};
use homing_router::event::Role;
use homing_units::Duration;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use values::{bandwidth, positive};

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
    positive("kv_tokens", kv_tokens)?;
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
mod tests {
    use super::*;
    use crate::stack::LoopAdmission;
    use homing_engine::api::EngineKind;

    #[test]
    fn presets_have_their_workers() {
        let check = |spec: &str, names: &str, kv_tokens: u32, nic: f64| {
            let cluster = Cluster::preset(spec).expect(spec);
            let found: Vec<&str> = cluster.workers.iter().map(|worker| worker.name.as_str()).collect();
            assert_eq!(found.join(" "), names, "{spec}");
            assert!(
                cluster.workers.iter().all(|worker| worker.kv_tokens == kv_tokens),
                "{spec}"
            );
            assert!((cluster.step_model.nic_bytes_per_second - nic).abs() < 1.0, "{spec}");
            assert_eq!(cluster.name, spec);
        };
        check("h100x8-dp", "w0 w1 w2 w3 w4 w5 w6 w7", 92_000, 40e9);
        check("h100x8-2p6d", "p0 p1 d0 d1 d2 d3 d4 d5", 92_000, 40e9);
        check("h200x8-2p6d", "p0 p1 d0 d1 d2 d3 d4 d5", 700_000, 40e9);
        check("h200x4-1p3d", "p0 d0 d1 d2", 700_000, 40e9);
        check(
            "h20x8-dp:kv=293K:nic=10GBps:engine=block:host=0",
            "w0 w1 w2 w3 w4 w5 w6 w7",
            293_000,
            10e9,
        );
        check("h100x2-1p1d:kv=136000:nic=400Gbps", "p0 d0", 136_000, 50e9);
    }

    #[test]
    fn what_is_wrong_is_told_what_was_expected() {
        let check = |spec: &str, expected: &str| {
            let error = Cluster::preset(spec).expect_err(spec).to_string();
            assert!(error.contains(expected), "{spec}: {error}");
        };
        check("h300x8-dp", "did you mean `h100x8-dp`?");
        check("h200x8-2p6", "did you mean `h200x8-2p6d`?");
        check("h100", "did you mean `h100x8-dp`?");
        check("h100x8-2p5d", "a shape that uses every GPU");
        check("h100x2-0p2d", "no worker that prefills");
        check("h100x2-2p0d", "no worker that decodes");
        check("h100x9999-dp", "1,024 in all at most");
        check("h100x0-dp", "no worker that prefills");
        check("h100x8-dp:kv=lots", "`kv` is `lots`, expected a count of tokens");
        check("h100x8-dp:kv=0", "at least 1");
        check("h100x8-dp:kv=1K:kv=2K", "expected `name=value`, each name once");
        check("h100x8-dp:kv", "expected `name=value`, each name once");
        check("h100x8-dp:nic=40", "expected a bandwidth such as `40GBps`");
        check("h100x8-dp:pcie=0GBps", "`pcie` is `0GBps`, expected a bandwidth");
        check("h100x8-dp:rho=0.9", "expected it together with `engine=session-slot`");
        check("h100x8-dp:rho=2:engine=session-slot", "expected a share from 0 to 1");
        check("h100x8-dp:transfer_timeout=32", "expected a time such as `32s`");
        check(
            "h100x8-dp:dead_peers=on",
            "expected it together with `transfer_timeout=32s`",
        );
        check("h100x8-dp:probe=2ms", "expected it together with `admission=loop`");
        check("h100x8-dp:admission=loop:poll=1", "expected a frequency from `0.001Hz`");
        check("h100x8-dp:admission=lop", "expected `snapshot` or `loop`");
        check(
            "h100x8-dp:engine=sesion-slot",
            "no engine `sesion-slot`, did you mean `session-slot`?",
        );
        check("h100x8-dp:host=64", "`host` is `64`, expected bytes such as `64GiB`");
        check("h100x8-dp:staging=yes", "expected `on` or `off`");
        check(
            "h100x8-dp:transfertimeout=32s",
            "did you mean `transfer_timeout`? (known: `kv=136K`",
        );
    }

    #[test]
    fn parameters_set_what_they_say_in_any_order() {
        let check = |spec: &str, same: &str| {
            let (mut left, right) = (Cluster::preset(spec).expect(spec), Cluster::preset(same).expect(same));
            left.name.clone_from(&right.name);
            assert_eq!(left, right, "{spec} and {same}");
        };
        check(
            "h100x8-2p6d:rho=0.9:engine=session-slot",
            "h100x8-2p6d:engine=session-slot:rho=0.9",
        );
        check(
            "h100x8-dp:engine=block:host=0:staging=off:admission=snapshot:transfer_timeout=off:dead_peers=off",
            "h100x8-dp",
        );
        check(
            "h100x8-dp:admission=loop",
            "h100x8-dp:poll=off:probe=2ms:admission=loop",
        );
        let spec = "h100x8-2p6d:chunk=1400:host=64GiB:pcie=45GBps:front_end=30ms:front_end_token=1us:engine=session-slot:soft_cap=8\
                    :correction_crash=on:transfer_timeout=32s:dead_peers=60s:admission=loop:probe=5ms:poll=0.5Hz";
        let cluster = Cluster::preset(spec).expect(spec);
        let EngineKind::SessionSlot(slots) = cluster.stack.engine else {
            panic!("{:?}", cluster.stack.engine)
        };
        assert_eq!((slots.soft_cap, slots.correction_crash), (Some(8), true));
        assert_eq!((cluster.max_batch_tokens, cluster.host_bytes), (1400, 64 << 30));
        assert_eq!(cluster.front_end_per_token, Duration::from_micros(1));
        assert!(
            (cluster.step_model.front_end_ms - 30.0).abs() < 1e-9 && (cluster.pcie_bytes_per_second - 45e9).abs() < 1.0
        );
        assert_eq!(cluster.stack.transfer_timeout, Some(Duration::from_secs(32)));
        assert_eq!(cluster.stack.dead_peers, Some(Duration::from_secs(60)));
        let admission = LoopAdmission {
            probe: Duration::from_millis(5),
            poll_every: Some(Duration::from_secs(2)),
        };
        assert_eq!(cluster.stack.admission, Some(admission));
    }

    #[test]
    fn a_file_says_everything_itself() {
        let cluster = Cluster::from_toml(
            "mine",
            r#"
                step_model = "h200-qwen3-30b"
                nic = "10GBps"
                max_batch_tokens = 1400
                [[workers]]
                role = "prefill"
                count = 1
                kv_tokens = 300000
                [[workers]]
                role = "both"
                count = 2
            "#,
        )
        .expect("a good file");
        let names: Vec<_> = cluster
            .workers
            .iter()
            .map(|worker| (worker.name.as_str(), worker.kv_tokens))
            .collect();
        assert_eq!(names, [("p0", 300_000), ("w0", 738_000), ("w1", 738_000)]);
        assert_eq!(
            (cluster.max_batch_tokens, cluster.largest_decode_tokens()),
            (1400, 738_000)
        );

        let check = |text: &str, expected: &str| {
            let error = Cluster::from_toml("mine", text).expect_err(text).to_string();
            assert!(error.contains(expected), "{text}: {error}");
        };
        check("", "missing field `step_model`");
        check("step_model = \"x\"\nworkers = []", "no step-time profile `x`");
        check(
            "step_model = \"h200-qwen3-30b\"\nworkers = []",
            "no worker that prefills",
        );
        check(
            "step_model = \"h200-qwen3-30b\"\nworkers = []\nnic = \"fast\"",
            "expected a bandwidth",
        );
        check(
            "[step_model]\nmodel = \"x\"\n[[workers]]\nrole = \"both\"\ncount = 1",
            "broken step-time model",
        );
        check(
            "step_model = \"h200-qwen3-30b\"\n[[workers]]\nrole = \"any\"\ncount = 1",
            "unknown variant `any`",
        );
    }
}
