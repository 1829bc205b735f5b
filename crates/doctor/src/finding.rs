//! What detectors say, and in which order it is told: the worst first, by requests that failed and seconds that were lost.
//!
//! A detector says what it saw and what it cost. How loud that is follows from the cost alone, in one place: what failed no
//! request and cost next to nothing of a run's latency is information, whatever it is called.

use crate::mode::{ModeId, Severity};
use serde::{Deserialize, Serialize};

/// Lines of evidence that a finding keeps.
pub const PROOFS_MAX: usize = 8;

/// From this share of a run's requests on, failures are an error and not a warning.
const FAILED_SHARE_ERROR: f64 = 0.01;
/// From this share of a run's latency on, lost seconds are a warning and not information.
const LATENCY_SHARE_WARNING: f64 = 0.05;

/// How loud a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// It is there and costs next to nothing.
    Info,
    /// It costs time, or a few requests.
    Warning,
    /// It costs requests.
    Error,
}

impl Level {
    /// Its name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// What a failure mode cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Requests that failed by it.
    pub failed_requests: u64,
    /// Seconds of latency that it added to others, as far as that can be told.
    pub latency_s: f64,
}

/// A line that shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proof {
    /// The file in the folder that was looked at.
    pub file: String,
    /// The line, from 1; 0 where the file is one document.
    pub line: u32,
    /// What stands there, as far as it matters.
    pub value: String,
}

/// What a detector saw.
#[derive(Clone, Debug, PartialEq)]
pub struct Suspicion {
    /// What it takes it for.
    pub mode: ModeId,
    /// What it cost.
    pub cost: Cost,
    /// What was seen, in a sentence with its figures.
    pub seen: String,
    /// Lines that show it, the most telling first.
    pub proofs: Vec<Proof>,
    /// How loud it is at least, and at most.
    pub bounds: (Level, Level),
}

impl Suspicion {
    /// A suspicion whose loudness follows from its cost.
    #[must_use]
    pub fn new(mode: ModeId, cost: Cost, seen: String, mut proofs: Vec<Proof>) -> Self {
        proofs.truncate(PROOFS_MAX);
        Self {
            mode,
            cost,
            seen,
            proofs,
            bounds: (Level::Info, Level::Error),
        }
    }

    /// Not below this.
    #[must_use]
    pub const fn at_least(mut self, level: Level) -> Self {
        self.bounds.0 = level;
        self
    }

    /// Not above this.
    #[must_use]
    pub const fn at_most(mut self, level: Level) -> Self {
        self.bounds.1 = level;
        self
    }
}

/// What all requests of a run cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Whole {
    /// Requests.
    pub requests: u64,
    /// The sum of their latencies in seconds.
    pub latency_s: f64,
}

/// A failure mode that was found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// Which.
    pub mode: ModeId,
    /// How loud.
    pub level: Level,
    /// What it cost.
    pub cost: Cost,
    /// What was seen.
    pub seen: String,
    /// The mode that it is part of, if that was found, too.
    pub part_of: Option<ModeId>,
    /// The seed of the run in which it was seen, where there are several.
    pub seed: Option<u64>,
    /// Lines that show it.
    pub evidence: Vec<Proof>,
}

impl Finding {
    /// The finding of a suspicion in a run that cost `whole`.
    #[must_use]
    pub fn of(suspicion: Suspicion, whole: Whole, seed: Option<u64>) -> Self {
        let (least, most) = suspicion.bounds;
        Self {
            mode: suspicion.mode,
            level: level_of(suspicion.cost, whole).clamp(least, most.max(least)),
            cost: suspicion.cost,
            seen: suspicion.seen,
            part_of: None,
            seed,
            evidence: suspicion.proofs,
        }
    }
}

fn level_of(cost: Cost, whole: Whole) -> Level {
    if cost.failed_requests as f64 >= FAILED_SHARE_ERROR * whole.requests as f64 && cost.failed_requests > 0 {
        Level::Error
    } else if cost.failed_requests > 0
        || cost.latency_s >= LATENCY_SHARE_WARNING * whole.latency_s && cost.latency_s > 0.0
    {
        Level::Warning
    } else {
        Level::Info
    }
}

