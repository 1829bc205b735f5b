//! The structural logs: one kind a file, one JSON object a line, the same from the simulator and from a live run.
//!
//! The doctor, the report and the dashboard read these. Workers and sessions are named, not numbered, so that a line can
//! be read on its own; `t` is seconds from the run's start. The lines have no map and no clock in them, so equal runs
//! are equal bytes. Who writes them converts from the types of router and engine; this crate knows neither.

use crate::record::{Path, RequestRecord};
use crate::stats::rounded;
use homing_units::{Duration, Instant};
use serde::{Deserialize, Serialize};

/// The kinds of structural logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LogKind {
    /// One line a request, when it has ended: [`RequestLine`].
    Requests,
    /// One line a plan: [`DecisionLine`].
    Decisions,
    /// One line each time that a worker's admission was asked or the router's queue changed: [`AdmissionLine`].
    AdmissionEvents,
    /// One line each time that somebody was told to wait: [`BackpressureLine`].
    BackpressureEvents,
    /// One line each time that a session's turn goes to another decode worker than the one before: [`BindingLine`].
    SessionDBinding,
    /// One line a transfer of KV between workers, when it has ended: [`TransferLine`].
    KvTransfers,
    /// One line each time that a worker evicts: [`EvictionLine`].
    Evictions,
    /// One line a worker and sample: [`WorkerSampleLine`].
    WorkerSamples,
    /// One line each time that a worker's state changes: [`WorkerEventLine`].
    WorkerEvents,
    /// One line a sample of what the router knows and has booked: [`RouterSampleLine`].
    RouterSamples,
}

impl LogKind {
    /// All kinds.
    pub const ALL: [Self; 10] = [
        Self::Requests,
        Self::Decisions,
        Self::AdmissionEvents,
        Self::BackpressureEvents,
        Self::SessionDBinding,
        Self::KvTransfers,
        Self::Evictions,
        Self::WorkerSamples,
        Self::WorkerEvents,
        Self::RouterSamples,
    ];

    /// The kind's name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Decisions => "decisions",
            Self::AdmissionEvents => "admission-events",
            Self::BackpressureEvents => "backpressure-events",
            Self::SessionDBinding => "session-d-binding",
            Self::KvTransfers => "kv-transfers",
            Self::Evictions => "evictions",
            Self::WorkerSamples => "worker-samples",
            Self::WorkerEvents => "worker-events",
            Self::RouterSamples => "router-samples",
        }
    }

    /// The name of its file in a run's directory.
    #[must_use]
    pub fn file_name(self) -> String {
        format!("{}.jsonl", self.as_str())
    }
}

/// A line of some structural log.
pub trait LogLine: Serialize {
    /// The log that it belongs to.
    const KIND: LogKind;

    /// The line as JSON, with its line end.
    #[must_use]
    fn to_line(&self) -> String {
        let mut line = serde_json::to_string(self).expect("a log line has string keys and finite numbers");
        line.push('\n');
        line
    }
}

/// An instant as a line carries it: seconds from the run's start, to the microsecond.
#[must_use]
pub fn seconds(at: Instant) -> f64 {
    rounded(at.as_secs_f64())
}

/// A duration as a line carries it: seconds, to the microsecond.
#[must_use]
pub fn duration_s(duration: Duration) -> f64 {
    rounded(duration.as_secs_f64())
}

/// A request that has ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RequestLine {
    /// When it was sent.
    pub t: f64,
    /// Its number in the run.
    pub request: u64,
    /// Its session.
    pub session: String,
    /// Which agent of the session sent it; 0 is the root.
    pub agent: u32,
    /// Index of the turn in its session.
    pub turn: u32,
    /// How it was served, if a plan was made.
    pub path: Option<Path>,
    /// The decode worker.
    pub worker: Option<String>,
    /// The prefill worker, if another.
    pub prefill_worker: Option<String>,
    /// Prompt length.
    pub prompt_tokens: u32,
    /// Prompt tokens that were not computed for it.
    pub cached_tokens: u32,
    /// Tokens of the answer.
    pub output_tokens: u32,
    /// Arrival to first token.
    pub ttft_s: Option<f64>,
    /// Mean time for each token after the first.
    pub tpot_s: Option<f64>,
    /// Longest time between two tokens.
    pub itl_max_s: Option<f64>,
    /// Arrival to end.
    pub latency_s: f64,
    /// The kind of its error; null where it completed.
    pub error: Option<String>,
}

