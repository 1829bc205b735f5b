//! What users would pick today: the routing policies of other systems, faithful to their published formulas and defaults.
//! One file each; its header names the source, the formula, and where it had to differ.
//!
//! What they have in common here:
//! - They send at once, and a turn waits in the engine; only `peer-dynamo` has a queue of its own in front of prefill.
//! - A prefill leg is answered before its decode leg is sent, as vLLM's and Dynamo's routers do; SGLang's sends both at once.
//! - What lies where they read from the router's residency index. Those of them that guess it from what they sent before
//!   see evictions this way that they would not see, which can only help them.
//! - Who failed a request before is not tried again for it, and who cannot be reached is passed over.

mod dynamo;
mod llmd;
mod pools;
mod sglang;
mod vllm_hash;

use super::spec::Parameters;
use super::{Make, PolicyError};

/// The peers by name.
pub(super) const POLICIES: [(&str, Make); 4] = [
    ("peer-dynamo", |parameters| {
        Ok(Box::new(dynamo::Dynamo::new(dynamo::DynamoConfig::parse(parameters)?)))
    }),
    ("peer-sglang", |parameters| {
        Ok(Box::new(sglang::Sglang::new(sglang::SglangConfig::parse(parameters)?)))
    }),
    ("peer-llmd", |parameters| {
        Ok(Box::new(llmd::Llmd::new(llmd::LlmdConfig::parse(parameters)?)))
    }),
    ("peer-vllm-hash", |parameters| {
        Ok(Box::new(vllm_hash::VllmHash::new(vllm_hash::VllmHashConfig::parse(
            parameters,
        )?)))
    }),
];

/// A number from 0 to 1.
fn share(parameters: &mut Parameters<'_>, policy: &str, key: &'static str, default: f64) -> Result<f64, PolicyError> {
    let value = parameters.number(key, default)?;
    if value > 1.0 {
        return Err(PolicyError::BadValue {
            policy: policy.to_owned(),
            key: key.to_owned(),
            value: value.to_string(),
            expected: "a number from 0 to 1",
        });
    }
    Ok(value)
}
