//! How long one engine step takes on a real accelerator: closed forms over measured kernels, for mixture-of-experts and
//! dense models.
//!
//! A plain linear form misses mixture-of-experts decoding by 60%: the experts that a batch wakes, and so the weights that
//! it loads, saturate as the batch grows. Hence a term of its own. In milliseconds, for a step that prefills chunks of n
//! new tokens behind prefixes of p tokens and decodes a batch, with m = sum(n) + batch, A = sum(n * (p + n / 2)), and C
//! the sum of the decoding requests' contexts:
//!
//! ```text
//! experts  base + experts * (1 - (1 - k/E)^(saturation * m)) + token * m  + attention * A                   + context * C + overhead
//! dense    (base^3 + (token * m)^3)^(1/3)                                 + attention * A + request * batch + context * C + overhead
//! ```
//!
//! The coefficients of the built-in profiles were computed with aiconfigurator-core 0.12.0, Apache-2.0, NVIDIA CORPORATION
//! & AFFILIATES, from its vLLM tables; those tables are kernel time only, hence the overhead of the host in each step.
//!
//! Not here: queueing on a NIC and random noise, which belong to the simulator; the front-end latency is a figure for
//! the driver to add to a request, and no part of a step.

use crate::api::Step;
use crate::profiles;
use homing_units::Duration;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use thiserror::Error;

/// A part of a prompt that one step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// New tokens.
    pub tokens: u32,
    /// Tokens before them whose KV exists already.
    pub prefix: u32,
}

/// What a step's duration depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepShape {
    /// The prefill chunks.
    pub prefills: SmallVec<[Chunk; 4]>,
    /// Requests that decode one token.
    pub decode_batch: u32,
    /// The sum of their contexts, in tokens.
    pub decode_context_tokens: u64,
}

impl From<&Step> for StepShape {
    fn from(step: &Step) -> Self {
        let mut shape = Self::default();
        for item in &step.items {
            if item.decode {
                shape.decode_batch += 1;
                shape.decode_context_tokens += u64::from(item.start) + u64::from(item.count);
            } else {
                shape.prefills.push(Chunk {
                    tokens: item.count,
                    prefix: item.start,
                });
            }
        }
        shape
    }
}

impl StepShape {
    fn prefill_tokens(&self) -> f64 {
        self.prefills.iter().map(|chunk| f64::from(chunk.tokens)).sum()
    }

    /// Pairs of a new token and a token that it attends to.
    fn attention_pairs(&self) -> f64 {
        let pairs = |chunk: &Chunk| {
            let tokens = f64::from(chunk.tokens);
            tokens * (f64::from(chunk.prefix) + tokens / 2.0)
        };
        self.prefills.iter().map(pairs).sum()
    }

    fn context(&self) -> f64 {
        // Exact below 2^53 tokens.
        self.decode_context_tokens as f64
    }
}

/// A model on an accelerator: the duration of its steps, and what else a simulated worker must know of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepModel {
    /// The model's name.
    pub model: String,
    /// KV of one token, in bytes, over all accelerators of a worker.
    pub kv_bytes_per_token: u64,
    /// Tokens of KV that fit beside the weights, at 0.90 of the memory.
    pub kv_tokens: u32,
    /// Mean absolute error of the closed form against the kernels it was fitted to, in percent; the size of step noise.
    pub step_error_percent: f64,
    /// Time of the host in each step, in milliseconds.
    #[serde(default = "default_overhead_ms")]
    pub overhead_ms: f64,
    /// What a request pays once before its first step (HTTP, tokeniser, scheduler), in milliseconds: 20 to 30 on real
    /// servers. No part of [`Self::step_time`].
    #[serde(default = "default_front_end_ms")]
    pub front_end_ms: f64,
    /// What a KV transfer pays before its first byte, in milliseconds.
    #[serde(default = "default_transfer_setup_ms")]
    pub transfer_setup_ms: f64,
    /// Bandwidth of a worker's NIC in bytes a second; the default is one NIC of 400 Gb/s.
    #[serde(default = "default_nic_bytes_per_second")]
    pub nic_bytes_per_second: f64,
    /// Bandwidth between host memory and the accelerator in bytes a second; the default is PCIe 5, of which 45 to 54 GB/s
    /// are measured.
    #[serde(default = "default_pcie_bytes_per_second")]
    pub pcie_bytes_per_second: f64,
    /// The form for a mixture of experts; exactly one of the forms is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moe: Option<MoeForm>,
    /// The form for a dense model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dense: Option<DenseForm>,
}

