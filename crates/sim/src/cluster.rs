//! The cluster on paper: which workers there are, what they may do, how much KV they hold, and how fast they are.
//!
//! A preset names a GPU, a count and a shape (`h200x8-2p6d`); parameters follow after colons; a TOML text says
//! everything itself. What a step costs is the engine's `StepModel`; nothing here knows about policies or traces.

use crate::stack::{FOR_EVER, Stack};
use homing_engine::api::SlotConfig;
use homing_engine::{StepModel, StepModelError};
use homing_router::event::Role;
use homing_units::Duration;
use serde::{Deserialize, Serialize};
use thiserror::Error;

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
        "no cluster `{name}`, expected one of {PRESETS}, another GPU, count and shape such as `h20x8-3p5d`, or a TOML file"
    )]
    Unknown {
        /// The name.
        name: String,
    },
    /// A parameter that no cluster has.
    #[error(
        "cluster parameter `{parameter}`, expected one of `kv=136000`, `nic=40GBps`, `chunk=8192`, `host=0`, `engine=session-slot`, `rho=0.95`, `soft_cap=8`, `correction_crash=on`, `transfer_timeout=32s`, `dead_peers=on`, `probe=2ms`, `poll=20ms`"
    )]
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
    /// A part of `cli.md`'s contract that this version does not have.
    #[error("cluster parameter `{name}={value}` is not supported yet, expected {expected}")]
    NotYet {
        /// The parameter.
        name: &'static str,
        /// What was given.
        value: String,
        /// What works now.
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
        for parameter in parts {
            cluster.apply(parameter)?;
        }
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
            step_model.nic_bytes_per_second = bandwidth(&nic)?;
        }
        let mut workers = Vec::new();
        for group in &file.workers {
            let kv_tokens = group.kv_tokens.unwrap_or(step_model.kv_tokens);
            add_workers(&mut workers, group.role, group.count, kv_tokens)?;
        }
        let cluster = Self {
            name: name.to_owned(),
            step_model,
            max_batch_tokens: positive("max_batch_tokens", file.max_batch_tokens)?,
            max_running: positive("max_running", file.max_running)?,
            workers,
            stack: Stack::default(),
        };
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
        let unknown = || ClusterError::Unknown { name: name.to_owned() };
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
        let cluster = Self {
            name: name.to_owned(),
            step_model: StepModel::profile(profile)?,
            max_batch_tokens: DEFAULT_MAX_BATCH_TOKENS,
            max_running: DEFAULT_MAX_RUNNING,
            workers,
            stack: Stack::default(),
        };
        cluster.check_roles()?;
        Ok(cluster)
    }

    fn apply(&mut self, parameter: &str) -> Result<(), ClusterError> {
        let wrong = || ClusterError::Parameter {
            parameter: parameter.to_owned(),
        };
        let (name, value) = parameter.split_once('=').ok_or_else(wrong)?;
        match name {
            "kv" => {
                let kv_tokens = positive("kv", tokens(value)?)?;
                self.workers.iter_mut().for_each(|worker| worker.kv_tokens = kv_tokens);
            }
            "nic" => self.step_model.nic_bytes_per_second = bandwidth(value)?,
            "chunk" => self.max_batch_tokens = positive("chunk", tokens(value)?)?,
            "engine" => self.stack.slots = engine(value)?,
            "rho" => self.slots("rho")?.capacity_factor = share("rho", value)?,
            "soft_cap" => {
                let cap = tokens(value)?;
                self.slots("soft_cap")?.soft_cap = (cap > 0).then_some(cap);
            }
            "correction_crash" => self.slots("correction_crash")?.correction_crash = switch("correction_crash", value)?,
            "transfer_timeout" => self.stack.transfer_timeout = Some(duration("transfer_timeout", value)?),
            "dead_peers" => {
                self.stack.dead_peers = match value {
                    "off" => None,
                    "on" => Some(FOR_EVER),
                    _ => Some(duration("dead_peers", value)?),
                }
            }
            "probe" => self.stack.probe = duration("probe", value)?,
            "poll" => self.stack.poll = duration("poll", value)?,
            "host" if value == "0" => {}
            "host" => {
                let expected = "`host=0`: no KV in host memory";
                return Err(ClusterError::NotYet {
                    name: "host",
                    value: value.to_owned(),
                    expected,
                });
            }
            _ => return Err(wrong()),
        }
        Ok(())
    }

    /// The slots' rules, if there are slots.
    fn slots(&mut self, name: &'static str) -> Result<&mut SlotConfig, ClusterError> {
        self.stack.slots.as_mut().ok_or(ClusterError::Value {
            name,
            value: "given".to_owned(),
            expected: "it after `engine=session-slot`",
        })
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

fn positive(name: &'static str, value: u32) -> Result<u32, ClusterError> {
    match value {
        0 => Err(ClusterError::Value {
            name,
            value: "0".to_owned(),
            expected: "at least 1",
        }),
        value => Ok(value),
    }
}

/// A count of tokens: `92000`, `92K` or `1M`.
fn tokens(text: &str) -> Result<u32, ClusterError> {
    let (digits, factor) = match text.strip_suffix('K') {
        Some(digits) => (digits, 1_000),
        None => text.strip_suffix('M').map_or((text, 1), |digits| (digits, 1_000_000)),
    };
    digits
        .parse::<u32>()
        .ok()
        .and_then(|count| count.checked_mul(factor))
        .ok_or_else(|| ClusterError::Value {
            name: "kv",
            value: text.to_owned(),
            expected: "a count of tokens such as `92000` or `92K`",
        })
}

/// Who holds KV between requests.
fn engine(text: &str) -> Result<Option<SlotConfig>, ClusterError> {
    match text {
        "block" => Ok(None),
        "session-slot" => Ok(Some(SlotConfig::default())),
        "vllm" => Err(ClusterError::NotYet {
            name: "engine",
            value: text.to_owned(),
            expected: "`engine=block` or `engine=session-slot`",
        }),
        _ => Err(ClusterError::Value {
            name: "engine",
            value: text.to_owned(),
            expected: "`block` or `session-slot`",
        }),
    }
}

fn switch(name: &'static str, text: &str) -> Result<bool, ClusterError> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(ClusterError::Value {
            name,
            value: text.to_owned(),
            expected: "`on` or `off`",
        }),
    }
}

