//! The Prometheus text form, read: engines' metrics as samples of name, labels and value.
//!
//! Lenient: a line that is no sample is counted and passed over, because a router must not lose a worker's load to one
//! odd line. Types, help and exemplars are not kept.

use std::fmt;

/// Names of vLLM's metrics (0.32) that the router reads and the worker writes.
pub mod names {
    /// Gauge: requests in the batch.
    pub const REQUESTS_RUNNING: &str = "vllm:num_requests_running";
    /// Gauge: requests that wait for a place.
    pub const REQUESTS_WAITING: &str = "vllm:num_requests_waiting";
    /// Gauge with the label `reason`: `capacity` or `deferred`.
    pub const REQUESTS_WAITING_BY_REASON: &str = "vllm:num_requests_waiting_by_reason";
    /// Gauge: share of the KV pool in use, 0 to 1.
    pub const KV_CACHE_USAGE: &str = "vllm:kv_cache_usage_perc";
    /// Counter: requests that lost their blocks.
    pub const PREEMPTIONS: &str = "vllm:num_preemptions_total";
    /// Counter: prompt tokens looked up in the prefix cache.
    pub const PREFIX_CACHE_QUERIES: &str = "vllm:prefix_cache_queries_total";
    /// Counter: prompt tokens found in the prefix cache.
    pub const PREFIX_CACHE_HITS: &str = "vllm:prefix_cache_hits_total";
    /// Counter: prompt tokens asked of other workers.
    pub const EXTERNAL_PREFIX_CACHE_QUERIES: &str = "vllm:external_prefix_cache_queries_total";
    /// Counter: prompt tokens pulled from other workers.
    pub const EXTERNAL_PREFIX_CACHE_HITS: &str = "vllm:external_prefix_cache_hits_total";
    /// Counter: prompt tokens of finished prefills.
    pub const PROMPT_TOKENS: &str = "vllm:prompt_tokens_total";
    /// Counter with the label `source`: `local_compute`, `local_cache_hit` or `external_kv_transfer`.
    pub const PROMPT_TOKENS_BY_SOURCE: &str = "vllm:prompt_tokens_by_source_total";
    /// Counter: tokens sampled.
    pub const GENERATION_TOKENS: &str = "vllm:generation_tokens_total";
    /// Counter with the label `finished_reason`.
    pub const REQUEST_SUCCESS: &str = "vllm:request_success_total";
    /// Gauge of value 1 whose labels are the cache's settings (`block_size`, `num_gpu_blocks`, ...).
    pub const CACHE_CONFIG_INFO: &str = "vllm:cache_config_info";
    /// Histogram in seconds.
    pub const TIME_TO_FIRST_TOKEN: &str = "vllm:time_to_first_token_seconds";
    /// Histogram in seconds.
    pub const INTER_TOKEN_LATENCY: &str = "vllm:inter_token_latency_seconds";
    /// Histogram in seconds.
    pub const E2E_REQUEST_LATENCY: &str = "vllm:e2e_request_latency_seconds";
    /// Histogram in seconds: KV pulls from other workers.
    pub const NIXL_XFER_TIME: &str = "vllm:nixl_xfer_time_seconds";
    /// Counter: KV pulls that failed.
    pub const NIXL_FAILED_TRANSFERS: &str = "vllm:nixl_num_failed_transfers";
    /// Counter: exports that nobody pulled in time.
    pub const NIXL_KV_EXPIRED_REQUESTS: &str = "vllm:nixl_num_kv_expired_reqs";
    /// Gauge: when the process started, in seconds since 1970.
    pub const PROCESS_START_TIME: &str = "process_start_time_seconds";
}

/// Samples in one page; those beyond are dropped and counted.
pub const MAX_SAMPLES: usize = 100_000;

/// One sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The metric's name.
    pub name: String,
    /// Its labels in the order of the page.
    pub labels: Vec<(String, String)>,
    /// Its value.
    pub value: f64,
}

impl Sample {
    /// A label's value.
    #[must_use]
    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels
            .iter()
            .find(|(label, _)| label == name)
            .map(|(_, value)| value.as_str())
    }
}

impl fmt::Display for Sample {
    /// The sample as a line of the text form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        for (index, (name, value)) in self.labels.iter().enumerate() {
            let escaped = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            write!(f, "{}{name}=\"{escaped}\"", if index == 0 { "{" } else { "," })?;
        }
        let value = match self.value {
            value if value.is_nan() => "NaN".to_owned(),
            value if value.is_infinite() => (if value > 0.0 { "+Inf" } else { "-Inf" }).to_owned(),
            value => value.to_string(),
        };
        write!(f, "{} {value}", if self.labels.is_empty() { "" } else { "}" })
    }
}

/// A page of metrics.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics {
    /// Its samples in order.
    pub samples: Vec<Sample>,
    /// Lines that are no sample, and samples beyond the bound.
    pub skipped: usize,
}

