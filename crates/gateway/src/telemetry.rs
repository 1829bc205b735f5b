//! The gateway's own metrics, in Prometheus' form.
//!
//! Counters and histograms are counted where things happen; gauges of workers and queues are set from the core's view
//! when somebody looks, so that they cannot drift from it.

use crate::core_task::Summary;
use crate::error::path_name;
use crate::expectation::Losses;
use crate::fleet::Fleet;
use crate::idle::Held;
use crate::proxy::Agent;
use crate::turn_log::{Forecast, TurnLog};
use homing_router::ClientView;
use homing_router::action::{Errand, ErrandOutcome, WorkerState};
use homing_router::event::{Event, FailureCause};
use homing_units::WorkerId;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Seconds: from a cached turn on an idle worker to a cold one at the end of a long queue.
const BUCKETS: [f64; 16] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0,
];

/// Shares of what a first token took, by which its forecast was wrong.
const ERRORS: [f64; 8] = [0.05, 0.1, 0.2, 0.35, 0.5, 1.0, 2.0, 5.0];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TurnLabels {
    path: &'static str,
    outcome: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct BreakLabels {
    client: &'static str,
    kind: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ErrandLabels {
    kind: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PathLabel {
    path: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct WorkerLabel {
    worker: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StateLabels {
    worker: String,
    state: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CauseLabel {
    cause: &'static str,
}

/// An agent, or those who work for one.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ClientLabel {
    client: &'static str,
    sub_agent: &'static str,
}

/// What was learnt of a kind of client.
type Learnt = Family<ClientLabel, Gauge<f64, AtomicU64>>;

type Seconds = Family<PathLabel, Histogram, fn() -> Histogram>;

/// All metrics.
pub(crate) struct Telemetry {
    registry: Registry,
    fleet: Arc<Fleet>,
    turns: Family<TurnLabels, Counter>,
    ttft: Seconds,
    ttft_error: Histogram,
    latency: Seconds,
    prompt_tokens: Counter,
    output_tokens: Counter,
    expected_cached_tokens: Counter,
    reported_cached_tokens: Counter,
    cached_differences: Family<CauseLabel, Counter>,
    prefix_breaks: Family<BreakLabels, Counter>,
    prefix_lost_tokens: Family<BreakLabels, Counter>,
    replans: Counter,
    leg_failures: Family<CauseLabel, Counter>,
    errands: Family<ErrandLabels, Counter>,
    errand_tokens: Family<ErrandLabels, Counter>,
    kv_batches: Family<WorkerLabel, Counter>,
    kv_gaps: Family<WorkerLabel, Counter>,
    kv_resyncs: Family<WorkerLabel, Counter>,
    kv_unmapped: Family<WorkerLabel, Counter>,
    kv_removals: Family<WorkerLabel, Counter>,
    queued: Gauge,
    in_flight: Gauge,
    sessions: Gauge,
    prompt_bytes: Gauge,
    prompt_tails: Gauge,
    outlined_sessions: Gauge,
    client_turns: Learnt,
    client_gap: Learnt,
    client_output: Learnt,
    worker_state: Family<StateLabels, Gauge>,
    worker_requests: Family<WorkerLabel, Gauge>,
    worker_reserved: Family<WorkerLabel, Gauge>,
}

fn seconds() -> Histogram {
    Histogram::new(BUCKETS)
}

impl Telemetry {
    pub(crate) fn new(fleet: Arc<Fleet>) -> Self {
        let mut telemetry = Self {
            registry: Registry::with_prefix("homing"),
            fleet,
            turns: Family::default(),
            ttft: Family::new_with_constructor(seconds),
            ttft_error: Histogram::new(ERRORS),
            latency: Family::new_with_constructor(seconds),
            prompt_tokens: Counter::default(),
            output_tokens: Counter::default(),
            expected_cached_tokens: Counter::default(),
            reported_cached_tokens: Counter::default(),
            cached_differences: Family::default(),
            prefix_breaks: Family::default(),
            prefix_lost_tokens: Family::default(),
            replans: Counter::default(),
            leg_failures: Family::default(),
            errands: Family::default(),
            errand_tokens: Family::default(),
            kv_batches: Family::default(),
            kv_gaps: Family::default(),
            kv_resyncs: Family::default(),
            kv_unmapped: Family::default(),
            kv_removals: Family::default(),
            queued: Gauge::default(),
            in_flight: Gauge::default(),
            sessions: Gauge::default(),
            prompt_bytes: Gauge::default(),
            prompt_tails: Gauge::default(),
            outlined_sessions: Gauge::default(),
            client_turns: Family::default(),
            client_gap: Family::default(),
            client_output: Family::default(),
            worker_state: Family::default(),
            worker_requests: Family::default(),
            worker_reserved: Family::default(),
        };
        telemetry.register_turns();
        telemetry.register_workers();
        telemetry.register_memories();
        telemetry.register_clients();
        telemetry
    }

    fn register_turns(&mut self) {
        let registry = &mut self.registry;
        registry.register("requests", "Turns that ended, by path and outcome", self.turns.clone());
        registry.register("ttft_seconds", "From a request to its first token", self.ttft.clone());
        registry.register(
            "ttft_error_ratio",
            "By how much the planner's forecast of a turn's first token was wrong, as a share of what it took",
            self.ttft_error.clone(),
        );
        registry.register("latency_seconds", "From a request to its end", self.latency.clone());
        registry.register(
            "prompt_tokens",
            "Prompt tokens of turns that ended",
            self.prompt_tokens.clone(),
        );
        registry.register(
            "output_tokens",
            "Tokens that were generated for turns",
            self.output_tokens.clone(),
        );
        registry.register(
            "cached_tokens_expected",
            "Prompt tokens expected in caches, of turns whose worker reported them",
            self.expected_cached_tokens.clone(),
        );
        registry.register(
            "cached_tokens_reported",
            "Prompt tokens that workers found in their caches",
            self.reported_cached_tokens.clone(),
        );
        registry.register(
            "cached_differences",
            "Turns whose worker found more or fewer cached tokens than was expected, by cause",
            self.cached_differences.clone(),
        );
        registry.register(
            "prefix_breaks",
            "Prompts that did not repeat their session's last one, by client and by what changed",
            self.prefix_breaks.clone(),
        );
        registry.register(
            "prefix_lost_tokens",
            "Prompt tokens that were computed again because of it",
            self.prefix_lost_tokens.clone(),
        );
        registry.register("replans", "Plans beyond a request's first", self.replans.clone());
        registry.register("leg_failures", "Legs that failed, by cause", self.leg_failures.clone());
    }

    fn register_workers(&mut self) {
        let registry = &mut self.registry;
        registry.register(
            "errands",
            "Times that KV was carried while no client waited for it, by why and by what came of it",
            self.errands.clone(),
        );
        registry.register(
            "errand_tokens",
            "Tokens of KV that was, or was to be, carried so",
            self.errand_tokens.clone(),
        );
        registry.register("kv_event_batches", "Batches of KV events", self.kv_batches.clone());
        registry.register(
            "kv_event_gaps",
            "Gaps in the numbers of KV events",
            self.kv_gaps.clone(),
        );
        registry.register("kv_resyncs", "Replays that the core asked for", self.kv_resyncs.clone());
        registry.register(
            "kv_blocks_unmapped",
            "Stored blocks without a known parent",
            self.kv_unmapped.clone(),
        );
        registry.register(
            "kv_removals",
            "Events by which workers said that they dropped blocks",
            self.kv_removals.clone(),
        );
        registry.register("queued_requests", "Requests that wait for a place", self.queued.clone());
        registry.register("in_flight_requests", "Requests under way", self.in_flight.clone());
        registry.register(
            "worker_state",
            "1 for the state that a worker is in",
            self.worker_state.clone(),
        );
        registry.register(
            "worker_requests",
            "Requests with a leg at a worker",
            self.worker_requests.clone(),
        );
        registry.register(
            "worker_reserved_tokens",
            "Pool tokens that are booked at a worker",
            self.worker_reserved.clone(),
        );
    }

    fn register_memories(&mut self) {
        let registry = &mut self.registry;
        registry.register("sessions", "Sessions that are remembered", self.sessions.clone());
        registry.register(
            "prompt_memory_bytes",
            "Bytes of remembered prompts, their tokens and block hashes",
            self.prompt_bytes.clone(),
        );
        registry.register(
            "prompt_tails",
            "Prompts whose last tokens are remembered",
            self.prompt_tails.clone(),
        );
        registry.register(
            "outlined_sessions",
            "Sessions whose last prompts are outlined, to find where the next one breaks its prefix",
            self.outlined_sessions.clone(),
        );
    }

    fn register_clients(&mut self) {
        let registry = &mut self.registry;
        registry.register(
            "client_further_turns",
            "Turns that a session has after one of its turns, as learnt of its kind of client",
            self.client_turns.clone(),
        );
        registry.register(
            "client_gap_seconds",
            "Time between the turns of sessions that come back soon, as learnt of their kind of client",
            self.client_gap.clone(),
        );
        registry.register(
            "client_output_tokens",
            "Tokens of an answer, as learnt of its kind of client",
            self.client_output.clone(),
        );
    }

    /// A turn has ended.
    pub(crate) fn turn_ended(&self, log: &TurnLog, expected: u32, reported: Option<u32>) {
        let path = path_name(log.path);
        let outcome = log.error.clone().unwrap_or_else(|| "ok".to_owned());
        self.turns.get_or_create(&TurnLabels { path, outcome }).inc();
        let observe = |family: &Seconds, duration: Duration| {
            family
                .get_or_create(&PathLabel { path })
                .observe(duration.as_secs_f64());
        };
        observe(&self.latency, log.latency);
        if let Some(ttft) = log.ttft {
            observe(&self.ttft, ttft);
        }
        if let Some(error) = log.forecast.as_ref().and_then(Forecast::error) {
            self.ttft_error.observe(error);
        }
        self.prompt_tokens.inc_by(u64::from(log.prompt_tokens));
        self.output_tokens.inc_by(u64::from(log.output_tokens));
        self.replans.inc_by(u64::from(log.replans));
        if let Some(cause) = log.cached_difference {
            self.cached_differences.get_or_create(&CauseLabel { cause }).inc();
        }
        if let Some(reported) = reported {
            self.expected_cached_tokens.inc_by(u64::from(expected));
            self.reported_cached_tokens.inc_by(u64::from(reported));
        }
    }

    /// KV was carried while no client waited for it, or was to be.
    pub(crate) fn errand_ended(&self, errand: &Errand, outcome: ErrandOutcome) {
        let labels = ErrandLabels {
            kind: errand.kind.as_str(),
            outcome: outcome.as_str(),
        };
        self.errands.get_or_create(&labels).inc();
        self.errand_tokens
            .get_or_create(&labels)
            .inc_by(u64::from(errand.tokens));
    }

    /// A client broke its session's prefix.
    pub(crate) fn prefix_break(&self, client: &'static str, kind: &'static str, lost_tokens: u32) {
        let labels = BreakLabels { client, kind };
        self.prefix_breaks.get_or_create(&labels).inc();
        self.prefix_lost_tokens
            .get_or_create(&labels)
            .inc_by(u64::from(lost_tokens));
    }

    /// An event went to the core.
    pub(crate) fn event(&self, event: &Event) {
        if let Event::LegFailed(failure) = event {
            let cause = cause_name(failure.cause);
            self.leg_failures.get_or_create(&CauseLabel { cause }).inc();
        }
    }

    /// A batch of KV events came; so many of its blocks could not be mapped, and so many of
    /// its events say that the worker dropped some.
    pub(crate) fn kv_batch(&self, worker: WorkerId, unmapped: u64, removals: u64) {
        let label = self.label(worker);
        self.kv_batches.get_or_create(&label).inc();
        self.kv_unmapped.get_or_create(&label).inc_by(unmapped);
        self.kv_removals.get_or_create(&label).inc_by(removals);
    }

    /// What a worker's events have told of losses so far.
    pub(crate) fn kv_losses(&self, worker: WorkerId) -> Losses {
        let label = self.label(worker);
        Losses {
            removals: self.kv_removals.get_or_create(&label).get(),
            gaps: self.kv_gaps.get_or_create(&label).get(),
        }
    }

    /// A worker's KV events skipped a number.
    pub(crate) fn kv_gap(&self, worker: WorkerId) {
        self.kv_gaps.get_or_create(&self.label(worker)).inc();
    }

    /// The core asked for a replay.
    pub(crate) fn kv_resync(&self, worker: WorkerId) {
        self.kv_resyncs.get_or_create(&self.label(worker)).inc();
    }

    fn label(&self, worker: WorkerId) -> WorkerLabel {
        WorkerLabel {
            worker: self.fleet.name(worker),
        }
    }

    /// The page, with gauges as the core sees them.
    pub(crate) fn page(&self, summary: &Summary, held: &Held) -> String {
        self.prompt_bytes.set(signed(held.prompt_bytes as u64));
        self.prompt_tails.set(signed(held.tails as u64));
        self.outlined_sessions.set(signed(held.sessions as u64));
        self.queued.set(signed(summary.queued as u64));
        self.in_flight.set(signed(summary.flights as u64));
        self.sessions.set(signed(summary.sessions as u64));
        for view in &summary.workers {
            let label = self.label(view.id);
            for state in [
                WorkerState::Exact,
                WorkerState::Degraded,
                WorkerState::Suspect,
                WorkerState::Dead,
            ] {
                let labels = StateLabels {
                    worker: label.worker.clone(),
                    state: state_name(state),
                };
                self.worker_state
                    .get_or_create(&labels)
                    .set(i64::from(view.state == state));
            }
            self.worker_requests
                .get_or_create(&label)
                .set(i64::from(view.in_flight.requests));
            self.worker_reserved
                .get_or_create(&label)
                .set(signed(view.in_flight.reserved_tokens));
        }
        summary.clients.iter().for_each(|view| self.set_client(view));
        let mut page = String::new();
        prometheus_client::encoding::text::encode(&mut page, &self.registry)
            .expect("writing to a string does not fail");
        page
    }

    fn set_client(&self, view: &ClientView) {
        let (agent, is_sub_agent) = Agent::of_kind(view.kind);
        let label = ClientLabel {
            client: agent.as_str(),
            sub_agent: if is_sub_agent { "true" } else { "false" },
        };
        self.client_turns.get_or_create(&label).set(view.further_turns);
        self.client_output.get_or_create(&label).set(view.output_tokens);
        if let Some(gap_s) = view.gap_s {
            self.client_gap.get_or_create(&label).set(gap_s);
        }
    }
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn state_name(state: WorkerState) -> &'static str {
    match state {
        WorkerState::Exact => "exact",
        WorkerState::Degraded => "degraded",
        WorkerState::Suspect => "suspect",
        WorkerState::Dead => "dead",
    }
}

fn cause_name(cause: FailureCause) -> &'static str {
    match cause {
        FailureCause::Unreachable => "unreachable",
        FailureCause::Busy => "busy",
        FailureCause::Transfer => "transfer",
        FailureCause::Engine => "engine",
        FailureCause::Invalid => "invalid",
    }
}
