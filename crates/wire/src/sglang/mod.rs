//! What SGLang says and wants beyond OpenAI's API: who a server is, how a prefill and a decode leg find each other, and
//! the names of its metrics.
//!
//! Read from the public source of SGLang 0.5.23 (`sgl-project/sglang`, paths below `python/sglang/srt/`), which was not run
//! here: it needs a GPU. `/server_info` (`/get_server_info` before): `entrypoints/http_server.py`, `utils/common.py`
//! (`build_server_info`), `runtime_context.py` (`describe_kv_events_publisher`), `arg_groups/`. Requests:
//! `entrypoints/openai/protocol.py` (`PDRoutingFields`), `managers/io_struct.py`, and the bodies that SGLang's own
//! balancer sends (`sgl-router`, `mini_lb.py`). Metrics: `observability/metrics_collector.py`. Failures:
//! `disaggregation/prefill.py` and `decode.py`.
//!
//! Its KV events are vLLM's (`disaggregation/kv_events.py`); what differs is read in [`crate::kv_events`].

mod routing;
mod server_info;

pub use routing::{Bootstrap, ROUTING_FIELDS, Routing, room};
pub use server_info::{KvPublisher, Mode, ServerInfo};

/// Names of SGLang's metrics. A data-parallel server labels those of each engine with `dp_rank`.
pub mod names {
    /// Gauge: requests in the batch.
    pub const REQUESTS_RUNNING: &str = "sglang:num_running_reqs";
    /// Gauge: requests that wait for a place.
    pub const REQUESTS_WAITING: &str = "sglang:num_queue_reqs";
    /// Gauge: share of the KV pool that requests hold, 0 to 1; what only the prefix cache holds is not in it.
    pub const TOKEN_USAGE: &str = "sglang:token_usage";
    /// Gauge: requests that lost their blocks and wait to run again.
    pub const REQUESTS_RETRACTED: &str = "sglang:num_retracted_reqs";
    /// Gauge, of prefill servers: requests that wait for their decode server.
    pub const PREFILL_BOOTSTRAP_QUEUE: &str = "sglang:num_prefill_bootstrap_queue_reqs";
    /// Gauge, of prefill servers: requests whose KV is on its way.
    pub const PREFILL_INFLIGHT_QUEUE: &str = "sglang:num_prefill_inflight_queue_reqs";
    /// Gauge, of decode servers: requests that wait for room before their KV comes.
    pub const DECODE_PREALLOC_QUEUE: &str = "sglang:num_decode_prealloc_queue_reqs";
    /// Gauge, of decode servers: requests whose KV is on its way.
    pub const DECODE_TRANSFER_QUEUE: &str = "sglang:num_decode_transfer_queue_reqs";
    /// Counter: requests whose legs did not find each other.
    pub const BOOTSTRAP_FAILURES: &str = "sglang:num_bootstrap_failed_reqs_total";
    /// Counter: requests whose KV did not arrive.
    pub const TRANSFER_FAILURES: &str = "sglang:num_transfer_failed_reqs_total";
    /// The label that tells the engines of a data-parallel server apart.
    pub const RANK_LABEL: &str = "dp_rank";
}

/// Whether an error's message speaks of the way between two servers rather than of the one that says it. SGLang has no codes for
/// it: both sides answer 500 with these words.
#[must_use]
pub fn speaks_of_transfer(message: &str) -> bool {
    const WORDS: [&str; 6] = [
        "KVTransferError",
        "transfer failed",
        "bootstrap failed",
        "handshake failed",
        "bootstrap_room mismatch",
        "KV checksum mismatch",
    ];
    WORDS.iter().any(|words| message.contains(words))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_on_the_way_are_told_by_their_words() {
        let check = |message: &str, expected: bool| assert_eq!(speaks_of_transfer(message), expected, "{message}");
        check(
            "Prefill transfer failed for request rank=0 req.rid='x' req.bootstrap_room=7 with exception KVTransferError(..)",
            true,
        );
        check("Prefill bootstrap failed for request rank=0 req.rid='x'", true);
        check("Decode handshake failed for request rank=0", true);
        check("Decode transfer failed for request rank=0", true);
        check("Internal server error: CUDA out of memory", false);
        check("The request queue is full.", false);
    }
}
