//! What is known about a figure besides its value: its unit, and which way is better.
//!
//! By the figure's path in a run, such as `ttft_s.p90`. A figure of which neither direction is better in itself (tokens
//! sent, requests by path) can differ, but nobody wins by it. A figure that is not known here is one of those.

use serde::{Deserialize, Serialize};

/// Which way a figure is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Better {
    /// Less is better.
    Lower,
    /// More is better.
    Higher,
    /// Neither is.
    Neither,
}

/// The figures that most readers want first, in that order.
pub const HEADLINE: [&str; 19] = [
    "errors.total",
    "ttft_s.mean",
    "ttft_s.p50",
    "ttft_s.p90",
    "ttft_s.p99",
    "latency_s.mean",
    "latency_s.p50",
    "latency_s.p90",
    "latency_s.p99",
    "tpot_s.mean",
    "tpot_s.p90",
    "itl_max_s.p90",
    "hit_ratio",
    "by_class.warm.ttft_s.p90",
    "by_class.medium.ttft_s.p90",
    "by_class.heavy.ttft_s.p90",
    "balance.requests_max_min",
    "balance.busy_max_min",
    "sessions.starved",
];

/// Which way the figure of this path is better.
#[must_use]
pub fn better(path: &str) -> Better {
    const LOWER: [&str; 3] = ["errors.total", "sessions.starved", "balance.idle_workers"];
    const HIGHER: [&str; 4] = [
        "completed",
        "hit_ratio",
        "first_error_at_share",
        "errors.first_error_at_share",
    ];
    let of_time = ["latency_s.", "ttft_s.", "tpot_s.", "itl_max_s."];
    let tail = path.strip_prefix("by_class.").map_or(path, |rest| {
        rest.split_once('.').map_or(rest, |(_class, figure)| figure)
    });
    if LOWER.contains(&path) || path.ends_with("_max_min") || of_time.iter().any(|prefix| tail.starts_with(prefix)) {
        Better::Lower
    } else if HIGHER.contains(&path) {
        Better::Higher
    } else {
        Better::Neither
    }
}

/// The unit of the figure of this path; empty for counts and shares.
#[must_use]
pub fn unit(path: &str) -> &'static str {
    if path.split('.').any(|part| part.ends_with("_s")) {
        "s"
    } else if path.contains("tokens") && !path.ends_with("max_min") {
        "tokens"
    } else {
        ""
    }
}

/// A figure for people: four significant digits, thousands as they are, no exponent.
#[must_use]
pub fn figure(value: f64) -> String {
    let size = value.abs();
    if size == 0.0 {
        "0".to_owned()
    } else if size >= 1000.0 || value.fract() == 0.0 {
        format!("{value:.0}")
    } else if size >= 100.0 {
        format!("{value:.1}")
    } else if size >= 10.0 {
        format!("{value:.2}")
    } else if size >= 0.1 {
        format!("{value:.3}")
    } else {
        format!("{value:.4}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn direction_and_unit_are_known_by_path() {
        let check = |path: &str, expected: (Better, &str)| assert_eq!((better(path), unit(path)), expected, "{path}");
        check("ttft_s.p90", (Better::Lower, "s"));
        check("by_class.heavy.latency_s.mean", (Better::Lower, "s"));
        check("by_class.heavy.count", (Better::Neither, ""));
        check("hit_ratio", (Better::Higher, ""));
        check("errors.total", (Better::Lower, ""));
        check("errors.first_error_at_share", (Better::Higher, ""));
        check("balance.tokens_max_min", (Better::Lower, ""));
        check("prompt_tokens", (Better::Neither, "tokens"));
        check("duration_s", (Better::Neither, "s"));
        check("sessions.starved_peak_tokens_mean", (Better::Neither, "tokens"));
        check("a_figure_of_the_future", (Better::Neither, ""));
        for path in HEADLINE {
            assert_ne!(better(path), Better::Neither, "{path}");
        }
    }

    #[test]
    fn figures_are_short() {
        let check = |value: f64, expected: &str| assert_eq!(figure(value), expected);
        check(0.0, "0");
        check(4449.0, "4449");
        check(12_345.678, "12346");
        check(628.44, "628.4");
        check(23.456, "23.46");
        check(1.426, "1.426");
        check(0.01234, "0.0123");
        check(-0.5, "-0.500");
    }
}
