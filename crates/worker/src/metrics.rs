//! `/metrics` in Prometheus text, under vLLM's names, written from one snapshot.
//!
//! By hand and not by a metrics library: every figure exists already as a plain number in the engine's snapshot, and
//! copying it into a registry of atomics would only add a moment at which two figures disagree.

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
}

/// What is published after every turn of the engine thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The engine's load.
    pub load: Snapshot,
    /// What was counted beside it.
    pub counters: Counters,
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
    let mut page = Page { text: String::with_capacity(4096), model: escape(&identity.model) };
    page.load(load);
    page.cache(load, counters);
    page.counter(names::PROMPT_TOKENS, "Prompt tokens whose KV is here.", load_tokens(load));
    page.family(names::PROMPT_TOKENS_BY_SOURCE, "counter", "Where prompt tokens' KV came from.");
    page.sample(names::PROMPT_TOKENS_BY_SOURCE, "source=\"local_compute\"", load.computed_tokens);
    page.sample(names::PROMPT_TOKENS_BY_SOURCE, "source=\"local_cache_hit\"", load.cache_hit_tokens);
    page.sample(names::PROMPT_TOKENS_BY_SOURCE, "source=\"external_kv_transfer\"", load.imported_tokens);
    page.counter(names::GENERATION_TOKENS, "Tokens sampled.", load.output_tokens);
    page.family(names::REQUEST_SUCCESS, "counter", "Requests that ended, by how.");
    for (reason, count) in [
        ("stop", counters.stopped),
        ("length", counters.reached_length),
        ("abort", counters.aborted),
        ("error", counters.failed),
    ] {
        page.sample(names::REQUEST_SUCCESS, &format!("finished_reason=\"{reason}\""), count);
    }
    page.counter(names::NIXL_FAILED_TRANSFERS, "Pulls of KV that failed.", counters.transfer_failures);
    page.counter(names::NIXL_KV_EXPIRED_REQUESTS, "Exports that nobody pulled in time.", counters.exports_expired);
    page.counter("homing:exports_acked_total", "Exports that a puller acknowledged.", counters.exports_acked);
    page.counter("homing:requests_rejected_total", "Requests that were not accepted.", counters.rejected);
    page.counter("homing:evictions_total", "Times that cached blocks gave way.", load.evictions);
    page.counter("homing:evicted_blocks_total", "Cached blocks that gave way.", load.evicted_blocks);
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
        self.gauge(names::REQUESTS_WAITING, "Requests that wait for a place or for KV.", waiting);
        self.family(names::REQUESTS_WAITING_BY_REASON, "gauge", "Why requests wait.");
        self.sample(names::REQUESTS_WAITING_BY_REASON, "reason=\"capacity\"", load.waiting);
        self.sample(names::REQUESTS_WAITING_BY_REASON, "reason=\"deferred\"", load.importing);
        self.gauge("homing:exports_held", "Requests whose KV is held for a puller.", load.exporting);
        self.gauge("homing:prefill_tokens_pending", "Prompt tokens not computed yet.", load.prefill_tokens_pending);
    }

    fn cache(&mut self, load: &Snapshot, counters: &Counters) {
        self.gauge(names::KV_CACHE_USAGE, "Share of the pool that requests use, 0 to 1.", usage(load));
        self.counter(names::PREEMPTIONS, "Requests that lost their blocks.", load.preemptions);
        self.counter(names::PREFIX_CACHE_QUERIES, "Prompt tokens looked up here.", load.cache_query_tokens);
        self.counter(names::PREFIX_CACHE_HITS, "Prompt tokens found here.", load.cache_hit_tokens);
        let asked = counters.external_query_tokens;
        self.counter(names::EXTERNAL_PREFIX_CACHE_QUERIES, "Prompt tokens asked of other workers.", asked);
        self.counter(names::EXTERNAL_PREFIX_CACHE_HITS, "Prompt tokens pulled.", load.imported_tokens);
    }

    fn info(&mut self, load: &Snapshot, identity: &Identity) {
        let (block_size, blocks) = (identity.block_size, load.blocks_total);
        self.family(names::CACHE_CONFIG_INFO, "gauge", "The settings of the KV cache.");
        let labels = format!("block_size=\"{block_size}\",num_gpu_blocks=\"{blocks}\"");
        self.sample(names::CACHE_CONFIG_INFO, &labels, 1);
        self.family(names::PROCESS_START_TIME, "gauge", "When the worker started, in seconds since 1970.");
        self.write(format_args!("{} {}\n", names::PROCESS_START_TIME, identity.started_unix_seconds));
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl std::fmt::Display) {
        self.family(name, "gauge", help);
        self.sample(name, "", value);
    }

    fn counter(&mut self, name: &str, help: &str, value: impl std::fmt::Display) {
        self.family(name, "counter", help);
        self.sample(name, "", value);
    }

    fn family(&mut self, name: &str, kind: &str, help: &str) {
        self.write(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
    }

    fn sample(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        let comma = if labels.is_empty() { "" } else { "," };
        let model = self.model.clone();
        self.write(format_args!("{name}{{engine=\"0\",model_name=\"{model}\"{comma}{labels}}} {value}\n"));
    }

    fn write(&mut self, text: std::fmt::Arguments<'_>) {
        self.text.write_fmt(text).expect("a string takes any text");
    }
}

/// The share of the pool that requests use; cached blocks that nobody uses count as free, as in vLLM.
#[must_use]
pub fn usage(load: &Snapshot) -> f64 {
    let used = load.blocks_total.saturating_sub(load.blocks_free + load.blocks_evictable);
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
        let counters = Counters { reached_length: 4, transfer_failures: 9, ..Counters::default() };
        let identity = Identity { model: "a\"b\\c".to_owned(), block_size: 16, started_unix_seconds: 1.5e9 };
        let page = render(&Status { load, counters }, &identity);
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
        assert_eq!(metrics.label(names::CACHE_CONFIG_INFO, "num_gpu_blocks"), Some("10"));
        assert_eq!(metrics.label(names::REQUESTS_RUNNING, "model_name"), Some("a\"b\\c"));
    }
}