/// The closed form for a mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoeForm {
    /// Experts in a layer (E).
    pub experts: u32,
    /// Experts that one token wakes (k).
    pub experts_per_token: u32,
    /// A step that does nothing.
    pub base_ms: f64,
    /// Loading all experts.
    pub experts_ms: f64,
    /// How many independent tokens one token counts for when experts are woken.
    pub saturation: f64,
    /// Each token of the batch.
    pub token_ms: f64,
    /// Each pair of a prefilled token and a token it attends to.
    pub attention_ms: f64,
    /// Each token of context of a decoding request.
    pub context_ms: f64,
}

/// The closed form for a dense model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DenseForm {
    /// Loading the weights once.
    pub base_ms: f64,
    /// Each token of the batch.
    pub token_ms: f64,
    /// Each pair of a prefilled token and a token it attends to.
    pub attention_ms: f64,
    /// Each decoding request.
    pub request_ms: f64,
    /// Each token of context of a decoding request.
    pub context_ms: f64,
}

/// Why there is no such step-time model.
#[derive(Debug, Error)]
pub enum StepModelError {
    /// No profile has this name.
    #[error("no step-time profile `{name}`, expected one of {known}, or TOML text")]
    UnknownProfile {
        /// The name.
        name: String,
        /// All names, in backticks.
        known: String,
    },
    /// The text is not such a model in TOML.
    #[error("broken step-time model: {0}")]
    Toml(#[from] toml::de::Error),
    /// Both forms, or none.
    #[error("a step-time model has exactly one of the tables `[moe]` and `[dense]`, found {found}")]
    Forms {
        /// `both` or `neither`.
        found: &'static str,
    },
    /// A number out of its range.
    #[error("`{field}` of a step-time model is `{value}`, expected {expected}")]
    Value {
        /// Its name in the TOML text.
        field: &'static str,
        /// What was given.
        value: f64,
        /// What was expected.
        expected: &'static str,
    },
}

impl StepModel {
    /// A prompt's token behind so many others takes twice as long to compute as the first one does, for what it attends to; `None` where it
    /// takes no time. Loading the weights is not counted: a long prompt's chunks share that.
    #[must_use]
    pub fn cost_doubles_after_tokens(&self) -> Option<u32> {
        let of_moe = self.moe.map(|form| (form.token_ms, form.attention_ms));
        let of_dense = self.dense.map(|form| (form.token_ms, form.attention_ms));
        let (token_ms, attention_ms) = of_moe.or(of_dense)?;
        let tokens = token_ms / attention_ms;
        (tokens.is_finite() && tokens >= 1.0).then(|| tokens.min(f64::from(u32::MAX)) as u32)
    }

    /// The built-in profile of this name.
    ///
    /// # Errors
    /// [`StepModelError::UnknownProfile`], which lists the names.
    pub fn profile(name: &str) -> Result<Self, StepModelError> {
        match profiles::text(name) {
            Some(text) => Self::from_toml(text),
            None => Err(StepModelError::UnknownProfile {
                name: name.to_owned(),
                known: Self::profile_names()
                    .map(|known| format!("`{known}`"))
                    .collect::<Vec<_>>()
                    .join(", "),
            }),
        }
    }

    /// The names of the built-in profiles.
    pub fn profile_names() -> impl Iterator<Item = &'static str> {
        profiles::names()
    }

    /// A model written as the files in `profiles/` are.
    ///
    /// # Errors
    /// If the text is no TOML, lacks or adds a key, gives both forms or none, or a number is out of its range.
    pub fn from_toml(text: &str) -> Result<Self, StepModelError> {
        let model: Self = toml::from_str(text)?;
        model.validate()?;
        Ok(model)
    }

    /// How long a step of this shape takes, to the nanosecond, the same on every platform.
    #[must_use]
    pub fn step_time(&self, shape: &StepShape) -> Duration {
        let form_ms = match (&self.moe, &self.dense) {
            (Some(form), _) => form.milliseconds(shape),
            (None, Some(form)) => form.milliseconds(shape),
            (None, None) => 0.0,
        };
        duration_of_ms(form_ms + self.overhead_ms)
    }

    /// How long a transfer of so many bytes takes on an idle NIC.
    #[must_use]
    pub fn transfer_time(&self, bytes: u64) -> Duration {
        duration_of_ms(self.transfer_setup_ms + bytes as f64 / self.nic_bytes_per_second * 1e3)
    }

    /// How long it takes to copy so many bytes from host memory over an idle PCIe link.
    #[must_use]
    pub fn reload_time(&self, bytes: u64) -> Duration {
        duration_of_ms(bytes as f64 / self.pcie_bytes_per_second * 1e3)
    }

