//! `/metrics` in Prometheus text, under vLLM's names, written from one snapshot.
//!
//! By hand and not by a metrics library: every figure exists already as a plain number in the engine's snapshot, and
//! copying it into a registry of atomics would only add a moment at which two figures disagree.

use crate::latency::{Histogram, Latencies};
use homing_engine::api::Snapshot;
use homing_wire::metrics_text::names;
use std::fmt::Write as _;

/// What the engine thread counts beyond the engine's own snapshot, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests ended by a stop rule.
    pub stopped: u64,
    /// Requests ended by their length.
    pub reached_length: u64,
    /// Requests that were given up.
    pub aborted: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests that were not accepted.
    pub rejected: u64,
    /// Prompt tokens that were asked of other workers.
    pub external_query_tokens: u64,
    /// Pulls that failed.
    pub transfer_failures: u64,
    /// Exports that a puller acknowledged.
    pub exports_acked: u64,
    /// Exports that nobody pulled in time.
    pub exports_expired: u64,
    /// Exports that were given up by whoever had asked for them.
    pub exports_released: u64,
    /// Times that a lease of theirs began anew.
    pub exports_renewed: u64,
}

/// What is published after every turn of the engine thread.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Status {
    /// The engine's load.
    pub load: Snapshot,
    /// What was counted beside it.
    pub counters: Counters,
    /// How long requests took.
    pub latencies: Latencies,
}

/// What does not change while a worker lives.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The served model's name.
    pub model: String,
    /// Tokens in a block.
    pub block_size: u32,
    /// When the worker started, in seconds since 1970.
    pub started_unix_seconds: f64,
}

/// The whole page.
#[must_use]
pub fn render(status: &Status, identity: &Identity) -> String {
    let (load, counters) = (&status.load, &status.counters);
    let mut page = Page {
        text: String::with_capacity(8192),
        model: escape(&identity.model),
    };
    page.load(load);
    page.cache(load, counters);
    page.evictions(load);
    page.tokens(load);
    page.requests(counters);
    page.transfers(load, counters);
    page.latencies(&status.latencies);
    page.info(load, identity);
    page.text
}

struct Page {
    text: String,
    model: String,
}

impl Page {
    fn load(&mut self, load: &Snapshot) {
        let waiting = load.waiting + load.importing;
        self.gauge(names::REQUESTS_RUNNING, "Requests in the batch.", load.running);
        self.gauge(
            names::REQUESTS_WAITING,
            "Requests that wait for a place or for KV.",
            waiting,
        );
        self.family(names::REQUESTS_WAITING_BY_REASON, "gauge", "Why requests wait.");
        self.sample(names::REQUESTS_WAITING_BY_REASON, "reason=\"capacity\"", load.waiting);
        self.sample(names::REQUESTS_WAITING_BY_REASON, "reason=\"deferred\"", load.importing);
        self.gauge(
            "homing:prefill_tokens_pending",
            "Prompt tokens not computed yet.",
            load.prefill_tokens_pending,
        );
    }

    fn cache(&mut self, load: &Snapshot, counters: &Counters) {
        self.gauge(
            names::KV_CACHE_USAGE,
            "Share of the pool that requests use, 0 to 1.",
            usage(load),
        );
        self.counter(names::PREEMPTIONS, "Requests that lost their blocks.", load.preemptions);
        self.counter(
            names::PREFIX_CACHE_QUERIES,
            "Prompt tokens looked up here.",
            load.cache_query_tokens,
        );
        self.counter(
            names::PREFIX_CACHE_HITS,
            "Prompt tokens found here.",
            load.cache_hit_tokens,
        );
        let asked = counters.external_query_tokens;
        self.counter(
            names::EXTERNAL_PREFIX_CACHE_QUERIES,
            "Prompt tokens asked of other workers.",
            asked,
        );
        self.counter(
            names::EXTERNAL_PREFIX_CACHE_HITS,
            "Prompt tokens pulled.",
            load.imported_tokens,
        );
    }

