//! One line for each turn that ended: what `homing up` prints live and what logs are made of.

use homing_router::action::Path;
use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// How a turn went.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TurnLog {
    /// The request, as in `x-request-id`.
    pub request: String,
    /// What the client speaks: `chat`, `completions`, `messages`, `responses`.
    pub api: &'static str,
    /// The kind of client: `claude-code`, `codex`, `opencode`, `mini-swe-agent`, `aider` or `other`.
    pub client: &'static str,
    /// The session: as the client names it, else as the router does. Empty where no plan was made.
    pub session: String,
    /// Turns of this session before this one.
    pub turn_index: u32,
    /// How it was served; `None` where no plan was made.
    pub path: Option<Path>,
    /// Who answered, or was to answer.
    pub worker: Option<String>,
    /// Who prefilled for it, if another did.
    pub prefill_worker: Option<String>,
    /// Prompt tokens found in the decode worker's cache as it reported, else as expected.
    pub cached_tokens: u32,
    /// Prompt tokens that the router expected there when it planned the turn.
    pub expected_cached_tokens: u32,
    /// Why the worker found more or fewer, where it did: `events_behind`, `evicted`, `events_lost`, `predicted` or
    /// `last_token`.
    pub cached_difference: Option<&'static str>,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Tokens that reached the client, as far as the engine says them.
    pub output_tokens: u32,
    /// What changed, where the prompt did not repeat the session's last one: `date_line`, `billing_line`, `system`,
    /// `tools_reordered`, `tools`, `compaction`, `edit` or `rendering`.
    pub prefix_break: Option<&'static str>,
    /// Prompt tokens that were computed again because of it.
    pub prefix_lost_tokens: u32,
    /// Plans made for it beyond the first.
    pub replans: u32,
    /// From the request to the first token, if one came.
    pub ttft: Option<Duration>,
    /// What the planner expected of the first token and what it was, of a turn that its first plan served.
    pub forecast: Option<Forecast>,
    /// From the request to its end.
    pub latency: Duration,
    /// The code of the error that it ended with, if it did; `client_gone` where the client hung up.
    pub error: Option<String>,
}

/// How long a plan was expected to take from its first leg to the first token, and how long it took.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Forecast {
    /// As expected.
    pub expected: Duration,
    /// As it was.
    pub took: Duration,
}

impl Forecast {
    /// By how much it was wrong, as a share of what it took: 0.2 is a fifth too long or too short. `None` where it took no time.
    #[must_use]
    pub fn error(&self) -> Option<f64> {
        let (expected, took) = (self.expected.as_secs_f64(), self.took.as_secs_f64());
        (took > 0.0).then(|| (expected / took - 1.0).abs())
    }
}

impl fmt::Display for TurnLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            session,
            cached_tokens,
            prompt_tokens,
            output_tokens,
            ..
        } = self;
        let path = crate::error::path_name(self.path);
        let worker = self.worker.as_deref().unwrap_or("-");
        write!(
            f,
            "{session} {path:<7} {worker} cached {cached_tokens}/{prompt_tokens} out {output_tokens}"
        )?;
        if let Some(ttft) = self.ttft {
            write!(f, " ttft {:.0} ms", ttft.as_secs_f64() * 1e3)?;
        }
        write!(f, " total {:.0} ms", self.latency.as_secs_f64() * 1e3)?;
        match &self.error {
            Some(error) => write!(f, " error {error}"),
            None => Ok(()),
        }
    }
}
