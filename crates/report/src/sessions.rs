//! How sessions fared: on how many workers each lived, and how many of its later turns found their KV in place.

use crate::record::{Path, RequestRecord};
use crate::run::ratio;
use crate::stats::{mean, rounded};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Buckets of the histogram, each of a fifth.
const BUCKETS: usize = 5;
/// Starved sessions that are named; the count has them all.
pub const STARVED_NAMED_MAX: usize = 64;
/// Sessions whose append rate is listed; the histogram has them all.
pub const RATES_LISTED_MAX: usize = 1024;

/// How sessions fared. A later turn is one whose agent had sent a request before; a session without later turns has no
/// append rate and is in no bucket.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sessions {
    /// Sessions that sent at least one request.
    pub count: u64,
    /// Decode workers that a session was served by, on average.
    pub workers_per_session_mean: Option<f64>,
    /// Sessions by the share of their later turns that took `append`: below 20%, 40%, 60%, 80%, and from there up.
    pub append_rate_histogram: [u64; BUCKETS],
    /// Sessions in the first bucket.
    pub starved: u64,
    /// Their names, of the first [`STARVED_NAMED_MAX`] in the trace's order: whether it is the same ones in every run.
    #[serde(default)]
    pub starved_sessions: Vec<String>,
    /// Their longest prompts, on average, in tokens.
    pub starved_peak_tokens_mean: Option<f64>,
    /// The longest prompts of the sessions in the last bucket, on average, in tokens.
    pub lucky_peak_tokens_mean: Option<f64>,
    /// The sessions of the histogram one by one, the first [`RATES_LISTED_MAX`] in the trace's order.
    #[serde(default)]
    pub append_rates: Vec<AppendRate>,
}

/// How one session fared.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AppendRate {
    /// Its name.
    pub session: String,
    /// Its later turns.
    pub later_turns: u64,
    /// The share of these that took `append` and completed (0 to 1).
    pub append_rate: f64,
    /// Its longest prompt in tokens.
    pub peak_tokens: u32,
}

/// One session.
#[derive(Default)]
struct Fate<'a> {
    name: &'a str,
    workers: BTreeSet<&'a str>,
    later: usize,
    appended: usize,
    peak_tokens: u32,
}

impl Sessions {
    /// The sessions of these requests.
    #[must_use]
    pub(crate) fn of(requests: &[RequestRecord]) -> Self {
        let mut fates: BTreeMap<u32, Fate<'_>> = BTreeMap::new();
        for request in requests {
            fates.entry(request.session).or_default().add(request);
        }
        let workers: Vec<f64> = fates
            .values()
            .filter(|fate| !fate.workers.is_empty())
            .map(|fate| fate.workers.len() as f64)
            .collect();
        let mut peaks: [Vec<f64>; BUCKETS] = Default::default();
        for fate in fates.values() {
            if let Some(bucket) = fate.bucket() {
                peaks[bucket].push(f64::from(fate.peak_tokens));
            }
        }
        Self {
            count: fates.len() as u64,
            workers_per_session_mean: mean(&workers).map(rounded),
            append_rate_histogram: std::array::from_fn(|bucket| peaks[bucket].len() as u64),
            starved: peaks[0].len() as u64,
            starved_sessions: fates
                .values()
                .filter(|fate| fate.bucket() == Some(0))
                .take(STARVED_NAMED_MAX)
                .map(|fate| fate.name.to_owned())
                .collect(),
            starved_peak_tokens_mean: mean(&peaks[0]).map(rounded),
            lucky_peak_tokens_mean: mean(&peaks[BUCKETS - 1]).map(rounded),
            append_rates: fates.values().filter_map(Fate::rate).take(RATES_LISTED_MAX).collect(),
        }
    }
}

impl<'a> Fate<'a> {
    fn add(&mut self, request: &'a RequestRecord) {
        self.name = &request.session_name;
        self.workers.extend(request.worker.as_deref());
        self.peak_tokens = self.peak_tokens.max(request.prompt_tokens);
        if !request.first_of_agent {
            self.later += 1;
            // A turn that failed did not get what the path promised.
            let appended = request.path == Some(Path::Append) && request.error.is_none();
            self.appended += usize::from(appended);
        }
    }

    /// Its line; `None` without later turns.
    fn rate(&self) -> Option<AppendRate> {
        Some(AppendRate {
            session: self.name.to_owned(),
            later_turns: self.later as u64,
            append_rate: ratio(self.appended as f64, self.later as f64)?,
            peak_tokens: self.peak_tokens,
        })
    }

    /// Which fifth its append rate lies in.
    fn bucket(&self) -> Option<usize> {
        (self.later > 0).then(|| (self.appended * BUCKETS / self.later).min(BUCKETS - 1))
    }
}
