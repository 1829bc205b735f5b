//! The structural logs of a run in memory, one text a kind.
//!
//! Lines are made from the cores' types here, so that the report crate need not know them. Files are the command line's.

use homing_engine::api::Snapshot;
use homing_report::Path;
use homing_report::logs::{CandidateLine, DecisionLine, LogKind, LogLine, WorkerSampleLine, duration_s, seconds};
use homing_router::action::{self, Candidate, Decision};
use homing_units::{Instant, WorkerId};
use std::collections::BTreeMap;

/// The lines of all kinds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Logs {
    enabled: bool,
    texts: BTreeMap<LogKind, String>,
}

impl Logs {
    pub(crate) fn new(enabled: bool) -> Self {
        let texts = if enabled {
            LogKind::ALL.map(|kind| (kind, String::new())).into()
        } else {
            BTreeMap::new()
        };
        Self { enabled, texts }
    }

    /// Every kind with its lines, the empty ones too; nothing at all if logs were not asked for.
    pub fn texts(&self) -> impl Iterator<Item = (LogKind, &str)> {
        self.texts.iter().map(|(kind, text)| (*kind, text.as_str()))
    }

    /// The lines of one kind.
    #[must_use]
    pub fn text(&self, kind: LogKind) -> &str {
        self.texts.get(&kind).map_or("", String::as_str)
    }

    /// Whether lines are kept.
    pub(crate) const fn are_wanted(&self) -> bool {
        self.enabled
    }

    /// Adds a line. It is made only if logs were asked for.
    pub(crate) fn add<L: LogLine>(&mut self, line: impl FnOnce() -> L) {
        if self.enabled {
            self.texts.entry(L::KIND).or_default().push_str(&line().to_line());
        }
    }
}

/// The report's word for a path.
pub(crate) const fn path(path: action::Path) -> Path {
    match path {
        action::Path::Append => Path::Append,
        action::Path::Seed => Path::Seed,
        action::Path::Reseed => Path::Reseed,
        action::Path::Migrate => Path::Migrate,
        action::Path::Local => Path::Local,
    }
}

/// A worker's name.
pub(crate) fn name(names: &[String], worker: WorkerId) -> String {
    names[worker.0 as usize].clone()
}

/// The line of a plan.
pub(crate) fn decision_line(now: Instant, decision: &Decision, names: &[String]) -> DecisionLine {
    let candidate = |candidate: &Candidate| CandidateLine {
        path: path(candidate.path),
        prefill_worker: candidate.prefill.map(|worker| name(names, worker)),
        worker: name(names, candidate.decode),
        fetches_from: candidate.fetch.map(|fetch| name(names, fetch.from)),
        resident_tokens: candidate.resident_tokens,
        score: candidate.score.is_finite().then_some(candidate.score),
        forbidden: candidate.forbidden.clone(),
    };
    DecisionLine {
        t: seconds(now),
        request: decision.request.0,
        attempt: decision.attempt,
        session: decision.session.0,
        turn: decision.turn_index,
        path: path(decision.path),
        prefill_worker: decision.prefill.map(|worker| name(names, worker)),
        worker: name(names, decision.decode),
        fetches_from: decision.fetch.map(|fetch| name(names, fetch.from)),
        fetched_tokens: decision.fetch.map(|fetch| fetch.tokens),
        prompt_tokens: decision.prompt_tokens,
        expected_cached_tokens: decision.expected_cached_tokens,
        queued_s: duration_s(decision.queued),
        expected_ttft_s: decision.expected_ttft.map(duration_s),
        reason: decision.reason.clone(),
        candidates: decision.candidates.iter().map(candidate).collect(),
    }
}

/// The line of a worker's load.
pub(crate) fn sample_line(now: Instant, worker: &str, snapshot: &Snapshot, block_size: u32) -> WorkerSampleLine {
    let tokens = |blocks: u32| u64::from(blocks) * u64::from(block_size);
    WorkerSampleLine {
        t: seconds(now),
        worker: worker.to_owned(),
        running: snapshot.running,
        waiting: snapshot.waiting,
        importing: snapshot.importing,
        exporting: snapshot.exporting,
        kv_tokens: tokens(snapshot.blocks_total),
        kv_tokens_used: tokens(snapshot.blocks_total - snapshot.blocks_free - snapshot.blocks_evictable),
        kv_tokens_cached: tokens(snapshot.blocks_evictable),
        prefill_tokens_pending: snapshot.prefill_tokens_pending,
    }
}
