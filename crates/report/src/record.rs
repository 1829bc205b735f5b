//! What a run left behind, before any arithmetic: one record a request and one a worker.
//!
//! Both the simulator and the live replay fill these; a figure that a live endpoint does not tell stays `None`.

use homing_units::{Duration, Instant};
use serde::{Deserialize, Serialize};

/// How a request was served (the router's word for it).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Path {
    /// The decode worker held the prefix and prefilled the tail itself.
    Append,
    /// A prefill worker prefilled, the decode worker received the KV it lacked, for the first time.
    Seed,
    /// The same because the KV was evicted.
    Reseed,
    /// Another decode worker pulled the session's KV, then appended.
    Migrate,
    /// A worker of both roles prefilled everything itself.
    Local,
}

impl Path {
    /// All paths, in the order of the run schema.
    pub const ALL: [Self; 5] = [Self::Append, Self::Seed, Self::Reseed, Self::Migrate, Self::Local];

    /// Its name in headers, logs and reports.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Append => "append",
            Self::Seed => "seed",
            Self::Reseed => "reseed",
            Self::Migrate => "migrate",
            Self::Local => "local",
        }
    }

    /// The path of this name, such as a response header carries it.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|path| path.as_str() == name)
    }
}

/// One request of a run, from the client's point of view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestRecord {
    /// Its number in the run, in order of arrival.
    pub request: u64,
    /// Index of its session in the trace.
    pub session: u32,
    /// Name of its session in the trace.
    pub session_name: String,
    /// Which agent of the session sent it; 0 is the root.
    pub agent: u32,
    /// Index of the turn in its session.
    pub turn: u32,
    /// Whether its agent had sent no request before: such a turn cannot find the agent's KV anywhere.
    pub first_of_agent: bool,
    /// When it was sent.
    pub arrival: Instant,
    /// When its first token came, if one did.
    pub first_token: Option<Instant>,
    /// When it ended, well or not.
    pub end: Instant,
    /// The longest time between two of its tokens, where it had two.
    pub itl_max: Option<Duration>,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Prompt tokens that were not computed for this request, as the engine reported them.
    pub cached_tokens: u32,
    /// Tokens of the answer.
    pub output_tokens: u32,
    /// How it was served; `None` where it was refused before a plan was made, or the endpoint does not tell.
    pub path: Option<Path>,
    /// The worker that decoded it (or was to), if known.
    pub worker: Option<String>,
    /// The worker that prefilled it for another, if one did.
    pub prefill_worker: Option<String>,
    /// The kind of its error, such as `context_too_long`; `None` where it completed.
    pub error: Option<String>,
}

impl RequestRecord {
    /// From arrival to the last token.
    #[must_use]
    pub fn latency(&self) -> Duration {
        self.end - self.arrival
    }

    /// From arrival to the first token, if there was one.
    #[must_use]
    pub fn ttft(&self) -> Option<Duration> {
        self.first_token.map(|first| first - self.arrival)
    }

    /// Mean time for each token after the first; `None` below two tokens.
    #[must_use]
    pub fn tpot(&self) -> Option<Duration> {
        let after_first = self.output_tokens.checked_sub(1).filter(|&tokens| tokens > 0)?;
        self.first_token.map(|first| (self.end - first) / after_first)
    }
}

/// One worker over a whole run. What `None` is here is null in the report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkerRecord {
    /// Its name, such as `d0`.
    pub name: String,
    /// What it may do: `prefill`, `decode` or `both`.
    pub role: String,
    /// The largest share of its KV pool that requests and cache held at once (0 to 1).
    pub kv_usage_max: Option<f64>,
    /// Times that it evicted.
    pub evictions: Option<u64>,
    /// Tokens that it evicted.
    pub evicted_tokens: Option<u64>,
    /// KV transfers that it received well.
    pub transfers_in: Option<u64>,
    /// KV transfers that it gave well.
    pub transfers_out: Option<u64>,
    /// KV transfers to or from it that failed.
    pub transfer_errors: Option<u64>,
    /// How long it was running steps.
    pub busy: Option<Duration>,
}

/// What the limits of a replay left out of its trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Sessions that begin with a prompt above the largest context.
    pub sessions: u32,
    /// Sessions that were ended before their first prompt above the largest context.
    pub sessions_shortened: u32,
    /// Turns of these two kinds of sessions that were not sent for that reason.
    pub turns: u64,
    /// Turns that were not sent because of the limit on a session's turns.
    pub turns_over_limit: u64,
    /// Sessions that were not sent because of the limit on sessions.
    pub sessions_over_limit: u32,
}