impl Metrics {
    /// Reads a page.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut metrics = Self::default();
        for line in text
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
        {
            match parse_line(line).filter(|_| metrics.samples.len() < MAX_SAMPLES) {
                Some(sample) => metrics.samples.push(sample),
                None => metrics.skipped += 1,
            }
        }
        metrics
    }

    /// Samples of this name.
    pub fn of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Sample> {
        self.samples.iter().filter(move |sample| sample.name == name)
    }

    /// The sum over all samples of this name (one for each engine of a data-parallel server); `None` if there is none.
    #[must_use]
    pub fn sum(&self, name: &str) -> Option<f64> {
        self.of(name)
            .map(|sample| sample.value)
            .fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value))
    }

    /// A label of the first sample of this name, such as the `block_size` of [`names::CACHE_CONFIG_INFO`].
    #[must_use]
    pub fn label<'a>(&'a self, name: &'a str, label: &str) -> Option<&'a str> {
        self.of(name).find_map(|sample| sample.label(label))
    }
}

fn parse_line(line: &str) -> Option<Sample> {
    let end = line.find(|c: char| c == '{' || c.is_whitespace())?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = Vec::new();
    if let Some(inner) = rest.strip_prefix('{') {
        (labels, rest) = parse_labels(inner)?;
    }
    // A timestamp or an exemplar may follow the value.
    let value = rest.split_whitespace().next()?;
    let valid = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    (!name.is_empty() && name.chars().all(valid)).then_some(())?;
    Some(Sample {
        name: name.to_owned(),
        labels,
        value: parse_value(value)?,
    })
}

fn parse_value(text: &str) -> Option<f64> {
    match text {
        "+Inf" => Some(f64::INFINITY),
        "-Inf" => Some(f64::NEG_INFINITY),
        text => text.parse().ok(),
    }
}

/// Labels up to the closing brace, and what follows it.
fn parse_labels(mut text: &str) -> Option<(Vec<(String, String)>, &str)> {
    let mut labels = Vec::new();
    loop {
        text = text.trim_start_matches([',', ' ']);
        if let Some(rest) = text.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (name, rest) = text.split_once('=')?;
        let (value, rest) = parse_quoted(rest.trim_start().strip_prefix('"')?)?;
        labels.push((name.trim().to_owned(), value));
        text = rest;
    }
}

/// A label's value up to its closing quote, and what follows it.
fn parse_quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((index, c)) = chars.next() {
        match c {
            '"' => return Some((value, &text[index + 1..])),
            '\\' => value.push(match chars.next()?.1 {
                'n' => '\n',
                other => other,
            }),
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn vllms_page_is_read() {
        let metrics = Metrics::parse(include_str!("../tests/fixtures/vllm-0.32-metrics.txt"));
        assert_eq!(metrics.skipped, 0);
        let check = |name: &str, expected: f64| assert_eq!(metrics.sum(name), Some(expected), "{name}");
        check(names::REQUESTS_RUNNING, 0.0);
        check(names::KV_CACHE_USAGE, 0.0);
        check(names::PREEMPTIONS, 0.0);
        check(names::PROCESS_START_TIME, 1.795_997_426_01e9);
        assert_eq!(metrics.sum("vllm:absent"), None);
        assert_eq!(metrics.label(names::CACHE_CONFIG_INFO, "block_size"), Some("128"));
        let sources: Vec<_> = metrics
            .of(names::PROMPT_TOKENS_BY_SOURCE)
            .map(|sample| sample.label("source"))
            .collect();
        assert_eq!(
            sources,
            [
                Some("local_compute"),
                Some("local_cache_hit"),
                Some("external_kv_transfer")
            ]
        );
        let bucket = "vllm:time_to_first_token_seconds_bucket";
        assert!(metrics.of(bucket).any(|sample| sample.label("le") == Some("+Inf")));
    }

    #[test]
    fn odd_lines() {
        let check = |line: &str, expected: Option<(&str, usize, f64)>| {
            let metrics = Metrics::parse(line);
            let found = metrics
                .samples
                .first()
                .map(|sample| (sample.name.as_str(), sample.labels.len(), sample.value));
            assert_eq!(found, expected, "{line}");
            assert_eq!(metrics.skipped, usize::from(expected.is_none()), "{line}");
        };
        check("a 1", Some(("a", 0, 1.0)));
        check("a{} 1", Some(("a", 0, 1.0)));
        check("a{x=\"}\",y=\"\\\"\",} +Inf 17", Some(("a", 2, f64::INFINITY)));
        check("a:b_c{x=\"1\"}2e-3 # {trace=\"x\"} 1", Some(("a:b_c", 1, 2e-3)));
        check("a", None);
        check("a{x=\"1\" 1", None);
        check("a{x} 1", None);
        check("a x", None);
        check("a-b 1", None);
        check("{x=\"1\"} 1", None);
    }

    proptest! {
        #[test]
        fn a_written_sample_is_read_back(
            name in "[a-z:_]{1,8}",
            labels in prop::collection::vec(("[a-z]{1,4}", "[ -~\n\u{e9}]{0,10}"), 0..4),
            value in any::<f64>().prop_filter("NaN is not equal to itself", |value| !value.is_nan()),
        ) {
            let sample = Sample { name, labels, value };
            prop_assert_eq!(Metrics::parse(&sample.to_string()).samples, vec![sample]);
        }

        #[test]
        fn garbage_never_panics(text in "\\PC*[a-z]\\{[ -~\u{e9}]*") {
            let _metrics = Metrics::parse(&text);
        }
    }
}