fn share(name: &'static str, text: &str) -> Result<f64, ClusterError> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| ClusterError::Value {
        name,
        value: text.to_owned(),
        expected: "a share from 0 to 1",
    })
}

/// A time: `32s` or `5ms`.
fn duration(name: &'static str, text: &str) -> Result<Duration, ClusterError> {
    let (digits, unit) = match text.strip_suffix("ms") {
        Some(digits) => (digits, 0.001),
        None => (text.strip_suffix('s').unwrap_or_default(), 1.0),
    };
    let seconds = digits.parse::<f64>().ok().map(|number| number * unit);
    let seconds = seconds.filter(|seconds| (0.0..=1e6).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| ClusterError::Value {
        name,
        value: text.to_owned(),
        expected: "a time such as `32s` or `5ms`",
    })
}

/// Bytes a second: `40GBps` or `400Gbps`.
fn bandwidth(text: &str) -> Result<f64, ClusterError> {
    let (digits, factor) = match text.strip_suffix("GBps") {
        Some(digits) => (digits, 1e9),
        None => text
            .strip_suffix("Gbps")
            .map_or(("", 0.0), |digits| (digits, 1e9 / 8.0)),
    };
    let value = digits
        .parse::<f64>()
        .ok()
        .filter(|value| value.is_finite() && *value > 0.0);
    value.map(|value| value * factor).ok_or_else(|| ClusterError::Value {
        name: "nic",
        value: text.to_owned(),
        expected: "a bandwidth such as `40GBps` or `400Gbps`",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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
        check("h300x8-dp", "expected one of `h100x8-dp`");
        check("h100", "expected one of `h100x8-dp`");
        check("h100x8-2p5d", "a shape that uses every GPU");
        check("h100x2-0p2d", "no worker that prefills");
        check("h100x9999-dp", "1,024 in all at most");
        check("h100x0-dp", "no worker that prefills");
        check("h100x8-dp:kv=lots", "`kv` is `lots`, expected a count of tokens");
        check("h100x8-dp:kv=0", "at least 1");
        check("h100x8-dp:nic=40", "expected a bandwidth such as `40GBps`");
        check("h100x8-dp:rho=0.9", "expected it after `engine=session-slot`");
        check("h100x8-dp:engine=session-slot:rho=2", "expected a share from 0 to 1");
        check("h100x8-dp:transfer_timeout=32", "expected a time such as `32s`");
        check("h100x8-dp:engine=vllm", "is not supported yet");
        check("h100x8-dp:engine=x", "expected `block` or `session-slot`");
        check("h100x8-dp:host=64GiB", "is not supported yet");
        check("h100x8-dp:gpu=1", "cluster parameter `gpu=1`, expected one of");
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