/// Puts findings in order: the worst first. One mode that several runs showed is one finding, of the run where it was worst,
/// with the cost of all. Of equals a whole comes before its part.
#[must_use]
pub fn ranked(findings: Vec<Finding>) -> Vec<Finding> {
    let mut merged: Vec<Finding> = Vec::new();
    for finding in findings {
        match merged.iter_mut().find(|other| other.mode == finding.mode) {
            Some(other) => {
                let sum = Cost {
                    failed_requests: other.cost.failed_requests + finding.cost.failed_requests,
                    latency_s: other.cost.latency_s + finding.cost.latency_s,
                };
                if worse(&finding) > worse(other) {
                    *other = finding;
                }
                other.cost = sum;
            }
            None => merged.push(finding),
        }
    }
    merged.sort_by(|left, right| {
        let parts = |finding: &Finding| finding.mode.mode().parent.is_some();
        (worse(right).partial_cmp(&worse(left)))
            .expect("costs are numbers")
            .then(parts(left).cmp(&parts(right)))
            .then(left.mode.cmp(&right.mode))
    });
    let found: Vec<ModeId> = merged.iter().map(|finding| finding.mode).collect();
    for finding in &mut merged {
        finding.part_of = finding.mode.mode().parent.filter(|parent| found.contains(parent));
    }
    merged
}

/// What findings are ordered by.
fn worse(finding: &Finding) -> (Level, u64, f64, Severity) {
    let Cost {
        failed_requests,
        latency_s,
    } = finding.cost;
    (finding.level, failed_requests, latency_s, finding.mode.mode().severity)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: Whole = Whole {
        requests: 1000,
        latency_s: 500.0,
    };

    fn finding(mode: ModeId, failed_requests: u64, latency_s: f64) -> Finding {
        let cost = Cost {
            failed_requests,
            latency_s,
        };
        Finding::of(Suspicion::new(mode, cost, String::new(), Vec::new()), WHOLE, None)
    }

    #[test]
    fn loudness_follows_from_the_cost() {
        let check = |failed, latency_s, expected| {
            assert_eq!(
                finding(ModeId::Cascade, failed, latency_s).level,
                expected,
                "{failed} {latency_s}"
            );
        };
        check(0, 0.0, Level::Info);
        check(0, 24.0, Level::Info);
        check(0, 25.0, Level::Warning);
        check(9, 0.0, Level::Warning);
        check(10, 0.0, Level::Error);
        let free = Suspicion::new(ModeId::SingleRun, Cost::default(), String::new(), Vec::new());
        let loud = Finding::of(free.clone().at_least(Level::Warning), WHOLE, None);
        assert_eq!(loud.level, Level::Warning);
        assert_eq!(Finding::of(free.at_most(Level::Info), WHOLE, None).level, Level::Info);
    }

    #[test]
    fn the_worst_comes_first_and_a_whole_before_its_part() {
        let order = |findings: Vec<Finding>| ranked(findings).iter().map(|found| found.mode).collect::<Vec<_>>();
        use ModeId::{Cascade, ColdDecode, EarlyClock, SessionPin};
        let all = vec![
            finding(ColdDecode, 0, 400.0),
            finding(EarlyClock, 20, 1.0),
            finding(Cascade, 20, 1.0),
            finding(SessionPin, 0, 30.0),
        ];
        assert_eq!(order(all.clone()), [Cascade, EarlyClock, ColdDecode, SessionPin]);
        assert_eq!(ranked(all)[1].part_of, Some(Cascade));
        let twice = ranked(vec![finding(SessionPin, 1, 2.0), finding(SessionPin, 0, 3.0)]);
        assert_eq!((twice.len(), twice[0].cost.failed_requests), (1, 1));
        assert!((twice[0].cost.latency_s - 5.0).abs() < 1e-9);
    }
}