    fn evictions(&mut self, load: &Snapshot) {
        self.counter(
            "homing:evictions_total",
            "Times that cached blocks gave way.",
            load.evictions,
        );
        let blocks = load.evicted_blocks;
        self.counter("homing:evicted_blocks_total", "Cached blocks that gave way.", blocks);
    }

    fn tokens(&mut self, load: &Snapshot) {
        let (here, name) = (load_tokens(load), names::PROMPT_TOKENS_BY_SOURCE);
        self.counter(names::PROMPT_TOKENS, "Prompt tokens whose KV is here.", here);
        self.family(name, "counter", "Where prompt tokens' KV came from.");
        self.sample(name, "source=\"local_compute\"", load.computed_tokens);
        self.sample(name, "source=\"local_cache_hit\"", load.cache_hit_tokens);
        self.sample(name, "source=\"external_kv_transfer\"", load.imported_tokens);
        self.counter(names::GENERATION_TOKENS, "Tokens sampled.", load.output_tokens);
    }

    fn requests(&mut self, counters: &Counters) {
        self.family(names::REQUEST_SUCCESS, "counter", "Requests that ended, by how.");
        for (reason, count) in [
            ("stop", counters.stopped),
            ("length", counters.reached_length),
            ("abort", counters.aborted),
            ("error", counters.failed),
        ] {
            let label = format!("finished_reason=\"{reason}\"");
            self.sample(names::REQUEST_SUCCESS, &label, count);
        }
        let rejected = counters.rejected;
        self.counter(
            "homing:requests_rejected_total",
            "Requests that were not accepted.",
            rejected,
        );
    }

    fn transfers(&mut self, load: &Snapshot, counters: &Counters) {
        let (failures, expired) = (counters.transfer_failures, counters.exports_expired);
        let help = "Exports that nobody pulled in time.";
        self.counter(names::NIXL_FAILED_TRANSFERS, "Pulls of KV that failed.", failures);
        self.counter(names::NIXL_KV_EXPIRED_REQUESTS, help, expired);
        let acked = counters.exports_acked;
        self.counter(
            "homing:exports_acked_total",
            "Exports that a puller acknowledged.",
            acked,
        );
        let released = counters.exports_released;
        self.counter(
            "homing:exports_released_total",
            "Exports that were given up by whoever had asked for them.",
            released,
        );
        let renewed = counters.exports_renewed;
        self.counter(
            "homing:exports_renewed_total",
            "Times that the lease of an export began anew.",
            renewed,
        );
        let held = load.exporting;
        self.gauge("homing:exports_held", "Requests whose KV is held for a puller.", held);
    }

    fn latencies(&mut self, latencies: &Latencies) {
        let (first, between) = (&latencies.first_token, &latencies.between_tokens);
        self.histogram(names::TIME_TO_FIRST_TOKEN, "From submission to the first token.", first);
        self.histogram(names::INTER_TOKEN_LATENCY, "From one token to the next.", between);
        self.histogram(
            names::E2E_REQUEST_LATENCY,
            "From submission to the end.",
            &latencies.whole,
        );
        self.histogram(names::NIXL_XFER_TIME, "Pulls of KV that ended well.", &latencies.pull);
    }

    fn info(&mut self, load: &Snapshot, identity: &Identity) {
        let (block_size, blocks) = (identity.block_size, load.blocks_total);
        self.family(names::CACHE_CONFIG_INFO, "gauge", "The settings of the KV cache.");
        let labels = format!("block_size=\"{block_size}\",num_gpu_blocks=\"{blocks}\"");
        self.sample(names::CACHE_CONFIG_INFO, &labels, 1);
        self.family(
            names::PROCESS_START_TIME,
            "gauge",
            "When the worker started, in seconds since 1970.",
        );
        self.write(format_args!(
            "{} {}\n",
            names::PROCESS_START_TIME,
            identity.started_unix_seconds
        ));
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl std::fmt::Display) {
        self.family(name, "gauge", help);
        self.sample(name, "", value);
    }