impl From<&RequestRecord> for RequestLine {
    fn from(record: &RequestRecord) -> Self {
        Self {
            t: seconds(record.arrival),
            request: record.request,
            session: record.session_name.clone(),
            agent: record.agent,
            turn: record.turn,
            path: record.path,
            worker: record.worker.clone(),
            prefill_worker: record.prefill_worker.clone(),
            prompt_tokens: record.prompt_tokens,
            cached_tokens: record.cached_tokens,
            output_tokens: record.output_tokens,
            ttft_s: record.ttft().map(duration_s),
            tpot_s: record.tpot().map(duration_s),
            itl_max_s: record.itl_max.map(duration_s),
            latency_s: duration_s(record.latency()),
            error: record.error.clone(),
        }
    }
}

/// How a turn was to be served, and what else was considered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DecisionLine {
    /// When it was decided.
    pub t: f64,
    /// The request.
    pub request: u64,
    /// Which plan for it this is, from 0.
    pub attempt: u32,
    /// The session that the router took it for.
    pub session: u64,
    /// Turns of this session before this one.
    pub turn: u32,
    /// How.
    pub path: Path,
    /// Where it prefills, if elsewhere.
    pub prefill_worker: Option<String>,
    /// Where it decodes.
    pub worker: String,
    /// Who lends the prefill worker the session's history, if anybody does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetches_from: Option<String>,
    /// The tokens of that history.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetched_tokens: Option<u32>,
    /// Prompt length.
    pub prompt_tokens: u32,
    /// Prompt tokens expected in the decode worker's cache.
    pub expected_cached_tokens: u32,
    /// How long it waited in the router's queue.
    pub queued_s: f64,
    /// How long it is expected to take from then to the first token, where the policy reckons in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_ttft_s: Option<f64>,
    /// Why this plan.
    pub reason: String,
    /// What was considered, the chosen one first.
    pub candidates: Vec<CandidateLine>,
}

/// A plan that was considered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CandidateLine {
    /// How.
    pub path: Path,
    /// Where it would prefill, if elsewhere.
    pub prefill_worker: Option<String>,
    /// Where it would decode.
    pub worker: String,
    /// Who would lend the prefill worker the session's history, if anybody.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetches_from: Option<String>,
    /// Prompt tokens resident there.
    pub resident_tokens: u32,
    /// The policy's cost, lower is better; null where it has none.
    pub score: Option<f64>,
    /// Why it was out of the question, if it was.
    pub forbidden: Option<String>,
}

/// What admission said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Admission {
    /// It was booked on the worker.
    Admitted,
    /// It does not fit now and waits in the router's queue.
    Queued,
    /// It left the queue with an error: its time was up or the queue was full.
    Refused,
    /// A worker refused what was sent to it.
    Denied,
}

/// Admission was asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdmissionLine {
    /// When.
    pub t: f64,
    /// The request.
    pub request: u64,
    /// The worker that was asked, if one was.
    pub worker: Option<String>,
    /// The answer.
    pub admission: Admission,
    /// KV tokens that it wants.
    pub wanted_tokens: u32,
    /// KV tokens that the worker could give, where known.
    pub free_tokens: Option<u64>,
    /// Requests in the router's queue afterwards.
    pub queue_length: u32,
    /// Why, in a few words.
    pub reason: String,
    /// How long the worker took to answer, where it was asked before the turn was sent; null where the answer was at hand.
    #[serde(default)]
    pub answered_s: Option<f64>,
}

/// Somebody was told to wait.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BackpressureLine {
    /// When.
    pub t: f64,
    /// The request that waits, if it is one.
    pub request: Option<u64>,
    /// The worker that is too full, if it is one.
    pub worker: Option<String>,
    /// For how long, in milliseconds.
    pub pause_ms: u64,
    /// Why, in a few words.
    pub reason: String,
}

/// A session's turns go to another decode worker from now on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BindingLine {
    /// When.
    pub t: f64,
    /// The session, as the router counts them.
    pub session: u64,
    /// The request with which it went there.
    pub request: u64,
    /// The decode worker.
    pub worker: String,
    /// The decode worker before, if there was one.
    pub previous_worker: Option<String>,
    /// The path of that request.
    pub path: Path,
}