    /// KV of so many tokens, in bytes.
    #[must_use]
    pub fn kv_bytes(&self, tokens: u64) -> u64 {
        tokens.saturating_mul(self.kv_bytes_per_token)
    }

    /// What a request pays once before its first step.
    #[must_use]
    pub fn front_end(&self) -> Duration {
        duration_of_ms(self.front_end_ms)
    }

    fn validate(&self) -> Result<(), StepModelError> {
        match (&self.moe, &self.dense) {
            (Some(form), None) => form.validate()?,
            (None, Some(form)) => form.validate()?,
            (Some(_), Some(_)) => return Err(StepModelError::Forms { found: "both" }),
            (None, None) => return Err(StepModelError::Forms { found: "neither" }),
        }
        above_zero("kv_bytes_per_token", self.kv_bytes_per_token as f64)?;
        above_zero("kv_tokens", f64::from(self.kv_tokens))?;
        above_zero("nic_bytes_per_second", self.nic_bytes_per_second)?;
        above_zero("pcie_bytes_per_second", self.pcie_bytes_per_second)?;
        not_negative("step_error_percent", self.step_error_percent)?;
        not_negative("overhead_ms", self.overhead_ms)?;
        not_negative("front_end_ms", self.front_end_ms)?;
        not_negative("transfer_setup_ms", self.transfer_setup_ms)
    }
}

impl MoeForm {
    fn milliseconds(&self, shape: &StepShape) -> f64 {
        let tokens = shape.prefill_tokens() + f64::from(shape.decode_batch);
        let share = f64::from(self.experts_per_token) / f64::from(self.experts);
        let awake = 1.0 - libm::pow(1.0 - share, self.saturation * tokens);
        self.base_ms
            + self.experts_ms * awake
            + self.token_ms * tokens
            + self.attention_ms * shape.attention_pairs()
            + self.context_ms * shape.context()
    }

    fn validate(&self) -> Result<(), StepModelError> {
        above_zero("moe.experts_per_token", f64::from(self.experts_per_token))?;
        if self.experts_per_token > self.experts {
            return Err(StepModelError::Value {
                field: "moe.experts_per_token",
                value: f64::from(self.experts_per_token),
                expected: "at most `moe.experts`",
            });
        }
        not_negative("moe.base_ms", self.base_ms)?;
        not_negative("moe.experts_ms", self.experts_ms)?;
        not_negative("moe.saturation", self.saturation)?;
        not_negative("moe.token_ms", self.token_ms)?;
        not_negative("moe.attention_ms", self.attention_ms)?;
        not_negative("moe.context_ms", self.context_ms)
    }
}

impl DenseForm {
    fn milliseconds(&self, shape: &StepShape) -> f64 {
        let batch = f64::from(shape.decode_batch);
        let compute = self.token_ms * (shape.prefill_tokens() + batch);
        // A smooth maximum: a step is bound by loading the weights or by computing with them.
        libm::cbrt(self.base_ms * self.base_ms * self.base_ms + compute * compute * compute)
            + self.attention_ms * shape.attention_pairs()
            + self.request_ms * batch
            + self.context_ms * shape.context()
    }

    fn validate(&self) -> Result<(), StepModelError> {
        not_negative("dense.base_ms", self.base_ms)?;
        not_negative("dense.token_ms", self.token_ms)?;
        not_negative("dense.attention_ms", self.attention_ms)?;
        not_negative("dense.request_ms", self.request_ms)?;
        not_negative("dense.context_ms", self.context_ms)
    }
}

fn duration_of_ms(milliseconds: f64) -> Duration {
    // The cast saturates, so an absurd model gives an absurd duration and no panic.
    Duration::from_nanos(libm::round(milliseconds * 1e6) as u64)
}

fn not_negative(field: &'static str, value: f64) -> Result<(), StepModelError> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(StepModelError::Value {
        field,
        value,
        expected: "a finite number, at least 0",
    })
}

fn above_zero(field: &'static str, value: f64) -> Result<(), StepModelError> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(StepModelError::Value {
        field,
        value,
        expected: "a finite number above 0",
    })
}

fn default_overhead_ms() -> f64 {
    0.7
}

fn default_front_end_ms() -> f64 {
    25.0
}

fn default_transfer_setup_ms() -> f64 {
    3.0
}

fn default_pcie_bytes_per_second() -> f64 {
    50e9
}

fn default_nic_bytes_per_second() -> f64 {
    40e9
}
