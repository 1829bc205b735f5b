//! The values of cluster parameters: counts of tokens, bytes, bandwidths, times, shares, switches.
//!
//! A unit is always written out, so that nobody wonders whether `32` was seconds; what is wrong is told what was expected.

use super::ClusterError;
use homing_units::Duration;

/// The longest time that a parameter takes, in seconds: ten days.
const LONGEST_S: f64 = 864_000.0;

/// The largest pool of one worker, in tokens: a hundred times what a GPU of today holds. All of a pool's blocks are kept
/// track of from the start.
const LARGEST_POOL: u32 = 100_000_000;

/// The largest host memory of one worker.
const LARGEST_HOST: u64 = 16 << 40;

fn wrong(name: &'static str, text: &str, expected: &'static str) -> ClusterError {
    ClusterError::Value {
        name,
        value: text.to_owned(),
        expected,
    }
}

pub(super) fn positive(name: &'static str, value: u32) -> Result<u32, ClusterError> {
    if value == 0 {
        return Err(wrong(name, "0", "at least 1"));
    }
    Ok(value)
}

/// The size of a pool in tokens.
pub(super) fn pool(name: &'static str, tokens: u32) -> Result<u32, ClusterError> {
    if tokens > LARGEST_POOL {
        return Err(wrong(name, &tokens.to_string(), "at most 100M tokens a worker"));
    }
    positive(name, tokens)
}

/// A count of tokens: `92000`, `92K` or `1M`.
pub(super) fn tokens(name: &'static str, text: &str) -> Result<u32, ClusterError> {
    let (digits, factor) = match text.strip_suffix('K') {
        Some(digits) => (digits, 1_000),
        None => text.strip_suffix('M').map_or((text, 1), |digits| (digits, 1_000_000)),
    };
    let count = digits.parse::<u32>().ok().and_then(|count| count.checked_mul(factor));
    count.ok_or_else(|| wrong(name, text, "a count of tokens such as `92000` or `92K`"))
}

/// A whole number.
pub(super) fn count(name: &'static str, text: &str) -> Result<u32, ClusterError> {
    let count = text.parse().ok();
    count.ok_or_else(|| wrong(name, text, "a whole number"))
}

/// Bytes: `64GiB`, `512MiB`, or `0`.
pub(super) fn bytes(name: &'static str, text: &str) -> Result<u64, ClusterError> {
    let units = [("GiB", 30), ("MiB", 20), ("TiB", 40)];
    let found = units
        .iter()
        .find_map(|(unit, bits)| text.strip_suffix(unit).map(|digits| (digits, *bits)));
    let value = match found {
        Some((digits, bits)) => digits
            .parse::<u64>()
            .ok()
            .and_then(|count| count.checked_mul(1 << bits)),
        None => (text == "0").then_some(0),
    };
    value
        .filter(|bytes| *bytes <= LARGEST_HOST)
        .ok_or_else(|| wrong(name, text, "bytes such as `64GiB`, or `0`; at most `16TiB`"))
}

/// Bytes a second: `40GBps` or `400Gbps`.
pub(super) fn bandwidth(name: &'static str, text: &str) -> Result<f64, ClusterError> {
    let (digits, factor) = match text.strip_suffix("GBps") {
        Some(digits) => (digits, 1e9),
        None => text
            .strip_suffix("Gbps")
            .map_or(("", 0.0), |digits| (digits, 1e9 / 8.0)),
    };
    let value = number(digits).filter(|value| *value > 0.0);
    value
        .map(|value| value * factor)
        .ok_or_else(|| wrong(name, text, "a bandwidth such as `40GBps` or `400Gbps`"))
}

/// A time: `32s`, `5ms` or `1us`.
pub(super) fn duration(name: &'static str, text: &str) -> Result<Duration, ClusterError> {
    let units = [("ms", 1e-3), ("us", 1e-6), ("s", 1.0)];
    let found = units
        .iter()
        .find_map(|(unit, factor)| text.strip_suffix(unit).map(|digits| (digits, *factor)));
    let seconds = found.and_then(|(digits, factor)| Some(number(digits)? * factor));
    seconds
        .filter(|seconds| *seconds <= LONGEST_S)
        .map(Duration::from_secs_f64)
        .ok_or_else(|| wrong(name, text, "a time such as `32s` or `5ms`"))
}

/// A time that is not zero.
pub(super) fn wait(name: &'static str, text: &str) -> Result<Duration, ClusterError> {
    match duration(name, text)? {
        Duration::ZERO => Err(wrong(name, text, "a time above zero, or `off`")),
        wait => Ok(wait),
    }
}

/// A frequency: `1Hz` or `0.5Hz`, as the time between two; `off` is never.
pub(super) fn every(name: &'static str, text: &str) -> Result<Option<Duration>, ClusterError> {
    if text == "off" {
        return Ok(None);
    }
    let frequency = text.strip_suffix("Hz").and_then(number);
    frequency
        .filter(|frequency| (1e-3..=1e3).contains(frequency))
        .map(|frequency| Some(Duration::from_secs_f64(1.0 / frequency)))
        .ok_or_else(|| wrong(name, text, "a frequency from `0.001Hz` to `1000Hz`, or `off`"))
}

pub(super) fn switch(name: &'static str, text: &str) -> Result<bool, ClusterError> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(wrong(name, text, "`on` or `off`")),
    }
}

pub(super) fn share(name: &'static str, text: &str) -> Result<f64, ClusterError> {
    let share = number(text).filter(|share| *share <= 1.0);
    share.ok_or_else(|| wrong(name, text, "a share from 0 to 1"))
}

/// A finite number of at least 0.
fn number(digits: &str) -> Option<f64> {
    let number = digits.parse::<f64>().ok();
    number.filter(|number| number.is_finite() && number.is_sign_positive())
}