/// A transfer of KV has ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TransferLine {
    /// When it began.
    pub t: f64,
    /// The request that it was for.
    pub request: u64,
    /// The worker that gave.
    pub from: String,
    /// The worker that pulled.
    pub to: String,
    /// Tokens moved.
    pub tokens: u32,
    /// Bytes moved, where known.
    pub bytes: Option<u64>,
    /// How long it took.
    pub duration_s: f64,
    /// Why it failed; null where it did not.
    pub error: Option<String>,
    /// How far it had come when it failed, and how long its clock had run; null where it did not fail, or nobody says.
    #[serde(default)]
    pub failed: Option<FailedTransfer>,
}

/// How far a transfer had come when it failed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct FailedTransfer {
    /// In which phase.
    pub phase: TransferPhase,
    /// How long the clock that ended it had run, in seconds; null where no clock did.
    pub clock_s: Option<f64>,
}

/// The phases of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransferPhase {
    /// The receiver has no room for it yet.
    Queued,
    /// The receiver has room, the KV is being computed.
    Prefilling,
    /// The KV is ready.
    Ready,
}

/// A worker evicted cached KV.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvictionLine {
    /// When.
    pub t: f64,
    /// The worker.
    pub worker: String,
    /// The request that needed the room, if it was one and is known: a step makes room for all that it computes at once.
    pub request: Option<u64>,
    /// Blocks evicted.
    pub blocks: u32,
    /// Tokens evicted.
    pub tokens: u64,
    /// What made it evict; null in logs of older versions.
    #[serde(default)]
    pub cause: Option<EvictionCause>,
    /// Choices of what goes next: one for a whole session's slot, one for each leaf block elsewhere. 0 in logs of older
    /// versions.
    #[serde(default)]
    pub decisions: u32,
    /// The session that lost its slot, as the router counts them; null where blocks went.
    #[serde(default)]
    pub session: Option<u64>,
}

/// What made a worker evict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EvictionCause {
    /// A session's slot was trimmed.
    Trim,
    /// KV comes from another worker, which takes its blocks at once.
    Import,
    /// KV comes back from host memory, which takes its blocks at once.
    Reload,
    /// A step computes a chunk of a prompt, or tokens of answers.
    Step,
}

/// A worker's load at one time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerSampleLine {
    /// When.
    pub t: f64,
    /// The worker.
    pub worker: String,
    /// Requests in the batch.
    pub running: u32,
    /// Requests that wait for a place.
    pub waiting: u32,
    /// Requests that wait for KV from another worker.
    pub importing: u32,
    /// Requests whose KV is held for another worker.
    pub exporting: u32,
    /// Size of the KV pool in tokens.
    pub kv_tokens: u64,
    /// Tokens that requests use.
    pub kv_tokens_used: u64,
    /// Tokens that are cached and that no request uses.
    pub kv_tokens_cached: u64,
    /// Prompt tokens of accepted requests that are not computed yet.
    pub prefill_tokens_pending: u64,
}

/// What a worker's state has changed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerChange {
    /// The router knows what it holds.
    Exact,
    /// The router assumes what it holds, or misses events.
    Degraded,
    /// The router does not reach it and sends nothing new.
    Suspect,
    /// The router takes it for dead.
    Dead,
    /// Its process has died.
    Crashed,
    /// Its process was started again.
    Restarted,
}

/// A worker's state has changed, by its own account or by the router's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerEventLine {
    /// When.
    pub t: f64,
    /// The worker.
    pub worker: String,
    /// To what.
    pub change: WorkerChange,
    /// What it died of and the like, where it is known.
    pub reason: Option<String>,
}

/// What the router knows and has booked at one time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouterSampleLine {
    /// When.
    pub t: f64,
    /// Requests in its queue.
    pub queue_length: u32,
    /// Sessions that it remembers.
    pub sessions: u64,
    /// Each worker, in the order of the cluster.
    pub workers: Vec<BookedLine>,
}

