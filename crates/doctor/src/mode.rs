//! The failure modes, as data: one file a mode in `modes/`, compiled in.
//!
//! A mode has the five fields of the failure-mode taxonomy (symptom, root cause, trigger, mitigation, fix), where to look, how
//! bad it is, the one setting to change, and who reported it. Nothing here detects anything.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::LazyLock;

macro_rules! modes {
    ($($(#[doc = $doc:literal])* $variant:ident => $name:literal),* $(,)?) => {
        /// A failure mode's name. The order is that of the catalogue.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        pub enum ModeId {
            $($(#[doc = $doc])* $variant,)*
        }

        impl ModeId {
            /// All modes.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// Its name in commands, documents and files.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }

            const fn text(self) -> &'static str {
                match self {
                    $(Self::$variant => include_str!(concat!("../modes/", $name, ".toml")),)*
                }
            }
        }
    };
}

modes! {
    /// A: transfers that fail because others failed.
    Cascade => "cascade",
    /// B: a decode worker that no session is drawn to.
    ColdDecode => "cold-decode",
    /// C: whole sessions evicted at once.
    EvictStorm => "evict-storm",
    /// C': many large seeds at one time.
    ReseedStorm => "reseed-storm",
    /// D: a broken invariant kills a worker.
    CorrectionCrash => "correction-crash",
    /// Sessions that starve on a worker that is full.
    SessionPin => "session-pin",
    /// Eviction that finds nobody idle.
    IdleOnlyLru => "idle-only-lru",
    /// Turns sent to workers without room.
    NoBackpressure => "no-backpressure",
    /// Questions that wait for the scheduler.
    AdmissionInLoop => "admission-in-loop",
    /// Prefill workers chosen in turn, whatever fails.
    BlindPrefill => "blind-prefill",
    /// Gaps that were divided.
    TimeScale => "time-scale",
    /// Conclusions from one run.
    SingleRun => "single-run",
    /// Aborts that reach one leg only.
    AbortStorm => "abort-storm",
    /// KV held for a worker that died.
    StrandedKv => "stranded-kv",
    /// Failed transfers that are computed again without a word.
    SilentRecompute => "silent-recompute",
    /// An index that survived its worker.
    StaleIndex => "stale-index",
    /// Peers that count as dead for ever.
    PermanentBlacklist => "permanent-blacklist",
    /// Timeouts that count the queue before.
    EarlyClock => "early-clock",
    /// Bookings of requests that ended.
    PhantomLoad => "phantom-load",
    /// Sessions that wait for a worker that is gone.
    VanishedHome => "vanished-home",
    /// An index that only grows.
    IndexGrowth => "index-growth",
    /// Prompts whose head changes.
    PrefixBreaker => "prefix-breaker",
}

impl ModeId {
    /// The mode of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|mode| mode.as_str() == name)
    }

    /// What is known of it.
    #[must_use]
    pub fn mode(self) -> &'static Mode {
        &CATALOGUE[self as usize]
    }
}

impl fmt::Display for ModeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// How bad a mode is where it shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// It bends conclusions and breaks nothing.
    Info,
    /// It costs time.
    Moderate,
    /// It costs much time, or requests.
    Major,
    /// It takes a cluster down.
    Critical,
}

/// What is known of a failure mode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mode {
    /// Its name in a few words.
    pub title: String,
    /// Its letter in the taxonomy, if it has one.
    #[serde(default)]
    pub letter: Option<String>,
    /// How bad it is.
    pub severity: Severity,
    /// The mode that it is a part or a cause of: a finding of that one is right, if less exact.
    #[serde(default)]
    pub parent: Option<ModeId>,
    /// What is seen.
    pub symptom: String,
    /// Why.
    pub root_cause: String,
    /// When.
    pub trigger: String,
    /// What makes it bearable.
    pub mitigation: String,
    /// What makes it go away.
    pub fix: String,
    /// The one setting to change.
    pub setting: String,
    /// Files and log lines that show it.
    pub where_to_look: Vec<String>,
    /// Who described it.
    pub sources: Vec<String>,
}

static CATALOGUE: LazyLock<Vec<Mode>> = LazyLock::new(|| {
    let read = |id: &ModeId| toml::from_str(id.text()).expect("a test reads every mode");
    ModeId::ALL.iter().map(read).collect()
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_has_its_fields() {
        for id in ModeId::ALL {
            let mode: Mode = toml::from_str(id.text()).unwrap_or_else(|error| panic!("{id}: {error}"));
            assert_eq!(id.mode(), &mode);
            assert_eq!(ModeId::from_name(id.as_str()), Some(*id));
            let fields = [
                &mode.title,
                &mode.symptom,
                &mode.root_cause,
                &mode.trigger,
                &mode.mitigation,
                &mode.fix,
                &mode.setting,
            ];
            assert!(fields.iter().all(|field| !field.is_empty()), "{id}");
            assert!(!mode.where_to_look.is_empty() && !mode.sources.is_empty(), "{id}");
            assert_eq!(
                serde_json::to_string(id).expect("a name"),
                format!("\"{id}\""),
                "one name everywhere"
            );
        }
    }

    #[test]
    fn parents_have_no_parents_but_one() {
        for id in ModeId::ALL {
            let parent = id.mode().parent;
            assert_ne!(parent, Some(*id));
            let grandparent = parent.and_then(|parent| parent.mode().parent);
            assert_eq!(grandparent, None, "{id}");
        }
    }
}