    fn counter(&mut self, name: &str, help: &str, value: impl std::fmt::Display) {
        self.family(name, "counter", help);
        self.sample(name, "", value);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.family(name, "histogram", help);
        let bucket = format!("{name}_bucket");
        for (bound, count) in histogram.cumulative() {
            self.sample(&bucket, &format!("le=\"{bound}\""), count);
        }
        self.sample(&bucket, "le=\"+Inf\"", histogram.count());
        self.sample(&format!("{name}_sum"), "", histogram.seconds());
        self.sample(&format!("{name}_count"), "", histogram.count());
    }

    fn family(&mut self, name: &str, kind: &str, help: &str) {
        self.write(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
    }

    fn sample(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        let comma = if labels.is_empty() { "" } else { "," };
        let model = self.model.clone();
        self.write(format_args!(
            "{name}{{engine=\"0\",model_name=\"{model}\"{comma}{labels}}} {value}\n"
        ));
    }

    fn write(&mut self, text: std::fmt::Arguments<'_>) {
        self.text.write_fmt(text).expect("a string takes any text");
    }
}

/// The share of the pool that requests use; cached blocks that nobody uses count as free, as in vLLM.
#[must_use]
pub fn usage(load: &Snapshot) -> f64 {
    let used = load
        .blocks_total
        .saturating_sub(load.blocks_free + load.blocks_evictable);
    f64::from(used) / f64::from(load.blocks_total.max(1))
}

fn load_tokens(load: &Snapshot) -> u64 {
    load.computed_tokens + load.cache_hit_tokens + load.imported_tokens
}

/// A label's value, as the text form wants it.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_wire::metrics_text::Metrics;

    #[test]
    fn the_page_is_read_back() {
        let load = Snapshot {
            running: 3,
            waiting: 2,
            importing: 1,
            blocks_total: 10,
            blocks_free: 2,
            blocks_evictable: 3,
            computed_tokens: 5,
            cache_hit_tokens: 6,
            imported_tokens: 7,
            ..Snapshot::default()
        };
        let counters = Counters {
            reached_length: 4,
            transfer_failures: 9,
            ..Counters::default()
        };
        let identity = Identity {
            model: "a\"b\\c".to_owned(),
            block_size: 16,
            started_unix_seconds: 1.5e9,
        };
        let mut latencies = Latencies::default();
        latencies.first_token.observe(std::time::Duration::from_millis(30));
        let page = render(
            &Status {
                load,
                counters,
                latencies,
            },
            &identity,
        );
        let metrics = Metrics::parse(&page);
        assert_eq!(metrics.skipped, 0, "{page}");
        let check = |name: &str, expected: f64| assert_eq!(metrics.sum(name), Some(expected), "{name}");
        check(names::REQUESTS_RUNNING, 3.0);
        check(names::REQUESTS_WAITING, 3.0);
        check(names::KV_CACHE_USAGE, 0.5);
        check(names::PROMPT_TOKENS, 18.0);
        check(names::PROMPT_TOKENS_BY_SOURCE, 18.0);
        check(names::REQUEST_SUCCESS, 4.0);
        check(names::NIXL_FAILED_TRANSFERS, 9.0);
        check("vllm:time_to_first_token_seconds_count", 1.0);
        check("vllm:time_to_first_token_seconds_sum", 0.03);
        let buckets: Vec<f64> = metrics
            .of("vllm:time_to_first_token_seconds_bucket")
            .map(|sample| sample.value)
            .collect();
        assert_eq!((buckets.len(), buckets.iter().sum::<f64>()), (21, 16.0));
        assert_eq!(metrics.label(names::CACHE_CONFIG_INFO, "num_gpu_blocks"), Some("10"));
        assert_eq!(metrics.label(names::REQUESTS_RUNNING, "model_name"), Some("a\"b\\c"));
    }
}
