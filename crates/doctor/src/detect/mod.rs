//! The detectors: one function a mode, from a run's evidence to a suspicion.
//!
//! They see what stands in the logs and nothing else: no policy's or cluster's name, no drill. Where a mode is a matter of the
//! whole folder (its time scale, how many runs there are) the report is asked.

mod bookkeeping;
mod cache;
mod engines;
mod evictions;
mod links;
mod measurement;
mod placement;
mod pressure;

use crate::case::Case;
use crate::evidence::Evidence;
use crate::finding::{Finding, Suspicion, ranked};
use crate::mode::ModeId;

type Detector = fn(&Case<'_>) -> Option<Suspicion>;

/// How each mode is detected.
const fn detector_of(mode: ModeId) -> Detector {
    match mode {
        ModeId::Cascade => links::cascade,
        ModeId::BlindPrefill => links::blind_prefill,
        ModeId::PermanentBlacklist => links::permanent_blacklist,
        ModeId::EarlyClock => links::early_clock,
        ModeId::ColdDecode => placement::cold_decode,
        ModeId::SessionPin => placement::session_pin,
        ModeId::VanishedHome => placement::vanished_home,
        ModeId::EvictStorm => evictions::evict_storm,
        ModeId::IdleOnlyLru => evictions::idle_only_lru,
        ModeId::ReseedStorm => pressure::reseed_storm,
        ModeId::NoBackpressure => pressure::no_backpressure,
        ModeId::AdmissionInLoop => pressure::admission_in_loop,
        ModeId::CorrectionCrash => engines::correction_crash,
        ModeId::SilentRecompute => engines::silent_recompute,
        ModeId::AbortStorm => bookkeeping::abort_storm,
        ModeId::StrandedKv => bookkeeping::stranded_kv,
        ModeId::PhantomLoad => bookkeeping::phantom_load,
        ModeId::StaleIndex => cache::stale_index,
        ModeId::IndexGrowth => cache::index_growth,
        ModeId::PrefixBreaker => cache::prefix_breaker,
        ModeId::TimeScale => measurement::time_scale,
        ModeId::SingleRun => measurement::single_run,
    }
}

/// What went wrong in the runs of a folder, the worst first. Nothing, where nothing did.
#[must_use]
pub fn diagnose(evidence: &Evidence) -> Vec<Finding> {
    let mut findings = Vec::new();
    for logs in &evidence.runs {
        let case = Case::new(logs, evidence.report.as_ref());
        let seen = ModeId::ALL.iter().filter_map(|mode| detector_of(*mode)(&case));
        findings.extend(seen.map(|suspicion| Finding::of(suspicion, case.whole(), logs.seed)));
    }
    ranked(findings)
}