/// What the router takes a worker to do and to hold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BookedLine {
    /// The worker.
    pub worker: String,
    /// Requests that are booked there.
    pub requests: u32,
    /// Of these, requests whose KV is to come from elsewhere and is not there yet: the worker may not know of them.
    pub seeds: u32,
    /// Prompts whose KV is held there until it is fetched.
    pub exports: u32,
    /// KV tokens that are reserved for them.
    pub reserved_tokens: u64,
    /// Tokens of KV that the index says lie in its pool.
    pub indexed_tokens: u64,
}

macro_rules! log_line {
    ($($line:ty => $kind:ident),* $(,)?) => {
        $(impl LogLine for $line {
            const KIND: LogKind = LogKind::$kind;
        })*
    };
}

log_line! {
    RequestLine => Requests,
    DecisionLine => Decisions,
    AdmissionLine => AdmissionEvents,
    BackpressureLine => BackpressureEvents,
    BindingLine => SessionDBinding,
    TransferLine => KvTransfers,
    EvictionLine => Evictions,
    WorkerSampleLine => WorkerSamples,
    WorkerEventLine => WorkerEvents,
    RouterSampleLine => RouterSamples,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The line has this form, and is read back as what it was.
    fn check<T: LogLine + PartialEq + std::fmt::Debug + for<'a> Deserialize<'a>>(line: &T, file: &str, expected: &str) {
        assert_eq!(line.to_line(), format!("{expected}\n"));
        assert_eq!(T::KIND.file_name(), file);
        assert_eq!(&serde_json::from_str::<T>(expected).expect("its own form"), line);
    }

    #[test]
    fn a_request_is_written_with_its_times() {
        let at = |millis: u64| Instant::from_nanos(millis * 1_000_000);
        let record = RequestRecord {
            request: 7,
            session: 3,
            session_name: "trace_0003".to_owned(),
            agent: 0,
            turn: 2,
            first_of_agent: false,
            arrival: at(1000),
            first_token: Some(at(1250)),
            end: at(2250),
            itl_max: Some(Duration::from_nanos(123_456_789)),
            prompt_tokens: 900,
            cached_tokens: 800,
            output_tokens: 11,
            path: Some(Path::Append),
            worker: Some("d0".to_owned()),
            prefill_worker: None,
            error: None,
        };
        check(
            &RequestLine::from(&record),
            "requests.jsonl",
            r#"{"t":1.0,"request":7,"session":"trace_0003","agent":0,"turn":2,"path":"append","worker":"d0","prefill_worker":null,"prompt_tokens":900,"cached_tokens":800,"output_tokens":11,"ttft_s":0.25,"tpot_s":0.1,"itl_max_s":0.123457,"latency_s":1.25,"error":null}"#,
        );
    }

    #[test]
    fn a_decision_is_written_with_what_else_was_considered() {
        let (d0, d1) = ("d0".to_owned(), "d1".to_owned());
        let candidate = CandidateLine {
            path: Path::Seed,
            prefill_worker: Some("p0".to_owned()),
            worker: d1,
            fetches_from: None,
            resident_tokens: 0,
            score: Some(0.5),
            forbidden: Some("no room".to_owned()),
        };
        check(
            &DecisionLine {
                t: 1.5,
                request: 7,
                attempt: 0,
                session: 2,
                turn: 1,
                path: Path::Append,
                prefill_worker: None,
                worker: d0,
                fetches_from: None,
                fetched_tokens: None,
                prompt_tokens: 9,
                expected_cached_tokens: 8,
                queued_s: 0.0,
                expected_ttft_s: None,
                reason: "resident".to_owned(),
                candidates: vec![candidate],
            },
            "decisions.jsonl",
            r#"{"t":1.5,"request":7,"attempt":0,"session":2,"turn":1,"path":"append","prefill_worker":null,"worker":"d0","prompt_tokens":9,"expected_cached_tokens":8,"queued_s":0.0,"reason":"resident","candidates":[{"path":"seed","prefill_worker":"p0","worker":"d1","resident_tokens":0,"score":0.5,"forbidden":"no room"}]}"#,
        );
    }

    #[test]
    fn waiting_and_moving_have_a_fixed_form() {
        let (d0, d1) = ("d0".to_owned(), "d1".to_owned());
        check(
            &AdmissionLine {
                t: 1.5,
                request: 7,
                worker: Some(d0.clone()),
                admission: Admission::Queued,
                wanted_tokens: 900,
                free_tokens: Some(100),
                queue_length: 1,
                reason: "no room".to_owned(),
                answered_s: Some(0.25),
            },
            "admission-events.jsonl",
            r#"{"t":1.5,"request":7,"worker":"d0","admission":"queued","wanted_tokens":900,"free_tokens":100,"queue_length":1,"reason":"no room","answered_s":0.25}"#,
        );
        check(
            &BackpressureLine {
                t: 1.5,
                request: None,
                worker: Some(d0.clone()),
                pause_ms: 200,
                reason: "full".to_owned(),
            },
            "backpressure-events.jsonl",
            r#"{"t":1.5,"request":null,"worker":"d0","pause_ms":200,"reason":"full"}"#,
        );
        check(
            &BindingLine {
                t: 1.5,
                session: 2,
                request: 7,
                worker: d1,
                previous_worker: Some(d0),
                path: Path::Migrate,
            },
            "session-d-binding.jsonl",
            r#"{"t":1.5,"session":2,"request":7,"worker":"d1","previous_worker":"d0","path":"migrate"}"#,
        );
    }

    #[test]
    fn what_happens_on_workers_has_a_fixed_form() {
        let d0 = "d0".to_owned();
        check(
            &TransferLine {
                t: 1.5,
                request: 7,
                from: "p0".to_owned(),
                to: d0.clone(),
                tokens: 64,
                bytes: Some(6_291_456),
                duration_s: 0.01,
                error: None,
                failed: None,
            },
            "kv-transfers.jsonl",
            r#"{"t":1.5,"request":7,"from":"p0","to":"d0","tokens":64,"bytes":6291456,"duration_s":0.01,"error":null,"failed":null}"#,
        );
        let failed = FailedTransfer {
            phase: TransferPhase::Ready,
            clock_s: Some(32.0),
        };
        assert_eq!(
            serde_json::to_string(&failed).expect("plain data"),
            r#"{"phase":"ready","clock_s":32.0}"#
        );
        check(
            &EvictionLine {
                t: 1.5,
                worker: d0.clone(),
                request: Some(7),
                blocks: 2,
                tokens: 48,
                cause: Some(EvictionCause::Import),
                decisions: 2,
                session: None,
            },
            "evictions.jsonl",
            r#"{"t":1.5,"worker":"d0","request":7,"blocks":2,"tokens":48,"cause":"import","decisions":2,"session":null}"#,
        );
        let before = r#"{"t":1.5,"worker":"d0","request":null,"blocks":2,"tokens":48}"#;
        let before: EvictionLine = serde_json::from_str(before).expect("a line of an older version");
        assert_eq!((before.cause, before.decisions, before.session), (None, 0, None));
        check(
            &WorkerSampleLine {
                t: 1.5,
                worker: d0,
                running: 1,
                waiting: 2,
                importing: 3,
                exporting: 4,
                kv_tokens: 100,
                kv_tokens_used: 60,
                kv_tokens_cached: 30,
                prefill_tokens_pending: 5,
            },
            "worker-samples.jsonl",
            r#"{"t":1.5,"worker":"d0","running":1,"waiting":2,"importing":3,"exporting":4,"kv_tokens":100,"kv_tokens_used":60,"kv_tokens_cached":30,"prefill_tokens_pending":5}"#,
        );
    }

    #[test]
    fn what_becomes_of_workers_has_a_fixed_form() {
        check(
            &WorkerEventLine {
                t: 1.5,
                worker: "d0".to_owned(),
                change: WorkerChange::Crashed,
                reason: Some("killed".to_owned()),
            },
            "worker-events.jsonl",
            r#"{"t":1.5,"worker":"d0","change":"crashed","reason":"killed"}"#,
        );
        check(
            &RouterSampleLine {
                t: 1.5,
                queue_length: 1,
                sessions: 2,
                workers: vec![BookedLine {
                    worker: "d0".to_owned(),
                    requests: 3,
                    seeds: 1,
                    exports: 2,
                    reserved_tokens: 400,
                    indexed_tokens: 500,
                }],
            },
            "router-samples.jsonl",
            r#"{"t":1.5,"queue_length":1,"sessions":2,"workers":[{"worker":"d0","requests":3,"seeds":1,"exports":2,"reserved_tokens":400,"indexed_tokens":500}]}"#,
        );
    }
}
